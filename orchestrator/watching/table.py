"""Totals as lines of text for a terminal: one table for a running view, its end and a status. Knows no clock."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.text import Text

from orchestrator.watching.tally import Totals
from sampler.subsets import SUBSETS

INDENT = 2
ASIDE = 14  # titles up to this long stand beside their first row, others above it
BAR = ""  # the title of the column with bars


@dataclass(frozen=True, kw_only=True, slots=True)
class Glyphs:
    """Signs that not every terminal can write."""

    full: str = "█"
    empty: str = "░"
    plus_minus: str = "±"
    times: str = "×"
    none: str = "–"
    cut: str = "…"


ASCII = Glyphs(full="#", empty=".", plus_minus="+-", times="x", none="-", cut="~")


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The policies of one task and one choice of decode settings."""

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
    needed: int  # where there is no room, the highest number goes first
    cell: Callable[[Totals, int], Text]


def groups_of(totals: Sequence[Totals]) -> tuple[Group, ...]:
    """Tasks as they come, settings and policies in their natural order: trials run, and rows come, in a random one."""
    tasks = list(dict.fromkeys(line.configuration.task for line in totals))
    ordered = sorted(totals, key=lambda line: (tasks.index(line.configuration.task), line.configuration.settings))
    varying = _varying(totals)
    grouped = [sorted(lines, key=_place) for _, lines in groupby(ordered, key=_group)]
    return tuple(Group(title=_title(lines[0], varying), lines=tuple(lines)) for lines in grouped)


class Table:
    """Draws groups into a given width, with a bar for each configuration while there is something to wait for."""

    def __init__(self, groups: Sequence[Group], *, width: int, glyphs: Glyphs, bars: bool) -> None:
        self._groups, self._glyphs, self._width = groups, glyphs, width
        lines = [line for group in groups for line in group.lines]
        longest = max((len(line.configuration.policy) for line in lines), default=0)
        count = max((len(_count(line)) for line in lines), default=0)
        title = max((len(group.title) for group in groups), default=0)
        self._aside = title <= ASIDE and width >= 78
        self._lead = title + 1 if self._aside else INDENT
        columns = self._fitting(count, width - self._lead - min(longest, 12), bars)
        taken = sum(2 + column.width for column in columns)
        self._name = max(4, min(max(longest, 9), width - self._lead - taken))
        spare = max(0, width - self._lead - self._name - taken)
        self._columns = [replace(c, width=c.width + min(22, spare)) if c.title == BAR else c for c in columns]

    def all(self) -> list[Text]:
        entries = [(group, self._row(line)) for group in self._groups for line in group.lines]
        return [self._titles(), *self._with_heads(entries)]

    def page(self, height: int, number: int) -> list[Text]:
        """At most `height` lines: finished and waiting groups shrink to a line; what still has no room takes turns."""
        if len(everything := self.all()) <= height:
            return everything
        entries: list[tuple[Group, Text]] = []
        for group in self._groups:
            rows = [self._row(line) for line in group.lines] if group.active else [self._folded(group)]
            entries += [(group, row) for row in rows]
        if len(folded := self._with_heads(entries)) < height:
            return [self._titles(), *folded]
        pages = self._pages(entries, max(2, height - 2))
        number %= len(pages)
        note = Text(f"part {number + 1} of {len(pages)}; they take turns", style="dim")
        return [self._titles(), *self._with_heads(pages[number]), self._cropped(note)]

    def bar(self, done: int, wanted: int, width: int) -> Text:
        filled = width if done >= wanted else width * done // wanted
        text = Text(self._glyphs.full * filled, style="green" if done >= wanted else "cyan")
        return text.append(self._glyphs.empty * (width - filled), style="dim")

    def _fitting(self, count: int, room: int, bars: bool) -> list[_Column]:
        columns = [
            _Column(title=BAR, width=8, needed=3, cell=lambda t, width: self.bar(t.documents, t.wanted, width)),
            _Column(title="documents", width=max(9, count), needed=2, cell=_right(_count)),
            _Column(title="accuracy %", width=11, needed=0, cell=_right(self._accuracy)),
            _Column(title="tokens/s", width=8, needed=1, cell=_right(self._speed)),
            _Column(title="speed-up", width=8, needed=1, cell=_right(lambda t: self._times(t.speedup))),
            _Column(title="layers", width=6, needed=4, cell=_right(lambda t: self._times(t.layer_positions))),
        ]
        columns.remove(columns[-1] if bars else columns[0])  # 80 columns have no room for both
        while len(columns) > 1 and sum(2 + column.width for column in columns) > room:
            columns.remove(max(reversed(columns), key=lambda column: column.needed))
        return columns

    def _pages(self, entries: list[tuple[Group, Text]], height: int) -> list[list[tuple[Group, Text]]]:
        pages: list[list[tuple[Group, Text]]] = [[]]
        for entry in entries:
            if pages[-1] and len(self._with_heads([*pages[-1], entry])) > height:
                pages.append([])
            pages[-1].append(entry)
        return pages

    def _with_heads(self, entries: list[tuple[Group, Text]]) -> list[Text]:
        lines: list[Text] = []
        shown: Group | None = None
        for group, row in entries:
            new, whole = group is not shown, row.plain.startswith(group.title)
            if new and not whole and not self._aside:
                lines.append(Text(group.title, style="bold"))
            lead = Text("" if whole else (group.title if new and self._aside else "").ljust(self._lead), style="bold")
            lines.append(lead.append_text(row))
            shown = group
        return [self._cropped(line) for line in lines]

    def _titles(self) -> Text:
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
        policies = f"{len(group.lines)} {'policy' if len(group.lines) == 1 else 'policies'}"
        state = f"{'finished' if group.documents else 'waiting'}, {group.documents:,} of {group.wanted:,} documents"
        return Text(f"{group.title}: {policies} {state}", style="not bold green" if group.documents else "not bold dim")

    def _accuracy(self, line: Totals) -> str:
        if line.accuracy is None or line.accuracy_low is None or line.accuracy_high is None:
            return self._glyphs.none
        half = (line.accuracy_high - line.accuracy_low) / 2
        return f"{100 * line.accuracy:.1f} {self._glyphs.plus_minus}{100 * half:.1f}"

    def _speed(self, line: Totals) -> str:
        return self._glyphs.none if line.tokens_per_s is None else f"{line.tokens_per_s:,.1f}"

    def _times(self, value: float | None) -> str:
        return self._glyphs.none if value is None else f"{value:.2f}{self._glyphs.times}"

    def _cropped(self, text: Text) -> Text:
        text.truncate(self._width)
        text.no_wrap = True
        return text


