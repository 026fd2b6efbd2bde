"""The page as a browser shows it: only that runs its script. Headless Chromium, where there is
one.
"""

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from importlib.util import find_spec

import pytest

from shoal.node.watch.source import Recorder
from tests.support.watched_peers import NOW

SPOKEN = find_spec("aiohttp") is not None
if SPOKEN:
    from bench._browser import browser, chromium

CHROMIUM = chromium() if SPOKEN else None
ENDED = "document.getElementById('state')?.textContent === 'end of the recording'"
pytestmark = [
    pytest.mark.slow(reason="starts Chromium"),
    pytest.mark.skipif(not SPOKEN, reason="aiohttp is not installed"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


@pytest.fixture
def recording(authors, tmp_path):
    """Of two peers, one of which falls silent and whose name is a piece of HTML; and a verdict."""
    anna, bert, carl = authors
    path = tmp_path / "swarm.jsonl"
    recorder = Recorder(path)
    for number in range(30):
        invalid = int(number > 5)
        if number < 15:
            recorder.take(
                anna.heard(anna.round(number, [bert]), at=NOW + number, name="<i>anna</i>")
            )
        projection = (number, 2.0, (float(number),) * 16)
        more = {
            "checked": number,
            "claims": number,
            "invalid": invalid,
            "projection": projection,
            "without_partner": 2 * (number > 20),
        }
        more |= {"why": "<b>anna</b> did not answer in time"} if number > 14 else {}
        recorder.take(
            bert.heard(
                bert.round(number, [anna] if number < 15 else []),
                at=NOW + number,
                bytes_sent=10**6 * number,
                **more,
            )
        )
        recorder.take(
            carl.heard(carl.round(number), at=NOW + number, projection=(number, 2.0, (0.0,) * 16))
        )
    recorder.close()
    return path


def look(recording, work, **window):
    """Run ``work(tab)`` on the page at the end of ``recording``, and see that its scripts did not
    fail.
    """
    window = {"width": 1400, "height": 900, **window}

    @asynccontextmanager
    async def served():
        command = [
            sys.executable,
            "-m",
            "shoal",
            "watch",
            "--replay",
            str(recording),
            "--speed",
            "0",
            "--web",
            "0",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                yield server.stdout.readline().strip()
            finally:
                server.terminate()

    async def main():
        async with served() as address, browser(CHROMIUM) as tab:
            await tab.open(address, **window)
            await tab.until(ENDED)
            await tab.until("document.querySelectorAll('canvas').length >= 5")
            await work(tab)
            assert tab.errors == []

    asyncio.run(main())


def text(element):
    return f"document.getElementById({json.dumps(element)}).textContent"


def test_names_numbers_charts_roles_and_faults_are_on_the_page(recording):
    async def work(tab):
        assert "<i>anna</i>" in await tab.value(text("peers"))
        assert "<b>anna</b> did not answer in time" in await tab.value(text("peers"))
        assert await tab.value("document.querySelectorAll('#peers i, #peers b').length") == 0
        assert await tab.value("document.querySelectorAll('#loss .u-axis').length") == 2
        assert (await tab.value(text("loss-text"))).startswith("Round 29: mean ")
        assert (await tab.value(text("loss_over_time-text"))).startswith("After 0:29: mean ")
        assert "distance 0" not in await tab.value(text("consensus-text"))
        assert "sent 1 MB" in await tab.value(text("traffic-text"))
        assert "Round 14" not in await tab.value(text("meetings"))
        assert (await tab.value(text("meetings"))).startswith("Round 29: ")
        key = await tab.value(text("key"))
        assert "◆ trains and verifies" in key
        assert "○ silent or gone" in key
        faults = await tab.value(text("faults"))
        assert "bert found no partner in a round and kept its own step, twice so far" in faults
        assert "bert checked a claim of another peer and found it invalid" in faults
        assert "<i>anna</i> fell silent in round 14" in await tab.value(text("news"))

    look(recording, work)


@pytest.mark.parametrize("width", [1400, 390])
def test_it_fills_the_width_and_nothing_sticks_out(recording, width):
    async def work(tab):
        assert await tab.value("document.documentElement.scrollWidth") == width
        table = "document.querySelector('table')"
        fits = f"{table}.scrollWidth <= {table}.parentElement.clientWidth"
        await tab.value(
            "last.totals.confirmed = {exchanges: 1234, tokens: 345678, rounds: 10, elsewhere: 5}; "
            "tiles(last)"
        )
        tallest = (
            "Math.max(...[...document.querySelectorAll('#tiles div')].map((tile) => "
            "tile.clientHeight))"
        )
        assert await tab.value(tallest) < 110  # three lines
        assert await tab.value(fits) == (width == 1400)  # a narrow page scrolls it in its own box
        right = (
            "Math.max(...[...document.querySelectorAll('section:not([hidden])')].map((s) => "
            "s.getBoundingClientRect().right))"
        )
        assert width - 24 <= await tab.value(right) <= width
        columns = (
            "new Set([...document.querySelectorAll('section:not([hidden])')].map((s) => "
            "s.getBoundingClientRect().left)).size"
        )
        assert await tab.value(columns) == (1 if width == 390 else 4)

    look(recording, work, width=width)


def test_it_is_used_by_keyboard_alone(recording):
    async def work(tab):
        focus = "document.querySelector('#loss > div').focus()"
        await tab.value(focus)
        await tab.press("Home", 36)
        await tab.press("ArrowRight", 39)
        assert (await tab.value(text("loss-text"))).startswith("Round 1: mean 2")
        await tab.value("document.getElementById('time').focus()")
        await tab.press("Home", 36)
        await tab.until(f"{text('clock')}.startsWith('0:00 of')")
        await tab.until("document.querySelector('#peers td:nth-child(4)').textContent === '0'")
        await tab.value("document.getElementById('time').value = 100")
        await tab.value("document.getElementById('time').dispatchEvent(new Event('input'))")
        await tab.until(f"{text('clock')}.startsWith('0:10 of 0:29')")
        await tab.until("document.querySelector('#peers td:nth-child(4)').textContent === '10'")
        assert await tab.value(text("state")) == "recording"
        await tab.value(
            "document.getElementById('speed').value = 64; document.getElementById('play').click()"
        )
        await tab.until(ENDED)

    look(recording, work)


CONTRAST = """(() => {
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parts(getComputedStyle(e).backgroundColor); if (c[3] !== 0) return c; } return [255, 255, 255]; };
  const shown = [...document.querySelectorAll('h1, h2, dt, dd, th, td, li, p, button, output, label, footer')].filter((e) => e.textContent && e.offsetParent);
  return shown.map((e) => { const [a, b] = [light(parts(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); }).sort((x, y) => x - y)[0];
})()"""  # noqa: E501 - the contrast of WCAG 2, of the element that has least


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_and_motion_is_optional(recording, dark):
    """Text has contrast and nothing moves where less motion is asked for."""

    async def work(tab):
        assert await tab.value(CONTRAST) >= 4.5
        assert await tab.value("document.getAnimations().length") == 0
        before = await tab.value("getComputedStyle(document.body).backgroundColor")
        await tab.value("document.getElementById('theme').click()")
        assert await tab.value("getComputedStyle(document.body).backgroundColor") != before

    look(recording, work, dark=dark)
