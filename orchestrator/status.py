"""python -m orchestrator.status: how a sweep stands, from its folder alone and at any time. Knows no Ray."""

import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.progress.status import SweepStatus, read_status
from orchestrator.progress.view import SweepView, duration
from orchestrator.store import Store
from sampler.cli import Parser, run_command

LISTED = 10  # failures and damaged files told one by one
EXAMPLES = """examples:
  python -m orchestrator.status results/demo            a table, while the sweep runs or after
  python -m orchestrator.status results/demo --json     the same for programs
  python -m orchestrator.status results/demo --check    also reads every byte and names what is damaged
  watch -n 10 python -m orchestrator.status results/demo

keys of --json (more may be added, none will go):
  state           complete, running (a living process writes to the folder) or stopped
  writer          host, pid, since of that process, else null
  last_row        when a row was last written
  documents       done, wanted, missing
  trials          wanted; of these finished, running, unfinished (begun, but
                  not at work), failed, pending (not begun)
  failures        trial_id, label, attempts, reason
  configurations  task, policy, threshold, small_block, block_cache; documents,
                  wanted, missing; scored, correct, accuracy, accuracy_low,
                  accuracy_high (Wilson, 95 %); tokens, seconds (of the batches),
                  tokens_per_s, calibration (tokens/s); against the pooled k=1:
                  speedup (each side by its calibration), layer_positions
  damage          sentences; set_aside: files moved away earlier, damaged or
                  run again by --force
  schema, folder, sweep, model, settings (as in sweep.json)

exit code: 0, or 2 where there is no sweep to be read or --check found damage
"""


def main() -> None:
    parser = Parser(
        prog="python -m orchestrator.status",
        description="How a sweep stands: what was asked for, what is done, what failed, what is missing.",
        examples=EXAMPLES,
    )
    parser.add_argument("folder", metavar="DIR", help="a sweep's folder, such as results/demo")
    parser.add_argument("--json", action="store_true", help="one JSON object, its keys as below")
    parser.add_argument("--check", action="store_true", help="read every byte of every file (slow on a large sweep)")
    arguments = parser.parse_args()
    folder = Path(arguments.folder)
    status = read_status(folder)
    damage = list(dict.fromkeys((*status.damage, *(Store(folder).check() if arguments.check else ()))))
    if arguments.json:
        print(json.dumps({**status.as_json(), "damage": damage}, indent=1))
    else:
        show(status, damage)
    if arguments.check and damage:
        sys.exit(2)


def show(status: SweepStatus, damage: Sequence[str]) -> None:
    with SweepView() as view:
        for line in (*_request(status), _state(status), ""):
            view.note(line)
        view.table(status.totals)
        for line in ("", *_counts(status), *_failures(status), *_damage(status, damage), *status.notices):
            view.note(line)


def _request(status: SweepStatus) -> Iterator[str]:
    request, settings, model = status.record, status.record["settings"], status.record.get("model") or {}
    revision = f" at {model['revision'].removeprefix('sha256:')[:12]}" if model.get("revision") else ""
    yield f"{request.get('sweep') or status.folder.name}: {model.get('source', 'an unknown model')}{revision}"
    tasks = ", ".join(f"{task} ({facts['documents']:,} documents)" for task, facts in request["tasks"].items())
    named = [f"{name} {settings[name]}" for name in ("limit", "sample") if settings.get(name)]
    named += [f"{settings['repeats']} repeats"] if settings["repeats"] > 1 else []
    yield "; ".join((tasks, f"{len(settings['policies'])} policies", *named))


def _state(status: SweepStatus) -> str:
    last, writer = status.last_row, status.writer
    ago = "" if last is None else f"; last row {duration(max(0.0, (datetime.now(UTC) - last).total_seconds()))} ago"
    if writer is not None:
        return f"running: process {writer.pid} on {writer.host} since {writer.since}{ago}"
    goes_on = "the same command continues it, with every task and policy below"  # it may have grown by several
    words = {"complete": "complete", "stopped": f"stopped: {goes_on}"}
    return words[status.state] + ago


def _counts(status: SweepStatus) -> Iterator[str]:
    missing = f", {status.missing:,} missing" if status.missing else ""
    yield f"documents: {status.documents:,} of {status.wanted:,}{missing}"
    states = ", ".join(f"{count:,} {state}" for state, count in status.trials.items() if count)
    yield f"trials: {states or 'none'} of {sum(status.trials.values()):,}"


def _failures(status: SweepStatus) -> Iterator[str]:
    for failure in status.failures[:LISTED]:
        yield f"failed: {failure.label} ({failure.attempts} attempts): {failure.reason}"
    if len(status.failures) > LISTED:
        yield f"failed: {len(status.failures) - LISTED} more, see --json"


def _damage(status: SweepStatus, damage: Sequence[str]) -> Iterator[str]:
    for sentence in damage[:LISTED]:
        yield f"corrupted: {sentence}"
    if len(damage) > LISTED:
        yield f"corrupted: {len(damage) - LISTED} more, see --json"
    if status.set_aside:
        yield f"{status.set_aside} files, corrupted or run again, were moved to {status.folder / 'quarantine'}"


if __name__ == "__main__":
    run_command(main)
