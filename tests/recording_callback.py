"""A Ray Tune callback that writes what it sees to the file named by RECORD_TO, one JSON line for each result."""

import json
import os
from typing import Any

from ray import tune


class Recorder(tune.Callback):  # type: ignore[misc]
    def on_trial_result(self, *, trial: Any, result: dict[str, Any], **_: Any) -> None:
        kept = {name: result.get(name) for name in ("documents", "accuracy", "tokens_per_s", "done")}
        with open(os.environ["RECORD_TO"], "a") as file:
            file.write(json.dumps({"name": str(trial), "config": trial.config, **kept}) + "\n")


class NeedsArguments(tune.Callback):  # type: ignore[misc]
    def __init__(self, path: str) -> None:
        self.path = path
