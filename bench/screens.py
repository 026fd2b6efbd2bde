"""Pictures of `shoal watch`, of a recording: the page at 1400 and 390 pixels, light and dark, and
the terminal at 80x24 and 120x40.

    python bench/screens.py run.jsonl --out docs

Needs Chromium, and the extras `watch` and `bench` (Pillow comes with matplotlib).
`bench/moving_picture.py` makes a recording.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import re
import subprocess
import sys
from pathlib import Path

from PIL import Image

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a file, its own folder stands there

from bench._browser import browser, chromium
from shoal.node.watch.source import recorded, replayed
from shoal.node.watch.tui import WatchApp

PAGES = {
    "watch-1400-light": (1400, False),
    "watch-1400-dark": (1400, True),
    "watch-390-light": (390, False),
    "watch-390-dark": (390, True),
}
TERMINALS = {"watch-80x24": (80, 24), "watch-120x40": (120, 40)}
LIMIT_S = 120.0


async def pages(recording: Path, out: Path, at: float | None) -> None:
    """Write the pictures of the page, ``at`` seconds after the beginning of ``recording``, or at
    its end.
    """
    program = chromium()
    if program is None:
        raise SystemExit(
            "No Chromium is installed, so there are no pictures of the page (apt install chromium)."
        )
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
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            for name, (width, dark) in PAGES.items():
                async with browser(program) as tab:
                    await tab.open(address, width=width, height=900, dark=dark)
                    await tab.until(
                        "document.getElementById('state')?.textContent === 'end of the recording'",
                        LIMIT_S,
                    )
                    await tab.until("document.querySelectorAll('canvas').length >= 5")
                    if at is not None:
                        move = f"document.getElementById('time').value = {10 * at:.0f}"
                        await tab.value(
                            f"{move}; document.getElementById('time').dispatchEvent(new "
                            "Event('input'))"
                        )
                        await tab.until(
                            "document.getElementById('state').textContent === 'recording'", LIMIT_S
                        )
                    await tab.value(
                        "new Promise((done) => requestAnimationFrame(() => "
                        "requestAnimationFrame(done)))"
                    )
                    await tab.picture(out / f"{name}.png")
                    smaller(out / f"{name}.png")
                    for error in tab.errors:
                        print(f"{name}: {error}", file=sys.stderr)
        finally:
            server.terminate()


async def terminals(recording: Path, out: Path) -> None:
    """Write the pictures of the terminal, as they are painted first."""
    for name, size in TERMINALS.items():
        inbox: queue.Queue = queue.Queue()  # type: ignore[type-arg]
        for event in recorded(recording):
            inbox.put(event)
        source = replayed(recording, 0.0, inbox.put)
        source.ended.set()
        app = WatchApp(inbox, source, live=False)
        async with app.run_test(size=size) as pilot:
            while not inbox.empty():
                app.frame()
            await pilot.pause()
            # Without the fonts that it would fetch from elsewhere: the reader's own monospace does.
            drawn = re.sub(
                r"@font-face \{.*?\}",
                "",
                app.export_screenshot(title="shoal watch"),
                flags=re.DOTALL,
            )
            (out / f"{name}.svg").write_text(drawn, encoding="utf-8")


def smaller(path: Path) -> None:
    """Write the picture again with a palette of 256 colours, a third as large."""
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recording", type=Path)
    parser.add_argument(
        "--at",
        type=float,
        help="seconds after its beginning at which the page is shown; default: the end",
    )
    parser.add_argument("--out", type=Path, default=Path("docs"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(terminals(given.recording, given.out))
    asyncio.run(pages(given.recording, given.out, given.at))


if __name__ == "__main__":
    main()
