"""The live page as a real Chromium shows it: it grows with the log, keeps a zoom, and asks nobody but its server."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from browser import Browse, Tab, chromium
from component import require_chromium
from event_examples import RESUMED_FROM, done, evaluated, saved, started, stepped, write
from view_examples import GOING, viewed

from lockstep.jobs.reader import RunWatcher
from lockstep.reporting import page_server
from lockstep.reporting.jsonl import JsonLines
from lockstep.reporting.page_server import PageServer
from lockstep.training.events import Event

pytestmark = pytest.mark.slow("other programs, or minutes")

TRACE = "document.querySelector('[aria-label=\"loss\"]')"
EVIL = "runs-</script><img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_POLL_MS", 100)


class Live:
    """A run whose log grows, watched and served."""

    def __init__(self, folder: Path, name: str = "a") -> None:
        self.run = folder / name
        self.run.mkdir()
        (self.run / "lock").touch()
        self.time = 100.0
        self.add(started(), *(stepped(step, 3.0 - step / 10) for step in range(1, 11)))
        self.watch = RunWatcher([self.run], wait=True)
        self.server = PageServer("127.0.0.1", 0)
        self.publish()

    def add(self, *events: Event) -> None:
        write(JsonLines(self.run / "events.jsonl"), *events, first=self.time + 1)
        self.time += len(events)

    def publish(self, *events: Event, over: bool = False) -> None:
        self.add(*events)
        self.server.publish(self.watch.refresh(), over)


@pytest.fixture(scope="module")
def browse() -> Iterator[Browse]:
    require_chromium()
    with chromium() as browse:
        yield browse


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    live = Live(tmp_path)
    with live.server:
        yield live


def visit(
    browse: Browse, live: Live, look: Callable[[Tab], Awaitable[None]], scheme: str = "light", width: int = 1000
) -> None:
    """Open the page, wait for its charts, let `look` do what it does, and see what it asked for."""

    async def opened(tab: Tab) -> None:
        await tab.width(width)
        await tab.until(f"{TRACE}?.querySelector('.main-svg') !== null && {TRACE} !== null")
        await tab.colors(scheme)
        await look(tab)
        assert set(tab.requests) <= {live.server.url, f"{live.server.url}data", "data:,"}
        assert tab.requests.count(live.server.url) == 1  # it is never loaded again
        assert tab.problems == []

    browse(live.server.url, opened)


def test_numbers_change_as_the_log_grows_and_a_run_resumes_and_ends(browse: Browse, live: Live) -> None:
    async def look(tab: Tab) -> None:
        cell = "document.querySelector('tbody').textContent"
        last = f"{TRACE}.data[0].y.at(-1)"
        assert await tab.value(f"{TRACE}.data[0].y.length") == 10
        assert "step10/690" in await tab.value("document.querySelector('section').textContent")
        live.publish(stepped(11, 0.125), evaluated())
        await tab.until(f"{last} === 0.125")
        assert await tab.value("document.querySelector('progress').value") == 69
        assert "evaluated after step 69" in await tab.value(cell)
        assert await tab.value(f"{TRACE}.data.map(trace => trace.name.split(', ')[1])") == ["training", "validation"]
        live.publish(started(5, RESUMED_FROM), stepped(6, 7.0))
        await tab.until(f"{last} === 7")
        assert await tab.value(f"{TRACE}.data[0].x") == [64, 128, 192, 256, 320, 384]
        live.publish(saved(), done(), over=True)
        await tab.until("document.getElementById('note').textContent !== ''")
        assert await tab.value("document.title") == f"done 100 % {live.run}"
        asked = len(tab.requests)
        await asyncio.sleep(0.5)
        assert len(tab.requests) == asked  # it has stopped asking

    visit(browse, live, look)


def test_a_zoom_and_a_hidden_curve_and_the_axis_stay_as_points_come(browse: Browse, live: Live) -> None:
    async def look(tab: Tab) -> None:
        zoom = f"{TRACE}._fullLayout.xaxis.range.map(Math.round)"
        await tab.value(f"{TRACE}.scrollIntoView({{block: 'center'}})")
        x, y, width, height = await tab.value(
            f"(({{x, y, width, height}}) => [x, y, width, height])"
            f"({TRACE}.querySelector('.nsewdrag').getBoundingClientRect())"
        )
        moves = [("mousePressed", 0.25), ("mouseMoved", 0.4), ("mouseMoved", 0.5), ("mouseReleased", 0.5)]
        for kind, share in moves:  # a zoom, as a person drags it
            place = {"x": x + share * width, "y": y + height / 2}
            await tab.send("Input.dispatchMouseEvent", type=kind, **place, button="left", clickCount=1)
        await tab.until(f"{TRACE}._fullLayout.xaxis.autorange === false")
        zoomed = await tab.value(zoom)
        live.publish(stepped(11, 0.125))
        await tab.until(f"{TRACE}.data[0].y.length === 11")
        assert await tab.value(zoom) == zoomed
        await tab.click("input[value=seconds]")
        await tab.until(f"{TRACE}._fullLayout.xaxis.autorange === true")
        assert await tab.value(f"{TRACE}.data[0].x.at(-1)") == 11
        live.publish(stepped(12, 0.25))
        await tab.until(f"{TRACE}.data[0].y.length === 12")
        assert await tab.value(f"{TRACE}.data[0].x.at(-1)") == 12
        above = "document.getElementById('switches')"
        assert await tab.value(f"{above}.nextElementSibling.contains({TRACE})")
        assert await tab.value(f"{above}.previousElementSibling.querySelector('progress') !== null")

    visit(browse, live, look)


def test_a_server_that_is_gone_is_said_and_asked_again(browse: Browse, live: Live) -> None:
    """Another answer stands for one that does not come, which Chromium itself would report as a problem."""

    async def look(tab: Tab) -> None:
        await tab.value("window.before = fetch; window.fetch = async () => { throw new TypeError('gone'); }; 1")
        await tab.until("document.getElementById('note').textContent.startsWith('lockstep watch does not respond')")
        assert await tab.value(f"{TRACE}.data[0].y.length") == 10
        await tab.value("window.fetch = window.before; 1")
        await tab.until("document.getElementById('note').textContent === ''")

    visit(browse, live, look)


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 390), ("dark", 1000)])
def test_it_fits_a_phone_and_follows_the_system_colors(browse: Browse, live: Live, scheme: str, width: int) -> None:
    async def look(tab: Tab) -> None:
        live.publish(stepped(11, 0.125))  # drawn again in the same colors
        await tab.until(f"{TRACE}.data[0].y.length === 11")
        await tab.until("[...document.querySelectorAll('.chart')].every(e => e._fullLayout.width <= innerWidth)")
        assert await tab.value("document.documentElement.scrollWidth") <= width
        ground = await tab.value("getComputedStyle(document.body).backgroundColor")
        text = await tab.value(f"getComputedStyle({TRACE}.querySelector('.ytick text')).fill")
        dark, bright = ("rgb(13, 17, 23)", "rgb(230, 237, 243)"), ("rgb(255, 255, 255)", "rgb(27, 31, 36)")
        assert (ground, text) == (dark if scheme == "dark" else bright)

    visit(browse, live, look, scheme, width)


def test_a_table_stays_open_and_scrolled_as_rows_come(browse: Browse) -> None:
    saves = [(200.0 + number, saved()) for number in range(20)]
    server = PageServer("127.0.0.1", 0)

    def publish(count: int) -> None:
        server.publish([viewed(*GOING, *saves[:count], name=f"runs/{number}") for number in range(4)], is_final=False)

    async def look(tab: Tab) -> None:
        await tab.width(390)
        await tab.until(f"{TRACE}?.querySelector('.main-svg')")
        runs, open_ = "document.querySelector('.wide')", "document.querySelector('details:has(table)')"
        await tab.value(f"({open_}.open = true, {runs}.scrollTo(120, 0))")
        publish(9)
        await tab.until(f"{open_}.textContent.includes('36 rows')")
        assert await tab.value(f"[{open_}.open, {runs}.scrollLeft]") == [True, 120]
        assert tab.problems == []

    with server:
        publish(8)
        browse(server.url, look)


def test_what_runs_are_called_is_text(browse: Browse, tmp_path: Path) -> None:
    live = Live(tmp_path, EVIL.replace("/", "_"))

    async def look(tab: Tab) -> None:
        assert await tab.value("document.images.length") == 0
        assert "<img src=x" in await tab.value("document.querySelector('h2').textContent")
        assert "<img src=x" in await tab.value(f"{TRACE}.data[0].meta.name")

    with live.server:
        visit(browse, live, look)
