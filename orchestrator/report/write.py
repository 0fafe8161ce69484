"""Writes the report of one or several sweeps. All content is computed before the first file is written.

index.html                                      of a directory of sweeps: all of them, with links
report.html                                     a single page that loads nothing
results.md                                      its tables
figures/<name>.svg, .png
summaries/<task>[_limit_N]/<configuration>/summary.json
"""

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from orchestrator.analysis.gates import IMPORTED
from orchestrator.analysis.results import Comparison
from orchestrator.core.untrusted import path_below, printable
from orchestrator.report import tables, text
from orchestrator.report.section import Section, build_section
from orchestrator.report.summaries import (
    EarlierExperiment,
    configuration_summaries,
    read_earlier_experiment,
    read_summary,
)
from orchestrator.report.sweeps import process_pool_map, read_sweeps, sequential_map
from orchestrator.report.text import Cell, Table, TableRow, estimate_cell, number_cell, text_cell
from orchestrator.store import Store
from orchestrator.store.files import DISK, make_folders, remove_quietly, write_file
from orchestrator.store.reader import SWEEP_FILE
from sampler.errors import InputError, counted

PAGE = "report.html"
INDEX = "index.html"
INDEX_TITLES = (
    *("sweep", "model", "task", "documents", "configurations", "k=1 accuracy %", "best within the margin"),
    *("difference, points", "speed-up", "verdict", "last row"),
)
POOL_MIN_TRIALS = 400  # with fewer trials, starting processes takes longer than the report
TEMPLATES = Path(__file__).with_name("templates")
TEXT_FILTERS = ("number", "percent", "whole", "interval")
CONTENTS = (  # id and title of the page's parts
    ("verdict", "Verdict"),
    ("results", "Complete results"),
    ("figures", "Figures"),
    ("gates", "Validity checks"),
    ("explanations", "Where the speed-up comes from"),
    ("regressions", "Regressions"),
    ("earlier", "Earlier experiment"),
    ("provenance", "Provenance"),
    ("missing", "Missing results"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenReport:
    verdicts: tuple[str, ...]
    page: Path
    problems: tuple[str, ...] = ()  # what is corrupted or missing


def write_report(
    folders: Sequence[Path],
    *,
    out: Path | None = None,
    compare: Path | None = None,
    margin: float | None = None,
    speedup: float | None = None,
    figures: bool = True,
    records: Mapping[Path, Mapping[str, Any]] | None = None,
) -> WrittenReport:
    """Compute the content of all files, then write them. Raises InputError if the rows cannot be read or compared.

    `records` has the content of sweep.json for directories where the caller has read it already.
    By default the report of one sweep is written into its directory, that of several into `merged/` of the first.
    """
    earlier = None if compare is None else read_earlier_experiment(compare)
    large = sum(len(Store(folder).trial_ids()) for folder in folders) >= POOL_MIN_TRIALS
    with process_pool_map() if large else nullcontext(sequential_map) as parallel:
        groups = read_sweeps(folders, parallel, records)
        prefixes = ["" if len(groups) == 1 else f"s{number}-" for number in range(1, len(groups) + 1)]
        sections = [
            build_section(data, prefix=prefix, margin=margin, speedup=speedup, figures=figures, parallel=parallel)
            for data, prefix in zip(groups, prefixes, strict=True)
        ]
    target = Path(out) if out is not None else Path(folders[0])
    if out is None and len(folders) > 1:
        target = path_below(target, f"merged/{PAGE}").parent
    files = {
        **dict(_figure_files(sections)),
        **dict(_summary_files(sections)),
        "results.md": printable(results_markdown(sections, earlier)).encode(),
        PAGE: printable(render_page(sections, earlier, folders)).encode(),
    }
    write_all(target, files)
    _remove_outdated_summaries(target, files)
    problems = [*(notice for data in groups for notice in data.reading_notices), *_missing(sections)]
    return WrittenReport(verdicts=tuple(_verdicts(sections)), page=target / PAGE, problems=tuple(problems))


def _missing(sections: Sequence[Section]) -> Iterator[str]:
    missing = [sentence for section in sections for sentence in section.missing()]
    if missing:
        more = f" ({counted(len(missing) - 1, 'more gap')} in the report)" if len(missing) > 1 else ""
        yield f"missing: {missing[0]}{more}"


def sweeps_below(folder: Path) -> list[Path]:
    """The sweeps directly below a directory that is not a sweep itself."""
    if (folder / SWEEP_FILE).exists() or not folder.is_dir():
        return []
    return sorted(path.parent for path in folder.glob(f"*/{SWEEP_FILE}"))


def write_index(
    folders: Sequence[Path],
    target: Path,
    *,
    margin: float | None = None,
    speedup: float | None = None,
    figures: bool = True,
) -> Path:
    """index.html with all sweeps, their verdicts and links to their reports, which are written where missing."""
    rows: list[TableRow] = []
    missing: list[tuple[str, str]] = []
    for folder in folders:
        try:
            (data,) = read_sweeps([folder])
            section = build_section(data, figures=False, margin=margin, speedup=speedup)
            if not (folder / PAGE).exists():
                write_report([folder], figures=figures)
            rows += _index_rows(section, folder, target)
        except InputError as problem:  # for instance, no rows yet
            missing.append((folder.name, str(problem)))
    table = Table(name="Sweeps", titles=INDEX_TITLES, rows=tuple(rows))
    page = _render("index.html.j2", title=f"Sweeps in {target.resolve().name}", sections=[table], missing=missing)
    write_all(target, {INDEX: printable(page).encode()})
    return target / INDEX


def _index_rows(section: Section, folder: Path, target: Path) -> Iterator[TableRow]:
    """One row per task: k=1, and the best configuration within the margin (low end of its interval)."""
    link = quote(Path(os.path.relpath(folder / PAGE, target)).as_posix())
    origin = " (imported)" if IMPORTED in section.request else ""
    for view in section.tasks:
        inside = [
            (result, result.comparison)
            for result in view.task.configurations
            if result.comparison is not None and result.comparison.difference.points.low > -section.criteria.margin
        ]
        best = max(inside, key=lambda pair: _merit(pair[1]), default=None)
        speedup = None if best is None or best[1].speedup is None else best[1].speedup.tokens
        baseline = view.task.baselines[0].accuracy if view.task.baselines else None
        ended = max(one.counters.ended for one in view.configurations)
        yield TableRow(
            cells=(
                Cell(text=folder.name, link=link),
                text_cell(f"{section.model}{origin}"),
                text_cell(view.task.task),
                number_cell(view.task.documents, 0),
                number_cell(len(view.configurations), 0),
                estimate_cell(baseline, 1, 100),
                text_cell("none within the margin" if best is None else best[0].label),
                estimate_cell(None if best is None else best[1].difference.points, 1, sign=True),
                estimate_cell(speedup if view.generates else None, 2, unit="×"),
                Cell(text=view.task.verdict.outcome, badge=True),
                text_cell(f"{ended:%Y-%m-%d}"),
            )
        )


def _merit(comparison: Comparison) -> tuple[float, float]:
    speed = None if comparison.speedup is None else comparison.speedup.tokens
    return 0.0 if speed is None else speed.value, comparison.difference.points.value


def _verdicts(sections: Sequence[Section]) -> Iterator[str]:
    for section in sections:
        prefix = f"{section.model}: " if len(sections) > 1 else ""
        yield from (f"{prefix}{verdict}" for verdict in section.verdicts)


def _figure_files(sections: Sequence[Section]) -> Iterator[tuple[str, bytes]]:
    for section in sections:
        for figure in section.figures:
            yield f"figures/{figure.name}.svg", figure.svg
            yield f"figures/{figure.name}.png", figure.png


def _summary_files(sections: Sequence[Section]) -> Iterator[tuple[str, bytes]]:
    for section in sections:
        for name, summary in configuration_summaries(section):
            content = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"
            yield f"summaries/{section.prefix}{name}/summary.json", content


def write_all(target: Path, files: Mapping[str, bytes]) -> None:
    """Write each file completely or not at all, in this order (so the page never names files that do not exist).

    Names contain data, such as policies and subtasks: InputError if one would lead out of `target`.
    """
    paths = {name: path_below(target, name) for name in files}
    try:
        for name, data in files.items():
            path = paths[name]
            make_folders(DISK, path.parent)
            write_file(DISK, path, data)
    except OSError as problem:
        raise InputError(f"cannot write to {target}: {problem.strerror or problem}") from problem


def _remove_outdated_summaries(target: Path, files: Mapping[str, bytes]) -> None:
    """Remove summaries of an earlier report that had other directory names (another limit, other varying settings).

    A reader of all summaries would find a configuration twice. Files that no report wrote stay.
    """
    for path in (target / "summaries").glob("*/*/summary.json"):
        if path.relative_to(target).as_posix() not in files and _is_from_a_report(path):
            path_below(target, path.relative_to(target).as_posix())
            remove_quietly(path)
            for folder in (path.parent, path.parent.parent):
                if not any(folder.iterdir()):
                    folder.rmdir()


def _is_from_a_report(path: Path) -> bool:
    try:
        return read_summary(path).ours
    except InputError:
        return False


def render_page(sections: Sequence[Section], earlier: EarlierExperiment | None, folders: Sequence[Path]) -> str:
    """One HTML page that loads nothing.

    jinja2 escapes everything that a model or a dataset wrote. The content security policy allows only the page's own
    style sheet and script, by their hashes, and images in data URIs.
    """
    models = list(dict.fromkeys(section.model for section in sections))
    return _render(
        "report.html.j2",
        sections=sections,
        title=f"Layer reuse in {' and '.join(models)}",
        folders=folders,
        earlier=earlier,
        contents=[entry for entry in CONTENTS if entry[0] != "earlier" or earlier is not None],
    )


def results_markdown(sections: Sequence[Section], earlier: EarlierExperiment | None = None) -> str:
    """The content of results.md. Every value is escaped; tables (Markup) have escaped their cells already."""
    markdown = templates().overlay(autoescape=False, finalize=_escaped_for_markdown)
    return markdown.get_template("results.md.j2").render(sections=sections, earlier=earlier).rstrip() + "\n"


def _escaped_for_markdown(value: object) -> str:
    return value if isinstance(value, Markup) else text.escape_markdown(str(value))


def _render(template: str, **values: Any) -> str:
    css, js = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    return templates().get_template(template).render(css=css, js=js, content_security_policy=policy, **values)


def templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("orchestrator.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(text, name) for name in TEXT_FILTERS} | {"counted": counted}
    environment.filters["data_uri"] = _svg_data_uri
    environment.globals["tables"] = tables
    return environment


def _svg_data_uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
