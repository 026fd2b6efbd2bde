"""This machine's clock against those of other peers, and whether they can dial it.

The records of a swarm are dated, and the DHT drops those that seem to be of the past or of the
future. So a node whose clock is wrong sees nobody, or is seen by nobody, and trains alone; it says
so, and what to do, for as long as that lasts. Its directory meanwhile goes by the clock of the
majority, as far as the DHT, which has this machine's, lets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high, median_low
from typing import TYPE_CHECKING

from shoal.swarm.errors import ShoalError
from shoal.swarm.membership.records import DATED_AHEAD_S
from shoal.swarm.p2p.addresses import by_peer, known_first, of_ranges
from shoal.swarm.p2p.reachability import DIAL_PROTOCOL, DialBackView, ask, dialled_port, reach_of

if TYPE_CHECKING:
    from shoal.swarm.membership.directory import Directory
    from shoal.swarm.p2p.host import Host


log = logging.getLogger(__name__)

# By which clocks may differ: hivemind's DHT, which holds the membership, refuses more.
CLOCK_S = 3.0
MAX_ASKED = 3  # peers whose clocks are read; the median of three stands one that lies
ASK_S = 5.0  # for one answer
DIAL_S = 10.0  # for one after a dial
PATIENCE_S = 1.0  # for the others to answer once one has
# Between two looks at the own addresses: when they change, others are asked again.
LOOK_S = 5.0
FIRST_S = 10.0  # to the first comparison
SOON_S = 60.0  # to the next one while this node is alone or its clock wrong
LATER_S = 600.0  # to the next one while all is well


def clock_skew(seen: Sequence[DialBackView], met: Mapping[str, str] | None = None) -> float:
    """Return the seconds that this machine's clock is behind that of the peers that answered; 0.0
    if that does no harm.

    Of two that differ that one counts which is nearer to this machine: two against one are more
    than one against one. ``met``: the hosts of peers, of which each address range has one voice,
    because keys cost nothing.
    """
    if not seen:
        return 0.0
    skews = of_ranges(((view.peer, view.skew) for view in seen), met or {})
    low = median_low(skews)
    high = median_high(skews)
    skew = 0.0 if low < 0 < high else min(low, high, key=abs)
    return 0.0 if abs(skew) <= CLOCK_S + max(view.error for view in seen) else skew


def clock_problem(seen: Sequence[DialBackView], met: Mapping[str, str] | None = None) -> str:
    """Return one sentence if this machine's clock is not that of the peers that answered; else, or
    without answers, nothing.
    """
    if not (skew := clock_skew(seen, met)):
        return ""
    off = f"{min(abs(skew), 1e9):.1f} s"
    way = "behind" if skew > 0 else "ahead of"
    if len(seen) == 1:
        return (
            f"this machine's clock is {off} {way} that of the only peer that answered, so yours or "
            "theirs is wrong: set both by NTP (`timedatectl set-ntp true`), or records are "
            "refused."
        )
    return (
        f"this machine's clock is {off} {way} that of {len(seen)} peers: set it by NTP "
        "(`timedatectl set-ntp true`), or its records are refused."
    )


async def compare_clocks(
    host: Host, peers: Iterable[str], port: int | None = None
) -> list[DialBackView]:
    """Return what a bootstrap node and the first of ``peers`` that answer say of their clocks;
    takes `ASK_S` seconds at most.

    ``port``: have up to twice as many dial it too, which takes `DIAL_S`. On the host's loop.
    """
    seeds = host.seeds()
    loop = asyncio.get_running_loop()
    seen: list[DialBackView] = []

    async def one(peer: str) -> None:
        try:
            with contextlib.closing(
                await host.open(peer, DIAL_PROTOCOL, addresses=seeds.get(peer, ()), timeout=ASK_S)
            ) as stream:
                seen.append(await ask(stream, port))
        except (ShoalError, OSError, EOFError) as error:
            log.debug("a clock was not read: %r", error)
        except Exception as error:  # one answer must not end the comparison
            host.internal_errors.caught("clock", error)
        if seen and port is None and not limit.expired():
            patience_s = PATIENCE_S if len(seen) < MAX_ASKED else 0.0
            limit.reschedule(min(limit.when() or 0.0, loop.time() + patience_s))

    asked = list(dict.fromkeys([*list(seeds)[:1], *peers, *seeds]))[: 2 * MAX_ASKED]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ASK_S if port is None else DIAL_S) as limit:
            await asyncio.gather(*map(one, asked))
    return seen


class ClockCheck:
    """Comparisons of a member's clock with others', and dials by them, from time to time until
    `close`.
    """

    def __init__(self, host: Host, directory: Directory) -> None:
        self._host = host
        self._directory = directory
        self._unread = ""
        self._running = host.submit(self._run())

    def news(self) -> str:
        """Return one sentence after each comparison that found the clock wrong; else nothing.

        For any thread.
        """
        found = self._unread
        self._unread = ""
        return found

    def close(self) -> None:
        self._running.cancel()

    async def _run(self) -> None:
        await asyncio.sleep(FIRST_S)
        loop = asyncio.get_running_loop()
        while True:
            addresses = self._host.addresses()
            pause = LATER_S
            try:
                others = self._others()
                # With a wrong clock no member is listed.
                asked = [*others, *self._host.entry(), *by_peer(self._host.known())]
                seen = await compare_clocks(self._host, asked, dialled_port(addresses))
                own_record = self._directory.own_record
                own_record.dialled = reach_of(seen, addresses) or own_record.dialled
                if self._take(seen) or not others:
                    pause = SOON_S
            except Exception as error:  # a bug must not end the node
                self._host.internal_errors.caught("clock", error)
            end = loop.time() + pause
            while loop.time() < end and self._host.addresses() == addresses:
                await asyncio.sleep(min(LOOK_S, pause))

    def _others(self) -> list[str]:
        """Return the other members, those that were met first."""
        me = self._host.peer_id
        members = self._directory.everyone().items()
        said = [(peer, member.addresses) for peer, member in members if peer != me]
        return known_first(said, self._host.met)

    def _take(self, seen: Sequence[DialBackView]) -> bool:
        """Keep what to say of a comparison, go by the clock of the majority, and return whether
        this machine's is wrong.
        """
        problem = clock_problem(seen, self._host.met)
        skew = clock_skew(seen, self._host.met)
        self._unread = f"This node cannot meet the others: {problem}" if problem else ""
        if len(seen) < MAX_ASKED and skew:  # one or two peers are no majority
            return True
        if seen and abs(skew) <= DATED_AHEAD_S:
            self._directory.skew = skew
            if skew:
                self._unread += (
                    " Until then it dates its records, and counts epochs, by their clock."
                )
        return bool(problem)
