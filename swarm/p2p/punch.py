"""Direct connections between members behind routers: both dial each other by QUIC at one moment,
agreed on over their relay.

    asks, over the relay                       answers
      | punch (id, addresses, proof) --------->  |   if it is a member, and asks seldom
      | <----------- punch (id, addresses, proof) |   and both dial now

A second daemon does it. It starts when a member is connected by a relay alone. Streams to a member
so reached are opened there, unless exchanges go quicker over the relay
(`shoal.swarm.pacing.routes`). If it does not go, as between routers that take another port for each
destination, the member stays relayed. Why: docs/internals.md, "Routers".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import SIGNATURE_BYTES, verify
from shoal.swarm.p2p.addresses import host_of
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon, Incoming
from shoal.swarm.p2p.punched_members import AskTimes, PunchedMembers
from shoal.swarm.p2p.rate_limit import MINUTE_S, RateLimit, TokenBuckets
from shoal.swarm.p2p.resource_manager import ResourceManager
from shoal.swarm.p2p.second_daemon import SecondDaemon
from shoal.swarm.p2p.seen_address import ADDRESS_UNKNOWN, DIAL_S, MESSAGE_S, usable
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.repeats import Repeats
from shoal.swarm.wire.envelope import Address, Message, PeerId, pack, unpack

if TYPE_CHECKING:
    from shoal.swarm.p2p.daemon_supervisor import DaemonSupervisor

log = logging.getLogger(__name__)

PUNCH_PROTOCOL = "/shoal/punch/1"
OPEN_S = 3.0
"""To open a stream past a relay."""
ASK_S = 60.0
"""For one attempt, in which both may have to start their daemon."""
LOOK_S = 1.0
"""Between two looks at who is relayed."""
IDLE_S = 600.0
"""That the daemon stays when nobody is relayed any more."""
LIMIT_PERIOD_S = 10 * MINUTE_S
MAX_REQUESTS_EACH = 6
"""Of one member in that time."""
MAX_REQUESTS = 60
"""Of all members."""
MAX_DIALS_OF_HOST = 2
"""Of one IP address in that time."""
MAX_ADDRESSES = 2
FAILED = ADDRESS_UNKNOWN
"""What an attempt raises that does not succeed."""


class Punch(Message):
    """A second daemon's id and addresses; ``proof``: its signature over the ids of the sender and
    the receiver.
    """

    KIND = "punch"
    LIMIT = 2048
    peer: PeerId
    addresses: Annotated[tuple[Address, ...], Field(min_length=1, max_length=MAX_ADDRESSES)]
    proof: Annotated[bytes, Field(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class Puncher:
    """What connects the node ``peer_id`` past relays, and who is reached there. On the host's
    loop.
    """

    def __init__(
        self,
        supervisor: DaemonSupervisor,
        peer_id: str,
        resources: ResourceManager,
        traffic: TrafficMeter,
    ) -> None:
        self.members = PunchedMembers()
        self.ask_times = AskTimes()
        self.second = SecondDaemon(
            supervisor, traffic, self._of_members, self._daemon_starts, self._daemon_ended
        )
        self._supervisor = supervisor
        self._me = peer_id
        self._resources = resources
        self._traffic = traffic
        self._moves = 0  # of this machine to another network, as far as the daemon knows
        self._needed_at = 0.0  # when a member was relayed, or reached past its relay
        self._said = Repeats()
        self._of_each = _limit(MAX_REQUESTS_EACH, senders=256)
        self._of_all = _limit(MAX_REQUESTS, senders=1)
        self._of_hosts = _limit(MAX_DIALS_OF_HOST, senders=1024)

    @property
    def daemon(self) -> Daemon | None:
        return self.second.daemon

    @property
    def reached(self) -> frozenset[str]:
        """The members that were connected past a relay at the last look."""
        return self.members.reached

    def punched(self) -> bool:
        """Return whether exchanges with any member go past its relay now."""
        for peer in self.reached:
            if self.members.daemon_of(peer) is not None and self._traffic.routes.best(peer):
                return True
        return False

    def wanted(self, peer: str) -> bool:
        """Return whether the next stream to a member goes past its relay, as far as is known."""
        if self.members.daemon_of(peer) is None or peer not in self.reached:
            return False
        return self._traffic.routes.choose(peer)

    def owner(self, daemon_id: str) -> str | None:
        return self.members.owner(daemon_id)

    async def open(self, peer: str, protocol: str) -> Stream | None:
        """Open a stream past the relay; None if that does not go, or the relay is better."""
        daemon = self.daemon
        way = self.members.daemon_of(peer)
        if daemon is None or way is None:
            return None
        try:
            connected = await asyncio.wait_for(daemon.peers(), OPEN_S)
            if way not in connected or not self._traffic.routes.choose(peer):
                return None
            ends = await asyncio.wait_for(daemon.open(way, protocol), OPEN_S)
            return Stream(peer, *ends, self._traffic, daemon_id=way)
        except TimeoutError:
            self.members.forget_way(peer)
        except DAEMON_GONE as error:
            log.debug("no stream to %s past the relay: %r", short(peer), error)
        return None

    async def serve(self, protocol: str, incoming: Incoming) -> None:
        """Answer streams of ``protocol`` that second daemons of members open.

        Raises one of `DAEMON_GONE`.
        """
        await self.second.serve(protocol, incoming)

    async def run(self) -> None:
        """Ask the members that are connected by a relay alone, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                wanted = await asyncio.wait_for(self._look(), 2 * MESSAGE_S)
                await asyncio.gather(*map(self._try, wanted))
            except FAILED as error:
                log.debug("no connection past a relay: %r", error)
            except Exception as error:  # a bug must not leave the node without its connections
                self._supervisor.internal_errors.caught("network", error)

    async def answer(self, stream: Stream) -> None:
        """Serve one stream of `PUNCH_PROTOCOL`. Raises NetworkError or MessageError."""
        peer = stream.peer_id
        if not self._resources.known(peer):
            raise self._refused(peer, "is no member")
        if stream.origin:
            raise self._refused(peer, "is connected directly")
        if not (self._of_each.take(peer, 1, 0) and self._of_all.take("", 1, 0)):
            raise self._refused(peer, "asks too often")
        other = self._read(peer, await stream.receive(Punch.LIMIT, MESSAGE_S))
        try:
            await stream.send(await self._offer(peer), MESSAGE_S)
            await self._dial(peer, other)
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            raise NetworkError(f"the second network daemon did not connect ({error}).") from None

    async def end(self) -> None:
        await self.second.end()

    async def _look(self) -> list[str]:
        """Note who is reached.

        Return whom to ask now, and note that it is; of two members the one with the smaller id
        asks.
        """
        moves = self._supervisor.slots.moves
        if self.daemon is not None and self._moves != moves:
            self.daemon.end_by_force()
        self._moves = moves
        self.members.see(await self.daemon.peers() if self.daemon is not None else ())
        now = asyncio.get_running_loop().time()
        origins = await self._supervisor.running().origins()
        self.ask_times.keep(origins)
        relayed = []
        for peer, host in origins.items():
            if not host and self._resources.known(peer):
                relayed.append(peer)
        if relayed or self.reached:
            self._needed_at = now
        elif now > self._needed_at + IDLE_S:
            await self.end()
        wanted = []
        for peer in relayed:
            is_due = self.ask_times.is_due(peer, now, asks=self._me < peer)
            if is_due and peer not in self.reached:
                self.ask_times.was_asked(peer, now)
                wanted.append(peer)
        return wanted

    async def _try(self, peer: str) -> None:
        try:
            await asyncio.wait_for(self._ask(peer), ASK_S)
        except FAILED as error:
            log.debug("no connection to %s past its relay: %r", short(peer), error)

    async def _ask(self, peer: str) -> None:
        mine = await self._offer(peer)
        ends = await self._supervisor.running().open(peer, PUNCH_PROTOCOL)
        with contextlib.closing(Stream(peer, *ends, self._traffic)) as stream:
            await stream.send(mine, MESSAGE_S)
            other = self._read(peer, await stream.receive(Punch.LIMIT, ASK_S))
            self.ask_times.was_answered(peer, asyncio.get_running_loop().time())
            await self._dial(peer, other)

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
        for host in {host_of(address) for address in other.addresses}:
            if not self._of_hosts.take(host, 1, 0):
                raise self._refused(peer, "named an IP address that was dialled too often")
        return other

    async def _dial(self, peer: str, other: Punch) -> None:
        """Dial a member's second daemon. Raises one of `FAILED`."""
        if not self.members.make_room(peer):
            raise self._refused(peer, "found all places taken")
        if self.members.daemon_of(peer) != other.peer:
            self._traffic.forget(peer)  # the other was started, or started anew in another network
        self.members.put(peer, other.peer)
        if self.daemon is None:
            return
        full = [f"{address}/p2p/{other.peer}" for address in other.addresses]
        dialling = self.daemon.connect(other.peer, full, seconds=DIAL_S)
        await asyncio.wait_for(dialling, 2 * DIAL_S)
        self.members.reached |= {peer}
        self.ask_times.is_reached(peer)
        log.info("peer %s is reached past its relay", short(peer))

    async def _offer(self, peer: str) -> bytes:
        """Return the packed message to a member, with the second daemon up.

        Raises NetworkError or another of `FAILED`.
        """
        daemon, addresses = await self.second.up()
        if not addresses:
            if not self.reached:
                await self.end()
            raise NetworkError("no bootstrap node tells this node's address by QUIC.")
        proof = self.second.identity.sign(PUNCH_PROTOCOL, f"{self._me} {peer}".encode())
        return pack(Punch(peer=daemon.peer_id, addresses=addresses[:MAX_ADDRESSES], proof=proof))

    def _of_members(self, incoming: Incoming) -> Incoming:
        """Return ``incoming`` for streams of members' second daemons; others are ended."""

        async def known(
            way: str, origin: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            if self.members.owner(way) is not None:
                await incoming(way, origin, reader, writer)
            else:
                writer.transport.abort()

        return known

    def _daemon_starts(self) -> None:
        for peer in self.members.all():
            self._traffic.forget(peer)

    def _daemon_ended(self) -> None:
        self.ask_times.lose(self.reached)
        self.members.reached = frozenset()


def _limit(messages: int, *, senders: int) -> TokenBuckets:
    return TokenBuckets(RateLimit(messages=messages, senders=senders, period=LIMIT_PERIOD_S))
