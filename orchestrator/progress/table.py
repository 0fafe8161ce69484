"""Totals as lines of text, for the live view, the end of a sweep and the status command."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.text import Text

from orchestrator.core.configuration import varying_settings
from orchestrator.core.evidence import MAX_LOG_E
from orchestrator.core.race import RACING, RaceEntry
from orchestrator.core.totals import Totals
from sampler.errors import counted
from sampler.policy import SUBSETS

INDENT = 2
INLINE_TITLE_WIDTH = 14  # titles up to this long are on the line of their first row, others above it
BAR = ""  # title of the column with bars


@dataclass(frozen=True, kw_only=True, slots=True)
class Glyphs:
    """Characters that not every terminal can print."""

    full: str = "█"
    empty: str = "░"
    dash: str = "–"
    times: str = "×"
    cut: str = "…"


ASCII = Glyphs(full="#", empty=".", dash="-", times="x", cut="~")


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The policies of one task with the same decode settings."""

    title: str
    lines: tuple[Totals, ...]

    @property
    def documents(self) -> int:
        return sum(line.documents for line in self.lines)

    @property
    def wanted(self) -> int:
        return sum(line.wanted for line in self.lines)

    @property
    def active(self) -> bool:
        return 0 < self.documents < self.wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    title: str
    width: int
    drop_order: int  # if the table is too wide, the highest number is dropped first
    cell: Callable[[Totals, int], Text]


def groups_of(totals: Sequence[Totals]) -> tuple[Group, ...]:
    """Tasks in the order given; settings and policies in their natural order, since rows arrive in random order."""
    tasks = list(dict.fromkeys(line.task for line in totals))
    ordered = sorted(totals, key=lambda line: (tasks.index(line.task), line.configuration.settings))
    varying = {task: varying_settings(line.configuration for line in totals if line.task == task) for task in tasks}
    groups = []
    for (task, _), lines in groupby(ordered, key=lambda line: (line.task, line.configuration.settings)):
        rows = sorted(lines, key=_policy_order)
        title = ", ".join(filter(None, (task, rows[0].configuration.settings_label(varying[task]))))
        groups.append(Group(title=title, lines=tuple(rows)))
    return tuple(groups)


