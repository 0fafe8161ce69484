"""What a person sees of a running sweep: never wider than the terminal, whatever the sweep, and honest about time."""

import io
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.configuration import Configuration
from orchestrator.core.totals import RunningTotals, Sums, Totals
from orchestrator.core.trial import Trial
from orchestrator.progress.progress import Pace, Progress
from orchestrator.progress.table import ASCII, Glyphs, TerminalTable, groups_of
from orchestrator.progress.view import SweepView, duration, end_table

NINE = tuple(f"k{k}_{subset}" for k in (1, 2, 3) for subset in ("first", "middle", "last"))


def totals(
    tasks: Sequence[str] = ("gsm8k", "minerva_math"),
    policies: Iterable[str] = NINE,
    *,
    done: int | dict[str, int] = 50,
    wanted: int = 100,
    thresholds: Sequence[float] = (0.95,),
    cost: float = 2.0,
) -> tuple[Totals, ...]:
    keys = [
        (task, Configuration(policy=policy, threshold=threshold))
        for task in tasks
        for threshold in thresholds
        for policy in policies
    ]
    running = RunningTotals(dict.fromkeys(keys, wanted))
    for key in keys:
        count = done if isinstance(done, int) else done.get(key[0], 50)
        speed = 1.25 if key[1].policy.startswith("k2") else 1.0
        sums = Sums(
            baseline=key[1].policy.startswith("k1"), documents=count, correct=count * 4 // 5, tokens=100 * count,
            seconds=cost * count / speed, work=100.0 * count / speed, layer_positions=1000 * count,
            scored={0: count},
        )  # fmt: skip
        if count:
            trial = Trial(trial_id=str(key), task=key[0], configuration=key[1], repeat=0, shard=0)
            running.add_sums(trial, sums)
    return running.totals()


def progress(lines: tuple[Totals, ...] | None = None, **fields: Any) -> Progress:
    given: dict[str, Any] = {"finished": 12, "failed": 1, "actors": 2, "warm": 2, "running": ("gsm8k/k2_middle/1",)}
    return Progress(
        sweep="demo-1a2b3c4d", totals=totals() if lines is None else lines, trials=36, **{**given, **fields}
    )


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def screen(shown: Progress, width: int = 80, height: int = 24) -> list[str]:
    return [line.plain for line in SweepView(stream=io.StringIO()).screen(shown, width=width, height=height)]


def test_the_default_sweep_fits_a_terminal_of_80_by_24() -> None:
    lines = screen(progress())
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "900 of 1,800 documents" in text
    assert "trials 12 of 36 done, 1 running, 1 failed   actors 2 of 2 warm" in text
    assert "gsm8k/k2_middle/1" in text
    row = next(line for line in lines if "k2_middle" in line and "now" not in line)
    assert re.search(r"k2_middle  █+░+ +50/100 +80\.0 \(67–89\) +62\.5 +1\.25×$", row), row
    assert sum(policy in line for line in lines if "now" not in line for policy in NINE) == 18


@pytest.mark.parametrize("width", [20, 36, 50, 79, 80, 81, 132, 250])
@pytest.mark.parametrize("height", [5, 24, 60])
@pytest.mark.parametrize(
    "lines",
    [
        (),
        totals(),
        totals(done=0),
        totals(("mmlu",), ["k1"], wanted=14042, done=14042),
        totals([f"task{i}" for i in range(11)], thresholds=(0.9, 0.95), done={"task0": 100, "task9": 0}),
        totals(policies=["k1", "k12_0-3+5+7-9+11+13+15-20.output.small", "k3_0-3+5+7-9+11+13+15-20.output.small"]),
        totals(["a_task_whose_name_is_longer_than_any_other_one_we_have_seen_so_far_in_the_catalog"]),
    ],
)
def test_no_line_is_wider_than_the_terminal(lines: tuple[Totals, ...], width: int, height: int) -> None:
    drawn = screen(progress(lines, running=("gsm8k/k2_middle/1",) * 8), width, height)
    assert max(map(len, drawn)) <= width
    assert len(drawn) < height
    assert max(len(line.plain) for line in end_table(lines, width=width, glyphs=Glyphs())) <= width


def test_every_configuration_of_a_large_sweep_is_seen_in_turn() -> None:
    clock = Clock()
    view = SweepView(stream=io.StringIO(), clock=clock)
    large = totals([f"task{i:02}" for i in range(11)], thresholds=(0.9, 0.95))  # 198 configurations
    seen = set()
    for _ in range(40):
        group = ""
        for line in view.screen(progress(large), width=80, height=24):
            group = line.plain if line.plain.startswith("task") else group
            seen |= {(group, policy) for policy in NINE if line.plain.startswith(f"  {policy} ")}
        clock.now += 6.0
    assert len(seen) == 198


