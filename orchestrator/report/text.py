"""Formats numbers, table cells and validity checks, alike for the page, Markdown and figures."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from orchestrator.analysis.accuracy import PairedDifference
from orchestrator.analysis.gates import UNTIMED, Finding
from orchestrator.analysis.intervals import Bounds, Estimate
from orchestrator.analysis.speedups import Speedup

NONE = "–"


def signed(value: float, places: int = 1) -> str:
    """A number with its sign; no sign if it rounds to zero."""
    if not math.isfinite(value):
        return NONE
    shown = f"{value:+.{places}f}"
    return shown.replace("-", "−") if float(shown) else shown[1:]


def number(value: float | None, places: int = 1) -> str:
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:,.{places}f}".replace("-", "−").replace(",", " ")


def percent(share: float | None, places: int = 1) -> str:
    return NONE if share is None or not math.isfinite(share) else f"{100 * share:.{places}f} %"


def whole(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


def interval(estimate: Estimate | None, places: int = 1, scale: float = 1.0, *, sign: bool = False) -> str:
    """Both ends, such as "71.2 to 75.9"; a dash if one is not finite."""
    if estimate is None or not all(map(math.isfinite, (estimate.low, estimate.high))):
        return NONE
    show = signed if sign else number
    return f"{show(estimate.low * scale, places)} to {show(estimate.high * scale, places)}"


def p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def hours(seconds: float) -> str:
    """Hours, with more decimals for short runs, which would otherwise be 0.00."""
    value = seconds / 3600
    return NONE if seconds == 0 else number(value, 2 if value >= 1 else 4)


def duration(seconds: float) -> str:
    """A time in its natural unit, such as "3 h 12 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def with_prefix(value: float | None) -> str:
    """A number with an SI prefix, such as "12.3 G"."""
    if value is None or not math.isfinite(value):
        return NONE
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or prefix == "T":
            break
        value /= 1000
    return f"{value:.3g} {prefix}"


def in_words(count: float) -> str:
    """A large count in words, such as "7.6 billion"."""
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if count >= unit:
            return f"{count / unit:.1f} {word}"
    return whole(count)


def layer_ranges(indices: tuple[int, ...]) -> str:
    """Layer indices as ranges, such as "1–12, 20"."""
    ranges: list[list[int]] = []
    for index in sorted(indices):
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in ranges) or NONE


def why_no_speedup(task_kind: str) -> str:
    """The beginning of a sentence on a task whose times are not compared."""
    if task_kind == UNTIMED:
        return "The times of these results are unknown"
    return "This task scores given options and generates no text"


def escape_markdown(text: str) -> str:
    """The text on one line, with HTML tags escaped."""
    return " ".join(text.split()).replace("<", "&lt;")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    text: str
    detail: str = ""  # an interval, for instance: a second line in the page, in parentheses in Markdown
    sort: float | str | None = None  # the number to sort by, "" if it is missing; None sorts by text
    badge: bool = False
    link: str = ""

    @property
    def markdown(self) -> str:
        return f"{self.text} ({self.detail})" if self.detail else self.text


MISSING = Cell(text=NONE, sort="")


def text_cell(text: str) -> Cell:
    return Cell(text=text)


def number_cell(value: float | None, places: int = 1, scale: float = 1.0, unit: str = "") -> Cell:
    if value is None:
        return MISSING
    return Cell(text=number(value * scale, places) + unit, sort=value)


def estimate_cell(
    value: Estimate | None, places: int = 1, scale: float = 1.0, unit: str = "", *, sign: bool = False
) -> Cell:
    """A value with its interval."""
    if value is None:
        return MISSING
    shown = signed(value.value * scale, places) if sign else number(value.value * scale, places)
    return Cell(text=shown + unit, detail=interval(value, places, scale, sign=sign), sort=value.value)


def p_value_cell(p: float | None) -> Cell:
    return MISSING if p is None else Cell(text=p_value(p), sort=p)


def flips_cell(difference: PairedDifference | None) -> Cell:
    if difference is None:
        return MISSING
    detail = f"{difference.lost} lost, {difference.won} won"
    return Cell(text=whole(difference.flips), detail=detail, sort=difference.flips)


def _bounds_cell(bounds: Bounds | None, places: int, *, sign: bool = False) -> Cell:
    """The one-sided bounds that the verdict compared with the declared values."""
    if bounds is None:
        return MISSING
    show = signed if sign else number
    return Cell(text=f"{show(bounds.low, places)} to {show(bounds.high, places)}", sort=bounds.low)


