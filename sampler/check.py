"""`reuse-sweep check`: does this device compute what it should, and as fast as it could?

Each check returns a `CheckResult`; a check that does not apply to the device is neither passed nor failed. Nothing here
is specific to CUDA except what torch offers there only, so that a CPU runs most of it.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sampler.config import BUNDLED_MODEL
from sampler.decode import Predictor, decode_prompts
from sampler.device import OperationCounter, forbid_synchronisation, numeric_flags, synchronise
from sampler.engine import Engine, Pass, Prefill, Row
from sampler.loading import BUNDLED_FOLDER, LoadedModel, find_model, load_model, open_checkpoint
from sampler.parity import fixed_tokens, reference_states
from sampler.plan import CacheSpec, PassKind, compute_all
from sampler.policy import ReusePolicy, policy_examples
from sampler.records import DecodeSettings, Pair, Prompt
from sampler.scoring import score_pairs

GOLDEN_FILE = "golden.json"
GOLDEN_SCORE_ERROR = 1e-3  # of a log-likelihood in float32, against float64
MAX_RELATIVE_ERROR = {torch.float32: 5e-5, torch.float16: 0.03, torch.bfloat16: 0.15}  # of a layer's output
MAX_RANGE_SHARE = 0.5  # largest activation relative to the largest number of the dtype
PROMPT_BLOCKS = 3
NEW_TOKENS, FEW_TOKENS = 40, 6  # FEW_TOKENS where a pass is slow: they take a few steps of one block
BATCH = 8
TIMED_PASSES = 12
MAX_TIMING_SECONDS = 10.0
SLOWEST_RATIO = {"cpu": 10.0, "cuda": 5.0}  # a pass relative to reading the weights and starting its operations
COPIED_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
MIN_COPY_BYTES_PER_SECOND = {"cpu": 0.2e9, "cuda": 40e9}
MAX_OPERATION_SECONDS = {"cpu": 500e-6, "cuda": 50e-6}  # to start one operation
SLOW_ATTENTION = ("math", "cudnn")
FAILURES = (RuntimeError, ValueError, AssertionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The outcome of a check. `passed` is None if it does not apply to this device; `values` help with a bug report."""

    name: str
    passed: bool | None
    detail: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        state = {None: "does not apply", True: "passed", False: "failed"}[self.passed]
        return {"check": self.name, "state": state, "detail": self.detail, **self.values}


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on the device, before the model was loaded: free, and needed according to the planner's estimate."""

    free: int
    needed: int


Outcome = tuple[bool | None, str, Mapping[str, Any]]  # passed, detail, values


def run_checks(model: LoadedModel, memory: Memory) -> Iterator[CheckResult]:
    """Runs every check and yields its result; a check that raises has failed, and the next one runs."""
    checks: dict[str, Callable[[], Outcome]] = {
        "golden cases": lambda: check_golden_cases(model),
        "layers": lambda: check_layers(model),
        "batch 1 and 8": lambda: check_batches(model),
        "policies": lambda: check_policies(model),
        "synchronisation": lambda: check_synchronisation(model),
        "attention": lambda: check_attention(model),
        "speed": lambda: check_speed(model),
        "memory": lambda: check_memory(memory),
    }
    for name, run in checks.items():
        try:
            with numeric_flags():
                passed, detail, values = run()
        except FAILURES as error:
            passed, detail, values = False, f"{type(error).__name__}: {_one_line(error)}", {}
        yield CheckResult(name=name, passed=passed, detail=detail, values=values)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def check_golden_cases(model: LoadedModel) -> Outcome:
    """The bundled model in float32, against answers that the reference decoder computed in float64 (golden.json)."""
    copied = _is_copy_of_bundled(model)
    device = str(model.device)
    bundled = load_model(str(model.folder) if copied else BUNDLED_MODEL, dtype="float32", device=device)
    golden = json.loads((BUNDLED_FOLDER / GOLDEN_FILE).read_text(encoding="utf-8"))
    settings = DecodeSettings(max_new_tokens=golden["max_new_tokens"])
    wrong = []
    for number, case in enumerate(golden["generated"]):
        policy, prompt = ReusePolicy.parse(case["policy"]), Prompt(ids=tuple(case["prompt"]))
        ((_, generated),) = decode_prompts(bundled, [prompt], policy=policy, settings=settings, with_text=False)
        if generated.ids != tuple(case["ids"]):
            position = _first_difference(generated.ids, case["ids"])
            wrong.append(f"case {number} ({policy}) differs from token {position} on")
    worst = 0.0
    for case in golden["scored"]:
        pair = Pair(prefix=tuple(case["prefix"]), target=tuple(case["target"]))
        ((_, scored),) = score_pairs(bundled, [pair], policy=ReusePolicy.parse(case["policy"]))
        worst = max(worst, abs(scored.score - case["score"]))
    if not worst <= GOLDEN_SCORE_ERROR:
        wrong.append(f"a log-likelihood is off by {worst:.2g}")
    total = len(golden["generated"]) + len(golden["scored"])
    what = "this copy of the bundled model" if copied else "the bundled model"
    if wrong:
        return False, f"{what} does not give the reference's answers in float32: {wrong[0]}", {"differences": wrong}
    return True, f"{total} of {total} in float32; log-likelihoods within {worst:.1g}", {"score_error": worst}


