"""The result of a campaign as text and as a page. Knows no sweeps."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version

from tools.faults.campaign import Outcome, Round
from tools.faults.cost import Cost
from tools.faults.ledger import DOUBLED, LOST, OTHER, REMADE, WRONG

PACKAGES = ("torch", "ray", "pyarrow", "transformers", "lm_eval", "datasets")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """All that a campaign found."""

    seed: int
    asked: int
    disk: str
    left_out: tuple[str, ...]
    cost: Cost | None = None
    outcomes: tuple[Outcome, ...] = ()
    rows: int = 0  # of each round's end, compared with the undisturbed sweep
    seconds: float = 0.0
    interrupted: bool = False
    codes: tuple[str, ...] = ()  # the code that ran, one for each part of the campaign

    def grown(self, ended: Round, *, seconds: float) -> "Result":
        """By one more round; in all it took so long."""
        outcomes = (*self.outcomes, *ended.outcomes)
        return replace(self, outcomes=outcomes, rows=self.rows + ended.rows, seconds=seconds)

    @property
    def bad(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.problems]


def table(result: Result) -> list[str]:
    """A Markdown table: each fault, how often it came, and what was lost by it."""
    names = list(dict.fromkeys(outcome.fault for outcome in result.outcomes))
    lines = [
        "| fault | runs | rows lost | doubled | wrong | run again needlessly | other problems |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name in sorted(names):
        lines.append(_line(name, [outcome for outcome in result.outcomes if outcome.fault == name]))
    return [*lines, _line("**all**", list(result.outcomes))]


def _line(name: str, outcomes: Sequence[Outcome]) -> str:
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    sums = [sum(p.rows for p in problems if p.kind == kind) for kind in (LOST, DOUBLED, WRONG, REMADE)]
    others = sum(problem.kind == OTHER for problem in problems)
    return f"| {name} | {len(outcomes)} | {' | '.join(map(str, [*sums, others]))} |"


def failures(result: Result) -> list[str]:
    """Each with the command that repeats its round."""
    return [
        f"- {outcome.fault}: {'; '.join(problem.text for problem in outcome.problems)} "
        f"(`python -m tools.faults --seed {result.seed} --round {outcome.round}`)"
        for outcome in result.bad
    ]


def summary(result: Result) -> list[str]:
    rounds = len({outcome.round for outcome in result.outcomes})
    return [
        f"seed {result.seed}: {len(result.outcomes)} faults in {rounds} sweeps, {result.seconds / 60:.0f} minutes; "
        f"{result.rows:,} rows compared at the end of these sweeps",
        f"code at {', '.join(dict.fromkeys(result.codes))}; parts run: {len(result.codes)}",
        *([f"stopped before the {result.asked} that were asked for"] if len(result.outcomes) < result.asked else []),
        *(f"not possible here: {name}" for name in result.left_out),
        *(result.cost.lines() if result.cost is not None else []),
    ]


def page(result: Result) -> str:
    """docs/faults.md."""
    made_with = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    return "\n".join(
        [
            "# A campaign of faults",
            "",
            PROSE.strip(),
            "",
            "## The last campaign",
            "",
            f"{datetime.now(UTC):%Y-%m-%d}; {machine}; {made_with}; sweeps on a small {result.disk} disk.",
            f"`make test-faults FAULTS={result.asked} SEED={result.seed}`",
            "",
            *(f"- {line}" for line in summary(result)),
            "",
            *table(result),
            "",
            *(["Failures:", "", *failures(result)] if result.bad else ["No failures."]),
            "",
        ]
    )


PROSE = """
`make test-faults` runs real sweeps of a very small model (made on the spot, random weights, two actors) and disturbs
them at random moments, some while the command is still loading. A command that was ended is repeated, as a person
would. After each fault, and once the sweep is finished, all rows are read again and compared:

- a row once seen on disk stays as it is, in every column: nothing is lost, and no document is run again;
- only rows of a file that was damaged on purpose may be made again; that file must be named and set aside;
- in the end each (trial, document) has one row, equal to that of an undisturbed sweep, token by token, and no file is
  damaged.

| fault | what is done |
|---|---|
| worker killed, result actor killed | kill -9 of one process of the running sweep |
| driver killed | kill -9 of the command; all its processes must go, and the folder be free again |
| node killed | a Ray of two nodes on this machine; kill -9 of all processes of the second; a new one joins |
| worker stopped | SIGSTOP; its watchdog must end it (`--worker-timeout`), and another take over |
| disk full | the sweep's disk is filled to the last byte; the command must say so and end; then there is room again |
| disk slow | the disk is frozen for 0.1 to 0.8 s again and again, for 2 to 5 s |
| last write torn | after kill -9, up to 2,000 bytes are cut off the file that was written last |
| bit of a row file, of trial.json changed | one random bit, half of them while the sweep runs |
| second driver | the same command again while the first runs: one of the two goes on, the other is refused |

Two such sweeps run at a time (`--lanes`), each on a disk of its own; every second round runs on two nodes that stay.
The seed decides which faults come in which order and after how many rows or seconds; what the machine does in those
moments it cannot decide, so a failed round repeats the plan, not each instruction.

[faults.jsonl](faults.jsonl) has the last campaign round by round; `JOURNAL=docs/faults.jsonl` continues one that was
stopped, and each part says which code it ran.
"""
