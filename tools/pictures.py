"""Makes the README's pictures from one sweep of the bundled model: python -m tools.pictures

Runs `reuse-sweep sweep --tasks gsm8k,minerva_math --limit 100` in a terminal. After a third of the documents it takes
pictures of the terminal and of the Ray dashboard, at the end of the report and its trade-off figure. Needs Chromium.
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
REDRAWN = re.compile(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)+")  # how rich goes back to the first line of its display
SHARE = 1 / 3  # of the documents, when the sweep's pictures are taken
TO_PANEL = """[...document.querySelectorAll('*')].find(e => /^Ray Core Overview/.test(e.innerText))
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
    asyncio.run(_take(browser, options.out, options.results, options.name))


async def _take(browser: str, out: Path, results: Path, name: str) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (LINES, COLUMNS))
    flags = (*COMMAND[1:], "--model", "tiny", "--data", "bundled", "--out", str(results), "--name", name)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "orchestrator.sweep", *flags),
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    written = bytearray()
    reading = asyncio.create_task(asyncio.to_thread(_read, ours, written))
    while process.returncode is None and _share(_display(written)) < SHARE:
        await asyncio.sleep(0.5)
    _terminal(_display(written), out / "terminal.svg")
    address = re.search(rb"dashboard: (http://\S+)", bytes(written))
    if process.returncode is not None or address is None:
        sys.exit(f"the sweep ended early:\n{written.decode()}")
    async with browse(browser) as page:
        await page.resize(1400, 1250)
        await open_trials(page, address[1].decode(), "minerva_math")
        await page.run(TO_PANEL)
        await page.picture(out / "dashboard.png")
    await process.wait()
    await reading
    await _of_report(browser, out, results / name)
    print(written.decode().rpartition("\x1b[2K")[2])


async def _of_report(browser: str, out: Path, folder: Path) -> None:
    shutil.copyfile(folder / "figures" / "minerva_math-tradeoff.svg", out / "tradeoff.svg")
    async with browse(browser) as page:
        await page.resize(1100, 860, 1.25)
        await page.open((folder / "report.html").resolve().as_uri())
        await page.run("document.getElementById('verdict').scrollIntoView({behavior: 'instant'})")
        await page.picture(out / "report.png")


def _read(terminal: int, written: bytearray) -> None:
    """All output, until the terminal is closed at the other end."""
    try:
        while found := os.read(terminal, 65536):
            written.extend(found)
    except OSError:  # how Linux reports the end
        pass


def _display(written: bytearray) -> str:
    """The last complete live display."""
    frames = REDRAWN.split(written.decode(errors="replace").replace("\r\n", "\n"))
    return frames[-2] if len(frames) > 2 else ""


def _share(display: str) -> float:
    found = re.search(r"([\d,]+) of ([\d,]+) documents", re.sub(r"\x1b\[[\d;]*m", "", display))
    return int(found[1].replace(",", "")) / int(found[2].replace(",", "")) if found else 0.0


def _terminal(display: str, path: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(display.strip("\n")))
    title = "reuse-sweep " + " ".join(COMMAND)
    svg = console.export_svg(title=title, theme=DEFAULT_TERMINAL_THEME, unique_id="terminal")
    path.write_text(re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")  # no web fonts


if __name__ == "__main__":
    main()
