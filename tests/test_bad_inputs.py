"""Several hundred bad inputs over all commands: one clear error, exit code 2, no traceback, and nothing is written.

Most run in this process; a sample runs as real processes whose output cannot be written or is read only in part.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_inputs import read_cases, write_place
from test_commands import Pipe

from orchestrator.cli.__main__ import COMMANDS, dispatch
from orchestrator.cli.console import run_command

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
HANG_SECONDS = 600
MOST_SENTENCES = 5
CASES = list(read_cases())
LINE = '{"id": 1, "ids": [1, 2, 3]}'
GENERATE = "generate --model golden --ids"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    write_place(place)
    return place


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a command, without a GPU and without the Hub; a hanging command fails."""
    monkeypatch.chdir(place)
    for name, value in {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    handler = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the command hangs"))
    signal.alarm(HANG_SECONDS)
    yield place
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # sweeps install their own
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def files_of(place: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in place.rglob("*") if path.is_file()}


def test_there_are_enough_of_them_for_every_command() -> None:
    assert len({(words, lines) for words, lines, _ in CASES}) >= 200
    assert {words.split()[0] for words, _, _ in CASES} >= set(COMMANDS)


@pytest.mark.parametrize(("words", "lines", "expected"), CASES)
def test_a_bad_input_is_refused(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: str,
    lines: str,
    expected: tuple[str, ...],
) -> None:
    before = files_of(here)
    out = Pipe()
    monkeypatch.setattr(sys, "stdin", Pipe(lines.encode()))
    monkeypatch.setattr(sys, "stdout", out)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: dispatch(shlex.split(words)))
    printed, error = out.buffer.getvalue().decode(), capfd.readouterr().err  # type: ignore[attr-defined]
    assert (ended.value.code, printed) == (2, ""), error
    sentences = [line.removeprefix("error: ") for line in error.splitlines() if line.startswith("error: ")]
    assert 1 <= len(sentences) <= MOST_SENTENCES, error
    assert "Traceback" not in error
    for part in expected:
        assert any(part in sentence for sentence in sentences), error
    assert files_of(here) == before


# Real processes

PRINTING = [
    *([command, "--help"] for command in ("sweep", "slurm", "bench")),
    *(["version"], ["tasks", "list"], ["status", "results/demo"], ["status", "results/demo", "--json"]),
    ["report", "results/demo", "--no-figures", "--out", "report"],
    ["export", "--csv", "results/demo", "--out", "demo.csv"],
    ["sweep", "--tasks", "gsm8k", "--model", "tiny", "--data", "bundled", "--dry-run"],
    [*GENERATE.split(), "--max-new-tokens", "2"],
]
OUTPUTS = {  # what follows the command in a shell, its exit codes, and words of the error
    "> /dev/full": ((2,), "standard output cannot be written (No space left on device)"),
    ">&-": ((2,), "standard output is closed"),
    "| head -1": ((0, 141), ""),
    "> /dev/null 2>&-": ((0,), ""),
}


def shell(command: str, place: Path, lines: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""} | changes
    words = ["bash", "-c", f"set -o pipefail; {command}"]
    return subprocess.run(
        words, cwd=place, env=environment, input=lines, capture_output=True, text=True, timeout=HANG_SECONDS
    )


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
@pytest.mark.parametrize("output", OUTPUTS)
def test_output_that_cannot_be_written(place: Path, words: list[str], output: str) -> None:
    codes, expected = OUTPUTS[output]
    done = shell(f"{shlex.join([sys.executable, '-m', 'orchestrator.cli', *words])} {output}", place, LINE)
    assert done.returncode in codes, done.stderr
    assert "Traceback" not in done.stderr
    assert expected in done.stderr
    assert done.stderr.count("error: ") == (done.returncode == 2)


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_a_narrow_or_dumb_terminal_changes_no_result(place: Path, words: list[str]) -> None:
    command = shlex.join([sys.executable, "-m", "orchestrator.cli", *words])
    for changes in ({"COLUMNS": "20"}, {"TERM": "dumb"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}):
        done = shell(command, place, LINE, **changes)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        assert done.stdout


@pytest.mark.parametrize("words", ["sweep --tasks gsm9k --model tiny", f"{GENERATE} --policies K2", "status"])
def test_real_processes_say_the_same(place: Path, words: str) -> None:
    done = shell(f"{sys.executable} -m orchestrator.cli {words}", place, LINE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
