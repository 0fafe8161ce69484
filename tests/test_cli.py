"""The reuse-sweep command: its help, unknown commands, light start-up, and the modules that remain runnable."""

import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from orchestrator.cli.__main__ import COMMANDS, dispatch
from orchestrator.cli.console import Parser, parse_options
from orchestrator.cli.sampling import parse_decoding
from orchestrator.core.configuration import DECODE_SETTINGS
from orchestrator.planning import settings as sweep_settings
from orchestrator.planning.fields import setting, settings_of, shared
from orchestrator.planning.settings import PolicyGrid, SweepSettings
from sampler.errors import InputError

ROOT = Path(__file__).parents[1]
HELP = [["--help"], *([command, "--help"] for command in COMMANDS), ["tasks", "run", "--help"]]
HELP += [["bench", "sweep", "--help"], ["slurm", "submit", "--help"], ["slurm", "status", "--help"]]
HEAVY = ("torch", "ray", "pyarrow", "lm_eval", "transformers", "datasets", "matplotlib")
PROGRAM = f"""
import sys
from orchestrator.cli.__main__ import main
sys.argv[0] = "reuse-sweep"
try:
    main()
finally:
    print([name for name in {HEAVY} if name in sys.modules], len(sys.modules), file=sys.stderr)
"""
MAX_MODULES = 400  # Python's own included; `sweep --help` imports about 220, torch alone more than 1,000


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_imports_few_modules_and_none_that_is_slow(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "reuse-sweep" in done.stdout
    assert "example" in done.stdout
    imported, _, modules = done.stderr.strip().rpartition(" ")
    assert imported == "[]"
    assert int(modules) < MAX_MODULES


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    dispatch([])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)


def test_an_unknown_command_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="unknown command 'repotr'; did you mean report"):
        dispatch(["repotr", "results/demo"])
    with pytest.raises(InputError, match="commands are sweep, status"):
        dispatch(["xyzzy"])


def test_user_errors_end_with_exit_code_2_and_a_line_each() -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "tasks", "run", "--limit", "0", "--batch_size", "x", "--odd"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 5  # --odd, --model and --task are missing, --limit, --batch-size
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())


@pytest.mark.parametrize("name", ["sweep", "status", "report", "export", "slurm"])
def test_modules_that_remain_runnable(name: str) -> None:
    command = [sys.executable, "-m", f"orchestrator.{name}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: reuse-sweep {name} ")


def test_every_decode_setting_is_declared_once_and_is_a_flag_of_commands_that_decode() -> None:
    for name in DECODE_SETTINGS:
        assert settings_of(SweepSettings)[name].many
    _, decode = parse_decoding(Parser(prog="x", description="", examples=""), PolicyGrid, ["--no-block-cache"])
    assert decode == {"threshold": None, "small_block": None, "block_cache": False, "reveal": "threshold"}, (
        "None: the model family's default"
    )


def test_a_declaration_gives_a_flag_its_checks_and_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        speed: float = setting(2.0, above=1, maximum=9, unit="times", aliases=("rate",), help="how fast")
        limit: int | None = shared(SweepSettings, "limit")

    def parse(*words: str) -> Options:
        return parse_options(Parser(prog="x", description="", examples=""), Options, words)

    assert parse() == Options(speed=2.0, limit=None)
    assert parse("--rate=3", "--limit", "4") == Options(speed=3.0, limit=4)
    with pytest.raises(InputError) as error:
        parse("--speed", "1", "--limit", "0")
    assert error.value.sentences == (
        "--speed must be above 1 and at most 9 times (got 1)",
        "--limit must be at least 1 (got 0)",
    )
    with pytest.raises(SystemExit):
        parse("--help")
    assert "how fast (default: 2)" in capsys.readouterr().out


def test_every_field_of_the_settings_is_declared() -> None:
    assert {item.name for item in fields(SweepSettings)} == settings_of(SweepSettings).keys()
    assert all(declared.help for declared in sweep_settings.ALL_SETTINGS.values())


SHARED_FLAGS = {"--policies", "--model", "--batch-size", "--threads"}
OLD_FLAGS = {"--policy", "--task", "--shape", "--batch", "--size"}


@pytest.mark.parametrize("words", [["generate"], ["score"], ["tasks", "run"], ["bench"]], ids=" ".join)
def test_commands_share_their_flags(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dispatch([*words, "--help"])
    shown = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert shown >= SHARED_FLAGS
    assert not shown & OLD_FLAGS


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["generate", "--policy", "x"], "--policy: unknown policy 'x'"),
        (["tasks", "run", "--policies=x"], "--policies: unknown policy 'x'"),
        (["tasks", "run", "--task", ""], "--task must not be empty"),
        (["bench", "--batch", "0"], "--batch must be at least 1 (got 0)"),
        (["profile", "--size", "0"], "--size must be at least 1 (got 0)"),
        (["sweep", "--tasks", "gsm8k", "--num_fewshot", "-1"], "--num-fewshot must be at least 0 (got -1)"),
        (["sweep", "--tasks", "gsm8k", "--k", "99999999"], "--k must be at most 999,999 (got 99,999,999)"),
        (["sweep", "--tasks", "gsm8k", "--threads", "0"], "--threads must be at least 1 (got 0)"),
    ],
    ids=" ".join,
)
def test_errors_name_the_flag_that_was_typed(words: list[str], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        dispatch(words)
    assert any(one.startswith(sentence) for one in error.value.sentences), error.value


def test_metavars_are_short() -> None:
    for declared in sweep_settings.ALL_SETTINGS.values():
        assert len(declared.metavar) <= 12, declared
