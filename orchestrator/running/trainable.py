"""The shell that Ray Tune drives: one worker for the life of an actor, one trial for each step. Knows no decoding."""

import socket
import time
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray import tune
from ray.exceptions import RayTaskError

from orchestrator.running.access import Access
from orchestrator.running.results import Assignment
from orchestrator.running.rows import Account, RowContext
from orchestrator.running.watchdog import Watchdog
from orchestrator.store.errors import RowsLost, StoreError
from sampler.errors import InputError

if TYPE_CHECKING:
    from orchestrator.running.worker import Worker

TRIAL = "trial"  # the one key of Tune's configuration: a trial's id
FAILED, REFUSED = "failed", "refused"  # keys of a result: a trial that cannot be run, a disk that takes no rows


class Watched(Protocol):
    """Settings of whatever decodes."""

    @property
    def timeout(self) -> float: ...  # seconds after which a worker that hangs is ended


class SweepWorker(tune.Trainable):  # type: ignore[misc]
    """Set up once; Tune hands it the next trial by `reset_config`. A trial is one step."""

    def setup(self, config: dict[str, Any], *, results: Any, settings: Watched, sweep: str, access: Access) -> None:
        access.grant()
        self._trial, self._results, self._sweep = config[TRIAL], results, sweep
        here = ray.get_runtime_context()
        self._place = {
            "node": socket.gethostname(),
            "node_id": here.get_node_id(),  # Ray's: host names may be the same
            "gpus": here.get_accelerator_ids().get("GPU", []),
        }
        self._name, pause = ray.get(results.register.remote(self._trial))
        time.sleep(pause)
        self._watchdog = Watchdog(settings.timeout)
        self._worker = self.load(settings)
        ray.get(results.ready.remote(self._name))

    def load(self, settings: Any) -> "Worker":
        from orchestrator.running.worker import (
            Worker,  # only now: torch is not for those who bring a decoder of their own
        )

        return Worker(settings)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._trial = new_config[TRIAL]
        return True

    def step(self) -> dict[str, Any]:
        """Runs what the trial still misses; rows go to the result actor, and only totals to Tune."""
        try:
            return {"done": True, **self._finish()}
        except InputError as error:  # the same on every worker: trying again would not help
            ray.get(self._results.fail.remote(self._trial, sentence(error)))
            return {"done": True, FAILED: sentence(error)}
        except StoreError as error:
            return {"done": True, REFUSED: sentence(error)}

    def _finish(self) -> dict[str, Any]:
        assigned: Assignment = ray.get(self._results.assign.remote(self._trial, self._name))
        time.sleep(assigned.pause)
        facts, totals = self._run(assigned) if assigned.missing else ({}, {})
        try:
            ray.get(self._results.finish.options(name=f"{assigned.trial.label} finished").remote(self._trial, facts))
        except RowsLost:  # noticed on reading them again
            return self._finish()
        return totals

    def _run(self, assigned: Assignment) -> tuple[dict[str, Any], dict[str, Any]]:
        began = time.perf_counter()
        trial, account, waited, acknowledgement = assigned.trial, Account(), 0.0, None
        with self._watchdog.working():
            calibration = self._worker.calibrate()
        facts = {"actor": self._name, **self._place, **self._worker.facts(trial, calibration)}
        facts["preparing_seconds"] = time.perf_counter() - began
        context = RowContext(
            sweep=self._sweep,
            attempt=ray.get(self._results.begin.options(name=f"{trial.label} begun").remote(self._trial, facts)),
            actor=self._name,
            node=self._place["node"],
        )
        append = self._results.append.options(name=trial.label)  # what the dashboard shows
        for batch in self._watchdog.each(self._worker.run(trial, assigned.missing, context)):
            account.add(batch)
            waited += _wait(acknowledgement)  # for the batch before: one is on its way while the next is decoded
            acknowledgement = append.remote(self._trial, context.attempt, batch)
        waited += _wait(acknowledgement)
        spent = {
            "seconds": time.perf_counter() - began,
            "decode_seconds": account.seconds,
            "waiting_seconds": waited,
            "recalibration_seconds": self._worker.recalibration_seconds,
            "peak_memory": self._worker.peak_memory(),
        }
        return spent, {"accuracy": account.accuracy, "tokens_per_s": account.tokens_per_s}

    def cleanup(self) -> None:
        self._watchdog.close()

    def __repr__(self) -> str:
        return str(self._name)  # frozen by Ray when the actor is made, so it names no trial


def sentence(error: Exception) -> str:
    """What an error says; one that came from another actor would say where it was raised as well."""
    return str(error.cause if isinstance(error, RayTaskError) else error)


def _wait(acknowledgement: Any) -> float:
    """Seconds until the rows sent before are on disk."""
    began = time.perf_counter()
    if acknowledgement is not None:
        ray.get(acknowledgement)
    return time.perf_counter() - began
