"""`reuse-sweep bench`: measures the passes of a model; `reuse-sweep bench sweep`: where a sweep spends its time."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.console import Parser, announce, parse_options, sub_command
from orchestrator.cli.sampling import ModelOptions, SourceOptions
from orchestrator.planning.fields import setting, shared
from orchestrator.planning.settings import SweepSettings, check_policy
from sampler.errors import InputError, counted
from sampler.policy import ReusePolicy

if TYPE_CHECKING:
    from orchestrator.core.totals import Totals
    from orchestrator.progress.progress import Timeline
    from sampler.measure import Bench

SWEEP_NAME = "bench"
POLICIES = (
    *(f"k{k}_{subset}{mode}" for mode in ("", ".output") for k in (2, 3) for subset in ("first", "middle", "last")),
    *(f"{rule}_middle" for rule in ("adaptive=0.2", "trim=0.1", "trim=0.25", "mlp=2", "attn=2", "skip")),
    "stale=2",
)
PASSES_EXAMPLES = """examples:
  reuse-sweep bench                                   random weights in a small shape, one thread
  reuse-sweep bench --model mid --batch-size 1,8 --json
  reuse-sweep bench --model mid --batch-size 8 --policies trim=0.1_all,mlp=2_middle
  reuse-sweep bench --model Efficient-Large-Model/Fast_dLLM_v2_7B --batch-size 1,4,8
  reuse-sweep bench sweep --limit 20                  see `reuse-sweep bench sweep --help`
"""
SWEEP_EXAMPLES = """examples:
  reuse-sweep bench sweep                    nine policies on 100 documents each of gsm8k and minerva_math
  reuse-sweep bench sweep --limit 20
  reuse-sweep bench sweep --model DIR --data DIR --tasks gsm8k --actors 4 --json
