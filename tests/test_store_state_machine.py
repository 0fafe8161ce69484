"""The store against a plain dict: appends, replays, power cuts, corruption, continuing, extending, reading."""

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from orchestrator.store import Store, StoreError, StoreWriter
from tests.crashing_disk import CrashingDisk, PowerCut, make_rows, tokens_by_key, trial_columns

TRIALS = ("aa", "bb")
TRIAL = st.sampled_from(TRIALS)
DOCUMENTS = st.lists(st.sampled_from([f"d{n}" for n in range(6)]), min_size=1, max_size=3)
CALLS = st.one_of(st.integers(0, 5), st.integers(0, 25), st.none())  # before the power goes, if it does
COLUMNS = ["trial_id", "doc_id", "tokens"]


class StoreMachine(RuleBasedStateMachine):
    """`rows` is the dict: each acknowledged row. `maybe` holds rows whose fate a power cut left open."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.folder = self.place / "sweep"
        self.disk = CrashingDisk(self.place / "scratch")
        self.rows: dict[tuple[str, str], int] = {}
        self.maybe: dict[tuple[str, str], int] = {}
        self.attempts = dict.fromkeys(TRIALS, 0)
        self.mark = 0
        self.writer = StoreWriter(self.folder, disk=self.disk)
        self.writer.write_sweep_record({"sweep": "machine"})
        self.reader = Store(self.folder)
        self.disk.watch = self.read_meanwhile
        for trial_id in TRIALS:
            self.begin_attempt(trial_id)

    def teardown(self) -> None:
        self.disk.watch = lambda: None
        self.writer.close()
        shutil.rmtree(self.place)

    def read_meanwhile(self) -> None:
        """Before each call of the disk: what was acknowledged can be read, and nothing is made up."""
        seen = tokens_by_key(self.reader.rows(columns=COLUMNS))
        assert self.rows.items() <= seen.items()
        assert seen.items() <= {**self.maybe, **self.rows}.items()

    def survive(self, calls: int | None, act: Callable[[], None]) -> None:
        """Runs a step with a power cut after some calls, if it takes that many; then continues on what is left."""
        self.disk.calls_left = calls
        try:
            act()
        except PowerCut:
            self.disk.watch = lambda: None
            self.writer.close()
            self.disk.lose()
            self.reopen()
            self.disk.watch = self.read_meanwhile
        self.disk.calls_left = None
        if self.maybe:  # from now on what is there stays there
            self.rows |= {key: mark for key, mark in tokens_by_key(self.reader.rows()).items() if key in self.maybe}
            self.maybe = {}

    def reopen(self) -> None:
        self.writer = StoreWriter(self.folder, disk=self.disk)

    def done(self, trial_id: str) -> list[str]:
        return sorted(doc_id for owner, doc_id in self.rows if owner == trial_id)

    @rule(trial_id=TRIAL, calls=CALLS)
    def begin(self, trial_id: str, calls: int | None) -> None:
        self.survive(calls, lambda: self.begin_attempt(trial_id))

    def begin_attempt(self, trial_id: str) -> None:
        attempt = self.writer.begin(trial_columns(trial_id), {"actor": "worker"})
        assert attempt >= self.attempts[trial_id]
        self.attempts[trial_id] = attempt + 1

    @rule(trial_id=TRIAL, doc_ids=DOCUMENTS, calls=CALLS)
    def append(self, trial_id: str, doc_ids: list[str], calls: int | None) -> None:
        self.append_rows(trial_id, doc_ids, calls, self.attempts[trial_id] - 1)

    @rule(trial_id=TRIAL, doc_ids=DOCUMENTS, calls=CALLS)
    def append_late(self, trial_id: str, doc_ids: list[str], calls: int | None) -> None:
        """From a worker that was thought dead."""
        self.append_rows(trial_id, doc_ids, calls, 0)

    @precondition(lambda self: self.rows)
    @rule(trial_id=TRIAL)
    def replay(self, trial_id: str) -> None:
        """Documents that have a row come again with another mark, which must not be kept."""
        if doc_ids := self.done(trial_id):
            self.append_rows(trial_id, doc_ids, None, self.attempts[trial_id] - 1)

    def append_rows(self, trial_id: str, doc_ids: list[str], calls: int | None, attempt: int) -> None:
        self.mark += 1
        batch = make_rows(doc_ids, trial_id=trial_id, attempt=attempt, tokens=self.mark)
        new = {(trial_id, doc_id) for doc_id in doc_ids} - self.rows.keys()
        self.maybe = dict.fromkeys(new, self.mark)

        def act() -> None:
            assert len(self.writer.append(trial_id, attempt, batch)) == len(new)
            self.rows |= self.maybe
            assert len(self.writer.append(trial_id, attempt, batch)) == 0

        self.survive(calls, act)

    @rule(trial_id=TRIAL, calls=CALLS)
    def finish(self, trial_id: str, calls: int | None) -> None:
        def act() -> None:
            wanted = self.done(trial_id)
            self.writer.finish(trial_id, {"peak_memory": 1}, wanted)
            facts = self.reader.trials()[trial_id]
            assert (facts["status"], facts["rows"]) == ("finished", len(wanted))
            names = sorted(path.name for path in (self.folder / "trials" / trial_id).iterdir())
            assert names == ["rows.parquet", "trial.json"]

        self.survive(calls, act)

    @rule(calls=CALLS, full=st.sampled_from([1, 1000]))
    def compact(self, calls: int | None, full: int) -> None:
        """In a file for each trial, or one for all of them."""
        self.survive(calls, lambda: self.writer.compact(minimum=1, full=full) and None)

    @precondition(lambda self: self.rows)
    @rule(trial_id=TRIAL, calls=CALLS)
    def quarantine(self, trial_id: str, calls: int | None) -> None:
        """All its rows go, or none; the other trial keeps its rows."""
        before, self.maybe = dict(self.rows), {}
        others = {key: mark for key, mark in self.rows.items() if key[0] != trial_id}
        self.rows, self.maybe = others, {key: mark for key, mark in before.items() if key not in others}
        self.survive(calls, lambda: self.writer.quarantine([trial_id]))
        self.rows = tokens_by_key(self.reader.rows())
        assert self.rows.items() <= before.items()
        assert others.items() <= self.rows.items()
        if trial_id not in self.reader.trials():
            self.attempts[trial_id] = 0
            self.begin_attempt(trial_id)

    @rule(trial_id=TRIAL, calls=CALLS)
    def fail(self, trial_id: str, calls: int | None) -> None:
        with pytest.raises(StoreError, match="has no row for 1 document, the first is elsewhere"):
            self.writer.finish(trial_id, {}, [*self.done(trial_id), "elsewhere"])
        self.survive(calls, lambda: self.writer.fail(trial_id, "out of memory"))

    @rule(calls=CALLS)
    def close_and_open(self, calls: int | None) -> None:
        assert self.writer.check() == []
        self.writer.close()
        assert self.reader.check() == []
        self.survive(calls, self.reopen)

    @precondition(lambda self: self.rows)
    @rule(seed=st.integers(0, 1 << 30), whole=st.booleans(), calls=CALLS)
    def corrupt_a_file(self, seed: int, whole: bool, calls: int | None) -> None:
        """Bytes change while no writer is open. Only rows of that file may go, and the file is kept."""
        chance = random.Random(seed)
        self.writer.close()
        files = [*(self.folder / "trials").glob("*/*"), *(self.folder / "compacted").glob("*.parquet")]
        path = chance.choice(sorted(files))
        data = bytearray(path.read_bytes())
        for _ in range(len(data) // 4 if whole else 1):
            data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
        path.write_bytes(data)
        if path.parent.name == "compacted":
            self.corrupted_compacted_file(path, bytes(data), calls)
            return
        self.may_lose(path.parent.name)
        self.survive(calls, self.reopen)
        kept = tokens_by_key(self.reader.rows())
        assert kept.items() <= self.maybe_rows.items()
        assert {key for key in self.maybe_rows.keys() - kept.keys() if key[0] != path.parent.name} == set()
        assert any(bytes(data) == other.read_bytes() for other in (self.folder / "quarantine").glob("*/*"))
        self.rows = kept
        if path.name == "trial.json":  # it alone knew of attempts that had no row yet
            stated = self.reader.rows([path.parent.name], ["attempt"])["attempt"].to_pylist()
            self.attempts[path.parent.name] = max(stated, default=-1) + 1
        facts = self.reader.trials().get(path.parent.name)
        if facts is not None:  # a compacted file may know of fewer attempts, or of more
            self.attempts[path.parent.name] = len(facts["attempts"])
        if facts is None:  # no row was there to say what the trial is
            self.attempts[path.parent.name] = 0
            self.begin_attempt(path.parent.name)

    def corrupted_compacted_file(self, path: Path, data: bytes, calls: int | None) -> None:
        before, self.rows = self.rows, {}
        self.maybe = dict(before)
        self.survive(calls, self.reopen)
        self.rows = tokens_by_key(self.reader.rows())
        assert self.rows.items() <= before.items()
        assert (self.folder / "quarantine" / "compacted" / path.name).read_bytes() == data
        for trial_id in TRIALS:
            facts = self.reader.trials().get(trial_id)
            self.attempts[trial_id] = len(facts["attempts"]) if facts else 0
            if facts is None:
                self.begin_attempt(trial_id)

    def may_lose(self, trial_id: str) -> None:
        self.maybe_rows = dict(self.rows)
        self.rows = {key: mark for key, mark in self.rows.items() if key[0] != trial_id}
        self.maybe = {key: mark for key, mark in self.maybe_rows.items() if key[0] == trial_id}

    @invariant()
    def same_rows(self) -> None:
        assert tokens_by_key(self.reader.rows()) == self.rows

    @invariant()
    def same_documents_done(self) -> None:
        for trial_id in TRIALS:
            assert (
                sorted(self.writer.completed_documents(trial_id))
                == sorted(self.reader.completed_documents(trial_id))
                == self.done(trial_id)
            )


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def test_the_store_behaves_like_a_dict() -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=15, stateful_step_count=15, deadline=None, suppress_health_check=CHECKS, derandomize=True
        ),
    )


@pytest.mark.slow
def test_the_store_behaves_like_a_dict_for_long() -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(max_examples=300, stateful_step_count=30, deadline=None, suppress_health_check=CHECKS),
    )
