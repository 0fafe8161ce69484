"""python -m orchestrator.slurm: submit a sweep to Slurm, and see how its jobs stand."""

import sys
from pathlib import Path

from orchestrator.slurm.flags import parse
from orchestrator.slurm.status import print_status
from orchestrator.slurm.submit import submit
from sampler.cli import Parser, run_command
from sampler.errors import InputError

USAGE = """usage: python -m orchestrator.slurm submit --nodes N --time T [flags] -- <flags of the sweep>
       python -m orchestrator.slurm status DIR

submit --help and status --help say more."""


def main() -> None:
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
    elif command == "submit":
        print(submit(parse(arguments)))
    elif command == "status":
        print_status(_folder(arguments))
    else:
        raise InputError(f"{command!r} is no command: submit and status are allowed (see --help)")


def _folder(arguments: list[str]) -> Path:
    parser = Parser(
        prog="python -m orchestrator.slurm status",
        description="What Slurm says of a sweep's jobs, and how the sweep stands.",
        examples="example:\n  python -m orchestrator.slurm status results/demo",
    )
    parser.add_argument("folder", metavar="DIR", help="a sweep's folder, such as results/demo")
    return Path(parser.parse_args(arguments).folder)


if __name__ == "__main__":
    run_command(main)