def test_finished_and_waiting_groups_fold_into_a_line_where_there_is_no_room() -> None:
    lines = totals(["over", "under_way", "to_come"], done={"over": 100, "to_come": 0})
    folded = "\n".join(screen(progress(lines)))
    assert "over: 9 policies finished, 900 of 900 documents" in folded
    assert "to_come: 9 policies waiting, 0 of 900 documents" in folded
    assert sum(policy in folded for policy in NINE) == 9
    assert "finished" not in "\n".join(screen(progress(lines), height=40))


def test_settings_are_named_where_they_differ() -> None:
    assert [group.title for group in groups_of(totals(thresholds=(0.9, 0.95), tasks=("gsm8k",)))] == [
        "gsm8k, threshold 0.9",
        "gsm8k, threshold 0.95",
    ]
    assert [group.title for group in groups_of(totals())] == ["gsm8k", "minerva_math"]
    mixed = [
        *totals(thresholds=(0.85,), tasks=("gsm8k",)),
        *totals(tasks=("mmlu",)),
    ]  # one of the settings in each task
    assert [group.title for group in groups_of(mixed)] == ["gsm8k", "mmlu"]


def test_rows_stand_in_their_natural_order_however_they_came() -> None:
    names = [
        "k1",
        "k1_first",
        "k1_middle",
        "k2_first",
        "k2_last",
        "k2_all",
        "k2_4-9",
        "k2_last.output",
        "k10_first",
        "z",
    ]
    mixed = totals(("b", "a"), random.Random(0).sample(names, len(names)), thresholds=(0.95, 0.9))
    groups = groups_of(mixed)
    expected = ["b, threshold 0.9", "b, threshold 0.95", "a, threshold 0.9", "a, threshold 0.95"]
    assert [group.title for group in groups] == expected
    assert all([line.configuration.policy for line in group.lines] == names for group in groups)


def test_long_names_are_cut_in_the_middle() -> None:
    lines = totals(("gsm8k",), ["k2_0-3+5+7-9+11+13+15-20.output", "k3_0-3+5+7-9+11+13+15-20.small"])
    names = [line.plain for line in TerminalTable(groups_of(lines), width=80, glyphs=Glyphs(), bars=True).all()]
    assert any("k2_0" in name and "…" in name and "output " in name for name in names)
    assert any("k3_0" in name and "…" in name and "small " in name for name in names)


def test_what_is_not_known_is_a_dash() -> None:
    waiting = TerminalTable(groups_of(totals(("mmlu",), ["k1"], done=0)), width=80, glyphs=Glyphs(), bars=True).all()
    assert waiting[-1].plain.split() == ["mmlu", "k1", "░" * 17, "0/100", "–", "–", "–"]


def test_the_end_table_has_everything_and_says_what_is_missing() -> None:
    stream = io.StringIO()
    SweepView(stream=stream).finish(progress())
    assert "900 documents, 12 of 36 trials done, 900 documents missing, 1 failed" in stream.getvalue()
    assert "█" in stream.getvalue()
    stream = io.StringIO()
    SweepView(stream=stream).finish(progress(totals(done=100), failed=0, finished=36))
    lines = stream.getvalue().splitlines()
    assert "layers" in lines[0]
    assert "█" not in stream.getvalue()
    assert lines[-1] == "1,800 documents, 36 of 36 trials done"


