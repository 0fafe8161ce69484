"""An example → the blocks a network learns it from: clean ones that are seen, noisy ones that are denoised.

Blocks look as decoding will meet them. A block's first token is never masked: decoding gets it from the last position
of the block before, which is read in the clean copy. Behind the stop token stand more of them, which count little.
Each block of an answer has two noisy copies. They are masked either here and there, at most half of them, or as in
decoding: one small block is partly revealed, those before it are known, those behind it masked.
The last block needs no clean copy, a block of the prompt no noisy one. Knows no tensors and no text.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sampler.config import ModelConfig
from tools.tiny.examples import Example

SMALL_BLOCK = 8  # as decoding has it
FILL = 0.1  # weight of a stop token behind the first
AHEAD = 0.2  # weight of what lies behind the small block that is being denoised: mostly it cannot be known yet
CONTENT = 2.0  # weight of what tells one answer from another: the words around it are easy
CHOICE = 12.0  # weight of a letter, of which an example has only one
DRILL = 4.0  # weight of what a drill asks
CONTENT_ALONE = 0.5  # share of the blocks masked here and there in which only content is: from where it is copied
STOP_SHOWN = 0.8  # share of choices with the stop token visible, as in scoring
ALL_MASKED = 0.4  # share of small blocks of which nothing is revealed yet


@dataclass(frozen=True, slots=True)
class Reading:
    """A prediction to learn: read at `offset` of the row, it names the token behind it."""

    offset: int
    target: int
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One block: its tokens, its place in the sequence, how many clean blocks of its example it sees."""

    tokens: tuple[int, ...]
    place: int
    noisy: bool
    readings: tuple[Reading, ...]


def count_rows(example: Example, config: ModelConfig) -> int:
    """How many blocks `make_rows` makes of it."""
    layout = _Layout(example, config)
    copies = 1 if example.is_choice or example.asked is not None else 2
    return len(layout.clean) + copies * len(layout.denoised)


def make_rows(example: Example, config: ModelConfig, rng: random.Random, like_decoding: float) -> list[Row]:
    """Clean blocks first, in order. `like_decoding` is the share of answers masked as in decoding."""
    layout = _Layout(example, config)
    rows = [layout.clean_row(place) for place in layout.clean]
    for place in layout.denoised:
        for hidden, weights in layout.masks(place, rng, like_decoding):
            rows.append(layout.noisy_row(place, hidden, weights))
    assert len(rows) == count_rows(example, config)
    return rows


