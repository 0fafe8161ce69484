"""The result of a campaign: the cost of continuing a killed sweep, a journal of the rounds, a table and a page."""

import json
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orchestrator.core import system
from orchestrator.running.stop import Aborted
from orchestrator.store import Store
from sampler.errors import InputError
from tools.faults.campaign import Outcome, Round
from tools.faults.row_checker import DUPLICATED, LOST, OTHER, RERUN, WRONG, Problem
from tools.faults.sweep import COMMAND_TIMEOUT_SECONDS, POLL_SECONDS, DisturbedSweep

PACKAGES = ("torch", "ray", "pyarrow", "transformers", "lm_eval", "datasets")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandTime:
    """Seconds that one command took."""

    total: float
    startup: float  # until the first trial: Python, Ray, loading, warm-up
    rows: int  # written by this command


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartCost:
    """An undisturbed sweep compared with one that was killed once and continued."""

    undisturbed: CommandTime
    killed_after: float
    rows_kept: int
    continued: CommandTime

    @property
    def extra_seconds(self) -> float:
        return self.killed_after + self.continued.total - self.undisturbed.total

    @property
    def extra_seconds_without_startup(self) -> float:
        """Without the second start-up: the work lost by the kill, and noise."""
        return self.extra_seconds - self.continued.startup

    def lines(self) -> list[str]:
        undisturbed, continued = self.undisturbed, self.continued
        return [
            f"undisturbed: {undisturbed.rows} rows in {undisturbed.total:.1f} s, including {undisturbed.startup:.1f} s "
            "until the first trial (Python, Ray, loading, warm-up)",
            f"killed after {self.killed_after:.1f} s with {self.rows_kept} rows on disk; continuing took "
            f"{continued.total:.1f} s for the other {continued.rows}, including {continued.startup:.1f} s until the "
            "first trial",
            f"cost of being killed and continued: {self.extra_seconds:+.1f} s; without the second start-up "
            f"{self.extra_seconds_without_startup:+.1f} s",
        ]


def time_command(sweep: DisturbedSweep) -> CommandTime:
    """Runs the sweep's command to its end."""
    rows = sweep.count_rows()
    clock, began = time.time(), time.monotonic()
    sweep.start()
    try:
        code = sweep.command.wait(COMMAND_TIMEOUT_SECONDS)
    finally:
        sweep.close()
    total = time.monotonic() - began
    if code != 0:
        raise Aborted(f"an undisturbed sweep ended with exit code {code}: {sweep.command.text[-1500:]}")
    first = min(_attempt_starts(sweep.folder, since=clock), default=clock + total)
    return CommandTime(total=total, startup=first - clock, rows=sweep.count_rows() - rows)


def measure_restart(undisturbed: CommandTime, sweep: DisturbedSweep) -> RestartCost:
    """Kills the sweep's command when about half of the rows are on disk, then continues it."""
    began = time.monotonic()
    sweep.start()
    try:
        while sweep.running and sweep.count_rows() < undisturbed.rows // 2:
            time.sleep(POLL_SECONDS)
        killed_after = time.monotonic() - began
    finally:
        sweep.close()
    kept = sweep.count_rows()
    return RestartCost(
        undisturbed=undisturbed, killed_after=killed_after, rows_kept=kept, continued=time_command(sweep)
    )


def _attempt_starts(folder: Path, *, since: float) -> list[float]:
    trials = Store(folder).trials().values()
    starts = [attempt["started_at"] for facts in trials for attempt in facts["attempts"] if "started_at" in attempt]
    times = [datetime.fromisoformat(start).timestamp() for start in starts]
    return [start for start in times if start >= since]


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignResult:
    """Everything a campaign found."""

    seed: int
    requested: int  # number of faults
    disk: str
    impossible: tuple[str, ...]  # faults that this machine does not allow
    cost: RestartCost | None = None
    outcomes: tuple[Outcome, ...] = ()
    rows: int = 0  # compared with the undisturbed sweep at the ends of the rounds
    seconds: float = 0.0
    interrupted: bool = False
    code_versions: tuple[str, ...] = ()  # one for each part of the campaign

    def with_round(self, ended: Round, *, seconds: float) -> "CampaignResult":
        outcomes = (*self.outcomes, *ended.outcomes)
        return replace(self, outcomes=outcomes, rows=self.rows + ended.rows, seconds=seconds)

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.problems]


