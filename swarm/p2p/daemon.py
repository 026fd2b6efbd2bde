"""A client of p2pd (libp2p's Go daemon, from hivemind's wheel): launch it under a guard, and talk
to it over its control socket.

The daemon speaks length-prefixed protobuf over a Unix socket in a private folder. Its messages come
from a file in hivemind's wheel that needs nothing of the package around it, so neither hivemind nor
torch is imported here: a bootstrap node runs without.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import logging
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from shoal.swarm.errors import NetworkError, StartupError
from shoal.swarm.identity import Identity, b58encode
from shoal.swarm.p2p import daemon_process
from shoal.swarm.p2p.addresses import is_loopback
from shoal.swarm.p2p.daemon_guard import GRACE_S
from shoal.swarm.p2p.daemon_process import Relay, daemon_path
from shoal.swarm.p2p.dial_backoff import DialBackoff
from shoal.swarm.p2p.multiaddr import (
    MAX_ID_BYTES,
    origin,
    peer_bytes,
    to_bytes,
    to_text,
    unix_address,
    varint,
)

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 2 << 20  # of one message of the daemon
ANSWER_S = 10.0  # for the daemon to take a stream handler, or to name the peer of a stream
FIND_S = 2  # a look into the address book of the daemon may take

Incoming = Callable[[str, str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""A stream handler: gets the id of the peer that opened the stream, the IP address it comes from,
and both ends.
"""


class DaemonError(NetworkError):
    """The daemon refused a request or could not fulfil it; the text is the daemon's."""


class PutOffError(DaemonError):
    """No address of a peer is due to be dialled; the daemon was not asked."""


DAEMON_GONE = (DaemonError, OSError, EOFError)
"""Raised by requests when the daemon refuses, or is dead."""


