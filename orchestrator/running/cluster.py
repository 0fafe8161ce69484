"""The Ray cluster of one sweep: starting or joining it, the devices of its nodes, and its actors on this node.

Import this module after `environment.prepare`.
"""

import logging
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import ray
import torch
from ray.exceptions import GetTimeoutError, OwnerDiedError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.core.system import Device, common_dtype, format_bytes, visible_devices
from orchestrator.planning.estimate import check_devices
from orchestrator.planning.machine import Machine, Nodes, Placement, Resources
from orchestrator.planning.run_plan import RunPlan
from orchestrator.running.autoscaler import AutoscalerReport, Prospect, print_now, read_growth, read_report
from orchestrator.running.dashboard import MAX_TRIALS, TrialBoard
from orchestrator.running.environment import (
    MAX_TEMPORARY_CHARACTERS,
    OBJECT_STORE_BYTES,
    PRIVATE_PREFIX,
    RAY_DIRECTORY,
    TUNE_VARIABLES,
    is_private,
    private_token,
)
from orchestrator.running.result_actor import FailedSetup, Node, Results
from orchestrator.running.scheduling import failure_sentences
from orchestrator.running.stop import Aborted
from orchestrator.store import StoreError
from sampler.errors import InputError

START_ATTEMPTS = 3
CAPACITY_SECONDS = 5.0  # between two updates of the cluster's size
WAITING_ACTORS = 8  # requested beyond those that fit, where an autoscaler's limit is not known
HEAD_RESOURCE = "node:__internal_head__"
TOKEN_CHECK_TIMEOUT_SECONDS = 60.0
RESULT_ACTOR_TIMEOUT_SECONDS = 600.0  # it reads every finished trial first
RESULT_ACTOR_THREADS = 8  # one waits for the disk while another prepares its rows
PROBE_TIMEOUT_SECONDS = 180.0  # a node's first Python process reads torch from its disk, or from a shared one


@contextmanager
def start_local(placement: Placement, machine: Machine, *, dashboard: bool) -> Iterator[str | None]:
    """Runs a cluster on this machine and yields the dashboard's address, if it has one."""
    cores = max(1, math.ceil(machine.present("CPU")), math.ceil(placement.actors * placement.cpus_per_actor))
    parent = None if len(tempfile.gettempdir()) <= MAX_TEMPORARY_CHARACTERS else "/tmp"
    private = Path(tempfile.mkdtemp(prefix=PRIVATE_PREFIX, dir=parent))  # with mode 0700
    private_token(print_now)
    try:
        yield _start(private / RAY_DIRECTORY, cores=cores, dashboard=dashboard)
    finally:
        ray.shutdown()
        _remove(private)


def _start(temporary: Path, *, cores: int, dashboard: bool) -> str | None:
    """Tries several times: on a busy machine Ray may exceed its own time limit, and a second start is faster."""
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            context = ray.init(
                address="local",
                num_cpus=cores,
                include_dashboard=dashboard,
                dashboard_host="127.0.0.1",
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                _temp_dir=str(temporary),
                # Ray passes the path of its workers' Python to a shell without quotes.
                runtime_env={"py_executable": shlex.quote(sys.executable)} if " " in sys.executable else None,
            )
        except Exception as error:  # Ray raises nothing more specific
            ray.shutdown()
            if attempt == START_ATTEMPTS:
                raise Aborted(f"Ray could not be started: {' '.join(str(error).split())}") from None
        else:
            return context.dashboard_url or None
    raise AssertionError("unreachable")


def _remove(temporary: Path) -> None:
    """Tries several times, because Ray's last processes may still be writing there."""
    for _ in range(20):
        shutil.rmtree(temporary, ignore_errors=True)
        if not temporary.exists():
            return
        time.sleep(0.1)


