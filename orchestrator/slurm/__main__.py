"""python -m orchestrator.slurm: submit a sweep to Slurm, and show the status of its jobs."""

import sys
from pathlib import Path

from sampler.cli import Parser, run_command
from sampler.errors import InputError

USAGE = """usage: python -m orchestrator.slurm submit --nodes N --time T [flags] -- <flags of the sweep>
       python -m orchestrator.slurm status DIR

See submit --help and status --help."""


def main() -> None:
    """Imports what each command needs: the batch script waits for the last two, which it runs itself."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
    elif command == "submit":
        from orchestrator.slurm.flags import parse
        from orchestrator.slurm.submit import submit

        print(submit(parse(arguments)))
    elif command == "status":
        from orchestrator.slurm.status import print_status

        print_status(_folder(arguments))
    elif command == "free-ports":
        from orchestrator.slurm.in_job import free_ports

        print(*free_ports(int(arguments[0])))
    elif command == "wait-until-ready":
        from orchestrator.slurm.in_job import wait_until_ready

        address, nodes, folder = arguments
        wait_until_ready(address, int(nodes), Path(folder))
    else:
        raise InputError(f"the command must be submit or status (got {command!r}); see --help")


def _folder(arguments: list[str]) -> Path:
    parser = Parser(
        prog="python -m orchestrator.slurm status",
        description="Prints the state of a sweep's Slurm jobs, and of the sweep.",
        examples="example:\n  python -m orchestrator.slurm status results/demo",
    )
    parser.add_argument("folder", metavar="DIR", help="directory of a sweep, such as results/demo")
    return Path(parser.parse_args(arguments).folder)


if __name__ == "__main__":
    run_command(main)
