"""What a plan costs and what it can show: the lines of --dry-run, and the warnings before a run."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import special

from orchestrator.analysis.accuracy import POWER, documents_for_margin
from orchestrator.analysis.intervals import Levels
from orchestrator.core.configuration import Configuration
from orchestrator.core.evidence import BURN_IN_SHARDS, RaceRules, first_decisions
from orchestrator.core.system import format_bytes
from orchestrator.planning.estimate import (
    SecondsNeeded,
    best_speedup,
    disk_needed,
    duration_range,
    memory_needed,
    rough_pass_seconds,
    seconds_needed,
)
from orchestrator.planning.preflight import race_shard_size, replicate_of
from orchestrator.planning.prepared import PreparedSweep, PreparedTask
from sampler.policy import ReusePolicy
from sampler.records import LOGLIKELIHOOD

# Noise in simulated races, as in docs/statistics.md: standard deviations of a trial's log time and log answer length
TIME_NOISE, LENGTH_NOISE = 0.035, 0.05
SIMULATED_DOCUMENTS = 60_000  # of a task, in all simulated races of its configurations together
MAX_SIMULATED_RACES = 20
CHANGED_ANSWERS = 0.12  # share of the documents whose score a policy changes
MAX_BATCH = 256  # the largest batch size that is suggested


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceWorld:
    """An assumption about all policies, for simulated races."""

    description: str
    gains: bool  # every policy reaches its ideal speed-up; otherwise none is faster
    lost: float = 0.0  # accuracy, as a multiple of the margin


RACE_WORLDS = (
    RaceWorld(description="if no policy is faster", gains=False),
    RaceWorld(description="if all reach their ideal speed-up and lose no accuracy", gains=True),
    RaceWorld(description="if all reach it but lose 1.35 times the margin", gains=True, lost=1.35),
)


def describe_plan(
    prepared: PreparedSweep,
    *,
    done: Mapping[str, Collection[str]] | None = None,
    measured: Mapping[str, float] | None = None,
) -> list[str]:
    """What --dry-run prints. `done`: document ids by trial; `measured`: seconds per document by task."""
    settings, identity, placement = prepared.settings, prepared.identity, prepared.placement
    work = prepared.work(done)
    trials, rows = sum(task.trials for task in work.values()), sum(task.rows for task in work.values())
    needed = seconds_needed(
        work, measured or {}, config=prepared.files.config, dtype=identity.dtype, device=prepared.device
    )
    actors = max(1, min(placement.actors, trials))
    time = f"about {duration_range(*_total(needed))} on one actor"
    if actors > 1:
        time += f", {duration_range(*(seconds / actors for seconds in _total(needed)))} on {actors} actors"
    download = f"; {format_bytes(prepared.download)} to download" if prepared.download else ""
    disk = format_bytes(disk_needed(work, running=prepared.rows_in_progress, steps=settings.store_steps))
    return [
        *prepared.notices,
        f"directory  {prepared.folder}",
        f"model      {identity.model} ({identity.depth} layers, {identity.dtype}){download}",
        f"memory     about {_memory(prepared)}",
        *(
            f"task       {name}: {_documents(task)}, {len(task.by_shard):,} shard{'s' * (len(task.by_shard) != 1)}, "
            f"{work[name].rows:,} rows to run, about {duration_range(needed[name].least, needed[name].most)}"
            for name, task in prepared.tasks.items()
        ),
        f"policies   {', '.join((*settings.policies, *settings.configurations))}",
        f"trials     {trials:,} of {len(prepared.trials):,} to run, {rows:,} rows"
        + (" at most: --race stops a configuration once its verdict is certain" if settings.race else ""),
        f"actors     {placement.actors} ({placement.each})",
        f"disk       about {disk}" + (f", and {format_bytes(prepared.download)} for the model" if download else ""),
        f"time       {time}, {_basis(prepared, needed)}",
        *describe_power(prepared),
        *describe_race(prepared),
        *(f"warning    {problem}" for problem in undecidable(prepared)),
    ]


def _total(needed: Mapping[str, SecondsNeeded]) -> tuple[float, float]:
    return sum(task.least for task in needed.values()), sum(task.most for task in needed.values())


def _documents(task: PreparedTask) -> str:
    wanted, every = len(task.wanted), len(task.task.documents)
    source = " (published number; not loaded)" if task.task.provenance.source == "published" else ""
    return f"{wanted:,} of {every:,} documents{source}"


def _memory(prepared: PreparedSweep) -> str:
    """The memory of an actor at the chosen batch size, and the largest batch size that its device has memory for."""
    needed, size = f"{format_bytes(prepared.memory)} per actor at batch size ", prepared.settings.batch_size
    if not prepared.device.memory:
        return f"{needed}{size}"
    largest, available = largest_batch(prepared), prepared.device.memory * prepared.placement.gpus_per_actor
    more = f"; batch size {largest} would fit" if largest is not None and largest > size else ""
    return f"{needed}{size}, of {format_bytes(available)} ({prepared.device.label}){more}"


def largest_batch(prepared: PreparedSweep) -> int | None:
    """The largest power of two up to MAX_BATCH that fits on an actor's share of its device; None if none does."""
    available = prepared.device.memory * prepared.placement.gpus_per_actor
    sizes = [2**power for power in range(MAX_BATCH.bit_length())]
    config, dtype = prepared.files.config, prepared.identity.dtype
    return max((n for n in sizes if memory_needed(config, dtype, batch_size=n) <= available), default=None)


