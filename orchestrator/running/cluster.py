"""Ray for one sweep: started on this machine, loopback only, or joined by address. Knows no trials.

`environment.prepare` comes before this module is imported: Ray reads most of its switches at import.
"""

import logging
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.planning.machine import Machine, Placement, free_memory, room_in
from orchestrator.planning.plan import Plan
from orchestrator.planning.room import check_memory
from orchestrator.running.environment import LONGEST_TEMPORARY, OBJECT_STORE, TUNE
from orchestrator.running.growth import FILE, Growth, growth_of
from orchestrator.running.results import Results
from orchestrator.running.stop import Aborted
from orchestrator.running.trial_board import MAX_TRIALS, TrialBoard
from orchestrator.running.waiting import asked_and_free
from orchestrator.store.errors import StoreError
from sampler.errors import InputError
from sampler.loading import pick_device, pick_dtype

PATIENCE = 20.0  # seconds until it is said that a worker is waited for
PROBE_SECONDS = 1800.0  # an autoscaler may have to bring a machine first, and install everything on it
ROOM_SECONDS = 5.0
RESULT_SECONDS = 600.0  # it reads every finished trial first
RESULT_THREADS = 8  # one waits for the disk while another prepares its rows


@contextmanager
def local(placement: Placement, machine: Machine, *, dashboard: bool) -> Iterator[str | None]:
    """A cluster of this machine alone, gone at the end; the dashboard's address where there is one."""
    cores = max(1, math.ceil(machine.cpus), math.ceil(placement.actors * placement.cpus_per_actor))
    temporary = Path(tempfile.mkdtemp(prefix="reuse-sweep-", dir=_short_folder()))
    try:
        yield _start(temporary, cores=cores, dashboard=dashboard)
    finally:
        ray.shutdown()
        _remove(temporary)


def _start(temporary: Path, *, cores: int, dashboard: bool, tries: int = 3) -> str | None:
    """On a machine that is very busy Ray may not be up in the time it gives itself; a second start finds its files."""
    try:
        context = ray.init(
            address="local",
            num_cpus=cores,
            include_dashboard=dashboard,
            dashboard_host="127.0.0.1",
            object_store_memory=OBJECT_STORE,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            _temp_dir=str(temporary),
            # Ray hands the path of its workers' Python to a shell as it is.
            runtime_env={"py_executable": shlex.quote(sys.executable)} if " " in sys.executable else None,
        )
    except Exception as error:  # Ray raises nothing more special
        ray.shutdown()
        if tries == 1:
            raise Aborted(f"Ray could not be started: {' '.join(str(error).split())}") from None
        return _start(temporary, cores=cores, dashboard=dashboard, tries=tries - 1)
    return context.dashboard_url or None


def _remove(temporary: Path) -> None:
    """Ray's last processes may still be writing there."""
    for _ in range(20):
        shutil.rmtree(temporary, ignore_errors=True)
        if not temporary.exists():
            return
        time.sleep(0.1)


def _short_folder() -> str | None:
    """The usual temporary folder, unless its name leaves no room for those of Ray's sockets."""
    return None if len(tempfile.gettempdir()) <= LONGEST_TEMPORARY else "/tmp"


@contextmanager
def joined(address: str) -> Iterator[str | None]:
    """A cluster that runs already and goes on running."""
    try:
        context = ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {name: TUNE[name] for name in ("RAY_CHDIR_TO_TRIAL_DIR",)}},
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        token = "" if "RAY_AUTH_MODE" in os.environ else "; one that asks for Ray's token needs RAY_AUTH_MODE=token"
        raise InputError(f"--address {address}: no Ray cluster can be joined there ({reason}){token}") from None
    try:
        yield context.dashboard_url or None
    finally:
        ray.shutdown()


