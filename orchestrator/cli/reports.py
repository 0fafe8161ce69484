"""Commands that read the directory of a sweep, during the sweep or later: status, report, export, track; and import."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.console import Parser, announce, parse_options, run_command, say
from orchestrator.core.system import TRACKER_PACKAGES
from orchestrator.core.untrusted import path_below
from orchestrator.planning.fields import setting, shared
from orchestrator.planning.settings import SweepSettings
from sampler.errors import InputError, counted

if TYPE_CHECKING:
    from orchestrator.progress.status import SweepStatus

LISTED = 10  # failures and corrupted files printed one by one
STATUS_EXAMPLES = """examples:
  reuse-sweep status results/demo            a table, while the sweep runs or after
  reuse-sweep status results/demo --json     the same as JSON, for programs
  reuse-sweep status results/demo --check    also reads every byte and reports corrupted files
  watch -n 10 reuse-sweep status results/demo

keys of --json (more may be added, none will be removed):
  state           complete, running (a live process writes to the directory) or
                  stopped
  writer          host, pid and since of that process, else null
  last_row        time of the last row
  documents       done, wanted, missing
  trials          wanted, and by state: finished, running, unfinished (begun,
                  not running), failed, pending (not begun), skipped (a race
                  does not need them any more)
  failures        trial_id, label, attempts, reason, documents (reasons by id)
  configurations  task, policy, threshold, small_block, block_cache, reveal;
                  documents, wanted, missing; scored, correct, accuracy, accuracy_low,
                  accuracy_high (Wilson, 95 %); tokens, seconds (of batches),
                  tokens_per_s, calibration (tokens/s); against the pooled k=1:
                  speedup (each side by its calibration), layer_positions
                  race: null, or state (racing, confirmed, rejected or
                  finished), documents, planned, look (evidence so far),
                  log_e_confirm, log_e_reject and goal (what decides),
                  documents_saved, seconds_saved, seconds_saved_at_end
  corrupted       a sentence for each corrupted file
  quarantined     number of corrupted files, and of those replaced by --force
  damage, set_aside: the former names of these two keys
  notices         a sentence for each column of a newer version that is ignored
  imported        by configuration, the files it was imported from; null if the
                  sweep ran here
  schema, folder, sweep, model, settings (as in sweep.json)

exit code: 0; 2 if there is no readable sweep, or if --check found corruption
"""
REPORT_EXAMPLES = """examples:
  reuse-sweep report results/my-sweep --open
  reuse-sweep report results/monday results/tuesday --out reports/both
  reuse-sweep report results                          an index.html of all sweeps below a directory
  reuse-sweep report results/my-sweep --compare examples/seed-results
  reuse-sweep report results/my-sweep --margin 3      exploratory: not the margin declared before the run
