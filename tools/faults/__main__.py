"""python -m tools.faults: disturbs real sweeps and checks that nothing is lost. Prints a table of faults."""

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
from tools.faults.campaign import Round
from tools.faults.case import write_case
from tools.faults.cost import measure, timed
from tools.faults.faults import FAULTS
from tools.faults.journal import Journal, code
from tools.faults.lanes import Shared, campaign, end_on_signals, rounds
from tools.faults.ledger import reference_of
from tools.faults.table import Result, failures, page, summary, table

OWN_MOUNTS = "REUSE_CHAOS_OWN_MOUNTS"  # set where nobody else sees what this process mounts
EXAMPLES = """examples:
  python -m tools.faults --runs 20 --seed 1          twenty faults; a table at the end
  python -m tools.faults --seed 1 --round 4          the faults of one round again
  python -m tools.faults --runs 200 --write docs/faults.md
  python -m tools.faults --runs 1000 --journal faults.jsonl --minutes 60     an hour of it; again for the next

exit code: 0 if nothing was lost and nothing else was wrong, else 1; also 1 if it was interrupted
"""


def main() -> None:
    arguments = _parser().parse_args()
    for name in ("runs", "round", "lanes", "minutes", "worker_timeout"):
        given = getattr(arguments, name)
        if given is not None and given <= 0:
            raise InputError(f"--{name.replace('_', '-')} {given}: a number above 0 is allowed")
    for name in ("write", "journal"):
        given = getattr(arguments, name)
        if given is not None and not (Path(given).parent.is_dir() and not Path(given).is_dir()):
            raise InputError(f"--{name} {given}: a file in a folder that exists is allowed")
    _have_own_mounts()
    end_on_signals()
    try:
        result = run(arguments)
    except Aborted as aborted:
        print(f"error: {aborted}", file=sys.stderr)
        sys.exit(1)
    print(*summary(result), "", *table(result), *failures(result), sep="\n")
    if result.bad or result.interrupted:
        sys.exit(1)


def run(arguments: argparse.Namespace) -> Result:
    """The campaign in a folder of its own, which stays if something was wrong."""
    began = time.monotonic()
    journal = None if arguments.journal is None else Journal(Path(arguments.journal), arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="reuse-chaos-"))
    case = write_case(folder / "case", timeout=arguments.worker_timeout)
    empty = Shared(case=case, folder=folder, seed=arguments.seed, reference={})
    with campaign(empty, 0) as calm:
        scene = calm.scene(0)
        whole = timed(scene)
        shared = replace(empty, reference=reference_of(scene.folder))
        cost = None
        if arguments.round is None:
            print("measuring what continuing costs", file=sys.stderr, flush=True)
            cost = measure(whole, calm.scene(0))
        result = Result(
            seed=arguments.seed,
            asked=arguments.runs,
            disk=calm.disk.kind,
            left_out=tuple(name for name in FAULTS if name not in calm.names()),
            cost=cost,
            codes=(code(),),
        )
    if journal is not None:
        result, began = journal.continued(result), began - journal.seconds
        shared = replace(shared, done=frozenset(ended.number for ended in journal.rounds))
    try:
        for ended in _rounds(shared, arguments, result):
            result = result.grown(ended, seconds=time.monotonic() - began)
            if journal is not None:
                journal.add(ended, seconds=result.seconds)
            _write(result, arguments.write)
            print(f"{len(result.outcomes)} faults so far", file=sys.stderr, flush=True)
    except SystemExit:  # by a signal; what came out so far is told
        result = replace(result, interrupted=True)
    _write(result, arguments.write)  # also where a journal had all rounds already
    if result.bad:
        print(f"what the commands said, and folders that were wrong: {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _write(result: Result, path: str | None) -> None:
    if path is not None:
        Path(path).write_text(page(result), encoding="utf-8")


def _rounds(shared: Shared, arguments: argparse.Namespace, result: Result) -> Iterator[Round]:
    if arguments.round is None:
        missing = result.asked - len(result.outcomes)
        yield from rounds(shared, lanes=arguments.lanes, faults=missing, seconds=60 * arguments.minutes)
    else:
        with campaign(shared, 0) as made:
            yield made.run_round(arguments.round)


def _have_own_mounts() -> None:
    """Runs this command again where its mounts are its own and end with it; nothing happens where that is refused."""
    if OWN_MOUNTS in os.environ:
        return
    unshare = ["unshare", "--mount", "--propagation", "private"]
    if os.getuid() != 0:
        unshare += ["--user", "--map-root-user"]
    try:
        allowed = subprocess.run([*unshare, "true"], capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return
    if allowed:
        os.environ[OWN_MOUNTS] = "1"
        os.execvp("unshare", [*unshare, sys.executable, "-m", "tools.faults", *sys.argv[1:]])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tools.faults",
        description="Runs sweeps of a very small model, disturbs them at random moments, and compares their rows "
        "with those of an undisturbed sweep.",
        examples=EXAMPLES,
    )
    parser.add_argument("--runs", type=int, default=20, help="faults in all (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of their order and moments (default: 0)")
    parser.add_argument("--round", type=int, help="only the faults of this round of the seed's campaign")
    parser.add_argument("--lanes", type=int, default=2, help="sweeps disturbed at a time (default: 2)")
    parser.add_argument("--minutes", type=float, default=600, help="begin no round after so many (default: 600)")
    parser.add_argument("--worker-timeout", type=float, default=10, help="seconds, of the sweeps (default: 10)")
    parser.add_argument("--journal", metavar="FILE", help="keeps each round; the rounds it has are not run again")
    parser.add_argument("--write", metavar="FILE", help="the result as a page, after each round anew")
    return parser


if __name__ == "__main__":
    run_command(main)