def machine() -> Machine:
    """What the joined cluster has, and what its autoscaler may bring."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    present, growth = ray.cluster_resources(), _growth(nodes)
    largest = {
        kind: max(growth.largest(kind), *(node["Resources"].get(kind, 0) for node in nodes)) for kind in ("CPU", "GPU")
    }
    return Machine(
        cpus=present.get("CPU", 0),
        gpus=present.get("GPU", 0),
        most_cpus=growth.most("CPU") or None,
        most_gpus=growth.most("GPU") or None,
        node_cpus=largest["CPU"],
        node_gpus=largest["GPU"],
        driver_gpus=torch.cuda.device_count(),
    )


def _growth(nodes: list[dict[str, Any]]) -> Growth:
    """Known on the head alone, where `ray submit` runs a sweep; elsewhere such a file would be another cluster's."""
    here = ray.get_runtime_context().get_node_id()
    on_head = any(node["NodeID"] == here and "node:__internal_head__" in node["Resources"] for node in nodes)
    return growth_of(FILE) if on_head else Growth()


class Room:
    """How many actors the joined cluster holds now: nodes come late, and go. Asked often, it looks now and then."""

    def __init__(self, placement: Placement) -> None:
        self._placement, self._looked, self._actors = placement, time.monotonic(), placement.actors

    def __call__(self) -> int:
        """At least one: a cluster that has lost its last worker may get another."""
        if time.monotonic() - self._looked > ROOM_SECONDS:
            each = self._placement
            self._actors = max(1, room_in(machine(), each.gpus_per_actor, each.cpus_per_actor))
            self._looked = time.monotonic()
        return self._actors


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Where an actor would run."""

    kind: str
    dtype: str  # what auto means there
    memory: int  # bytes, free now


def device_of_an_actor(placement: Placement, say: Callable[[str], None] = print) -> Device:
    """Asked on a worker, with the resources that an actor gets. Others may hold them, or they have to be brought."""
    each = {"num_cpus": placement.cpus_per_actor, "num_gpus": placement.gpus_per_actor}
    answer = ray.remote(_probe).options(**each, name="device of an actor").remote()
    if not ray.wait([answer], timeout=PATIENCE)[0]:
        say(f"waiting for a worker to start, which an autoscaler may need minutes for: {_why(placement)}")
    try:
        kind, dtype, memory = ray.get(answer, timeout=PROBE_SECONDS)
    except GetTimeoutError:
        late = f"no worker has started in {PROBE_SECONDS / 60:.0f} minutes: {_why(placement)}"
        raise Aborted(f"{late}; `ray status` on the head says why no more comes") from None
    except RayError as error:
        raise Aborted(f"no worker could be started: {str(error).strip().splitlines()[-1]}") from None
    return Device(kind=kind, dtype=dtype, memory=memory)


def _why(placement: Placement) -> str:
    return asked_and_free(placement, free=ray.available_resources(), there=ray.cluster_resources())


def _probe() -> tuple[str, str, int]:
    device = pick_device("auto")
    dtype = str(pick_dtype("auto", device)).removeprefix("torch.")
    if device.type == "cuda":
        return "cuda", dtype, torch.cuda.mem_get_info(device)[0]
    return "cpu", dtype, free_memory()


def check_device(needed: int, placement: Placement) -> None:
    """An InputError if an actor's device, which a worker is asked for, cannot hold the model."""
    device = device_of_an_actor(placement)
    check_memory(needed, device.memory * min(1.0, placement.gpus_per_actor or 1.0), device.kind)


def start_results(plan: Plan, *, actors: int, metrics: bool) -> Any:
    """The result actor, on the machine where the folder is: that of this process. Ray restarts it if it dies."""
    results = (
        ray.remote(Results)
        .options(
            name="results",
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=RESULT_THREADS,
            **_here(),
        )
        .remote(plan, actors=actors, metrics=metrics)
    )
    try:
        ray.get(results.progress.remote(), timeout=RESULT_SECONDS)
    except (StoreError, RayActorError, GetTimeoutError) as error:  # the last line says why: perhaps it is in use
        raise Aborted(f"{plan.folder} could not be opened: {str(error).strip().splitlines()[-1]}") from None
    return results


def start_trial_board() -> Any:
    """The actor that shows trials in the dashboard."""
    concurrency = 2 * MAX_TRIALS + 1000  # two calls wait for each trial
    return ray.remote(TrialBoard).options(name="trials", max_concurrency=concurrency, **_here()).remote()


def _here() -> dict[str, Any]:
    """Options of an actor that runs in this node without reserving anything; the dashboard does not list its calls."""
    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": here, "enable_task_events": False}
