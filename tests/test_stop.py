"""Signals stop a sweep: once, immediately or at the next safe point, and within a time limit."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.running.stop import SIGNALS, Interrupted, StopSignals

ROOT = Path(__file__).parents[1]


@pytest.fixture
def stop() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    made = StopSignals(cleanup_seconds=60)
    made.install()
    yield made
    if made._timer is not None:
        made._timer.cancel()  # or the tests would end with it
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_interrupts(stop: StopSignals, number: signal.Signals) -> None:
    with pytest.raises(Interrupted) as interrupted:
        os.kill(os.getpid(), number)
    assert interrupted.value.exit_code == 128 + number
    os.kill(os.getpid(), signal.SIGINT)  # and the second one does not
    assert stop.received == number


def test_a_deferred_signal_waits_for_a_safe_place(stop: StopSignals) -> None:
    reached = []

    def steps() -> None:
        with stop.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("after the signal")
            stop.raise_if_received()
            reached.append("after the check")

    with pytest.raises(Interrupted):
        steps()
    assert reached == ["after the signal"]


def test_a_deferred_signal_is_not_forgotten(stop: StopSignals) -> None:
    with pytest.raises(Interrupted), stop.deferred():
        os.kill(os.getpid(), signal.SIGUSR1)


def test_a_library_with_handlers_of_its_own(stop: StopSignals) -> None:
    """As Ray does it: while it starts, SIGTERM leaves with its number."""

    def start(code: int) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit), stop.reinstalled():
        start(1)
    assert stop.received is None
    with pytest.raises(Interrupted) as interrupted, stop.reinstalled():
        start(signal.SIGTERM)
    assert interrupted.value.exit_code == 143
    assert stop.received == signal.SIGTERM


def test_a_librarys_handlers_are_replaced_again(stop: StopSignals) -> None:
    with stop.reinstalled():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)


def test_cleanup_that_takes_too_long_is_interrupted() -> None:
    program = (
        "import os, signal, time\n"
        "from orchestrator.running.stop import Interrupted, StopSignals\n"
        "stop = StopSignals(exit_message='continue so', cleanup_seconds=0.5)\n"
        "stop.install()\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "except Interrupted:\n"
        "    time.sleep(600)\n"
        "    print('cleanup finished')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "continue so\n")


def test_a_sweep_stopped_while_it_starts_prints_how_to_continue(tmp_path: Path) -> None:
    """Stopped during imports, as soon as it handles signals. --force, which had no effect yet, is not repeated."""
    words = ["--tasks", "gsm8k", "--force", "k1_first", "--limit", "2", "--out", str(tmp_path / "a b")]
    command = [sys.executable, "-m", "orchestrator.sweep", *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sweep:
        while not listens(sweep.pid):
            assert sweep.poll() is None
            time.sleep(0.01)
        sweep.send_signal(signal.SIGINT)
        _, output = sweep.communicate(timeout=900)
    assert sweep.returncode == 130
    repeated = f"{sys.executable} -m orchestrator.sweep --tasks gsm8k --limit 2 --out '{tmp_path / 'a b'}'"
    assert output == f"stopped; continue with: {repeated}\n"
    assert list(tmp_path.iterdir()) == []


def listens(pid: int) -> bool:
    """Whether a process catches SIGUSR1, which Python leaves alone."""
    (caught,) = re.findall(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)
