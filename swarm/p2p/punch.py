"""Direct connections between members behind routers: both dial each other by QUIC at one moment,
agreed on over their relay.

    asks, over the relay                       answers
      | punch (id, addresses, proof) --------->  |   if it is a member, and asks seldom
      | <----------- punch (id, addresses, proof) |   and both dial now

A second daemon does it, which speaks QUIC only and has a key of this run. It starts when a member
is connected by a relay alone. Streams to a member so reached are opened there, unless exchanges go
quicker over the relay (`shoal.swarm.pacing.routes`). If it does not go, as between routers that
take another port for each destination, the member stays relayed. Why: docs/internals.md, "Routers".
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shoal.swarm.errors import MessageError, NetworkError, Repeats
from shoal.swarm.identity import Identity, verify
from shoal.swarm.p2p.addresses import host_of
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon, Incoming
from shoal.swarm.p2p.multiaddr import by_quic
from shoal.swarm.p2p.rate_limit import MINUTE_S, RateLimit, TokenBuckets
from shoal.swarm.p2p.reachability import LOWEST_PORT
from shoal.swarm.p2p.resource_manager import ResourceManager
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.envelope import Address, Message, PeerId, pack, unpack
from shoal.swarm.wire.messages import SEEN_PROTOCOL

if TYPE_CHECKING:
    from shoal.swarm.p2p.daemon_supervisor import DaemonSupervisor

log = logging.getLogger(__name__)

PUNCH_PROTOCOL = "/shoal/punch/1"
NATIVE = ipaddress.IPv6Network("2000::/3")
LISTEN = ("/ip4/0.0.0.0/udp/0/quic-v1", "/ip6/::/udp/0/quic-v1")
SMALL_S = 5.0  # seconds for one small message
DIAL_S = 3  # seconds of a dial, in which QUIC sends 8 packets to an address where nobody answers
OPEN_S = 3.0  # seconds to open a stream past a relay
ASK_S = 60.0  # seconds for one attempt, in which both may have to start their daemon
LOOK_S = 1.0  # seconds between two looks at who is relayed
FIRST_S = (
    3.0  # seconds that a member is relayed before it is asked: it has to learn of this one too
)
AGAIN_S = (
    5.0,
    15.0,
    600.0,
)  # seconds before each further attempt, the first if nobody was dialled; the last repeats
IDLE_S = 600.0  # seconds that the daemon stays when nobody is relayed any more
ASKED = 4  # peers that are asked for this node's address, at most
# requests in ten minutes of one member and of all; dials of one IP address in that time
EACH = 6
ALL = 60
HOST = 2
MAX_PUNCHED = 64  # members that are reached past a relay
GONE = (NetworkError, MessageError, *DAEMON_GONE, ValueError, asyncio.TimeoutError)


class Seen(Message):
    """The address that the asker's connection by QUIC comes from; empty if it has none."""

    KIND = "seen"
    address: Annotated[str, Field(max_length=128)]


class Punch(Message):
    """A second daemon's id and addresses; ``proof``: its signature over the ids of the sender and
    the receiver.
    """

    KIND = "punch"
    LIMIT = 2048
    peer: PeerId
    addresses: Annotated[tuple[Address, ...], Field(min_length=1, max_length=2)]
    proof: Annotated[bytes, Field(min_length=64, max_length=64)]


async def tell_seen(daemon: Daemon, stream: Stream) -> None:
    """Answer one stream of `SEEN_PROTOCOL`. Raises NetworkError or another of `DAEMON_GONE`."""
    ways = (await daemon.ways()).get(stream.peer_id, [])
    own = [way for way in ways if "/quic-v1" in way and host_of(way) == stream.origin]
    # An asker that has moved is for half a minute connected from where it was too; the newest is
    # the last.
    await stream.send(pack(Seen(address=own[-1][:128] if own else "")), SMALL_S)