@functools.cache
def messages() -> Any:
    """Return the module of the daemon's protobuf messages."""
    loaded = sys.modules.get("hivemind.proto.p2pd_pb2")
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(
        "shoal_p2pd_pb2", daemon_process.hivemind_folder() / "proto" / "p2pd_pb2.py"
    )
    if spec is None or spec.loader is None:
        raise StartupError("the package hivemind lacks its file of messages: reinstall it.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def read_message(reader: asyncio.StreamReader, message: Any) -> Any:
    """Fill ``message`` with the next one and return it.

    Raises OSError if it has more than `MAX_FRAME_BYTES` bytes, or EOFError.
    """
    size = 0
    for shift in range(0, 28, 7):
        (byte,) = await reader.readexactly(1)
        size |= (byte & 127) << shift
        if byte < 128:
            break
    if size > MAX_FRAME_BYTES:
        raise OSError(f"the daemon announced {size} bytes")
    message.ParseFromString(await reader.readexactly(size))
    return message


class Daemon:
    """A running p2pd; make it with `launch`."""

    def __init__(self, peer_id: str, run_dir: Path) -> None:
        self.peer_id = peer_id
        self.backoff = DialBackoff()
        self._owner = os.getpid()
        self._run_dir = run_dir
        self.control = run_dir / "daemon.sock"
        self.inbound = run_dir / "client.sock"
        self.at_end: list[Callable[[], object]] = []  # called before the process is ended
        self._child: daemon_process.GuardedProcess | None = None  # the guard
        self._server: asyncio.AbstractServer | None = None
        self._handlers: dict[str, Incoming] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._output: deque[str] = deque(maxlen=20)  # its last lines

    @classmethod
    async def launch(
        cls,
        identity: Identity,
        *,
        listen: Sequence[str],
        relay: Relay = "auto",
        timeout: float = 30.0,
        **chosen: Any,
    ) -> Self:
        """Start a daemon with ``identity``'s peer id, with `daemon_process.options`; it answers
        when this returns.

        Raises StartupError, after removing everything again, within ``timeout`` seconds.
        """
        binary = daemon_path()
        daemon_process.check_binary(binary)
        run_dir, lock = daemon_process.run_folder()
        self = cls(identity.peer_id, run_dir)
        started = False
        try:
            key = identity.path
            if key is None:
                key = run_dir / "key"
                identity.write_to(key)
            chosen |= {
                "control": f"/unix{self.control}",
                "key": key,
                "listen": listen,
                "relay": relay,
            }
            command = [str(binary), *daemon_process.options(**chosen)]
            if (
                relay == "off"
                # -relay=0 has no effect, since p2pd's configuration has it on unless a file says
                # otherwise
            ):
                (run_dir / "config").write_text('{"Relay": {"Enabled": false}}')
                command.append(f"-f={run_dir / 'config'}")
            found = await asyncio.wait_for(self._start(command, lock), timeout)
            started = found == identity.peer_id
        except TimeoutError:
            raise StartupError(
                f"the network daemon did not answer within {timeout:g} s: the machine may be "
                "overloaded; try again."
            ) from None
        except DAEMON_GONE as error:
            raise StartupError(
                f"the network daemon started but cannot be talked to ({error}): try again."
            ) from error
        finally:
            os.close(lock)  # the guard has it
            if not started:
                await self.shutdown()
        if not started:
            raise StartupError(
                f"the network daemon did not come up as {identity.peer_id}: the key file {key} was "
                "changed meanwhile; start again."
            )
        return self

    async def _start(self, command: list[str], lock: int) -> str:
        """Start the process and wait for it; return the peer id that it has."""
        self._child = daemon_process.start_guarded(self._run_dir, command, lock)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._child.follow(self._output, ready)
        await ready
        self._server = await asyncio.start_unix_server(self._accept, str(self.inbound))
        return b58encode((await self._ask("IDENTIFY")).identify.id[:MAX_ID_BYTES])

    async def ended(self) -> int:
        assert self._child is not None
        return await self._child.wait()

    async def shutdown(self) -> None:
        """End the process and remove its folder; takes at most about `daemon_guard.GRACE`
        seconds.
        """
        if self._owner != os.getpid():  # a forked copy of this object owns nothing
            return
        for end in self.at_end:
            end()
        if self._server is not None:
            self._server.close()
        if self._child is not None:
            self._child.terminate()
            try:
                await asyncio.wait_for(self._child.wait(), 4 * GRACE_S)
            except TimeoutError:  # it was stopped, perhaps
                self._child.kill()
        shutil.rmtree(self._run_dir, ignore_errors=True)  # if the guard was killed

    def end_by_force(self) -> None:
        """Have the guard end the process, without the help of the loop; for any thread."""
        if self._owner == os.getpid() and self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGTERM)

    async def serve(self, protocol: str, handler: Incoming) -> None:
        """Answer streams of ``protocol`` with ``handler``; they are closed when it returns.

        Raises one of `DAEMON_GONE`.
        """
        self._handlers[protocol] = handler
        ask = messages().StreamHandlerRequest(
            addr=unix_address(self.inbound), proto=[protocol], balanced=False
        )
        try:
            await asyncio.wait_for(self._ask("STREAM_HANDLER", streamHandler=ask), ANSWER_S)
        except TimeoutError:
            raise DaemonError(f"the network daemon did not answer within {ANSWER_S:g} s.") from None
        except DaemonError as error:
            if "already set" not in str(error):  # by an earlier request whose answer came too late
                raise

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer an incoming stream in a task of our own: when asyncio's is cancelled, as at the
        end, its callback raises CancelledError, which the loop reports (Python below 3.12).
        """
        task = asyncio.get_running_loop().create_task(self._answer(reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand an incoming stream to the handler of its protocol."""
        timer = asyncio.get_running_loop().call_later(ANSWER_S, writer.transport.abort)
        try:
            info = await read_message(reader, messages().StreamInfo())
            timer.cancel()
            peer = b58encode(info.peer[:MAX_ID_BYTES])
            at = origin(info.addr)
            self.backoff.meet(peer, at)
            if (handler := self._handlers.get(info.proto)) is not None:
                await handler(peer, at, reader, writer)
        except (OSError, EOFError) as error:
            log.debug("an incoming stream ended early: %r", error)
        finally:
            timer.cancel()
            writer.close()

    async def request(
        self, kind: str, **fields: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
        """Send a request over a connection of its own; return that connection, which is now the
        caller's, and the answer.

        ``kind``, ``fields``: those of `p2pd_pb2.Request`. Raises one of `DAEMON_GONE`, after
        closing the connection.
        """
        types = messages()
        reader, writer = await asyncio.open_unix_connection(str(self.control))
        try:
            data = types.Request(type=types.Request.Type.Value(kind), **fields).SerializeToString()
            writer.write(varint(len(data)) + data)
            await writer.drain()
            answer = await read_message(reader, types.Response())
            if answer.type != types.Response.OK:
                raise DaemonError(answer.error.msg)
        except BaseException:
            writer.close()
            raise
        return reader, writer, answer

    async def _ask(self, kind: str, **fields: Any) -> Any:
        _, writer, answer = await self.request(kind, **fields)
        writer.close()
        return answer

    async def addresses(self) -> tuple[str, ...]:
        """Return full multiaddrs under which peers may reach this node, those beyond this machine
        first.

        Raises ValueError if there is none.
        """
        found = [to_text(address) for address in (await self._ask("IDENTIFY")).identify.addrs]
        if not found:
            raise ValueError("the network daemon has no address")
        return tuple(f"{address}/p2p/{self.peer_id}" for address in sorted(found, key=is_loopback))

    async def connect(
        self, peer_id: str, addresses: Sequence[str], *, seconds: int | None = None
    ) -> None:
        """Connect to a peer, unless this node is connected to it.

        Addresses that failed lately are put off (`DialBackoff`).

        ``seconds``: how long the daemon dials; by default as long as it likes.

        Raises ValueError if none of the addresses is one (a peer may send us anything),
        `PutOffError` if none is due, or another of `DAEMON_GONE`.
        """
        bare = {}
        wrong = ""
        for address in addresses:
            try:
                bare[address] = to_bytes(address.rpartition("/p2p/")[0] or address)
            except ValueError as error:
                wrong = str(error)
        if not bare:
            raise ValueError(wrong or "no address")
        due = self.backoff.due(peer_id, list(bare))
        if not due:
            if peer_id in await self.peers():
                return
            raise PutOffError("not dialled again yet")
        ask = messages().ConnectRequest(
            peer=peer_bytes(peer_id), addrs=[bare[address] for address in due], timeout=seconds
        )
        try:
            await self._ask("CONNECT", connect=ask)
        except (
            DaemonError,
            asyncio.CancelledError,
        ) as error:  # cancelled: it did not answer in time
            self.backoff.fail(due, str(error))
            raise

    async def open(
        self, peer_id: str, protocol: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream. Raises ValueError or one of `DAEMON_GONE`."""
        ask = messages().StreamOpenRequest(peer=peer_bytes(peer_id), proto=[protocol])
        reader, writer, answer = await self.request("STREAM_OPEN", streamOpen=ask)
        self.backoff.meet(peer_id, origin(answer.streamInfo.addr))
        return reader, writer

    async def peers(self) -> tuple[str, ...]:
        """Return the ids of all connected peers, and note where they are."""
        return tuple(await self.origins())

    async def origins(self) -> dict[str, str]:
        """Return the IP address from which each connected peer came, empty for one by a relay; and
        note it.
        """
        found = {
            b58encode(peer.id[:MAX_ID_BYTES]): peer.addrs
            for peer in (await self._ask("LIST_PEERS")).peers
        }
        hosts = {
            peer: next(filter(None, map(origin, addresses)), "")
            for peer, addresses in found.items()
        }
        for peer, host in hosts.items():
            self.backoff.meet(peer, host)
        return hosts

    async def ways(self) -> dict[str, list[str]]:
        """Return the addresses of each connected peer's connections, but of kinds that this node
        does not know.
        """
        found: dict[str, list[str]] = {}
        for peer in (await self._ask("LIST_PEERS")).peers:
            found.setdefault(b58encode(peer.id[:MAX_ID_BYTES]), []).extend(_known(peer.addrs))
        return found

    async def disconnect(self, peer_id: str) -> None:
        """End all connections to a peer. Raises ValueError or one of `DAEMON_GONE`."""
        await self._ask(
            "DISCONNECT", disconnect=messages().DisconnectRequest(peer=peer_bytes(peer_id))
        )

    async def is_local(self, peer_id: str) -> bool:
        """Return whether every connection to a peer stays on this machine.

        Raises one of `DAEMON_GONE`.
        """
        addresses = (await self.ways()).get(peer_id, [])
        return bool(addresses) and all(
            is_loopback(text) and "p2p-circuit" not in text for text in addresses
        )

    async def where(self, peer_id: str) -> tuple[str, ...]:
        """Return the full multiaddrs that a connected peer gave as its own; none if it gave none
        yet.

        Not those of the connections: one that the peer opened comes from a port on which it does
        not listen. Addresses of kinds that this node does not know are left out. Raises one of
        `DAEMON_GONE`, also when the peer is not connected and libp2p's own routing does not know
        it.
        """
        types = messages()
        ask = types.DHTRequest(
            type=types.DHTRequest.FIND_PEER, peer=peer_bytes(peer_id), timeout=FIND_S
        )
        return tuple(
            f"{address}/p2p/{peer_id}"
            for address in _known((await self._ask("DHT", dht=ask)).dht.peer.addrs)
        )


def _known(addresses: Iterable[bytes]) -> Iterator[str]:
    """Yield the text of those binary multiaddrs that this node knows."""
    for address in addresses:
        with contextlib.suppress(ValueError):
            yield to_text(address)