def _is_copy_of_bundled(model: LoadedModel) -> bool:
    """Whether most tensors are those of the bundled model: a copy, perhaps with corrupted ones."""
    bundled = find_model(BUNDLED_MODEL)
    if model.folder == bundled.folder or model.config != bundled.config:
        return False
    read, read_bundled = (open_checkpoint(files.folder, files.config) for files in (model, bundled))
    names = [f"model.layers.{n}.mlp.down_proj.weight" for n in range(model.config.num_layers)]
    return sum(torch.equal(read(name), read_bundled(name)) for name in names) > len(names) / 2


def _first_difference(ours: Sequence[int], expected: Sequence[int]) -> int:
    """The first index at which two different sequences differ."""
    differing = (n for n, (a, b) in enumerate(zip(ours, expected, strict=False)) if a != b)
    return next(differing, min(len(ours), len(expected)))


def check_layers(model: LoadedModel) -> Outcome:
    """Each layer's output in the model's dtype, against a plain float32 forward from the checkpoint's tensors."""
    states: list[Tensor] = []
    tokens = fixed_tokens(model.config, 0, PROMPT_BLOCKS * model.config.block_size)

    def recorded(layer: Any) -> Any:
        def run(*arguments: Any) -> Tensor:
            states.append(layer.run(*arguments))
            return states[-1]

        return _Altered(layer, run=run)

    _run_passes(replace(model.network, layers=[recorded(layer) for layer in model.network.layers]), 1, lambda: ())
    read = open_checkpoint(model.folder, model.config)
    errors, largest = [], 0.0
    for index, (expected, inner) in enumerate(reference_states(read, model.config, tokens, model.device)):
        ours = states[index][: len(tokens)].float()
        largest = max(largest, inner)
        if not bool(ours.isfinite().all()):
            what = "NaN" if bool(ours.isnan().any()) else "infinity"
            return False, f"layer {index} computes {what}; activations reach {largest:.3g}", {}
        errors.append(float((ours - expected).norm() / expected.norm()))
    worst, limit = max(errors), MAX_RELATIVE_ERROR[model.dtype]
    share = largest / torch.finfo(model.dtype).max
    dtype = str(model.dtype).removeprefix("torch.")
    values = {"relative_errors": errors, "largest_activation": largest, "share_of_range": share, "dtype": dtype}
    passed = worst <= limit and share <= MAX_RANGE_SHARE
    if passed:
        detail = f"{dtype} within {worst:.1g} of float32; activations up to {largest:.3g} ({share:.1g} of range)"
    elif worst <= limit:
        detail = f"activations reach {largest:.3g}, {share:.0%} of the largest {dtype}: use another dtype"
    else:
        first = next(index for index, error in enumerate(errors) if not error <= limit)
        detail = f"layer {first} differs from float32 by {errors[first]:.2g}, more than {limit:g} of its norm"
    return passed, detail, values