def difference_cell(difference: PairedDifference | None) -> Cell:
    return estimate_cell(None if difference is None else difference.points, 1, sign=True)


def accuracy_bounds_cell(difference: PairedDifference | None) -> Cell:
    return _bounds_cell(None if difference is None else difference.bounds, 1, sign=True)


def speedup_cell(speedup: Speedup | None) -> Cell:
    return estimate_cell(None if speedup is None else speedup.tokens, 2, unit="×")


def speed_bounds_cell(speedup: Speedup | None) -> Cell:
    return _bounds_cell(None if speedup is None else speedup.tokens_bounds, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    cells: tuple[Cell, ...]
    baseline: bool = False
    on_front: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    name: str  # for screen readers
    titles: tuple[str, ...]
    rows: tuple[TableRow, ...]

    @property
    def text_columns(self) -> list[bool]:
        """Which columns hold text; the others hold numbers."""
        return [bool(self.rows) and self.rows[0].cells[column].sort is None for column in range(len(self.titles))]

    @property
    def markdown(self) -> Markup:
        """The table in Markdown; cells are escaped."""
        rows = [self.titles, *([_markdown_cell(cell) for cell in row.cells] for row in self.rows)]
        header, *body = (f"| {' | '.join(cells)} |" for cells in rows)
        return Markup("\n".join([header, "|" + "---|" * len(self.titles), *body]))


def _markdown_cell(cell: Cell) -> str:
    return escape_markdown(cell.markdown).replace("|", "\\|")


def plain_table(name: str, titles: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """A table that marks neither the baseline nor the Pareto front."""
    return Table(name=name, titles=tuple(titles), rows=tuple(TableRow(cells=tuple(cells)) for cells in rows))


PASSED, WARNING, FAILED = "passed", "warning", "failed"
WHY_A_GATE_MATTERS = {
    "replay": "Layers ran that the policy should have replayed, or were replayed at k=1. The times then say nothing "
    "about layer reuse. This is a bug in the program, and rows from before its fix cannot be used.",
    "agreement at k=1": "All k=1 runs are the same computation. If their answers differ, something other than the "
    "policy changes results (a cache, state that leaks between batches), and may affect other configurations too.",
    "output mode": "In output mode no layer runs in a pass that replays, so the layers a policy names cannot matter. "
    "If they seem to, something other than the policy changes the results.",
    "one version": "Rows from different code or weights are not one experiment: a difference between configurations "
    "may come from the versions instead. Rerun the older trials, or report them separately.",
    "settings": "Rows ran with settings other than the requested ones, or do not record them. A difference may then "
    "come from the threshold, precision, batch size or device.",
    "output length": "Tokens per second reward repetition: a configuration that generates more looks faster than it "
    "is. Compare seconds per document instead, which cover the whole answer.",
    "every document once": "Each comparison uses the documents that both sides have. These are fewer than requested "
    "and may differ between configurations. Continue the sweep to add the missing documents.",
    "cold start": "An actor's first trial ran at a different speed than its later ones, as if without a warm-up. The "
    "configuration of such a trial looks slower than it is (or faster, if the calibration was slow).",
    "speed at k=1": "All k=1 runs are the same computation, and one was slower in all of its trials. Whatever "
    "slowed it may have slowed some policies and not others.",
    "own device": "Actors that share a GPU slow each other down. Accuracies are not affected; to measure speed, run "
    "the sweep with one actor per GPU (--gpus-per-actor 1).",
    "metrics": "Rows without a finite score or time cannot be part of any mean.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSummary:
    name: str
    state: str  # PASSED, WARNING or FAILED
    sentences: tuple[str, ...]
    explanation: str  # empty if the gate passed


def summarize_gates(findings: Sequence[Finding]) -> Iterator[GateSummary]:
    """One summary per gate, failed gates first."""
    by_gate: dict[str, list[Finding]] = {}
    for finding in findings:
        by_gate.setdefault(finding.gate, []).append(finding)
    summaries = [_summarize_gate(name, found) for name, found in by_gate.items()]
    yield from sorted(summaries, key=lambda gate: (FAILED, WARNING, PASSED).index(gate.state))


def _summarize_gate(name: str, findings: Sequence[Finding]) -> GateSummary:
    failed = [finding for finding in findings if not finding.ok]
    state = PASSED if not failed else FAILED if any(finding.withholds_verdict for finding in failed) else WARNING
    sentences = tuple(finding.sentence for finding in (failed or findings))
    return GateSummary(
        name=name, state=state, sentences=sentences, explanation=WHY_A_GATE_MATTERS.get(name, "") if failed else ""
    )
