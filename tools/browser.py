"""Drives a headless Chromium through its debugging protocol: opens a page, runs scripts in it, takes screenshots.

A page keeps its console messages and the URLs that it requested. `open_trials` logs in to the Ray dashboard of a sweep.
"""

import asyncio
import base64
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--hide-scrollbars",
)
TIMEOUT_SECONDS = 120  # enough on a busy machine
JOB = "#/jobs/01000000"  # the page of the sweep's driver
ENTER_TOKEN = """(token => {
    const field = document.querySelector('[role=dialog] input');
    if (!field) return false;
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(field, token);
    field.dispatchEvent(new Event('input', {bubbles: true}));
    setTimeout(() => [...document.querySelectorAll('[role=dialog] button')].at(-1).click(), 200);
    return true;
})"""
RELOAD_ON_ERROR = "/Query Error/.test(document.body.innerText) && location.reload()"  # a busy head answers late
# Expands the progress bar by a click on the arrow before its "3 / 20". A second click would collapse it again.
EXPAND = """(() => {
    const counts = [...document.querySelectorAll('*')].filter(
        e => e.children.length === 0 && /^[0-9]+ \\/ [0-9]+$/.test(e.textContent.trim()));
    let row = counts.at(-1);
    while (!row.querySelector('svg')) row = row.parentElement;
    row.querySelector('svg').dispatchEvent(new MouseEvent('click', {bubbles: true}));
})()"""


def find_browser() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """A browser tab. `messages` (of the console) and `requests` (URLs) grow while it is used."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._next = socket, 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.messages: list[str] = []
        self.requests: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
                continue
            kind, details = event["method"], event["params"]
            if kind == "Page.loadEventFired":
                self._loaded.set()
            elif kind == "Network.requestWillBeSent":
                self.requests.append(details["request"]["url"])
            elif kind == "Runtime.exceptionThrown":
                self.messages.append(str(details["exceptionDetails"]))
            elif kind == "Runtime.consoleAPICalled":
                self.messages.append(str(details["args"]))
            elif kind == "Log.entryAdded":
                self.messages.append(details["entry"]["text"])

    async def send(self, method: str, **values: Any) -> dict[str, Any]:
        self._next += 1
        answer = self._answers[self._next] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._next, "method": method, "params": values})
        event = await asyncio.wait_for(answer, TIMEOUT_SECONDS)
        assert "error" not in event, event
        return dict(event["result"])

    async def open(self, url: str) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        self._loaded.clear()
        await self.send("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), TIMEOUT_SECONDS)

    async def run(self, script: str) -> Any:
        """Evaluates an expression in the page and returns its value."""
        answer = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def wait_for_text(self, pattern: str, action: str = "0") -> str:
        """Returns the page's text once it matches. `action` is a script to run before each check."""
        text = ""
        for _ in range(TIMEOUT_SECONDS):
            await self.run(action)
            await asyncio.sleep(1)
            text = str(await self.run("document.body.innerText"))
            if re.search(pattern, text):
                return text
        raise AssertionError(f"no {pattern!r} on the page: {text}")

    async def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **metrics)

    async def screenshot(self, path: Path, *, whole: bool = False) -> None:
        answer = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))


async def open_trials(page: Page, dashboard: str, configuration: str) -> str:
    """Opens the trials of a running sweep in the Ray dashboard. Returns the page's text once it has `configuration`."""
    token = (Path.home() / ".ray" / "auth_token").read_text().strip()
    await page.open(dashboard)
    for _ in range(TIMEOUT_SECONDS):
        if await page.run(f"{ENTER_TOKEN}({token!r})"):
            break
        await asyncio.sleep(1)
    await page.wait_for_text("Node Status")
    await page.run(f"location.hash = {JOB!r}")
    await page.wait_for_text(r"Total: [0-9]+", RELOAD_ON_ERROR)
    await page.run(EXPAND)
    return await page.wait_for_text(configuration)


@asynccontextmanager
async def browse(program: str) -> AsyncIterator[Page]:
    """An empty page in a new browser with a temporary profile. Both are removed at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [target for target in await answer.json() if target["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    yield page
                    await page.send("Browser.close")
                    listening.cancel()
        finally:
            if process.returncode is None:
                try:
                    await asyncio.wait_for(process.wait(), 10)
                except TimeoutError:
                    process.kill()
                    await process.wait()


async def _port(path: Path) -> int:
    for _ in range(TIMEOUT_SECONDS * 10):
        if path.exists() and path.read_text().strip():
            return int(path.read_text().split()[0])
        await asyncio.sleep(0.1)
    raise TimeoutError("the browser did not start")
