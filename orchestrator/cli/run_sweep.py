"""Runs a sweep: preflight, plan, trials on Ray, report. Import it after `environment.prepare`: it imports Ray."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.cli.console import say
from orchestrator.cli.sweep import SweepCommand, continue_line
from orchestrator.planning.estimate import check_capacity, measured_seconds, memory_remedy
from orchestrator.planning.forecast import describe_plan, undecidable
from orchestrator.planning.machine import Machine, Placement, place
from orchestrator.planning.preflight import prepare, sweep_folder
from orchestrator.planning.prepared import PreparedSweep
from orchestrator.planning.run_plan import RunPlan, plan_run, save_plan, worker_settings
from orchestrator.planning.settings import SweepSettings
from orchestrator.progress.status import read_status
from orchestrator.progress.trackers import TrackerProcesses, check_installed
from orchestrator.progress.view import SweepView
from orchestrator.report.write import write_report
from orchestrator.running import autoscaler, cluster, driver
from orchestrator.running.dashboard import DashboardTrials
from orchestrator.running.scheduling import NodeHealth
from orchestrator.running.stop import StopSignals
from orchestrator.store import Store, StoreWriter
from orchestrator.store.upload import RemoteCopy, Uploader, finish_upload, open_remote_copy
from sampler.errors import InputError, counted


def run(command: SweepCommand, arguments: list[str], stop: StopSignals) -> int:
    """Runs a sweep, or prints its plan with --dry-run. Returns the number of failed trials."""
    settings = command.settings
    callbacks = [driver.load_callback(name) for name in settings.callback]
    check_installed(settings.track)
    with ExitStack() as ray_session:
        dashboard = None
        if settings.address is not None:
            with stop.reinstalled():
                dashboard = ray_session.enter_context(cluster.join(settings.address))
            machine = autoscaler.add_expected_nodes(settings, cluster.joined_machine())
        else:
            machine = Machine.here()
        folder = sweep_folder(settings, machine)
        copy = None
        if settings.upload is not None:
            copy = open_remote_copy(settings.upload, folder, dry_run=command.dry_run, note=SweepView().note)
        with ExitStack() as lock:
            writer = None
            if command.dry_run or not (folder / "sweep.json").exists():
                stored = Store(folder).read_sweep_record()
            else:  # read once and locked, so that no other command changes it meanwhile
                writer = lock.enter_context(StoreWriter(folder))
                stored = writer.sweep_record
            probe = None
            if settings.address is not None and stored is None:
                prepare(settings, machine)  # reports all problems before waiting for a node
                placement = place(settings, machine)
                if not command.dry_run or machine.holds_now(placement.bundle):
                    machine, probe = _wait_and_probe(settings, machine, placement)
            prepared = prepare(settings, machine, stored)
            if command.dry_run:
                _print_dry_run(prepared)
                return 0
            for notice in prepared.notices:
                SweepView().note(notice)
            writer = writer or lock.enter_context(_create(prepared.folder))
            plan = plan_run(prepared, writer, stored, force=command.force)
            if plan.remaining:
                for problem in undecidable(prepared):
                    SweepView().paragraph(f"warning: {problem}")
                if stored is not None:
                    check_capacity(prepared, machine, plan.remaining)
                if settings.address is None:
                    print("starting Ray on this machine", flush=True)
                    local = cluster.start_local(prepared.placement, machine, dashboard=settings.dashboard)
                    with stop.reinstalled():
                        dashboard = ray_session.enter_context(local)
                health = _check_devices(prepared, machine, probe)
                save_plan(prepared, writer, plan, arguments=arguments)
        failed = 0
        if plan.remaining:
            failed = _run_trials(prepared, plan, stop, dashboard, copy=copy, health=health, callbacks=callbacks)
        else:
            say(*plan.notices, f"{plan.sweep} is finished: nothing to do", sep="\n")
        _print_results(plan)
    if copy is not None:
        finish_upload(copy, failed=failed)
    return failed


def _create(folder: Path) -> StoreWriter:
    """Locks the folder of a new sweep."""
    writer = StoreWriter(folder)
    if writer.sweep_record is not None:
        writer.close()
        raise InputError(f"another command started a sweep in {folder} at the same time; run this command again")
    return writer


def _wait_and_probe(settings: SweepSettings, machine: Machine, placement: Placement) -> tuple[Machine, cluster.Probe]:
    """Waits until a node of the joined cluster can hold an actor. Returns the machine at that time, and its devices."""
    autoscaler.wait_for_node(placement, seconds=settings.wait_for_nodes, machine=cluster.joined_machine)
    probe = cluster.probe_devices(placement)
    dtype = cluster.choose_dtype(probe) if settings.dtype == "auto" else machine.dtype
    now = cluster.joined_machine()
    growth = machine.growth if machine.growth.open_ended else now.growth
    return replace(now, growth=growth, dtype=dtype, devices=probe.devices), probe


def _check_devices(prepared: PreparedSweep, machine: Machine, probe: cluster.Probe | None) -> NodeHealth:
    """Checks that the model fits into the devices' memory, and excludes nodes whose devices do not answer."""
    placement = prepared.placement
    if probe is None and prepared.settings.address is not None:
        _, probe = _wait_and_probe(prepared.settings, machine, placement)
    elif probe is None and placement.gpus_per_actor:
        probe = cluster.probe_devices(placement)
    health = NodeHealth()
    if probe is not None:
        remedy = memory_remedy(prepared.identity.dtype, prepared.settings.batch_size)
        cluster.check_device_memory(prepared.memory, probe, placement, remedy=remedy)
        for failure in probe.failures:
            say(health.exclude(failure))
    return health


