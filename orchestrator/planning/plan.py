"""What one run of the command is to bring about, and what of it is still to do. Knows the folder only as facts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.planning.grid import TrialSpec
from orchestrator.watching.tally import KEYS, Configuration


def configuration_of(trial: TrialSpec) -> Configuration:
    return Configuration(**{key: getattr(trial, key) for key in KEYS})


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All trials of a command, also those already done, and the documents they are to have rows of."""

    folder: str
    sweep: str
    trials: tuple[TrialSpec, ...]
    documents: Mapping[str, Mapping[int, tuple[str, ...]]]  # by task and shard, in the order they are run

    def wanted(self, trial: TrialSpec) -> tuple[str, ...]:
        return self.documents[trial.task][trial.shard]

    def rows_wanted(self) -> dict[Configuration, int]:
        rows: dict[Configuration, int] = {}
        for trial in self.trials:
            configuration = configuration_of(trial)
            rows[configuration] = rows.get(configuration, 0) + len(self.wanted(trial))
        return rows

    def unfinished(self, facts: Mapping[str, Mapping[str, Any]]) -> list[TrialSpec]:
        """Trials to run, given each trial.json.

        A finished trial is to run again if it now wants more documents than it has rows; the smaller set is always
        part of the larger one, so counting is enough.
        """
        return [trial for trial in self.trials if not self._is_done(trial, facts.get(trial.trial_id))]

    def _is_done(self, trial: TrialSpec, known: Mapping[str, Any] | None) -> bool:
        return known is not None and known["status"] == "finished" and known["rows"] >= len(self.wanted(trial))
