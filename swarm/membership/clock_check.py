"""This machine's clock against those of other peers, and whether they can dial it.

The records of a swarm are dated, and the DHT drops those that seem to be of the past or of the future. So a node whose clock is
wrong sees nobody, or is seen by nobody, and trains alone; it is told so, and what to do, for as long as that lasts. Its directory
meanwhile goes by the clock of the majority, as far as the DHT, which has this machine's, lets it: it dates records by it, and is in
the epoch that the others are in.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shoal.swarm.membership.dht_record import AHEAD
from shoal.swarm.p2p.reachability import DIAL_PROTOCOL, DialBackView, ask, dialled_port, reach_of

if TYPE_CHECKING:
    from shoal.swarm.membership.directory import Directory
    from shoal.swarm.p2p.host import Host

CLOCK_S = 3.0  # seconds by which clocks may differ: hivemind's DHT, which holds the membership, refuses more
ASKED = 3  # peers whose clocks are read; the median of three stands one that lies
ASK_S, DIAL_S = 5.0, 10.0  # seconds for one answer, and for one after a dial
PATIENCE_S = 1.0  # seconds for the others to answer once one has
LOOK_S = 5.0  # seconds between two looks at the own addresses: when they change, others are asked again
FIRST_S = 10.0  # seconds to the first comparison
SOON_S, LATER_S = 60.0, 600.0  # seconds to the next one while this node is alone or its clock wrong, and while all is well

log = logging.getLogger(__name__)


def clock_skew(seen: Sequence[DialBackView]) -> float:
    """Return the seconds that this machine's clock is behind that of the peers that answered; 0.0 if that does no harm.

    Of two that differ that one counts which is nearer to this machine: two against one are more than one against one.
    """
    if not seen:
        return 0.0
    skews = [view.skew for view in seen]
    low, high = statistics.median_low(skews), statistics.median_high(skews)
    skew = 0.0 if low < 0 < high else min(low, high, key=abs)
    return 0.0 if abs(skew) <= CLOCK_S + max(view.error for view in seen) else skew


def clock_problem(seen: Sequence[DialBackView]) -> str:
    """Return one sentence if this machine's clock is not that of the peers that answered; else, or without answers, nothing."""
    if not (skew := clock_skew(seen)):
        return ""
    off, way = f"{min(abs(skew), 1e9):.1f} s", "behind" if skew > 0 else "ahead of"
    if len(seen) == 1:
        return (
            f"this machine's clock is {off} {way} that of the only peer that answered, so yours or theirs is wrong: set both by "
            "NTP (`timedatectl set-ntp true`), or records are refused."
        )
    return (
        f"this machine's clock is {off} {way} that of {len(seen)} peers: set it by NTP (`timedatectl set-ntp true`), "
        "or its records are refused."
    )


async def compare_clocks(host: Host, peers: Iterable[str], port: int | None = None) -> list[DialBackView]:
    """Return what a bootstrap node and the first of ``peers`` that answer say of their clocks; takes `ASK_S` seconds at most.

    ``port``: have up to twice as many dial it too, which takes `DIAL_S`. On the host's loop.
    """
    seeds = host.seeds()

    async def one(peer: str) -> DialBackView:
        stream = await host.open(peer, DIAL_PROTOCOL, addresses=seeds.get(peer, ()), timeout=ASK_S)
        try:
            return await ask(stream, port)
        finally:
            stream.close()

    asked = [asyncio.create_task(one(peer)) for peer in list(dict.fromkeys([*list(seeds)[:1], *peers, *seeds]))[: 2 * ASKED]]
    seen: list[DialBackView] = []
    loop = asyncio.get_running_loop()
    end, left = loop.time() + (ASK_S if port is None else DIAL_S), set(asked)
    while left and (port is not None or len(seen) < ASKED):
        done, left = await asyncio.wait(left, timeout=max(end - loop.time(), 0), return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        seen += [task.result() for task in done if task.exception() is None]
        if seen and port is None:
            end = min(end, loop.time() + PATIENCE_S)
    for task in asked:
        task.cancel()
    for failed in await asyncio.gather(*left, return_exceptions=True):
        log.debug("a clock was not read: %r", failed)
    return seen


class ClockCheck:
    """Comparisons of a member's clock with others', and dials by them, from time to time until `close`."""

    def __init__(self, host: Host, directory: Directory) -> None:
        self._host, self._directory = host, directory
        self._unread = ""
        self._running = host.submit(self._run())

    def news(self) -> str:
        """Return one sentence after each comparison that found the clock wrong; else nothing. For any thread."""
        found, self._unread = self._unread, ""
        return found

    def close(self) -> None:
        self._running.cancel()

    async def _run(self) -> None:
        await asyncio.sleep(FIRST_S)
        loop = asyncio.get_running_loop()
        while True:
            addresses = self._host.addresses()
            try:
                others = set(self._directory.everyone()) - {self._host.peer_id}
                met = [address.rpartition("/p2p/")[2] for address in self._host.known()]  # with a wrong clock no member is listed
                asked = [*others, *self._host.entry(), *met]
                seen = await compare_clocks(self._host, asked, dialled_port(addresses))
                self._directory.dialled = reach_of(seen, addresses) or self._directory.dialled
                problem = self._take(seen)
                pause = SOON_S if problem or not others else LATER_S
            except Exception:  # a bug must not end the node
                log.warning("the clock was not compared", exc_info=True)
                pause = LATER_S
            end = loop.time() + pause
            while loop.time() < end and self._host.addresses() == addresses:
                await asyncio.sleep(min(LOOK_S, pause))

    def _take(self, seen: Sequence[DialBackView]) -> bool:
        """Keep what to say of a comparison, go by the clock of the majority, and return whether this machine's is wrong."""
        problem, skew = clock_problem(seen), clock_skew(seen)
        self._unread = f"This node cannot meet the others: {problem}" if problem else ""
        if len(seen) < ASKED and skew:  # one or two peers are no majority
            return True
        if seen and abs(skew) <= AHEAD:
            self._directory.skew = skew
            if skew:
                self._unread += " Until then it dates its records, and counts epochs, by their clock."
        return bool(problem)
