"""The slots that this node holds at relays, asked for again and again, for a slot ends with the connection on which it was given.

The daemon asks each relay once, when libp2p finds that nobody can dial this node, and not again after the connection was lost. So
from then on this module asks: every `RENEW_S` seconds each of the first `MAX_RELAYS` relays that answer, by libp2p's own protocol
(circuit v2, RESERVE), which costs a relay nothing when it has the slot. A connection on which two requests in a row got no answer
is ended, and made anew. A machine that was taken to another network has lost all connections: the daemon, which would find that
out in half a minute, is told to end them as soon as the machine's address is gone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from shoal.swarm.errors import NetworkError, StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p import dial
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon, read_message
from shoal.swarm.p2p.multiaddr import host_of, is_loopback, is_public_host
from shoal.swarm.p2p.stream import short

log = logging.getLogger(__name__)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
RESERVE = b"\x02\x08\x00"  # a HopMessage, its length before it; type: RESERVE
NO_SLOT = "gave no slot"
LIMIT, DATA, STATUS, OK = 4, 2, 5, 100  # fields of the answer: limits, the bytes in these; its status, and the good one
LEAST, STARTS = 1 << 30, 5  # bytes that a relay has to forward each way, and starts of a daemon until it does
RENEW_S = 15.0  # seconds between two requests to a relay
ASK_S, CONNECT_S = 8.0, 5.0  # seconds for the answer, and for a connection to it
AWAY = ("192.0.2.1", 9)  # an address elsewhere (RFC 5737), to which nothing is sent
LATER_S = 60.0  # seconds until a peer is asked again that is no relay, or gives no slot
STUCK_S, RESTART_S = 30.0, 300.0  # seconds without a slot until the daemon is restarted, and between two such restarts


def sends_from() -> str:
    """Return the IPv4 address from which this machine sends to others; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_port:
        try:
            any_port.connect(AWAY)
            return str(any_port.getsockname()[0])
        except OSError:
            return ""


def is_gone(address: str) -> bool:
    """Return whether this machine no longer has an ``address`` that it had."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_port:
        try:
            any_port.bind((address, 0))
        except OSError:
            return True
        return False


class RelaySlots:
    """The slots of a node with the peer id ``own`` at relays among ``bootstrap``, full multiaddrs; use it on one loop.

    ``needed``: whether nobody can dial this node; `look` sets it when libp2p has found that. ``clock``: seconds.
    """

    def __init__(
        self, own: str, bootstrap: Sequence[str], needed: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.needed = needed
        self._found = False
        """Whether `needed` is libp2p's finding, by the daemon that runs."""
        self.moves = 0
        """How often this machine was taken to another network."""
        self._own, self._clock = own, clock
        self._here = ""
        """The address from which it sends, if that is known."""
        self._candidates = dial.candidates(bootstrap)
        self._held: dict[str, float] = {}
        """Address of a relay -> when it gave a slot last."""
        self._put_off: dict[str, float] = {}
        """Address of a relay -> until when it is not asked."""
        self._stuck: float | None = None
        """Since when the daemon has refused to dial a relay that takes connections, while no slot is held."""
        self._restarted = float("-inf")

    def addresses(self) -> list[str]:
        """Return the full multiaddrs at which relays forward to this node."""
        return [f"{relay}/p2p-circuit/p2p/{self._own}" for relay in self._held]

    def ended(self) -> None:
        """Note that the daemon has ended, and with it every slot and every delay."""
        self._held.clear()
        self._put_off.clear()
        self._stuck = None
        self._found = False

    async def look(self, daemon: Daemon, known: Sequence[str]) -> bool:
        """Ask the relays that are due; ``known``: the addresses that the daemon gives. Return whether it has to be restarted.

        That is so when it has refused for `STUCK_S` seconds to dial a relay that answers: it puts a peer off for up to five
        minutes after dials that failed. Raises one of `daemon.DAEMON_GONE`.
        """
        if self._here and is_gone(self._here):
            log.info("this machine is in another network now: it connects anew")
            self.moves += 1
            self.ended()
            for peer in await daemon.peers():
                await daemon.disconnect(peer)
        self._here = sends_from()
        if any("/p2p-circuit/" in address for address in known):
            self.needed = self._found = True
        elif self._found and any(is_public_host(host_of(address)) for address in known):  # hidden until somebody dialled it
            self.needed = False
            self.ended()
        if not self.needed:
            return False
        refused = False
        for relay in self._candidates:
            others = len(self._held.keys() - {relay})
            if others < dial.MAX_RELAYS and self._clock() >= self._put_off.get(relay, float("-inf")):
                refused |= not await self._renew(daemon, relay)
        if self._held or not refused:
            self._stuck = None
            return False
        now = self._clock()
        self._stuck = now if self._stuck is None else self._stuck
        if now - self._stuck < STUCK_S or now - self._restarted < RESTART_S:
            return False
        self._restarted = now
        return True

    async def _renew(self, daemon: Daemon, relay: str) -> bool:
        """Ask ``relay`` for a slot, or for the one that this node has; False: it answers, but the daemon does not dial it."""
        peer, granted, reason = relay.rpartition("/p2p/")[2], False, ""
        try:
            granted = await self._ask(daemon, relay, peer)
        except NetworkError as error:
            reason = str(error)
            log.debug("no slot at relay %s: %s", short(peer), reason)
        finally:
            if granted and relay not in self._held:
                log.info("relay %s forwards to this node", short(peer))
            if granted:
                self._held[relay] = self._clock()
                self._put_off[relay] = self._held[relay] + RENEW_S
            else:
                self._held.pop(relay, None)
        if "protocols not supported" in reason or NO_SLOT in reason:
            self._put_off[relay] = self._clock() + LATER_S
        return "dial backoff" not in reason

    async def _ask(self, daemon: Daemon, relay: str, peer: str) -> bool:
        for attempt in range(2):
            try:
                if peer not in await daemon.peers():
                    if not await dial.answering([relay]):
                        return False
                    await asyncio.wait_for(daemon.connect(peer, [relay]), CONNECT_S)
                await asyncio.wait_for(reserve(daemon, peer), ASK_S)
                return True
            except asyncio.TimeoutError:
                if attempt:
                    log.info("relay %s does not answer; connecting to it anew", short(peer))
                    await daemon.disconnect(peer)
        return False


