"""A p2pd for a seed, spoken to without hivemind and so without torch: started, asked for its addresses, given a stream handler.

The daemon speaks length-prefixed protobuf over a Unix socket. Its messages come from the file in hivemind's wheel, which needs
nothing of the package around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.swarm.errors import NetworkError, StartupError
from shoal.swarm.identity import Identity, b58encode
from shoal.swarm.p2p.daemon_process import (
    Relay,
    check_binary,
    daemon_path,
    follow,
    hivemind_folder,
    options,
    run_folder,
    start_guarded,
)
from shoal.swarm.p2p.multiaddr import is_loopback, origin
from shoal.swarm.p2p.stream import Stream, TrafficMeter

log = logging.getLogger(__name__)

Handler = Callable[[Stream], Awaitable[None]]
MAX_ANSWER = 1 << 20  # bytes of a message of the daemon
ANSWER_S = 10.0
START_S = 30.0


@functools.cache
def _messages() -> Any:
    """The module of the daemon's protobuf messages."""
    loaded = sys.modules.get("hivemind.proto.p2pd_pb2")
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location("shoal_p2pd_pb2", hivemind_folder() / "proto" / "p2pd_pb2.py")
    if spec is None or spec.loader is None:
        raise StartupError("the package hivemind lacks its file of messages: reinstall it.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def _write(writer: asyncio.StreamWriter, message: Any) -> None:
    data = message.SerializeToString()
    size, head = len(data), bytearray()
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    writer.write(bytes([*head, size]) + data)
    await writer.drain()


async def _read(reader: asyncio.StreamReader, message: Any) -> Any:
    size = 0
    for shift in range(0, 28, 7):
        (byte,) = await reader.readexactly(1)
        size |= (byte & 127) << shift
        if byte < 128:
            break
    if size > MAX_ANSWER:
        raise OSError(f"the daemon announced {size} bytes")
    message.ParseFromString(await reader.readexactly(size))
    return message


class SeedDaemon:
    """A running p2pd that peers may take for sure to be reachable; make it with `launch`."""

    def __init__(self, run_dir: Path) -> None:
        self.traffic = TrafficMeter()
        self.addresses: tuple[str, ...] = ()
        self._run_dir = run_dir
        self._said: deque[str] = deque(maxlen=200)
        self._process: asyncio.subprocess.Process | None = None
        self._follower: asyncio.Task[None] | None = None
        self._servers: list[asyncio.AbstractServer] = []

    @classmethod
    async def launch(
        cls, identity: Identity, *, listen: Sequence[str], announce: Sequence[str] = (), relay: bool = True
    ) -> SeedDaemon:
        """Start it; it answers when this returns. ``relay``: forward for peers that nobody can reach.

        Raises StartupError within some 30 seconds, after removing everything again.
        """
        binary = daemon_path()
        check_binary(binary)
        run_dir, lock = run_folder()
        self = cls(run_dir)
        mode: Relay = "auto" if relay else "off"
        try:
            key = identity.path
            if key is None:
                key = run_dir / "key"
                identity.write_to(key)
            control = f"/unix{run_dir}/daemon.sock"
            chosen = options(control=control, key=key, listen=listen, announce=announce, relay=mode, public=True, idle="")
            await asyncio.wait_for(self._start([str(binary), *chosen], lock, identity.peer_id), START_S)
        except BaseException as error:
            await self.close()
            if isinstance(error, asyncio.TimeoutError):
                raise StartupError(f"the network daemon did not answer within {START_S:g} s: try again.") from None
            if isinstance(error, (OSError, EOFError, NetworkError)):
                raise StartupError(f"the network daemon started but cannot be talked to ({error}): try again.") from error
            raise
        finally:
            os.close(lock)  # the guard has it
        return self

    async def _start(self, command: list[str], lock: int, peer_id: str) -> None:
        self._process = await start_guarded(self._run_dir, command, lock)
        assert self._process.stdout is not None
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._follower = asyncio.create_task(follow(self._process.stdout, self._said, ready))
        await ready
        messages = _messages()
        answer = await self._ask(messages.Request(type=messages.Request.IDENTIFY))
        if b58encode(answer.identify.id) != peer_id:
            raise StartupError(f"the network daemon did not come up as {peer_id}: the key file was changed; start again.")
        # It printed them as text before it answered.
        while len(found := self._printed()) < len(answer.identify.addrs):
            await asyncio.sleep(0.01)
        usable = [found_ for found_ in found if "/p2p-circuit" not in found_]
        self.addresses = tuple(f"{address}/p2p/{peer_id}" for address in sorted(usable, key=is_loopback))

    def _printed(self) -> list[str]:
        lines = list(self._said)
        return [line for line in lines[lines.index("Peer Addrs:") + 1 :] if line.startswith("/")] if "Peer Addrs:" in lines else []

    async def _ask(self, request: Any) -> Any:
        async def ask() -> Any:
            reader, writer = await asyncio.open_unix_connection(str(self._run_dir / "daemon.sock"))
            try:
                await _write(writer, request)
                return await _read(reader, _messages().Response())
            finally:
                writer.close()

        try:
            answer = await asyncio.wait_for(ask(), ANSWER_S)
        except asyncio.TimeoutError:
            raise NetworkError(f"the network daemon did not answer within {ANSWER_S:g} s.") from None
        if answer.type != _messages().Response.OK:
            raise NetworkError(f"the network daemon refused a request ({answer.error.msg[:200]}).")
        return answer

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Answer streams of ``protocol`` with ``handler``, which closes them. NetworkError."""
        messages = _messages()

        async def incoming(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                info = await asyncio.wait_for(_read(reader, messages.StreamInfo()), ANSWER_S)
                await handler(Stream(b58encode(info.peer), reader, writer, self.traffic, origin(info.addr)))
            except (OSError, EOFError, asyncio.TimeoutError) as error:
                log.debug("a stream ended before it began: %r", error)
            finally:
                writer.close()

        path = self._run_dir / f"handler{len(self._servers)}.sock"
        self._servers.append(await asyncio.start_unix_server(incoming, str(path)))
        ask = messages.StreamHandlerRequest(addr=_unix(path), proto=[protocol], balanced=False)
        await self._ask(messages.Request(type=messages.Request.STREAM_HANDLER, streamHandler=ask))

    async def ended(self) -> int:
        """Wait until the process is gone; its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def close(self) -> None:
        """End the process and remove its folder."""
        for server in self._servers:
            server.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()
        if self._follower is not None:
            self._follower.cancel()
        shutil.rmtree(self._run_dir, ignore_errors=True)


def _unix(path: Path) -> bytes:
    """The multiaddr /unix/PATH in its binary form: code 400, a length and the path, the numbers as varints."""
    data = os.fsencode(path)
    length = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 127 | 128, len(data) >> 7])
    return b"\x90\x03" + length + data