@contextmanager
def join(address: str) -> Iterator[str | None]:
    """Connects to a running cluster and yields its dashboard's address, if it has one."""
    try:
        context = ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {name: TUNE_VARIABLES[name] for name in ("RAY_CHDIR_TO_TRIAL_DIR",)}},
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        token = "" if "RAY_AUTH_MODE" in os.environ else "; if it requires a token, set RAY_AUTH_MODE=token"
        raise InputError(f"--address {address}: no Ray cluster can be joined there ({reason}){token}") from None
    if uses_token() and not _cluster_uses_token():
        ray.shutdown()
        _restart_command(RAY_AUTH_MODE="disabled")
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    if session.exists() and not is_private(session):
        print_now(
            f"warning: other users of this machine can write to Ray's directory {session}, and so to this sweep; start "
            "Ray with RAY_TMPDIR set to a directory of mode 0700 (docs/security.md)"
        )
    try:
        yield context.dashboard_url or None
    finally:
        ray.shutdown()


def _cluster_uses_token() -> bool:
    """False if the cluster's own processes send no token: then they cannot fetch objects that this process owns."""

    def value() -> int:  # defined here, so that a node without this project can run it
        return 1

    def fetch(references: list[Any]) -> Any:
        return ray.get(references[0])

    options = {"num_cpus": 0, "max_retries": 0, "enable_task_events": False}
    fetched = ray.remote(fetch).options(**options).remote([ray.remote(value).options(**options).remote()])
    try:
        ray.get(fetched, timeout=TOKEN_CHECK_TIMEOUT_SECONDS)
    except OwnerDiedError:
        return False
    except RayError:  # a busy or broken node, which the next call reports
        return True
    return True


def _restart_command(**variables: str) -> NoReturn:
    """Restarts this command in this process with other environment variables, which Ray reads only once."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **variables})


def uses_token() -> bool:
    """Whether the cluster and its dashboard require a token. Valid only after the cluster is started or joined."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def joined_machine() -> Machine:
    """The joined cluster: its nodes, and what its autoscaler may add."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    own_id = ray.get_runtime_context().get_node_id()
    on_head = any(node["NodeID"] == own_id and HEAD_RESOURCE in node["Resources"] for node in nodes)
    return Machine(
        nodes=tuple(Nodes(resources=node["Resources"]) for node in nodes),
        growth=read_growth(on_head=on_head),
        driver_gpus=torch.cuda.device_count(),
    )


def usable_nodes(nodes: Iterable[dict[str, Any]], bundle: Resources) -> list[dict[str, Any]]:
    """The entries of `ray.nodes()` that are alive and large enough for an actor."""
    return [node for node in nodes if node["Alive"] and Nodes(resources=node["Resources"]).actors_each(bundle)]


class ClusterCapacity:
    """How many actors currently fit on the joined cluster, whose nodes may change during a sweep."""

    def __init__(self, placement: Placement) -> None:
        self._bundle, self._updated, self._actors = placement.bundle, time.monotonic(), placement.actors

    def __call__(self) -> int:
        """At least 1: a cluster that has lost its last node may get another."""
        if time.monotonic() - self._updated > CAPACITY_SECONDS:
            self._actors = max(1, actors_to_request(joined_machine(), self._bundle, read_report(self._bundle)))
            self._updated = time.monotonic()
        return self._actors


def actors_to_request(machine: Machine, bundle: Resources, report: AutoscalerReport) -> int:
    """As many as fit, plus a few if an autoscaler may add nodes, because it adds them only for waiting actors."""
    if machine.growth.groups or not report.elastic or report.prospect is Prospect.NEVER:
        return machine.capacity(bundle)
    return machine.holds_now(bundle) + WAITING_ACTORS


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The devices of all nodes that answered. Created by `probe_devices` before the first worker is placed."""

    devices: tuple[Device, ...]
    failures: tuple[FailedSetup, ...] = ()  # nodes that cannot run this project
    warnings: tuple[str, ...] = ()  # nodes that did not answer in time


def node_devices(gpus: bool) -> list[Device]:
    """The devices of the node on which this runs as a task, in a process that sees all GPUs."""
    return visible_devices(gpus=gpus)


