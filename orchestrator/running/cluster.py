"""Ray for one sweep: started on this machine, on the loopback device only, or joined by address.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import ray
import torch
from ray.exceptions import GetTimeoutError, OwnerDiedError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.core.hardware import Device, common_dtype, visible_devices
from orchestrator.planning.dry_run import size
from orchestrator.planning.machine import Machine, Nodes, Placement, Resources
from orchestrator.planning.plan import Plan
from orchestrator.planning.room import check_devices
from orchestrator.running.autoscaler import AutoscalerReport, Prospect, growth_of, print_now, report_on
from orchestrator.running.dashboard import MAX_TRIALS, TrialBoard
from orchestrator.running.environment import MAX_TEMPORARY_CHARACTERS, OBJECT_STORE_BYTES, TUNE_VARIABLES
from orchestrator.running.nodes import FailedSetup, Node, failure_sentences
from orchestrator.running.results import Results
from orchestrator.running.stop import Aborted
from orchestrator.store import StoreError
from sampler.errors import InputError

ROOM_SECONDS = 5.0
WAITING_ACTORS = 8  # requested beyond those that fit, where an autoscaler's limit is not known
HEAD_RESOURCE = "node:__internal_head__"
TOKEN_SECONDS = 60.0
RESULT_SECONDS = 600.0  # it reads every finished trial first
RESULT_THREADS = 8  # one waits for the disk while another prepares its rows


@contextmanager
def local(placement: Placement, machine: Machine, *, dashboard: bool) -> Iterator[str | None]:
    """A cluster of this machine alone, gone at the end; the dashboard's address where there is one."""
    cores = max(1, math.ceil(machine.present("CPU")), math.ceil(placement.actors * placement.cpus_per_actor))
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
            object_store_memory=OBJECT_STORE_BYTES,
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
    return None if len(tempfile.gettempdir()) <= MAX_TEMPORARY_CHARACTERS else "/tmp"


@contextmanager
def joined(address: str) -> Iterator[str | None]:
    """A cluster that runs already and goes on running."""
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
    if uses_token() and not _token_is_checked():
        ray.shutdown()
        _restart(RAY_AUTH_MODE="disabled")
    try:
        yield context.dashboard_url or None
    finally:
        ray.shutdown()


def _token_is_checked() -> bool:
    """False if the cluster's own processes send no token: then they cannot fetch anything that this process owns."""

    def value() -> int:  # defined here, so that a node without this project can run it
        return 1

    def fetch(references: list[Any]) -> Any:
        return ray.get(references[0])

    options = {"num_cpus": 0, "max_retries": 0, "enable_task_events": False}
    fetched = ray.remote(fetch).options(**options).remote([ray.remote(value).options(**options).remote()])
    try:
        ray.get(fetched, timeout=TOKEN_SECONDS)
    except OwnerDiedError:
        return False
    except RayError:  # a busy or broken node: what runs next will tell
        return True
    return True


def _restart(**variables: str) -> NoReturn:
    """This command again, in this process: Ray reads these variables only once."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **variables})


def uses_token() -> bool:
    """Whether the cluster that was started or joined asks for a token, its dashboard too. After `local` or `joined`."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def machine() -> Machine:
    """What the joined cluster has, and what its autoscaler may add."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    on_head = any(node["NodeID"] == here and HEAD_RESOURCE in node["Resources"] for node in nodes)
    return Machine(
        nodes=tuple(Nodes(resources=node["Resources"]) for node in nodes),
        growth=growth_of(on_head=on_head),
        driver_gpus=torch.cuda.device_count(),
    )


class Room:
    """How many actors may run in the joined cluster now: nodes come late, and go. Looks at most every few seconds."""

    def __init__(self, placement: Placement) -> None:
        self._bundle, self._looked, self._actors = placement.bundle, time.monotonic(), placement.actors

    def __call__(self) -> int:
        """At least one: a cluster that has lost its last worker may get another."""
        if time.monotonic() - self._looked > ROOM_SECONDS:
            now = machine()
            self._actors = max(1, actors_to_request(now, self._bundle, report_on(self._bundle)))
            self._looked = time.monotonic()
        return self._actors


def actors_to_request(machine: Machine, bundle: Resources, report: AutoscalerReport) -> int:
    """As many as fit, and some more where an autoscaler may add nodes: it adds them only if actors wait for them."""
    if machine.growth.groups or not report.elastic or report.prospect is Prospect.NEVER:
        return machine.capacity(bundle)
    return machine.holds_now(bundle) + WAITING_ACTORS


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


PROBE_SECONDS = 180.0  # a node's first Python process reads torch from its disk, or from a shared one
Look = Callable[[bool], list[Device]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The devices of all nodes that answered."""

    devices: tuple[Device, ...]
    failures: tuple[FailedSetup, ...] = ()  # nodes that cannot run this project
    warnings: tuple[str, ...] = ()  # nodes that did not answer in time


