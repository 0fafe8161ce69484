"""A small file of each format, truncated at every byte and with each byte changed: never a wrong row."""

import io
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.store.compaction import encode_compacted, read_compacted
from orchestrator.store.files import (
    CorruptedFile,
    decode_json,
    encode_json,
    encode_table,
    read_table,
    verify_table,
)
from orchestrator.store.schema import ROWS
from orchestrator.store.trial_files import decode_segment, encode_segment, new_trial_record
from sampler.errors import InputError
from tests.crashing_disk import TRIAL, make_rows, trial_columns

BATCHES = [make_rows([f"d{n}"], tokens=n, text="word " * n) for n in range(2)]
TABLE = pa.Table.from_batches(BATCHES)
FACTS = {"schema": 1, "trial": {"trial_id": "ab"}, "status": "finished", "rows": 3, "text": "reuse-sweep-check:00"}


def masks(data: bytes, *, thorough: bool) -> Iterator[tuple[int, int]]:
    """Positions and masks: a random change of every byte, or every single bit."""
    chance = random.Random(0)
    for at in range(len(data)):
        for mask in [1 << bit for bit in range(8)] if thorough else [chance.randrange(1, 256)]:
            yield at, mask


def changes(data: bytes, *, thorough: bool) -> Iterator[tuple[int, bytes]]:
    for at, mask in masks(data, thorough=thorough):
        yield at, data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def changed_files(path: Path, data: bytes, *, thorough: bool, share: float = 1) -> Iterator[int]:
    """The same for a file on disk, changed in place."""
    chance = random.Random(1)
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as file:
        for at, mask in masks(data, thorough=thorough):
            if chance.random() < share:
                os.pwrite(file.fileno(), bytes([data[at] ^ mask]), at)
                yield at
                os.pwrite(file.fileno(), data[at : at + 1], at)


def test_a_segment_is_a_plain_arrow_stream() -> None:
    assert pa.ipc.open_stream(encode_segment(TABLE)).read_all().equals(TABLE)


def test_an_intact_segment_is_read() -> None:
    segment = decode_segment(encode_segment(TABLE))
    assert segment.problem is None
    assert segment.rows.equals(TABLE)


def test_a_truncated_segment_keeps_its_complete_batches() -> None:
    data = encode_segment(TABLE)
    ends = [len(encode_segment(TABLE.slice(0, n))) for n in range(3)]
    for size in range(len(data)):
        segment = decode_segment(data[:size])
        whole = sum(size >= end for end in ends[1:])
        assert segment.batches == BATCHES[:whole], size
        assert (segment.problem is None) == (size in ends), size
        assert segment.torn == (size not in ends), size


def check_changed_segment(thorough: bool) -> None:
    data = encode_segment(TABLE)
    ends = [len(encode_segment(TABLE.slice(0, n))) for n in range(3)]
    for at, changed in changes(data, thorough=thorough):
        segment = decode_segment(changed)
        before = max(sum(at >= end for end in ends) - 1, 0)
        assert segment.problem is not None, at
        assert segment.batches == BATCHES[:before], at


def test_a_segment_is_read_up_to_a_changed_byte() -> None:
    check_changed_segment(thorough=False)


@pytest.mark.slow
def test_a_segment_is_read_up_to_any_changed_bit() -> None:
    check_changed_segment(thorough=True)


@pytest.mark.parametrize("order", [(1,), (1, 0), (0, 0, 1), (0, 1, 1)])
def test_removed_moved_or_repeated_batches_are_detected(order: tuple[int, ...]) -> None:
    data = encode_segment(TABLE)
    ends = [len(encode_segment(TABLE.slice(0, n))) for n in range(3)]
    moved = data[: ends[0]] + b"".join(data[ends[n] : ends[n + 1]] for n in order)
    segment = decode_segment(moved)
    assert segment.problem is not None
    assert segment.batches == BATCHES[: len(segment.batches)]


