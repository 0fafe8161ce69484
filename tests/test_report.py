"""Reports of simulated sweeps: files, content and input errors."""

import base64
import hashlib
import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from simulated_sweep import NINE, Simulation, write_sweep

from orchestrator.cli.console import run_command
from orchestrator.cli.reports import report
from orchestrator.report import tables, write_report
from orchestrator.report.examples import (
    AFTER,
    BEFORE,
    ELLIPSIS,
    HEAD,
    TAIL,
    Answer,
    Piece,
    first_difference,
    mark_difference,
)
from orchestrator.report.text import signed
from orchestrator.report.write import templates
from sampler.errors import InputError

ROOT = Path(__file__).parents[1]
SMALL = Simulation(documents={"gsm8k": 60, "minerva_math": 56, "mmlu": 57}, shard_size=30)
FEW = Simulation(documents={"gsm8k": 30}, policies=("k1_first", "k1_last", "k2_middle"), shard_size=30)
MAX_BYTES = 5_000_000
COMPLETE = "every requested configuration has every document"


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_sweep(tmp_path_factory.mktemp("sweep") / "nine", SMALL)
    write_report([folder], compare=ROOT / "examples" / "seed-results")
    return folder


@pytest.fixture
def few(tmp_path: Path) -> Path:
    return write_sweep(tmp_path / "few", FEW)


