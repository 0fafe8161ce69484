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
from browser import Page, browse, find_browser
from sweep_runs import Run

pytestmark = pytest.mark.slow
CHROMIUM = find_browser()
FLAGS = ("--model", "tiny", "--data", "bundled", "--tasks", "gsm8k", "--k", "1,2", "--subsets", "first,last")
TRIALS = 4 * 50  # configurations × shards
JOB = "#/jobs/01000000"  # the driver's
ENTER_TOKEN = """(token => {
    const field = document.querySelector('[role=dialog] input');
    if (!field) return false;
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(field, token);
    field.dispatchEvent(new Event('input', {bubbles: true}));
    setTimeout(() => [...document.querySelectorAll('[role=dialog] button')].at(-1).click(), 200);
    return true;
})"""
RETRY = "/Query Error/.test(document.body.innerText) && location.reload()"  # a busy head answers late
# Opens the progress bar, by the arrow in front of its "3 / 20". A second click would close it again.
EXPAND = """(() => {
    const counts = [...document.querySelectorAll('*')].filter(
        e => e.children.length === 0 && /^[0-9]+ \\/ [0-9]+$/.test(e.textContent.trim()));
    let row = counts.at(-1);
    while (!row.querySelector('svg')) row = row.parentElement;
    row.querySelector('svg').dispatchEvent(new MouseEvent('click', {bubbles: true}));
})()"""


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, tmp_path / "results", *FLAGS, "--limit", "250", "--shard-size", "5", "--actors", "2")
    try:
        run.until_rows(10)
        yield run
    finally:
        run.process.send_signal(signal.SIGINT)
        run.process.wait(60)


def dashboard(run: Run) -> str:
    return re.search(r"dashboard: (http://\S+)", run.output.read_text())[1]  # type: ignore[index]


async def until(page: Page, pattern: str, action: str = "0") -> str:
    """The page's text once it matches; `action` is a script to run before each look."""
    text = ""
    for _ in range(120):
        await page.run(action)
        await asyncio.sleep(1)
        text = await page.run("document.body.innerText")
        if re.search(pattern, text):
            return str(text)
    raise AssertionError(f"no {pattern!r} on the page: {text}")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt install chromium")
def test_the_dashboard_shows_trials_by_configuration(sweep: Run, tmp_path: Path) -> None:
    token = (Path.home() / ".ray" / "auth_token").read_text().strip()

    async def look() -> str:
        async with browse(str(CHROMIUM)) as page:
            await page.resize(1400, 1000)
            await page.open(dashboard(sweep))
            for _ in range(60):
                if await page.run(f"{ENTER_TOKEN}({token!r})"):
                    break
                await asyncio.sleep(1)
            await until(page, "Node Status")
            await page.run(f"location.hash = {JOB!r}")
            await until(page, r"Total: [0-9]+", RETRY)
            await page.run(EXPAND)
            text = await until(page, "gsm8k/k2_last")
            await page.picture(tmp_path / "dashboard.png", whole=True)
            return text

    text = asyncio.run(look())
    assert f"Total: {TRIALS}" in text
    assert int(re.search(r"Running: ([0-9]+)", text)[1]) in (1, 2)  # type: ignore[index]
    for configuration in ("gsm8k/k1_first", "gsm8k/k1_last", "gsm8k/k2_first", "gsm8k/k2_last"):
        assert configuration in text
    assert "SweepWorker" not in text.partition("Ray Core Overview")[2].partition("Logs")[0], "only trials are counted"


def test_rays_commands_work_as_documented(sweep: Run) -> None:
    def ray(*command: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).parent / "ray"), *command, "--address", dashboard(sweep)],
            env={**os.environ, "RAY_AUTH_MODE": "token"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    actors = ray("list", "actors")
    assert {"results", "trials", "worker-1", "worker-2"} <= set(actors.split())
    tasks = ray("summary", "tasks")
    assert "gsm8k/k2_first" in tasks
    assert "append" not in tasks
