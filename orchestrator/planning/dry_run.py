"""What a sweep would do, in a few lines: trials, documents, time, disk. Starts nothing, writes nothing."""

from collections.abc import Collection, Mapping

from orchestrator.planning.estimate import (
    ANSWER_TOKENS,
    TOKENS_PER_PASS,
    disk_needed,
    rough_pass_seconds,
    seconds_needed,
)
from orchestrator.planning.prepared import Prepared


def describe(
    prepared: Prepared,
    *,
    done: Mapping[str, Collection[str]] | None = None,
    measured: Mapping[str, float] | None = None,
) -> list[str]:
    """Lines for people. `done`: document ids by trial; `measured`: seconds for each document by task."""
    settings, identity, placement = prepared.settings, prepared.identity, prepared.placement
    work = prepared.work(done)
    trials, rows = sum(task.trials for task in work.values()), sum(task.rows for task in work.values())
    device = "GPU" if placement.gpus_per_actor else "CPU"
    config, dtype = prepared.files.config, identity.dtype
    seconds, rough = seconds_needed(work, measured or {}, config=config, dtype=dtype, device=device)
    actors = max(1, min(placement.actors, trials))
    return [
        *prepared.notices,
        f"folder     {prepared.folder}",
        f"model      {identity.model} ({identity.depth} layers, {dtype}, about {size(prepared.memory)} of memory each)",
        *(
            f"task       {name}: {len(task.wanted):,} of {len(task.task.documents):,} documents, "
            f"{len(task.by_shard):,} shard{'s' * (len(task.by_shard) != 1)}, {work[name].rows:,} rows to do"
            for name, task in prepared.tasks.items()
        ),
        f"policies   {', '.join(settings.policies)}",
        f"trials     {trials:,} to do of {len(prepared.trials):,}, {rows:,} rows",
        f"actors     {placement.actors} ({placement.each})",
        f"disk       about {size(disk_needed(work, running=prepared.running))}",
        f"time       about {duration(seconds / actors)}, {_basis(prepared, rough, measured or {}, device)}",
    ]


def _basis(prepared: Prepared, rough: Collection[str], measured: Mapping[str, float], device: str) -> str:
    """What an estimate of time rests on."""
    if not rough:
        return "from the rows that are there"
    a_pass = rough_pass_seconds(prepared.files.config, prepared.identity.dtype, device)
    rule = (
        f"a rough guess (no more than {ANSWER_TOKENS} tokens an answer, {TOKENS_PER_PASS:g} tokens a pass, "
        f"{a_pass * 1000:.0f} ms a pass on a {device})"
    )
    return rule if not measured else f"for {', '.join(rough)} {rule}"


def size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
