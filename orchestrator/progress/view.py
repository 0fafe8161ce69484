"""Shows a sweep's progress: redrawn in place on a terminal, plain lines elsewhere, a table at the end.

with SweepView(quiet=False) as view:
    view.update(progress)                 # any number of times; the view limits how often it redraws
    view.note("a sentence to keep")       # stays above the live display
    view.finish(progress)                 # the table of all configurations
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from orchestrator.core.race import CONFIRMED, FINISHED, RACING, REJECTED, RaceEntry
from orchestrator.core.totals import Totals
from orchestrator.core.untrusted import printable
from orchestrator.progress.progress import Pace, Progress
from orchestrator.progress.table import ASCII, Glyphs, TerminalTable, groups_of
from sampler.errors import counted

DEFAULT_WIDTH = 80
REDRAW_SECONDS = 0.25
PAGE_SECONDS = 6.0  # for which a page of a long table is shown
LINE_SECONDS = 15.0  # between plain lines at first; later a fiftieth of the elapsed time


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to the command, where rich would exit with code 1."""
        raise BrokenPipeError


class SweepView:
    """Displays one sweep on one stream. Nothing is printed before the first update; the cursor is always restored."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stdout if stream is None else stream
        self._terminal = stream.isatty()
        self._console = _Console(file=stream, highlight=False, width=None if self._terminal else DEFAULT_WIDTH)
        self._glyphs = Glyphs() if _can_write(stream, Glyphs()) else ASCII
        self._quiet, self._clock, self._pace = quiet, clock, Pace()
        self._live_display = self._terminal and not self._console.is_dumb_terminal and not quiet
        self._started = clock()
        self._last: float | None = None
        self._live: Live | None = None
        self._size = self._console.size

    def __enter__(self) -> "SweepView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(keep=kind is not None)  # after an error, keep the last display

    def update(self, progress: Progress) -> None:
        now = self._clock()
        self._pace.observe(now, progress.totals)
        if self._quiet:
            return
        if self._live_display:
            self._draw(progress, now)
        elif self._last is None or now - self._last >= max(LINE_SECONDS, (now - self._started) / 50):
            self._last = now
            self._console.print(self.plain_line(progress), soft_wrap=True)

    def note(self, sentence: str) -> None:
        if not self._quiet:
            self._console.print(Text(printable(sentence)), soft_wrap=not self._terminal)

    def paragraph(self, sentence: str) -> None:
        """A long sentence, wrapped even in a file."""
        self._console.print(Text(printable(sentence)))

    def finish(self, progress: Progress) -> None:
        self.table(progress.totals, progress.race)
        missing = progress.wanted - progress.documents
        done = f"{progress.finished:,} of {counted(progress.trials, 'trial')} done"
        lost = f", {counted(missing, 'document')} missing" if missing > 0 else ""
        last = Text(f"{counted(progress.documents, 'document')}, {done}{lost}")
        if progress.failed:
            last.append(f", {progress.failed} failed", style="red")
        self._console.print(last, soft_wrap=not self._terminal)
        if progress.race:
            self._console.print(race_summary(progress.race), soft_wrap=not self._terminal)

    def table(self, totals: Sequence[Totals], race: Sequence[RaceEntry] = ()) -> None:
        """Prints all configurations, in place of the live display."""
        self._stop(keep=False)
        for line in end_table(totals, width=self._width(totals), glyphs=self._glyphs, race=race):
            self._console.print(line, soft_wrap=True)

    def screen(self, progress: Progress, *, width: int, height: int) -> list[Text]:
        """The live display, in fewer than `height` lines."""
        now = self._clock()
        groups = groups_of(progress.totals)
        table = TerminalTable(groups, width=width, glyphs=self._glyphs, bars=True, race=progress.race)
        elapsed = duration(now - self._started)
        head = Text(progress.sweep, style="bold")
        head.truncate(max(10, width - len(elapsed) - 2), overflow="crop")
        head.append(elapsed.rjust(width - head.cell_len), style="not bold dim")
        done, wanted = progress.documents, progress.wanted
        facts = f"  {done:,} of {counted(wanted, 'document')}{self._speed()}"
        overall = table.bar(done, wanted, max(5, width - len(facts))).append(facts)
        below = [self._trials(progress)]
        if progress.race:
            below.append(Text(race_summary(progress.race)))
        if progress.running:
            below.append(Text("now: " + ", ".join(progress.running), style="dim"))
        room = height - 1 - 2 - len(below)
        body = table.page(max(4, room), int((now - self._started) / PAGE_SECONDS))
        lines = [head, overall, *below, *([Text()] if len(body) < room else []), *body]
        for line in lines:
            line.truncate(width, overflow="ellipsis" if self._glyphs is not ASCII else "crop")
            line.no_wrap = True
        return lines[: max(1, height - 1)]

    def plain_line(self, progress: Progress) -> str:
        elapsed = duration(self._clock() - self._started)
        if not progress.documents and progress.warm < progress.actors:
            return f"{elapsed}  loading: {progress.warm} of {counted(progress.actors, 'actor')} warm"
        share = 100 * progress.documents // progress.wanted if progress.wanted else 100
        failed = f", {progress.failed} failed" if progress.failed else ""
        counts = f"{progress.documents:,}/{counted(progress.wanted, 'document')}, {share} %{self._speed(', ')}"
        return f"{elapsed}  {counts}; {progress.finished:,}/{counted(progress.trials, 'trial')}{failed}"

    def _draw(self, progress: Progress, now: float) -> None:
        if self._last is not None and now - self._last < REDRAW_SECONDS:
            return
        self._last = now
        if self._console.size != self._size:  # lines of another width cannot be overwritten
            self._stop(keep=False)
            self._size = self._console.size
            self._console.clear()
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        lines = self.screen(progress, width=self._size.width, height=self._size.height)
        self._live.update(Group(*lines), refresh=True)

    def _stop(self, *, keep: bool) -> None:
        if self._live is not None:
            self._live.transient = not keep
            self._live.stop()
            self._live = None

    def _speed(self, before: str = "  ") -> str:
        speed, left = self._pace.documents_per_s, self._pace.seconds_left
        shown = [] if speed is None else [f"{speed:.1f}/s"]
        if left is not None:
            shown.append(f"{duration(left)} left")
        return "".join(before + part for part in shown)

    def _trials(self, progress: Progress) -> Text:
        text = Text(f"trials {progress.finished:,} of {progress.trials:,} done, {len(progress.running)} running")
        if progress.failed:
            text.append(f", {progress.failed} failed", style="red")
        return text.append(f"   actors {progress.warm} of {progress.actors} warm")

    def _width(self, totals: Sequence[Totals]) -> int:
        """Lines in a file may exceed 80 columns if policy names are long."""
        longest = max((len(line.configuration.policy) for line in totals), default=0)
        return self._console.width if self._terminal else max(DEFAULT_WIDTH, longest + 70)


def end_table(totals: Sequence[Totals], *, width: int, glyphs: Glyphs, race: Sequence[RaceEntry] = ()) -> list[Text]:
    """All configurations; with progress bars if documents are missing."""
    bars = any(line.documents < line.wanted for line in totals)
    return TerminalTable(groups_of(totals), width=width, glyphs=glyphs, bars=bars, race=race).all()


def race_summary(race: Sequence[RaceEntry]) -> str:
    """A line on how many configurations are decided, and on the documents and time that this has saved."""
    states = Counter(entry.state for entry in race if entry.look is not None)
    decided = ", ".join(
        f"{states[state]} {state}" for state in (CONFIRMED, REJECTED, RACING, FINISHED) if states[state]
    )
    now, end = (sum(one.seconds_saved for one in race), sum(one.seconds_saved_at_end for one in race))
    documents = counted(sum(one.documents_saved for one in race), "document")
    later = f", {duration(end)} by the end if nothing else is decided" if states[RACING] else ""
    saved = duration(now if states[RACING] else end)
    return f"race: {decided or 'no evidence yet'}; saved {documents}, {saved} of decoding{later}"


def duration(seconds: float) -> str:
    """Formats seconds: 41 s, 1:41, 2:03:10."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def _can_write(stream: TextIO, glyphs: Glyphs) -> bool:
    signs = glyphs.full + glyphs.empty + glyphs.dash + glyphs.times + glyphs.cut
    try:
        signs.encode(stream.encoding or "utf-8")  # a stream without an encoding keeps str
    except UnicodeEncodeError:
        return False
    return True
