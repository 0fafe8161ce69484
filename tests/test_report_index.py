"""index.html of a directory of sweeps: entries, links and sorting, also in a real browser."""

import asyncio
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest
from simulated_sweep import Simulation, write_sweep
from test_report_browser import opened

from orchestrator import load_sweep
from orchestrator.cli.__main__ import dispatch
from orchestrator.report.exports import export_lm_eval
from orchestrator.report.lm_eval_import import import_lm_eval
from sampler.errors import InputError
from tools.browser import find_browser

ROWS = "[...document.querySelector('table').tBodies[0].rows].map(row => row.cells[{}].textContent.trim())"
CLICK = "document.querySelectorAll('th button')[{}].click()"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sweeps of different models, one of them hostile; an imported one; one without rows; another directory."""
    results = tmp_path_factory.mktemp("index") / "results"
    two = Simulation(documents={"gsm8k": 30, "mmlu": 57}, policies=("k1", "k2_middle", "k3_last"), shard_size=30)
    write_sweep(results / "first", two)
    write_sweep(results / "a b & <i>", Simulation(documents={"gsm8k": 40}, policies=("k1", "k2_first"), model="<b>/x"))
    write_sweep(results / "waiting", Simulation(documents={"gsm8k": 4}, trials=0))
    for folder in export_lm_eval(results / "first", results.parent / "files")[:2]:
        import_lm_eval([folder], results / "engines", folder.name.rpartition("__")[2])
    (results / "notes").mkdir()
    dispatch(["report", str(results), "--no-figures"])
    return results


def test_every_sweep_is_listed_with_its_report(results: Path) -> None:
    page = (results / "index.html").read_text()
    links = [unquote(link) for link in re.findall(r'<a href="([^"#]+)"', page)]
    assert links == [
        "a b & <i>/report.html",
        *["engines/report.html"] * 2,
        *["first/report.html"] * 2,
    ]
    assert all((results / link).is_file() for link in links)
    assert "&lt;b&gt;/x" in page
    assert "<b>/x" not in page
    assert page.count("(imported)") == 2
    assert "<li>waiting: " in page
    assert "notes" not in page
    for task in load_sweep(results / "first").analysis().tasks:
        assert f'<span class="badge {task.verdict.outcome}">' in page


def test_the_best_configuration_is_inside_the_margin(results: Path, tmp_path: Path) -> None:
    dispatch(["report", str(results), "--out", str(tmp_path), "--margin", "0.001"])
    assert (tmp_path / "index.html").read_text().count("none within the margin") == 5
    dispatch(["report", str(results), "--out", str(tmp_path), "--margin", "99"])
    page = (tmp_path / "index.html").read_text()
    assert "none within the margin" not in page
    tasks = {task.task: task for task in load_sweep(results / "first").analysis().tasks}
    compared = [one for one in tasks["gsm8k"].configurations if one.comparison is not None]
    speeds = {one.label: one.comparison.speedup.tokens.value for one in compared}  # type: ignore[union-attr]
    fastest = max(speeds, key=lambda label: speeds[label])
    row = next(row for row in page.split("<tr")[1:] if "first/report.html" in row and ">gsm8k<" in row)
    assert f">{fastest}<" in row
    with pytest.raises(InputError, match=r"--compare needs one sweep, and .*results has 4"):
        dispatch(["report", str(results), "--compare", "examples/seed-results"])


def check_in_browser(page_path: Path, rows: int) -> None:
    async def run() -> None:
        async with opened(page_path) as page:
            assert len(await page.run(ROWS.format(0))) == rows
            await page.run(CLICK.format(5))  # accuracy, highest first
            values = [float(text.split("%")[0][:4]) for text in await page.run(ROWS.format(5))]
            assert values == sorted(values, reverse=True)
            assert len(set(values)) > 1
            await page.run(CLICK.format(0))
            names = await page.run(ROWS.format(0))
            assert [name.lower() for name in names] == sorted(name.lower() for name in names)
            assert page.messages == []
            assert page.requests == [page_path.as_uri()]
            link = await page.run("document.querySelector('table a').href")
            await page.open(link)
            assert (await page.run("document.title")).startswith("Layer reuse in ")
            assert page.messages == []

    asyncio.run(run())


@pytest.mark.skipif(find_browser() is None, reason="Chromium is not installed")
def test_the_index_in_a_browser(results: Path) -> None:
    check_in_browser(results / "index.html", rows=5)


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="Chromium is not installed")
def test_fifty_sweeps(tmp_path: Path) -> None:
    """Below one megabyte, in a browser."""
    results = tmp_path / "results"
    for number in range(5):
        documents = {"gsm8k": 30 + number, "mmlu": 57}
        write_sweep(results / f"sweep-{number}", Simulation(documents=documents, shard_size=50, seed=number))
    for number in range(5, 50):
        shutil.copytree(results / f"sweep-{number % 5}", results / f"sweep-{number}")
    dispatch(["report", str(results), "--no-figures"])
    page = results / "index.html"
    print(f"index.html of 50 sweeps has {page.stat().st_size:,} bytes")
    assert page.stat().st_size < 1_000_000
    check_in_browser(page, rows=100)
