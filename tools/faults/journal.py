"""A campaign's rounds in a file, one line each, so that a long campaign can be run in parts. Knows no sweeps.

Each part begins with a line that says which code ran; the file of another seed is refused.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orchestrator.core import provenance
from sampler.errors import InputError
from tools.faults.campaign import Outcome, Round
from tools.faults.ledger import Problem
from tools.faults.table import Result


class Journal:
    """What earlier parts came to is read at birth; then this part's own lines are added."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self.rounds: list[Round] = []
        self.seconds = 0.0  # that earlier parts took
        self.codes: list[str] = []  # of earlier parts
        if path.exists():
            self._read(path.read_text(encoding="utf-8").splitlines(), seed)
        self._write({"seed": seed, "code": code()})

    def _read(self, lines: Iterable[str], seed: int) -> None:
        try:
            told = [json.loads(line) for line in lines]
            seeds = [line["seed"] for line in told if "seed" in line]
            self.codes = [str(line["code"]) for line in told if "seed" in line]
            self.rounds = [_round(line["round"]) for line in told if "seed" not in line]
            self.seconds = max((float(line["seconds"]) for line in told if "seed" not in line), default=0.0)
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{self._path} is no journal of a campaign; name another --journal") from None
        if seeds != [seed] * len(seeds):
            raise InputError(f"{self._path} belongs to --seed {seeds[0]}, not to --seed {seed}")

    def continued(self, result: Result) -> Result:
        """A part's result that begins where the parts before ended."""
        for ended in self.rounds:
            result = result.grown(ended, seconds=self.seconds)
        return replace(result, codes=(*self.codes, *result.codes))

    def add(self, ended: Round, *, seconds: float) -> None:
        """A round that was given up is not kept: the next part tries it again."""
        if ended.rows:
            self._write({"seconds": seconds, "round": asdict(ended)})

    def _write(self, line: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _round(told: Mapping[str, Any]) -> Round:
    outcomes = [
        Outcome(**{**outcome, "problems": tuple(Problem(**problem) for problem in outcome["problems"])})
        for outcome in told["outcomes"]
    ]
    return Round(**{**told, "outcomes": tuple(outcomes)})


def code() -> str:
    """The code that is running, for people."""
    known = provenance.code_version()
    return f"{(known['commit'] or known['version'])[:7]}{' with changes' if known['dirty'] else ''}"
