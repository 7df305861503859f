"""A headless Chromium for tests of pages, by its own protocol: what is shown, read back and clicked, and loaded."""

import asyncio
import base64
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

Browse = Callable[[Path | str, Callable[["Tab"], Awaitable[None]]], None]

_TIMEOUT_S = 120.0


class Tab:
    """A page that is open; `requests` are what it loaded, `problems` the errors of its scripts and of its policy."""

    def __init__(self, tab: Any) -> None:
        self._tab = tab
        self.requests: list[str] = []
        self.problems: list[str] = []

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        answer = await self._tab.send_command(method, params=parameters)
        assert "error" not in answer, answer
        return answer["result"]

    async def value(self, expression: str) -> Any:
        """Return what an expression is in the page."""
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        async with asyncio.timeout(_TIMEOUT_S):
            while not await self.value(expression):
                await asyncio.sleep(0.05)

    async def click(self, selector: str) -> None:
        """Click in the middle of an element, as a mouse does."""
        await self.value(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        x, y = await self.value(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def colors(self, scheme: str) -> None:
        """Let the system's colors be `light` or `dark`."""
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        # Charts are drawn anew in these colors when the page is told of them, which is later.
        texts, ink = (
            "[...document.querySelectorAll('.legendtext, .ytick text')]",
            "getComputedStyle(document.body).color",
        )
        await self.until(f"{texts}.every(text => getComputedStyle(text).fill === {ink})")

    async def width(self, pixels: int) -> None:
        """Let the window be so wide."""
        size = {"width": pixels, "height": 844, "deviceScaleFactor": 1, "mobile": pixels < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **size)

    async def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        found = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def chromium() -> Iterator[Browse]:
    """Yield a function that opens a file, or an address, in a new tab of Chromium and lets `visit` do its work there.

    It is started once for all of these tabs, which takes longer than what most visits do.
    """
    from choreographer import Browser  # which a machine without Chromium need not have

    held = AsyncExitStack()
    with asyncio.Runner() as runner:
        started = Browser(path=shutil.which("chromium"), headless=True, enable_gpu=False, enable_sandbox=False)
        browser = runner.run(held.enter_async_context(started))

        def browse(page: Path | str, visit: Callable[[Tab], Awaitable[None]]) -> None:
            runner.run(_browse(browser, page if isinstance(page, str) else page.resolve().as_uri(), visit))

        try:
            yield browse
        finally:
            runner.run(held.aclose())


async def _browse(browser: Any, url: str, visit: Callable[[Tab], Awaitable[None]]) -> None:
    async with _opened(browser) as tab:
        await tab.send("Page.navigate", url=url)
        await tab.until("document.readyState === 'complete'")
        await visit(tab)


@asynccontextmanager
async def _opened(browser: Any) -> Any:
    opened = await browser.create_tab("about:blank")
    tab = Tab(opened)

    async def requested(message: dict[str, Any]) -> None:
        tab.requests.append(message["params"]["request"]["url"])

    async def failed(message: dict[str, Any]) -> None:
        tab.problems.append(str(message["params"]))

    for domain in ("Network", "Page", "Runtime", "Log"):
        await tab.send(f"{domain}.enable")
    opened.subscribe("Network.requestWillBeSent", requested)
    opened.subscribe("Runtime.exceptionThrown", failed)
    opened.subscribe("Log.entryAdded", failed)
    yield tab
    await browser.close_tab(opened)
