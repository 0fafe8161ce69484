"""The report of one or several folders, from rows to files. Everything is made before the first file is written.

report.html                                     the page
results.md                                      the experiment's tables
figures/<name>.svg, .png
summaries/<task>[_limit_N]/<configuration>/summary.json
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from orchestrator.analysis.earlier_results import read_summary
from orchestrator.report import text
from orchestrator.report.markdown import results_markdown
from orchestrator.report.section import Section, beside, read_earlier, section
from orchestrator.report.summaries import summaries
from orchestrator.report.sweeps import gather, one_by_one, side_by_side
from orchestrator.store import Store
from orchestrator.store.files import DISK, make_folders, remove_quietly, write_file
from sampler.errors import InputError

PAGE = "report.html"
LARGE = 400  # trials; of fewer, a report is written sooner than processes have started


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a terminal says of a report."""

    verdicts: tuple[str, ...]
    page: Path


def write_report(
    folders: Sequence[Path],
    *,
    out: Path | None = None,
    compare: Path | None = None,
    margin: float | None = None,
    speedup: float | None = None,
    figures: bool = True,
) -> Written:
    """Writes all files. InputError, and not one file, where no report can be made.

    One folder's report is written into it; that of several into the first one's `merged`, if `out` does not say.
    """
    old = None if compare is None else read_earlier(compare)
    with side_by_side() if _is_large(folders) else nullcontext(one_by_one) as mapped:
        materials = gather(folders, mapped)
        prefixes = ["" if len(materials) == 1 else f"s{number}-" for number in range(1, len(materials) + 1)]
        sections = [
            section(material, prefix=prefix, margin=margin, speedup=speedup, figures=figures, mapped=mapped)
            for material, prefix in zip(materials, prefixes, strict=True)
        ]
    target = Path(out) if out is not None else Path(folders[0]) if len(folders) == 1 else Path(folders[0]) / "merged"
    if old is not None and compare is not None:
        sections = [replace(one, earlier=beside(old, one.analysis.tasks, compare)) for one in sections]
    names = [str(folder) for folder in folders]
    files = {
        **_figures(sections),
        **_summaries(sections),
        "results.md": results_markdown(sections).encode(),
        PAGE: render(sections, title=_title(sections), folders=names).encode(),
    }
    write_all(target, files)
    _remove_outdated(target, files)
    return Written(verdicts=tuple(_verdicts(sections)), page=target / PAGE)


def _is_large(folders: Sequence[Path]) -> bool:
    return sum(len(Store(folder).trial_ids()) for folder in folders) >= LARGE


def _verdicts(sections: Sequence[Section]) -> Iterator[str]:
    for one in sections:
        of = f"{one.model}: " if len(sections) > 1 else ""
        yield from (f"{of}{verdict}" for verdict in one.verdicts)


def _title(sections: Sequence[Section]) -> str:
    models = list(dict.fromkeys(one.model for one in sections))
    return f"Layer reuse in {' and '.join(models)}"


def _figures(sections: Sequence[Section]) -> dict[str, bytes]:
    files = {}
    for one in sections:
        for picture in one.pictures:
            files[f"figures/{picture.name}.svg"] = picture.svg_file
            files[f"figures/{picture.name}.png"] = picture.png_file
    return files


def _summaries(sections: Sequence[Section]) -> dict[str, bytes]:
    files = {}
    for one in sections:
        for name, summary in summaries(one).items():
            path = f"summaries/{one.prefix}{name}/summary.json"
            files[path] = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    return files


def _remove_outdated(target: Path, files: Mapping[str, bytes]) -> None:
    """Summaries of an earlier report whose limit or varying settings were others: who reads a folder of summaries must
    not find two of one configuration. What no report wrote stays."""
    for path in (target / "summaries").glob("*/*/summary.json"):
        if path.relative_to(target).as_posix() not in files and _is_ours(path):
            remove_quietly(path)
            for folder in (path.parent, path.parent.parent):
                if not any(folder.iterdir()):
                    folder.rmdir()


def _is_ours(path: Path) -> bool:
    try:
        return read_summary(path).ours
    except InputError:
        return False


def write_all(target: Path, files: Mapping[str, bytes]) -> None:
    """Each file whole or not at all; the page comes last, so that it never speaks of files that are not there."""
    try:
        for name, data in files.items():
            path = target / name
            make_folders(DISK, path.parent)
            write_file(DISK, path, data)
    except OSError as problem:
        raise InputError(f"{target} cannot be written to: {problem.strerror or problem}") from problem


TEMPLATES = Path(__file__).with_name("templates")
FILTERS = (
    "signed",
    "number",
    "percent",
    "whole",
    "between",
    "p_value",
    "size",
    "magnitude",
    "layers",
    "counted",
    "hours",
)
CONTENTS = (
    ("verdict", "Verdict"),
    ("results", "Complete results"),
    ("gates", "Validity"),
    ("pictures", "Pictures"),
    ("explanations", "Why it is as fast as it is"),
    ("breaks", "Where it breaks"),
    ("earlier", "An earlier experiment"),
    ("provenance", "Provenance"),
    ("missing", "What is missing"),
)


def render(sections: Sequence[Section], *, title: str, folders: Sequence[str]) -> str:
    css, js = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    compared = any(section.earlier is not None for section in sections)
    contents = [entry for entry in CONTENTS if entry[0] != "earlier" or compared]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            sections=sections,
            title=title,
            folders=folders,
            contents=contents,
            css=css,
            js=js,
            policy=_policy(css, js),
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("orchestrator.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(text, name) for name in FILTERS}
    return environment


def _policy(css: str, js: str) -> str:
    return (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
