"""A race inside a sweep: decisions are stored and never changed, and trials they make unnecessary do not run."""

import json
import math
import random
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from small_sweep import write_model_and_data
from synthetic_folder import DEFAULTS, SyntheticFolder
from test_run_plan import ready
from test_trackers import read_tensorboard

from orchestrator.analysis.verdicts import UNDECIDED, UNFINISHED
from orchestrator.cli.__main__ import dispatch
from orchestrator.core.evidence import BURN_IN_SHARDS
from orchestrator.core.race import CONFIRMED, DECISIONS_KEY, REJECTED, Race
from orchestrator.core.trial import Trial, WantedDocuments
from orchestrator.planning.run_plan import RunPlan
from orchestrator.planning.settings import SweepSettings
from orchestrator.progress.progress import stored_race
from orchestrator.progress.status import read_status
from orchestrator.progress.view import race_summary
from orchestrator.report.charts import marker_style
from orchestrator.report.figures import _point
from orchestrator.report.section import build_section
from orchestrator.report.sweeps import read_sweeps
from orchestrator.report.write import write_report
from orchestrator.running.dashboard import DECIDED, EVIDENCE_FOR, SAVED_AT_END, race_gauge_values
from orchestrator.running.result_actor import Results
from orchestrator.store import Store
from orchestrator.store.files import Disk
from orchestrator.store.schema import ROWS
from sampler import InputError
from tools.scale.synthetic_sweep import DiskWithoutSync

POLICIES = ("k1_first", "k1_middle", "k2_first", "k2_middle", "k3_last")
LOST = {"k2_middle": 0.5}  # share of documents that are right at k=1 and wrong here
SPEED = {"k2_first": 1.6, "k2_middle": 1.5, "k3_last": 1.21}


