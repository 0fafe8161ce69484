"""Packs the blocks of many examples into batches of one fixed size, the same for the same seed. Knows no text.

A step's batch is a few shards, each a whole number of examples that together have nearly `SHARD` blocks; the rest is
filled with empty blocks. Which examples share a shard follows from the seed and the epoch, how they are masked from
the seed and the step: a run that is resumed needs to know its step and nothing else.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sampler.config import ModelConfig
from sampler.errors import InputError
from tools.tiny.examples import Example
from tools.tiny.network import Blocks, Group
from tools.tiny.rows import Row, count_rows, make_rows

SHARD = 56  # blocks
SHARDS = 2  # of a step; computed side by side where there are threads for it
CHOICE_VISITS, DRILL_VISITS = 2, 4  # in an epoch: they take few blocks
OPEN_SHARDS = 8  # an example goes into the first of these that has room


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Blocks to forward, and what to learn at which of their positions."""

    blocks: Blocks
    at_M: Tensor
    target_M: Tensor
    weight_M: Tensor
    examples: int


class Batches:
    """Batches by step. Holds the examples and no position in them."""

    def __init__(self, examples: Sequence[Example], config: ModelConfig, *, seed: int, size: int = SHARD) -> None:
        self.examples, self.config, self.seed, self.size = examples, config, seed, size
        self.counts = [count_rows(example, config) for example in examples]
        longest = max(range(len(examples)), key=lambda index: self.counts[index])
        if self.counts[longest] > size:
            raise InputError(
                f"training example {longest + 1} takes {self.counts[longest]} blocks of {config.block_size} tokens, "
                f"copies included; at most {size} are allowed"
            )
        self.shards_of_epoch = lru_cache(maxsize=2)(self._shards_of_epoch)

    def shards(self, step: int, like_decoding: float) -> list[Shard]:
        """The shards of a step. `like_decoding` is the share of answers masked as in decoding."""
        return [self.shard(step * SHARDS + number, like_decoding) for number in range(SHARDS)]

    def shard(self, number: int, like_decoding: float) -> Shard:
        rng = random.Random(f"masks {self.seed} {number}")
        members = self._members(number)
        rows = [make_rows(self.examples[index], self.config, rng, like_decoding) for index in members]
        return pack(rows, self.config, self.size)

    def _members(self, number: int) -> tuple[int, ...]:
        epoch = 0
        while number >= len(shards := self.shards_of_epoch(epoch)):
            number -= len(shards)
            epoch += 1
        return shards[number]

    def _shards_of_epoch(self, epoch: int) -> list[tuple[int, ...]]:
        rng = random.Random(f"order {self.seed} {epoch}")
        order = [index for index, example in enumerate(self.examples) for _ in range(_visits(example))]
        rng.shuffle(order)
        full: list[list[int]] = []
        unfilled: list[tuple[int, list[int]]] = []  # room left, members
        for index in order:
            count = self.counts[index]
            fits = next((place for place, (room, _) in enumerate(unfilled) if room >= count), None)
            if fits is None:
                if len(unfilled) == OPEN_SHARDS:
                    fullest = min(range(len(unfilled)), key=lambda place: unfilled[place][0])
                    full.append(unfilled.pop(fullest)[1])
                unfilled.append((self.size - count, [index]))
            else:
                room, members = unfilled[fits]
                members.append(index)
                unfilled[fits] = (room - count, members)
        shards = [tuple(members) for members in [*full, *(members for _, members in unfilled)]]
        rng.shuffle(shards)
        return shards


def _visits(example: Example) -> int:
    return DRILL_VISITS if example.asked is not None else CHOICE_VISITS if example.is_choice else 1


def pack(examples: Sequence[Sequence[Row]], config: ModelConfig, size: int) -> Shard:
    """One shard of `size` blocks, ordered by how many blocks they see."""
    entries: list[tuple[Row, tuple[int, ...]]] = []  # a row, and the entries it sees
    for rows in examples:
        first = len(entries)
        for number, row in enumerate(rows):
            entries.append((row, (*range(first, first + row.place), first + number)))
    empty = Row(tokens=(config.pad_token_id,) * config.block_size, place=0, noisy=False, readings=())
    entries += [(empty, (number,)) for number in range(len(entries), size)]
    assert len(entries) == size
    order = sorted(range(size), key=lambda number: len(entries[number][1]))
    place_of = {number: place for place, number in enumerate(order)}
    readings = [
        (place * config.block_size + reading.offset, reading.target, reading.weight)
        for place, number in enumerate(order)
        for reading in entries[number][0].readings
    ]
    return Shard(
        blocks=Blocks(
            tokens_BS=torch.tensor([entries[number][0].tokens for number in order]),
            place_B=torch.tensor([entries[number][0].place for number in order]),
            groups=_groups([[place_of[seen] for seen in entries[number][1]] for number in order]),
        ),
        at_M=torch.tensor([at for at, _, _ in readings]),
        target_M=torch.tensor([target for _, target, _ in readings]),
        weight_M=torch.tensor([weight for _, _, weight in readings]),
        examples=len(examples),
    )


def _groups(seen: Sequence[Sequence[int]]) -> list[Group]:
    groups = []
    begin = 0
    while begin < len(seen):
        end = begin
        while end < len(seen) and len(seen[end]) == len(seen[begin]):
            end += 1
        indices = torch.tensor([index for places in seen[begin:end] for index in places])
        groups.append(Group(begin=begin, end=end, seen=indices))
        begin = end
    return groups