"""
TIMELINE_PARTS = {
    "decoding": "decoding",
    "calibration": "calibration before and during trials",
    "scoring": "scoring, and assembling batches of rows",
    "waiting": "waiting for rows to be on disk",
    "finishing": "writing the rows of a trial to one file",
    "between": "between two trials of an actor",
    "idle": "before the first and after the last trial",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PassesOptions:
    model: str = setting(
        "tiny",
        aliases=("shape",),
        metavar="MODEL",
        help="tiny, mid or mid-qwen3 (shapes with random weights), a directory or a Hub id",
    )
    threads: int = shared(SourceOptions, "threads")
    batch_size: tuple[int, ...] = setting(
        (1, 4, 8), aliases=("batch",), metavar="N,N", minimum=1, cap=10**4, help="batch sizes"
    )
    policies: tuple[str, ...] = setting(
        POLICIES,
        metavar="P,P",
        check=check_policy,
        default_text="19 policies",
        help="policies to measure, at the first batch size",
    )
    rounds: int = setting(20, minimum=1, help="number of measurements per median")
    dtype: str = shared(SweepSettings, "dtype")
    device: str = shared(ModelOptions, "device")
    compile: bool = shared(SweepSettings, "compile")
    json: bool = setting(False, help="print JSON instead of a table")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepBenchOptions:
    tasks: tuple[str, ...] = setting(("gsm8k", "minerva_math"), metavar="A,B", help="benchmarks to run")
    policies: tuple[str, ...] | None = setting(
        None, metavar="P,P", check=check_policy, default_text="the nine of `reuse-sweep sweep`", help="policies to run"
    )
    limit: int = shared(SweepSettings, "limit", default=100, default_text="100")
    model: str = shared(SweepSettings, "model")
    data: str = shared(SweepSettings, "data")
    max_new_tokens: int | None = shared(SweepSettings, "max_new_tokens")
    actors: int = shared(SweepSettings, "actors", default=2, default_text="2")
    threads: int = shared(SourceOptions, "threads")
    out: Path | None = setting(None, metavar="DIR", default_text="not kept", help="keep the sweep in DIR/bench")
    json: bool = setting(False, help="print JSON instead of a table")


def bench(arguments: Sequence[str]) -> None:
    if sub_command("bench", arguments, ["sweep"]):
        bench_sweep(arguments[1:])
        return
    parser = Parser(
        prog="reuse-sweep bench",
        description="Measures the speed of a model with random or real weights: passes, policies, prefill and scoring.",
        examples=PASSES_EXAMPLES,
    )
    options = parse_options(parser, PassesOptions, arguments)
    policies = [str(ReusePolicy.parse(name)) for name in options.policies]
    announce(f"measuring {options.model}")
    import torch

    from orchestrator.planning.estimate import check_model_fits
    from sampler.device import pick_device, pick_dtype
    from sampler.loading import find_model, load_model, random_model
    from sampler.measure import SHAPES, Bench

    torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    files = None if options.model in SHAPES else find_model(options.model)
    config = SHAPES[options.model] if files is None else files.config
    for name in policies:
        ReusePolicy.parse(name).bind(config.num_layers)
    check_model_fits(config, options.dtype, device, batch_size=max(options.batch_size))
    if files is None:
        model = random_model(config, dtype=dtype, device=device, compiled=options.compile)
    else:
        model = load_model(files, dtype=options.dtype, device=options.device, compiled=options.compile)
    small = options.model == "tiny"
    measured = Bench(model, rounds=options.rounds, new_tokens=96 if small else 40, questions=200 if small else 10)
    dtype_name = str(model.dtype).removeprefix("torch.")
    where = (
        f"{options.model}: {dtype_name} on {device}, {counted(options.threads, 'thread')}, torch {torch.__version__}"
    )
    figures = {"where": where, **measure_passes(measured, options.batch_size, policies)}
    print(json.dumps(figures, indent=1) if options.json else passes_table(figures))


def measure_passes(bench: "Bench", batches: Sequence[int], policies: Sequence[str] = POLICIES) -> dict[str, Any]:
    """Times of passes, decoding, prefill and scoring."""
    from sampler.plan import PassKind

    kinds = (PassKind.FULL, PassKind.SMALL)
    passes = {batch: {kind.value: bench.pass_times(kind, batch) for kind in kinds} for batch in batches}
    speeds = {batch: bench.decode(2 * batch, batch)[0] for batch in batches}
    return {
        "passes": {
            str(batch): {kind: {**asdict(t), "ratio": t.computed / t.floor} for kind, t in times.items()}
            for batch, times in passes.items()
        },
        "tokens_per_s": {str(batch): speed for batch, speed in speeds.items()},
        "policies": _policy_figures(bench, policies, batches[0]),
        "prefill_tokens_per_s": bench.prefill_tokens_per_second(),
        "scoring": bench.scoring(),
    }


def _policy_figures(bench: "Bench", policies: Sequence[str], batch: int) -> dict[str, dict[str, float]]:
    """Times of replaying passes relative to their ideal, and of decoding relative to k1 measured right before it.

    The ideal is proportional to the layer-positions that run. `deciding` (planning, and what checkpoints measure and
    select) is relative to a computed full pass.
    """
    from tqdm import tqdm

    from sampler.plan import PassKind

    depth = bench.config.num_layers
    kinds = (PassKind.FULL, PassKind.SMALL)
    figures = {}
    replays: dict[object, dict[str, float]] = {}  # policies with different periods replay the same way
    for policy in tqdm(policies, unit="policy", disable=None):
        bound = ReusePolicy.parse(policy).bind(depth)
        shares = {kind: bench.share(policy, kind) for kind in kinds}
        same_replay = (*(bound.plan(bench.context(kind)) for kind in kinds), bound.cache_spec, batch)
        if same_replay not in replays:
            times = {kind: bench.pass_times(kind, batch, policy) for kind in kinds}
            replays[same_replay] = {
                **{f"{kind.value}_pass_to_ideal": t.reuse_ratio(shares[kind]) for kind, t in times.items()},
                **{f"{kind.value}_pass_to_computed": t.replayed / t.computed for kind, t in times.items()},
                "computed_ms": times[PassKind.FULL].computed,
                "selecting_ms": times[PassKind.FULL].selecting,
            }
        base_speed, base_work = bench.decode(batch, batch)
        speed, work = bench.decode(batch, batch, policy=policy)
        figures[policy] = {
            "share": shares[PassKind.FULL],
            "small_share": shares[PassKind.SMALL],
            "deciding": (bench.deciding(policy) * batch + replays[same_replay]["selecting_ms"])
            / replays[same_replay]["computed_ms"],
            **replays[same_replay],
            "tokens_per_s": speed,
            "time_to_k1": base_speed / speed,
            "layer_positions_to_k1": work.layer_positions / base_work.layer_positions,
        }
    return figures


def passes_table(figures: dict[str, Any]) -> str:
    """The figures as text of 80 columns."""
    lines = [figures["where"], "", "batch  pass       ms   floor  x floor   tokens/s   per row vs batch 1"]
    first = next(iter(figures["passes"].values()))
    for batch, kinds in figures["passes"].items():
        for kind, t in kinds.items():
            speed = f"{figures['tokens_per_s'][batch]:10.1f}" if kind == "full" else " " * 10
            gain = first[kind]["computed"] / t["computed"] * int(batch) / int(next(iter(figures["passes"])))
            lines.append(
                f"{batch:>5}  {kind:5} {t['computed']:7.2f} {t['floor']:7.2f} {t['ratio']:8.2f} {speed} {gain:12.2f}"
            )
    lines += ["", "policy                   work replaying pass:     of its ideal   tokens/s  time layer-pos. deciding"]
    lines += ["                         run  of a computed       full   small            (against k1)  (of a pass)"]
    for name, p in figures["policies"].items():
        lines.append(
            f"{name:24} {p['share']:4.0%} {p['full_pass_to_computed']:13.2f} {p['full_pass_to_ideal']:10.2f} "
            f"{p['small_pass_to_ideal']:7.2f} {p['tokens_per_s']:10.1f} {p['time_to_k1']:5.2f} "
            f"{p['layer_positions_to_k1']:8.2f} {p['deciding']:10.2%}"
        )
    scoring = figures["scoring"]
    lines += [
        "",
        f"prefill {figures['prefill_tokens_per_s']:.0f} tokens/s; scoring {scoring['questions']} four-option questions "
        "that share a 400-token prefix:",
        f"shared/apart {scoring['token_forwards_ratio']:.3f} of the token-forwards, {scoring['seconds_ratio']:.3f} of "
        f"the time, scores differ by at most {scoring['largest_difference']:.1e}",
    ]
    return "\n".join(lines)


def bench_sweep(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep bench sweep",
        description="Runs a sweep and reports what its actors spent their time on.",
        examples=SWEEP_EXAMPLES,
    )
    options = parse_options(parser, SweepBenchOptions, arguments)
    with ExitStack() as stack:
        out = options.out or stack.enter_context(tempfile.TemporaryDirectory(prefix="reuse-bench-"))
        run = measure_sweep(options, Path(out).resolve())
    figures = sweep_figures(run)
    print(json.dumps(figures, indent=1) if options.json else sweep_table(figures))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSweep:
    """Created by `measure_sweep`, read by `sweep_figures`."""

    seconds: float  # of the whole command
    timeline: "Timeline"
    totals: "tuple[Totals, ...]"
    documents: int


def measure_sweep(options: SweepBenchOptions, out: Path) -> MeasuredSweep:
    """Runs the sweep in a directory below `out`."""
    from orchestrator.core.totals import COLUMNS, totals_of
    from orchestrator.progress.progress import timeline
    from orchestrator.store import Store

    folder = out / SWEEP_NAME
    if folder.exists():
        raise InputError(f"{folder} already exists: give another --out")
    began = time.perf_counter()
    _run([sys.executable, "-m", "orchestrator.sweep", *_sweep_flags(options, out)])
    seconds = time.perf_counter() - began
    store = Store(folder)
    spent = timeline(store.trials().values())
    if spent is None:
        raise InputError(f"{folder} has no finished trial to measure")
    rows = store.rows(columns=COLUMNS)
    return MeasuredSweep(
        seconds=seconds,
        timeline=spent,
        totals=totals_of(rows),
        documents=len(rows),
    )


def _run(command: Sequence[str]) -> None:
    """Runs the sweep with its output on standard error. If it fails, raises InputError with its last error."""
    ended = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        reason = (ended.stderr.strip().splitlines() or ["no error message"])[-1].removeprefix("error: ")
        raise InputError(f"the sweep ended with exit code {ended.returncode}: {reason}")


def _sweep_flags(options: SweepBenchOptions, out: Path) -> list[str]:
    values = {
        "tasks": ",".join(options.tasks),
        "policies": None if options.policies is None else ",".join(options.policies),
        "limit": options.limit,
        "model": options.model,
        "data": options.data,
        "max-new-tokens": options.max_new_tokens,
        "actors": options.actors,
        "threads-per-actor": options.threads,
        "out": out,
        "name": SWEEP_NAME,
    }
    flags = [str(part) for name, value in values.items() if value is not None for part in (f"--{name}", value)]
    return [*flags, "--no-dashboard", "--quiet"]


def sweep_figures(run: MeasuredSweep) -> dict[str, Any]:
    """The figures as JSON values."""
    processor = platform.processor() or platform.machine()
    return {
        "where": f"{counted(os.cpu_count() or 1, 'core')} ({processor}), Python {platform.python_version()}",
        "documents": run.documents,
        "configurations": len(run.totals),
        "at_a_time": run.timeline.actors,
        "warm": {
            "seconds": run.seconds,
            "before_first_trial": run.seconds - run.timeline.seconds,
            "decoding": run.timeline.parts["decoding"] / (run.timeline.actors * run.seconds),
            "loads": run.timeline.loads,
            "k1_spread": _k1_spread(run.totals),
        },
        "timeline": run.timeline.as_json(),
    }


def _k1_spread(totals: "Sequence[Totals]") -> float | None:
    """Fastest over slowest of the k=1 configurations, which compute the same; the largest ratio of all tasks."""
    by_task: dict[str, list[float]] = {}
    for line in totals:
        if line.tokens and line.speedup is not None and ReusePolicy.parse(line.configuration.policy).k == 1:
            by_task.setdefault(line.task, []).append(line.speedup)
    return max((max(speeds) / min(speeds) for speeds in by_task.values() if len(speeds) > 1), default=None)


def sweep_table(figures: Mapping[str, Any]) -> str:
    """The figures as text of 80 columns."""
    warm, spent = figures["warm"], figures["timeline"]
    lines = [
        f"{counted(figures['configurations'], 'configuration')}, {counted(figures['documents'], 'document')}, "
        f"{figures['at_a_time']} at a time; {figures['where']}",
        "",
        _line("wall time from command to end, s", warm["seconds"], "{:.1f}"),
        _line("share of it spent decoding, %", warm["decoding"], "{:.1%}"),
        _line("models loaded", warm["loads"], "{}"),
        _line("k=1 replicates, fastest over slowest tokens/s", warm["k1_spread"], "{:.3f}"),
    ]
    lines += [
        "",
        f"{counted(spent['trials'], 'trial')}, {spent['seconds']:.1f} s from the start of the first to the end of the "
        "last:",
    ]
    lines += [f"  {text:48}{spent['shares'][part]:8.1%}" for part, text in TIMELINE_PARTS.items()]
    gap = spent["between_trials"]
    if gap["median"] is not None:
        lines += [
            f"  until the next trial of an actor: median {1000 * gap['median']:.0f} ms, p90 {1000 * gap['p90']:.0f} ms"
        ]
    load, warm_up = (spent[name] / spent["loads"] for name in ("load_seconds", "warm_up_seconds"))
    lines += [
        f"before and after the trials: {warm['before_first_trial']:.1f} s",
        f"  in which an actor loads the model for {load:.1f} s and warms up for {warm_up:.1f} s",
    ]
    return "\n".join(lines)


def _line(name: str, value: float | None, form: str) -> str:
    return f"{name:48}{'' if value is None else form.format(value):>10}"