class _Altered:
    """An object with some of its methods replaced."""

    def __init__(self, inner: Any, **methods: Callable[..., Any]) -> None:
        self.inner = inner
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _within(context: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `function` inside a context."""

    def call(*arguments: Any) -> Any:
        with context():
            return function(*arguments)

    return call


def check_batches(model: LoadedModel) -> Outcome:
    """The same documents, decoded one by one and eight at a time."""
    alone, together = (_decode(model, "k1", documents=BATCH, batch_size=size) for size in (1, BATCH))
    differing = [number for number in range(BATCH) if alone[number] != together[number]]
    if differing:
        position = _first_difference(alone[differing[0]], together[differing[0]])
        detail = f"{len(differing)} of {BATCH} documents differ, document {differing[0]} from token {position} on"
        return False, detail, {"differing": differing}
    return True, f"{BATCH} of {BATCH} documents have the same tokens", {}


def check_policies(model: LoadedModel) -> Outcome:
    """Every policy decodes, and those that can also score; replays are checked by the engine."""
    pair = Pair(prefix=fixed_tokens(model.config, 1, 50), target=fixed_tokens(model.config, 2, 2))
    tokens = {}
    for name in policy_examples():
        try:
            tokens[name] = len(_decode(model, name, tokens=NEW_TOKENS // 2)[0])
            policy = ReusePolicy.parse(name)
            if policy.rule.no_scoring_reason is None:
                list(score_pairs(model, [pair], policy=policy))
        except FAILURES as error:
            return False, f"{name}: {_one_line(error)}", {"policy": name}
    return True, f"{len(tokens)} policies decode and score", {"tokens": tokens}


def check_synchronisation(model: LoadedModel) -> Outcome:
    """No pass and no decision of a policy makes the host wait; only reading the result of a pass may."""

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        return _within(lambda: forbid_synchronisation(model.device), function)

    def bind(policy: ReusePolicy, depth: int, subset_size: int | None = None) -> Any:
        bound = policy.bind(depth, subset_size)
        return _Altered(bound, plan=guarded(bound.plan))

    network: Any = _Altered(model.network, forward=guarded(model.network.forward))
    names = policy_examples()
    for name in names:
        policy = _Altered(None, bind=partial(bind, ReusePolicy.parse(name)))
        try:
            _decode(replace(model, network=network), policy, tokens=FEW_TOKENS)
        except RuntimeError as error:
            return False, f"{name}: {_one_line(error)}", {"policy": name}
    return True, f"the forward passes and decisions of {len(names)} policies do not wait for the device", {}


def check_attention(model: LoadedModel) -> Outcome:
    """Which attention kernels torch chooses for prefill, full and small passes, in batches of 1 and 8."""
    chosen: dict[str, str] = {}
    for batch in (1, BATCH):
        for kind in (PassKind.PREFILL, PassKind.FULL, PassKind.SMALL):
            kernels = _record_pass(model, kind, batch).attention
            names = ", ".join(name.strip("_").removeprefix("scaled_dot_product_") for name in kernels)
            chosen[f"{kind.value}, batch {batch}"] = names or "math"
    slow = {shape: name for shape, name in chosen.items() if any(word in name for word in SLOW_ATTENTION)}
    listed = ", ".join(sorted(set(chosen.values())))
    if slow and model.device.type == "cuda":
        shape, name = next(iter(slow.items()))
        return False, f"{shape} uses {name}, which is slow", {"attention": chosen}
    return True, f"{listed} for {len(chosen)} shapes", {"attention": chosen}


def check_speed(model: LoadedModel) -> Outcome:
    """A full pass at batch 1 against reading the weights once and starting as many operations one by one.

    The three are timed in alternation, and the fastest of each counts, so that the ratio holds on a busy machine.
    """
    kind, device = model.device.type, model.device
    recorder = _record_pass(model, PassKind.FULL, 1)
    count = recorder.kernels.total()
    state = torch.zeros((model.config.block_size, model.config.hidden_size), dtype=model.dtype, device=device)
    source = torch.zeros(COPIED_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    parts: dict[str, Callable[[], object]] = {
        "operation": lambda: state * 1.0,
        "copy": lambda: target.copy_(source),
    }
    seconds = _fastest(model, parts)
    operation, bandwidth = seconds["operation"], 2 * COPIED_BYTES[kind] / seconds["copy"]
    weights = sum(model.config.layer_weights) * model.config.num_layers
    weights += model.config.vocab_size * model.config.hidden_size
    reading = weights * model.dtype.itemsize / bandwidth
    expected = reading + count * operation
    ratio = seconds["pass"] / expected
    values = {
        "operations_per_pass": count,
        "transfers_per_pass": {"to_device": recorder.to_device, "to_host": recorder.to_host},
        "pass_ms": 1e3 * seconds["pass"],
        "reading_weights_ms": 1e3 * reading,
        "operation_us": 1e6 * operation,
        "copy_gb_per_s": bandwidth / 1e9,
        "ratio": ratio,
    }
    text = f"{count} operations and {1e3 * seconds['pass']:.3g} ms per pass, {1e3 * reading:.2g} ms to read the weights"
    if bandwidth < MIN_COPY_BYTES_PER_SECOND[kind]:
        return False, f"the device copies only {bandwidth / 1e9:.2g} GB/s (shared or throttled?); {text}", values
    if operation > MAX_OPERATION_SECONDS[kind]:
        return False, f"the host needs {1e6 * operation:.0f} µs to start an operation (overloaded?); {text}", values
    if kind == "cpu" and model.dtype is not torch.float32:
        return None, f"{text}; a CPU may have to emulate this dtype", values
    limit = SLOWEST_RATIO[kind]
    if ratio > limit:
        return False, f"{text}: {ratio:.1f} times as long as expected, more than {limit:g}", values
    return True, f"{text}; {ratio:.1f} times as long as expected (limit {limit:g})", values


def check_memory(memory: Memory) -> Outcome:
    values = {"free_bytes": memory.free, "needed_bytes": memory.needed}
    text = f"about {memory.needed / 1e9:.3g} GB are needed at batch {BATCH}, and {memory.free / 1e9:.3g} GB were free"
    return memory.needed <= memory.free, text, values


def _decode(
    model: LoadedModel, policy: Any, *, documents: int = 1, batch_size: int = 1, tokens: int = NEW_TOKENS
) -> list[tuple[int, ...]]:
    """The tokens of each document; at most FEW_TOKENS where a CPU has to emulate the dtype."""
    config = model.config
    slow = model.device.type == "cpu" and model.dtype is not torch.float32
    settings = config.decode_settings({}, max_new_tokens=FEW_TOKENS if slow else tokens)
    prompts = [Prompt(ids=fixed_tokens(config, n, config.block_size + 7 * n + 5)) for n in range(documents)]
    parsed = ReusePolicy.parse(policy) if isinstance(policy, str) else policy
    generated = dict(
        decode_prompts(model, prompts, policy=parsed, settings=settings, batch_size=batch_size, with_text=False)
    )
    return [generated[number].ids for number in range(documents)]


def _run_passes(network: Any, rows: int, kinds: Callable[[], Iterable[PassKind]]) -> None:
    """Prefills each row, then runs passes of these kinds over its next block."""
    config = network.config
    start, size = PROMPT_BLOCKS * config.block_size, config.block_size

    def row(number: int) -> Row[None]:
        tokens = fixed_tokens(config, number, start + size)
        yield Prefill(tokens=tokens[:start])
        for kind in kinds():
            width = config.decode_defaults["small_block"] if kind is PassKind.SMALL else size
            yield Pass(
                kind=kind,
                start=start,
                tokens=tokens[start : start + width],
                plan=compute_all(config.num_layers),
                read=(0,),
                queries=(0.0,),
            )

    predictor = Predictor(mask_token_id=config.mask_token_id)
    engine: Engine[None] = Engine(
        network, cache_spec=CacheSpec(), slots=rows, capacity=start + size, reader=predictor, reads=1
    )
    list(engine.run(map(row, range(rows))))


def _record_pass(model: LoadedModel, kind: PassKind, batch: int) -> OperationCounter:
    """The operations in the forward of one pass of this kind, which runs after those that it needs."""
    recorder, recording = OperationCounter(model.device), kind is PassKind.PREFILL

    def watch() -> AbstractContextManager[Any]:
        return recorder if recording else nullcontext()

    def kinds() -> Iterator[PassKind]:
        nonlocal recording
        if kind is not PassKind.PREFILL:
            yield PassKind.FULL
            recording = True
            yield kind

    _run_passes(_Altered(model.network, forward=_within(watch, model.network.forward)), batch, kinds)
    return recorder


def _fastest(model: LoadedModel, parts: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of the fastest full pass at batch 1, and of each other part, repeated for as long as a pass takes."""
    times: dict[str, list[float]] = {name: [] for name in ("pass", *parts)}

    def now() -> float:
        synchronise(model.device)
        return time.perf_counter()

    def repeated(part: Callable[[], object], seconds: float) -> float:
        began, count = now(), 0
        while time.perf_counter() - began < seconds or not count:
            for _ in range(16):
                part()
            count += 16
            if count % 256 == 0:
                now()  # the queue of a GPU is long; the clock must not run ahead of it
        return (now() - began) / count

    def kinds() -> Iterator[PassKind]:
        until = now() + MAX_TIMING_SECONDS
        while len(times["pass"]) < TIMED_PASSES and not (now() > until and len(times["pass"]) > 1):
            began = now()
            yield PassKind.FULL
            times["pass"].append(now() - began)
            for name, part in parts.items():
                times[name].append(repeated(part, times["pass"][-1]))

    _run_passes(model.network, 1, kinds)
    return {name: min(seconds[1:] or seconds) for name, seconds in times.items()}
