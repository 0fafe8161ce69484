"""The store against a plain dict: appends, replays, power cuts, damage, continuing, extending, reading meanwhile."""

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from orchestrator.store import Store
from orchestrator.store_errors import StoreError
from orchestrator.writer import StoreWriter
from tests.store_fakes import CrashingDisk, PowerCut, found, make_rows, spec

TRIALS = st.sampled_from(["aa", "bb"])
DOCUMENTS = st.lists(st.sampled_from([f"d{n}" for n in range(6)]), min_size=1, max_size=3)
CALLS = st.one_of(st.none(), st.integers(0, 25))  # before the power goes, if it does


class StoreMachine(RuleBasedStateMachine):
    """`rows` is the dict: each acknowledged row. `maybe` holds rows whose fate a power cut left open."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.folder = self.place / "sweep"
        self.disk = CrashingDisk(self.place / "scratch")
        self.rows: dict[tuple[str, str], int] = {}
        self.maybe: dict[tuple[str, str], int] = {}
        self.attempts: dict[str, int] = {}
        self.mark = 0
        self.writer = StoreWriter(self.folder, disk=self.disk)
        self.writer.write_request({"sweep": "machine"})
        self.reader = Store(self.folder)
        self.disk.watch = self.read_meanwhile

    def teardown(self) -> None:
        self.disk.watch = lambda: None
        self.writer.close()
        shutil.rmtree(self.place)

    def read_meanwhile(self) -> None:
        """Before each call of the disk: what was acknowledged can be read, and nothing is made up."""
        seen = found(self.reader.rows())
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
            self.rows |= {key: mark for key, mark in found(self.reader.rows()).items() if key in self.maybe}
            self.maybe = {}

    def reopen(self) -> None:
        self.writer = StoreWriter(self.folder, disk=self.disk)

    def done(self, trial_id: str) -> list[str]:
        return sorted(doc_id for owner, doc_id in self.rows if owner == trial_id)

    @rule(trial_id=TRIALS, calls=CALLS)
    def begin(self, trial_id: str, calls: int | None) -> None:
        def act() -> None:
            attempt = self.writer.begin(spec(trial_id), {"actor": "worker"})
            assert attempt >= self.attempts.get(trial_id, 0)
            self.attempts[trial_id] = attempt + 1

        self.survive(calls, act)

    @precondition(lambda self: self.attempts)
    @rule(trial_id=TRIALS, doc_ids=DOCUMENTS, calls=CALLS, late=st.booleans())
    def append(self, trial_id: str, doc_ids: list[str], calls: int | None, late: bool) -> None:
        """Also replays: documents that have a row come again with another mark, which must not be kept."""
        if trial_id not in self.attempts:
            return
        self.mark += 1
        attempt = 0 if late else self.attempts[trial_id] - 1
        batch = make_rows(doc_ids, trial_id=trial_id, attempt=attempt, tokens=self.mark)
        new = {(trial_id, doc_id) for doc_id in doc_ids} - self.rows.keys()
        self.maybe = dict.fromkeys(new, self.mark)

        def act() -> None:
            assert self.writer.append(trial_id, attempt, batch) == len(new)
            self.rows |= self.maybe
            assert self.writer.append(trial_id, attempt, batch) == 0

        self.survive(calls, act)

    @precondition(lambda self: self.attempts)
    @rule(trial_id=TRIALS, calls=CALLS)
    def finish(self, trial_id: str, calls: int | None) -> None:
        if trial_id not in self.attempts:
            return

        def act() -> None:
            wanted = self.done(trial_id)
            self.writer.finish(trial_id, {"peak_memory": 1}, wanted)
            facts = self.reader.trials()[trial_id]
            assert (facts["status"], facts["rows"]) == ("finished", len(wanted))
            assert [path.name for path in sorted((self.folder / "trials" / trial_id).iterdir())] == [
                "rows.parquet",
                "trial.json",
            ]

        self.survive(calls, act)

    @precondition(lambda self: self.attempts)
    @rule(trial_id=TRIALS)
    def refuse_to_finish(self, trial_id: str) -> None:
        if trial_id in self.attempts:
            with pytest.raises(StoreError, match="has no row for 1 documents, elsewhere the first"):
                self.writer.finish(trial_id, {}, [*self.done(trial_id), "elsewhere"])

    @precondition(lambda self: self.attempts)
    @rule(trial_id=TRIALS, calls=CALLS)
    def fail(self, trial_id: str, calls: int | None) -> None:
        if trial_id in self.attempts:
            self.survive(calls, lambda: self.writer.fail(trial_id, "out of memory"))

    @rule(calls=CALLS)
    def close_and_open(self, calls: int | None) -> None:
        self.writer.close()
        self.survive(calls, self.reopen)

    @rule(calls=CALLS)
    def check(self, calls: int | None) -> None:
        def act() -> None:
            assert self.writer.check() == []

        self.survive(calls, act)

    @precondition(lambda self: self.rows)
    @rule(seed=st.integers(0, 1 << 30), whole=st.booleans(), calls=CALLS)
    def damage(self, seed: int, whole: bool, calls: int | None) -> None:
        """Bytes change while nobody looks. Only rows of that file may go, and the file is kept."""
        chance = random.Random(seed)
        self.writer.close()
        path = chance.choice(sorted(path for path in (self.folder / "trials").glob("*/*")))
        data = bytearray(path.read_bytes())
        for _ in range(len(data) // 4 if whole else 1):
            data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
        path.write_bytes(data)
        self.may_lose(path.parent.name)
        self.survive(calls, self.reopen)
        kept = found(self.reader.rows())
        assert kept.items() <= self.maybe_rows.items()
        assert {key for key in self.maybe_rows.keys() - kept.keys() if key[0] != path.parent.name} == set()
        assert any(bytes(data) == other.read_bytes() for other in (self.folder / "set-aside").glob("*/*"))
        self.rows = kept

    def may_lose(self, trial_id: str) -> None:
        self.maybe_rows = dict(self.rows)
        self.rows = {key: mark for key, mark in self.rows.items() if key[0] != trial_id}
        self.maybe = {key: mark for key, mark in self.maybe_rows.items() if key[0] == trial_id}

    @invariant()
    def same_rows(self) -> None:
        assert found(self.reader.rows()) == self.rows

    @invariant()
    def same_documents_done(self) -> None:
        for trial_id in self.attempts:
            assert sorted(self.writer.done(trial_id)) == sorted(self.reader.done(trial_id)) == self.done(trial_id)


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def test_the_store_is_a_dict() -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=CHECKS, derandomize=True
        ),
    )


@pytest.mark.slow
def test_the_store_is_a_dict_for_long() -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(max_examples=1000, stateful_step_count=40, deadline=None, suppress_health_check=CHECKS),
    )
