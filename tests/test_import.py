"""Results that lm-eval wrote with other engines: the same accuracies and verdicts as rows of the same responses."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_sweep import Simulation, write_sweep
from tasks_fakes import bench
from test_export import Canned, lm_eval_files, sweep_of
from test_tasks_sources import gsm8k_folder

from orchestrator import load_sweep
from orchestrator.analysis.results import ConfigurationResult
from orchestrator.cli.__main__ import dispatch
from orchestrator.cli.console import run_command
from orchestrator.report import write_report
from orchestrator.report.exports import export_lm_eval
from orchestrator.report.lm_eval_import import import_lm_eval
from orchestrator.store import Store
from sampler.errors import InputError
from tasks.documents import TaskOptions
from tasks.task import Task, open_task

SIMULATION = Simulation(documents={"gsm8k": 60, "mmlu": 57}, policies=("k1", "k2_middle"), shard_size=30)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated sweep and its samples: `k1/` and `k2_middle/`."""
    place = tmp_path_factory.mktemp("place")
    folder = write_sweep(place / "sweep", SIMULATION)
    for exported in export_lm_eval(folder, place / "out"):
        exported.rename(place / exported.name.rpartition("__")[2])
    return place


def compared(folder: Path, task: str) -> ConfigurationResult:
    analysis = load_sweep(folder).analysis()
    (found,) = (one.configurations for one in analysis.tasks if one.task == task)
    (result,) = (one for one in found if one.comparison is not None)
    return result


@pytest.mark.parametrize("task", SIMULATION.documents)
def test_the_verdict_is_that_of_our_rows(place: Path, task: str, tmp_path: Path) -> None:
    for policy in SIMULATION.policies:
        import_lm_eval([place / policy], tmp_path / "engines", policy)
    ours, theirs = compared(place / "sweep", task), compared(tmp_path / "engines", task)
    assert theirs.accuracy == ours.accuracy
    assert theirs.comparison is not None
    assert ours.comparison is not None
    assert theirs.comparison.difference == ours.comparison.difference
    if task == "mmlu":  # gsm8k is also judged by its speed in our sweep
        assert theirs.comparison.verdict == ours.comparison.verdict
    assert "compared" not in theirs.comparison.gates
    assert not [finding for finding in load_sweep(tmp_path / "engines").analysis().gates if not finding.ok]


def test_an_import_is_labelled(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results" / "engines"
    for policy, label in (("k1", "vllm"), ("k2_middle", "sglang")):
        words = ["import", "lm-eval", str(place / policy), "--name", "engines", "--as", label]
        dispatch([*words, "--out", str(tmp_path / "results"), "--margin", "7"])
    assert "sglang has exact_match" in capsys.readouterr().out
    dispatch(["status", str(folder)])
    assert "2 imported configurations" in capsys.readouterr().out
    dispatch(["status", str(folder), "--json"])
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], set(status["imported"])) == ("complete", {"vllm", "sglang"})
    page = write_report([folder], out=tmp_path / "report", figures=False).page
    for text in (page.read_text(), page.with_name("results.md").read_text()):
        assert "Imported from lm-eval files" in text
        assert "The baseline is vllm" in text
        assert "Declared at the first import" in text
        assert "less than 7 points" in text
    assert page.read_text().count("The times of these results are unknown") == 1  # gsm8k
    assert page.read_text().count("generates no text") == 1  # mmlu
    assert "Times are for information only" not in page.read_text(), "nothing of this program ran"
    assert Store(folder).check() == []


