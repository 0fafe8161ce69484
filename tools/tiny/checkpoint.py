"""A training run on disk: tensors and a few numbers in one safetensors file, replaced as a whole. No pickles."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sampler.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run has come. `run` says which one: its data, seed, budget and shape."""

    run: str
    step: int = 0
    seconds: float = 0.0
    examples: int = 0
    grew_at: int = 0  # the step before which the network grew last


def save(path: Path, tensors: Mapping[str, Tensor], progress: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    save_file(dict(tensors), fresh, metadata={"progress": json.dumps(asdict(progress))})
    os.replace(fresh, path)


def load(path: Path, run: str) -> tuple[dict[str, Tensor], Progress] | None:
    """The state of this run, or None where there is no checkpoint yet; one of another run is refused."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            progress = Progress(**json.loads((file.metadata() or {})["progress"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path} is no checkpoint of this program, or a damaged one; remove it") from None
    if progress.run != run:
        raise InputError(
            f"{path} belongs to a run with other data, seed or budget; remove it, or name another --checkpoint"
        )
    return tensors, progress
