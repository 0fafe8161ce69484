"""What a person may choose about a sweep, checked at birth. Knows no command line, no model, no documents."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from orchestrator.core.errors import InputErrors, Problems
from orchestrator.planning.values import shown
from sampler.errors import InputError
from sampler.policy import ReusePolicy

DTYPES = ("auto", "float32", "bfloat16", "float16")
MODES = ("residual", "output")
PERIODS = (1, 2, 3)
PLACES = ("first", "middle", "last")
SHARE = 0.01  # of a GPU or core: the least that an actor may ask for
WEEK = 604_800  # seconds
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
RESOURCE = re.compile(r"([A-Za-z_][^=,\s]*)=([0-9]*\.?[0-9]+)")
CALLBACK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(?:\?(.*))?")  # scheme, host, path, options
UPLOAD_SCHEMES = ("s3", "gs", "file")
SECRET_OPTION = re.compile(r"key|secret|token|password|credential|signature", re.IGNORECASE)


def policies_of(
    periods: Sequence[int] = PERIODS, subsets: Sequence[str] = PLACES, modes: Sequence[str] = ("residual",)
) -> tuple[str, ...]:
    """A grid of policies. k1 stays one for each subset, the same thing by definition: they show the noise.

    A mode says how layers are replayed; k1 replays none, so it is made once whatever the modes.
    """
    problems = Problems()
    for flag, values, allowed in (
        ("k", periods, "whole numbers such as 1,2,3 are allowed"),
        ("subsets", subsets, "first, middle, last, all or layers such as 4-9+20 are allowed"),
        ("reuse", modes, f"{' or '.join(MODES)} is allowed, or both"),
    ):
        problems.sentences += [] if values else [f"--{flag} is empty: {allowed}"]
    for mode in modes:
        problems.sentences += [] if mode in MODES else [f"--reuse {mode}: {' or '.join(MODES)} is allowed, or both"]
    for k in periods:
        with problems.collect():
            ReusePolicy.grid(k=k, layers="first")
    places: list[str] = []
    for subset in subsets:
        with problems.collect():
            places.append(str(ReusePolicy.grid(k=1, layers=subset).layers))
    for flag, values in (("k", periods), ("subsets", places), ("reuse", modes)):
        twice = _repeated(values)
        problems.sentences += [] if twice is None else [_twice(flag, twice)]
    problems.check()
    return tuple(
        str(ReusePolicy.grid(k=k, layers=place, mode=mode if k > 1 else "residual"))
        for k in periods
        for place in places
        for mode in (modes if k > 1 else modes[:1])
    )


def _repeated(values: Sequence[object]) -> object | None:
    return next((value for place, value in enumerate(values) if value in values[:place]), None)


def _twice(flag: str, value: object) -> str:
    return f"--{flag} names {value} twice: each value once is allowed"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSettings:
    """Everything about a sweep that a person chooses; None and auto are decided later, from model and machine."""

    tasks: tuple[str, ...]
    policies: tuple[str, ...] = policies_of()
    threshold: tuple[float, ...] = (0.95,)
    small_block: tuple[int, ...] = (8,)
    block_cache: tuple[bool, ...] = (True,)

    model: str = "auto"
    data: str = "auto"
    limit: int | None = None  # the first N documents, of each subject in a group
    sample: int | None = None  # a random N
    fewshot: int | None = None
    chat_template: bool = True
    subset_size: int | None = None
    dtype: str = "auto"
    batch_size: int = 1
    max_new_tokens: int | None = None
    repeats: int = 1
    seed: int = 0
    shard_size: int = 50

    actors: int | None = None
    gpus_per_actor: float | None = None
    cpus_per_actor: float | None = None
    threads_per_actor: int | None = None
    accelerator_type: str | None = None  # Ray's name of a GPU model, such as A100
    resources: tuple[str, ...] = ()  # NAME=AMOUNT of Ray's custom resources, for each actor
    address: str | None = None
    wait_for_nodes: float = 1800.0  # seconds for a cluster that can grow to bring its first node
    dashboard: bool = True
    callback: tuple[str, ...] = ()  # module:Class of Ray Tune callbacks
    worker_timeout: float = 600.0  # seconds without a sign of life, or for one batch of documents

    out: str = "results"
    name: str | None = None  # None: as the model is called
    upload: str | None = None  # URL of a folder that gets a copy of the sweep
    skip_unavailable: bool = False
    allow_code_execution: bool = False
    unsafe_code_execution: bool = False
    margin: float = 5.0  # percentage points that accuracy may drop; declared before the run
    speedup: float = 1.2  # that counts as one; declared before the run
    quiet: bool = False

    def __post_init__(self) -> None:
        problems = [*self._list_problems(), *self._number_problems(), *self._text_problems()]
        canonical = []
        for name in self.policies:
            try:
                canonical.append(str(ReusePolicy.parse(name)))
            except InputError as error:
                problems.append(f"--policies: {error}")
        twice = _repeated(canonical)
        if twice is not None:
            problems.append(_twice("policies", twice))
        if problems:
            raise InputErrors(problems)
        object.__setattr__(self, "policies", tuple(canonical))
        object.__setattr__(self, "threshold", tuple(float(value) for value in self.threshold))

    def _list_problems(self) -> Iterator[str]:
        for name in LISTS:
            values = getattr(self, name)
            if not values or "" in values:
                yield f"{_flag(name)} {'is empty' if not values else 'holds an empty name'}: {LISTS[name]}"
            twice = _repeated(values)
            if twice is not None and name != "policies":  # those are compared by their canonical names
                yield _twice(name.replace("_", "-"), {True: "on", False: "off"}.get(twice, twice))  # type: ignore[call-overload]
        for threshold in self.threshold:
            if not 0 < threshold <= 1:
                yield f"--threshold {threshold}: a number above 0 and at most 1 is allowed"
        for size in self.small_block:
            if size < 1:
                yield f"--small-block {size}: a divisor of the model's block, such as 8, is allowed"

    def _number_problems(self) -> Iterator[str]:
        for name, least in LEAST.items():
            value = getattr(self, name)
            most = MOST.get(name, value)
            if value is not None and not least <= value <= most:
                bound = f"of at least {least}" if value < least else f"up to {most:,}"
                yield f"{_flag(name)} {shown(value)}: a whole number {bound} is allowed"
        if self.limit is not None and self.sample is not None:
            yield "--limit and --sample exclude each other: the first N documents or a random N"
        gpus, cpus = self.gpus_per_actor, self.cpus_per_actor
        if gpus is not None and not (gpus == 0 or SHARE <= gpus <= 1):
            yield (
                f"--gpus-per-actor must be 0 or between {SHARE} and 1 (got {shown(gpus)}): "
                "an actor decodes on one device, and several actors use several"
            )
        if gpus == 0 and self.accelerator_type is not None:
            yield f"--accelerator-type {self.accelerator_type} needs --gpus-per-actor above 0 (got 0)"
        if cpus is not None and not SHARE <= cpus < math.inf:
            yield f"--cpus-per-actor {cpus}: a number of at least {SHARE} is allowed"
        if not 1 <= self.worker_timeout <= WEEK:
            yield f"--worker-timeout {self.worker_timeout}: seconds, from 1 to a week's {WEEK}, are allowed"
        if not 0 <= self.wait_for_nodes <= WEEK:
            yield f"--wait-for-nodes must be between 0 and {WEEK} seconds (got {shown(self.wait_for_nodes)})"
        if not 0 < self.margin < 100:
            yield f"--margin {self.margin}: percentage points above 0 and below 100 are allowed"
        if not (self.speedup > 1 and math.isfinite(self.speedup)):
            yield f"--speedup {self.speedup}: a factor above 1, such as 1.2, is allowed"

    def _text_problems(self) -> Iterator[str]:
        for name in ("model", "data", "out", "address", "accelerator_type", "upload"):
            if getattr(self, name) == "":
                yield f"{_flag(name)} is empty: leave it out or give a value"
        for resource in self.resources:
            match = RESOURCE.fullmatch(resource)
            if match is None or float(match[2]) <= 0:
                yield f"--resources must be NAME=AMOUNT with an amount above 0, such as highmem=1 (got {resource!r})"
            elif match[1].upper() in ("CPU", "GPU"):
                yield f"--resources {resource}: use --{match[1].lower()}s-per-actor instead"
        for callback in self.callback:
            if not CALLBACK.fullmatch(callback):
                yield f"--callback must be MODULE:CLASS, such as my_package.callbacks:MyCallback (got {callback!r})"
        if self.address is not None and self.address.startswith("ray://"):
            yield (
                f"--address {self.address}: Ray Client is not supported; run the sweep on the cluster with "
                "`ray job submit`, or give the address of its head, such as HOST:6379"
            )
        if self.upload:
            yield from _upload_problems(self.upload)
        if self.dtype not in DTYPES:
            yield f"--dtype {self.dtype}: {', '.join(DTYPES)} are allowed"
        if self.name is not None and not NAME.fullmatch(self.name):
            yield (
                f"--name {self.name!r} is no name of a folder: up to 100 letters, digits and . _ + - are allowed, "
                "a letter or digit first"
            )

    @property
    def custom_resources(self) -> dict[str, float]:
        """Ray's custom resources that each actor needs, by name."""
        return {name: float(amount) for name, amount in (resource.split("=") for resource in self.resources)}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SweepSettings":
        """From sweep.json; settings of a newer version are ignored."""
        known = {field.name for field in fields(cls)}
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name in known
        }
        if (plain.get("gpus_per_actor") or 0) > 1:  # older versions allowed it, and used one device all the same
            plain["gpus_per_actor"] = 1.0
        return cls(**plain)