class TerminalTable:
    """Renders groups within a given width; `bars` adds a progress bar per configuration."""

    def __init__(
        self, groups: Sequence[Group], *, width: int, glyphs: Glyphs, bars: bool, race: Sequence[RaceEntry] = ()
    ) -> None:
        self._groups, self._glyphs, self._width = groups, glyphs, width
        self._race = {entry.key: entry for entry in race}
        lines = [line for group in groups for line in group.lines]
        longest = max((len(line.configuration.policy) for line in lines), default=0)
        count = max((len(_count(line)) for line in lines), default=0)
        title = max((len(group.title) for group in groups), default=0)
        self._inline_titles = title <= INLINE_TITLE_WIDTH and width >= 78
        self._lead = title + 1 if self._inline_titles else INDENT
        columns = self._fitting_columns(count, width - self._lead - min(longest, 12), bars)
        taken = sum(2 + column.width for column in columns)
        self._name = max(4, min(max(longest, 9), width - self._lead - taken))
        spare = max(0, width - self._lead - self._name - taken)
        self._columns = [replace(c, width=c.width + min(22, spare)) if c.title == BAR else c for c in columns]

    def all(self) -> list[Text]:
        entries = [(group, self._row(line)) for group in self._groups for line in group.lines]
        return [self._header(), *self._with_titles(entries)]

    def page(self, height: int, number: int) -> list[Text]:
        """At most `height` lines: finished and waiting groups shrink to one line; what does not fit is paged."""
        if len(everything := self.all()) <= height:
            return everything
        entries: list[tuple[Group, Text]] = []
        for group in self._groups:
            rows = [self._row(line) for line in group.lines] if group.active else [self._folded(group)]
            entries += [(group, row) for row in rows]
        if len(folded := self._with_titles(entries)) < height:
            return [self._header(), *folded]
        pages = self._pages(entries, max(2, height - 2))
        number %= len(pages)
        note = Text(f"page {number + 1} of {len(pages)}", style="dim")
        return [self._header(), *self._with_titles(pages[number]), self._cropped(note)]

    def bar(self, done: int, wanted: int, width: int) -> Text:
        filled = width if done >= wanted else width * done // wanted
        text = Text(self._glyphs.full * filled, style="green" if done >= wanted else "cyan")
        return text.append(self._glyphs.empty * (width - filled), style="dim")

    def _fitting_columns(self, count: int, width: int, bars: bool) -> list[_Column]:
        columns = [
            _Column(title=BAR, width=8, drop_order=3, cell=lambda t, width: self.bar(t.documents, t.wanted, width)),
            _Column(title="documents", width=max(9, count), drop_order=2, cell=_right(_count)),
            _Column(title="accuracy %", width=14, drop_order=0, cell=_right(self._accuracy)),
            _Column(title="tokens/s", width=8, drop_order=1, cell=_right(self._speed)),
            _Column(title="speed-up", width=8, drop_order=1, cell=_right(lambda t: self._times(t.speedup))),
            _Column(title="layers", width=6, drop_order=4, cell=_right(self._layers)),
        ]
        columns.remove(columns[-1] if bars else columns[0])  # 80 characters do not fit both
        if self._race:
            columns.append(_Column(title="race", width=11, drop_order=1, cell=_right(self._race_state)))
            columns.append(_Column(title="evidence", width=26, drop_order=5, cell=_right(self._evidence)))
        while len(columns) > 1 and sum(2 + column.width for column in columns) > width:
            columns.remove(max(reversed(columns), key=lambda column: column.drop_order))
        return columns

    def _pages(self, entries: list[tuple[Group, Text]], height: int) -> list[list[tuple[Group, Text]]]:
        pages: list[list[tuple[Group, Text]]] = [[]]
        for entry in entries:
            if pages[-1] and len(self._with_titles([*pages[-1], entry])) > height:
                pages.append([])
            pages[-1].append(entry)
        return pages

    def _with_titles(self, entries: list[tuple[Group, Text]]) -> list[Text]:
        lines: list[Text] = []
        shown: Group | None = None
        for group, row in entries:
            new, folded = group is not shown, row.plain.startswith(group.title)
            if new and not folded and not self._inline_titles:
                lines.append(Text(group.title, style="bold"))
            title = group.title if new and self._inline_titles else ""
            lead = Text("" if folded else title.ljust(self._lead), style="bold")
            lines.append(lead.append_text(row))
            shown = group
        return [self._cropped(line) for line in lines]

    def _header(self) -> Text:
        text = Text(" " * (self._lead + self._name), style="dim")
        for column in self._columns:
            text.append("  " + column.title.rjust(column.width))
        return self._cropped(text)

    def _row(self, line: Totals) -> Text:
        name = _cut(line.configuration.policy, self._name, self._glyphs).ljust(self._name)
        text = Text(name, style="not bold" if line.documents else "not bold dim")
        for column in self._columns:
            text.append("  ").append_text(column.cell(line, column.width))
        return text

    def _folded(self, group: Group) -> Text:
        policies = counted(len(group.lines), "policy", "policies")
        done = f"{group.documents:,} of {counted(group.wanted, 'document')}"
        state = f"{'finished' if group.documents else 'waiting'}, {done}"
        return Text(f"{group.title}: {policies} {state}", style="not bold green" if group.documents else "not bold dim")

    def _accuracy(self, line: Totals) -> str:
        if line.accuracy is None or line.accuracy_low is None or line.accuracy_high is None:
            return self._glyphs.dash
        interval = f"{100 * line.accuracy_low:.0f}{self._glyphs.dash}{100 * line.accuracy_high:.0f}"
        return f"{100 * line.accuracy:.1f} ({interval})"

    def _speed(self, line: Totals) -> str:
        return self._glyphs.dash if line.tokens_per_s is None else f"{line.tokens_per_s:,.1f}"

    def _times(self, value: float | None) -> str:
        return self._glyphs.dash if value is None else f"{value:.2f}{self._glyphs.times}"

    def _layers(self, line: Totals) -> str:
        """As in the report: above 1, fewer layer-positions were computed than at k=1."""
        return self._times(1 / line.layer_positions if line.layer_positions else None)

    def _race_state(self, line: Totals) -> str:
        """The state; while racing, also how close the accuracy evidence is to its nearest decision."""
        entry = self._race.get(line.key)
        if entry is None:
            return self._glyphs.dash
        near = f" {100 * min(entry.nearest, 1):.0f} %" if entry.nearest is not None else ""
        return entry.state + (near if entry.state == RACING else "")

    def _evidence(self, line: Totals) -> str:
        entry = self._race.get(line.key)
        return self._glyphs.dash if entry is None or entry.look is None else describe_evidence(entry)

    def _cropped(self, text: Text) -> Text:
        text.truncate(self._width)
        text.no_wrap = True
        return text


def describe_evidence(entry: RaceEntry) -> str:
    """The e-value that is nearer to its decision, with what it must reach, and the bounds of the speed-up."""
    look, rules = entry.look, entry.rules
    assert look is not None
    confirms = look.log_e_plus / rules.log_e_confirm >= look.log_e_minus / rules.log_e_reject
    log_e, needed = (look.log_e_plus, rules.log_e_confirm) if confirms else (look.log_e_minus, rules.log_e_reject)
    value = "certain" if log_e >= MAX_LOG_E else f"{math.exp(log_e):.2g}"
    accuracy = f"E{'+' if confirms else '-'} {value}/{math.exp(needed):.0f}"
    bounds = f" {look.speedup_low:.2f}-{look.speedup_high:.2f}x" if look.speedup_low and look.speedup_high else ""
    return accuracy + bounds


def _right(write: Callable[[Totals], str]) -> Callable[[Totals, int], Text]:
    return lambda line, width: Text(write(line).rjust(width))


def _policy_order(line: Totals) -> tuple[object, ...]:
    """k1_first, k1_middle, k1_last, k2_first, …, k10_first; then other policies by name."""
    policy = line.configuration.policy
    rule, _, rest = policy.partition("_")
    layers, _, option = rest.partition(".")
    number = int(rule[1:]) if rule[:1] == "k" and rule[1:].isdigit() else sys.maxsize
    known = ("", *SUBSETS)
    return number, option, known.index(layers) if layers in known else len(known), policy


def _count(line: Totals) -> str:
    return f"{line.documents}/{line.wanted}"


def _cut(text: str, width: int, glyphs: Glyphs) -> str:
    """Cuts the middle: policies differ at the beginning (k2, k3) and at the end (first, last.output)."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + glyphs.cut + text[len(text) - tail :]
