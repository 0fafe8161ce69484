"""A sweep from its parsed flags to its report: prepared, written down, decoded, shown. Decides none of this itself."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.planning.dry_run import describe
from orchestrator.planning.estimate import measured_seconds
from orchestrator.planning.machine import Machine, Placement, place
from orchestrator.planning.preflight import prepare, sweep_folder
from orchestrator.planning.prepared import Prepared
from orchestrator.planning.room import check_room
from orchestrator.planning.setting_up import SetUp, set_up, write_down
from orchestrator.planning.settings import SweepCommand, SweepSettings
from orchestrator.progress.progress import stored_progress
from orchestrator.progress.view import SweepView
from orchestrator.report.write import write_report
from orchestrator.running.dashboard import DashboardTrials
from orchestrator.running.nodes import NodeHealth
from orchestrator.running.stop import StopSignals
from orchestrator.running.uploader import Uploader, finish_upload
from orchestrator.store import Store, StoreWriter
from orchestrator.store.upload import RemoteCopy, open_remote_copy
from sampler.errors import InputError

if TYPE_CHECKING:
    from orchestrator.running.cluster import Probe


def run(command: SweepCommand, arguments: list[str], stop: StopSignals) -> int:
    """How many trials failed."""
    settings = command.settings
    callbacks = _load_callbacks(settings.callback)
    with ExitStack() as stack:
        dashboard = None
        if settings.address is not None:
            from orchestrator.running import autoscaler, cluster  # only now: the environment is prepared

            with stop.reinstalled():
                dashboard = stack.enter_context(cluster.join(settings.address))
            machine = autoscaler.add_expected_nodes(settings, cluster.joined_machine())
        else:
            machine = Machine.here()
        folder = sweep_folder(settings, machine)
        copy = None
        if settings.upload is not None:
            copy = open_remote_copy(settings.upload, folder, dry_run=command.dry_run, note=SweepView().note)
        stored = Store(folder).read_request()
        probe = None
        if settings.address is not None and stored is None:
            prepare(settings, machine)  # reports all problems before a node is waited for
            placement = place(settings, machine)
            if not command.dry_run or machine.holds_now(placement.bundle):
                machine, probe = _wait_and_probe(settings, machine, placement)
        prepared = prepare(settings, machine, stored)
        if command.dry_run:
            _print_dry_run(prepared)
            return 0
        for notice in prepared.notices:
            SweepView().note(notice)
        with StoreWriter(prepared.folder) as writer:
            made = set_up(prepared, writer, force=command.force)
            if made.trials:
                from orchestrator.running import cluster

                if stored is not None:
                    check_room(prepared, machine, made.trials)
                if settings.address is None:
                    print("starting Ray on this machine", flush=True)
                    here = cluster.start_local(prepared.placement, machine, dashboard=settings.dashboard)
                    with stop.reinstalled():
                        dashboard = stack.enter_context(here)
                health = _check_devices(prepared, machine, probe)
                write_down(prepared, writer, made, arguments=arguments)
        if not made.trials:
            print(*made.notices, f"{made.plan.sweep} is finished: nothing to do", sep="\n")
            _print_end(made)
            failed = 0
        else:
            failed = _decode(prepared, made, stop, dashboard, copy=copy, health=health, callbacks=callbacks)
    if copy is not None:
        finish_upload(copy, failed=failed)
    return failed


def _wait_and_probe(settings: SweepSettings, machine: Machine, placement: Placement) -> "tuple[Machine, Probe]":
    """Of a joined cluster, once a node can hold an actor: its nodes now, and their devices."""
    from orchestrator.running import autoscaler, cluster

    autoscaler.wait_for_node(placement, seconds=settings.wait_for_nodes, machine=cluster.joined_machine)
    probe = cluster.probe_devices(placement)
    dtype = cluster.choose_dtype(probe) if settings.dtype == "auto" else machine.dtype
    now = cluster.joined_machine()
    return replace(now, growth=machine.growth if machine.growth.open_ended else now.growth, dtype=dtype), probe


def _check_devices(prepared: Prepared, machine: Machine, probe: "Probe | None") -> NodeHealth:
    """Checks that the model fits into the devices' memory (this machine's CPU was checked before); bad nodes."""
    from orchestrator.running import cluster

    placement = prepared.placement
    if probe is None and prepared.settings.address is not None:
        _, probe = _wait_and_probe(prepared.settings, machine, placement)
    elif probe is None and placement.gpus_per_actor:
        probe = cluster.probe_devices(placement)
    health = NodeHealth()
    if probe is not None:
        cluster.check_device_memory(prepared.memory, probe, placement)
        for failure in probe.failures:
            print(health.exclude(failure), flush=True)
    return health


def _decode(
    prepared: Prepared,
    made: SetUp,
    stop: StopSignals,
    dashboard: str | None,
    *,
    copy: RemoteCopy | None,
    health: NodeHealth,
    callbacks: Sequence[Any],
) -> int:
    from orchestrator.running import cluster, driver

    placement = replace(prepared.placement, actors=min(prepared.placement.actors, len(made.trials)))
    fixed = prepared.settings.address is None or prepared.settings.actors is not None
    with SweepView(quiet=prepared.settings.quiet) as view, Uploader(copy, view.note):
        for notice in made.notices:
            view.note(notice)
        actors = f"{placement.actors} actors ({placement.each}) in {prepared.identity.dtype}"
        view.note(f"{made.plan.sweep}: {len(made.trials):,} trials to run on {actors}")
        if dashboard is not None:
            # A job on Slurm has the token in its environment, and prints where its user finds it.
            asks = cluster.uses_token() and "RAY_AUTH_TOKEN" not in os.environ
            view.note(
                f"dashboard: http://{dashboard}" + asks * " (it asks for the token that `ray get-auth-token` prints)"
            )
        results = cluster.start_result_actor(made.plan, actors=placement.actors, metrics=dashboard is not None)
        board = cluster.start_trial_board() if dashboard is not None else None
        failed = driver.run_all(
            made.plan,
            made.trials,
            results=results,
            settings=made.worker,
            placement=placement,
            view=view,
            stop=stop,
            capacity=None if fixed else cluster.ClusterCapacity(placement),
            health=health,
            dashboard=DashboardTrials(board),
            callbacks=callbacks,
        )
        driver.close(results)
    _print_end(made)
    return len(failed)


def _load_callbacks(names: Sequence[str]) -> list[Any]:
    if not names:
        return []
    from orchestrator.running import driver  # only now: it imports Ray Tune

    return driver.load_callbacks(names)


def _print_dry_run(prepared: Prepared) -> None:
    store = Store(prepared.folder)
    there = set(store.trial_ids())
    done = {
        trial.trial_id: store.completed_documents(trial.trial_id)
        for trial in prepared.trials
        if trial.trial_id in there
    }
    measured = measured_seconds(store.rows(columns=["task", "trial_id", "attempt", "batch_id", "batch_seconds"]))
    print(*describe(prepared, done=done, measured=measured), sep="\n")


def _print_end(made: SetUp) -> None:
    """The table, the verdicts, the report, and last where everything is."""
    folder = Path(made.plan.folder)
    with SweepView() as view:
        view.finish(stored_progress(made.plan.sweep, made.plan.trials, made.plan.wanted, Store(folder)))
        try:
            written = write_report([folder])
            for verdict in written.verdicts:
                view.verdict(verdict)
            print(f"report: {written.page}")
        except InputError as error:  # one policy alone, say, has nothing to be compared with
            print(f"no report: {error}")
    print(folder)
