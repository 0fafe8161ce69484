"""Every display of a sweep shows the same numbers: status, tables, report, results.md and summary.json."""

import json
from pathlib import Path

import pytest
from made_sweep import MadeSweep

from orchestrator.core.trial import WantedDocuments
from orchestrator.progress.progress import stored_progress
from orchestrator.progress.status import read_status
from orchestrator.progress.view import Glyphs, end_table
from orchestrator.report.write import write_report
from orchestrator.store import Store

POLICIES = ("k1_first", "k1_last", "k2_middle", "k3_last")


@pytest.fixture(scope="module", params=["complete", "interrupted"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "sweep"
    made = MadeSweep(folder, documents=40, kinds=("generate", "generate"), policies=POLICIES)
    with made.begin() as store:
        for number, trial in enumerate(made.trials):
            unfinished = request.param == "interrupted" and number >= len(made.trials) - 5
            made.run(store, trial, made.wanted(trial)[:4] if unfinished else None)
    return folder


def test_every_display_shows_the_same_speed_up(folder: Path) -> None:
    status = {(line.task, line.configuration.policy): line for line in read_status(folder).totals}
    made = MadeSweep(folder, documents=40, kinds=("generate", "generate"), policies=POLICIES)
    shards = {
        task: {shard: tuple(f"d{shard * 10 + i}" for i in range(10)) for shard in range(4)} for task in made.kinds
    }
    progress = stored_progress({"sweep": "made"}, made.trials, WantedDocuments(by_shard=shards), Store(folder))
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
