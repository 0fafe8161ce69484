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
class LoadedModel:
    """A model ready to decode, and where it came from. `revision` is the resolved commit of a Hub model."""

    source: str
    revision: str | None
    folder: Path
    config: ModelConfig
    network: Transformer

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    @cached_property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.folder)


def load_model(source: str, *, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """`source` is a local folder or a Hub id with an optional @revision."""
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    folder, revision = find_model(source)
    config = read_config(folder, lambda: tokenizer_ids(folder))
    network = load_weights(folder, config, dtype=chosen_dtype, device=chosen_device)
    return LoadedModel(source=source, revision=revision, folder=folder, config=config, network=network)


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


def find_model(source: str) -> tuple[Path, str | None]:
    """The model's folder, downloaded if need be, and its resolved commit if it came from the Hub."""
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