def test_a_file_gets_plain_lines_at_a_modest_pace() -> None:
    stream, clock = io.StringIO(), Clock()
    with SweepView(stream=stream, clock=clock) as view:
        for second in range(3600):
            clock.now = 1000.0 + second
            view.update(progress(totals(done=min(100, second // 30)), warm=2 if second > 20 else 1))
        printed = stream.getvalue().splitlines()
        view.finish(progress(totals(done=100), failed=0))
    assert printed[0] == "0 s  loading: 1 of 2 actors warm"
    assert re.search(r"1,800/1,800 documents, 100 %, .*/s, 0 s left; 12/36 trials, 1 failed$", printed[-1])
    assert 40 < len(printed) < 150
    whole = stream.getvalue()
    assert "\x1b" not in whole
    assert "\r" not in whole
    assert max(map(len, whole.splitlines())) <= 80
    assert whole.splitlines()[-1] == "1,800 documents, 12 of 36 trials done"


def test_quiet_prints_the_end_table_only() -> None:
    stream = io.StringIO()
    with SweepView(stream=stream, quiet=True) as view:
        view.update(progress())
        view.note("an actor was lost")
        assert stream.getvalue() == ""
        view.finish(progress())
    assert "k2_middle" in stream.getvalue()


def drawn(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", **environment}.items():
        monkeypatch.setenv(name, value)
    stream, clock = Terminal(), Clock()
    with SweepView(stream=stream, clock=clock) as view:
        view.update(progress())
        clock.now += 1
        view.note("an actor was lost")
        view.update(progress())
        view.finish(progress())
    return stream.getvalue()


def test_a_terminal_is_redrawn_and_gets_its_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    output = drawn(monkeypatch)
    assert "\x1b[32m" in output or "\x1b[36m" in output
    assert "\x1b[1A" in output  # up again, to draw in place
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1
    assert "an actor was lost" in output


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    output = drawn(monkeypatch, NO_COLOR="1")
    codes = {code for sequence in re.findall(r"\x1b\[([0-9;]*)m", output) for code in sequence.split(";")}
    assert not codes & {str(code) for code in (*range(30, 48), *range(90, 108))}
    assert "\x1b[1A" in output


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in drawn(monkeypatch, TERM="dumb")


def test_the_cursor_comes_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()

    def fails() -> None:
        with SweepView(stream=stream) as view:
            view.update(progress())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_a_drawing_goes_when_its_sweep_has_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with SweepView(stream=stream) as view:
        view.update(progress())
        drawing = stream.getvalue()
    assert "\x1b[2K" in stream.getvalue()[len(drawing) :]  # lines are erased
    assert "k3_last" not in stream.getvalue()[len(drawing) :].rpartition("\x1b[2K")[2]


def test_a_resized_terminal_is_drawn_afresh() -> None:
    controller, terminal = pty.openpty()
    resize(terminal, 80)
    script = Path(__file__).with_name("redraw_after_resize.py")
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", "PYTHONPATH": str(script.parent.parent)}
    command = [sys.executable, str(script)]
    with (
        ThreadPoolExecutor(1) as reader,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=terminal, stderr=subprocess.PIPE, env=environment
        ) as child,
    ):
        os.close(terminal)
        written = reader.submit(read_all, controller)
        assert child.stdin is not None
        assert child.stderr is not None
        assert child.stderr.readline() == b"drawn\n"
        resize(controller, 60)
        child.stdin.close()
        assert child.wait(600) == 0
        output = written.result()
    os.close(controller)
    before, after = output.split("\x1b[2J")
    assert max(map(len, visible(before))) == 80
    assert max(map(len, visible(after))) == 60
    assert "k3_last" in after
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def resize(terminal: int, width: int) -> None:
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))


def read_all(controller: int) -> str:
    output = b""
    with suppress(OSError):  # no process has the terminal open any more
        while part := os.read(controller, 65536):
            output += part
    return output.decode()


def visible(output: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r", "\n").split("\n")


def test_a_stream_that_knows_only_ascii_gets_ascii() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with SweepView(stream=stream) as view:
        view.update(progress())
        view.finish(progress())
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "(67-89)" in text
    assert "1.25x" in text
    assert "###" in text
    drawing = SweepView(stream=stream).screen(progress(running=("x" * 200,)), width=40, height=30)
    assert "".join(line.plain for line in drawing).isascii()
    assert ASCII.full == "#"


def test_time_left_ignores_loading_and_earlier_runs() -> None:
    pace = Pace()
    for second in range(0, 100, 10):
        pace.observe(second, totals(done=20))  # found in the folder, while models load
    assert (pace.documents_per_s, pace.seconds_left) == (None, None)
    for step in range(1, 31):
        pace.observe(100.0 + 9 * step, totals(done=20 + step))  # 18 configurations: 2 documents/s
    assert pace.documents_per_s == pytest.approx(2.0)
    assert pace.seconds_left == pytest.approx(50 * 9, rel=0.01)


def test_time_left_knows_that_some_tasks_are_slow() -> None:
    pace = Pace()
    for step in range(21):  # the quick task is nearly through, the slow one is not
        quick = totals(("quick",), ["k1"], done=70 + step, cost=1.0)
        pace.observe(2.0 * step, quick + totals(("slow",), ["k1"], done=4 + step // 10, cost=10.0))
    assert pace.seconds_left == pytest.approx((10 * 1 + 94 * 10) / (19 * 1 + 2 * 10) * 38, rel=0.1)


def test_a_pace_forgets_an_old_one() -> None:
    pace = Pace()
    now = 0.0
    for done in range(100):
        now += 1.0
        pace.observe(now, totals(("gsm8k",), ["k1"], done=done, wanted=1000))
    for done in range(100, 200):
        now += 10.0  # one of the machines has gone
        pace.observe(now, totals(("gsm8k",), ["k1"], done=done, wanted=1000))
    assert pace.documents_per_s == pytest.approx(0.1, rel=0.1)


def test_nothing_left_takes_no_time() -> None:
    pace = Pace()
    assert pace.seconds_left is None
    pace.observe(0.0, totals(done=100))
    assert pace.seconds_left == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (41.4, "41 s"), (59.7, "1:00"), (101, "1:41"), (7390, "2:03:10"), (360000, "100:00:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
