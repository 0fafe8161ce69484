"""Every display of a sweep shows the same numbers: status, tables, report, results.md and summary.json."""

import json
from pathlib import Path

import pytest
from synthetic_folder import SyntheticFolder

from orchestrator.cli import run_sweep
from orchestrator.core.trial import WantedDocuments
from orchestrator.planning.run_plan import RunPlan
from orchestrator.progress.status import read_status
from orchestrator.progress.view import Glyphs, end_table
from orchestrator.report.write import write_report
from orchestrator.store import Store

POLICIES = ("k1_first", "k1_last", "k2_middle", "k3_last")


@pytest.fixture(scope="module", params=["complete", "interrupted"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "sweep"
    made = SyntheticFolder(folder, documents=40, kinds=("generate", "generate"), policies=POLICIES)
    with made.begin() as store:
        for number, trial in enumerate(made.trials):
            unfinished = request.param == "interrupted" and number >= len(made.trials) - 5
            made.run(store, trial, made.wanted(trial)[:4] if unfinished else None)
    return folder


def test_every_display_shows_the_same_speed_up(folder: Path) -> None:
    status = {(line.task, line.configuration.policy): line for line in read_status(folder).totals}
    progress = read_status(folder).progress
    write_report([folder], figures=False)
    markdown = (folder / "results.md").read_text(encoding="utf-8")
    table = "\n".join(line.plain for line in end_table(progress.totals, width=120, glyphs=Glyphs()))
    page = (folder / "report.html").read_text(encoding="utf-8")
    for line in progress.totals:
        policy, own = line.configuration.policy, status[line.task, line.configuration.policy]
        assert own.speedup == pytest.approx(line.speedup, rel=1e-12)
        assert own.speedup is not None
        summary = json.loads((folder / f"summaries/{line.task}/{policy}/summary.json").read_text())
        assert summary["throughput"]["tokens_per_s"] == pytest.approx(own.tokens_per_s, rel=1e-9)
        assert summary["accuracy"] == pytest.approx(own.accuracy, rel=1e-9)
        assert summary["intervals"]["accuracy"]["low"] == pytest.approx(own.accuracy_low, abs=1e-6)
        assert summary["intervals"]["accuracy"]["high"] == pytest.approx(own.accuracy_high, abs=1e-6)
        assert f"{own.speedup:.2f}×" in table
        if not policy.startswith("k1"):
            assert summary["intervals"]["speedup"]["value"] == pytest.approx(own.speedup, rel=1e-9)
            part = markdown.split(f"### {line.task} ")[1].partition("###")[0]
            row = next(text for text in part.splitlines() if text.startswith(f"| {policy} "))
            assert f"{own.speedup:.2f}×" in row
            assert f"{own.speedup:.2f}×" in page


def test_an_interrupted_sweep_has_no_verdict(folder: Path) -> None:
    written = write_report([folder], figures=False)
    interrupted = read_status(folder).missing > 0
    assert all(
        ("has no verdict yet, because the sweep is not finished" in one) == interrupted for one in written.verdicts
    )
    assert any("the sweep" in one for one in written.verdicts), "the pooled verdict"


def test_a_new_policy_of_an_unfinished_sweep_is_shown_with_the_whole_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ran k3_last alone; the documents of k2_middle are still missing."""
    made = SyntheticFolder(tmp_path / "made", policies=POLICIES)
    with made.begin() as store:
        for trial in made.trials:
            if trial.policy != "k2_middle":
                made.run(store, trial)
    record = Store(made.folder).read_sweep_record()
    assert record is not None
    own = tuple(trial for trial in made.trials if trial.policy == "k3_last")
    plan = RunPlan(
        folder=str(made.folder), sweep="made", trials=own, wanted=WantedDocuments(by_shard={}), record=record
    )
    run_sweep._print_results(plan)
    printed = capsys.readouterr().out
    k3 = next(line for line in printed.splitlines() if "k3_last" in line)
    assert "×" in k3, "the speed-up over the rows of k1"
    assert "60 documents, 6 of 8 trials done, 20 documents missing" in printed
    assert "continue with: reuse-sweep sweep --tasks task0 --policies k1_first,k1_last,k2_middle,k3_last" in printed
    assert "missing: task0: No rows yet of k2_middle" in printed
    assert "has no verdict yet, because the sweep is not finished" in " ".join(printed.split())
