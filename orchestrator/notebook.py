"""The interface for notebooks and scripts: `load_sweep` opens results, `run_sweep` runs the command.

Loading and analysing a sweep imports neither torch nor Ray.
"""

import html
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.analysis import Analysis
from orchestrator.analysis.trial_facts import actor_startups
from orchestrator.cli.console import aliases
from orchestrator.cli.sweep import parse_sweep
from orchestrator.core.untrusted import printable
from orchestrator.planning.fields import Setting
from orchestrator.planning.settings import ALL_SETTINGS
from orchestrator.progress.status import SweepStatus, read_status
from orchestrator.progress.table import groups_of
from orchestrator.report.charts import RenderedFigure
from orchestrator.report.figures import start_drawing
from orchestrator.report.section import Section, build_section
from orchestrator.report.sweeps import SweepData, open_sweep, read_sweeps
from orchestrator.store import Store
from orchestrator.store.schema import ROWS
from sampler.errors import InputError, InputErrors, counted

TITLES = ("task", "configuration", "documents", "accuracy %", "tokens/s", "speed-up")
ERROR = "error: "


def load_sweep(folder: str | Path) -> "Sweep":
    """The sweep in a directory such as results/demo, also while it runs."""
    open_sweep(Path(folder))  # reports what is wrong now, not when the first value is used
    return Sweep(Path(folder))


def run_sweep(**settings: Any) -> "Sweep":
    """Runs `reuse-sweep sweep` with settings by the names of its flags, and prints what it prints.

    Running it again with the same settings continues the sweep. Raises InputError for wrong settings, and RuntimeError
    if the sweep fails.
    """
    flags = list(_flags(settings))
    parse_sweep(flags)  # all problems with the settings, before a process is started
    command = [sys.executable, "-m", "orchestrator.cli", "sweep", *flags]
    lines: list[str] = []
    # A session of its own: Ctrl-C in a terminal would reach it twice, which means "stop at once".
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            print(process.stdout.read(), end="", flush=True)  # how to continue
            raise
    printed = [line.rstrip("\n") for line in lines if line.strip()]
    errors = [line.removeprefix(ERROR) for line in printed if line.startswith(ERROR)]
    if process.returncode == 2 and errors:
        raise InputErrors(errors)
    if process.returncode:
        raise RuntimeError("; ".join(errors or printed[-1:]) or f"the sweep ended with code {process.returncode}")
    return load_sweep(printed[-1])  # the command prints the directory last


def _flags(settings: dict[str, Any]) -> Iterator[str]:
    """The flags of these settings. None means the default."""
    names = {**{setting.key: field for field, setting in ALL_SETTINGS.items()}, "config": "config"}
    for name, value in settings.items():
        key = name.replace("_", "-")
        key = aliases(ALL_SETTINGS).get(key, key)
        if key not in names:
            similar = get_close_matches(key, names, n=1)
            hint = f"did you mean {names[similar[0]]}?" if similar else "docs/settings.md lists them"
            raise InputError(f"unknown setting {name!r}; {hint}")
        if value is not None:
            yield from [f"--config={value}"] if key == "config" else _flag(ALL_SETTINGS[names[key]], value)


def _flag(setting: Setting, value: Any) -> list[str]:
    if setting.kind is bool and not setting.many:
        if not isinstance(value, bool):
            raise InputError(f"{setting.name} must be True or False (got {value!r})")
        negated = [f"--no-{setting.key}"] if setting.negatable else []
        return [setting.flag] if value else negated
    values = [value] if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
    words = [{True: "on", False: "off"}[one] if isinstance(one, bool) else str(one) for one in values]
    return [f"{setting.flag}={word}" for word in (words if setting.repeatable else [",".join(words)])]


