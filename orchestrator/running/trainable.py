"""The Ray Tune trainable: sets up one worker for the life of an actor and runs one trial after another on it."""

import socket
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import ray
from ray import tune
from ray.exceptions import RayTaskError

from orchestrator.core.trial import TrialKey, trial_key
from orchestrator.running.environment import AccessTokens
from orchestrator.running.result_actor import Assignment, FailedSetup, Node
from orchestrator.running.stop import Watchdog
from orchestrator.store import RowsLost, StoreError
from sampler.errors import InputError, counted

if TYPE_CHECKING:
    from orchestrator.running.worker import Worker

# A trial's last result has one of these keys, unless a scheduler stopped the trial early.
FINISHED = "finished"  # all rows are stored, or a race no longer needs them
FAILED = "failed"  # why the trial cannot run
REFUSED = "refused"  # why the store refused rows
REPORT_SECONDS = 2.0  # between two results of a running trial; the first comes with the second batch
MAX_REASON_CHARACTERS = 500
MAX_LISTED_DOCUMENTS = 3  # in the reason why a trial failed; trial.json lists all of them


class HasTimeout(Protocol):
    """Settings of a worker, or of a stand-in for it in tests and benchmarks."""

    @property
    def timeout(self) -> float: ...  # seconds of one piece of work after which the worker is killed


class DocumentsFailed(InputError):
    """The model cannot compute some documents of a trial; the others have rows."""

    def __init__(self, reasons: Mapping[str, str], total: int) -> None:
        listed = [f"{doc_id} ({reason})" for doc_id, reason in list(reasons.items())[:MAX_LISTED_DOCUMENTS]]
        if len(reasons) > len(listed):
            listed.append(f"and {len(reasons) - len(listed)} more")
        super().__init__(f"{len(reasons)} of {counted(total, 'document')} failed: {', '.join(listed)}")
        self.reasons = dict(reasons)


@dataclass(kw_only=True, slots=True)
class TrialTotals:
    """Totals of a trial's batches so far."""

    documents: int = 0
    correct: int = 0
    tokens: int = 0
    seconds: float = 0.0  # decoding

    def add(self, batch: pa.RecordBatch) -> None:
        self.documents += batch.num_rows
        self.correct += sum(filter(None, batch.column("correct").to_pylist()))
        self.tokens += sum(batch.column("tokens").to_pylist())
        self.seconds += batch.column("batch_seconds")[0].as_py()

    @property
    def metrics(self) -> dict[str, float]:
        """As reported to Ray Tune while the trial runs."""
        if not self.documents:
            return {"documents": 0}
        return {
            "documents": self.documents,
            "accuracy": self.correct / self.documents,
            "tokens_per_s": self.tokens / self.seconds,
        }


