"""README and docs: every command runs or is at least parsed, flags exist, links work, and the Python examples run."""

import importlib
import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from page_commands import ALL, OURS, PAGES, README, ROOT, programs, run_page_command
from simulated_sweep import Simulation, write_sweep
from tasks_fakes import canned_for, run

from orchestrator.cli.__main__ import dispatch
from orchestrator.cli.console import aliases
from orchestrator.cli.sweep import parse_sweep
from orchestrator.planning.settings import ALL_SETTINGS
from orchestrator.report.exports import export_lm_eval
from sampler import DecodeSettings, Prompt, ReusePolicy, decode_prompts, load_model
from sampler.policies import RULES
from tasks.catalog import CATALOG
from tasks.documents import TaskOptions
from tasks.task import open_task
from tools import settings_page

ELSEWHERE = ("Efficient-Large-Model", "original-grid", "slurm status", "--device cuda")  # need what is not here
LONG = ("reuse-sweep bench", "tools.")  # take minutes, or change the project's files
SET_UP = (
    "python3 -m venv",
    "uv ",
    "pip ",
    ".venv/bin/pip",
    "export ",
    "hf ",
)  # install packages, as `.ci/run` does, or files
RAY_WITH_TOKEN = "RAY_AUTH_MODE=token ray "  # tests/test_dashboard.py runs these during a sweep
CONTAINERS = ("docker ", "kubectl ")  # programs that may not be installed here
OTHERS = {"--tmux", "--generate", "--working-dir", "--follow"}  # flags of Ray's commands
OTHERS |= {"--index-url", "--require-hashes", "--no-deps", "--head", "--logdir"}  # of pip, ray start and tensorboard
OTHERS |= {"--repo-type", "--exclude"}  # of hf download
PROGRAMS = {
    *("sweep", "status", "report", "export", "tasks", "tasks run", "generate", "score", "profile", "bench"),
    *("check", "parity", "version", "import", "track"),
    *("bench sweep", "slurm submit", "slurm status", "tools.bundled.documents", "tools.bundled.training_lines"),
    *(
        "tools.cold",
        "tools.faults",
        "tools.pictures",
        "tools.race_seeds",
        "tools.scale",
        "tools.tiny.train",
        "tools.tiny.evaluate",
        "tools.settings_page",
    ),
}


