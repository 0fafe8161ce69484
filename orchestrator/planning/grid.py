"""The trials of a sweep, their ids and their order."""

import hashlib
import json
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from orchestrator.core.configuration import Configuration, grid
from orchestrator.core.trial import Trial
from orchestrator.planning.settings import SweepSettings
from sampler.errors import InputError
from tasks.documents import Document

SUBJECT_RUN_LENGTH = 8  # consecutive documents of one subject: they share few-shot examples, which are prefilled once
Cut = tuple[int | None, int]  # documents below this index of their subject (None: all) fill this many shards in total

# Not in format version 1: part of a trial's id only if set, so that the trials of existing sweeps keep their ids.
LATER_IDENTITY = ("family", "block_size", "thinking", "race", "half")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepIdentity:
    """What all trials of a sweep have in common: model, prompts and documents.

    Created by preflight; read by the trial ids, sweep.json (which refuses to continue with another one) and the report.
    """

    model: str
    model_revision: str | None
    depth: int
    dtype: str
    subset_size: int
    data: str  # kind of source: hub, folder or bundled
    datasets: Mapping[str, Mapping[str, str]]  # task: dataset: revision
    sample: int | None
    seed: int
    fewshot: int | None
    chat_template: bool
    max_new_tokens: int | None
    batch_size: int
    shard_size: int  # documents per trial, at most; of the first command
    cuts: Mapping[str, Sequence[Cut]] | None = None  # by task; None in older sweeps: shards of exactly shard_size
    family: str | None = None  # --family and --block-size, where config.json was overridden
    block_size: int | None = None
    thinking: bool = False
    race: bool = False  # documents are in a random order that depends on the seed
    half: str | None = None  # of the documents, which depends on the seed

    def as_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["datasets"] = {task: dict(revisions) for task, revisions in self.datasets.items()}
        for name in ("race", "half"):
            if not values[name]:
                del values[name]  # an older version can continue the sweep
        if self.cuts is None:
            del values["cuts"]
        else:
            values["cuts"] = {task: [list(cut) for cut in cuts] for task, cuts in self.cuts.items()}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SweepIdentity":
        return cls(**{**values, "cuts": stored_cuts(values)})

    def for_task(self, task: str) -> dict[str, Any]:
        """What can change the rows of every trial of a task."""
        leave_out = {"depth", "datasets", "cuts"} | (set() if self.cuts is None else {"shard_size"})
        common = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in leave_out}
        if self.sample is None and not self.race and self.half is None:
            del common["seed"]
        for name in LATER_IDENTITY:
            if not common[name]:
                del common[name]
        return {**common, "task": task, "datasets": dict(self.datasets[task])}


def stored_cuts(identity: Mapping[str, Any]) -> dict[str, tuple[Cut, ...]] | None:
    """The cuts in a stored identity; None if an older version made the sweep."""
    if "cuts" not in identity:
        return None
    try:
        found = {task: tuple((limit, shards) for limit, shards in cuts) for task, cuts in identity["cuts"].items()}
    except (AttributeError, TypeError, ValueError):
        found = {"": ((0, 0),)}
    for cuts in found.values():
        limits = [limit for limit, _ in cuts[:-1]] + [limit for limit, _ in cuts[-1:] if limit is not None]
        for numbers in (limits, [shards for _, shards in cuts]):
            if not all(type(number) is int and number > before for before, number in pairwise([0, *numbers])):
                raise InputError("sweep.json must state in 'cuts' growing limits and numbers of shards for each task")
    return found


