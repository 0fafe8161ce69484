"""An untrusted results folder is only data: no command crashes on it, hangs, or writes outside its target."""

import contextlib
import hashlib
import io
import json
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile_folders import OSC_52, Mutator, json_file
from test_format_versions import extract

from orchestrator.cli import run_sweep
from orchestrator.cli.__main__ import dispatch
from orchestrator.cli.console import run_command
from orchestrator.core.untrusted import UNPRINTABLE, path_below, printable
from orchestrator.report.write import write_report
from orchestrator.running import cluster
from orchestrator.running.stop import Aborted
from orchestrator.store.files import decode_json, encode_table
from sampler.errors import InputError

COMMAND_SECONDS = 900  # after which a command counts as hanging; usually it takes one
QUICK_SEEDS, ALL_SEEDS = range(1000, 1008), range(200)
SWEEP = ["--tasks", "gsm8k,mmlu", "--policies", "k1_first,k1_last,k2_middle", "--threshold", "0.9,0.95"]
SWEEP += ["--limit", "2", "--seed", "3", "--actors", "1", "--no-dashboard", "--quiet"]
STARTS_RAY = "this is where Ray would be started"

pytestmark = pytest.mark.filterwarnings("default")  # numpy warns about values that no real sweep has


class Hanging(BaseException):
    """Not an Exception, so that nothing takes it for an error of its own."""


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuing a folder runs all the way to the start of Ray."""

    def start(*_: object, **__: object) -> None:
        raise Aborted(STARTS_RAY)

    monkeypatch.setattr(cluster, "start_local", start)
    monkeypatch.setattr(run_sweep, "write_report", partial(write_report, figures=False))  # `report` draws them


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "directory" / "inner").mkdir(parents=True)
    (folder / "file").write_text("precious")
    (folder / "directory" / ".victim.tmp").write_text("precious")
    (folder / "directory" / "inner" / "summary.json").write_text(
        json.dumps({"task": "t", "config": "c", "accuracy": 1, "gates": 0, "counters": 0, "intervals": 0})
    )
    return folder


def snapshot(folder: Path) -> dict[str, Any]:
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if not path.is_symlink()
    }


def run(words: list[str]) -> tuple[int, str]:
    """Exit code and output of a command in this process. An exception other than a user error passes through."""
    out = io.StringIO()

    def hang(*_: object) -> None:
        raise Hanging(" ".join(words))

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(COMMAND_SECONDS)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as ended:
            run_command(lambda: dispatch(words))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return int(ended.value.code or 0), out.getvalue()


def commands(folder: Path, seed: int) -> Iterator[list[str]]:
    elsewhere = folder.parent / "elsewhere"
    yield ["status", str(folder)]
    yield ["status", str(folder), "--json", "--check"]
    yield ["report", str(folder), *([] if seed % 8 == 0 else ["--no-figures"])]
    yield ["export", "--lm-eval", str(folder), *(["--out", str(elsewhere)] if seed % 2 else [])]
    yield ["sweep", *SWEEP, "--out", str(folder.parent), "--name", folder.name, "--dry-run"]
    yield ["sweep", *SWEEP, "--out", str(folder.parent), "--name", folder.name]
    yield ["report", str(folder), "--no-figures", "--out", str(elsewhere)]


def attack(tmp_path: Path, outside: Path, seed: int) -> list[str]:
    """What went wrong with the folder of one seed; empty if nothing did."""
    folder = extract("interrupted" if seed % 5 == 0 else "finished", tmp_path / "results")
    mutator = Mutator(folder, outside, seed)
    mutator.run()
    before = snapshot(outside)
    problems = []
    for words in commands(folder, seed):
        try:
            code, output = run(words)
        except (Exception, Hanging):
            problems.append(f"{words[0]} crashed: {traceback.format_exc(limit=-6)}")
            continue
        allowed = {0, 2} if words[0] != "sweep" or STARTS_RAY not in output else {1}
        if code not in allowed or "Traceback" in output:
            problems.append(f"{words[0]} ended with {code}: {output[-2000:]}")
        if found := UNPRINTABLE.search(output):
            problems.append(f"{words[0]} printed {found[0]!r}")
        if code == 2 and "error: " not in output and "--check" not in words:
            problems.append(f"{words[0]} gave no reason: {output[-500:]}")
    written = [*folder.parent.rglob("*.svg"), *folder.parent.rglob("report.html"), *folder.parent.rglob("results.md")]
    for path in written:
        if path.is_file() and UNPRINTABLE.search(path.read_text(encoding="utf-8")):
            problems.append(f"{path} has control characters")
    if snapshot(outside) != before:
        problems.append("something outside of the folder was changed")
    strangers = {path.name for path in tmp_path.iterdir()} - {"results", "outside"}
    strangers |= {path.name for path in (tmp_path / "results").iterdir()} - {folder.name, "elsewhere"}
    if strangers:
        problems.append(f"new files: {strangers}")
    return [f"seed {seed}: {'; '.join(mutator.log)}: {problem}" for problem in problems]


def attack_all(tmp_path: Path, outside: Path, seeds: range) -> None:
    failures = []
    for seed in seeds:
        failures += attack(tmp_path, outside, seed)
        shutil.rmtree(tmp_path / "results")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures)


def test_a_sample_of_hostile_folders(tmp_path: Path, outside: Path) -> None:
    attack_all(tmp_path, outside, QUICK_SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_hostile_folders(tmp_path: Path, outside: Path, part: int) -> None:
    size = len(ALL_SEEDS) // 4
    attack_all(tmp_path, outside, ALL_SEEDS[part * size : (part + 1) * size])


@pytest.mark.slow
def test_a_real_continuation_replaces_what_was_forged(tmp_path: Path) -> None:
    """Ray included: forged files go to quarantine, their documents run again, and the sweep is complete."""
    folder = extract("finished", tmp_path)
    rows, records = sorted(folder.glob("trials/*/rows.parquet")), sorted(folder.glob("trials/*/trial.json"))
    table = pq.read_table(rows[0])
    place = table.column_names.index("policy")
    names = pa.array(["../../planted"] * len(table))
    rows[0].write_bytes(encode_table(table.set_column(place, table.schema.field(place), names)))
    facts = decode_json(records[0].read_bytes())
    records[0].write_bytes(json_file({**facts, "sha256": hashlib.sha256(rows[0].read_bytes()).hexdigest()}))
    records[1].write_bytes(json_file({**decode_json(records[1].read_bytes()), "rows": "two"}))
    (folder / "documents" / "mmlu.parquet").write_bytes(b"PAR1")
    command = [sys.executable, "-m", "orchestrator.sweep", *SWEEP, "--out", str(tmp_path), "--name", folder.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    code, output = run(["status", str(folder), "--json", "--check"])
    status = json.loads(output)
    assert (code, status["state"], status["corrupted"]) == (0, "complete", [])
    quarantined = {path.name for path in (folder / "quarantine").rglob("*") if path.is_file()}
    assert quarantined >= {"rows.parquet", "trial.json", "mmlu.parquet"}
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}


# The helpers


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "a//b", "nul\0", "", "..", "a/.", "x" * 256, "a\nb", "\x1b"]
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="each part must be a name"):
        path_below(tmp_path, name)


def test_a_link_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "inside").mkdir()
    (target / "out").symlink_to(tmp_path)
    (target / "in").symlink_to(target / "inside")
    (target / "loop").symlink_to(target / "loop")
    assert path_below(target, "in/file") == target / "in" / "file"
    for name in ("out", "loop"):
        with pytest.raises(InputError, match="symbolic link that leads out of"):
            path_below(target, f"{name}/file")


def test_text_loses_what_terminals_obey() -> None:
    assert printable(f"a{OSC_52}b") == "a]52;c;cm0gLXJmIH4=b"
    assert printable("\x9b2Ja\u202eb\u2066c\ud800d\te\nf\r") == "2Jabcd\te\nf"
    assert printable("k2_middle, ½ × “é” 日本 😀") == "k2_middle, ½ × “é” 日本 😀"