class SweepWorker(tune.Trainable):  # type: ignore[misc]
    """Set up once per actor. For each trial, Tune calls `reset_config`, then `step` until a result has `done`."""

    def setup(
        self, config: dict[str, Any], *, results: Any, settings: HasTimeout, sweep: str, access: AccessTokens
    ) -> None:
        access.export()
        context = ray.get_runtime_context()
        self._name = context.get_actor_name() or f"worker-{context.get_actor_id()}"  # see WorkerClasses
        self._results, self._sweep = results, sweep
        self._node = Node(node_id=context.get_node_id(), host=socket.gethostname())
        self._gpus = context.get_accelerator_ids().get("GPU", [])
        self.reset_config(config)
        time.sleep(ray.get(results.register.remote(self._key, self._name, self._node)))
        self._watchdog = Watchdog(settings.timeout)
        with self._reporting_failed_setup():
            self._worker = self.load(settings)
        ray.get(results.ready.remote(self._name))

    @contextmanager
    def _reporting_failed_setup(self) -> Iterator[None]:
        """Reports an error to the result actor as a failed set-up on this node before raising it for Tune."""
        try:
            yield
        except BaseException as error:
            failure = FailedSetup(node=self._node, reason=_reason(error), is_input_error=isinstance(error, InputError))
            ray.get(self._results.setup_failed.remote(self._name, failure))
            raise

    def load(self, settings: Any) -> "Worker":
        from orchestrator.running.worker import Worker  # imports torch, which stand-ins do not need

        return Worker(settings)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._key: TrialKey = trial_key(new_config)
        self._results_to_report: Iterator[dict[str, Any]] = self._run()
        return True

    def step(self) -> dict[str, Any]:
        """Returns the trial's next result, which has only totals: rows are sent to the result actor."""
        return next(self._results_to_report)

    def _run(self) -> Iterator[dict[str, Any]]:
        """Runs the trial on its documents without a row and yields its results."""
        assigned: Assignment = ray.get(self._results.assign.remote(self._key, self._name))
        trial_id = assigned.trial.trial_id
        if not assigned.needed:
            yield {"done": True, FINISHED: True}
            return
        time.sleep(assigned.pause)
        totals = TrialTotals()
        with self._reporting_failed_setup(), self._watchdog.working():
            self._worker.open_task(assigned.trial.task)
        try:
            facts = (yield from self._decode(assigned, totals)) if assigned.missing else {}
            ray.get(self._results.finish.remote(trial_id, facts))
        except RowsLost:  # found when the rows were read back
            yield from self._run()
        except InputError as error:  # about a document, so every worker would raise it
            facts = {"failed_documents": error.reasons} if isinstance(error, DocumentsFailed) else {}
            ray.get(self._results.fail.remote(trial_id, error_message(error), facts))
            yield {"done": True, FAILED: error_message(error)}
        except StoreError as error:
            yield {"done": True, REFUSED: error_message(error)}
        else:
            yield {"done": True, FINISHED: True, **totals.metrics}

    def _decode(self, assigned: Assignment, totals: TrialTotals) -> Generator[dict[str, Any], None, dict[str, Any]]:
        """Decodes the missing documents, yields totals from time to time, and returns facts for trial.json."""
        began = time.perf_counter()
        trial, waited, acknowledgement = assigned.trial, 0.0, None
        with self._watchdog.working():
            calibration_seconds = self._worker.calibrate()
        where = {"node": self._node.host, "node_id": self._node.node_id, "gpus": self._gpus}
        facts = {"actor": self._name, **where, **self._worker.facts(trial, calibration_seconds)}
        facts["preparing_seconds"] = time.perf_counter() - began
        number: int = ray.get(self._results.begin.remote(trial.trial_id, facts))
        attempt = {"sweep": self._sweep, "attempt": number, "actor": self._name, "node": self._node.host}
        reported = float("-inf")
        for index, batch in enumerate(self._watchdog.each(self._worker.run(trial, assigned.missing, attempt))):
            totals.add(batch)
            waited += _wait(acknowledgement)  # for the previous batch, which was sent while this one was decoded
            acknowledgement = self._results.append.remote(trial.trial_id, number, batch)
            if index and time.perf_counter() - reported >= REPORT_SECONDS:
                yield totals.metrics
                reported = time.perf_counter()
        waited += _wait(acknowledgement)
        if self._worker.failed_documents:
            raise DocumentsFailed(self._worker.failed_documents, len(assigned.missing))
        return {
            "seconds": time.perf_counter() - began,
            "decode_seconds": totals.seconds,
            "waiting_seconds": waited,
            "recalibration_seconds": self._worker.recalibration_seconds,
            "peak_memory": self._worker.peak_memory(),
        }

    def cleanup(self) -> None:
        self._watchdog.close()

    def __repr__(self) -> str:
        return str(self._name)


def _reason(error: BaseException) -> str:
    """An error in one line: its type and message, or only the message of an InputError."""
    text = " ".join(str(error).split())
    return (text if isinstance(error, InputError) else f"{type(error).__name__}: {text}")[:MAX_REASON_CHARACTERS]


def error_message(error: Exception) -> str:
    """An error's message, without the traceback that Ray adds to errors of another actor."""
    return str(error.cause if isinstance(error, RayTaskError) else error)


def _wait(acknowledgement: Any) -> float:
    """Waits until the rows sent earlier are on disk; returns the seconds spent."""
    began = time.perf_counter()
    if acknowledgement is not None:
        ray.get(acknowledgement)
    return time.perf_counter() - began