def _basis(prepared: PreparedSweep, needed: Mapping[str, SecondsNeeded]) -> str:
    """What the estimated time is based on: measured rows, or which assumptions."""
    rough = [name for name, task in needed.items() if not task.measured]
    if not rough:
        return "from the rows measured so far"
    device = prepared.device
    a_pass = rough_pass_seconds(prepared.files.config, prepared.identity.dtype, device)
    lengths = sorted({prepared.tasks[name].tokens for name in rough} - {0})
    tokens = f"answers of {', '.join(map(str, lengths))} tokens, " if lengths else ""
    rule = (
        f"a rough estimate ({tokens}{device.tokens_per_pass:g} tokens per pass, {a_pass * 1000:.0f} ms per pass on "
        f"{device.label}; from the ideal speed-up of every policy to none"
        f"{'; without the gain from batching' * (prepared.settings.batch_size > 1)})"
    )
    return rule if len(rough) == len(needed) else f"for {', '.join(rough)} {rule}"


# What the plan can show


def compared(prepared: PreparedSweep, task: str) -> tuple[list[Configuration], list[Configuration]]:
    """The baselines at k=1, and the configurations that are compared with them."""
    configurations, rule = prepared.configurations(task), prepared.baselines[task]
    bases = [one for one in configurations if ReusePolicy.parse(one.policy).k == 1 and rule.is_baseline(one)]
    return bases, [one for one in configurations if one not in bases]


def needed_for_margin(prepared: PreparedSweep, task: str) -> int | None:
    return documents_for_margin(prepared.settings.margin, len(compared(prepared, task)[1]))


def describe_power(prepared: PreparedSweep) -> Iterator[str]:
    """How many documents each of the two questions needs, for the declared margin and speed-up."""
    settings = prepared.settings
    by_need: dict[int | None, list[str]] = {}
    for name in prepared.tasks:
        if all(compared(prepared, name)):
            by_need.setdefault(needed_for_margin(prepared, name), []).append(name)
    for need, names in by_need.items():
        has = ", ".join(f"{name} has {len(prepared.tasks[name].wanted):,}" for name in names)
        yield (
            f"accuracy   {'no number of' if need is None else f'{need:,}'} documents can show with 80 % power that "
            f"less than {settings.margin:g} points are lost, if 10 % of the answers change and accuracy stays the "
            f"same: {has}"
        )
    speeds = sorted(_speed_needs(prepared).items())
    for speedup, (need, policies) in speeds:
        if need is None:
            fact = f"the ideal speed-up of {speedup:.2f}× is not above the declared {settings.speedup:g}×"
        else:
            fact = f"about {need:,} documents can show a speed-up above {settings.speedup:g}× if it is {speedup:.2f}×"
        yield f"speed      {', '.join(policies)}: {fact}"


def _speed_needs(prepared: PreparedSweep) -> dict[float, tuple[int | None, list[str]]]:
    """By ideal speed-up, for policies of the fixed grid: the documents that show the declared one, and the policies."""
    generating = [name for name, task in prepared.tasks.items() if task.task.kind != LOGLIKELIHOOD]
    needs: dict[float, tuple[int | None, list[str]]] = {}
    if not generating or not all(compared(prepared, generating[0])):
        return {}
    others = compared(prepared, generating[0])[1]
    levels = Levels(comparisons=len(others))
    reach = float(special.ndtri((1 + levels.confirming) / 2) + special.ndtri(POWER))
    size = max(prepared.tasks[name].shard_size for name in generating)
    for policy in dict.fromkeys(one.policy for one in others):
        best = round(best_speedup(policy, prepared.identity.depth, prepared.settings.subset_size), 4)
        if best > 1:
            distance = math.log(best / prepared.settings.speedup)
            shards = math.ceil((reach * math.sqrt(2) * TIME_NOISE / distance) ** 2) if distance > 0 else None
            needs.setdefault(best, (None if shards is None else shards * size, []))[1].append(policy)
    return needs