class Sweep:
    """The results of a sweep. Analyses and figures are computed once: load a running sweep again to see new rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, columns: Sequence[str] | None = None) -> pa.Table:
        """One row per trial and document, as stored so far; the columns are those of docs/format.md."""
        unknown = [name for name in columns or () if name not in ROWS.names]
        if unknown:
            raise InputError(f"unknown column {unknown[0]!r}; columns are {', '.join(ROWS.names)}")
        return Store(self.folder).rows(columns=columns)

    def documents(self, task: str) -> pa.Table:
        """Questions, choices and gold answers of a task."""
        return Store(self.folder).documents(task)

    def to_pandas(self, columns: Sequence[str] | None = None) -> Any:
        """`rows` as a pandas DataFrame."""
        if find_spec("pandas") is None:
            raise InputError(
                "to_pandas() needs pandas, which is not installed; rows() returns an Arrow table without it"
            )
        return self.rows(columns).to_pandas()

    @property
    def status(self) -> SweepStatus:
        """What is done, missing and failed now, as `reuse-sweep status` shows it."""
        return read_status(self.folder)

    def analysis(self, *, margin: float | None = None, speedup: float | None = None) -> Analysis:
        """Paired comparisons and verdicts; a margin or speed-up other than the declared one is exploratory."""
        if margin is None and speedup is None:
            return self._section.analysis
        return build_section(self._data, margin=margin, speedup=speedup, figures=False).analysis

    @property
    def verdicts(self) -> list[str]:
        """A sentence per task, and one on all tasks together."""
        return self._section.verdicts

    def figure(self, name: str = "tradeoff", task: str | None = None) -> RenderedFigure:
        """A figure of the report, by its file name without the task; by default, of the first task that has it.

        Notebooks display it; its attributes `svg` and `png` contain the files.
        """
        known = []
        for figure in self._figures():
            known.append(figure.name)
            if figure.name in (name, f"{task}-{name}") or (task is None and figure.name.endswith(f"-{name}")):
                return figure
        raise InputError(f"there is no figure {name!r}{f' of {task}' if task else ''}; there are {', '.join(known)}")

    def _figures(self) -> Iterator[RenderedFigure]:
        """Draws the figures one after the other, so that the caller can stop at the one it needs."""
        return chain.from_iterable(start_drawing(self._section.analysis, actor_startups(self._data.attempts), ""))

    @cached_property
    def _data(self) -> SweepData:
        (data,) = read_sweeps([self.folder])
        return data

    @cached_property
    def _section(self) -> Section:
        return build_section(self._data, figures=False)

    def __repr__(self) -> str:
        status = self.status
        documents = f"{status.documents:,} of {counted(status.wanted, 'document')}"
        return f"Sweep({str(self.folder)!r}, {status.state}, {documents})"

    def _repr_html_(self) -> str:
        """State, totals and verdicts, for notebooks."""
        status = self.status
        model = (status.record.get("model") or {}).get("source", "unknown model")
        try:
            verdicts = self.verdicts
        except InputError as problem:  # no rows yet, or nothing to compare with
            verdicts = [f"no verdict: {problem}"]
        head = f"<b>{_text(status.record.get('sweep') or self.folder.name)}</b>: {_text(model)}, {_text(status.state)}"
        titles = "".join(f"<th>{title}</th>" for title in TITLES)
        rows = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in _table(status))
        sentences = "".join(f"<li>{_text(sentence)}</li>" for sentence in verdicts)
        return f"<div><p>{head}</p><table><tr>{titles}</tr>{rows}</table><ul>{sentences}</ul></div>"


def _table(status: SweepStatus) -> Iterator[tuple[str, ...]]:
    for group in groups_of(status.totals):
        for line in group.lines:
            yield (
                group.title,
                line.configuration.policy,
                f"{line.documents:,} of {line.wanted:,}",
                "–" if line.accuracy is None else f"{100 * line.accuracy:.1f}",
                "–" if line.tokens_per_s is None else f"{line.tokens_per_s:,.1f}",
                "–" if line.speedup is None else f"{line.speedup:.2f}×",
            )


def _text(value: object) -> str:
    return html.escape(printable(str(value)))