def look(gpus: bool) -> list[Device]:
    """Runs on a node, in a process that Ray has given no GPU and hidden none from."""
    return visible_devices(gpus=gpus)


def probe_devices(placement: Placement, *, look: Look = look, seconds: float = PROBE_SECONDS) -> Probe:
    """All devices that an actor may get. Asks for no resources, so devices that are in use are seen too."""
    nodes = [
        node
        for node in ray.nodes()
        if node["Alive"] and Nodes(resources=node["Resources"]).actors_each(placement.bundle)
    ]
    # Its process ends with it (max_calls), and so does what CUDA keeps on each GPU; Ray must not hide GPUs from it.
    shows_gpus = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    probe = ray.remote(num_cpus=0, max_calls=1, runtime_env=shows_gpus)(look)
    answers = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = probe.options(scheduling_strategy=there, enable_task_events=False)
        answers[task.remote(placement.gpus_per_actor > 0)] = node
    ready, late = ray.wait(list(answers), num_returns=len(answers), timeout=seconds) if answers else ([], [])
    devices: list[Device] = []
    failures: list[FailedSetup] = []
    warnings = [f"{_name(answers[answer])} has not reported its devices in {seconds:.0f} seconds" for answer in late]
    for answer in ready:
        node = answers[answer]
        try:
            devices += [replace(device, node=_name(node)) for device in ray.get(answer)]
        except RayError as error:  # the node has gone, or cannot run this project
            reason = str(error).strip().splitlines()[-1]
            failed = Node(node_id=node["NodeID"], host=node["NodeManagerHostname"])
            failures.append(FailedSetup(node=failed, reason=reason))
    for answer in late:
        ray.cancel(answer, force=True)
    if nodes and not devices:
        raise Aborted(*warnings, *failure_sentences(failures))
    return Probe(devices=tuple(devices), failures=tuple(failures), warnings=tuple(warnings))


def _name(node: Mapping[str, Any]) -> str:
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def sweep_dtype(probe: Probe, say: Callable[[str], None] = print_now) -> str:
    """What --dtype auto means for all actors."""
    dtype, why = common_dtype(probe.devices)
    if why is not None:
        say(why)
    return dtype


def check_probed(needed: int, probe: Probe, placement: Placement, say: Callable[[str], None] = print_now) -> None:
    """Prints a warning for each node that is too small or silent; an InputError if no device can hold an actor."""
    share = min(1.0, placement.gpus_per_actor or 1.0)
    in_use = ray.available_resources().get("GPU", 0) < ray.cluster_resources().get("GPU", 0)
    small = check_devices(needed, probe.devices, share=share, in_use=bool(placement.gpus_per_actor) and in_use)
    for warning in (*probe.warnings, *too_small(small, needed)):
        say(f"warning: {warning}")


def too_small(devices: Sequence[Device], needed: int) -> list[str]:
    """One sentence for each node with devices that cannot hold an actor."""
    by_node = {device.node: device for device in devices}
    return [
        f"{node} is too small for an actor, which needs about {size(needed)} of memory ({device.name} has "
        f"{size(device.free)} free of {size(device.total)})"
        for node, device in by_node.items()
    ]
