"""Makes the README's pictures from one sweep of the bundled model: python -m tools.pictures

Runs `reuse-sweep sweep --tasks gsm8k,minerva_math --limit 100` in a terminal. After a third of the documents it takes
pictures of the terminal and of the Ray dashboard. At the end it takes a picture of the report and copies its trade-off
figure. Needs Chromium.
"""

import argparse
import asyncio
import io
import os
import pty
import re
import shutil
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from tools.browser import browse, find_browser, open_trials

COMMAND = ("sweep", "--tasks", "gsm8k,minerva_math", "--limit", "100")
COLUMNS, LINES = 80, 40
REDRAW = re.compile(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)+")  # what rich prints before it draws its display again
PICTURE_SHARE = 1 / 3  # of the documents; when it is complete, the pictures of the running sweep are taken
SCROLL_TO_PANEL = """[...document.querySelectorAll('*')].find(e => /^Ray Core Overview/.test(e.innerText))
    .scrollIntoView({block: 'end'})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="directory of the pictures")
    parser.add_argument("--results", type=Path, default=Path("results"), help="directory of the sweep")
    parser.add_argument("--name", default="pictures", help="name of the sweep; it must be new")
    options = parser.parse_args()
    browser = find_browser()
    if browser is None:
        parser.error("no Chromium: apt install chromium")
    if (options.results / options.name).exists():
        parser.error(f"{options.results / options.name} exists: choose another --name")
    asyncio.run(_take_pictures(browser, options.out, options.results, options.name))


async def _take_pictures(browser: str, out: Path, results: Path, name: str) -> None:
    terminal, sweep_terminal = pty.openpty()
    termios.tcsetwinsize(sweep_terminal, (LINES, COLUMNS))
    flags = (*COMMAND[1:], "--model", "tiny", "--data", "bundled", "--out", str(results), "--name", name)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "orchestrator.sweep", *flags),
        stdout=sweep_terminal,
        stderr=sweep_terminal,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(sweep_terminal)
    written = bytearray()
    reading = asyncio.create_task(asyncio.to_thread(_read_output, terminal, written))
    while process.returncode is None and _completed_share(_display(written)) < PICTURE_SHARE:
        await asyncio.sleep(0.5)
    _save_terminal(_display(written), out / "terminal.svg")
    address = re.search(rb"dashboard: (http://\S+)", bytes(written))
    if process.returncode is not None or address is None:
        sys.exit(f"the sweep ended early:\n{written.decode()}")
    async with browse(browser) as page:
        await page.resize(1400, 1250)
        await open_trials(page, address[1].decode(), "minerva_math")
        await page.run(SCROLL_TO_PANEL)
        await page.screenshot(out / "dashboard.png")
    await process.wait()
    await reading
    await _take_report_pictures(browser, out, results / name)
    print(written.decode().rpartition("\x1b[2K")[2])


async def _take_report_pictures(browser: str, out: Path, folder: Path) -> None:
    shutil.copyfile(folder / "figures" / "minerva_math-tradeoff.svg", out / "tradeoff.svg")
    async with browse(browser) as page:
        await page.resize(1100, 860, 1.25)
        await page.open((folder / "report.html").resolve().as_uri())
        await page.run("document.getElementById('verdict').scrollIntoView({behavior: 'instant'})")
        await page.screenshot(out / "report.png")


def _read_output(terminal: int, written: bytearray) -> None:
    """Appends the sweep's output to `written` until the sweep closes its end of the terminal."""
    try:
        while data := os.read(terminal, 65536):
            written.extend(data)
    except OSError:  # Linux reports the end this way
        pass


def _display(written: bytearray) -> str:
    """The last complete live display."""
    frames = REDRAW.split(written.decode(errors="replace").replace("\r\n", "\n"))
    return frames[-2] if len(frames) > 2 else ""


def _completed_share(display: str) -> float:
    counts = re.search(r"([\d,]+) of ([\d,]+) documents", re.sub(r"\x1b\[[\d;]*m", "", display))
    return int(counts[1].replace(",", "")) / int(counts[2].replace(",", "")) if counts else 0.0


def _save_terminal(display: str, path: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(display.strip("\n")))
    title = "reuse-sweep " + " ".join(COMMAND)
    svg = console.export_svg(title=title, theme=DEFAULT_TERMINAL_THEME, unique_id="terminal")
    path.write_text(re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")  # no web fonts


if __name__ == "__main__":
    main()