def probe_devices(
    placement: Placement,
    *,
    list_devices: Callable[[bool], list[Device]] = node_devices,
    seconds: float = PROBE_TIMEOUT_SECONDS,
) -> Probe:
    """Devices of all nodes that can hold an actor. Reserves no resources, so it also sees devices in use."""
    nodes = usable_nodes(ray.nodes(), placement.bundle)
    # The process ends with the task (max_calls), and frees what CUDA keeps on each GPU. Ray must not hide GPUs from it.
    show_gpus = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    probe = ray.remote(num_cpus=0, max_calls=1, runtime_env=show_gpus)(list_devices)
    node_of_answer = {}
    for node in nodes:
        on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = probe.options(scheduling_strategy=on_node, enable_task_events=False)
        node_of_answer[task.remote(placement.gpus_per_actor > 0)] = node
    answers = list(node_of_answer)
    ready, late = ray.wait(answers, num_returns=len(answers), timeout=seconds) if answers else ([], [])
    devices: list[Device] = []
    failures: list[FailedSetup] = []
    warnings = [
        f"{_node_name(node_of_answer[answer])} has not reported its devices in {seconds:.0f} seconds" for answer in late
    ]
    for answer in ready:
        node = node_of_answer[answer]
        try:
            devices += [replace(device, node=_node_name(node)) for device in ray.get(answer)]
        except RayError as error:  # the node is gone, or cannot run this project
            reason = str(error).strip().splitlines()[-1]
            failed = Node(node_id=node["NodeID"], host=node["NodeManagerHostname"])
            failures.append(FailedSetup(node=failed, reason=reason))
    for answer in late:
        ray.cancel(answer, force=True)
    if nodes and not devices:
        raise Aborted(*warnings, *failure_sentences(failures))
    return Probe(devices=tuple(devices), failures=tuple(failures), warnings=tuple(warnings))


def _node_name(node: Mapping[str, Any]) -> str:
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def choose_dtype(probe: Probe, note: Callable[[str], None] = print_now) -> str:
    """The dtype that --dtype auto means for all actors."""
    dtype, notice = common_dtype(probe.devices)
    if notice is not None:
        note(notice)
    return dtype


def check_device_memory(
    needed: int, probe: Probe, placement: Placement, *, remedy: str, note: Callable[[str], None] = print_now
) -> None:
    """Prints a warning for each node that is too small or did not answer; InputError if no device can hold an actor."""
    share = min(1.0, placement.gpus_per_actor or 1.0)
    gpus_in_use = ray.available_resources().get("GPU", 0) < ray.cluster_resources().get("GPU", 0)
    in_use = placement.gpus_per_actor > 0 and gpus_in_use
    small = check_devices(needed, probe.devices, remedy=remedy, share=share, in_use=in_use)
    for warning in probe.warnings:
        note(f"warning: {warning}")
    for node, device in {device.node: device for device in small}.items():
        note(
            f"warning: {node} is too small for an actor, which needs about {format_bytes(needed)} of memory "
            f"({device.name} has {format_bytes(device.free)} free of {format_bytes(device.total)})"
        )


def start_result_actor(plan: RunPlan, *, actors: int, metrics: bool) -> Any:
    """Starts the result actor on this node, where the sweep's directory is. Ray restarts it if it dies."""
    results = (
        ray.remote(Results)
        .options(
            name="results",
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=RESULT_ACTOR_THREADS,
            **_on_this_node(),
        )
        .remote(plan, actors=actors, metrics=metrics)
    )
    try:
        ray.get(results.progress.remote(), timeout=RESULT_ACTOR_TIMEOUT_SECONDS)
    except (StoreError, RayActorError, GetTimeoutError) as error:  # the last line has the reason
        raise Aborted(f"{plan.folder} could not be opened: {str(error).strip().splitlines()[-1]}") from None
    return results


def start_trial_board() -> Any:
    """Starts the actor that shows trials in the dashboard."""
    concurrency = 2 * MAX_TRIALS + 1000  # two calls wait for each trial
    return ray.remote(TrialBoard).options(name="trials", max_concurrency=concurrency, **_on_this_node()).remote()


def _on_this_node() -> dict[str, Any]:
    """Options of an actor that reserves no resources and whose calls the dashboard does not list."""
    this_node = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": this_node, "enable_task_events": False}
