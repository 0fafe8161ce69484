"""The interface for notebooks: what it returns equals what the commands report; examples and the page run."""

import ast
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from simulated_sweep import Simulation, write_sweep

import orchestrator
from orchestrator import load_sweep, notebook, run_sweep
from orchestrator.cli.sweep import parse_sweep
from orchestrator.report import write_report
from orchestrator.store import Store
from sampler.errors import InputError

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "analysis.ipynb"
SIMULATION = Simulation(documents={"gsm8k": 40, "mmlu": 57}, policies=("k1", "k2_middle"), shard_size=20)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sweep results/demo."""
    place = tmp_path_factory.mktemp("place")
    write_sweep(place / "results" / "demo", SIMULATION)
    return place


def run_python(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def cells(path: Path) -> str:
    """The notebook's code as a program that, like a notebook, shows the value of each cell's last expression."""
    program = [
        "def show(value):",
        "    shown = [getattr(value, name)() for name in ('_repr_html_', '_repr_svg_') if hasattr(value, name)]",
        "    print(*(shown or [repr(value)]))",
    ]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            if isinstance(tree.body[-1], ast.Expr):
                tree.body[-1] = ast.parse(f"show({ast.unparse(tree.body[-1])})").body[0]
            program.append(ast.unparse(tree))
    return "\n".join(program)


def test_values_are_those_of_the_report(place: Path, tmp_path: Path) -> None:
    sweep = load_sweep(place / "results" / "demo")
    written = write_report([sweep.folder], out=tmp_path)
    assert sweep.verdicts == list(written.verdicts)
    assert sweep.rows().equals(Store(sweep.folder).rows())
    assert sweep.rows(["task", "correct"]).column_names == ["task", "correct"]
    assert len(sweep.documents("mmlu")) == 57
    for name, task in (("tradeoff", "gsm8k"), ("tradeoff", "mmlu"), ("forest", "gsm8k")):
        path = tmp_path / "figures" / f"{task}-{name}.svg"
        assert sweep.figure(name, task).svg == path.read_bytes()
    assert sweep.figure("tradeoff").name == "gsm8k-tradeoff"
    assert sweep.analysis(margin=40).criteria.exploratory
    assert not sweep.analysis().criteria.exploratory


def test_html_has_totals_and_verdicts_and_escapes(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "one", Simulation(documents={"gsm8k": 4}, policies=("k1",), model="<b>/x"))
    page = load_sweep(folder)._repr_html_()
    accuracy = next(totals.accuracy for totals in load_sweep(folder).status.totals)
    assert accuracy is not None
    assert f"<td>{100 * accuracy:.1f}</td>" in page
    assert "no verdict: there are only rows of k1" in page
    assert "&lt;b&gt;/x" in page
    assert "<b>/x" not in page


def test_to_pandas(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = load_sweep(place / "results" / "demo")
    if find_spec("pandas") is not None:
        assert list(sweep.to_pandas(["task"])["task"]) == sweep.rows(["task"])["task"].to_pylist()
    monkeypatch.setattr(notebook, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="needs pandas, which is not installed"):
        sweep.to_pandas()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda sweep: load_sweep(sweep.folder / "nowhere"), "nowhere does not exist"),
        (lambda sweep: sweep.rows(["colour"]), "unknown column 'colour'; columns are sweep, trial_id"),
        (lambda sweep: sweep.figure("portrait"), "no figure 'portrait'; there are gsm8k-tradeoff, "),
        (lambda sweep: sweep.figure("tradeoff", "arc"), "no figure 'tradeoff' of arc"),
        (lambda _: run_sweep(task="gsm8k"), "unknown setting 'task'; did you mean tasks?"),
        (lambda _: run_sweep(policies=["k1"]), "--tasks is required"),
        (lambda _: run_sweep(tasks="gsm8k", quiet="yes"), "quiet must be True or False"),
        (lambda _: run_sweep(tasks="gsm8k", limit=0, margin=-1), "--limit must be .* --margin must be "),
    ],
)
def test_mistakes_are_sentences(place: Path, call: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        call(load_sweep(place / "results" / "demo"))


def test_settings_have_the_names_of_the_flags() -> None:
    given = {"tasks": ["gsm8k", "mmlu"], "threshold": [0.9, 0.95], "block_cache": [True, False], "dashboard": False}
    given |= {"quiet": True, "limit": None, "resources": ["a=1", "b=2"], "num_fewshot": 3, "policies": ("k1", "k2_4+7")}
    settings = parse_sweep(list(notebook._flags(given))).settings
    assert (settings.tasks, settings.threshold, settings.block_cache) == (("gsm8k", "mmlu"), (0.9, 0.95), (True, False))
    assert (settings.dashboard, settings.quiet, settings.limit, settings.fewshot) == (False, True, None, 3)
    assert (settings.resources, settings.policies) == (("a=1", "b=2"), ("k1", "k2_4+7"))


def test_importing_and_reading_needs_no_torch_and_no_ray(place: Path) -> None:
    heavy = "{'torch', 'ray'} & set(sys.modules)"
    assert run_python(f"import orchestrator; print({heavy}, 'orchestrator.notebook' in sys.modules)", place) == (
        "set() False\n"
    )
    code = "from orchestrator import load_sweep\nsweep = load_sweep('results/demo')\nsweep._repr_html_()\n"
    assert run_python(f"{code}sweep.figure('tradeoff')\nprint({heavy})", place) == "set()\n"
    assert not hasattr(orchestrator, "nothing")


def page_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_notebook_and_the_page_run(place: Path) -> None:
    """With a sweep that exists; test_a_sweep_runs_in_the_notebook runs one."""
    shown = run_python(cells(NOTEBOOK), place)
    assert "<table>" in shown
    assert "</svg>" in shown
    assert "gsm8k k2_middle: " in shown
    printed = run_python("\n".join(block for block in page_blocks() if "run_sweep" not in block), place)
    assert "Sweep('results/demo', complete, 194 of 194 documents)" in printed


@pytest.mark.slow
def test_a_sweep_runs_in_the_notebook(tmp_path: Path) -> None:
    shown = run_python(cells(NOTEBOOK), tmp_path)
    assert "gsm8k k2_middle: " in shown
    assert "</svg>" in shown
    run_python("\n".join(block for block in page_blocks() if "run_sweep" in block).replace("demo", "other"), tmp_path)
    assert len(load_sweep(tmp_path / "results" / "other").rows(["doc_id"])) == 15  # a second run of k1 is added