def test_times_in_the_samples_are_compared(place: Path, tmp_path: Path) -> None:
    for policy, seconds in (("k1", 0.02), ("k2_middle", 0.01)):
        for number, path in enumerate((place / policy).glob("samples_gsm8k*")):
            assert number == 0
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            timed = [
                {**line, "tokens": 40 + n, "seconds": seconds * (40 + n) * (1 + n % 3 / 50)}
                for n, line in enumerate(lines)
            ]
            target = tmp_path / policy / path.name
            target.parent.mkdir()
            target.write_text("".join(json.dumps(line) + "\n" for line in timed))
        import_lm_eval([tmp_path / policy], tmp_path / "timed", policy)
    result = compared(tmp_path / "timed", "gsm8k")
    assert result.comparison is not None
    assert result.comparison.speedup is not None
    assert result.comparison.speedup.tokens is not None
    assert result.comparison.speedup.tokens.value == pytest.approx(2, rel=0.01)
    # One configuration without times: speeds are not compared any more, and accuracy still is.
    import_lm_eval([*(place / "k2_middle").glob("samples_gsm8k*")], tmp_path / "timed", "again")
    for one in load_sweep(tmp_path / "timed").analysis().tasks[0].configurations:
        assert one.comparison is None or one.comparison.verdict.basis.startswith("accuracy")


class Worse(Canned):
    """Wrong for every fifth document that Canned answers correctly."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.texts = [text if n % 10 else "It is \\boxed{-1}." for n, text in enumerate(self.texts)]


def check_against_lm_eval(task: Task, data: Path, place: Path) -> None:
    """lm-eval's own files of two fixed models, paired with each other and with rows of the same responses."""
    ours = sweep_of(task, place / "sweep", data)
    for name, answers in (("canned", Canned), ("worse", Worse)):
        theirs = lm_eval_files(task, place / name, answers, iterations=10)
        shutil.copytree(theirs, place / "files" / name)
        stated = json.loads(next(theirs.glob("results_*")).read_text())["results"]["gsm8k"]
        import_lm_eval([theirs], place / "both", name)
        rows = Store(place / "both").rows(columns=["policy", "correct"]).to_pylist()
        right = [row["correct"] for row in rows if row["policy"] == name]
        assert sum(right) / len(right) == pytest.approx(stated["exact_match,flexible-extract"])
    import_lm_eval([place / "files" / "worse"], place / "referee", "worse", against=ours)
    paired, referee = compared(place / "both", "gsm8k"), compared(place / "referee", "gsm8k")
    assert paired.comparison is not None
    assert referee.comparison is not None
    assert paired.comparison.difference == referee.comparison.difference
    assert paired.comparison.verdict == referee.comparison.verdict
    lost = sum(one != other for one, other in zip(Canned(task).texts, Worse(task).texts, strict=True))
    assert (paired.comparison.difference.lost, paired.comparison.difference.won) == (lost, 0)


def test_files_of_lm_eval_itself(tmp_path: Path) -> None:
    gsm8k_folder(tmp_path / "data")
    task = open_task("gsm8k", TaskOptions(data=str(tmp_path / "data")))
    check_against_lm_eval(task, tmp_path / "data", tmp_path)


@pytest.mark.slow
def test_files_of_lm_eval_on_the_real_benchmark(tmp_path: Path) -> None:
    data = bench()
    check_against_lm_eval(open_task("gsm8k", TaskOptions(data=str(data))), data, tmp_path)


