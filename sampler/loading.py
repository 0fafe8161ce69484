"""Finds a model (local folder or Hub id), picks dtype and device, loads it. Never runs remote code or pickles."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from sampler.config import ModelConfig, read_config
from sampler.errors import InputError
from sampler.model import Transformer
from sampler.text import load_tokenizer, tokenizer_ids
from sampler.weights import load_weights

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]  # no Python, no pickles


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model that was found but not loaded. `revision` is the resolved commit of a Hub model."""

    source: str
    revision: str | None
    folder: Path
    config: ModelConfig

    @cached_property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))

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
    """`source` is a local folder or a Hub id with an optional @revision, or what `find_model` made of it."""
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    files = source if isinstance(source, ModelFiles) else find_model(source)
    network = load_weights(files.folder, files.config, dtype=chosen_dtype, device=chosen_device)
    return LoadedModel(
        source=files.source, revision=files.revision, folder=files.folder, config=files.config, network=network
    )


def find_model(source: str) -> ModelFiles:
    """The model's files, downloaded if need be, and its configuration."""
    folder, revision = _find_folder(source)
    config = read_config(folder, lambda: tokenizer_ids(folder))
    return ModelFiles(source=source, revision=revision, folder=folder, config=config)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}: auto, cpu, cuda or cuda:N are allowed") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported: auto, cpu, cuda or cuda:N are allowed")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


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


def _find_folder(source: str) -> tuple[Path, str | None]:
    folder = Path(source)
    if folder.is_dir():
        return folder.resolve(), None
    if folder.exists():
        raise InputError(f"model {source!r} is a file; a folder or a Hub id is allowed")
    repo, _, revision = source.partition("@")
    try:
        path = Path(snapshot_download(repo, revision=revision or None, allow_patterns=FILES))
    except HFValidationError:
        raise InputError(f"model {source!r} is neither a folder here nor a Hub id such as owner/name") from None
    except GatedRepoError:
        raise InputError(
            f"model {source!r} is gated: accept its terms on its Hub page, then set HF_TOKEN or log in"
        ) from None
    except RevisionNotFoundError:
        raise InputError(f"model {repo!r} has no revision {revision!r} on the Hub") from None
    except RepositoryNotFoundError:
        raise InputError(f"model {source!r} is neither a folder here nor a repository on the Hub") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        raise InputError(
            f"model {source!r} is no folder here, and the Hub cannot be reached: give a local folder or go online"
        ) from None
    return path, path.name
