"""Decides which problems may be asked in the test and which may be trained on. Knows keys, no texts.

A key names a template and the numbers in it (for a fact: the fact and the options beside it). All wordings of one key
fall on the same side, so no test question occurs in training, whatever names and phrases surround its numbers.
"""

import hashlib

TRAIN, HELD_OUT, TEST = "train", "held_out", "test"
TEST_SHARE, HELD_OUT_SHARE = 150, 50  # of a thousand

Key = tuple[str | int, ...]


def split_of(key: Key) -> str:
    digest = hashlib.sha256(repr(key).encode()).digest()
    place = int.from_bytes(digest[:4], "big") % 1000
    if place < TEST_SHARE:
        return TEST
    return HELD_OUT if place < TEST_SHARE + HELD_OUT_SHARE else TRAIN
