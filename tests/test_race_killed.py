"""Real races on the bundled model whose driver and workers are killed at random moments, then continued."""

import os
import random
import signal
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sweep_process import BUNDLED, SweepProcess, count_rows, grid_flags

from orchestrator.core.race import DECISIONS_KEY
from orchestrator.core.trial import Trial, WantedDocuments, shards_of_table
from orchestrator.progress.progress import stored_race
from orchestrator.progress.status import read_status
from orchestrator.store import Store
from orchestrator.store.lock import active_writer

pytestmark = pytest.mark.slow
RACES = int(os.environ.get("REUSE_SWEEP_KILLED_RACES") or 1)
RUNS = 3  # of each race that are killed: first a worker, then the driver
ACTORS = 2
END = datetime.max.replace(tzinfo=UTC)
# A goal of 3 is far from what the policies reach, and a margin of 60 points from what they lose: speed decides early.
FLAGS = (*grid_flags(limit=60, shard_size=1), "--race")
DECLARED = ("--speedup", "3", "--margin", "60", "--actors", str(ACTORS), "--no-dashboard")


def decisions(folder: Path) -> list[dict[str, Any]]:
    return list((Store(folder).read_sweep_record() or {}).get(DECISIONS_KEY, ()))


def watch_decisions(folder: Path, seen: dict[str, datetime], ended: threading.Event) -> None:
    while not ended.wait(0.1):
        if folder.exists():
            for one in decisions(folder):
                seen.setdefault(one["policy"], datetime.now(UTC))


def wanted_documents(folder: Path) -> WantedDocuments:
    return WantedDocuments(by_shard={"gsm8k": shards_of_table(Store(folder).documents("gsm8k"))})


@pytest.mark.parametrize("seed", range(RACES))
def test_kills_change_no_decision(tmp_path: Path, seed: int) -> None:
    rng, decided, rows, killed = random.Random(seed), [], 0, 0
    folder = tmp_path / "results" / "s"
    seen: dict[str, datetime] = {}  # by policy: when its decision was first seen
    ended = threading.Event()
    watcher = threading.Thread(target=watch_decisions, args=(folder, seen, ended), daemon=True)
    watcher.start()
    for number in range(RUNS + 1):
        own = (*FLAGS, *DECLARED, "--seed", str(seed))
        run = SweepProcess(tmp_path, tmp_path / "results", *BUNDLED, *own)
        for victim in ("worker", "driver") if number < RUNS else ():
            goal = rows + rng.randrange(1, 8)
            while run.process.poll() is None and (not folder.exists() or count_rows(folder) < goal):
                time.sleep(0.1)
            workers = [pid for pid, name in run.descendants().items() if "SweepWorker" in name]
            if run.process.poll() is None and (workers or victim == "driver"):
                os.kill(rng.choice(workers) if victim == "worker" else run.process.pid, signal.SIGKILL)
                killed, rows = killed + 1, count_rows(folder)
        run.wait(None)
        while active_writer(folder) is not None:  # Ray ends the processes of a killed driver after a moment
            time.sleep(0.2)
        now = decisions(folder)
        assert now[: len(decided)] == decided, "a decision is never changed"
        decided, rows = now, count_rows(folder)
    ended.set()
    watcher.join()
    print(f"seed {seed}: {killed} kills")
    assert killed
    assert {one["outcome"] for one in decided} == {"rejected"}
    assert seen.keys() == {one["policy"] for one in decided}
    assert len(decided) == 2
    store, record = Store(folder), dict(Store(folder).read_sweep_record() or {})
    assert read_status(folder).state == "complete"
    found = store.rows(columns=["trial_id", "doc_id"]).to_pylist()
    assert len({(row["trial_id"], row["doc_id"]) for row in found}) == len(found), "a row is stored twice"
    stored = record.pop(DECISIONS_KEY)
    race = stored_race(record, wanted_documents(folder), store, store.trials())
    assert race is not None
    assert sorted(map(repr, race.merged_decisions({}))) == sorted(map(repr, stored)), "the rows give the same decisions"
    begun = {Trial.from_dict(facts["trial"]): facts["attempts"][0]["started_at"] for facts in store.trials().values()}
    late = [trial.label for trial, at in begun.items() if datetime.fromisoformat(at) > seen.get(trial.policy, END)]
    assert len(late) <= ACTORS * len(decided), f"only trials under way run beyond a decision: {late}"
    assert len(begun) < 3 * 60