def extend_cuts(
    cuts: Sequence[Cut], documents: Sequence[Document], *, limit: int | None, shard_size: int
) -> tuple[Cut, ...]:
    """Adds a cut if some documents within the limit have no shard yet: as few shards as have at most `shard_size`.

    Documents keep their shards when the limit grows, so no trial of an earlier command changes.
    """
    assert shard_size >= 1
    covered, shards = cuts[-1] if cuts else (0, 0)
    new = 0 if covered is None else sum(covered <= d.index and (limit is None or d.index < limit) for d in documents)
    if not new:
        return tuple(cuts)
    everything = limit is None or all(document.index < limit for document in documents)
    return (*cuts, (None if everything else limit, shards + -(-new // shard_size)))


def assign_shards(
    documents: Sequence[Document],
    cuts: Sequence[Cut] | None,
    *,
    shard_size: int = 1,
    position: Callable[[str], bytes] | None = None,
) -> dict[str, int]:
    """The shard of each document of a task (or of a sample) that a cut covers, in the order they are run.

    Subjects take turns, a few documents each. So the first documents of every subject, which --limit selects, fill the
    first shards. The shards of a cut have the same number of documents, or one more. `shard_size` is for sweeps of
    older versions, which have no cuts: their last shard can be much shorter than the others. In a race, documents are
    in the order of `position`, by id.
    """
    order = {subtask: place for place, subtask in enumerate(dict.fromkeys(d.subtask for d in documents))}

    def turn(document: Document) -> tuple[int, int, int]:
        round_number, place = divmod(document.index, SUBJECT_RUN_LENGTH)
        return round_number, order[document.subtask], place

    in_order = sorted(documents, key=turn if position is None else lambda document: position(document.doc_id))
    if cuts is None:
        return {document.doc_id: i // shard_size for i, document in enumerate(in_order)}
    shards: dict[str, int] = {}
    covered, first = 0, 0
    for limit, last in cuts:
        new = [d for d in in_order if covered <= d.index and (limit is None or d.index < limit)]
        shards |= {d.doc_id: first + i * (last - first) // len(new) for i, d in enumerate(new)}
        covered, first = limit or 0, last
    return shards


def plan_trials(
    identity: SweepIdentity,
    settings: SweepSettings,
    shards: Mapping[str, Sequence[int]],
    *,
    scored: Collection[str] = (),
) -> list[Trial]:
    """All trials in the order they should run, for the shards that each task has documents in.

    Shard by shard, and within a shard all configurations in random order: every configuration grows at the same pace
    on the same documents, and none always runs first. Tasks in `scored` have no decode settings.
    """
    prefixes = {task: _ShardPrefixes(identity, task) for task in settings.tasks}
    last = max((max(numbers) for numbers in shards.values() if numbers), default=-1)
    present = {task: frozenset(shards[task]) for task in settings.tasks}
    axes = settings.as_dict()
    trials = []
    for repeat, shard, task in product(range(settings.repeats), range(last + 1), settings.tasks):
        if shard in present[task]:
            configurations = grid(axes, decoded=task not in scored)
            random.Random(f"{settings.seed}:{repeat}:{shard}:{task}").shuffle(configurations)
            prefix = prefixes[task].of(shard)
            trials += [_trial(task, prefix, chosen, shard=shard, repeat=repeat) for chosen in configurations]
    return trials


class _ShardPrefixes:
    """The hashes of what the trials of a task's shards have in common, computed once per cut.

    The documents of a shard follow from its cut and those before it. A later cut changes no id.
    """

    def __init__(self, identity: SweepIdentity, task: str) -> None:
        common, cuts = identity.for_task(task), (identity.cuts or {}).get(task, ())
        self._ends = [shards for _, shards in cuts]
        upto = [{**common, "cuts": cuts[: place + 1]} for place in range(len(cuts))] if cuts else [common]
        self._hashes = [hashlib.sha256(f"[{_canonical_json(one)},".encode()) for one in upto]

    def of(self, shard: int) -> Any:
        return self._hashes[bisect_right(self._ends, shard)]


def _trial(task: str, prefix: Any, configuration: Configuration, *, shard: int, repeat: int) -> Trial:
    """The id is a hash of everything that can change the trial's rows: not of the limit, nor of the machine."""
    digest = prefix.copy()
    own = {**configuration.identity(), "repeat": repeat, "shard": shard}
    digest.update(f"{_canonical_json(own)}]".encode())
    return Trial(trial_id=digest.hexdigest()[:16], task=task, configuration=configuration, repeat=repeat, shard=shard)


_canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
