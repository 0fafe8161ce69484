"""Models small enough that the oracle is quick: the golden m28 cut to its first eight layers."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from golden_cases import model_folder
from oracle.decoder import ReferenceModel
from safetensors.torch import load_file, save_file

from sampler import LoadedModel, load_model

DEPTH = 8  # first, middle and last name two layers each


@cache
def shallow_folder() -> Path:
    folder = Path(mkdtemp(prefix="shallow-"))
    config = json.loads((model_folder("m28") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": DEPTH}))
    tensors = load_file(model_folder("m28") / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if "layers." not in name or int(name.split(".")[2]) < DEPTH}
    save_file(kept, folder / "model.safetensors")
    return folder


@cache
def shallow() -> LoadedModel:
    return load_model(str(shallow_folder()))


@cache
def shallow_oracle() -> ReferenceModel:
    return ReferenceModel.load(shallow_folder())


@cache
def golden_model(name: str) -> LoadedModel:
    return load_model(str(model_folder(name)))
