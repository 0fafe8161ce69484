"""python -m orchestrator.bench: what warm actors spend their time on, and the same grid run cold. Knows no Ray.

Runs a sweep as anybody would, reads its folder, then runs tasks.run once for each task and policy, as many at a time as
the sweep had actors. All ratios come from this one run on this one machine.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.analysis.columns import speeds_of_moments
from orchestrator.cold import ColdRun, run_cold
from orchestrator.planning.settings import SweepSettings
from orchestrator.store import Store
from orchestrator.watching.tally import COLUMNS, Totals, tally_of
from orchestrator.watching.timeline import PARTS, Timeline, timeline
from sampler.cli import Parser, run_command
from sampler.errors import InputError
from sampler.policy import ReusePolicy

NAME = "bench"
EXAMPLES = """examples:
  python -m orchestrator.bench                        the default sweep: nine policies, gsm8k and minerva_math, 100 each
  python -m orchestrator.bench --limit 20 --no-cold   quicker, and without the comparison
  python -m orchestrator.bench --model DIR --data DIR --tasks gsm8k --actors 4 --json
  python -m orchestrator.bench --scale                many trials, actors, rows and a long plan; no model is needed
"""
MEANING = {
    "decoding": "decoding",
    "calibration": "calibration before and within trials",
    "scoring": "scoring, and rows into batches",
    "waiting": "waiting for rows to be on disk",
    "finishing": "a trial's rows into one file",
    "between": "between two trials of an actor",
    "idle": "before an actor's first trial, after its last",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmRun:
    """The sweep, from its command to its end, and what its folder says."""

    seconds: float
    timeline: Timeline
    totals: tuple[Totals, ...]
    settings: SweepSettings
    token_ids: Mapping[tuple[str, str, str], tuple[int, ...]]  # by task, policy and document


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.scale is not None:
        from orchestrator.scale.measure import measure  # only now: most of it is not needed otherwise

        measure(arguments.scale, as_json=arguments.json)
        return
    with ExitStack() as stack:
        out = arguments.out or stack.enter_context(tempfile.TemporaryDirectory(prefix="reuse-bench-"))
        warm = run_warm(arguments, Path(out).resolve())
        cold = None
        if arguments.cold:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reuse-cold-")))
            cold = run_cold(warm.settings, at_a_time=warm.timeline.actors, threads=arguments.threads, folder=folder)
    figures = figures_of(warm, cold)
    print(json.dumps(figures, indent=1) if arguments.json else table(figures))


def run_warm(arguments: argparse.Namespace, out: Path) -> WarmRun:
    folder = out / NAME
    if folder.exists():
        raise InputError(f"{folder} exists: a finished sweep would cost nothing; name another --out")
    began = time.perf_counter()
    subprocess_run([sys.executable, "-m", "orchestrator.sweep", *_sweep_flags(arguments, out)])
    seconds = time.perf_counter() - began
    store = Store(folder)
    request = store.read_request()
    spent = timeline(store.trials().values())
    if request is None or spent is None:
        raise InputError(f"the sweep in {folder} has no finished trial: there is nothing to measure")
    rows = store.rows(columns=[*COLUMNS, "sweep", "actor", "device", "started_at", "doc_id", "token_ids"])
    place = rows.schema.get_field_index("calibration")
    rows = rows.set_column(place, "calibration", pa.array(speeds_of_moments(rows)))  # as a report counts
    keys = zip(*(rows[name].to_pylist() for name in ("task", "policy", "doc_id")), strict=True)
    return WarmRun(
        seconds=seconds,
        timeline=spent,
        totals=tally_of(rows),
        settings=replace(SweepSettings.from_dict(request["settings"]), model=request["model"]["source"]),
        token_ids=dict(zip(keys, map(tuple, rows["token_ids"].to_pylist()), strict=True)),
    )


def subprocess_run(command: Sequence[str]) -> None:
    """What the sweep says goes to the standard error; its own error is the one told."""
    ended = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        told = (ended.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("error: ")
        raise InputError(f"the sweep ended with {ended.returncode}: {told}")


def _sweep_flags(arguments: argparse.Namespace, out: Path) -> list[str]:
    given = {
        "tasks": arguments.tasks,
        "policies": arguments.policies,
        "limit": arguments.limit,
        "model": arguments.model,
        "data": arguments.data,
        "max-new-tokens": arguments.max_new_tokens,
        "actors": arguments.actors,
        "threads-per-actor": arguments.threads,
        "out": out,
        "name": NAME,
    }
    flags = [str(part) for name, value in given.items() if value is not None for part in (f"--{name}", value)]
    return [*flags, "--no-dashboard", "--quiet"]


def figures_of(warm: WarmRun, cold: ColdRun | None) -> dict[str, Any]:
    """Everything the command prints, as plain values."""
    processor = platform.processor() or platform.machine()
    figures: dict[str, Any] = {
        "where": f"{os.cpu_count()} cores ({processor}), Python {platform.python_version()}",
        "documents": len(warm.token_ids),
        "configurations": len(warm.totals),
        "at_a_time": warm.timeline.actors,
        "warm": {
            "seconds": warm.seconds,
            "before_first_trial": warm.seconds - warm.timeline.seconds,
            "decoding": warm.timeline.parts["decoding"] / (warm.timeline.actors * warm.seconds),
            "loads": warm.timeline.loads,
            "k1_spread": _k1_spread(warm.totals, lambda line: line.speedup),
        },
        "timeline": warm.timeline.as_json(),
    }
    if cold is not None:
        figures["cold"] = {
            "seconds": cold.seconds,
            "decoding": cold.share,
            "loads": len(cold.answers),
            "k1_spread": _k1_spread(
                warm.totals, lambda line: cold.tokens_per_s(line.configuration.task, line.configuration.policy)
            ),
            "same_answers": sum(
                warm.token_ids.get((*pair, doc_id)) == answer.token_ids
                for pair, answers in cold.answers.items()
                for doc_id, answer in answers.items()
            ),
            "wall_ratio": cold.seconds / warm.seconds,
        }
    return figures


def _k1_spread(totals: Sequence[Totals], speed: Callable[[Totals], float | None]) -> float | None:
    """How far configurations that are the same by definition lie apart, in the task where it is worst."""
    by_task: dict[str, list[float]] = {}
    for line in totals:
        found = speed(line) if line.tokens and ReusePolicy.parse(line.configuration.policy).k == 1 else None
        if found is not None:
            by_task.setdefault(line.configuration.task, []).append(found)
    return max((max(speeds) / min(speeds) for speeds in by_task.values() if len(speeds) > 1), default=None)


def table(figures: Mapping[str, Any]) -> str:
    """The figures for people, in 80 columns."""
    warm, cold, spent = figures["warm"], figures.get("cold"), figures["timeline"]
    lines = [
        f"{figures['configurations']} configurations, {figures['documents']:,} documents, "
        f"{figures['at_a_time']} at a time; {figures['where']}",
        "",
        f"{'':44}{'warm sweep':>12}{'cold processes':>17}",
        _line("wall time from command to end, s", warm, cold, "seconds", "{:.1f}"),
        _line("share of it spent decoding, %", warm, cold, "decoding", "{:.1%}"),
        _line("models loaded", warm, cold, "loads", "{}"),
        _line("k=1 twins, fastest over slowest tokens/s", warm, cold, "k1_spread", "{:.3f}"),
    ]
    if cold is not None:
        lines += [
            f"cold processes take {cold['wall_ratio']:.2f} times as long",
            f"{cold['same_answers']:,} of {figures['documents']:,} answers are the same, token by token",
        ]
    lines += [
        "",
        f"{spent['trials']} trials, {spent['seconds']:.1f} s from the first one's beginning to the last one's end:",
    ]
    lines += [f"  {MEANING[part]:48}{spent['shares'][part]:8.1%}" for part in PARTS]
    gap = spent["between_trials"]
    if gap["median"] is not None:
        lines += [f"  to an actor's next trial: median {1000 * gap['median']:.0f} ms, p90 {1000 * gap['p90']:.0f} ms"]
    load, warm_up = (spent[name] / spent["loads"] for name in ("load_seconds", "warm_up_seconds"))
    lines += [
        f"before and after that {warm['before_first_trial']:.1f} s",
        f"  of which an actor loads for {load:.1f} s and warms up for {warm_up:.1f} s",
    ]
    return "\n".join(lines)


def _line(name: str, warm: Mapping[str, Any], cold: Mapping[str, Any] | None, key: str, form: str) -> str:
    shown = ["" if run is None or run[key] is None else form.format(run[key]) for run in (warm, cold)]
    return f"{name:44}{shown[0]:>12}{shown[1]:>17}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m orchestrator.bench",
        description="Measures a sweep with warm actors, then the same grid as one cold process per configuration.",
        examples=EXAMPLES,
    )
    parser.add_argument("--tasks", default="gsm8k,minerva_math", help="with commas (default: gsm8k,minerva_math)")
    parser.add_argument("--policies", help="with commas (default: the nine)")
    parser.add_argument("--limit", type=int, default=100, help="documents of each task (default: 100)")
    parser.add_argument("--model", help="a folder or Hub id (default: as the sweep chooses)")
    parser.add_argument("--data", help="hub, bundled or a folder (default: to fit the model)")
    parser.add_argument("--max-new-tokens", type=int, help="most tokens of an answer (default: as the task says)")
    parser.add_argument("--actors", type=int, default=2, help="models, and cold processes, at a time (default: 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each (default: 1)")
    parser.add_argument("--cold", action=argparse.BooleanOptionalAction, default=True, help="the comparison, too")
    parser.add_argument("--out", metavar="DIR", help="keep the sweep in DIR/bench (default: thrown away)")
    parser.add_argument(
        "--scale", nargs="*", metavar="PART", help="instead: many trials, actors, rows, or a long plan (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser


if __name__ == "__main__":
    run_command(main)
