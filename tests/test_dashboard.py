"""The Ray dashboard during a sweep, in a real browser and through Ray's own commands: it shows trials."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweep_process import SweepProcess

from tools.browser import browse, find_browser, open_trials

pytestmark = pytest.mark.slow
CHROMIUM = find_browser()
FLAGS = ("--model", "tiny", "--data", "bundled", "--tasks", "gsm8k", "--k", "1,2", "--subsets", "first,last")
TRIALS = 4 * 50  # configurations × shards


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[SweepProcess]:
    run = SweepProcess(tmp_path, tmp_path / "results", *FLAGS, "--limit", "250", "--shard-size", "5", "--actors", "2")
    try:
        run.wait_for_rows(10)
        yield run
    finally:
        run.process.send_signal(signal.SIGINT)
        run.process.wait(600)


def dashboard(run: SweepProcess) -> str:
    return re.search(r"dashboard: (http://\S+)", run.output.read_text())[1]  # type: ignore[index]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt install chromium")
def test_the_dashboard_shows_trials_by_configuration(sweep: SweepProcess) -> None:
    async def look() -> str:
        async with browse(str(CHROMIUM)) as page:
            await page.resize(1400, 1000)
            return await open_trials(page, dashboard(sweep), "gsm8k/k2_last")

    text = asyncio.run(look())
    assert f"Total: {TRIALS}" in text
    assert int(re.search(r"Running: ([0-9]+)", text)[1]) in (1, 2)  # type: ignore[index]
    for configuration in ("gsm8k/k1_first", "gsm8k/k1_last", "gsm8k/k2_first", "gsm8k/k2_last"):
        assert configuration in text
    assert "SweepWorker" not in text.partition("Ray Core Overview")[2].partition("Logs")[0], "only trials are counted"


def test_rays_commands_work_as_documented(sweep: SweepProcess) -> None:
    def ray(*command: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).parent / "ray"), *command, "--address", dashboard(sweep)],
            env={**os.environ, "RAY_AUTH_MODE": "token"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    actors = ray("list", "actors")
    assert {"results", "trials", "worker-1", "worker-2"} <= set(actors.split())
    tasks = ray("summary", "tasks")
    assert "gsm8k/k2_first" in tasks
    assert "append" not in tasks
