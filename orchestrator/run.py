"""A sweep from its parsed flags to its report: prepared, written down, decoded, shown. Decides none of this itself."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from orchestrator.planning.dry_run import describe
from orchestrator.planning.estimate import measured_seconds
from orchestrator.planning.flags import Command
from orchestrator.planning.machine import Machine, place
from orchestrator.planning.preflight import prepare, sweep_folder
from orchestrator.planning.prepared import Prepared
from orchestrator.planning.room import check_room
from orchestrator.planning.setting_up import SetUp, set_up, write_down
from orchestrator.report.write import write_report
from orchestrator.running.stop import Stop
from orchestrator.running.uploader import Uploader, finish_upload
from orchestrator.store import Store
from orchestrator.store.remote_copy import RemoteCopy, open_copy
from orchestrator.store.writer import StoreWriter
from orchestrator.watching.stored import stored_progress
from orchestrator.watching.view import SweepView
from sampler.errors import InputError


def run(command: Command, arguments: list[str], stop: Stop) -> int:
    """How many trials failed."""
    settings = command.settings
    with ExitStack() as stack:
        dashboard = None
        if settings.address is not None:
            from orchestrator.running import cluster  # only now: the environment is prepared

            with stop.kept():
                dashboard = stack.enter_context(cluster.joined(settings.address))
            machine = cluster.machine()
        else:
            machine = Machine.here()
        folder = sweep_folder(settings, machine)
        copy = None
        if settings.upload is not None:
            copy = open_copy(settings.upload, folder, dry_run=command.dry_run, note=SweepView().note)
        stored = Store(folder).read_request()
        if settings.address is not None and settings.dtype == "auto" and stored is None:
            prepare(settings, machine)  # whatever is wrong is told first: a worker may have to be brought
            machine = replace(machine, dtype=cluster.device_of_an_actor(place(settings, machine)).dtype)
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
                    here = cluster.local(prepared.placement, machine, dashboard=settings.dashboard)
                    with stop.kept():
                        dashboard = stack.enter_context(here)
                if machine.memory is None or prepared.placement.gpus_per_actor:
                    cluster.check_device(prepared.memory, prepared.placement)
                write_down(prepared, writer, made, arguments=arguments)
        if not made.trials:
            print(*made.notices, f"{made.plan.sweep} is finished: nothing to do", sep="\n")
            _print_end(made)
            failed = 0
        else:
            failed = _decode(prepared, made, stop, dashboard, copy)
    if copy is not None:
        finish_upload(copy, failed=failed)
    return failed


def _decode(prepared: Prepared, made: SetUp, stop: Stop, dashboard: str | None, copy: RemoteCopy | None) -> int:
    from orchestrator.running import cluster, driver

    placement = replace(prepared.placement, actors=min(prepared.placement.actors, len(made.trials)))
    fixed = prepared.settings.address is None or prepared.settings.actors is not None
    with SweepView(quiet=prepared.settings.quiet) as view, Uploader(copy, view.note):
        for notice in made.notices:
            view.note(notice)
        actors = f"{placement.actors} actors ({placement.each}) in {prepared.identity.dtype}"
        view.note(f"{made.plan.sweep}: {len(made.trials):,} trials to run on {actors}")
        if dashboard is not None:
            view.note(f"dashboard: http://{dashboard} (its token is in ~/.ray/auth_token)")
        results = cluster.start_results(made.plan, actors=placement.actors, metrics=dashboard is not None)
        failed = driver.run_all(
            made.plan,
            made.trials,
            results=results,
            settings=made.worker,
            placement=placement,
            view=view,
            stop=stop,
            room=None if fixed else cluster.Room(placement),
        )
        driver.close(results)
    _print_end(made)
    return len(failed)


def _print_dry_run(prepared: Prepared) -> None:
    store = Store(prepared.folder)
    there = set(store.trial_ids())
    done = {trial.trial_id: store.done(trial.trial_id) for trial in prepared.trials if trial.trial_id in there}
    measured = measured_seconds(store.rows(columns=["task", "trial_id", "attempt", "batch_id", "batch_seconds"]))
    print(*describe(prepared, done=done, measured=measured), sep="\n")


def _print_end(made: SetUp) -> None:
    """The table, the verdicts, the report, and last where everything is."""
    folder = Path(made.plan.folder)
    with SweepView() as view:
        view.finish(stored_progress(made.plan, Store(folder)))
        try:
            written = write_report([folder])
            for verdict in written.verdicts:
                view.verdict(verdict)
            print(f"report: {written.page}")
        except InputError as error:  # one policy alone, say, has nothing to be compared with
            print(f"no report: {error}")
    print(folder)
