"""A slow link without root: a relay in front of each of two nodes on the loopback interface, which
the nodes announce as their own.

It ends TCP on both sides, so it shows rate and delay but not what they do to TCP's windows; and
only programs that can announce an address other than the one they listen on can use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from bench._line import Line
from bench._link import LinkError

AHEAD_S = 0.25  # seconds of bytes taken in before they can leave: then the sender feels the rate
CHUNK = 64 * 1024


class Relays:
    """Two nodes with ``rate`` bytes/s each way and ``delay`` seconds one way.

    LinkError for another number of nodes.
    """

    kind = "user-space relay"

    def __init__(self, nodes: int, rate: float, delay: float) -> None:
        if nodes != 2:
            raise LinkError(
                "the relay links two nodes; for more, network namespaces are needed (run as root)"
            )
        self._ports = [_free_port() for _ in range(nodes)]
        self._lines = [Line(rate, delay) for _ in range(nodes)]  # by sender
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        begun = asyncio.run_coroutine_threadsafe(self._begin(), self._loop)
        self._relays = begun.result(10)

    async def _begin(self) -> list[int]:
        self._servers = [
            await asyncio.start_server(self._serve(node), "127.0.0.1", 0, limit=CHUNK)
            for node in range(2)
        ]
        return [int(server.sockets[0].getsockname()[1]) for server in self._servers]

    def _serve(self, node: int):  # type: ignore[no-untyped-def]  # noqa: ANN202 - asyncio's own type is longer than this
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there, back = await asyncio.open_connection(
                    "127.0.0.1", self._ports[node], limit=CHUNK
                )
            except OSError:
                writer.close()
                return
            try:
                with contextlib.suppress(OSError):  # one side is gone, so the other is told
                    to, fro = (
                        pump(reader, back, self._lines[1 - node]),
                        pump(there, writer, self._lines[node]),
                    )
                    await asyncio.gather(to, fro)
            finally:
                back.close()
                writer.close()

        return relay

    def enter(self, node: int) -> list[str]:
        return []

    def ip(self, node: int) -> str:
        return "127.0.0.1"

    def port(self, node: int) -> int:
        return self._ports[node]

    def announced(self, node: int) -> int | None:
        return self._relays[node]

    def sent(self) -> list[int]:
        return [line.bytes for line in self._lines]

    def close(self) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2)
        self._loop.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line) -> None:
    """Carry one direction of a connection until its end, as late as ``line`` says.

    OSError if a side is gone.
    """
    clock = asyncio.get_running_loop().time
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(due - clock(), 0.0))
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    async def take() -> None:
        while data := await reader.read(CHUNK):
            await queue.put((line.send(clock(), len(data)), data))
            await asyncio.sleep(max(line.backlog(clock()) - AHEAD_S, 0.0))
        await queue.put((line.send(clock(), 0), b""))

    both = [asyncio.ensure_future(take()), asyncio.ensure_future(deliver())]
    try:
        await asyncio.gather(*both)
    finally:
        for task in both:
            task.cancel()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
