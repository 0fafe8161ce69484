"""Checks before a run that disk and memory suffice for the trials that are left."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from orchestrator.core.errors import Problems
from orchestrator.core.hardware import Device
from orchestrator.core.trial import Trial
from orchestrator.planning.dry_run import size
from orchestrator.planning.estimate import disk_needed
from orchestrator.planning.machine import Machine
from orchestrator.planning.prepared import Prepared
from sampler.errors import InputError


def check_room(prepared: Prepared, machine: Machine, trials: Sequence[Trial]) -> None:
    """An InputError with all that is lacking. Memory of GPUs and of other machines is checked by `check_devices`."""
    problems = Problems()
    with problems.collect():
        _check_disk(prepared, trials)
    with problems.collect():
        if machine.memory is not None and not prepared.placement.gpus_per_actor:
            actors = max(1, min(prepared.placement.actors, len(trials)))
            _check_memory(prepared.memory, machine.memory, actors)
    problems.check()


def _check_memory(needed: int, free: int, actors: int) -> None:
    if needed * actors > free:
        raise InputError(
            f"each actor needs about {size(needed)} of memory, and with {size(free)} free each of {actors} has "
            f"{size(free / actors)}: use a smaller --batch-size or fewer --actors"
        )


def check_devices(needed: int, devices: Sequence[Device], *, share: float = 1.0, in_use: bool = False) -> list[Device]:
    """Devices too small for an actor; an InputError if all are. `in_use`: other programs may give memory back."""

    def bytes_of(device: Device) -> float:
        return (device.total if in_use else device.free) * share

    small = [device for device in devices if bytes_of(device) < needed]
    if devices and len(small) == len(devices):
        largest = max(devices, key=bytes_of)
        raise InputError(
            f"each actor needs about {size(needed)} of memory, and the largest device ({largest.label}) has "
            f"{size(bytes_of(largest))} for it: use a smaller --batch-size"
        )
    return small


def _check_disk(prepared: Prepared, trials: Sequence[Trial]) -> None:
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
