"""The slots that this node holds at relays, by which peers reach it when nobody can dial it.

A slot ends with the connection on which it was given, and the daemon asks each relay once, when
libp2p finds that nobody can dial this node, and not again after the connection was lost. So from
then on this module asks, by libp2p's own protocol (circuit v2, RESERVE), which costs a relay
nothing when it has the slot. A connection on which two requests in a row got no answer is ended,
and made anew. Of a machine in another network the daemon is told to end all connections as soon as
the machine's address is gone; by itself it would find out in half a minute.
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
from shoal.swarm.p2p.addresses import host_of, is_loopback, is_public_host
from shoal.swarm.p2p.connections import MAX_RELAYS, answering, candidates
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon, read_message
from shoal.swarm.p2p.stream import short

log = logging.getLogger(__name__)


HOP = "/libp2p/circuit/relay/0.2.0/hop"
RESERVE = b"\x02\x08\x00"  # a HopMessage, its length before it; type: RESERVE
NO_SLOT = "gave no slot"
# Fields of the answer, a protobuf message.
LIMITS_FIELD = 4
DATA_FIELD = 2  # in the limits: bytes
STATUS_FIELD = 5
STATUS_OK = 100
MIN_FORWARDED_BYTES = 1 << 30  # each way, that a relay of ours has to forward
MAX_STARTS = 5  # of a daemon until it does
RENEW_S = 15.0  # between two requests to a relay
ASK_S = 8.0  # for the answer
CONNECT_S = 5.0
ELSEWHERE = ("192.0.2.1", 9)  # an address of nobody (RFC 5737), to which nothing is sent
NO_RELAY_RETRY_S = 60.0  # until a peer is asked again that is no relay, or gives no slot
STUCK_S = 30.0  # without a slot until the daemon is restarted
RESTART_S = 300.0  # between two such restarts


def sends_from() -> str:
    """Return the IPv4 address from which this machine sends to others; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_port:
        try:
            any_port.connect(ELSEWHERE)
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
    """The slots of a node with the peer id ``own`` at relays among ``bootstrap``, full multiaddrs;
    use it on one loop.

    ``needed``: whether nobody can dial this node; `look` sets it when libp2p has found that.
    ``clock``: seconds.
    """

    def __init__(
        self,
        own: str,
        bootstrap: Sequence[str],
        needed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.needed = needed
        self._found = False  # whether `needed` is libp2p's finding, by the daemon that runs
        self.moves = 0  # how often this machine was taken to another network
        self._own = own
        self._clock = clock
        self._here = ""  # the address from which it sends, if that is known
        self._candidates = candidates(bootstrap)
        self._held: dict[str, float] = {}  # address of a relay -> when it gave a slot last
        self._put_off: dict[str, float] = {}  # address of a relay -> until when it is not asked
        self._stuck: float | None = None
        """Since when the daemon has refused to dial a relay that takes connections, while no slot
        is held.
        """
        self._restarted = float("-inf")

    def addresses(self) -> list[str]:
        return [f"{relay}/p2p-circuit/p2p/{self._own}" for relay in self._held]

    def ended(self) -> None:
        """Note that the daemon has ended, and with it every slot and every delay."""
        self._held.clear()
        self._put_off.clear()
        self._stuck = None
        self._found = False

    async def look(self, daemon: Daemon, known: Sequence[str]) -> bool:
        """Ask the relays that are due; ``known``: the addresses that the daemon gives.

        Return whether it has to be restarted.

        That is so when it has refused for `STUCK_S` seconds to dial a relay that answers: it puts a
        peer off for up to five minutes after dials that failed. Raises one of `daemon.DAEMON_GONE`.
        """
        await self._follow_network(daemon)
        self._note_need(known)
        if not self.needed:
            return False
        refused = False
        for relay in self._candidates:
            held_elsewhere = len(self._held.keys() - {relay})
            is_due = self._clock() >= self._put_off.get(relay, float("-inf"))
            if held_elsewhere < MAX_RELAYS and is_due:
                refused |= not await self._renew(daemon, relay)
        return self._is_stuck(refused)

    async def _follow_network(self, daemon: Daemon) -> None:
        """End all connections if this machine was taken to another network."""
        if self._here and is_gone(self._here):
            log.info("this machine is in another network now: it connects anew")
            self.moves += 1
            self.ended()
            for peer in await daemon.peers():
                await daemon.disconnect(peer)
        self._here = sends_from()

    def _note_need(self, known: Sequence[str]) -> None:
        """Note whether libp2p has found that nobody can dial this node."""
        if any("/p2p-circuit/" in address for address in known):
            self.needed = True
            self._found = True
        elif self._found and any(is_public_host(host_of(address)) for address in known):
            # A public address is hidden until somebody dialled it.
            self.needed = False
            self.ended()

    def _is_stuck(self, refused: bool) -> bool:
        """Return whether the daemon has refused for too long to dial a relay that answers."""
        if self._held or not refused:
            self._stuck = None
            return False
        now = self._clock()
        if self._stuck is None:
            self._stuck = now
        if now - self._stuck < STUCK_S or now - self._restarted < RESTART_S:
            return False
        self._restarted = now
        return True

    async def _renew(self, daemon: Daemon, relay: str) -> bool:
        """Ask ``relay`` for a slot, or for the one that this node has; False: it answers, but the
        daemon does not dial it.
        """
        peer = relay.rpartition("/p2p/")[2]
        granted = False
        reason = ""
        try:
            granted = await self._reserve(daemon, relay, peer)
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
            self._put_off[relay] = self._clock() + NO_RELAY_RETRY_S
        return "dial backoff" not in reason

    async def _reserve(self, daemon: Daemon, relay: str, peer: str) -> bool:
        for attempt in range(2):
            try:
                if peer not in await daemon.peers():
                    if not await answering([relay]):
                        return False
                    await asyncio.wait_for(daemon.connect(peer, [relay]), CONNECT_S)
                await asyncio.wait_for(reserve(daemon, peer), ASK_S)
                return True
            except TimeoutError:
                if attempt:
                    log.info("relay %s does not answer; connecting to it anew", short(peer))
                    await daemon.disconnect(peer)
        return False


async def launch_relay(identity: Identity, *, listen: Sequence[str], **chosen: Any) -> Daemon:
    """Start a daemon (`Daemon.launch`) that counts as reachable and forwards for others, without a
    limit that anybody meets.

    Where a daemon counts as reachable, libp2p starts a relay of its own, which cuts connections off
    after 128 KiB. The daemon's comes after it and takes its place, but in about one of 24 starts
    before it. So it is asked for a slot, and started anew then.
    """
    for _ in range(MAX_STARTS):
        daemon = await Daemon.launch(identity, listen=listen, public=True, **chosen)
        try:
            is_no_relay = chosen.get("relay") == "off" or all(map(is_loopback, listen))
            if is_no_relay or await _forwards(daemon, listen):
                break
        except BaseException:
            await daemon.shutdown()
            raise
        await daemon.shutdown()
    else:
        daemon = await Daemon.launch(identity, listen=listen, public=True, **chosen)
        log.warning("this node cuts connections that it forwards off after 128 KiB; start it anew")
    return daemon


async def _forwards(daemon: Daemon, listen: Sequence[str]) -> bool:
    client: Daemon | None = None
    try:
        client = await Daemon.launch(
            Identity.ephemeral(), listen=["/ip4/127.0.0.1/tcp/0"], relay="off"
        )
        fixed = [address for address in listen if not address.endswith("/0")]
        known = [f"{address}/p2p/{daemon.peer_id}" for address in fixed]
        here = []
        for address in known or await daemon.addresses():
            here.append(
                address.replace("/0.0.0.0/", "/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/")
            )
        await asyncio.wait_for(client.connect(daemon.peer_id, here), CONNECT_S)
        return await asyncio.wait_for(reserve(client, daemon.peer_id), ASK_S) >= MIN_FORWARDED_BYTES
    except (TimeoutError, *DAEMON_GONE, StartupError) as error:
        log.info("how much this node forwards is not known: %s", error)
        return True
    finally:
        if client is not None:
            await client.shutdown()


def _fields(message: Empty) -> dict[int, Any]:
    fields = UnknownFieldSet(message)
    return {field.field_number: field.data for field in map(fields.__getitem__, range(len(fields)))}


async def reserve(daemon: Daemon, relay: str) -> float:
    """Have the connected peer ``relay`` forward connections to this node; return the bytes after
    which it cuts one off.

    Raises NetworkError or OSError.
    """
    reader, writer = await daemon.open(relay, HOP)
    try:
        writer.write(RESERVE)
        fields = _fields(await read_message(reader, Empty()))
        limits = fields.get(LIMITS_FIELD, b"")
        most = (
            _fields(Empty.FromString(limits)).get(DATA_FIELD, 0) if isinstance(limits, bytes) else 0
        )
        status = fields.get(STATUS_FIELD)
    except (EOFError, DecodeError) as error:
        raise NetworkError(f"relay {short(relay)} gave no answer ({error!r}).") from None
    finally:
        writer.close()
    if status != STATUS_OK:
        raise NetworkError(f"relay {short(relay)} {NO_SLOT} (status {status}).")
    return most if isinstance(most, int) and most > 0 else float("inf")