class Page(HTMLParser):
    """Text of a page and the tags in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def ids(self) -> list[str]:
        return [str(attributes["id"]) for _, attributes in self.tags if "id" in attributes]


def read_page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_is_self_contained(reported: Path) -> None:
    page = read_page(reported)
    assert (reported / "report.html").stat().st_size < MAX_BYTES
    assert len(page.ids) == len(set(page.ids))
    links = [v for _, a in page.tags for k, v in a.items() if k in ("src", "href", "xlink:href", "srcset", "action")]
    images = [attributes["src"] for tag, attributes in read_page(reported).tags if tag == "img"]
    assert all(source and source.startswith("data:image/svg+xml;") for source in images)
    assert not [attributes for _, attributes in page.tags if "style" in attributes or "onclick" in attributes]
    assert {str(link)[1:] for link in links if str(link).startswith("#")} <= set(page.ids)


def test_the_content_security_policy_allows_only_its_own_style_and_script(reported: Path) -> None:
    text = (reported / "report.html").read_text(encoding="utf-8")
    policy = next(str(a["content"]) for tag, a in Page(text).tags if "http-equiv" in a and tag == "meta")
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(bodies) == 1
        digest = base64.b64encode(hashlib.sha256(bodies[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_model_output_is_escaped(reported: Path) -> None:
    text = (reported / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;document.title" in text
    assert "<script>document.title" not in text
    images = [attributes["src"] for tag, attributes in read_page(reported).tags if tag == "img"]
    assert all(source and source.startswith("data:image/svg+xml;") for source in images)
    assert "<script>document.title='broken'</script>" in read_page(reported).text


def test_the_page_has_every_part(reported: Path) -> None:
    page = read_page(reported)
    for part in (
        "verdict",
        "results",
        "gates",
        "figures",
        "explanations",
        "regressions",
        "earlier",
        "provenance",
        "missing",
    ):
        assert part in page.ids
    for policy in NINE:
        assert policy in page.text
    assert "Declared before the run" in page.text
    assert "k1_first ran at 22.75 tokens/s" in page.text
    for drop in ("reported as −6.7", "reported as −13.2", "−13.27"):  # its own table, and its accuracies' difference
        assert drop in page.text
    assert page.ids.index("verdict") < page.ids.index("results") < page.ids.index("figures") < page.ids.index("gates")
    glossary = page.text.partition("Glossary")[2].rpartition("Glossary")[2]
    assert all(
        term in glossary for term in ("pass", "small block", "layer-position", "replicate", "calibration", "flips")
    )
    assert COMPLETE in page.text


@pytest.mark.parametrize("task", ["gsm8k", "minerva_math", "mmlu"])
def test_figures_are_written_as_files(reported: Path, task: str) -> None:
    names = {path.name for path in (reported / "figures").iterdir()}
    wanted = {f"{task}-tradeoff", f"{task}-grid", f"{task}-agreement"}
    wanted |= {f"{task}-spread"} if task != "mmlu" else set()
    wanted |= {f"{task}-subjects"} if task != "gsm8k" else set()
    wanted |= {f"{task}-levels"} if task == "minerva_math" else set()
    assert {f"{name}.{suffix}" for name in {*wanted, "time"} for suffix in ("svg", "png")} <= names
    for name in wanted:
        root = ET.fromstring((reported / "figures" / f"{name}.svg").read_bytes())
        assert root.tag.endswith("svg")
        assert (reported / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_summaries_have_the_keys_of_the_original_experiment(reported: Path) -> None:
    paths = sorted((reported / "summaries").rglob("summary.json"))
    assert {str(path.parent.relative_to(reported / "summaries")) for path in paths} == {
        f"{task}/{policy}" for task in SMALL.documents for policy in NINE
    }
    summary = json.loads((reported / "summaries/gsm8k/k2_middle/summary.json").read_text())
    keys = {"task", "config", "timestamp", "accuracy", "throughput", "gpu_info", "git", "environment", "model_args"}
    assert keys | {"eval_params", "intervals", "counters", "layers", "gates"} <= summary.keys()
    assert set(summary["throughput"]) == {"tokens_generated", "total_time_s", "tokens_per_s"}
    assert summary["layers"] == list(range(8, 20))
    ends = summary["intervals"]["speedup"]
    assert ends["low"] <= ends["value"] <= ends["high"]
    assert summary["counters"]["replayed"] == summary["counters"]["eligible"] > 0
    assert summary["throughput"]["tokens_generated"] == summary["counters"]["tokens"]
    assert summary["flops_per_token"] > 0
    assert "peak_memory_bytes" in summary


def test_results_have_the_tables_of_the_original_experiment(reported: Path) -> None:
    text = (reported / "results.md").read_text(encoding="utf-8")
    for title in (
        "## Complete results",
        "## Best configuration per benchmark",
        "## Accuracy and speed",
        "## Notes",
    ):
        assert title in text
    rows = [line for line in text.splitlines() if line.startswith("| k2_middle | 2 | middle |")]
    assert len(rows) == 3
    summary = json.loads((reported / "summaries/gsm8k/k2_middle/summary.json").read_text())
    assert f"{100 * summary['accuracy']:.2f} %" in rows[0]
    assert f"{summary['throughput']['tokens_per_s']:.2f}" in rows[0]
    lines = text.splitlines()
    for above, line in pairwise(lines):  # every row of a table has its header's columns
        if line.startswith("|") and above.startswith("|"):
            assert line.count("|") == above.count("|")


def test_a_counter_is_shown_by_declaring_a_column(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    column = tables.Column("prompt tokens/document", lambda row: tables.number_cell(row.per_document("prompt_tokens")))
    monkeypatch.setattr(tables, "WORK_COLUMNS", (*tables.WORK_COLUMNS, column))
    write_report([few], figures=False)
    summary = json.loads((few / "summaries/gsm8k/k2_middle/summary.json").read_text())
    text = read_page(few).text
    assert "prompt tokens/document" in text
    assert f"{summary['counters']['prompt_tokens'] / summary['counters']['rows']:.1f}" in text


def test_the_same_rows_give_the_same_bytes(few: Path, tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        write_report([few], out=tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        found.append({str(p.relative_to(tmp_path / name)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files})
    assert found[0] == found[1]
    assert "report.html" in found[0]


def test_undeclared_criteria_make_verdicts_exploratory(few: Path, tmp_path: Path) -> None:
    write_report([few], out=tmp_path / "out", margin=3.0, figures=False)
    assert "exploratory" in read_page(tmp_path / "out").text
    results = (tmp_path / "out" / "results.md").read_text(encoding="utf-8")
    assert re.search(r"Exploratory: .* 1\.2× .* 3 points", results)
    summary = json.loads((tmp_path / "out/summaries/gsm8k/k2_middle/summary.json").read_text())
    assert summary["verdict"]["exploratory"] is True


def test_the_command_prints_the_verdicts_and_last_the_page(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report([str(few), "--no-figures"])
    *verdicts, page = capsys.readouterr().out.splitlines()
    assert page == str(few / "report.html")
    assert [verdict.partition(" is ")[0] for verdict in verdicts] == ["gsm8k"]
    results = (few / "results.md").read_text(encoding="utf-8")
    assert all(f"- {verdict}\n" in results for verdict in verdicts)


def test_verdicts_print_on_an_ascii_terminal(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: report([str(few), "--no-figures"]))
    assert ended.value.code == 0
    assert b"more than 1.20? the speed of k=1" in terminal.getvalue()


def test_an_unfinished_sweep_lists_what_is_missing(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "part", replace(FEW, documents={"gsm8k": 60, "mmlu": 57}, trials=3))
    write_report([folder], figures=False)
    text = read_page(folder).text
    assert "mmlu: no rows yet." in text
    assert re.search(r"gsm8k: \S+ has 30 of 60 documents\.", text)
    assert "The sweep is not finished" in text


def test_the_bundled_model_gets_a_notice(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "tiny", replace(FEW, model="tiny", data="bundled"))
    write_report([folder], figures=False)
    assert "The model is the small one bundled" in read_page(folder).text
    assert "The documents of gsm8k are bundled" in read_page(folder).text


def test_a_failed_gate_is_explained(tmp_path: Path) -> None:
    def none_replayed(policy: str, columns: dict[str, Any]) -> Any:
        return columns["replayed"] * 0 if policy.startswith("k2") else columns["replayed"]

    folder = write_sweep(tmp_path / "broken", replace(FEW, changes={"replayed": none_replayed}))
    write_report([folder], figures=False)
    text = read_page(folder).text
    assert "The times then say nothing about layer reuse" in text
    assert "checks failed (replay)" in text


def test_comparable_sweeps_are_merged(tmp_path: Path) -> None:
    one = write_sweep(tmp_path / "one", FEW)
    two = write_sweep(tmp_path / "two", replace(FEW, policies=("k1_first", "k3_middle")))
    page = write_report([one, two, one], figures=False).page
    assert page == one / "merged" / "report.html"
    text = read_page(one / "merged").text
    assert "k3_middle" in text
    assert "k2_middle" in text
    assert "cannot be compared with each other" not in text
    summary = json.loads((one / "merged/summaries/gsm8k/k1_first/summary.json").read_text())
    assert summary["eval_params"]["repeats"] == 1  # the copy of a trial counts once


def test_a_trial_run_twice_becomes_a_repeat(tmp_path: Path) -> None:
    one, two = write_sweep(tmp_path / "one", FEW), write_sweep(tmp_path / "two", replace(FEW, actors=1))
    write_report([one, two], out=tmp_path / "out", figures=False)
    summary = json.loads((tmp_path / "out/summaries/gsm8k/k2_middle/summary.json").read_text())
    assert summary["eval_params"]["repeats"] == 2
    assert summary["counters"]["rows"] == 60


def test_two_models_get_separate_sections(tmp_path: Path) -> None:
    one = write_sweep(tmp_path / "one", FEW)
    two = write_sweep(tmp_path / "two", replace(FEW, model="simulated/other", depth=36))
    written = write_report([one, two], out=tmp_path / "out", figures=False)
    named = [f"{model}: gsm8k is" for model in (Simulation().model, "simulated/other")]
    assert all(message.startswith(name) for message, name in zip(written.verdicts, named, strict=True))
    page = read_page(tmp_path / "out")
    assert {"s1-verdict", "s2-verdict"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "cannot be compared with each other" in page.text
    layers = [
        json.loads((tmp_path / f"out/summaries/{prefix}gsm8k/k2_middle/summary.json").read_text())["layers"]
        for prefix in ("s1-", "s2-")
    ]
    assert layers == [list(range(8, 20)), list(range(12, 24))]


def test_varying_settings_are_part_of_summary_names(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "two", replace(FEW, thresholds=(0.9, 0.95)))
    write_report([folder], figures=False)
    names = {path.parent.name for path in (folder / "summaries").rglob("summary.json")}
    assert names == {f"{policy}_t{value}" for policy in FEW.policies for value in ("0.9", "0.95")}


def test_policies_are_compared_with_decode_settings(tmp_path: Path) -> None:
    beyond = ("k1", "k2_middle", "mlp=2_middle", "trim=0.25_middle", "trim=0.25_middle.random", "stale=2")
    sim = Simulation(documents={"gsm8k": 60}, policies=beyond, thresholds=(0.95, 0.8), shard_size=30)
    folder = write_sweep(tmp_path / "beyond", sim)
    write_report([folder])
    text = read_page(folder).text
    results = (folder / "results.md").read_text(encoding="utf-8")
    for page in (text, results):
        assert "Policies and decode settings" in page
        assert "on the front" in page
    [table] = re.findall(r"(?m)^\| family \|.*?\n\n", results, re.DOTALL)
    families = [line.split(" | ")[0].removeprefix("| ") for line in table.strip().splitlines()[2:]]
    assert families == ["k=1", "threshold", "fixed grid", "trim", "trim, random", "mlp", "stale"]
    for axis in ("speed", "executions", "positions"):
        assert (folder / "figures" / f"gsm8k-pareto-{axis}.svg").stat().st_size > 10_000


def test_the_fixed_grid_alone_is_not_compared_with_decode_settings(reported: Path) -> None:
    assert "Policies and decode settings" not in read_page(reported).text
    assert not list((reported / "figures").glob("*pareto*"))


def test_decode_settings_alone_can_be_reported(tmp_path: Path) -> None:
    sim = Simulation(documents={"gsm8k": 40}, policies=("k1",), thresholds=(0.95, 0.8), shard_size=20)
    folder = write_sweep(tmp_path / "settings", sim)
    write_report([folder])
    assert "No configuration can be compared with k=1" in read_page(folder).text


def test_output_mode_is_identical_by_construction(tmp_path: Path) -> None:
    policies = ("k1_first", "k1_last", "k2_first.output", "k2_last.output")
    folder = write_sweep(tmp_path / "output", replace(FEW, policies=policies))
    write_report([folder], figures=False)
    text = read_page(folder).text
    assert "Identical by construction" in text
    assert "k2_first.output, k2_last.output" in text
    assert "- identical by construction: k2_first.output, k2_last.output" in (folder / "results.md").read_text("utf-8")


Broken = Callable[[Path], list[str]]


def _empty(folder: Path) -> list[str]:
    (folder / "empty").mkdir()
    return [str(folder / "empty")]


def _one_policy(folder: Path) -> list[str]:
    return [str(write_sweep(folder / "s", replace(FEW, policies=("k1_first",))))]


def _no_baseline(folder: Path) -> list[str]:
    return [str(write_sweep(folder / "s", replace(FEW, policies=("k2_first", "k3_first"))))]


def _nan(folder: Path) -> list[str]:
    changes = {"metrics": '{"exact_match,flexible-extract": NaN}', "correct": None}
    return [str(write_sweep(folder / "s", replace(FEW, changes=changes)))]


def _no_documents(folder: Path) -> list[str]:
    write_sweep(folder / "s", FEW)
    (folder / "s" / "documents" / "gsm8k.parquet").unlink()
    return [str(folder / "s")]


def _no_rows_file(folder: Path) -> list[str]:
    write_sweep(folder / "s", FEW)
    next((folder / "s" / "trials").glob("*/rows.parquet")).unlink()
    return [str(folder / "s")]


def _no_request(folder: Path) -> list[str]:
    write_sweep(folder / "s", FEW)
    (folder / "s" / "sweep.json").unlink()
    return [str(folder / "s")]


def _no_rows(folder: Path) -> list[str]:
    return [str(write_sweep(folder / "s", replace(FEW, trials=0)))]


def _no_old(folder: Path) -> list[str]:
    return [str(write_sweep(folder / "s", FEW)), "--compare", str(folder)]


def _bad_margin(folder: Path) -> list[str]:
    return [str(write_sweep(folder / "s", FEW)), "--margin", "nan"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_empty, "is not a sweep directory"),
        (lambda folder: [str(folder / "absent")], "does not exist"),
        (_one_policy, "another policy"),
        (_no_baseline, "no rows at k=1"),
        (_nan, "with no finite score"),
        (_no_documents, "does not exist"),
        (_no_rows_file, "rows.parquet is missing"),
        (_no_request, "has no sweep.json"),
        (_no_rows, "no rows yet"),
        (_no_old, "no summary.json"),
        (_bad_margin, "--margin must be a number"),
        (lambda _: [], "required"),
    ],
)
def test_input_errors_are_one_sentence(
    make: Broken, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = make(tmp_path)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: report(arguments))
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before


def test_one_document_has_a_value_and_no_interval(tmp_path: Path) -> None:
    """As after --limit 1, with figures."""
    folder = write_sweep(tmp_path / "one", replace(FEW, documents={"gsm8k": 1, "mmlu": 1}))
    write_report([folder])
    assert "gsm8k is undecided" in (folder / "results.md").read_text(encoding="utf-8")
    assert (folder / "figures" / "gsm8k-tradeoff.png").exists()


def test_other_files_among_the_trials_are_ignored(few: Path) -> None:
    (few / "trials" / "notes.txt").write_text("mine")
    (few / "trials" / "copy of a trial").mkdir()
    write_report([few], figures=False)
    assert COMPLETE in read_page(few).text


def test_outdated_summaries_are_removed(few: Path) -> None:
    """Another limit or another varying setting changes directory names; a configuration must not be found twice."""
    write_report([few], figures=False)
    written = few / "summaries" / "gsm8k" / "k2_middle" / "summary.json"
    outdated, foreign = (few / "summaries" / name / "k2_middle" / "summary.json" for name in ("gsm8k_limit_5", "mine"))
    for path, text in ((outdated, written.read_text()), (foreign, '{"accuracy": 1}')):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    write_report([few], figures=False)
    assert written.exists()
    assert foreign.exists()
    assert not outdated.parent.parent.exists()


def test_our_own_earlier_report_has_fewer_caveats(few: Path, tmp_path: Path) -> None:
    write_report([few], out=tmp_path / "then", figures=False)
    write_report([few], compare=tmp_path / "then" / "summaries", figures=False)
    text = read_page(few).text
    assert "nothing is paired." in text
    assert "padding after the stop token" not in text


def test_unreadable_answers_give_a_notice(few: Path) -> None:
    """Statistics do not use the texts, so they are right even if texts are corrupted."""
    for path in (few / "trials").glob("*/rows.parquet"):
        chunk = pq.ParquetFile(path).metadata.row_group(0)
        column = next(c for c in map(chunk.column, range(chunk.num_columns)) if c.path_in_schema == "text")
        content = bytearray(path.read_bytes())
        start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
        content[start + column.total_compressed_size // 2] ^= 1
        path.write_bytes(content)
    write_report([few], figures=False)
    assert "the unreadable part is left out" in read_page(few).text


def test_changed_lengths_add_the_speedup_per_document(tmp_path: Path) -> None:
    twice = {"tokens": lambda policy, columns: columns["tokens"] * (2 if policy.startswith("k2") else 1)}
    folder = write_sweep(tmp_path / "long", replace(FEW, changes=twice))
    write_report([folder], figures=False)
    [header] = [line for line in (folder / "results.md").read_text("utf-8").splitlines() if "| Reuse K |" in line]
    assert "| Speed-up | Seconds per Document | Speed-up, Documents | Notes |" in header
    assert "speed-up, documents" in read_page(folder).text


@pytest.mark.parametrize(
    ("value", "places", "shown"),
    [(0.04, 2, "+0.04"), (0.04, 1, "0.0"), (-0.04, 1, "0.0"), (-1.25, 2, "−1.25"), (0.0, 2, "0.00"), (12, 0, "+12")],
)
def test_signed_numbers(value: float, places: int, shown: str) -> None:
    assert signed(value, places) == shown


def test_a_directory_that_cannot_be_written_to(few: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match="cannot write to"):
        write_report([few], out=tmp_path / "file" / "out", figures=False)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


def test_long_answers_are_shortened_around_their_first_difference() -> None:
    start, end = "same words " * 200, " and the end" * 200
    one, other = mark_difference(Answer(text=start + "apples" + end), Answer(text=start + "apricots" + end))
    assert (plain(one.different), plain(other.different)) == ("apples", "apricots")
    for side in (one, other):
        assert ELLIPSIS in plain(side.same)
        assert ELLIPSIS in plain(side.rest)
        assert len(plain(side.same)) <= HEAD + BEFORE + len(ELLIPSIS)
        assert len(plain(side.rest)) <= AFTER + TAIL + len(ELLIPSIS)


@pytest.mark.parametrize(
    ("one", "other", "parted"),
    [
        ("is 12.", "is 13.", ("12.", "13.")),
        ("same", "same", ("", "")),
        ("same", "same and more", ("", " and")),
        ("", "x", ("", "x")),
        (" A", " B", ("A", "B")),
    ],
)
def test_the_first_different_word_is_marked(one: str, other: str, parted: tuple[str, str]) -> None:
    left, right = mark_difference(Answer(text=one), Answer(text=other))
    assert (plain(left.different), plain(right.different)) == parted
    assert plain(left.same + left.different + left.rest) == one
    assert plain(right.same + right.different + right.rest) == other


def test_tokens_are_colored_by_their_confidence() -> None:
    def colored(*, shown: bool) -> str:
        one = Answer(
            text="is 12 & so", tokens=(5, 6, 7), steps=(0, 2, -1), confidences=(0.97, 0.4, 0.8), ends=(2, 5, 10)
        )
        other = Answer(text="is 1<b>", tokens=(5, 9), steps=(0, 1), confidences=(0.5, 0.9), ends=(2, 6))
        left, right = mark_difference(one, other, colored=shown)
        macros: Any = templates().get_template("macros.html.j2").module
        return str(macros.marked(left) + macros.marked(right))

    assert colored(shown=True) == (
        '<p class="model"><span class="same"><i title="step 0, confidence 0.97">is</i>'
        '<i class="c0" title="step 2, confidence 0.4"> </i></span>'
        '<mark><i class="c0" title="step 2, confidence 0.4">12</i></mark>'
        '<span class="after"><i class="c2" title="step -1, confidence 0.8"> &amp; so</i></span></p>'
        '<p class="model"><span class="same"><i class="c1" title="step 0, confidence 0.5">is</i>'
        '<i title="step 1, confidence 0.9"> </i></span><mark><i title="step 1, confidence 0.9">1&lt;b</i>&gt;</mark>'
        '<span class="after"></span></p>'
    )
    assert "<i" not in colored(shown=False)


def plain(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_the_terminal_says_what_is_damaged_or_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sim = Simulation(documents={"gsm8k": 20}, policies=("k1_first", "k1_last", "k2_middle"), shard_size=10, trials=5)
    folder = write_sweep(tmp_path / "sweep", sim)
    damaged = sorted(folder.glob("trials/*/rows.parquet"))[0]
    damaged.write_bytes(damaged.read_bytes()[:200])
    report([str(folder), "--no-figures"])
    printed = capsys.readouterr()
    assert str(damaged) in printed.err
    assert "missing: " in printed.err
    assert printed.out.splitlines()[0].startswith("gsm8k has no verdict yet")
