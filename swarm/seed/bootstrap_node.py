"""A bootstrap node (`shoal seed`): it trains nothing, names members of any swarm to each other, and
relays for unreachable ones.

    seed = Seed(identity, listen=["/ip4/0.0.0.0/tcp/4001"], on_ready=print)
    asyncio.run(seed.run())

It imports no torch, so it runs where 100 MB are free, and keeps all that it knows in memory. Whom
it believes, and how places are shared: docs/internals.md, "A bootstrap node".
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from shoal.swarm.errors import MessageError, NetworkError, StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.addresses import by_turns, range_of
from shoal.swarm.p2p.daemon import ANSWER_S, DAEMON_GONE, Daemon, Incoming
from shoal.swarm.p2p.daemon_restart import started_again
from shoal.swarm.p2p.listening import beside, check_announced, check_free, fixed_ports, obtain_ports
from shoal.swarm.p2p.messages import receive_message, send_message
from shoal.swarm.p2p.reachability import DIAL_PROTOCOL, ReachabilityProbe
from shoal.swarm.p2p.relay_slots import launch_relay
from shoal.swarm.p2p.seen_address import tell_seen
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.seed.registry import SeedRegistry
from shoal.swarm.wire.messages import (
    SEED_PROTOCOL,
    SEEN_PROTOCOL,
    SWARMS_PROTOCOL,
    SeedRequest,
    SwarmsRequest,
)

log = logging.getLogger(__name__)

MESSAGE_S = 10.0
"""For one small message."""
MAX_STREAMS = 192
"""That are answered at once."""
MAX_STREAMS_PER_PEER = 4
LINGER_S = 2.0
"""For which an answered stream waits for the caller to end it."""
MAX_OF_RANGE = 64
"""Connected peers of an address range, once there are three times as many in all; above 512 the
daemon cuts down.
"""
END_AT_ONCE = 32
"""Connections that are ended at a time: the end of one can take the daemon a tenth of a second."""
LOOK_S = 1.0
"""Between two looks at who is connected."""


class Seed:
    """A bootstrap node; call `run`.

    ``on_ready`` gets the addresses under which it is reached, each time its daemon starts.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        relay: bool = True,
        on_ready: Callable[[tuple[str, ...]], None] = lambda addresses: None,
    ) -> None:
        self.registry = SeedRegistry()
        self._identity = identity
        self._relay = relay
        self._on_ready = on_ready
        self._listen = tuple(listen)
        self._announce = tuple(announce)
        self._places = StreamPlaces(MAX_STREAMS)
        self._reachability = ReachabilityProbe()
        self._traffic = TrafficMeter()

    async def run(self) -> None:
        """Serve until cancelled; a daemon that ends is started again.

        Raises StartupError if it does not start the first time.
        """
        check_free(self._listen)
        check_announced(self._announce, self._identity.peer_id)
        if self._announce:
            self._listen = obtain_ports(self._listen)
        daemon = await self._launch()
        while True:
            try:
                status = await daemon.ended()
            finally:
                await daemon.shutdown()
            log.warning("the network daemon stopped (status %s); restarting it", status)
            daemon = await started_again(self._launch)

    async def _launch(self) -> Daemon:
        """Start a daemon that counts as reachable, and serve on it.

        Raises StartupError or NetworkError.
        """
        # For members that ask by what port their packets come; it is in no link.
        quic = beside(self._listen)
        daemon = await launch_relay(
            self._identity,
            listen=[*self._listen, *quic],
            announce=self._announce,
            relay="auto" if self._relay else "off",
            idle="",  # no connection to it stays open
        )
        try:
            await daemon.serve(SEED_PROTOCOL, self._handler(self._answer))
            await daemon.serve(SWARMS_PROTOCOL, self._handler(self._list))
            await daemon.serve(DIAL_PROTOCOL, self._handler(self._reachability.answer))
            await daemon.serve(SEEN_PROTOCOL, self._handler(functools.partial(tell_seen, daemon)))
            found = await asyncio.wait_for(daemon.addresses(), ANSWER_S)
        except BaseException as error:
            await daemon.shutdown()
            if isinstance(error, (*DAEMON_GONE, ValueError, asyncio.TimeoutError)):
                raise StartupError(
                    f"the network daemon started but cannot be talked to ({error}): try again."
                ) from error
            raise
        daemon.at_end.append(asyncio.ensure_future(self._share(daemon)).cancel)
        addresses = self._announced(found)
        self._listen = fixed_ports(self._listen, addresses)
        self._on_ready(addresses)
        return daemon

    def _announced(self, found: Sequence[str]) -> tuple[str, ...]:
        """Return those of the daemon's addresses under which others are to reach this node."""
        by_quic = any("/quic-v1" in each for each in self._listen)
        own = [address for address in found if "/p2p-circuit" not in address]
        return tuple(address for address in own if by_quic or "/quic-v1" not in address)

    async def _share(self, daemon: Daemon) -> None:
        """Keep the daemon's connections from being taken by a few address ranges."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                gone = crowding_peers(await asyncio.wait_for(daemon.origins(), ANSWER_S))
                for at in range(0, len(gone), END_AT_ONCE):
                    ends = (daemon.disconnect(peer) for peer in gone[at : at + END_AT_ONCE])
                    await asyncio.wait_for(asyncio.gather(*ends), ANSWER_S)
            except (TimeoutError, *DAEMON_GONE) as error:
                log.debug("connections were not shared out: %r", error)
                continue
            if gone:
                log.info("ended the connections of %d peers of crowded address ranges", len(gone))

    def _handler(self, answer: Callable[[Stream], Awaitable[None]]) -> Incoming:
        async def incoming(
            peer_id: str, origin: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await self._limited(Stream(peer_id, reader, writer, self._traffic, origin), answer)

        return incoming

    async def _answer(self, stream: Stream) -> None:
        request = await receive_message(stream, SeedRequest, MESSAGE_S)
        answer = self.registry.answer(stream.peer_id, request, stream.origin)
        await send_message(stream, answer, MESSAGE_S)

    async def _list(self, stream: Stream) -> None:
        request = await receive_message(stream, SwarmsRequest, MESSAGE_S)
        await send_message(stream, self.registry.listing(stream.peer_id, request), MESSAGE_S)

    async def _limited(self, stream: Stream, answer: Callable[[Stream], Awaitable[None]]) -> None:
        is_full = self._places.peers[stream.peer_id] >= MAX_STREAMS_PER_PEER
        if is_full or not self._places.take(stream):
            stream.abort()
            return
        try:
            await answer(stream)
            await stream.more(LINGER_S)
        except (MessageError, NetworkError) as error:
            log.debug("peer %s was not answered: %s", short(stream.peer_id), error)
        finally:
            self._places.free(stream)


def crowding_peers(origins: Mapping[str, str]) -> list[str]:
    """Return the connected peers that have to go, by whence each came: of crowded address ranges,
    and there of crowded hosts.
    """
    if len(origins) <= 3 * MAX_OF_RANGE:
        return []
    of_range = Counter[str]()
    gone = []
    for peer in by_turns(origins.items(), place=str):
        where = range_of(origins[peer])
        of_range[where] += 1
        if of_range[where] > MAX_OF_RANGE:
            gone.append(peer)
    return gone
