"""Training rows (`PackedBlocks`) equal the passes that decoding and scoring run."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from sampler import InputError
from sampler.measure import TINY
from tools.tiny.batches import (
    AHEAD_WEIGHT,
    CHOICE_WEIGHT,
    CONTENT_WEIGHT,
    SHARDS_PER_STEP,
    Batches,
    Block,
    count_blocks,
    make_blocks,
)
from tools.tiny.examples import Example

CONFIG = replace(TINY, num_layers=2, vocab_size=600, mask_token_id=599, eos_token_ids=(598,), pad_token_id=597)
MASK, EOS, SIZE = CONFIG.mask_token_id, 598, CONFIG.block_size


def example(length: int, prompt: int, asked: frozenset[int] | None = None) -> Example:
    """Token i is i, and a stop token ends them."""
    return Example(tokens=(*range(length - 1), EOS), prompt=prompt, asked=asked)


def rows_of(given: Example, seed: int, like_decoding: float) -> list[Block]:
    return make_blocks(given, CONFIG, random.Random(seed), like_decoding)


@pytest.mark.parametrize("prompt", [5, 31, 32, 33, 40, 63, 64, 65])
@pytest.mark.parametrize("answer", [2, 3, 24, 31, 32, 33, 70])
@pytest.mark.parametrize("like_decoding", [0.0, 1.0])
def test_what_is_read_is_masked_and_what_is_shown_is_true(prompt: int, answer: int, like_decoding: float) -> None:
    given = replace(example(prompt + answer, prompt), content=frozenset(range(0, prompt + answer, 3)))
    filled = [*given.tokens, *[EOS] * (-len(given.tokens) % SIZE)]
    learned: Counter[int] = Counter()
    for seed in range(30):
        rows = rows_of(given, seed, like_decoding)
        assert len(rows) == count_blocks(given, CONFIG)
        for row in rows:
            begin = row.place * SIZE
            for offset, token in enumerate(row.tokens):
                if token == MASK:
                    assert row.noisy
                    assert offset > 0
                    assert begin + offset >= prompt
                else:
                    assert token == filled[begin + offset]
            for reading in row.predictions:
                position = begin + reading.offset + 1
                assert reading.target == filled[position]
                assert position >= prompt
                assert reading.weight > 0
                if row.noisy:
                    assert row.tokens[reading.offset + 1] == MASK
                else:
                    assert reading.offset == SIZE - 1
                learned[position] += 1
    expected = range(prompt, prompt + 1) if answer == 2 else range(prompt, len(given.tokens))
    assert set(expected) <= set(learned), "every token of the answer is learned somewhere"


def test_what_one_copy_masked_here_and_there_hides_the_other_shows() -> None:
    given = example(90, 20)
    for seed in range(40):
        first, second = masked_at(given, seed)
        assert first.isdisjoint(second)
        assert first | second in (set(range(33, 64)), set())  # nothing where only content is to be masked: it has none


def test_often_only_content_is_masked() -> None:
    given = replace(example(90, 20), content=frozenset({40, 44, 60}))
    found = Counter(frozenset(first | second) for first, second in (masked_at(given, seed) for seed in range(100)))
    assert set(found) == {frozenset(range(33, 64)), frozenset({40, 44, 60})}
    assert 30 < found[frozenset({40, 44, 60})] < 70


def masked_at(given: Example, seed: int) -> list[set[int]]:
    """What the two noisy copies of the second block hide, as positions."""
    rows = [row for row in rows_of(given, seed, 0.0) if row.noisy and row.place == 1]
    return [{SIZE + offset for offset, token in enumerate(row.tokens) if token == MASK} for row in rows]


def test_copies_like_decoding_hide_everything_behind_their_small_block() -> None:
    for seed in range(40):
        for row in rows_of(example(120, 20), seed, 1.0):
            if not row.noisy:
                continue
            masked = [offset for offset, token in enumerate(row.tokens) if token == MASK]
            small = masked[0] // 8
            assert set(range(8 * (small + 1), SIZE)) <= set(masked)
            sure = [reading for reading in row.predictions if reading.weight == 1.0]
            assert {(reading.offset + 1) // 8 for reading in sure} == {small}


def test_content_counts_double_and_what_lies_ahead_little() -> None:
    given = replace(example(120, 20), content=frozenset({44}))
    weights: dict[int, set[float]] = {44: set(), 45: set()}
    for seed in range(60):
        for row in rows_of(given, seed, 1.0):
            for reading in row.predictions:
                if reading.target in weights:
                    weights[reading.target].add(reading.weight)
    assert weights == {44: {CONTENT_WEIGHT, AHEAD_WEIGHT * CONTENT_WEIGHT}, 45: {1.0, AHEAD_WEIGHT}}


def test_a_choice_looks_as_scoring_sees_it() -> None:
    given = example(42, 40)
    shown = 0
    for seed in range(50):
        *clean, row = rows_of(given, seed, 0.5)
        assert [block.noisy for block in clean] == [False]
        assert row.tokens[:8] == tuple(range(32, 40))
        assert row.tokens[8] == MASK
        assert set(row.tokens[10:]) == {MASK}
        assert row.predictions[0].offset == 7
        assert row.predictions[0].target == 40
        assert row.predictions[0].weight == CHOICE_WEIGHT
        shown += row.tokens[9] == EOS
    assert 25 < shown < 50


def test_a_choice_at_a_blocks_start_is_read_in_the_block_before() -> None:
    (first, second) = rows_of(example(66, 64), 0, 0.5)
    assert not first.noisy
    assert not first.predictions
    assert not second.noisy
    assert [(reading.offset, reading.target, reading.weight) for reading in second.predictions] == [
        (31, 64, CHOICE_WEIGHT)
    ]


def test_a_drill_asks_its_results_only() -> None:
    given = example(70, 20, asked=frozenset({25, 26, 40, 64}))
    seen = set()
    for seed in range(20):
        for row in rows_of(given, seed, 0.5):
            seen |= {row.place * SIZE + offset for offset, token in enumerate(row.tokens) if token == MASK}
            assert all(reading.target in given.asked for reading in row.predictions)
    assert seen == {25, 26, 40}  # 64 begins a block, so the block before hands it over


def test_every_example_is_learned_once_an_epoch_and_no_shard_overflows() -> None:
    rng = random.Random(0)
    lengths = [(rng.randrange(10, 60), rng.randrange(3, 70)) for _ in range(200)]
    batches = Batches([example(p + a, p) for p, a in lengths], CONFIG, seed=0, size=20)
    epoch = batches.shards_of_epoch(0)
    assert sorted(index for shard in epoch for index in shard) == list(range(200))
    assert all(sum(batches.counts[index] for index in shard) <= 20 for shard in epoch)
    assert sum(batches.counts) > 0.9 * 20 * len(epoch)
    assert epoch != batches.shards_of_epoch(1)
    beyond = batches.shard(len(epoch), 0.5)  # the first of the next epoch
    assert beyond.examples == len(batches.shards_of_epoch(1)[0])
    assert len(batches.shards(0, 0.5)) == SHARDS_PER_STEP


def test_an_example_that_fits_no_shard_is_named() -> None:
    with pytest.raises(InputError, match=r"training example 2 needs 12 blocks .*limit is 10"):
        Batches([example(40, 20), example(150, 40)], CONFIG, seed=0, size=10)