class Journal:
    """A file with one line per round, so that a long campaign can run in parts.

    Each part begins with a line that names the version of the code. A file of another seed is rejected.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self.rounds: list[Round] = []
        self.seconds = 0.0  # of earlier parts
        self.code_versions: list[str] = []  # of earlier parts
        if path.exists():
            self._read(path.read_text(encoding="utf-8").splitlines(), seed)
        self._append({"seed": seed, "code": code_version()})

    def _read(self, lines: Iterable[str], seed: int) -> None:
        try:
            entries = [json.loads(line) for line in lines]
            seeds = [entry["seed"] for entry in entries if "seed" in entry]
            self.code_versions = [str(entry["code"]) for entry in entries if "seed" in entry]
            self.rounds = [_parse_round(entry["round"]) for entry in entries if "seed" not in entry]
            self.seconds = max((float(entry["seconds"]) for entry in entries if "seed" not in entry), default=0.0)
        except (ValueError, KeyError, TypeError):
            raise InputError(f"--journal {self._path} is not a campaign journal; choose another file") from None
        if seeds != [seed] * len(seeds):
            raise InputError(f"--journal {self._path} is of --seed {seeds[0]}, not of --seed {seed}")

    def continue_result(self, result: CampaignResult) -> CampaignResult:
        """Adds the rounds of earlier parts to the result of this part."""
        for ended in self.rounds:
            result = result.with_round(ended, seconds=self.seconds)
        return replace(result, code_versions=(*self.code_versions, *result.code_versions))

    def add(self, ended: Round, *, seconds: float) -> None:
        """Records a round. Omits an abandoned one, so that the next part repeats it."""
        if ended.rows:
            self._append({"seconds": seconds, "round": asdict(ended)})

    def _append(self, entry: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _parse_round(entry: Mapping[str, Any]) -> Round:
    outcomes = [
        Outcome(**{**outcome, "problems": tuple(Problem(**problem) for problem in outcome["problems"])})
        for outcome in entry["outcomes"]
    ]
    return Round(**{**entry, "outcomes": tuple(outcomes)})


def code_version() -> str:
    known = system.code_version()
    return f"{(known['commit'] or known['version'])[:7]}{' with changes' if known['dirty'] else ''}"


def table(result: CampaignResult) -> list[str]:
    """A Markdown table: each fault, how often it was injected, and the problems it caused."""
    names = list(dict.fromkeys(outcome.fault for outcome in result.outcomes))
    lines = [
        "| fault | runs | rows lost | duplicated | wrong | rerun needlessly | other problems |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name in sorted(names):
        lines.append(_table_row(name, [outcome for outcome in result.outcomes if outcome.fault == name]))
    return [*lines, _table_row("**all**", list(result.outcomes))]


def _table_row(name: str, outcomes: Sequence[Outcome]) -> str:
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    sums = [sum(p.rows for p in problems if p.kind == kind) for kind in (LOST, DUPLICATED, WRONG, RERUN)]
    others = sum(problem.kind == OTHER for problem in problems)
    return f"| {name} | {len(outcomes)} | {' | '.join(map(str, [*sums, others]))} |"


def failures(result: CampaignResult) -> list[str]:
    """Each failure with the command that repeats its round."""
    return [
        f"- {outcome.fault}: {'; '.join(problem.text for problem in outcome.problems)} "
        f"(`python -m tools.faults --seed {result.seed} --round {outcome.round}`)"
        for outcome in result.failed
    ]


def summary(result: CampaignResult) -> list[str]:
    rounds = len({outcome.round for outcome in result.outcomes})
    return [
        f"seed {result.seed}: {len(result.outcomes)} faults in {rounds} sweeps, {result.seconds / 60:.0f} minutes; "
        f"{result.rows:,} rows compared at the end of these sweeps",
        f"code version {', '.join(dict.fromkeys(result.code_versions))}; parts: {len(result.code_versions)}",
        *([f"stopped before all {result.requested} faults"] if len(result.outcomes) < result.requested else []),
        *(f"not possible on this machine: {name}" for name in result.impossible),
        *(result.cost.lines() if result.cost is not None else []),
    ]


def page(result: CampaignResult) -> str:
    """The content of docs/faults.md."""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    return "\n".join(
        [
            PROSE.strip(),
            "",
            "## The last campaign",
            "",
            f"{datetime.now(UTC):%Y-%m-%d}; {machine}; {packages}; sweeps on a small {result.disk} disk.",
            f"`make test-faults FAULTS={result.requested} SEED={result.seed}`",
            "",
            *(f"- {line}" for line in summary(result)),
            "",
            *table(result),
            "",
            *(["Failures:", "", *failures(result)] if result.failed else ["No failures."]),
            "",
        ]
    )


PROSE = """
# Fault campaign

`make test-faults` runs real sweeps of a very small model (created on the spot, random weights, two actors) and
injects faults at random moments, sometimes while the command is still loading. A command that ended is repeated, as a
user would do. After each fault, and once the sweep is complete, all rows are read and compared:

- a row that was once on disk stays as it is, in every column: nothing is lost, and no document is run again;
- only rows of a file that was corrupted on purpose may be rerun, and the file must be reported and quarantined;
- in the end each (trial, document) has one row that equals that of an undisturbed sweep, token by token, and no file is
  corrupted.

| fault | what happens |
|---|---|
| worker killed, result actor killed | kill -9 of one process of the running sweep |
| driver killed | kill -9 of the command; all its processes must end, and the folder must be usable again |
| node killed | a Ray cluster of two nodes on this machine; kill -9 of all processes of one; a new one joins |
| worker stopped | SIGSTOP; its watchdog must kill it (`--worker-timeout`), and another worker must take over |
| disk full | the sweep's disk is filled to the last byte; the command must report that and end; then it is freed |
| disk slow | the disk is frozen repeatedly for 0.1 to 0.8 s, over 2 to 5 s |
| last write torn | after kill -9, up to 2,000 bytes are cut off the file that was written last |
| bit of a row file, of trial.json changed | one random bit is flipped, in half of the cases while the sweep runs |
| bit of a compacted file changed | one random bit is flipped after kill -9 of the command |
| compaction killed | kill -9 of the result actor or the command when a compacted file appears |
| second driver | the same command again while the first runs: one of the two continues, the other is refused |

Two sweeps run at a time (`--lanes`), each on its own disk; every second round runs on two nodes that outlive the
commands and share one file system. The seed decides which faults come in which order and after how many rows or
seconds. It cannot decide what the machine does at those moments, so repeating a failed round repeats the plan, not
every instruction.

[faults.jsonl](faults.jsonl) has the last campaign round by round. `JOURNAL=docs/faults.jsonl` continues a campaign
that was stopped; each part records the version of the code. """
