"""python -m orchestrator.sweep: policies over benchmarks with warm models. The same command again continues."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it listens itself there is nothing to clear up, or to trace

import shlex
import sys
from dataclasses import replace

from orchestrator.planning import config_file
from orchestrator.planning.flags import parse, without_force
from orchestrator.running import environment
from orchestrator.running.environment import check_listening, is_this_machine, only_on_loopback
from orchestrator.running.stop import Aborted, StopSignals
from orchestrator.store import StoreError
from sampler.cli import run_command


def main() -> None:
    arguments = sys.argv[1:]
    command = parse(arguments)
    if command.save_config is not None:
        config_file.save(command.save_config, command.settings.as_dict())
    started_by = sys.orig_argv[: len(sys.orig_argv) - len(arguments)]  # this Python, as it was called
    repeated = shlex.join([*started_by, *without_force(arguments)])
    stop = StopSignals(exit_message=f"stopped; continue with: {repeated}")
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
        from orchestrator.run import run  # only now: help and a wrong flag are answered before torch is there

        failed = run(command, arguments, stop)
    except KeyboardInterrupt:  # Interrupted, or what Ray makes of it
        stop.exit_now()
    except (Aborted, StoreError) as error:
        *others, last = error.sentences if isinstance(error, Aborted) else (str(error),)
        for sentence in (*others, f"{last}; continue with: {repeated}"):
            print(f"error: {sentence}", file=sys.stderr)
        sys.exit(1)
    if failed:
        print(f"{failed} trials failed; try them again with: {repeated}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
