"""python -m tools.scale: how far a sweep can grow on one machine. Measures and prints figures with their bounds."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from orchestrator.cli.console import Parser, run_command
from sampler.errors import InputError
from tools.scale.figures import Figure
from tools.scale.measurements import measure_actors, measure_planning, measure_status, measure_trials

PARTS: Mapping[str, Callable[[Path], list[Figure]]] = {
    "trials": measure_trials,
    "few": lambda folder: [*measure_actors(folder / "1", actors=1), *measure_actors(folder / "8", actors=8)],
    "actors": measure_actors,
    "rows": measure_status,
    "plan": measure_planning,
}

EXAMPLES = """examples:
  python -m tools.scale                 every part
  python -m tools.scale rows plan --json
"""


def main() -> None:
    arguments = _parser().parse_args()
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        raise InputError(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    all_figures: list[Figure] = []
    for name in arguments.parts or PARTS:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="reuse-scale-", ignore_cleanup_errors=True) as folder:
            figures = PARTS[name](Path(folder))
        all_figures += figures
        if not arguments.json:
            print(*(figure.line() for figure in figures), sep="\n", flush=True)
    if arguments.json:
        print(json.dumps([asdict(figure) | {"good": figure.good} for figure in all_figures], indent=1))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tools.scale",
        description="Measures many trials, many actors, a million rows and a long plan. Needs no model.",
        examples=EXAMPLES,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


if __name__ == "__main__":
    run_command(main)
