"""Trials: one shard of a task's documents under one configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.configuration import CONFIGURATION_KEYS, Configuration

TRIAL_KEYS = ("task", *CONFIGURATION_KEYS, "repeat", "shard")
TrialKey = tuple[Any, ...]  # a trial's values of TRIAL_KEYS: identifies it within a sweep


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """`trial_id` is a hash of everything that can change the trial's rows (see planning.grid)."""

    trial_id: str
    task: str
    configuration: Configuration
    repeat: int
    shard: int

    @property
    def policy(self) -> str:
        return self.configuration.policy

    @property
    def label(self) -> str:
        """task/configuration/shard, with the repeat if it is not the first."""
        return f"{self.task}/{self.configuration.slug()}/{self.shard}" + (f".r{self.repeat}" if self.repeat else "")

    @property
    def tune_config(self) -> dict[str, Any]:
        """The trial's configuration in Ray Tune: TRIAL_KEYS and their values."""
        return {"task": self.task, **self.configuration.as_dict(), "repeat": self.repeat, "shard": self.shard}

    @property
    def key(self) -> TrialKey:
        return trial_key(self.tune_config)

    def as_dict(self) -> dict[str, Any]:
        """As trial.json stores it."""
        return {"trial_id": self.trial_id, **self.tune_config}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Trial":
        return cls(
            trial_id=values["trial_id"],
            task=values["task"],
            configuration=Configuration.from_mapping(values),
            repeat=values["repeat"],
            shard=values["shard"],
        )


def trial_key(values: Mapping[str, Any]) -> TrialKey:
    """From a Ray Tune configuration or a row."""
    return tuple(values[name] for name in TRIAL_KEYS)