def _run_trials(
    prepared: PreparedSweep,
    plan: RunPlan,
    stop: StopSignals,
    dashboard: str | None,
    *,
    copy: RemoteCopy | None,
    health: NodeHealth,
    callbacks: Sequence[Any],
) -> int:
    """Runs the remaining trials on Ray and returns the number of those that failed."""
    placement = replace(prepared.placement, actors=min(prepared.placement.actors, len(plan.remaining)))
    fixed = prepared.settings.address is None or prepared.settings.actors is not None
    with (
        SweepView(quiet=prepared.settings.quiet) as view,
        Uploader(copy, view.note),
        TrackerProcesses(Path(plan.folder), prepared.settings.track, view.note),
    ):
        for notice in plan.notices:
            view.note(notice)
        actors = f"{counted(placement.actors, 'actor')} ({placement.each}) in {prepared.identity.dtype}"
        view.note(f"{plan.sweep}: {counted(len(plan.remaining), 'trial')} to run on {actors}")
        if dashboard is not None:
            # A Slurm job has the token in its environment and prints where to find it.
            needs_token = cluster.uses_token() and "RAY_AUTH_TOKEN" not in os.environ
            hint = " (it asks for the token that `ray get-auth-token` prints)" if needs_token else ""
            view.note(f"dashboard: http://{dashboard}{hint}")
        results = cluster.start_result_actor(plan, actors=placement.actors, metrics=dashboard is not None)
        board = cluster.start_trial_board() if dashboard is not None else None
        run = driver.SweepRun(
            plan=plan,
            results=results,
            settings=worker_settings(prepared, plan),
            placement=placement,
            view=view,
            stop=stop,
            capacity=None if fixed else cluster.ClusterCapacity(placement),
            health=health,
            dashboard=DashboardTrials(board),
            callbacks=callbacks,
        )
        failed = driver.run_trials(run, plan.remaining)
        driver.close_results(results)
    return len(failed)


def _print_dry_run(prepared: PreparedSweep) -> None:
    """Prints the plan, given the rows that the folder already has."""
    store = Store(prepared.folder)
    rows = store.rows(columns=["task", "trial_id", "attempt", "batch_id", "batch_seconds", "doc_id"])
    done: dict[str, set[str]] = {}
    for trial_id, doc_id in zip(rows["trial_id"].to_pylist(), rows["doc_id"].to_pylist(), strict=True):
        done.setdefault(trial_id, set()).add(doc_id)
    measured = measured_seconds(rows)
    say(*describe_plan(prepared, done=done, measured=measured), sep="\n")


def _print_results(plan: RunPlan) -> None:
    """Prints the table, the verdicts, the report's path and, last, the folder."""
    folder = Path(plan.folder)
    with SweepView() as view:
        record = (Store(folder).read_sweep_record() if plan.is_race else None) or plan.record  # a race adds decisions
        status = read_status(folder, record)  # of the whole sweep: this command may have run a part of it
        view.finish(status.progress)
        if status.missing and not status.failures:
            say(continue_line(status))
        try:
            written = write_report([folder], records={folder: record})
            for sentence in (*written.problems, *written.verdicts):
                view.paragraph(sentence)
            say(f"report: {written.page}")
        except InputError as error:  # for instance, a single policy has nothing to compare with
            say(f"no report: {error}")
    say(folder)