def usable(address: str) -> bool:
    """Return whether an address of a stranger's may be dialled: by QUIC, a public IP address, and
    no system's port.
    """
    parts = address.split("/")
    with contextlib.suppress(ValueError):
        if (
            len(parts) == 6
            and parts[1] in ("ip4", "ip6")
            and (parts[3], parts[5]) == ("udp", "quic-v1")
            and parts[4].isdecimal()
        ):
            ip = ipaddress.ip_address(parts[2])
            native = ip.version == 4 or (
                ip in NATIVE and ip.sixtofour is None and ip.teredo is None
            )  # others hold one of IPv4
            return (
                native
                and ip.is_global
                and not ip.is_multicast
                and LOWEST_PORT <= int(parts[4]) <= 65_535
            )
    return False


class Puncher:
    """The second daemon of the node ``peer_id``, and who is reached there. On the host's loop."""

    def __init__(
        self,
        supervisor: DaemonSupervisor,
        peer_id: str,
        resources: ResourceManager,
        traffic: TrafficMeter,
    ) -> None:
        # The members that were connected past a relay at the last look.
        self.reached: frozenset[str] = frozenset()
        self.daemon: Daemon | None = None
        self._supervisor = supervisor
        self._me = peer_id
        self._resources = resources
        self._traffic = traffic
        self._identity = Identity.ephemeral()
        # Members whose connection this node's daemon took with it, which they do not see yet.
        self._lost: set[str] = set()
        self._ids: dict[str, str] = {}  # member -> the id of its second daemon
        self._owners: dict[str, str] = {}  # and back
        self._due: dict[
            str, tuple[float, int]
        ] = {}  # member -> when it is asked again, and how often it was
        self._moves = 0  # of this machine to another network, as far as the daemon knows
        self._needed = 0.0  # when a member was relayed, or reached past its relay
        self._starting = asyncio.Lock()
        self._said = Repeats()
        self._watching: asyncio.Future[None] | None = None
        self._each = TokenBuckets(RateLimit(messages=EACH, senders=256, period=10 * MINUTE_S))
        self._all = TokenBuckets(RateLimit(messages=ALL, senders=1, period=10 * MINUTE_S))
        self._hosts = TokenBuckets(RateLimit(messages=HOST, senders=1024, period=10 * MINUTE_S))

    def punched(self) -> bool:
        """Return whether exchanges with any member go past its relay now."""
        return any(peer in self._ids and self._traffic.routes.best(peer) for peer in self.reached)

    def wanted(self, peer: str) -> bool:
        """Return whether the next stream to a member goes past its relay, as far as is known."""
        return peer in self._ids and peer in self.reached and self._traffic.routes.choose(peer)

    def owner(self, its: str) -> str | None:
        return self._owners.get(its)

    async def open(self, peer: str, protocol: str) -> Stream | None:
        """Open a stream past the relay; None if that does not go, or the relay is better."""
        if (daemon := self.daemon) is None or (its := self._ids.get(peer)) is None:
            return None
        try:
            if its in await asyncio.wait_for(
                daemon.peers(), OPEN_S
            ) and self._traffic.routes.choose(peer):
                return Stream(
                    peer,
                    *await asyncio.wait_for(daemon.open(its, protocol), OPEN_S),
                    self._traffic,
                    daemon_id=its,
                )
        except TimeoutError:
            self._ids.pop(peer, None)  # relayed until this connection has ended and another is made
        except DAEMON_GONE as error:
            log.debug("no stream to %s past the relay: %r", short(peer), error)
        return None

    async def serve(self, protocol: str, incoming: Incoming) -> None:
        """Answer streams of ``protocol`` that second daemons of members open.

        Raises one of `DAEMON_GONE`.
        """

        async def known(
            its: str, origin: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            if its in self._owners:
                await incoming(its, origin, reader, writer)
            else:
                writer.transport.abort()

        if self.daemon is not None:
            await self.daemon.serve(protocol, known)

    async def run(self) -> None:
        """Ask the members that are connected by a relay alone, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await asyncio.gather(
                    *map(self._try, await asyncio.wait_for(self._look(), 2 * SMALL_S))
                )
            except GONE as error:
                log.debug("no connection past a relay: %r", error)
            except Exception as error:  # a bug must not leave the node without its connections
                self._supervisor.internal_errors.caught("network", error)

    async def _look(self) -> list[str]:
        """Note who is reached.

        Return whom to ask now, and note that it is; of two members the one with the smaller id
        asks.
        """
        if self.daemon is not None and self._moves != self._supervisor.slots.moves:
            self.daemon.end_by_force()
        self._moves = self._supervisor.slots.moves
        there = await self.daemon.peers() if self.daemon is not None else ()
        self.reached = frozenset(self._owners[its] for its in there if its in self._owners)
        now = asyncio.get_running_loop().time()
        wanted = []
        origins = await self._supervisor.running().origins()
        for gone in self._due.keys() - origins.keys():
            del self._due[gone]
            self._lost.discard(gone)
        relayed = [
            peer for peer, host in origins.items() if not host and self._resources.known(peer)
        ]
        if relayed or self.reached:
            self._needed = now
        elif now > self._needed + IDLE_S:
            await self.end()
        for peer in relayed:
            due, tried = self._due.setdefault(peer, (now + FIRST_S, 0))
            if (self._me < peer or peer in self._lost) and now >= due and peer not in self.reached:
                self._due[peer] = now + AGAIN_S[min(tried, len(AGAIN_S) - 1)], tried + 1
                wanted.append(peer)
        return wanted

    async def _try(self, peer: str) -> None:
        try:
            await asyncio.wait_for(self._ask(peer), ASK_S)
        except GONE as error:
            log.debug("no connection to %s past its relay: %r", short(peer), error)

    async def _ask(self, peer: str) -> None:
        mine = await self._offer(peer)
        stream = Stream(
            peer, *await self._supervisor.running().open(peer, PUNCH_PROTOCOL), self._traffic
        )
        with contextlib.closing(stream):
            await stream.send(mine, SMALL_S)
            other = self._read(peer, await stream.receive(Punch.LIMIT, ASK_S))
            tried = max(self._due.get(peer, (0.0, 0))[1], 2)
            self._due[peer] = (
                asyncio.get_running_loop().time() + AGAIN_S[min(tried, len(AGAIN_S)) - 1],
                tried,
            )
            await self._dial(peer, other)

    async def answer(self, stream: Stream) -> None:
        """Serve one stream of `PUNCH_PROTOCOL`. Raises NetworkError or MessageError."""
        peer = stream.peer_id
        if not self._resources.known(peer):
            raise self._refused(peer, "is no member")
        if stream.origin:
            raise self._refused(peer, "is connected directly")
        if not (self._each.take(peer, 1, 0) and self._all.take("", 1, 0)):
            raise self._refused(peer, "asks too often")
        other = self._read(peer, await stream.receive(Punch.LIMIT, SMALL_S))
        try:
            await stream.send(await self._offer(peer), SMALL_S)
            await self._dial(peer, other)
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            raise NetworkError(f"the second network daemon did not connect ({error}).") from None

    def _refused(self, peer: str, why: str) -> NetworkError:
        """Count a refusal, and log the first for each reason: a peer that goes on must not fill the
        log.
        """
        self._resources.reject("punch")
        if self._said.due(why):
            log.warning(
                "no direct connection with peer %s: it %s; further ones are only counted",
                short(peer),
                why,
            )
        return NetworkError(f"peer {short(peer)} {why}.", "refused")

    def _read(self, peer: str, data: bytes) -> Punch:
        """Return a member's message if all of it may be used. Raises NetworkError or
        MessageError.
        """
        other = unpack(data, Punch)
        if not verify(other.peer, PUNCH_PROTOCOL, f"{peer} {self._me}".encode(), other.proof):
            raise self._refused(peer, "named another's key")
        if not all(map(usable, other.addresses)):
            raise self._refused(peer, "named an address that is not public, or no port from 1024")
        if not all(
            self._hosts.take(host, 1, 0)
            for host in {host_of(address) for address in other.addresses}
        ):
            raise self._refused(peer, "named an IP address that was dialled too often")
        return other

    async def _dial(self, peer: str, other: Punch) -> None:
        """Dial a member's second daemon. Raises one of `GONE`."""
        if len(self._ids) >= MAX_PUNCHED and peer not in self._ids:
            idle = next((each for each in self._ids if each not in self.reached), None)
            if idle is None:
                raise self._refused(peer, "found all places taken")
            self._owners.pop(self._ids.pop(idle), None)
        if self._ids.get(peer) != other.peer:
            self._traffic.forget(peer)  # the other was started, or started anew in another network
        self._owners.pop(self._ids.get(peer, ""), None)
        self._ids[peer] = other.peer
        self._owners[other.peer] = peer
        if self.daemon is not None:
            full = [f"{address}/p2p/{other.peer}" for address in other.addresses]
            await asyncio.wait_for(
                self.daemon.connect(other.peer, full, seconds=DIAL_S), 2 * DIAL_S
            )
            self.reached |= {peer}
            self._due.pop(peer, None)
            self._lost.discard(peer)
            log.info("peer %s is reached past its relay", short(peer))

    async def _offer(self, peer: str) -> bytes:
        """Return the packed message to a member, with the second daemon up.

        Raises NetworkError or another of `GONE`.
        """
        async with self._starting:
            daemon = self.daemon or await self._start()
            seen = await self._seen(daemon)
            # Behind a router for IPv6 a machine has its own public address.
            own = [
                address.rpartition("/p2p/")[0]
                for address in await daemon.addresses()
                if address.startswith("/ip6/")
            ]
        addresses = tuple(dict.fromkeys(filter(usable, [seen, *own])))[:2]
        if not addresses:
            if not self.reached:
                await self.end()
            raise NetworkError("no bootstrap node tells this node's address by QUIC.")
        proof = self._identity.sign(PUNCH_PROTOCOL, f"{self._me} {peer}".encode())
        return pack(Punch(peer=daemon.peer_id, addresses=addresses, proof=proof))

    async def _start(self) -> Daemon:
        for peer in self._ids:
            self._traffic.forget(peer)
        # With an earlier key it would seem to be connected where that was.
        self._identity = Identity.ephemeral()
        daemon = await Daemon.launch(
            self._identity, listen=LISTEN, relay="off", light=True, idle="", timeout=20.0
        )
        self.daemon = daemon
        self._watching = asyncio.ensure_future(self._ended(daemon))
        try:
            for protocol, incoming in list(self._supervisor.handlers.items()):
                await self.serve(protocol, incoming)
        except BaseException:
            await self.end()  # it would be taken for one that serves them all
            raise
        return daemon

    async def _ended(self, daemon: Daemon) -> None:
        """Forget the daemon when it ends: it is started again when it is needed."""
        status = await daemon.ended()
        if self.daemon is daemon:
            log.warning(
                "the second network daemon stopped (status %s); it starts again when it is needed",
                status,
            )
            self._lost |= self.reached
            self.daemon = None
            self.reached = frozenset()
            self._due.clear()
            await daemon.shutdown()

    async def _seen(self, daemon: Daemon) -> str:
        """Return the address from which the daemon's packets come, by what others see; nothing if
        nobody answers.
        """
        asked = [
            (peer, [*map(by_quic, addresses)])
            for peer, addresses in self._supervisor.bootstrapper.seeds.items()
        ]
        known = [address.rpartition("/p2p/") for address in self._supervisor.known.addresses()]
        asked += [(peer, [address]) for address, _, peer in known if usable(address)]
        for peer, addresses in itertools.islice(asked, ASKED):
            with contextlib.suppress(*GONE):
                await asyncio.wait_for(daemon.connect(peer, addresses, seconds=DIAL_S), SMALL_S)
                ends = await asyncio.wait_for(daemon.open(peer, SEEN_PROTOCOL), SMALL_S)
                with contextlib.closing(Stream(peer, *ends, self._traffic)) as stream:
                    if address := unpack(await stream.receive(Seen.LIMIT, SMALL_S), Seen).address:
                        return address
        return ""

    async def end(self) -> None:
        daemon = self.daemon
        self.daemon = None
        if daemon is not None:
            await daemon.shutdown()
