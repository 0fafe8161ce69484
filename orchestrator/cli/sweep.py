"""`reuse-sweep sweep`: runs a sweep, or continues it."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.cli import config_file
from orchestrator.cli.console import say
from orchestrator.cli.flags import parse_sweep, without_force


def sweep(arguments: Sequence[str]) -> None:
    command = parse_sweep(arguments)
    from orchestrator.running import environment
    from orchestrator.running.environment import check_listening, is_this_machine, only_on_loopback
    from orchestrator.running.stop import Aborted, StopSignals
    from orchestrator.store import StoreError

    if command.save_config is not None:
        config_file.save(command.save_config, command.settings)
    program = sys.orig_argv[: len(sys.orig_argv) - len(arguments)]  # as it was called, without the flags
    rerun = shlex.join([*program, *without_force(arguments)])
    stop = StopSignals(exit_message=f"stopped; continue with: {rerun}")
    stop.install()
    address = environment.cluster_address(command.settings.address)
    if address is not None and command.settings.address is None:
        print(f"joining the Ray cluster at {address} (RAY_ADDRESS)", flush=True)
    command = replace(command, settings=replace(command.settings, address=address))
    try:
        if address is None:
            environment.prepare(local=True)
        else:
            check_listening(address)
            environment.prepare(local=only_on_loopback(address), token=is_this_machine(address))
        from orchestrator.cli.run_sweep import run  # imports torch and Ray: not before the flags are checked

        failed = run(command, list(arguments), stop)
    except KeyboardInterrupt:  # Interrupted, or what Ray turns it into
        stop.exit_now()
    except (Aborted, StoreError) as error:
        *others, last = error.sentences if isinstance(error, Aborted) else (str(error),)
        for sentence in (*others, f"{last}; continue with: {rerun}"):
            say(f"error: {sentence}", error=True)
        sys.exit(1)
    if failed:
        print(f"{failed} trials failed; retry them with: {rerun}", file=sys.stderr)
        sys.exit(1)