LISTS = {
    "tasks": "name tasks such as gsm8k,minerva_math (python -m tasks.list shows them)",
    "policies": "name policies such as k1,k2_middle",
    "threshold": "numbers above 0 and at most 1 are allowed",
    "small_block": "whole numbers are allowed",
    "block_cache": "on, off or both are allowed",
}
LEAST = {
    "limit": 1,
    "sample": 1,
    "fewshot": 0,
    "subset_size": 1,
    "batch_size": 1,
    "max_new_tokens": 1,
    "repeats": 1,
    "seed": 0,
    "shard_size": 1,
    "actors": 1,
    "threads_per_actor": 1,
}
MOST = {  # beyond any use, and what comes after would drown in it or not know what to do with it
    "limit": 10**9,
    "sample": 10**9,
    "fewshot": 1000,
    "batch_size": 10**4,
    "max_new_tokens": 10**6,
    "repeats": 1000,
    "seed": 2**32 - 1,
    "shard_size": 10**9,
    "actors": 10**5,
    "threads_per_actor": 1024,
}


def is_url(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def _upload_problems(url: str) -> Iterator[str]:
    """Without what may be a secret in it."""
    match = URL.fullmatch(url)
    if match is None or match[1] not in UPLOAD_SCHEMES:
        got = f"{url.partition('://')[0]}://…" if is_url(url) else "no URL"
        yield f"--upload must be a URL such as s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER (got {got})"
        return
    scheme, host, path, options = match.groups(default="")
    names = [option.partition("=")[0] for option in options.split("&")]
    user, at, _ = host.rpartition("@")
    if (at and (scheme, user) != ("gs", "anonymous")) or "@" in options or any(map(SECRET_OPTION.search, names)):
        yield "--upload must not contain credentials: put them into the environment, such as AWS_ACCESS_KEY_ID"
    elif scheme == "file" and (host or not path):
        yield f"--upload {url}: a file URL needs an absolute path, such as file:///data/copies"
    elif scheme != "file" and not host:
        yield f"--upload {url} names no bucket: it must look like {scheme}://BUCKET/FOLDER"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