RUN = [
    command
    for command in OURS
    if "--device-profile" in command or not any(part in command for part in (*ELSEWHERE, *LONG))
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of the project that the commands name, and with the results of a sweep."""
    place = tmp_path_factory.mktemp("place")
    for name in ("tests", "examples", "cluster.yaml", "orchestrator"):
        (place / name).symlink_to(ROOT / name)
    write_sweep(
        place / "results" / "demo",
        Simulation(documents={"gsm8k": 20}, policies=("k1_first", "k2_middle"), shard_size=10),
    )
    for name, exported in zip(("vllm", "sglang"), export_lm_eval(place / "results" / "demo", place), strict=True):
        exported.rename(place / name)
    return place


@pytest.mark.parametrize("command", RUN)
def test_a_command_runs(command: str, place: Path) -> None:
    """As written, but with --dry-run for jobs and sweeps; test_documentation_sweeps runs the sweeps."""
    shortened = command.replace("--requeue -- ", "--requeue --dry-run -- ")
    if programs(command)[0] == "sweep" and "--dry-run" not in command:
        shortened += " --dry-run"
    assert run_page_command(shortened, place).strip()


@cache
def known_flags(program: str) -> set[str]:
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", [program, "--help"]), redirect_stdout(printed), suppress(SystemExit):
        if program.startswith("tools."):
            module = importlib.import_module(program)
            (importlib.import_module(f"{program}.__main__") if hasattr(module, "__path__") else module).main()
        else:
            dispatch([*program.split(), "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", printed.getvalue()))


def test_every_flag_exists() -> None:
    """The flags of each command in a shell block."""
    for command in OURS:
        own, _, passed_on = command.partition(" -- ")
        assert flags_in(shlex.split(own)) <= known_flags(programs(command)[0]), command
        assert flags_in(shlex.split(passed_on)) <= known_flags("sweep"), command
    for command in ALL:
        if command.startswith(("ray submit", "ray job submit")):
            assert flags_in(shlex.split(command.partition(" -- ")[2])) <= known_flags("sweep"), command


def test_commands_in_the_text_exist() -> None:
    """Commands in the text of a page, which are not run, have flags that exist."""
    for page in PAGES:
        for command in re.findall(r"(?<!`)`(reuse-sweep [a-z][^`]+)`", page.read_text(encoding="utf-8")):
            found = programs(command)
            assert found, (page.name, command)
            own, _, passed_on = command.partition(" -- ")
            assert {word.partition("=")[0] for word in flags_in(own.split())} <= known_flags(found[0]), command
            assert flags_in(passed_on.split()) <= known_flags("sweep"), command


def test_pages_and_help_have_the_same_flags() -> None:
    """Every flag in the text belongs to a command, and every flag of a command is on some page."""
    known = set().union(*map(known_flags, PROGRAMS - {"tools.settings_page"}))
    known |= {f"--{alias}" for alias in aliases(ALL_SETTINGS)}
    mentioned: set[str] = set()
    for page in PAGES:
        here = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*(?![\w-])", page.read_text(encoding="utf-8")))
        assert here <= known | OTHERS, (page.name, here - known - OTHERS)
        mentioned |= here
    mentioned |= {flag.replace("--no-", "--", 1) for flag in mentioned} | {"--help"}  # one of a pair is enough
    assert {flag for flag in known if not {flag, flag.replace("--no-", "--", 1)} & mentioned} == set()


def test_every_program_is_documented() -> None:
    mentioned = {program for page in PAGES for program in programs(page.read_text(encoding="utf-8"))}
    assert mentioned == PROGRAMS


def test_the_settings_page_is_generated() -> None:
    """`python -m tools.settings_page > docs/settings.md` updates it."""
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == settings_page.page()


def flags_in(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


@pytest.mark.parametrize("command", [command for command in ALL if command.startswith("make")])
def test_make_targets_exist(command: str) -> None:
    assert subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("command", [command for command in ALL if command.startswith("ray ")])
def test_ray_commands_and_their_files_exist(command: str) -> None:
    """Checks the sub-command, its flags and its files without running it."""
    words = shlex.split(command.partition(" -- ")[0])
    verb = words[1:3] if words[1] == "job" else words[1:2]
    asked = [str(Path(sys.executable).with_name("ray")), *verb, "--help"]
    offered = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert all(flag in offered for flag in flags_in(words))
    assert all((ROOT / word).exists() for word in words if word.endswith((".yaml", ".py")))


def test_the_original_grid_is_a_valid_config() -> None:
    settings = parse_sweep(["--config", str(ROOT / "examples" / "original-grid.yaml")]).settings
    subsets = ("first", "middle", "last")
    reused = tuple(f"k{k}_{subset}.output" for k in (2, 3) for subset in subsets)
    assert settings.policies == (*(f"k1_{subset}" for subset in subsets), *reused)
    assert (settings.model, settings.threshold) == ("Efficient-Large-Model/Fast_dLLM_v2_7B", (0.9,))


def test_no_command_is_overlooked() -> None:
    left = [
        command
        for command in ALL
        if command not in OURS and not command.startswith(("make", "ray ", RAY_WITH_TOKEN, *SET_UP, *CONTAINERS))
    ]
    assert left == []


def test_files_of_container_commands_exist() -> None:
    named = [
        word for command in ALL if command.startswith(CONTAINERS) for word in shlex.split(command) if "deploy/" in word
    ]
    assert named
    assert all((ROOT / word).is_file() for word in named)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 250


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_and_pictures_exist() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^):]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), (page.name, link)
            assert not anchor or anchor in anchors(target), (page.name, link)


ADDITIONS = {"policy": "policies.md", "task": "tasks.md"}  # pages that show how to add one


def code_that_adds(kind: str) -> str:
    """The Python block in the section "Adding a …"."""
    text = (ROOT / "docs" / ADDITIONS[kind]).read_text(encoding="utf-8").partition(f"\n## Adding a {kind}\n")[2]
    [block] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(block)


@pytest.mark.parametrize("kind", ADDITIONS)
def test_ten_lines_are_enough(kind: str) -> None:
    lines = [line for line in code_that_adds(kind).splitlines() if line and not line.startswith("from ")]
    assert len(lines) <= 10


def test_a_policy_is_added_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "settle", raising=False)
    rules = dict(RULES)
    try:
        exec(code_that_adds("policy"), {"RULES": RULES, "__name__": "settle"})
        policy = ReusePolicy.parse("settle=2_middle")
        assert str(policy) == "settle=2_middle"
        model = load_model(str(ROOT / "tests" / "golden" / "m36"))
        settings = DecodeSettings(max_new_tokens=64)
        [(_, decoded)] = decode_prompts(model, [Prompt(ids=(5, 3, 8, 13))], policy=policy, settings=settings)
        steps = decoded.counters.full + decoded.counters.small
        assert 0 < decoded.counters.layers_reused <= 12 * steps
    finally:
        RULES.clear()
        RULES.update(rules)


def test_a_task_is_added_as_documented(tmp_path: Path) -> None:
    folder = tmp_path / "me" / "capitals"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text(
        '{"question": "Capital of Peru?", "answer": "Lima"}\n{"question": "Capital of Mali?", "answer": "Bamako"}\n'
    )
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: test\n    path: test.jsonl\n---\n"
    )
    try:
        exec(code_that_adds("task"), {})
        task = open_task("capitals", TaskOptions(data=str(tmp_path)))
        assert [task.describe(document).gold for document in task.documents] == ["Lima", "Bamako"]
        results = run(task, canned_for(task, lambda _: "Lima"))
        assert [result.correct for result in results] == [True, False]
    finally:
        CATALOG.pop("capitals", None)
