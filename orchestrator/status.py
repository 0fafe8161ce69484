"""python -m orchestrator.status: how a sweep stands, from its folder alone and at any time. Knows no Ray."""

import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.store import Store
from orchestrator.watching.overview import Overview, look
from orchestrator.watching.view import SweepView, duration
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
    overview = look(folder)
    damage = list(dict.fromkeys((*overview.damage, *(Store(folder).check() if arguments.check else ()))))
    if arguments.json:
        print(json.dumps({**overview.as_json(), "damage": damage}, indent=1))
    else:
        show(overview, damage)
    if arguments.check and damage:
        sys.exit(2)


def show(overview: Overview, damage: Sequence[str]) -> None:
    with SweepView() as view:
        for line in (*_request(overview), _state(overview), ""):
            view.note(line)
        view.table(overview.totals)
        for line in ("", *_counts(overview), *_failures(overview), *_damage(overview, damage)):
            view.note(line)


def _request(overview: Overview) -> Iterator[str]:
    request, settings, model = overview.request, overview.request["settings"], overview.request.get("model") or {}
    revision = f" at {model['revision'].removeprefix('sha256:')[:12]}" if model.get("revision") else ""
    yield f"{request.get('sweep') or overview.folder.name}: {model.get('source', 'an unknown model')}{revision}"
    tasks = ", ".join(f"{task} ({facts['documents']:,} documents)" for task, facts in request["tasks"].items())
    named = [f"{name} {settings[name]}" for name in ("limit", "sample") if settings.get(name)]
    named += [f"{settings['repeats']} repeats"] if settings["repeats"] > 1 else []
    yield "; ".join((tasks, f"{len(settings['policies'])} policies", *named))


def _state(overview: Overview) -> str:
    last, writer = overview.last_row, overview.writer
    ago = "" if last is None else f"; last row {duration(max(0.0, (datetime.now(UTC) - last).total_seconds()))} ago"
    if writer is not None:
        return f"running: process {writer.pid} on {writer.host} since {writer.since}{ago}"
    goes_on = "the same command continues it, with every task and policy below"  # it may have grown by several
    words = {"complete": "complete", "stopped": f"stopped: {goes_on}"}
    return words[overview.state] + ago


def _counts(overview: Overview) -> Iterator[str]:
    missing = f", {overview.missing:,} missing" if overview.missing else ""
    yield f"documents: {overview.documents:,} of {overview.wanted:,}{missing}"
    states = ", ".join(f"{count:,} {state}" for state, count in overview.trials.items() if count)
    yield f"trials: {states or 'none'} of {sum(overview.trials.values()):,}"


def _failures(overview: Overview) -> Iterator[str]:
    for failure in overview.failures[:LISTED]:
        yield f"failed: {failure.label} ({failure.attempts} attempts): {failure.reason}"
    if len(overview.failures) > LISTED:
        yield f"failed: {len(overview.failures) - LISTED} more, see --json"


def _damage(overview: Overview, damage: Sequence[str]) -> Iterator[str]:
    for sentence in damage[:LISTED]:
        yield f"corrupted: {sentence}"
    if len(damage) > LISTED:
        yield f"corrupted: {len(damage) - LISTED} more, see --json"
    if overview.set_aside:
        yield f"{overview.set_aside} files, corrupted or run again, were moved to {overview.folder / 'quarantine'}"


if __name__ == "__main__":
    run_command(main)
