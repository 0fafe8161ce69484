"""Finds a model (bundled, folder or Hub id), picks dtype and device, loads it. Never runs remote code or pickles."""

import hashlib
import os
import re
import time
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import model_info, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HFValidationError,
    HTTPError,  # of the HTTP library that this version of the Hub's client uses
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from sampler.config import ModelConfig, read_config
from sampler.errors import InputError, UnavailableError
from sampler.hub import REQUEST_TIMEOUT_SECONDS, UNREACHABLE, Clock, HubGaveUp, hub_problem, retry_hub
from sampler.model import Transformer
from sampler.text import has_tokenizer, load_tokenizer, tokenizer_ids
from sampler.tiny import BUNDLED_MODEL
from sampler.weights import SINGLE, load_weights

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DESCRIPTION = ["*.json", "*.txt", "*.jinja"]
FILES = [*DESCRIPTION, "*.safetensors"]  # no Python, no pickles
BUNDLED_FOLDER = Path(__file__).resolve().parent / "tiny"


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model that was found but not loaded. `revision` is the resolved commit of a Hub model, or a short hash of the
    bundled model's weights: trained anew, it is another model."""

    source: str
    revision: str | None
    folder: Path
    config: ModelConfig

    @cached_property
    def has_tokenizer(self) -> bool:
        return has_tokenizer(self.folder)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.folder)


@dataclass(frozen=True, kw_only=True)
class LoadedModel(ModelFiles):
    """A model ready to decode."""

    network: Transformer

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype


def load_model(source: str | ModelFiles, *, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """`source` is "tiny", a folder or a Hub id with an optional @revision, or what `find_model` made of it."""
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    files = source if isinstance(source, ModelFiles) else find_model(source)
    network = load_weights(files.folder, files.config, dtype=chosen_dtype, device=chosen_device)
    return LoadedModel(
        source=files.source, revision=files.revision, folder=files.folder, config=files.config, network=network
    )


def find_model(source: str, *, weights: bool = True, clock: Clock = time) -> ModelFiles:
    """The model's files, downloaded if needed, and its configuration. Without `weights` only the small files."""
    folder, revision = _find_folder(source, FILES if weights else DESCRIPTION, clock)
    config = read_config(folder, cache(lambda: tokenizer_ids(folder)))
    return ModelFiles(source=source, revision=revision, folder=folder, config=config)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", name):
        raise InputError(f"unknown device {name!r}: auto, cpu, cuda or cuda:N are allowed")
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device(kind, int(index)) if index else torch.device(kind)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """bfloat16 from compute capability 8 on, float16 on 7.x, else float32."""
    if name == "auto":
        capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
        return torch.bfloat16 if capability >= 8 else torch.float16 if capability == 7 else torch.float32
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}: auto, {', '.join(DTYPES)} are allowed")
    if name == "float16" and device.type == "cpu":
        raise InputError("dtype float16 is not supported on a CPU: use float32 or bfloat16")
    return DTYPES[name]


def _find_folder(source: str, files: list[str], clock: Clock) -> tuple[Path, str | None]:
    """A folder here wins over a Hub repository of the same name; `tiny` is the bundled model, `./tiny` a folder."""
    if source == BUNDLED_MODEL:
        return BUNDLED_FOLDER, _weights_hash(BUNDLED_FOLDER / SINGLE)
    repo, at, revision = source.partition("@")
    if source and os.path.isdir(source):
        return Path(source).resolve(), None
    if os.path.exists(source):
        raise InputError(f"model {source!r} is a file; a folder or a Hub id is allowed")
    if at and not revision:
        raise InputError(f"model {source!r} ends in an empty revision; a branch, tag or commit is allowed after @")
    if os.path.isdir(repo):
        raise InputError(f"model {source!r}: {repo!r} is a folder here, and only Hub ids have an @revision")
    path = _download(source, repo, revision or None, files, clock)
    return path, path.name


def _weights_hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        raise InputError(
            f"the bundled model {BUNDLED_MODEL!r} is not there ({path}); make train-tiny makes it"
        ) from None


def _download(source: str, repo: str, revision: str | None, files: list[str], clock: Clock) -> Path:
    """The snapshot's folder. If the Hub does not answer, an earlier download in the cache is used."""
    fetch = partial(snapshot_download, repo, revision=revision, allow_patterns=files, ignore_patterns=["*/*"])
    try:
        try:  # model_info first: snapshot_download would try an unreachable Hub for half a minute
            retry_hub(lambda: model_info(repo, revision=revision, timeout=REQUEST_TIMEOUT_SECONDS), clock=clock)
            return Path(retry_hub(lambda: fetch(local_files_only=False), clock=clock))
        except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: from Xet downloads
            refusal = error
        return Path(fetch(local_files_only=True))
    except HFValidationError:
        raise InputError(f"model {source!r} is neither a local folder nor a Hub id such as owner/name") from None
    except (HTTPError, OSError):
        raise _refused(source, refusal) from None


def _refused(source: str, error: Exception) -> InputError:
    model = f"model {source!r}"
    if isinstance(error, GatedRepoError):
        return InputError(
            f"{model} is gated: accept its terms on its Hub page, then set HF_TOKEN or log in with `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return InputError(f"{model} is neither a local folder nor a Hub repository that you can read")
    if isinstance(error, RevisionNotFoundError):
        return InputError(
            f"{model} has a revision that does not exist on the Hub; write a branch, tag or commit after @"
        )
    problem = hub_problem(error)
    if isinstance(error, HubGaveUp):
        return UnavailableError(f"{model} cannot be downloaded: {problem}; try again later or use a local folder")
    if problem == UNREACHABLE:
        return UnavailableError(
            f"{model} is not a local folder, and {problem}: use a local folder or connect to the network"
        )
    return InputError(f"{model} cannot be downloaded: {problem}")