class _Layout:
    """Where an example's blocks and its answer lie. Offsets count within a block, positions in the sequence."""

    def __init__(self, example: Example, config: ModelConfig) -> None:
        self.example, self.size, self.mask = example, config.block_size, config.mask_token_id
        self.stop = len(example.tokens) - 1
        self.tokens = example.tokens + (config.eos_token_ids[0],) * (-len(example.tokens) % self.size)
        blocks = range(len(self.tokens) // self.size)
        self.denoised = [place for place in blocks if self._learned(place)]
        self.clean = range(max([*self.denoised, *(place for place in blocks if self._handed_over(place))]))

    def clean_row(self, place: int) -> Row:
        behind = (place + 1) * self.size
        if not self._handed_over(place + 1):
            return Row(tokens=self._block(place), place=place, noisy=False, readings=())
        weight = CHOICE if self.example.is_choice and behind < self.stop else self._weight(behind)
        reading = Reading(self.size - 1, self.tokens[behind], weight)
        return Row(tokens=self._block(place), place=place, noisy=False, readings=(reading,))

    def noisy_row(self, place: int, hidden: set[int], weights: dict[int, float]) -> Row:
        block = self._block(place)
        return Row(
            tokens=tuple(self.mask if offset in hidden else token for offset, token in enumerate(block)),
            place=place,
            noisy=True,
            readings=tuple(Reading(offset - 1, block[offset], weights[offset]) for offset in sorted(weights)),
        )

    def masks(self, place: int, rng: random.Random, like_decoding: float) -> list[tuple[set[int], dict[int, float]]]:
        """For each noisy copy the offsets that are masked, and those to be learned with their weights."""
        open_offsets = self._open(place)
        if self.example.is_choice:
            return [self._choice(place, open_offsets, rng)]
        if self.example.asked is not None:
            return [self._drill(place, rng)]
        if rng.random() < like_decoding:
            return self._like_decoding(place, open_offsets, rng)
        begin = place * self.size
        content = [offset for offset in open_offsets if self.tokens[begin + offset] in self.example.content]
        return self._here_and_there(place, content if rng.random() < CONTENT_ALONE else open_offsets, rng)

    def _here_and_there(
        self, place: int, offsets: Sequence[int], rng: random.Random
    ) -> list[tuple[set[int], dict[int, float]]]:
        """What one copy hides the other shows."""
        rate = rng.random()
        hidden = {offset for offset in offsets if rng.random() < rate}
        return [(some, self._weights(place, some)) for some in (hidden, set(offsets) - hidden)]

    def _choice(self, place: int, open_offsets: range, rng: random.Random) -> tuple[set[int], dict[int, float]]:
        letter, stop = open_offsets[0], self.stop - place * self.size
        hidden = set(open_offsets)
        weights = {letter: CHOICE}
        if rng.random() < STOP_SHOWN:
            hidden.discard(stop)
        elif stop < self.size:
            weights[stop] = 1.0
        return hidden, weights

    def _drill(self, place: int, rng: random.Random) -> tuple[set[int], dict[int, float]]:
        shown = rng.random() * 0.3
        hidden = {offset for offset in self._learned(place) if rng.random() >= shown}
        return hidden, dict.fromkeys(hidden, DRILL)

    def _like_decoding(
        self, place: int, open_offsets: range, rng: random.Random
    ) -> list[tuple[set[int], dict[int, float]]]:
        """Two states of this block on its way from masked to known."""
        last = min(self.stop - place * self.size, self.size - 1)
        numbers = list(range(open_offsets[0] // SMALL_BLOCK, last // SMALL_BLOCK + 1))
        chosen = rng.sample(numbers, 2) if len(numbers) > 1 else numbers * 2
        copies = []
        for number in chosen:
            within = [offset for offset in open_offsets if offset // SMALL_BLOCK == number]
            rate = 1.0 if rng.random() < ALL_MASKED else rng.random()
            now = {offset for offset in within if rng.random() < rate} or {rng.choice(within)}
            later = {offset for offset in open_offsets if offset // SMALL_BLOCK > number}
            weights = self._weights(place, now)
            weights |= {offset: AHEAD * weight for offset, weight in self._weights(place, later).items()}
            copies.append((now | later, weights))
        return copies

    def _weights(self, place: int, hidden: set[int]) -> dict[int, float]:
        return {offset: self._weight(place * self.size + offset) for offset in hidden}

    def _weight(self, position: int) -> float:
        if position > self.stop:
            return FILL
        return CONTENT if self.tokens[position] in self.example.content else 1.0

    def _open(self, place: int) -> range:
        """Offsets that are masked when decoding comes to the block."""
        return range(max(self.example.prompt - place * self.size, 1), self.size)

    def _learned(self, place: int) -> list[int]:
        """Offsets of the block that denoising has to find."""
        begin = place * self.size
        if self.example.asked is not None:
            return [offset for offset in range(1, self.size) if begin + offset in self.example.asked]
        last = self.stop - 1 if self.example.is_choice else self.stop  # a choice's stop token is never looked for
        return [offset for offset in self._open(place) if begin + offset <= last]

    def _handed_over(self, place: int) -> bool:
        """Whether the block's first token is to be found; the block before it tells."""
        position = place * self.size
        if self.example.asked is not None:
            return position in self.example.asked
        return self.example.prompt <= position <= self.stop

    def _block(self, place: int) -> tuple[int, ...]:
        return self.tokens[place * self.size : (place + 1) * self.size]