def first_line(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        first, *others = path.read_text().splitlines()
        line = json.loads(first)
        change(line)
        path.write_text("\n".join([json.dumps(line), *others]))

    return edit


MALFORMED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-40]), "line 60 is not valid JSON"),
    "empty": (lambda path: path.write_text("\n"), "has no samples"),
    "binary": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "line 1 is not valid JSON"),
    "list": (lambda path: path.write_text("[1, 2]\n"), "line 1 must be a JSON object (got [1, 2])"),
    "no document": (first_line(lambda line: line.pop("doc")), "line 1 has no 'doc'"),
    "id": (first_line(lambda line: line.update(doc_id="one")), "has 'one' as 'doc_id', which must be a whole number"),
    "nan": (first_line(lambda line: line.update(exact_match=float("nan"))), "not valid JSON: NaN is not a number"),
    "no metric": (first_line(lambda line: line.pop("exact_match")), "has no value of the metric 'exact_match'"),
    "text as metric": (first_line(lambda line: line.update(exact_match="yes")), "has no numeric metric exact_match"),
    "no response": (first_line(lambda line: line.update(resps=[])), "has [] as 'resps', which must be a text"),
    "no prompt": (first_line(lambda line: line.update(arguments={})), "which must be a prompt for each request"),
    "twice": (lambda path: path.write_text(path.read_text() * 2), "line 61: document 0 occurs twice"),
    "time": (first_line(lambda line: line.update(seconds=-1)), "has -1 as 'seconds', which must be a number above 0"),
    "another run": (
        first_line(lambda line: line.update(exact_match=1 - line["exact_match"])),
        "its results file states",
    ),
    "name": (lambda path: path.rename(path.with_name("samples.txt")), "no samples_*.jsonl"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_one_sentence(
    kind: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, sentence = MALFORMED[kind]
    folder = tmp_path / "files"
    folder.mkdir()
    for path in (place / "k1").glob("*gsm8k*"):
        shutil.copy(path, folder)
    results = json.loads(next((place / "k1").glob("results_*")).read_text())
    (folder / "results_1.json").write_text(json.dumps(results))
    edit(next(folder.glob("samples_*")))
    words = ["import", "lm-eval", str(folder), "--name", "new", "--as", "engine", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: dispatch(words))
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert sentence in printed
    assert len(printed.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def edited(place: Path, target: Path, edit: Callable[[Path], object]) -> Path:
    target.mkdir()
    for path in (place / "k2_middle").glob("samples_*"):
        shutil.copy(path, target)
    edit(next(target.glob("samples_gsm8k*")))
    return target


def without_last(path: Path) -> None:
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))


def other_prompt(line: dict[str, Any]) -> None:
    line["arguments"]["gen_args_0"]["arg_0"] += " Think."


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (without_last, "gsm8k: documents differ: only .*engines has gsm8k/59"),
        (first_line(lambda line: line["doc"].update(question="2 + 2?")), "the document gsm8k/0 differs"),
        (first_line(other_prompt), r"the prompt of gsm8k/0 differs: .* the files have '.* Think\.'"),
        (Path.unlink, "has samples of gsm8k, mmlu, but the files have samples of mmlu"),
    ],
)
def test_other_documents_or_prompts_are_refused(place: Path, tmp_path: Path, edit: Any, sentence: str) -> None:
    import_lm_eval([place / "k1"], tmp_path / "engines", "vllm")
    before = Store(tmp_path / "engines").read_sweep_record()
    with pytest.raises(InputError, match=sentence):
        import_lm_eval([edited(place, tmp_path / "edited", edit)], tmp_path / "engines", "sglang")
    assert Store(tmp_path / "engines").read_sweep_record() == before


def test_what_an_import_does_not_do(place: Path, tmp_path: Path) -> None:
    files = [place / "k1"]
    import_lm_eval(files, tmp_path / "engines", "vllm")
    with pytest.raises(InputError, match="already has a configuration vllm; choose another --as"):
        import_lm_eval(files, tmp_path / "engines", "vllm")
    with pytest.raises(InputError, match="is a sweep that ran here"):
        import_lm_eval(files, place / "sweep", "vllm")
    with pytest.raises(InputError, match="--as must be a name without slashes"):
        import_lm_eval(files, tmp_path / "engines", "a/b")
    with pytest.raises(InputError, match="already has a baseline, vllm"):
        import_lm_eval(files, tmp_path / "engines", "other", against=place / "sweep")
    with pytest.raises(InputError, match=r"has no numeric metric f1, only exact_match; choose one with --metric"):
        import_lm_eval([*(place / "k1").glob("samples_gsm8k*")], tmp_path / "f1", "vllm", metric="f1")
    other = write_sweep(tmp_path / "other", replace(SIMULATION, documents={"mmlu": 57}))
    with pytest.raises(InputError, match="other has no task gsm8k; it has mmlu"):
        import_lm_eval([*(place / "k1").glob("samples_gsm8k*")], tmp_path / "new", "vllm", against=other)
    flags = ["sweep", "--tasks", "gsm8k", "--model", "tiny", "--data", "bundled", "--limit", "1", "--dry-run"]
    with pytest.raises(InputError, match="contains imported results and cannot be continued; choose another --name"):
        dispatch([*flags, "--name", "engines", "--out", str(tmp_path)])