def _right(write: Callable[[Totals], str]) -> Callable[[Totals, int], Text]:
    return lambda line, width: Text(write(line).rjust(width))


def _group(line: Totals) -> tuple[object, ...]:
    return line.configuration.task, line.configuration.settings


def _place(line: Totals) -> tuple[object, ...]:
    """k1_first, k1_middle, k1_last, k2_first, …, k10_first; then what is no such policy, by name."""
    policy = line.configuration.policy
    rule, _, rest = policy.partition("_")
    layers, _, option = rest.partition(".")
    number = int(rule[1:]) if rule[:1] == "k" and rule[1:].isdigit() else sys.maxsize
    known = ("", *SUBSETS)
    return number, option, known.index(layers) if layers in known else len(known), policy


def _varying(totals: Sequence[Totals]) -> tuple[bool, ...]:
    return tuple(len(set(values)) > 1 for values in zip(*(t.configuration.settings for t in totals), strict=True))


def _title(line: Totals, varying: Sequence[bool]) -> str:
    threshold, small_block, block_cache = line.configuration.settings
    named = (f"threshold {threshold:g}", f"small block {small_block}", f"block cache {'on' if block_cache else 'off'}")
    return ", ".join((line.configuration.task, *(name for name, shown in zip(named, varying, strict=True) if shown)))


def _count(line: Totals) -> str:
    return f"{line.documents}/{line.wanted}"


def _cut(text: str, width: int, glyphs: Glyphs) -> str:
    """From the middle: policies differ at their beginning (k2, k3) and at their end (first, last.output)."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + glyphs.cut + text[len(text) - tail :]
