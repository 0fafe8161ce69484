"""python -m tools.faults: injects faults into real sweeps and checks that nothing is lost."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from orchestrator.cli.console import Parser, run_command
from orchestrator.running.stop import Aborted
from sampler.errors import InputError
from tools.faults.campaign import CampaignSettings, Round, exit_on_signals, open_lane, run_rounds
from tools.faults.faults import FAULTS
from tools.faults.results import (
    CampaignResult,
    Journal,
    code_version,
    failures,
    measure_restart,
    page,
    summary,
    table,
    time_command,
)
from tools.faults.row_checker import read_reference
from tools.faults.sweep import write_case

PRIVATE_MOUNTS = "REUSE_FAULTS_PRIVATE_MOUNTS"  # set if other processes do not see the mounts of this one
EXAMPLES = """examples:
  python -m tools.faults --runs 20 --seed 1          twenty faults
  python -m tools.faults --seed 1 --round 4          repeats the faults of one round
  python -m tools.faults --runs 200 --write docs/faults.md
  python -m tools.faults --runs 1000 --journal faults.jsonl --minutes 60     one hour; repeat it for the next one

exit code: 0 if no problem was found, else 1; also 1 if the campaign was interrupted
"""


def main() -> None:
    arguments = _parser().parse_args()
    for name in ("runs", "round", "lanes", "minutes", "worker_timeout"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise InputError(f"--{name.replace('_', '-')} must be above 0 (got {value})")
    for name in ("write", "journal"):
        value = getattr(arguments, name)
        if value is not None and (Path(value).is_dir() or not Path(value).parent.is_dir()):
            raise InputError(f"--{name} must be a file in an existing directory (got {value})")
    _enter_private_mounts()
    exit_on_signals()
    try:
        result = run_campaign(arguments)
    except Aborted as aborted:
        print(f"error: {aborted}", file=sys.stderr)
        sys.exit(1)
    print(*summary(result), "", *table(result), *failures(result), sep="\n")
    if result.failed or result.interrupted:
        sys.exit(1)


def run_campaign(arguments: argparse.Namespace) -> CampaignResult:
    """Runs a campaign in a temporary folder, which is kept if a problem was found."""
    began = time.monotonic()
    journal = None if arguments.journal is None else Journal(Path(arguments.journal), arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="reuse-faults-"))
    case = write_case(folder / "case", worker_timeout_seconds=arguments.worker_timeout)
    settings = CampaignSettings(case=case, folder=folder, seed=arguments.seed, reference={})
    with open_lane(settings, 0) as lane:
        sweep = lane.new_sweep(0)
        undisturbed = time_command(sweep)
        settings = replace(settings, reference=read_reference(sweep.folder))
        cost = None
        if arguments.round is None:
            print("measuring the cost of continuing a killed sweep", file=sys.stderr, flush=True)
            cost = measure_restart(undisturbed, lane.new_sweep(0))
        result = CampaignResult(
            seed=arguments.seed,
            requested=arguments.runs,
            disk=lane.disk.kind,
            impossible=tuple(name for name in FAULTS if name not in lane.possible_faults()),
            cost=cost,
            code_versions=(code_version(),),
        )
    if journal is not None:
        result, began = journal.continue_result(result), began - journal.seconds
        settings = replace(settings, rounds_done=frozenset(ended.number for ended in journal.rounds))
    try:
        for ended in _rounds(settings, arguments, result):
            result = result.with_round(ended, seconds=time.monotonic() - began)
            if journal is not None:
                journal.add(ended, seconds=result.seconds)
            _write_page(result, arguments.write)
            print(f"{len(result.outcomes)} faults so far", file=sys.stderr, flush=True)
    except SystemExit:  # by a signal; the results so far are printed
        result = replace(result, interrupted=True)
    _write_page(result, arguments.write)  # also if the journal had all rounds already
    if result.failed:
        print(f"output of the commands and folders with problems: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _write_page(result: CampaignResult, path: str | None) -> None:
    if path is not None:
        Path(path).write_text(page(result), encoding="utf-8")


def _rounds(settings: CampaignSettings, arguments: argparse.Namespace, result: CampaignResult) -> Iterator[Round]:
    if arguments.round is None:
        missing = result.requested - len(result.outcomes)
        yield from run_rounds(settings, lanes=arguments.lanes, faults=missing, seconds=60 * arguments.minutes)
    else:
        with open_lane(settings, 0) as lane:
            yield lane.run_round(arguments.round)


def _enter_private_mounts() -> None:
    """Restarts this command in a mount namespace of its own; does nothing where that is not permitted."""
    if PRIVATE_MOUNTS in os.environ:
        return
    unshare = ["unshare", "--mount", "--propagation", "private"]
    if os.getuid() != 0:
        unshare += ["--user", "--map-root-user"]
    try:
        permitted = subprocess.run([*unshare, "true"], capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return
    if permitted:
        os.environ[PRIVATE_MOUNTS] = "1"
        os.execvp("unshare", [*unshare, sys.executable, "-m", "tools.faults", *sys.argv[1:]])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tools.faults",
        description="Runs sweeps of a very small model, injects faults at random moments, and compares the rows with "
        "those of an undisturbed sweep.",
        examples=EXAMPLES,
    )
    parser.add_argument("--runs", type=int, default=20, help="number of faults (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="decides the order and times of the faults (default: 0)")
    parser.add_argument("--round", type=int, help="repeat only this round of the seed's campaign")
    parser.add_argument("--lanes", type=int, default=2, help="sweeps that run at a time (default: 2)")
    parser.add_argument("--minutes", type=float, default=600, help="start no new round after this time (default: 600)")
    parser.add_argument("--worker-timeout", type=float, default=10, help="of the sweeps, in seconds (default: 10)")
    parser.add_argument("--journal", metavar="FILE", help="record each round; recorded rounds are not repeated")
    parser.add_argument("--write", metavar="FILE", help="write the result as a Markdown page after each round")
    return parser


if __name__ == "__main__":
    run_command(main)
