"""The second daemon of a node, by which it is connected past relays: QUIC only, with a key of this
run. It starts when it is needed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.swarm.identity import Identity
from shoal.swarm.p2p.daemon import Daemon, Incoming
from shoal.swarm.p2p.multiaddr import by_quic
from shoal.swarm.p2p.seen_address import ask_seen, usable
from shoal.swarm.pacing.meter import TrafficMeter

if TYPE_CHECKING:
    from shoal.swarm.p2p.daemon_supervisor import DaemonSupervisor

log = logging.getLogger(__name__)

LISTEN = ("/ip4/0.0.0.0/udp/0/quic-v1", "/ip6/::/udp/0/quic-v1")
MAX_ASKED = 4
"""Peers that are asked for this node's address."""
START_S = 20.0


class SecondDaemon:
    """The second daemon beside that of ``supervisor``. On the host's loop.

    ``wrap`` returns the handler of a protocol as it serves the streams of members' second daemons.
    ``on_start``, ``on_end``: called when it starts, and when it ends by itself.
    """

    def __init__(
        self,
        supervisor: DaemonSupervisor,
        traffic: TrafficMeter,
        wrap: Callable[[Incoming], Incoming],
        on_start: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.daemon: Daemon | None = None
        self.identity = Identity.ephemeral()
        self.watching: asyncio.Future[None] | None = None
        self._supervisor = supervisor
        self._traffic = traffic
        self._wrap = wrap
        self._on_start = on_start
        self._on_end = on_end
        self._starting = asyncio.Lock()

    async def up(self) -> tuple[Daemon, tuple[str, ...]]:
        """Return the daemon, started if it was not there, and its addresses that others may dial.

        Raises NetworkError, or another of `DAEMON_GONE`.
        """
        async with self._starting:
            daemon = self.daemon or await self.start()
            seen = await ask_seen(daemon, self._asked(), self._traffic)
            addresses = [seen]
            # Behind a router for IPv6 a machine has its own public address.
            for address in await daemon.addresses():
                if address.startswith("/ip6/"):
                    addresses.append(address.rpartition("/p2p/")[0])
        return daemon, tuple(dict.fromkeys(filter(usable, addresses)))

    async def start(self) -> Daemon:
        self._on_start()
        # With an earlier key it would seem to be connected where that was.
        self.identity = Identity.ephemeral()
        daemon = await Daemon.launch(
            self.identity, listen=LISTEN, relay="off", light=True, idle="", timeout=START_S
        )
        self.daemon = daemon
        self.watching = asyncio.ensure_future(self._ended(daemon))
        try:
            for protocol, incoming in list(self._supervisor.handlers.items()):
                await self.serve(protocol, incoming)
        except BaseException:
            await self.end()  # it would be taken for one that serves them all
            raise
        return daemon

    async def serve(self, protocol: str, incoming: Incoming) -> None:
        """Answer streams of ``protocol``, if it runs. Raises one of `DAEMON_GONE`."""
        if self.daemon is not None:
            await self.daemon.serve(protocol, self._wrap(incoming))

    async def end(self) -> None:
        daemon = self.daemon
        self.daemon = None
        if daemon is not None:
            await daemon.shutdown()

    async def _ended(self, daemon: Daemon) -> None:
        """Forget the daemon when it ends: it is started again when it is needed."""
        status = await daemon.ended()
        if self.daemon is not daemon:
            return
        log.warning(
            "the second network daemon stopped (status %s); it starts again when it is needed",
            status,
        )
        self.daemon = None
        self._on_end()
        await daemon.shutdown()

    def _asked(self) -> list[tuple[str, list[str]]]:
        """Return whom to ask for this node's address: bootstrap nodes first."""
        asked = []
        for peer, addresses in self._supervisor.bootstrapper.seeds.items():
            asked.append((peer, [by_quic(address) for address in addresses]))
        for known in self._supervisor.known.addresses():
            address, _, peer = known.rpartition("/p2p/")
            if usable(address):
                asked.append((peer, [address]))
        return list(itertools.islice(asked, MAX_ASKED))