def test_a_segment_with_other_columns_is_not_corrupted() -> None:
    newer = TABLE.append_column("novel", pa.array([1, 2], pa.int32()))
    segment = decode_segment(encode_segment(newer))
    assert segment.problem is None
    assert segment.rows.equals(newer)


def raises_corrupted(act: Callable[[], object]) -> bool:
    try:
        act()
    except CorruptedFile:
        return True
    return False


def test_a_table_is_plain_parquet_with_page_checksums() -> None:
    data = encode_table(TABLE)
    assert pq.read_table(io.BytesIO(data), page_checksum_verification=True).equals(TABLE)


def check_changed_table(path: Path, thorough: bool) -> None:
    for at in changed_files(path, encode_table(TABLE), thorough=thorough):
        assert raises_corrupted(lambda: verify_table(path)), at


def test_a_changed_byte_in_a_table_is_detected(tmp_path: Path) -> None:
    check_changed_table(tmp_path / "rows.parquet", thorough=False)


@pytest.mark.slow
def test_any_changed_bit_in_a_table_is_detected(tmp_path: Path) -> None:
    check_changed_table(tmp_path / "rows.parquet", thorough=True)


def test_a_truncated_table_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(encode_table(TABLE))
    for size in reversed(range(path.stat().st_size)):
        os.truncate(path, size)
        assert raises_corrupted(lambda: verify_table(path)), size


def test_a_changed_byte_in_a_compacted_file_is_detected(tmp_path: Path) -> None:
    """Its table of trials has a checksum of its own, since it is read without the rest."""
    record = {
        **new_trial_record(trial_columns()),
        "status": "finished",
        "rows": 2,
        "attempts": [{"packages": {"torch": "2"}}],
    }
    data = encode_compacted(TABLE, {TRIAL: record})
    path = tmp_path / "gsm8k-000001-00000000.parquet"
    path.write_bytes(data)
    intact = read_compacted(path)
    assert list(intact.records()) == [(TRIAL, record)]
    stored = data.index(b"reuse_sweep_trials")
    for at in changed_files(path, data, thorough=False, share=0.1):
        assert raises_corrupted(lambda: verify_table(path)), at
        if stored <= at < stored + 600:
            assert raises_corrupted(lambda: read_compacted(path)), at


def test_an_intact_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(encode_table(TABLE))
    verify_table(path)
    assert read_table(path, ROWS)[0].equals(TABLE, check_metadata=True)
    assert read_table(path, ROWS, ["tokens", "doc_id"])[0].column_names == ["doc_id", "tokens"]


def test_an_unverified_corrupted_table_gives_rows_or_an_error(tmp_path: Path) -> None:
    """Parquet protects pages only; headers and footer are covered by the checksum of the whole file."""
    path = tmp_path / "rows.parquet"
    for at in changed_files(path, encode_table(TABLE), thorough=False, share=0.04):
        try:
            rows, _ = read_table(path, ROWS, verify=False)
        except (CorruptedFile, InputError):
            continue
        assert rows.schema.equals(ROWS), at


@pytest.mark.parametrize("size", range(len(encode_json(FACTS))))
def test_truncated_json_is_detected(size: int) -> None:
    with pytest.raises(CorruptedFile):
        decode_json(encode_json(FACTS)[:size])


def test_any_changed_bit_in_json_is_detected() -> None:
    data = encode_json(FACTS)
    assert decode_json(data) == FACTS
    for at, changed in changes(data, thorough=True):
        assert raises_corrupted(lambda changed=changed: decode_json(changed)), at
        assert raises_corrupted(lambda changed=changed: decode_json(changed, checksum_required=False)), at


def test_json_written_by_hand_is_read_if_no_checksum_is_required() -> None:
    assert decode_json(b'{"schema": 1}', checksum_required=False) == {"schema": 1}
    with pytest.raises(CorruptedFile, match="checksum"):
        decode_json(b'{"schema": 1}')