def undecidable(prepared: PreparedSweep) -> list[str]:
    """Why verdicts of this plan will be missing or stay undecided."""
    settings = prepared.settings
    bases = [name for name in settings.policies if ReusePolicy.parse(name).k == 1]
    if not bases:
        return ["no policy is k1, so nothing can be compared and there will be no verdict: add k1_first,k1_last"]
    if not any(compared(prepared, name)[1] for name in prepared.tasks):
        return []
    problems = []
    generates = any(task.task.kind != LOGLIKELIHOOD for task in prepared.tasks.values())
    if generates and len(bases) == 1 and settings.repeats == 1:
        problems.append(
            f"k=1 runs only once ({bases[0]}), which says little about the noise between runs, so verdicts on speed "
            f"may stay undecided: add {replicate_of(bases[0])}"
        )
    few: dict[int | None, list[str]] = {}
    for name, task in prepared.tasks.items():
        need, has = needed_for_margin(prepared, name), len(task.wanted)
        if need is None or has < need:
            few.setdefault(need, []).append(f"{has:,} documents of {name}")
    for need, tasks in few.items():
        problems.append(
            f"{', '.join(tasks)} are too few to show that less than {settings.margin:g} points are lost "
            f"({'no number is enough' if need is None else f'about {need:,} are needed'}): a policy that loses nothing "
            "will probably stay undecided"
        )
    needs = _speed_needs(prepared)
    slow = [policy for need, policies in needs.values() if need is None for policy in policies]
    if slow:
        problems.append(
            f"{', '.join(slow)} cannot exceed the declared speed-up of {settings.speedup:g}× even in the ideal case"
        )
    return problems


# What a race would save


def describe_race(prepared: PreparedSweep) -> Iterator[str]:
    shares = race_shares(prepared)
    if shares:
        low, high = (f"{100 * share:.0f}" for share in (min(shares.values()), max(shares.values())))
        verb = "takes" if prepared.settings.race else "would take"
        each = ", ".join(f"{100 * share:.0f} % {assumption}" for assumption, share in shares.items())
        yield f"race       --race {verb} about {low} to {high} % of the full grid's time: {each}"


def race_shares(prepared: PreparedSweep) -> dict[str, float]:
    """Time of a race relative to the full grid, in simulated races of this plan, by `RaceWorld.description`."""
    settings = prepared.settings
    if settings.repeats > 1 or not all(compared(prepared, next(iter(prepared.tasks)))):
        return {}
    shares = {}
    for world in RACE_WORLDS:
        times = np.array([_raced_time(prepared, name, world) for name in prepared.tasks])
        used, full = times.sum(axis=0)
        shares[world.description] = float(used / full)
    return shares


def _raced_time(prepared: PreparedSweep, name: str, world: RaceWorld) -> tuple[float, float]:
    """Seconds of one actor for a race on a task, and for the full grid."""
    settings, task = prepared.settings, prepared.tasks[name]
    generates, documents = task.task.kind != LOGLIKELIHOOD, len(task.wanted)
    bases, others = compared(prepared, name)
    cost = {one: prepared.cost(name, one)[0 if world.gains else 1] for one in (*bases, *others)}
    rules = RaceRules(
        alpha=settings.race_alpha,
        margin=settings.margin,
        speedup=settings.speedup,
        comparisons=len(others),
        generates=generates,
    )
    shards = -(-documents // race_shard_size(task.shard_size, documents))
    sweeps = max(1, min(MAX_SIMULATED_RACES, SIMULATED_DOCUMENTS // (documents * len(others))))
    rng = np.random.default_rng(0)
    lost = np.zeros((sweeps, len(others), documents))
    net = round(documents * world.lost * settings.margin / 100)
    won = max(0, round(documents * CHANGED_ANSWERS - net) // 2)
    lost[..., : net + won], lost[..., net + won : net + 2 * won] = -1, 1
    noise = TIME_NOISE * rng.normal(size=(sweeps, len(others) + 1, shards))
    base_cost = {base.settings: cost[base] for base in reversed(bases)}
    speed = np.log([base_cost[prepared.baselines[name].settings_for(one)] / cost[one] for one in others])[:, None]
    tokens = speed - (noise[:, 1:] - noise[:, :1])
    lengths = LENGTH_NOISE * rng.normal(size=tokens.shape)
    decided = first_decisions(rng.permuted(lost, axis=-1), tokens, tokens - lengths, rules)
    used, burn_in = 0.0, min(BURN_IN_SHARDS / shards, 1.0)
    settings_for = prepared.baselines[name].settings_for
    for settings_of_group in dict.fromkeys(map(settings_for, others)):
        members = [index for index, one in enumerate(others) if settings_for(one) == settings_of_group]
        own = [cost[one] for one in bases if one.settings == settings_of_group]
        longest = decided.shards[:, members].max(axis=-1) / shards
        used += float((decided.shards[:, members] / shards * [cost[others[index]] for index in members]).sum(-1).mean())
        used += own[0] * float(longest.mean()) + sum(own[1:]) * float(np.minimum(longest, burn_in).mean())
    each = documents * prepared.document_seconds(name)
    return each * used, each * sum(cost.values())
