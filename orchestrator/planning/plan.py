"""What one run of the command should achieve, and what of it remains to be done."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.trial import Trial, WantedDocuments


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All trials of a command, including finished ones, and the documents that they should have rows of."""

    folder: str
    sweep: str
    trials: tuple[Trial, ...]
    wanted: WantedDocuments

    def unfinished(self, facts: Mapping[str, Mapping[str, Any]]) -> list[Trial]:
        """Trials to run, given each trial.json.

        A finished trial runs again if more documents are wanted than it has rows. The smaller set is always part of
        the larger one, so comparing counts is enough.
        """
        return [trial for trial in self.trials if not self._is_done(trial, facts.get(trial.trial_id))]

    def _is_done(self, trial: Trial, known: Mapping[str, Any] | None) -> bool:
        return known is not None and known["status"] == "finished" and known["rows"] >= len(self.wanted.of(trial))
