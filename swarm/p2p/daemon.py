"""One p2pd (libp2p's Go daemon, from hivemind's wheel) in a private folder and under a guard.

hivemind's own launcher keeps its sockets in the open temporary folder, leaves them there after a crash, and knows no
GossipSub; so `Daemon` launches the process itself and inherits the rest. All private hooks of hivemind that Shoal uses are in
this file, which is why pyproject.toml pins the release.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from shoal.swarm.errors import StartupError
from shoal.swarm.identity import Identity, b58decode
from shoal.swarm.p2p.daemon_process import Relay, check_binary, daemon_path, follow, options, run_folder, start_guarded
from shoal.swarm.p2p.multiaddr import is_loopback

log = logging.getLogger(__name__)

# hivemind prints to stderr on its own account. Its messages go the usual way of logging instead, errors only, for what we
# have to say about its failures we say ourselves.
use_hivemind_log_handler("nowhere")
if "HIVEMIND_LOGLEVEL" not in os.environ:
    logging.getLogger("hivemind").setLevel(logging.ERROR)
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level for the whole program

ASK_S = 2  # seconds a look into the address book of the daemon may take


class Daemon(P2P):  # type: ignore[misc]
    """A running p2pd; make it with `launch`."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = os.getpid()
        self._daemon_listen_maddr = self._client_listen_maddr = None
        self._run_dir: Path | None = None
        self._said: deque[str] = deque(maxlen=20)  # the last lines of its output
        self.refuses: Callable[[str, int], str] = lambda peer, nbytes: ""
        """Why a call of a peer, of so many bytes, is refused; nothing if it is answered."""

    @classmethod
    async def launch(
        cls,
        identity: Identity,
        *,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        relays: Sequence[str] = (),
        relay: Relay = "auto",
        public: bool = False,
        light: bool = False,
        timeout: float = 30.0,
    ) -> Daemon:
        """Start a daemon with ``identity``'s peer id; it answers when this returns.

        ``relays``, ``relay``, ``public``: see `daemon_process.options`. ``light``: take part in libp2p's own peer routing as a
        client only. Raises StartupError, after removing everything again, within ``timeout`` seconds.
        """
        binary = daemon_path()
        check_binary(binary)
        self = cls()
        self._run_dir, lock = run_folder()
        started = False
        try:
            key = identity.path
            if key is None:
                key = self._run_dir / "key"
                identity.write_to(key)
            self._daemon_listen_maddr = Multiaddr(f"/unix{self._run_dir}/daemon.sock")
            self._client_listen_maddr = Multiaddr(f"/unix{self._run_dir}/client.sock")
            chosen = options(
                control=str(self._daemon_listen_maddr),
                key=key,
                listen=listen,
                announce=announce,
                relays=relays,
                relay=relay,
                public=public,
                light=light,
            )
            await asyncio.wait_for(self._start([str(binary), *chosen], lock), timeout)
            started = True
        except asyncio.TimeoutError:
            raise StartupError(
                f"the network daemon did not answer within {timeout:g} s: the machine may be overloaded; try again."
            ) from None
        except (P2PDaemonError, OSError, EOFError) as error:
            raise StartupError(f"the network daemon started but cannot be talked to ({error}): try again.") from error
        finally:
            os.close(lock)  # the guard has it
            if not started:
                await self.shutdown()
        if str(self.peer_id) != identity.peer_id:
            await self.shutdown()
            raise StartupError(
                f"the network daemon came up as {self.peer_id} and not as {identity.peer_id}: the key file {key} was "
                "changed meanwhile; start again."
            )
        return self

    async def _start(self, command: list[str], lock: int) -> None:
        assert self._run_dir is not None
        self._child: Any = await start_guarded(self._run_dir, command, lock)
        self._alive = True
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader_task = asyncio.create_task(self._read_outputs(ready))
        await ready
        self._client = await p2pclient.Client.create(
            control_maddr=self._daemon_listen_maddr, listen_maddr=self._client_listen_maddr
        )
        await self._ping_daemon()

    async def _read_outputs(self, ready: asyncio.Future[None]) -> None:
        """Replaces hivemind's, which forgets all but the last line."""
        await follow(self._child.stdout, self._said, ready)

    async def ended(self) -> int:
        """Wait until the process is gone; its exit status. (`is_alive` does not know.)"""
        return int(await self._child.wait())

    async def shutdown(self) -> None:
        """End the process and remove its folder; takes at most about `guard.GRACE` seconds."""
        self._terminate()
        if self._child is not None:
            await self._child.wait()
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)  # if the guard was killed

    def end_by_force(self) -> None:
        """Have the guard end the process, without the help of the loop; for any thread."""
        if self._owner == os.getpid() and self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGTERM)

    def _terminate(self) -> None:
        if self._owner == os.getpid():  # a forked copy of this object owns nothing
            super()._terminate()

    async def _add_protobuf_unary_handler(
        self, handle_name: str, handler: Callable[[Any, Any], Awaitable[Any]], input_protobuf_type: Any, balanced: bool = False
    ) -> None:
        """Adds a refusal to hivemind's: its DHT node registers its calls by this."""

        async def guarded(request: Any, context: Any) -> Any:
            if reason := self.refuses(context.remote_id.to_base58(), request.ByteSize()):
                raise P2PDaemonError(f"refused: {reason}")
            return await handler(request, context)

        await super()._add_protobuf_unary_handler(handle_name, guarded, input_protobuf_type, balanced=balanced)

    async def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs under which peers may reach us, those beyond this machine first."""
        found = [str(a) for a in await self.get_visible_maddrs(latest=True)]
        return tuple(sorted(found, key=is_loopback))

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Connect to a peer (nothing happens if we are).

        Raises ValueError if none of the addresses is one (a peer may tell us anything), or hivemind's P2PDaemonError.
        """
        bare, wrong = [], ""
        for address in addresses:
            try:
                bare.append(binary(_without_peer(address)))
            except ValueError as error:
                wrong = str(error)
        if not bare:
            raise ValueError(wrong or "no address")
        ask = p2pd_pb2.ConnectRequest(peer=PeerID.from_base58(peer_id).to_bytes(), addrs=bare)
        _, writer, _ = await self.request(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=ask))
        writer.close()

    async def request(self, request: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
        """Send a `p2pd_pb2.Request` over a connection of its own, which is then the caller's; and its answer.

        Raises hivemind's P2PDaemonError or OSError; unlike hivemind's, closes the socket when it fails.
        """
        reader, writer = await self._client.control.daemon_connector.open_connection()
        try:
            await write_pbmsg(writer, request)
            answer = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, answer)
            raise_if_failed(answer)
        except BaseException:
            writer.close()
            raise
        return reader, writer, answer

    async def open(self, peer_id: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream. Raises as ``request`` does."""
        ask = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer_id).to_bytes(), proto=[protocol])
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=ask)
        reader, writer, _ = await self.request(request)
        return reader, writer

    async def peers(self) -> tuple[str, ...]:
        """Ids of all whom we are connected to."""
        return tuple(dict.fromkeys(peer.peer_id.to_base58() for peer in await self.list_peers()))

    async def where(self, peer_id: str) -> tuple[str, ...]:
        """Full multiaddrs that a peer we are connected to gave as its own; empty if it gave none yet.

        Not those of the connections: one that the peer opened comes from a port on which it does not listen. Raises hivemind's
        P2PDaemonError or OSError, also when we are not connected and libp2p's own routing knows no such peer.
        """
        ask = p2pd_pb2.DHTRequest(type=p2pd_pb2.DHTRequest.FIND_PEER, peer=PeerID.from_base58(peer_id).to_bytes(), timeout=ASK_S)
        _, writer, answer = await self.request(p2pd_pb2.Request(type=p2pd_pb2.Request.DHT, dht=ask))
        writer.close()
        return tuple(f"{Multiaddr(address)}/p2p/{peer_id}" for address in answer.dht.peer.addrs)


async def join_dht(daemon: Daemon, peers: Sequence[str], validator: Any, light: bool) -> DHTNode:
    """A DHT node on ``daemon``, met with ``peers`` (peer ids we are connected to). Takes some seconds if none answers.

    Whether any of them takes part in the DHT is to be seen from `met`.
    """
    node = await DHTNode.create(
        p2p=daemon,
        node_id=DHTID.generate(source=str(daemon.peer_id)),  # the same after a restart
        initial_peers=[f"/p2p/{peer}" for peer in peers],
        record_validator=validator,
        client_mode=light,
        ensure_bootstrap_success=False,
        strict=False,
        cache_locally=False,  # we always ask for the newest
        cache_refresh_before_expiry=0,
    )
    for peer in peers[:1]:
        try:
            await node.protocol.call_ping(PeerID.from_base58(peer), validate=True, strict=True)
        except ValidationError as error:
            if "time" in str(error):
                log.warning("this machine's clock differs from peer %s's: set it by NTP (%s)", peer, error)
            else:
                log.warning(
                    "peer %s cannot connect back to this node: open the port given by --listen in the firewall, or others "
                    "may be unable to start an exchange with it",
                    peer,
                )
    return node


def met(node: DHTNode) -> int:
    """How many other DHT nodes this one knows."""
    return len(node.protocol.routing_table.uid_to_peer_id)


def binary(address: str) -> bytes:
    """A multiaddr in its binary form. ValueError if it is none.

    hivemind writes the peer id of a relay within an address as a CID, which libp2p's Go code does not read.
    """
    head, *rest = address.split("/p2p/")
    data = bytes(Multiaddr(head).to_bytes())
    for part in rest:
        peer, slash, more = part.partition("/")
        raw = b58decode(peer) if len(peer) <= 64 else b""
        if not raw:
            raise ValueError(f"{peer[:80]!r} is no peer id")
        data += b"\xa5\x03" + bytes([len(raw)]) + raw  # 421, "p2p", as a varint
        if slash:
            data += bytes(Multiaddr(slash + more).to_bytes())
    return data


def _without_peer(address: str) -> str:
    """The address without the last ``/p2p/ID``, the form in which the daemon wants it."""
    head, found, _ = address.rpartition("/p2p/")
    return head if found else address