Sweeps of the same model and settings are merged. Different ones get separate sections and are never paired.
"""
IMPORT_EXAMPLES = """examples:
  reuse-sweep import lm-eval vllm/* --name engines --as vllm       the first import is the baseline
  reuse-sweep import lm-eval sglang/* --name engines --as sglang   must have the same documents and prompts
  reuse-sweep import lm-eval sglang/* --name referee --as sglang --against results/my-sweep
  reuse-sweep report results/engines

lm-eval writes the samples with its flag log_samples. They are paired by document, and accuracy gets the same verdict
as in a sweep. Speeds are compared only if every sample has the keys "seconds" and "tokens", which lm-eval itself does
not write.
"""
TRACK_EXAMPLES = """examples:
  reuse-sweep track results/demo --to tensorboard        event files below results/demo/trackers/tensorboard
  reuse-sweep track results/demo --to mlflow,wandb       variables such as MLFLOW_TRACKING_URI set the server

Only sends what a tracker does not have yet. Each configuration of each task becomes a run with accuracy, tokens_per_s,
speedup and documents, plotted over the number of documents.
"""
EXPLORATORY = "to use instead of the declared one, which makes verdicts exploratory"
EXPORT_EXAMPLES = """examples:
  reuse-sweep export --lm-eval results/my-sweep
  reuse-sweep export --lm-eval results/my-sweep --out exported
  reuse-sweep export --csv results/my-sweep
  reuse-sweep export --hub OWNER/NAME --from results/my-sweep --dry-run
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusOptions:
    folder: Path = setting(positional=True, metavar="DIR", help="directory of a sweep, such as results/demo")
    json: bool = setting(False, help="print one JSON object with the keys below")
    check: bool = setting(False, help="read every byte of every file (slow on a large sweep)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    folders: tuple[Path, ...] = setting(positional=True, metavar="DIR", help="directory of a sweep")
    out: Path | None = setting(
        None, metavar="DIR", default_text="DIR, or merged/ in the first of several", help="output directory"
    )
    compare: Path | None = setting(
        None, metavar="OLD", help="directory with summary.json files of an earlier experiment"
    )
    margin: float | None = shared(SweepSettings, "margin", default=None, help=f"margin {EXPLORATORY}")
    speedup: float | None = shared(SweepSettings, "speedup", default=None, help=f"speed-up {EXPLORATORY}")
    no_figures: bool = setting(False, help="write the report without figures, which is faster")
    open: bool = setting(False, help="open the report in a browser")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    lm_eval: Path | None = setting(None, metavar="DIR", help="export the sweep in this directory as lm-eval files")
    csv: Path | None = setting(None, metavar="DIR", help="export the rows of the sweep in this directory as a CSV file")
    out: Path | None = setting(None, default_text="DIR/lm-eval or DIR/rows.csv", help="output directory or CSV file")
    hub: str | None = setting(None, metavar="OWNER/NAME", help="push rows, documents and a card to this Hub dataset")
    from_: Path | None = setting(None, metavar="DIR", help="directory of the sweep to push")
    public: bool = setting(False, help="with --hub: make the dataset public instead of private")
    dry_run: bool = setting(False, help="with --hub: only print what would be pushed")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    format: str = setting(positional=True, metavar="FORMAT", choices=("lm-eval",), help="format of the files: lm-eval")
    files: tuple[Path, ...] = setting(
        positional=True, metavar="FILE", help="samples_*.jsonl and results_*.json, or directories of them"
    )
    name: str = shared(
        SweepSettings, "name", default=MISSING, default_text=None, help="directory of the imported sweep, below --out"
    )
    as_: str = setting(metavar="LABEL", help="name of the configuration, such as vllm-0.11")
    against: Path | None = setting(
        None,
        metavar="DIR",
        default_text="the first import",
        help="the baseline: the k=1 runs of this sweep",
    )
    metric: str | None = setting(None, default_text="the task's primary metric", help="metric that counts as accuracy")
    margin: float = shared(SweepSettings, "margin")
    speedup: float = shared(SweepSettings, "speedup")
    out: str = shared(SweepSettings, "out")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackOptions:
    folder: Path = setting(positional=True, metavar="DIR", help="directory of a sweep")
    to: tuple[str, ...] = shared(
        SweepSettings, "track", default=MISSING, repeatable=False, help="trackers: " + ", ".join(TRACKER_PACKAGES)
    )


def status(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep status",
        description="Shows the progress of a sweep: what is done, what failed and what is missing.",
        examples=STATUS_EXAMPLES,
    )
    options = parse_options(parser, StatusOptions, arguments)
    from orchestrator.progress.status import read_status
    from orchestrator.store import Store

    sweep = read_status(options.folder)
    if options.check:
        sweep = replace(sweep, corrupted=tuple(dict.fromkeys((*sweep.corrupted, *Store(options.folder).check()))))
    if options.json:
        print(json.dumps(sweep.as_json(), indent=1))
    else:
        print_status(sweep)
    if options.check and sweep.corrupted:
        sys.exit(2)


def report(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep report",
        description="Writes report.html, results.md, figures/ and summaries/ from the rows of a sweep.",
        examples=REPORT_EXAMPLES,
    )
    options = parse_options(parser, ReportOptions, arguments)
    announce(f"reading {', '.join(map(str, options.folders))}")
    from orchestrator.report.write import sweeps_below, write_index, write_report

    several = sweeps_below(options.folders[0]) if len(options.folders) == 1 else []
    if several and options.compare is not None:
        raise InputError(f"--compare needs one sweep, and {options.folders[0]} has {len(several)}; choose one of them")
    if several:
        target = options.out or options.folders[0]
        figures = not options.no_figures
        page = write_index(several, target, margin=options.margin, speedup=options.speedup, figures=figures)
        say(page)
        if options.open:
            _open(page)
        return
    written = write_report(
        options.folders,
        out=options.out,
        compare=options.compare,
        margin=options.margin,
        speedup=options.speedup,
        figures=not options.no_figures,
    )
    for problem in written.problems:
        say(problem, error=True)
    say(*written.verdicts, written.page, sep="\n")
    if options.open:
        _open(written.page)


def _open(page: Path) -> None:
    import webbrowser

    webbrowser.open(page.resolve().as_uri())


def export(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep export",
        description="Exports a sweep as lm-eval files or CSV, or pushes it to the Hugging Face Hub.",
        examples=EXPORT_EXAMPLES,
    )
    options = parse_options(parser, ExportOptions, arguments)
    if sum(target is not None for target in (options.lm_eval, options.csv, options.hub)) != 1:
        raise InputError("choose one of --lm-eval DIR, --csv DIR and --hub OWNER/NAME")
    if (options.hub is None) != (options.from_ is None):
        raise InputError("--hub OWNER/NAME and --from DIR must be used together")
    for flag, is_set in (("--public", options.public), ("--dry-run", options.dry_run)):
        if is_set and options.hub is None:
            raise InputError(f"{flag} must be used with --hub OWNER/NAME")
    if options.hub is not None and options.out is not None:
        raise InputError("--out must not be used with --hub, which writes no files here")
    announce("reading the rows")
    from orchestrator.progress.status import read_status
    from orchestrator.report.exports import check_repository, export_csv, export_hub, export_lm_eval

    if options.hub is not None:
        check_repository(options.hub)
    sweep = read_status(options.lm_eval or options.csv or options.from_ or Path())
    if options.lm_eval is not None:
        for folder in export_lm_eval(options.lm_eval, options.out, sweep.record):
            say(folder)
    elif options.csv is not None:
        say(export_csv(options.csv, options.out, sweep.record))
    elif options.hub is not None:
        pushed = export_hub(sweep.folder, options.hub, sweep.record, public=options.public, dry_run=options.dry_run)
        say(*pushed, sep="\n")
    if sweep.missing:
        missing = f"{sweep.missing:,} of {counted(sweep.wanted, 'document')} are missing"
        say(f"the sweep is unfinished: {missing}", error=True)


def import_(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep import",
        description="Imports results that lm-eval wrote with another engine, as a configuration of an imported sweep.",
        examples=IMPORT_EXAMPLES,
    )
    options = parse_options(parser, ImportOptions, arguments)
    from orchestrator.report.lm_eval_import import import_lm_eval

    folder = path_below(Path(options.out), options.name)
    notices = import_lm_eval(
        options.files,
        folder,
        options.as_,
        against=options.against,
        metric=options.metric,
        margin=options.margin,
        speedup=options.speedup,
    )
    say(*notices, sep="\n")
    say(folder)


def track(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep track",
        description="Sends totals and verdicts of a sweep to experiment trackers, as `sweep --track` does in a run.",
        examples=TRACK_EXAMPLES,
    )
    options = parse_options(parser, TrackOptions, arguments)
    from orchestrator.progress.trackers import TrackerProcesses, check_installed
    from orchestrator.report.sweeps import open_sweep

    open_sweep(options.folder)
    check_installed(options.to)
    with TrackerProcesses(options.folder, options.to, say, timeout=None) as children:
        pass
    say(*(f"{name}: up to date" for name in options.to if name not in children.failed), sep="\n")
    if children.failed:
        sys.exit(1)


def feed_tracker(folder: str, name: str) -> None:
    """The entry point of a tracker's process; see orchestrator/progress/trackers.py."""
    from orchestrator.progress.trackers import feed

    run_command(lambda: feed(Path(folder), name, lambda: _tracker_summary(Path(folder))))


def _tracker_summary(folder: Path) -> dict[str, dict[str, str]]:
    """Verdict and provenance of each run; empty if nothing can be compared yet."""
    from orchestrator.report.section import build_section
    from orchestrator.report.sweeps import read_sweeps

    try:
        (data,) = read_sweeps([folder])
        section = build_section(data, figures=False)
    except InputError:
        return {}
    known = {name: text for name, text in section.provenance() if name in ("model", "code", "device", "torch")}
    return {
        f"{task.task}/{result.configuration.slug()}": {
            "verdict": "baseline" if result.comparison is None else result.comparison.verdict.sentence,
            **known,
        }
        for task in section.analysis.tasks
        for result in task.configurations
    }


def print_status(sweep: "SweepStatus") -> None:
    from orchestrator.cli.sweep import continue_line
    from orchestrator.progress.view import SweepView

    with SweepView() as view:
        for line in (*_request_lines(sweep), _state_line(sweep), ""):
            view.note(line)
        view.table(sweep.totals, sweep.race)
        for line in (
            "",
            *_count_lines(sweep),
            *_race_lines(sweep),
            *_failure_lines(sweep),
            *_corruption_lines(sweep),
            *sweep.notices,
            *([continue_line(sweep)] if sweep.state == "stopped" and not sweep.record.get("imported") else ()),
        ):
            view.note(line)


def _request_lines(sweep: "SweepStatus") -> Iterator[str]:
    request, settings, model = sweep.record, sweep.record["settings"], sweep.record.get("model") or {}
    revision = f" at {model['revision'].removeprefix('sha256:')[:12]}" if model.get("revision") else ""
    yield f"{request.get('sweep') or sweep.folder.name}: {model.get('source', 'an unknown model')}{revision}"
    tasks = ", ".join(f"{task} ({counted(facts['documents'], 'document')})" for task, facts in request["tasks"].items())
    named = [f"{name} {settings[name]}" for name in ("limit", "sample") if settings.get(name)]
    named += [f"{settings['repeats']} repeats"] if settings["repeats"] > 1 else []
    kind = ("imported configuration", None) if sweep.record.get("imported") else ("policy", "policies")
    yield "; ".join((tasks, counted(len(settings["policies"]), *kind), *named))


def _state_line(sweep: "SweepStatus") -> str:
    from orchestrator.progress.view import duration

    last, writer = sweep.last_row, sweep.writer
    ago = "" if last is None else f"; last row {duration(max(0.0, (datetime.now(UTC) - last).total_seconds()))} ago"
    if writer is not None:
        return f"running: process {writer.pid} on {writer.host} since {writer.since}{ago}"
    if sweep.state == "complete":
        return f"complete{ago}"
    return f"stopped{ago}"


def _count_lines(sweep: "SweepStatus") -> Iterator[str]:
    missing = f", {sweep.missing:,} missing" if sweep.missing else ""
    yield f"documents: {sweep.documents:,} of {sweep.wanted:,}{missing}"
    states = ", ".join(f"{count:,} {state}" for state, count in sweep.trials.items() if count)
    yield f"trials: {states or 'none'} of {sum(sweep.trials.values()):,}"


def _race_lines(sweep: "SweepStatus") -> Iterator[str]:
    from orchestrator.progress.table import describe_evidence
    from orchestrator.progress.view import race_summary

    if sweep.race:
        yield race_summary(sweep.race)
    for entry in sweep.race:
        if entry.look is not None:
            documents = f"{entry.look.documents:,} of {entry.planned:,} documents"
            state = f"{entry.task} {entry.configuration.label()} is {entry.state} after {documents}"
            yield f"  {state}: {describe_evidence(entry)}, goal {entry.rules.speedup:g}x"


def _failure_lines(sweep: "SweepStatus") -> Iterator[str]:
    for failure in sweep.failures[:LISTED]:
        yield f"failed: {failure.label} ({counted(failure.attempts, 'attempt')}): {failure.reason}"
    if len(sweep.failures) > LISTED:
        yield f"failed: {len(sweep.failures) - LISTED} more, see --json"


def _corruption_lines(sweep: "SweepStatus") -> Iterator[str]:
    for sentence in sweep.corrupted[:LISTED]:
        yield f"corrupted: {sentence}"
    if len(sweep.corrupted) > LISTED:
        yield f"corrupted: {len(sweep.corrupted) - LISTED} more, see --json"
    if sweep.quarantined:
        files = counted(sweep.quarantined, "corrupted or replaced file")
        yield f"{files} moved to {sweep.folder / 'quarantine'}"
