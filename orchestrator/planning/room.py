"""Whether disk and memory hold what is still to run, before anything of it is begun. Knows no Ray."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from orchestrator.planning.dry_run import size
from orchestrator.planning.estimate import disk_needed
from orchestrator.planning.grid import TrialSpec
from orchestrator.planning.machine import Machine
from orchestrator.planning.prepared import Prepared
from orchestrator.planning.problems import Problems
from sampler.errors import InputError


def check_room(prepared: Prepared, machine: Machine, trials: Sequence[TrialSpec]) -> None:
    """All that is lacking for these trials. The memory of a GPU, or of another machine, has to be asked there."""
    problems = Problems()
    with problems.noted():
        _check_disk(prepared, trials)
    with problems.noted():
        if machine.memory is not None and not prepared.placement.gpus_per_actor:
            actors = max(1, min(prepared.placement.actors, len(trials)))
            check_memory(prepared.memory, machine.memory / actors, "cpu")
    problems.check()


def check_memory(needed: int, free: float, kind: str) -> None:
    if needed > free:
        raise InputError(
            f"each actor needs about {size(needed)} of memory and has {size(free)} free on its {kind}: "
            "a smaller --batch-size or fewer --actors are allowed"
        )


def _check_disk(prepared: Prepared, trials: Sequence[TrialSpec]) -> None:
    needed = disk_needed(prepared.work(trials=trials), running=prepared.running)
    free = shutil.disk_usage(existing(Path(prepared.settings.out))).free
    if needed > free:
        raise InputError(
            f"--out {prepared.settings.out}: about {size(needed)} are needed there and {size(free)} are free; "
            "name another folder, or a smaller --limit"
        )


def existing(path: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
