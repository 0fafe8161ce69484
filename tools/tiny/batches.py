"""Training examples → blocks → batches of one fixed size, the same for the same seed.

An example becomes clean blocks, which others attend to, and noisy blocks, which are denoised. Both look like blocks
during decoding. The first token of a block is never masked: decoding gets it from the last position of the previous
block, which is learned in the clean copy. The stop token is repeated to the end of the block, with a small weight.
Each block of an answer has two noisy copies. They are masked either at random positions, or as in decoding: one small
block is partly revealed, those before it are known, those after it masked. The last block needs no clean copy, a
block of the prompt no noisy one.

A step's batch is a few shards, each with a whole number of examples that together have nearly `SHARD_BLOCKS` blocks;
the rest is filled with empty blocks. Seed and epoch decide which examples share a shard, seed and step how they are
masked, so a run needs only its step to resume.
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
from tools.tiny.network import Group, PackedBlocks

SMALL_BLOCK = 8  # of decoding
STOP_FILL_WEIGHT = 0.1  # of stop tokens after the first
AHEAD_WEIGHT = 0.2  # of tokens after the small block being denoised: most cannot be known yet
CONTENT_WEIGHT = 2.0  # of tokens that distinguish answers; the words around them are easy
CHOICE_WEIGHT = 12.0  # of the letter that answers a question; an example has only one
DRILL_WEIGHT = 4.0  # of the results of a drill
CONTENT_ONLY_SHARE = 0.5  # of randomly masked blocks mask only content, to learn where it is copied from
STOP_VISIBLE_SHARE = 0.8  # of choices show the stop token, as in scoring
ALL_MASKED_SHARE = 0.4  # of small blocks have nothing revealed yet
SHARD_BLOCKS = 56
SHARDS_PER_STEP = 2  # computed in parallel if there are two threads
CHOICE_VISITS, DRILL_VISITS = 2, 4  # per epoch; they take few blocks
OPEN_SHARDS = 8  # an example goes into the first of these that has enough space


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction to learn: the token after position `offset` of the block."""

    offset: int
    target: int
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One block; it attends to the clean blocks of its example before `place`, and to itself."""

    tokens: tuple[int, ...]
    place: int  # in the sequence of blocks
    noisy: bool
    predictions: tuple[Prediction, ...]


def count_blocks(example: Example, config: ModelConfig) -> int:
    """How many blocks `make_blocks` returns."""
    layout = _Layout(example, config)
    copies = 1 if example.is_choice or example.asked is not None else 2
    return len(layout.clean) + copies * len(layout.denoised)


def make_blocks(example: Example, config: ModelConfig, rng: random.Random, like_decoding: float) -> list[Block]:
    """Clean blocks first, in order. `like_decoding` is the share of answers masked as in decoding."""
    layout = _Layout(example, config)
    rows = [layout.clean_block(place) for place in layout.clean]
    for place in layout.denoised:
        for hidden, weights in layout.masks(place, rng, like_decoding):
            rows.append(layout.noisy_block(place, hidden, weights))
    assert len(rows) == count_blocks(example, config)
    return rows


class _Layout:
    """The blocks of an example and its answer. Offsets count within a block, positions in the whole sequence."""

    def __init__(self, example: Example, config: ModelConfig) -> None:
        self.example, self.size, self.mask = example, config.block_size, config.mask_token_id
        self.stop = len(example.tokens) - 1
        self.tokens = example.tokens + (config.eos_token_ids[0],) * (-len(example.tokens) % self.size)
        blocks = range(len(self.tokens) // self.size)
        self.denoised = [place for place in blocks if self._learned(place)]
        self.clean = range(max([*self.denoised, *(place for place in blocks if self._predicts_first(place))]))

    def clean_block(self, place: int) -> Block:
        following = (place + 1) * self.size
        if not self._predicts_first(place + 1):
            return Block(tokens=self._block(place), place=place, noisy=False, predictions=())
        weight = CHOICE_WEIGHT if self.example.is_choice and following < self.stop else self._weight(following)
        prediction = Prediction(self.size - 1, self.tokens[following], weight)
        return Block(tokens=self._block(place), place=place, noisy=False, predictions=(prediction,))

    def noisy_block(self, place: int, hidden: set[int], weights: dict[int, float]) -> Block:
        block = self._block(place)
        return Block(
            tokens=tuple(self.mask if offset in hidden else token for offset, token in enumerate(block)),
            place=place,
            noisy=True,
            predictions=tuple(Prediction(offset - 1, block[offset], weights[offset]) for offset in sorted(weights)),
        )

    def masks(self, place: int, rng: random.Random, like_decoding: float) -> list[tuple[set[int], dict[int, float]]]:
        """For each noisy copy: the masked offsets, and the offsets to learn with their weights."""
        open_offsets = self._masked_at_start(place)
        if self.example.is_choice:
            return [self._choice_masks(place, open_offsets, rng)]
        if self.example.asked is not None:
            return [self._drill_masks(place, rng)]
        if rng.random() < like_decoding:
            return self._decoding_masks(place, open_offsets, rng)
        begin = place * self.size
        content = [offset for offset in open_offsets if self.tokens[begin + offset] in self.example.content]
        return self._random_masks(place, content if rng.random() < CONTENT_ONLY_SHARE else open_offsets, rng)

    def _random_masks(
        self, place: int, offsets: Sequence[int], rng: random.Random
    ) -> list[tuple[set[int], dict[int, float]]]:
        """Two complementary copies: each token is masked in exactly one of them."""
        rate = rng.random()
        hidden = {offset for offset in offsets if rng.random() < rate}
        return [(some, self._weights(place, some)) for some in (hidden, set(offsets) - hidden)]

    def _choice_masks(self, place: int, open_offsets: range, rng: random.Random) -> tuple[set[int], dict[int, float]]:
        letter, stop = open_offsets[0], self.stop - place * self.size
        hidden = set(open_offsets)
        weights = {letter: CHOICE_WEIGHT}
        if rng.random() < STOP_VISIBLE_SHARE:
            hidden.discard(stop)
        elif stop < self.size:
            weights[stop] = 1.0
        return hidden, weights

    def _drill_masks(self, place: int, rng: random.Random) -> tuple[set[int], dict[int, float]]:
        shown = rng.random() * 0.3
        hidden = {offset for offset in self._learned(place) if rng.random() >= shown}
        return hidden, dict.fromkeys(hidden, DRILL_WEIGHT)

    def _decoding_masks(
        self, place: int, open_offsets: range, rng: random.Random
    ) -> list[tuple[set[int], dict[int, float]]]:
        """Two stages of decoding this block, each with another small block in progress if there are several."""
        last = min(self.stop - place * self.size, self.size - 1)
        numbers = list(range(open_offsets[0] // SMALL_BLOCK, last // SMALL_BLOCK + 1))
        chosen = rng.sample(numbers, 2) if len(numbers) > 1 else numbers * 2
        copies = []
        for number in chosen:
            within = [offset for offset in open_offsets if offset // SMALL_BLOCK == number]
            rate = 1.0 if rng.random() < ALL_MASKED_SHARE else rng.random()
            now = {offset for offset in within if rng.random() < rate} or {rng.choice(within)}
            later = {offset for offset in open_offsets if offset // SMALL_BLOCK > number}
            weights = self._weights(place, now)
            weights |= {offset: AHEAD_WEIGHT * weight for offset, weight in self._weights(place, later).items()}
            copies.append((now | later, weights))
        return copies

    def _weights(self, place: int, hidden: set[int]) -> dict[int, float]:
        return {offset: self._weight(place * self.size + offset) for offset in hidden}

    def _weight(self, position: int) -> float:
        if position > self.stop:
            return STOP_FILL_WEIGHT
        return CONTENT_WEIGHT if self.tokens[position] in self.example.content else 1.0

    def _masked_at_start(self, place: int) -> range:
        """Offsets that are masked when decoding starts this block."""
        return range(max(self.example.prompt - place * self.size, 1), self.size)

    def _learned(self, place: int) -> list[int]:
        """Offsets of the block that denoising has to predict."""
        begin = place * self.size
        if self.example.asked is not None:
            return [offset for offset in range(1, self.size) if begin + offset in self.example.asked]
        last = self.stop - 1 if self.example.is_choice else self.stop  # the stop token of a choice is never predicted
        return [offset for offset in self._masked_at_start(place) if begin + offset <= last]

    def _predicts_first(self, place: int) -> bool:
        """Whether the block's first token is to be learned, from the last position of the block before it."""
        position = place * self.size
        if self.example.asked is not None:
            return position in self.example.asked
        return self.example.prompt <= position <= self.stop

    def _block(self, place: int) -> tuple[int, ...]:
        return self.tokens[place * self.size : (place + 1) * self.size]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Blocks to run forward, and the token to learn at each of the positions `at_M`."""

    blocks: PackedBlocks
    at_M: Tensor
    target_M: Tensor
    weight_M: Tensor
    examples: int


class Batches:
    """Computes the batch of any step from its number, without state between calls."""

    def __init__(
        self, examples: Sequence[Example], config: ModelConfig, *, seed: int, size: int = SHARD_BLOCKS
    ) -> None:
        self.examples, self.config, self.seed, self.size = examples, config, seed, size
        self.counts = [count_blocks(example, config) for example in examples]
        longest = max(range(len(examples)), key=lambda index: self.counts[index])
        if self.counts[longest] > size:
            raise InputError(
                f"training example {longest + 1} needs {self.counts[longest]} blocks of {config.block_size} tokens "
                f"including copies; the limit is {size}"
            )
        self.shards_of_epoch = lru_cache(maxsize=2)(self._shards_of_epoch)

    def shards(self, step: int, like_decoding: float) -> list[Shard]:
        """The shards of a step. `like_decoding` is the share of answers masked as in decoding."""
        return [self.shard(step * SHARDS_PER_STEP + number, like_decoding) for number in range(SHARDS_PER_STEP)]

    def shard(self, number: int, like_decoding: float) -> Shard:
        rng = random.Random(f"masks {self.seed} {number}")
        members = self._members(number)
        rows = [make_blocks(self.examples[index], self.config, rng, like_decoding) for index in members]
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
        unfilled: list[tuple[int, list[int]]] = []  # free blocks, members
        for index in order:
            count = self.counts[index]
            target = next((place for place, (free, _) in enumerate(unfilled) if free >= count), None)
            if target is None:
                if len(unfilled) == OPEN_SHARDS:
                    fullest = min(range(len(unfilled)), key=lambda place: unfilled[place][0])
                    full.append(unfilled.pop(fullest)[1])
                unfilled.append((self.size - count, [index]))
            else:
                free, members = unfilled[target]
                members.append(index)
                unfilled[target] = (free - count, members)
        shards = [tuple(members) for members in [*full, *(members for _, members in unfilled)]]
        rng.shuffle(shards)
        return shards


def _visits(example: Example) -> int:
    return DRILL_VISITS if example.asked is not None else CHOICE_VISITS if example.is_choice else 1


def pack(examples: Sequence[Sequence[Block]], config: ModelConfig, size: int) -> Shard:
    """A shard of exactly `size` blocks, sorted by the number of blocks that each attends to."""
    entries: list[tuple[Block, tuple[int, ...]]] = []  # a block, and the entries it attends to
    for rows in examples:
        first = len(entries)
        for number, row in enumerate(rows):
            entries.append((row, (*range(first, first + row.place), first + number)))
    empty = Block(tokens=(config.pad_token_id,) * config.block_size, place=0, noisy=False, predictions=())
    entries += [(empty, (number,)) for number in range(len(entries), size)]
    assert len(entries) == size
    order = sorted(range(size), key=lambda number: len(entries[number][1]))
    place_of = {number: place for place, number in enumerate(order)}
    predictions = [
        (place * config.block_size + prediction.offset, prediction.target, prediction.weight)
        for place, number in enumerate(order)
        for prediction in entries[number][0].predictions
    ]
    return Shard(
        blocks=PackedBlocks(
            tokens_BS=torch.tensor([entries[number][0].tokens for number in order]),
            place_B=torch.tensor([entries[number][0].place for number in order]),
            groups=_groups([[place_of[seen] for seen in entries[number][1]] for number in order]),
        ),
        at_M=torch.tensor([at for at, _, _ in predictions]),
        target_M=torch.tensor([target for _, target, _ in predictions]),
        weight_M=torch.tensor([weight for _, _, weight in predictions]),
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
