"""The page in a real browser: no console messages, no requests, sorting, search, figures, and escaped scripts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from simulated_sweep import Simulation, write_sweep

from orchestrator.report import write_report
from tools.browser import Page, browse, find_browser

Check = Callable[[Page], Awaitable[None]]
COLUMN = "[...document.querySelectorAll('#results table tbody')[0].rows].map(r => r.cells[{}].textContent.trim())"
SHOWN = "[...document.querySelectorAll('details.example')].filter(d => d.offsetParent !== null).length"
TYPE = """(() => {{ const box = document.querySelector('input[type=search]'); box.value = {};
    box.dispatchEvent(new Event('input')); }})()"""


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_browser() is None:
        pytest.skip("Chromium is not installed")
    sim = Simulation(documents={"gsm8k": 60}, policies=("k1_first", "k1_last", "k2_middle", "k3_middle"), shard_size=60)
    return write_report([write_sweep(tmp_path_factory.mktemp("browser") / "sweep", sim)]).page


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Page]:
    program = find_browser()
    assert program is not None
    async with browse(program) as page:
        await page.resize(1280, 900)
        await page.open(path.as_uri())
        yield page


def test_the_page_in_a_browser(page_path: Path) -> None:
    """One browser for all checks: starting it takes most of the time."""

    async def run() -> None:
        async with opened(page_path) as page:
            for check in (_laptop, _hostile_text, _figures, _sorting, _searching, _choosing, _phone, _paper):
                await check(page)
            assert page.messages == []
            requests = [url for url in page.requests if not url.startswith("data:")]  # figures are data URIs
            assert requests == [page_path.as_uri()]

    asyncio.run(run())


async def _hostile_text(page: Page) -> None:
    assert await page.run("document.title") == "Layer reuse in simulated/block-diffusion-7b"
    found = "[...document.querySelectorAll('.model')].filter(p => p.textContent.includes('<script>')).length"
    assert await page.run(found) > 0
    assert await page.run("document.querySelectorAll('.model script, .model img').length") == 0
    assert await page.run("document.querySelectorAll('script').length") == 1


async def _figures(page: Page) -> None:
    """The content security policy must not block the images."""
    images = "[...document.querySelectorAll('figure img')]"
    assert await page.run(f"{images}.length") > 3
    assert await page.run(f"{images}.every(image => image.complete && image.naturalWidth > 100 && image.alt)")


async def _sorting(page: Page) -> None:
    click = "document.querySelectorAll('#results table')[0].querySelectorAll('th button')[{}].click()"
    before = await page.run(COLUMN.format(0))
    assert before == ["k1_first", "k1_last", "k2_middle", "k3_middle"]
    await page.run(click.format(2))  # accuracy: highest first, then lowest first
    values = [float(text.split()[0][:4]) for text in await page.run(COLUMN.format(2))]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 1
    await page.run(click.format(2))
    values = [float(text.split()[0][:4]) for text in await page.run(COLUMN.format(2))]
    assert values == sorted(values)
    await page.run(click.format(0))
    assert await page.run(COLUMN.format(0)) == sorted(before)
    assert (
        await page.run("document.querySelectorAll('#results table')[0].querySelectorAll('th[aria-sort]').length") == 1
    )


async def _searching(page: Page) -> None:
    every = await page.run(SHOWN)
    assert every > 2
    await page.run(TYPE.format("'BROKEN'"))  # only the hostile answer has this word
    assert 0 < await page.run(SHOWN) < every
    await page.run(TYPE.format("'no such words here'"))
    assert await page.run(SHOWN) == 0
    assert await page.run("document.querySelector('.tools output').textContent") == f"0 of {every} shown"
    await page.run(TYPE.format("''"))
    assert await page.run(SHOWN) == every


async def _choosing(page: Page) -> None:
    every = await page.run(SHOWN)
    await page.run(
        "(() => { const s = document.querySelector('.tools select'); s.value = 'gsm8k/k3_middle';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert 0 < await page.run(SHOWN) < every
    names = "[...document.querySelectorAll('details.example:not([hidden]) summary b')].map(b => b.textContent)"
    assert set(await page.run(names)) == {"k3_middle"}


async def _laptop(page: Page) -> None:
    """The main table needs no scrolling in a window of 1200 pixels."""
    await page.resize(1200, 900)
    table = "document.querySelector('#results .scroll')"
    assert await page.run(f"{table}.scrollWidth <= {table}.clientWidth")
    await page.resize(1280, 900)


async def _phone(page: Page) -> None:
    await page.resize(390, 844)
    width: Any = await page.run("document.documentElement.scrollWidth")
    assert width <= 390


async def _paper(page: Page) -> None:
    """A4 with margins of 1 cm: wider content would be cut off."""
    await page.resize(718, 1000)
    await page.send("Emulation.setEmulatedMedia", media="print")
    width: Any = await page.run("document.documentElement.scrollWidth")
    assert width <= 718
