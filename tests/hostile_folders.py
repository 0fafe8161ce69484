"""Results folders as an attacker would write them: one or a few changes to a real sweep, drawn from a seed.

Checksums are valid wherever the format allows it, since anybody who writes a file can also compute its checksum.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.store.files import CHECKSUM_PLACEHOLDER, add_checksum, decode_json, encode_table
from orchestrator.store.schema import DOCUMENTS, ROWS
from orchestrator.store.trial_files import encode_segment

OSC_52 = "\x1b]52;c;cm0gLXJmIH4=\x07"  # makes many terminals fill the clipboard
TEXTS = [
    "", ".", "..", "../../outside/planted", "/tmp/planted", "a/b", "nul\0byte", "x" * 300, "y" * 5000, OSC_52,
    "\u202egnp.exe", "\x9b2J", "a\nb", "\r", "<script>alert(1)</script>", "$\\frac$", "{{ 7 * 7 }}", "%s%n", "|", "ünï",
    "\ufffe", "-1", "nan", "k1_first", "\\..\\..\\x", "e\u0301" * 40,
]  # fmt: skip
NUMBERS = [-1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 10**400]
NUMBERS += [0.5, -0.5, 1e308, -1e308, 1e-320]
OTHERS: list[Any] = [
    None,
    True,
    False,
    [],
    {},
    [None],
    [[[]]],
    {"a": {"b": None}},
    ["x", 1, None],
    {"": 0},
    {"../x": 1},
]
VALUES = [*TEXTS, *NUMBERS, *OTHERS]


class Mutator:
    """Changes one folder, by one random generator; `log` names the changes."""

    def __init__(self, folder: Path, outside: Path, seed: int) -> None:
        self.folder, self.outside = folder, outside
        self.random = random.Random(seed)
        self.log: list[str] = []

    def run(self) -> None:
        kinds: list[Callable[[], str]] = [
            *[self.change_json] * 6,
            *[self.change_table] * 6,
            self.break_file,
            self.replace_entry,
            self.plant_entry,
        ]
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            self.log.append(self.random.choice(kinds)())

    # JSON

    def change_json(self) -> str:
        names = ["sweep.json", *self._paths("trials/*/trial.json")]
        path = self.folder / self.random.choice(["sweep.json", self.random.choice(names)])
        if not path.is_file():
            return "nothing"
        try:
            record = decode_json(path.read_bytes(), checksum_required=False)
        except Exception:  # it was broken before
            return "nothing"
        what = self._change_value(record)
        path.write_bytes(json_file(record))
        return f"{path.name}: {what}"

    def _change_value(self, record: dict[str, Any]) -> str:
        places = list(_places(record))
        owner, key, where = self.random.choice(places)
        action = self.random.choice(("set", "set", "set", "delete", "add", "rename"))
        if action == "delete":
            del owner[key]
            return f"without {where}"
        value = self.random.choice(VALUES)
        if isinstance(owner, list):
            owner[key] = value
        elif action == "add":
            owner[self.random.choice(TEXTS)] = value
        elif action == "rename":
            owner[self.random.choice(TEXTS)] = owner.pop(key)
        else:
            owner[key] = value
        return f"{action} {where} {str(value)[:40]!r}"

    # Tables

    def change_table(self) -> str:
        paths = [*self._paths("trials/*/rows*"), *self._paths("documents/*.parquet")]
        paths = [path for path in paths if (self.folder / path).is_file()]
        if not paths:
            return "nothing"
        path = self.folder / self.random.choice(paths)
        try:
            table = _read(path)
        except Exception:  # it was broken before
            return "nothing"
        table, what = self._change_columns(table)
        if path.suffix == ".arrows":
            path.write_bytes(encode_segment(table.combine_chunks()))
        else:
            path.write_bytes(encode_table(table))
            self._state_rows(path, table)
        return f"{path.relative_to(self.folder)}: {what}"

    def _state_rows(self, path: Path, table: pa.Table) -> None:
        """Makes trial.json agree with the edited rows."""
        record = path.with_name("trial.json")
        if path.name != "rows.parquet" or not record.is_file() or self.random.random() < 0.3:
            return
        try:
            facts = decode_json(record.read_bytes())
        except Exception:  # it was broken before
            return
        facts |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "rows": len(table)}
        if self.random.random() < 0.5:
            facts["tally"] = None
        record.write_bytes(json_file(facts))

    def _change_columns(self, table: pa.Table) -> tuple[pa.Table, str]:
        action = self.random.choice(
            ["value"] * 8 + ["null", "type", "drop", "add", "twice", "empty", "repeat", "bytes"]
        )
        name = self.random.choice(table.column_names)
        place = table.column_names.index(name)
        column = table.column(place)
        if action == "empty":
            return table.slice(0, 0), "no rows"
        if action == "repeat":
            return pa.concat_tables([table, table]), "rows twice"
        if action == "drop":
            return table.remove_column(place), f"without {name}"
        if action == "add":
            return table.append_column(self.random.choice(TEXTS) or "new", column), "another column"
        if action == "twice":
            return table.append_column(name, column), f"{name} twice"
        if action == "type":
            kind = self.random.choice([pa.string(), pa.int8(), pa.float32(), pa.binary(), pa.list_(pa.string())])
            return table.set_column(place, name, pa.nulls(len(table), kind)), f"{name} as {kind}"
        if action == "null" or (action == "bytes" and not pa.types.is_string(column.type)):
            values = [None if self.random.random() < 0.5 else value for value in column.to_pylist()]
        elif action == "bytes":
            broken = pa.array([b"\xff\xfe\x80"] * len(table), pa.binary())
            changed = pa.Array.from_buffers(pa.string(), len(table), broken.buffers())
            return table.set_column(place, pa.field(name, pa.string()), changed), f"{name} is not UTF-8"
        else:
            value = self._value_of(column.type)
            everywhere = self.random.random() < 0.5
            values = [value if everywhere or i == 0 else old for i, old in enumerate(column.to_pylist())]
            changed = pa.array(values, column.type)
            return table.set_column(place, pa.field(name, column.type), changed), f"{name} = {str(value)[:40]!r}"
        field = pa.field(name, column.type, nullable=True)
        return table.set_column(place, field, pa.array(values, column.type)), f"{name} with nulls"

    def _value_of(self, kind: pa.DataType) -> Any:
        if pa.types.is_string(kind):
            return self.random.choice(
                [*TEXTS, "{}", "[1]", '{"a": NaN}', '{"acc": {}}', '{"acc": [1, null]}', "[" * 9000]
            )
        if pa.types.is_boolean(kind):
            return self.random.random() < 0.5
        if pa.types.is_floating(kind):
            return self.random.choice([-1.0, 0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")])
        if pa.types.is_timestamp(kind):
            return pa.scalar(self.random.choice([0, -1, 2**62, -(2**62), 10**15]), pa.int64()).cast(kind)
        if pa.types.is_list(kind):
            inner = self._value_of(kind.value_type)
            return self.random.choice([[], [inner], [inner] * 3, [None]])
        bits = kind.bit_width
        return self.random.choice([-1, 0, 1, 3, 1000, 2 ** (bits - 1) - 1, -(2 ** (bits - 1))])

    # Files and directories

    def break_file(self) -> str:
        path = self._any_file()
        data = path.read_bytes()
        cut = self.random.randrange(len(data) + 1)
        deep = b'{"a":' * 100_000
        nan = data.replace(b": 1,", b": NaN,")
        broken = [data[:cut], b"", b"\xff\xfe" + data, data.decode("latin-1").encode("utf-16"), b"\0" * 100, deep, nan]
        broken += [b"[]", b"null", b'{"schema": 1}', b'{"schema": "x"}', b'{"schema": 99999999999999999999999}']
        path.write_bytes(self.random.choice(broken))
        return f"{path.relative_to(self.folder)}: broken"

    def replace_entry(self) -> str:
        """A file or directory becomes a link, a pipe, a directory or nothing."""
        entries = [path for path in self.folder.rglob("*") if not path.is_symlink()]
        path = self.random.choice(entries)
        kind = self.random.choice(
            ("nothing", "directory", "pipe", "link in", "link out", "loop", "no target", "device")
        )
        _remove(path)
        self._make(path, kind)
        return f"{path.relative_to(self.folder)}: {kind}"

    def plant_entry(self) -> str:
        """Something where a command writes, or among the files that it lists."""
        names = ["figures", "summaries", "summaries/gsm8k_limit_2", "report.html", "results.md", "lm-eval", "merged"]
        names += ["quarantine", "quarantine/05ebaf7e83a3d5cf", "slurm", "slurm/1.json", "upload.jsonl", "fetching.json"]
        names += ["lm-eval/tiny__k1_first", "lock/999999.json", "lock/²", "lock/000009", "trials/²", "trials/ab"]
        names += [
            "trials/ab/rows.parquet",
            "trials/ab/rows-1.arrows",
            "trials/ab/trial.json",
            "documents/x\x1b[2J.parquet",
        ]
        path = self.folder / self.random.choice(names)
        if os.path.lexists(path):
            _remove(path)
        path.parent.mkdir(parents=True, exist_ok=True) if not path.parent.is_symlink() else None
        kind = self.random.choice(("directory", "pipe", "link out", "link out", "loop", "no target", "text"))
        self._make(path, kind)
        return f"{path.relative_to(self.folder)}: planted {kind}"

    def _make(self, path: Path, kind: str) -> None:
        if kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "link in":
            path.symlink_to(self.folder / "documents")
        elif kind == "link out":
            path.symlink_to(self.outside / self.random.choice(("directory", "file", "directory/.victim.tmp")))
        elif kind == "loop":
            path.symlink_to(path)
        elif kind == "no target":
            path.symlink_to(self.outside / "nothing")
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "text":
            holder = {"host": OSC_52, "pid": "../../x", "start": [], "machine": 1, "since": None, "job": OSC_52}
            path.write_text(json.dumps(self.random.choice([holder, {}, [], OSC_52, {"pid": 1}])))

    def _any_file(self) -> Path:
        found = [path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return self.random.choice(found)

    def _paths(self, pattern: str) -> list[str]:
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.glob(pattern))


def json_file(record: dict[str, Any]) -> bytes:
    """With a checksum, and also with values that the store's own encoder refuses."""
    body = {**record, "check": CHECKSUM_PLACEHOLDER.decode()}
    return add_checksum(json.dumps(body, indent=1).encode() + b"\n")


def _places(value: Any, where: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Every value of a JSON tree: its owner, its key there, and its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key, f"{where}.{key}"
        yield from _places(item, f"{where}.{key}")


def _read(path: Path) -> pa.Table:
    if path.suffix == ".arrows":
        return pa.ipc.open_stream(path.read_bytes()).read_all()
    table = pa.parquet.read_table(path)
    schema = DOCUMENTS if path.parent.name == "documents" else ROWS
    return table.cast(schema) if table.schema.names == schema.names else table


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