async def launch_relay(identity: Identity, *, listen: Sequence[str], announce: Sequence[str] = (), **chosen: Any) -> Daemon:
    """Start a daemon (`Daemon.launch`) that counts as reachable and forwards for others, without a limit that anybody meets.

    Where a daemon counts as reachable, libp2p starts a relay of its own, which cuts connections off after 128 KiB. The daemon's
    comes after it and takes its place, but in about one of 24 starts before it. So it is asked for a slot, and started anew then.
    """
    for _ in range(STARTS):
        daemon = await Daemon.launch(identity, listen=listen, announce=announce, public=True, **chosen)
        try:
            if chosen.get("relay") == "off" or all(map(is_loopback, listen)) or await _forwards(daemon, listen):
                break
        except BaseException:
            await daemon.shutdown()
            raise
        await daemon.shutdown()
    else:
        daemon = await Daemon.launch(identity, listen=listen, announce=announce, public=True, **chosen)
        log.warning("this node cuts connections that it forwards off after 128 KiB; start it anew")
    return daemon


async def _forwards(daemon: Daemon, listen: Sequence[str]) -> bool:
    client: Daemon | None = None
    try:
        client = await Daemon.launch(Identity.ephemeral(), listen=["/ip4/127.0.0.1/tcp/0"], relay="off")
        known = [f"{address}/p2p/{daemon.peer_id}" for address in listen if not address.endswith("/0")] or await daemon.addresses()
        here = [address.replace("/0.0.0.0/", "/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/") for address in known]
        await asyncio.wait_for(client.connect(daemon.peer_id, here), CONNECT_S)
        return await asyncio.wait_for(reserve(client, daemon.peer_id), ASK_S) >= LEAST
    except (*DAEMON_GONE, StartupError, asyncio.TimeoutError) as error:
        log.info("how much this node forwards is not known: %s", error)
        return True
    finally:
        if client is not None:
            await client.shutdown()


def _fields(message: Empty) -> dict[int, Any]:
    fields = UnknownFieldSet(message)
    return {field.field_number: field.data for field in map(fields.__getitem__, range(len(fields)))}


async def reserve(daemon: Daemon, relay: str) -> float:
    """Have the connected peer ``relay`` forward connections to this node; return the bytes after which it cuts one off.

    Raises NetworkError or OSError.
    """
    reader, writer = await daemon.open(relay, HOP)
    try:
        writer.write(RESERVE)
        fields = _fields(await read_message(reader, Empty()))
        limits = fields.get(LIMIT, b"")
        most = _fields(Empty.FromString(limits)).get(DATA, 0) if isinstance(limits, bytes) else 0
        status = fields.get(STATUS)
    except (EOFError, DecodeError) as error:
        raise NetworkError(f"relay {short(relay)} gave no answer ({error!r}).") from None
    finally:
        writer.close()
    if status != OK:
        raise NetworkError(f"relay {short(relay)} {NO_SLOT} (status {status}).")
    return most if isinstance(most, int) and most > 0 else float("inf")
