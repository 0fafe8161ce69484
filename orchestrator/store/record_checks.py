"""Checks of trial.json and sweep.json: the keys that are read, and the values that they may have.

Another person may have edited these files. Other keys are ignored, since a newer version may have written them.
"""

import math
from collections.abc import Mapping
from typing import Any

from orchestrator.core.configuration import DECODE_SETTINGS, FIRST, OWN, default_of
from orchestrator.core.untrusted import (
    anything,
    each,
    file_name,
    flag,
    like,
    line,
    number,
    one_of,
    optional,
    scalar,
    shape_problem,
    text,
    whole,
)

MAX_DOCUMENTS = 10_000_000  # of a task, for which status reserves memory
MAX_CONFIGURATIONS = 1_000_000


def _device(value: Any) -> str | None:
    return each(scalar)(value) or optional(number)(value.get("memory"))


TRIAL_REQUIRED = ("trial_id", "task", "policy", "repeat", "shard")
TRIAL_RECORD: dict[str, Any] = {
    "trial": {
        "trial_id": line,
        "task": file_name,
        "policy": file_name,
        **{name: optional(like(default_of(name))) for name in DECODE_SETTINGS},
        "repeat": whole(),
        "shard": whole(),
    },
    "status": one_of("running", "finished", "failed"),
    "rows": optional(whole()),
    "sha256": optional(line),
    "tally": optional(
        {
            "baseline": flag,
            **{name: optional(whole()) for name in ("documents", "correct", "tokens", "layer_positions")},
            **{name: optional(number) for name in ("seconds", "work")},
            "scored": each(whole(), lambda key: None if key.isdecimal() and len(key) < 10 else "numbers"),
        }
    ),
    "attempts": [
        {
            "attempt": whole(),
            "actor": line,
            "node_id": optional(line),
            "gpus": optional([anything]),
            "device": optional(_device),
            "packages": optional(each(line)),
            "code": optional(each(anything)),
            "reason": optional(text),
            **{
                name: optional(number)
                for name in (
                    *("load_seconds", "warm_up_seconds", "calibration_seconds", "decode_seconds", "waiting_seconds"),
                    *("recalibration_seconds", "preparing_seconds", "seconds", "calibration", "peak_memory"),
                )
            },
        }
    ],
    "settings": optional(each(anything)),
    "layers": optional([whole()]),
}

_IDENTITY = {
    "model": line,
    "model_revision": optional(line),
    **{name: optional(line) for name in ("dtype", "data")},
    **{name: optional(whole()) for name in ("depth", "subset_size", "sample", "fewshot", "max_new_tokens")},
    **{name: optional(whole(1)) for name in ("batch_size", "shard_size")},
    "seed": optional(whole(-(2**53))),
    **{name: optional(flag) for name in ("chat_template", "thinking", "race")},
    "family": optional(line),
    "block_size": optional(whole(1)),
    "datasets": each(each(optional(line)), file_name),
}
_SETTINGS = {
    "tasks": [file_name],
    "policies": [file_name],
    **{name: optional([like(default_of(name))]) for name in DECODE_SETTINGS},
    **{name: optional(line) for name in ("model", "data", "dtype", "name")},
    **{name: optional(whole()) for name in ("limit", "sample", "fewshot", "subset_size", "max_new_tokens")},
    **{name: optional(whole(1)) for name in ("batch_size", "shard_size")},
    "repeats": whole(1),
    "gpus_per_actor": optional(number),
    "race": optional(flag),
    "race_alpha": optional(number),
    "configurations": optional([line]),
    "reference": optional(one_of(OWN, FIRST)),
}
_DECISION = {
    "task": file_name,
    "policy": file_name,
    **{name: optional(like(default_of(name))) for name in DECODE_SETTINGS},
    "outcome": one_of("confirmed", "rejected"),
    "because": [line],
    "look": {
        **{name: whole() for name in ("shards", "documents")},
        **dict.fromkeys(("difference", "log_e_plus", "log_e_minus"), number),
        **{name: optional(number) for name in ("speedup", "speedup_low", "speedup_high")},
    },
    "rules": {
        **dict.fromkeys(("alpha", "margin", "speedup", "comparisons"), number),
        "generates": flag,
        "shards": whole(1),
    },
}
SWEEP_RECORD = {
    "sweep": optional(line),
    "created": optional(line),
    "calibration_task": optional(file_name),
    "identity": _IDENTITY,
    "settings": _SETTINGS,
    "model": optional(
        {
            "source": line,
            "revision": optional(line),
            "depth": optional(whole()),
            "parameters": optional(whole()),
            "layer_weights": optional([whole()]),
        }
    ),
    "tasks": each(
        {
            **{name: optional(line) for name in ("kind", "primary", "source")},
            "documents": whole(0, MAX_DOCUMENTS),
            "fewshot": optional(whole()),
            "datasets": optional(each(optional(line))),
        },
        file_name,
    ),
    "imported": optional(each([line], file_name)),  # by configuration: the files it was imported from
    "race_decisions": optional([_DECISION]),
    "commands": optional([{"code": optional(each(anything)), "packages": optional(each(line))}]),
}


def trial_record_problem(record: Mapping[str, Any], trial_id: str) -> str | None:
    """What is wrong with the content of a trial.json, as the end of a sentence about it; None if it can be used."""
    problem = shape_problem(record, TRIAL_RECORD, ("trial", "status", "attempts"))
    problem = problem or shape_problem(record["trial"], {}, TRIAL_REQUIRED)
    if problem is not None:
        return problem
    if record["status"] == "finished" and record.get("rows") is None:
        return "calls the trial finished, but does not state its number of rows"
    totals = record.get("tally") or {}
    if (totals.get("correct") or 0) > sum((totals.get("scored") or {}).values()):
        return "counts more correct documents than it has"
    return None if record["trial"]["trial_id"] == trial_id else f"describes the trial {record['trial']['trial_id']}"


def attempt_problem(attempt: Mapping[str, Any]) -> str | None:
    """What is wrong with some or all keys of an attempt in trial.json, as the end of a sentence; None if nothing is."""
    return shape_problem(attempt, TRIAL_RECORD["attempts"][0])


def sweep_record_problem(record: Mapping[str, Any]) -> str | None:
    """What is wrong with the content of a sweep.json, as the end of a sentence about it; None if it can be used.

    A missing key is not a problem here: a command that needs the key reports it.
    """
    problem = shape_problem(record, SWEEP_RECORD)
    if problem is not None:
        return problem
    settings = record.get("settings", {})
    lengths = [len(settings.get(name) or ()) or 1 for name in ("policies", *DECODE_SETTINGS)]
    return None if math.prod(lengths) <= MAX_CONFIGURATIONS else "asks for more configurations than a sweep can have"
