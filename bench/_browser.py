"""A headless Chromium, driven over its DevTools protocol: sizes, colour schemes, keys, clicks and
pictures of a page.

aiohttp speaks to it, which `shoal watch --web` needs anyway; so no other package is needed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S, ANSWER_S = 60.0, 60.0


def chromium() -> str | None:
    """Return the path of a Chromium, or None if none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page in the browser.

    ``errors``: what its scripts threw, and what its security policy refused.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self.errors: list[str] = []

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            if (
                waiting := self._waiting.pop(data.get("id", 0), None)
            ) is not None and not waiting.done():
                waiting.set_result(data)
            elif data.get("method") == "Runtime.exceptionThrown":
                details = data["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            elif (
                data.get("method") == "Log.entryAdded"
                and data["params"]["entry"]["level"] == "error"
            ):
                self.errors.append(data["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a DevTools command.

        RuntimeError if it failed, TimeoutError without an answer.
        """
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._waiting[number], ANSWER_S)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def open(
        self, address: str, *, width: int, height: int, dark: bool = False, still: bool = True
    ) -> None:
        """Show ``address`` in a window of these pixels.

        ``still``: the user asks for reduced motion.
        """
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": name, "value": value} for name, value in features.items()],
        )
        await self.call("Page.navigate", url=address)

    async def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression, as JSON. RuntimeError if it throws."""
        found = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(
                found["exceptionDetails"]
                .get("exception", {})
                .get("description", "the script failed")
            )
        return found["result"].get("value")

    async def until(self, script: str, seconds: float = 60.0) -> None:
        """Wait until a JavaScript expression is true. TimeoutError."""
        body = (
            f"(async () => {{ while (!({script})) await new Promise((done) => setTimeout(done, "
            f"50)); return true; }})()"
        )
        await asyncio.wait_for(self.value(body), seconds)

    async def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        for kind in ("rawKeyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    async def picture(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browser(program: str) -> AsyncIterator[Tab]:
    """Yield the tab of a new browser with a profile of its own. TimeoutError if it does not
    start.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
        ]
        command = [
            program,
            *flags,
            f"--user-data-dir={profile}",
            "--remote-debugging-port=0",
            "about:blank",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                port = await asyncio.wait_for(_port(Path(profile) / "DevToolsActivePort"), START_S)
                async with aiohttp.ClientSession() as session:
                    async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                        pages = [page for page in await answer.json() if page["type"] == "page"]
                    async with session.ws_connect(
                        pages[0]["webSocketDebuggerUrl"], max_msg_size=0
                    ) as socket:
                        tab = Tab(socket)
                        yield tab
                        tab._reader.cancel()
            finally:
                process.terminate()


async def _port(file: Path) -> int:
    while True:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(file.read_text().splitlines()[0])
        await asyncio.sleep(0.05)
