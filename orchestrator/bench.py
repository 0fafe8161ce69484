"""python -m orchestrator.bench: runs a sweep and reports what its actors spent their time on."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.analysis.columns import smoothed_calibration
from orchestrator.core.totals import COLUMNS, Totals, totals_of
from orchestrator.progress.timeline import PARTS, Timeline, timeline
from orchestrator.store import Store
from sampler.cli import Parser, run_command
from sampler.errors import InputError
from sampler.policy import ReusePolicy

NAME = "bench"
EXAMPLES = """examples:
  python -m orchestrator.bench                        the default sweep: nine policies, gsm8k and minerva_math, 100 each
  python -m orchestrator.bench --limit 20             quicker
  python -m orchestrator.bench --model DIR --data DIR --tasks gsm8k --actors 4 --json
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
    token_ids: Mapping[tuple[str, str, str], tuple[int, ...]]  # by task, policy and document


def main() -> None:
    arguments = _parser().parse_args()
    with ExitStack() as stack:
        out = arguments.out or stack.enter_context(tempfile.TemporaryDirectory(prefix="reuse-bench-"))
        warm = run_warm(arguments, Path(out).resolve())
    figures = figures_of(warm)
    print(json.dumps(figures, indent=1) if arguments.json else table(figures))


def run_warm(arguments: argparse.Namespace, out: Path) -> WarmRun:
    folder = out / NAME
    if folder.exists():
        raise InputError(f"{folder} exists: a finished sweep would cost nothing; name another --out")
    began = time.perf_counter()
    subprocess_run([sys.executable, "-m", "orchestrator.sweep", *_sweep_flags(arguments, out)])
    seconds = time.perf_counter() - began
    store = Store(folder)
    spent = timeline(store.trials().values())
    if spent is None:
        raise InputError(f"the sweep in {folder} has no finished trial: there is nothing to measure")
    rows = store.rows(columns=[*COLUMNS, "sweep", "actor", "device", "started_at", "doc_id", "token_ids"])
    place = rows.schema.get_field_index("calibration")
    rows = rows.set_column(place, "calibration", pa.array(smoothed_calibration(rows)))  # as a report counts
    keys = zip(*(rows[name].to_pylist() for name in ("task", "policy", "doc_id")), strict=True)
    return WarmRun(
        seconds=seconds,
        timeline=spent,
        totals=totals_of(rows),
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


def figures_of(warm: WarmRun) -> dict[str, Any]:
    """Everything the command prints, as plain values."""
    processor = platform.processor() or platform.machine()
    return {
        "where": f"{os.cpu_count()} cores ({processor}), Python {platform.python_version()}",
        "documents": len(warm.token_ids),
        "configurations": len(warm.totals),
        "at_a_time": warm.timeline.actors,
        "warm": {
            "seconds": warm.seconds,
            "before_first_trial": warm.seconds - warm.timeline.seconds,
            "decoding": warm.timeline.parts["decoding"] / (warm.timeline.actors * warm.seconds),
            "loads": warm.timeline.loads,
            "k1_spread": _k1_spread(warm.totals),
        },
        "timeline": warm.timeline.as_json(),
    }


def _k1_spread(totals: Sequence[Totals]) -> float | None:
    """How far configurations that are the same by definition lie apart, in the task where it is worst."""
    by_task: dict[str, list[float]] = {}
    for line in totals:
        found = line.speedup if line.tokens and ReusePolicy.parse(line.configuration.policy).k == 1 else None
        if found is not None:
            by_task.setdefault(line.task, []).append(found)
    return max((max(speeds) / min(speeds) for speeds in by_task.values() if len(speeds) > 1), default=None)


def table(figures: Mapping[str, Any]) -> str:
    """The figures for people, in 80 columns."""
    warm, spent = figures["warm"], figures["timeline"]
    lines = [
        f"{figures['configurations']} configurations, {figures['documents']:,} documents, "
        f"{figures['at_a_time']} at a time; {figures['where']}",
        "",
        _line("wall time from command to end, s", warm["seconds"], "{:.1f}"),
        _line("share of it spent decoding, %", warm["decoding"], "{:.1%}"),
        _line("models loaded", warm["loads"], "{}"),
        _line("k=1 replicates, fastest over slowest tokens/s", warm["k1_spread"], "{:.3f}"),
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


def _line(name: str, value: float | None, form: str) -> str:
    return f"{name:48}{'' if value is None else form.format(value):>10}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m orchestrator.bench",
        description="Runs a sweep and reports what its actors spent their time on.",
        examples=EXAMPLES,
    )
    parser.add_argument("--tasks", default="gsm8k,minerva_math", help="with commas (default: gsm8k,minerva_math)")
    parser.add_argument("--policies", help="with commas (default: the nine)")
    parser.add_argument("--limit", type=int, default=100, help="documents of each task (default: 100)")
    parser.add_argument("--model", help="a folder or Hub id (default: as the sweep chooses)")
    parser.add_argument("--data", help="hub, bundled or a folder (default: to fit the model)")
    parser.add_argument("--max-new-tokens", type=int, help="most tokens of an answer (default: as the task says)")
    parser.add_argument("--actors", type=int, default=2, help="models at a time (default: 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each (default: 1)")
    parser.add_argument("--out", metavar="DIR", help="keep the sweep in DIR/bench (default: thrown away)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser


if __name__ == "__main__":
    run_command(main)
