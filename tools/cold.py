"""python -m tools.cold: compares a sweep with warm actors to the same grid run as one process per task and policy.

Runs `reuse-sweep bench sweep`, then `reuse-sweep tasks run` once for each task and policy, as many at a time as the
sweep had actors. Both runs happen on the same machine, one after the other.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.cli.bench import SWEEP_NAME
from orchestrator.cli.console import Parser, run_command
from orchestrator.planning.settings import SweepSettings
from orchestrator.store import Store
from sampler.errors import InputError
from sampler.policy import ReusePolicy

TokenIds = Mapping[tuple[str, str, str], tuple[int, ...]]  # by task, policy and document
EXAMPLES = """examples:
  python -m tools.cold                                 the sweep of `bench sweep`, then the same grid cold
  python -m tools.cold --json -- --limit 20 --actors 4 everything after -- goes to `bench sweep`
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One decoded document."""

    tokens: int
    seconds: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdRun:
    """The results of all processes of one grid."""

    seconds: float  # from the start of the first process to the end of the last
    at_a_time: int
    answers: Mapping[tuple[str, str], Mapping[str, Answer]]  # by task and policy, then document

    @property
    def decoding_share(self) -> float:
        """Share of the processes' time spent decoding."""
        decoding = sum(answer.seconds for answers in self.answers.values() for answer in answers.values())
        return decoding / (self.at_a_time * self.seconds)

    def k1_spread(self) -> float | None:
        """Fastest over slowest k=1 policy of a task in tokens per second; the largest ratio of all tasks."""
        by_task: dict[str, list[float]] = {}
        for (task, policy), answers in self.answers.items():
            if ReusePolicy.parse(policy).k == 1:
                tokens = sum(answer.tokens for answer in answers.values())
                by_task.setdefault(task, []).append(tokens / sum(answer.seconds for answer in answers.values()))
        return max((max(speeds) / min(speeds) for speeds in by_task.values() if len(speeds) > 1), default=None)


def main() -> None:
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="reuse-cold-") as folder:
        warm = run_warm(arguments.bench, Path(folder))
        settings, token_ids = read_sweep(Path(folder) / SWEEP_NAME)
        cold = run_cold(settings, at_a_time=warm["at_a_time"], folder=Path(folder))
    figures = warm | {"cold": compare(warm, cold, token_ids)}
    print(json.dumps(figures, indent=1) if arguments.json else table(figures))


def run_warm(flags: Sequence[str], out: Path) -> dict[str, Any]:
    """The JSON that `reuse-sweep bench sweep` prints; its sweep stays in `out`."""
    command = [sys.executable, "-m", "orchestrator.cli", "bench", "sweep", *flags, "--out", str(out), "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        sys.exit(ended.returncode)
    figures: dict[str, Any] = json.loads(ended.stdout)
    return figures


def read_sweep(folder: Path) -> tuple[SweepSettings, TokenIds]:
    """A finished sweep's settings, with the model as it was resolved, and its answers."""
    store = Store(folder)
    request = store.read_sweep_record()
    assert request is not None
    rows = store.rows(columns=["task", "policy", "doc_id", "token_ids"])
    keys = zip(*(rows[name].to_pylist() for name in ("task", "policy", "doc_id")), strict=True)
    settings = replace(SweepSettings.from_dict(request["settings"]), model=request["model"]["source"])
    return settings, dict(zip(keys, map(tuple, rows["token_ids"].to_pylist()), strict=True))


def run_cold(settings: SweepSettings, *, at_a_time: int, folder: Path) -> ColdRun:
    """Runs the grid with a new process per task and policy; each starts Python, loads the model and opens its task."""
    grid = [(task, policy) for task in settings.tasks for policy in settings.policies]
    outputs = {pair: folder / f"{number}.jsonl" for number, pair in enumerate(grid)}
    threads = str(settings.threads_per_actor or 1)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    began = time.perf_counter()
    with ThreadPoolExecutor(at_a_time) as pool:
        ended = [
            pool.submit(_run_process, process_command(settings, *pair, outputs[pair]), environment) for pair in grid
        ]
        for process in ended:
            process.result()
    seconds = time.perf_counter() - began
    return ColdRun(seconds=seconds, at_a_time=at_a_time, answers={pair: _read_answers(outputs[pair]) for pair in grid})


def process_command(settings: SweepSettings, task: str, policy: str, output: Path) -> list[str]:
    values: dict[str, Any] = {
        "task": task,
        "policy": policy,
        "model": settings.model,
        "data": settings.data,
        "limit": settings.limit,
        "fewshot": settings.fewshot,
        "subset-size": settings.subset_size,
        "dtype": settings.dtype,
        "batch-size": settings.batch_size,
        "max-new-tokens": settings.max_new_tokens,
        "threshold": settings.threshold and settings.threshold[0],
        "small-block": settings.small_block and settings.small_block[0],
        "out": output,
    }
    flags = [str(part) for name, value in values.items() if value is not None for part in (f"--{name}", value)]
    return [sys.executable, "-m", "orchestrator.cli", "tasks", "run", *flags]


def _run_process(command: Sequence[str], environment: Mapping[str, str]) -> None:
    ended = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no error message"])[-1].removeprefix("error: ")
        raise InputError(f"a cold process ended with exit code {ended.returncode}: {last}")


def _read_answers(output: Path) -> dict[str, Answer]:
    """The answers in a file that `tasks run` wrote, by document; its last line is the aggregate."""
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()[:-1]]
    return {
        line["doc_id"]: Answer(tokens=line["tokens"], seconds=line["seconds"], token_ids=tuple(line["token_ids"]))
        for line in lines
    }


def compare(warm: Mapping[str, Any], cold: ColdRun, token_ids: TokenIds) -> dict[str, Any]:
    return {
        "seconds": cold.seconds,
        "decoding": cold.decoding_share,
        "loads": len(cold.answers),
        "k1_spread": cold.k1_spread(),
        "same_answers": sum(
            token_ids.get((*pair, doc_id)) == answer.token_ids
            for pair, answers in cold.answers.items()
            for doc_id, answer in answers.items()
        ),
        "wall_ratio": cold.seconds / warm["warm"]["seconds"],
    }


def table(figures: Mapping[str, Any]) -> str:
    warm, cold = figures["warm"], figures["cold"]
    return "\n".join(
        [
            f"{figures['configurations']} configurations, {figures['documents']:,} documents, "
            f"{figures['at_a_time']} at a time; {figures['where']}",
            "",
            f"{'':46}{'warm sweep':>12}{'cold processes':>17}",
            _line("wall time of the command, s", warm, cold, "seconds", "{:.1f}"),
            _line("share of it spent decoding", warm, cold, "decoding", "{:.1%}"),
            _line("models loaded", warm, cold, "loads", "{}"),
            _line("k=1 replicates, fastest/slowest tokens/s", warm, cold, "k1_spread", "{:.3f}"),
            f"cold processes take {cold['wall_ratio']:.2f} times as long",
            f"{cold['same_answers']:,} of {figures['documents']:,} answers are identical, token by token",
        ]
    )


def _line(name: str, warm: Mapping[str, Any], cold: Mapping[str, Any], key: str, template: str) -> str:
    cells = ["" if run[key] is None else template.format(run[key]) for run in (warm, cold)]
    return f"{name:46}{cells[0]:>12}{cells[1]:>17}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tools.cold",
        description="Runs a sweep with warm actors, then the same grid with a new process for each task and policy.",
        examples=EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("bench", nargs="*", metavar="BENCH_FLAG", help="flags of reuse-sweep bench sweep, after --")
    return parser


if __name__ == "__main__":
    run_command(main)