class RacedSweep(SyntheticFolder):
    """A race whose rows follow from the trial and the document alone, so every run gets the same rows."""

    def __init__(self, folder: Path, *, documents: int = 150) -> None:
        super().__init__(folder, documents=documents, policies=POLICIES, shard_size=3, race=True)
        self.by_shard = {shard: tuple(f"d{3 * shard + i}" for i in range(3)) for shard in range(documents // 3)}

    def rows(self, trial: Trial, attempt: int, doc_ids: Any) -> pa.RecordBatch:
        noise = random.Random(f"{trial.policy}{trial.shard}").gauss(0, 0.03)
        made = []
        for doc_id in doc_ids:
            own = {
                "trial_id": trial.trial_id, "task": trial.task, "shard": trial.shard, "k": int(trial.policy[1]),
                **trial.configuration.as_dict(), "doc_id": doc_id, "batch_id": int(doc_id[1:]), "tokens": 60,
                "attempt": attempt, "actor": "worker-1", "calibration": 50.0,
                **({} if trial.policy.startswith("k1") else {"eligible": 5, "replayed": 5, "layers_reused": 20}),
                "batch_size": 1, "dtype": "float32", "device": "cpu", "layers_computed": 80,
                 "passes_full": 10, "passes_prefill": 1, "layer_positions": 800,
                "batch_seconds": math.exp(noise) / SPEED.get(trial.policy, 1.0),
                "correct": random.Random(f"{trial.policy}{doc_id}").random() >= LOST.get(trial.policy, 0.0),
            }  # fmt: skip
            made.append({**DEFAULTS, **own})
        return pa.RecordBatch.from_pylist(made, schema=ROWS)

    def plan(self) -> RunPlan:
        record = Store(self.folder).read_sweep_record() or {}
        wanted = WantedDocuments(by_shard={"task0": self.by_shard})
        return RunPlan(
            folder=str(self.folder), sweep="made-01234567", trials=tuple(self.trials), wanted=wanted, record=record
        )


@pytest.fixture(scope="module", autouse=True)
def _unsynced() -> Iterator[None]:
    """Nothing here has to survive a crash of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("sync", "sync_folder"):
            patch.setattr(Disk, name, getattr(DiskWithoutSync, name))
        yield


class Killed(Exception):
    pass


def run_race(sweep: RacedSweep, results: Results, *, killed_after: int | None = None) -> list[str]:
    """What a worker does, one trial after another; the labels of the trials it ran. Killed after so many calls."""
    calls, ran = 0, []

    def call(function: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == killed_after:
            results._writer.close()  # a dead process holds no lock; nothing else is saved
            raise Killed
        return function(*arguments)

    unfinished = set(results.unfinished()[0])
    for trial in sweep.trials:
        if trial.trial_id not in unfinished or not call(results.is_needed, trial.key):
            continue
        assigned = call(results.assign, trial.key, "worker-1")
        attempt = call(results.begin, trial.trial_id, {"actor": "worker-1"})
        for part in (assigned.missing[:1], assigned.missing[1:]):
            if part:
                call(results.append, trial.trial_id, attempt, sweep.rows(trial, attempt, part))
        call(results.finish, trial.trial_id, {})
        ran.append(trial.label)
    return ran


def stored_decisions(folder: Path) -> list[dict[str, Any]]:
    found = Store(folder).read_sweep_record()
    assert found is not None
    return list(found.get(DECISIONS_KEY, ()))


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> RacedSweep:
    """A race from the first trial to the last, without interruptions."""
    sweep = RacedSweep(tmp_path_factory.mktemp("race") / "sweep")
    sweep.begin().close()
    results = Results(sweep.plan(), actors=1)
    run_race(sweep, results)
    assert results.unfinished()[0] == []
    results.close()
    return sweep


def rows_of(folder: Path) -> list[dict[str, Any]]:
    table = Store(folder).rows(columns=["trial_id", "doc_id", "correct", "tokens"])
    return sorted(table.to_pylist(), key=lambda row: (row["trial_id"], row["doc_id"]))


def test_a_race_stops_what_is_decided(raced: RacedSweep) -> None:
    decisions = {one["policy"]: one for one in stored_decisions(raced.folder)}
    assert decisions["k2_first"]["outcome"] == CONFIRMED
    assert decisions["k2_middle"]["outcome"] == REJECTED
    assert decisions["k2_middle"]["because"] == ["accuracy"]
    assert "k3_last" not in decisions, "1.21 is too near to the goal of 1.2"
    status = read_status(raced.folder)
    used = {line.configuration.policy: line.documents for line in status.totals}
    assert used["k2_middle"] == decisions["k2_middle"]["look"]["documents"] < 60
    assert used["k2_first"] == decisions["k2_first"]["look"]["documents"] < 150
    assert used["k3_last"] == used["k1_first"] == 150, "k=1 runs as long as anyone races"
    assert used["k1_middle"] == 3 * BURN_IN_SHARDS, "a replicate of k=1 runs during the burn-in"


def test_status_views_and_gauges_show_the_race(raced: RacedSweep) -> None:
    status = read_status(raced.folder)
    assert status.state == "complete"
    assert status.trials["skipped"] == sum(status.trials.values()) - status.trials["finished"] > 0
    found = json.loads(json.dumps(status.as_json()))
    by_policy = {one["policy"]: one for one in found["configurations"]}
    assert {name: one["race"]["state"] for name, one in by_policy.items()} == {
        **dict.fromkeys(("k1_first", "k1_middle", "k3_last"), "finished"),
        "k2_first": CONFIRMED,
        "k2_middle": REJECTED,
    }
    race = by_policy["k2_middle"]["race"]
    assert race["documents_saved"] == race["planned"] - race["documents"] > 0
    assert race["seconds_saved_at_end"] == pytest.approx(race["documents_saved"] / SPEED["k2_middle"], rel=0.1)
    progress = status.progress
    assert (progress.documents, progress.finished) == (progress.wanted, progress.trials)
    assert "1 confirmed, 1 rejected, 1 finished; saved" in race_summary(progress.race)
    gauges = {entry.configuration.policy: race_gauge_values(entry) for entry in progress.race}
    assert [gauges[name][DECIDED] for name in ("k2_first", "k2_middle", "k3_last")] == [1, -1, 0]
    assert gauges["k2_first"][EVIDENCE_FOR] >= 1
    assert gauges["k2_first"][SAVED_AT_END] > 0
    assert EVIDENCE_FOR not in gauges["k1_first"]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_trackers_get_the_race_as_series(raced: RacedSweep, tmp_path: Path) -> None:
    shutil.copytree(raced.folder, tmp_path / "sweep")
    dispatch(["track", str(tmp_path / "sweep"), "--to", "tensorboard"])
    ends = {CONFIRMED: 1.0, REJECTED: -1.0, "finished": 0.5}
    for entry in read_status(raced.folder).race:
        found = read_tensorboard(tmp_path / "sweep", f"{entry.task}/{entry.configuration.slug()}")
        states = [value for _, value in found.pop("race")]
        assert states[-1] == ends[entry.state]
        assert set(states[:-1]) <= {0.0, states[-1]}
        assert states[0] == 0.0
        assert states == sorted(states, key=abs), "once decided, it stays so"
        measured = {name: points[-1][1] for name, points in found.items() if name.startswith("race_")}
        assert measured == pytest.approx({f"race_{name}": value for name, value in entry.measures.items()})
        if entry.configuration.policy == "k2_first":
            assert measured["race_evidence_for"] >= 1
            assert 1 < measured["race_speedup_low"] < SPEED["k2_first"] < measured["race_speedup_high"]


def test_the_rows_alone_lead_to_the_same_decisions(raced: RacedSweep) -> None:
    store, record = Store(raced.folder), dict(raced.plan().record)
    stored = record.pop(DECISIONS_KEY)
    race = stored_race(record, raced.plan().wanted, store, store.trials())
    assert race is not None
    assert sorted(map(repr, race.merged_decisions({}))) == sorted(map(repr, stored))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment_it_makes_the_same_decisions(raced: RacedSweep, tmp_path: Path, seed: int) -> None:
    """Up to ten kills: between two calls of a worker, whatever was running then."""
    sweep, rng = RacedSweep(tmp_path / "sweep"), random.Random(seed)
    sweep.begin().close()
    decided: list[dict[str, Any]] = []
    kills = 0
    while True:
        results = Results(sweep.plan(), actors=1)
        try:
            run_race(sweep, results, killed_after=rng.randrange(1, 120) if kills < 10 else None)
        except Killed:
            kills += 1
            now = stored_decisions(sweep.folder)
            assert now[: len(decided)] == decided, "a decision is never changed"
            decided = now
            continue
        results.close()
        break
    assert kills >= 5
    assert stored_decisions(sweep.folder) == stored_decisions(raced.folder)
    assert rows_of(sweep.folder) == rows_of(raced.folder), "nothing else was run"


def test_a_worker_is_told_that_its_trial_is_not_needed(raced: RacedSweep) -> None:
    results = Results(raced.plan(), actors=1)
    late = next(trial for trial in raced.trials if trial.policy == "k2_middle" and trial.shard == 49)
    assert not results.is_needed(late.key)
    assert not results.assign(late.key, "worker-2").needed
    assert results.assign(next(t for t in raced.trials if t.policy == "k3_last").key, "worker-2").needed
    results.close()


# What a later command may change


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_data(tmp_path_factory.mktemp("case"))


@pytest.fixture
def command(root: Path, tmp_path: Path) -> list[str]:
    where = ["--model", str(root / "model"), "--data", str(root / "data"), "--out", str(tmp_path), "--name", "s"]
    return [
        *where,
        "--tasks",
        "gsm8k",
        "--policies",
        "k1,k2_all",
        "--no-replicate",
        "--limit",
        "12",
        "--shard-size",
        "2",
        "--race",
    ]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--force"], "--force must not be used with --race"),
        (["--limit", "14"], "--limit 12 (now 14)"),
        (["--policies", "k1,k2_all,k3_all"], "a race among the policies k1, k2_all (now k1, k2_all, k3_all)"),
        (["--race-alpha", "0.1"], "--race-alpha 0.05 (now 0.1)"),
        (["--seed", "1"], "--seed 0 (now 1)"),
    ],
)
def test_what_would_change_a_race_is_refused(command: list[str], more: list[str], sentence: str) -> None:
    ready(command, finish=True)
    with pytest.raises(InputError) as error:
        ready([*command, *more])
    assert sentence in str(error.value)
    assert not ready(command)[1].remaining


def test_a_race_cannot_be_joined_or_left(command: list[str]) -> None:
    ready(command)
    with pytest.raises(InputError, match=r"--race on \(now off\)"):
        ready(command[:-1])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"repeats": 2}, "--race needs --repeats 1 (got 2)"),
        ({"policies": ("k2_middle",)}, "--race needs k1 and a policy to compare with it (got k2_middle)"),
        ({"race_alpha": 0.0}, "--race-alpha must be above 0"),
    ],
)
def test_settings_that_make_no_race_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        SweepSettings(tasks=("gsm8k",), race=True, **changes)
    assert sentence in str(error.value)


def test_documents_of_a_race_are_in_a_seeded_random_order(command: list[str]) -> None:
    prepared, _ = ready(command)
    again, _ = ready([*command, "--name", "s"])
    plain, _ = ready([*command[:-1], "--out", f"{command[5]}/plain"])
    other, _ = ready([*command, "--out", f"{command[5]}/other", "--seed", "1"])
    order = list(prepared.tasks["gsm8k"].shards)
    assert order == list(again.tasks["gsm8k"].shards)
    assert order != list(plain.tasks["gsm8k"].shards)
    assert order != list(other.tasks["gsm8k"].shards)
    ids = [{trial.trial_id for trial in one.trials} for one in (prepared, plain, other)]
    assert not ids[0] & ids[1]
    assert not ids[0] & ids[2], "the same documents in other shards are other trials"


def test_an_edited_decision_is_refused(raced: RacedSweep) -> None:
    record = dict(raced.plan().record)
    record[DECISIONS_KEY] = [{**record[DECISIONS_KEY][0], "look": {}}]
    with pytest.raises(InputError, match="declares a race but lacks"):
        Race.from_record(record, raced.plan().wanted)


# The report


def test_the_report_has_the_verdicts_of_the_race(raced: RacedSweep) -> None:
    written = write_report([raced.folder])
    assert written.verdicts == (
        "task0 is confirmed: k2_first reached more than 1.20× the speed of k=1 at a drop of less than 5 points.",
    )
    page, markdown = written.page.read_text(), (raced.folder / "results.md").read_text()
    looks = {one["policy"]: one["look"]["documents"] for one in stored_decisions(raced.folder)}
    assert f"stopped early: {looks['k2_middle']} of 150 documents, estimates are biased" in markdown
    assert "Saved by the race" in page
    assert "The sweep is not finished" not in page
    assert (raced.folder / "figures" / "task0-race.svg").is_file()
    summary = json.loads((raced.folder / "summaries" / "task0" / "k2_first" / "summary.json").read_text())
    assert summary["verdict"]["outcome"] == CONFIRMED
    assert "race: valid at every look" in summary["verdict"]["basis"]
    assert f"certain after {looks['k2_first']} of 150 documents" in summary["verdict"]["sentence"]


def test_another_margin_decides_anew_from_the_rows(raced: RacedSweep) -> None:
    """Rows of stopped configurations are fewer, and what they show about another margin is still valid."""
    section = build_section(read_sweeps([raced.folder])[0], margin=60.0, figures=False)
    found = {r.label: r.comparison.verdict for r in section.tasks[0].task.configurations if r.comparison is not None}
    assert found["k2_middle"].outcome == UNDECIDED
    assert found["k2_middle"].exploratory


def test_hollow_markers_are_configurations_that_were_stopped_early(raced: RacedSweep) -> None:
    section = build_section(read_sweeps([raced.folder])[0], figures=False)
    points = {r.label: _point(r) for r in section.tasks[0].task.configurations if r.comparison is not None}
    assert {label: point.stopped_early for label, point in points.items()} == {
        "k2_first": True,
        "k2_middle": True,
        "k3_last": False,
    }
    assert marker_style(2, "middle", hollow=True)["fillstyle"] == "none" != marker_style(2, "middle")["fillstyle"]


def test_an_unfinished_sweep_shows_intervals_that_hold_at_any_time(tmp_path: Path) -> None:
    """Wider than those of a complete sweep, and without a verdict."""
    sweep = SyntheticFolder(tmp_path / "sweep", documents=200, shard_size=10, policies=("k1", "k1_middle", "k2_middle"))
    writer = sweep.begin()
    for trial in sweep.trials[:36]:
        sweep.run(writer, trial)
    writer.close()
    intervals = []
    for more in (False, True):
        if more:
            writer = sweep.begin()
            for trial in sweep.trials[36:]:
                sweep.run(writer, trial)
            writer.close()
        section = build_section(read_sweeps([sweep.folder])[0], figures=False)
        result = next(r for r in section.tasks[0].task.configurations if r.comparison is not None)
        assert result.comparison is not None
        assert (result.comparison.verdict.basis == UNFINISHED) == (not more)
        assert result.comparison.speedup is not None
        intervals.append((result.comparison.difference.points, result.comparison.speedup.tokens))
    for early, late in zip(*intervals, strict=True):
        assert early is not None
        assert late is not None
        assert early.high - early.low > 1.3 * (late.high - late.low)
