"""Asking peers for the snapshots that they hold.

A peer *offers* the id of its snapshot. Keys are free, so peers of one address range count as one
wherever peers of several have answered, and one range alone ends no wait for others.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING

from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.exchange.timeouts import LEAST_RATE
from shoal.swarm.p2p.addresses import one_each, range_of
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.download import Peer
from shoal.swarm.state.snapshot import snapshot_id
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.messages import Answer, StateHeader, StateRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host


STATE_PROTOCOL = "/shoal/state/2"
ANSWER_S = 5.0  # in which a peer that is awake says whether it will hand out its weights
# seconds in which it then makes the snapshot, between two steps, if no round is exchanged meanwhile
MAKE_S = 60.0
GRACE_S = 10.0  # more for its answer to arrive
CONFIRMING_PEERS = 2  # peers that offer the same snapshot
MAX_AHEAD_ROUNDS = 2  # rounds


class NoStateError(NetworkError):
    """A peer has no weights to hand out: it said so, or did not even answer."""


@dataclass(frozen=True)
class SnapshotOffer:
    """Snapshot that ``peer`` says it holds."""

    peer: str
    addresses: Sequence[str]
    header: StateHeader
    host: str = ""
    """Where the peer was met."""

    @property
    def id(self) -> bytes:
        return snapshot_id(self.header)

    @property
    def source(self) -> Peer:
        return self.peer, self.addresses


def believed(rounds: Iterable[int]) -> int:
    """Return the latest round that is believed if peers state these, at least one: a lone one far
    ahead of the others is not.
    """
    return median_low(rounds) + MAX_AHEAD_ROUNDS


def _limit(offers: Iterable[SnapshotOffer]) -> int:
    return believed(one_each((offer.host, offer.header.round) for offer in offers))


def _ranges(offers: Iterable[SnapshotOffer]) -> int:
    return len({range_of(offer.host) for offer in offers})


def _spread(some: Sequence[SnapshotOffer], offers: Sequence[SnapshotOffer]) -> bool:
    """Return whether ``some`` are of two address ranges, or all ``offers`` of one."""
    return _ranges(some) >= min(_ranges(offers), CONFIRMING_PEERS)


def plausible(offers: Sequence[SnapshotOffer]) -> list[SnapshotOffer]:
    limit = _limit(offers)
    return [offer for offer in offers if offer.header.round <= limit]


def making_s(nbytes: int) -> float:
    """Return the seconds in which a peer makes a snapshot of ``nbytes``: its step may be exchanging
    as much just now.
    """
    return MAKE_S + nbytes / LEAST_RATE


async def ask(
    host: Host,
    to: Peer,
    request: StateRequest,
    nbytes: int,
    waits: Callable[[], None] = lambda: None,
) -> StateHeader:
    """Ask one peer for the header of its snapshot, which has about ``nbytes`` bytes; ``waits`` is
    called if it has to make one.

    Raises NoStateError if it refuses or does not answer; NetworkError, MessageError if it is busy,
    breaks off, or violates the protocol.
    """
    peer, addresses = to
    try:
        stream = await host.open(peer, STATE_PROTOCOL, addresses=addresses, timeout=ANSWER_S)
    except NetworkError as error:
        raise NoStateError(str(error)) from error
    with closing(stream):
        try:
            await stream.send(pack(request), ANSWER_S)
            reply = unpack(await stream.receive(StateHeader.LIMIT, ANSWER_S), StateHeader, Answer)
        except NetworkError as error:
            raise NoStateError(str(error)) from error
        if isinstance(reply, Answer) and reply.verdict == "wait":
            waits()
            reply = unpack(
                await stream.receive(StateHeader.LIMIT, making_s(nbytes) + GRACE_S),
                StateHeader,
                Answer,
            )
    if isinstance(reply, Answer):
        kind = NoStateError if reply.verdict == "refuse" else NetworkError
        raise kind(f"peer {short(peer)} serves no weights: {reply.reason}.")
    assert isinstance(reply, StateHeader)
    return reply


async def collect(
    host: Host,
    request: StateRequest,
    sources: Sequence[Peer],
    check: Callable[[str, StateHeader], None],
    patience: float,
    nbytes: int,
    most: int = 64,
) -> tuple[list[SnapshotOffer], dict[str, Exception]]:
    """Ask all ``sources`` for a snapshot of about ``nbytes``, until two offer the same one or all
    (or ``most``) have answered. Return the offers, in the order of ``sources``, and the errors of
    the others.

    Where they are in several address ranges, as many ranges are waited for, not peers: one range
    can have any number of those. It ends ``patience`` seconds after the first offer, once there is
    a second one, or no peer is making a snapshot: in the middle of a step honest ones answer late.
    ``check`` raises ShoalError at a header that does not fit.
    """
    poll = _Poll(host, request, sources, check, nbytes)
    asked = [asyncio.ensure_future(poll.ask(to)) for to in sources]
    try:
        await poll.wait(asked, patience, most)
    finally:
        # In this order: that of a set is another in every run, and a simulation repeats itself.
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    for task in asked:
        if not task.cancelled():
            task.result()  # raises what is an error of our own
    order = {peer: place for place, (peer, _) in enumerate(sources)}
    return sorted(poll.offers, key=lambda offer: order[offer.peer]), poll.errors


@dataclass
class _Poll:
    """Questions to all ``sources``, and what has come of them."""

    host: Host
    request: StateRequest
    sources: Sequence[Peer]
    check: Callable[[str, StateHeader], None]
    nbytes: int
    offers: list[SnapshotOffer] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    making: set[str] = field(default_factory=set)
    """Peers that are making a snapshot."""

    async def ask(self, to: Peer) -> None:
        """Ask one peer, and note its offer or error."""
        peer = to[0]
        try:
            header = await ask(
                self.host, to, self.request, self.nbytes, lambda: self.making.add(peer)
            )
            self.check(peer, header)
            self.offers.append(SnapshotOffer(*to, header, self.host.met.get(peer, "")))
        except ShoalError as error:
            self.errors[peer] = error
        finally:
            self.making.discard(peer)

    async def wait(self, asked: Iterable[asyncio.Future[None]], patience: float, most: int) -> None:
        """Wait until the answers suffice, all are here, or ``patience`` is over."""
        loop = asyncio.get_running_loop()
        pending = set(asked)
        until: float | None = None
        while pending and not self._suffices(most):
            left: float | None = None
            if until is not None and self._may_end():
                left = until - loop.time()
                if left <= 0:
                    return
            _, pending = await asyncio.wait(
                pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if self.offers and until is None:
                until = loop.time() + patience

    def _suffices(self, most: int) -> bool:
        is_confirmed = self._count(agreed(self.offers)) >= CONFIRMING_PEERS
        return is_confirmed or self._count(self.offers) >= most

    def _may_end(self) -> bool:
        """Return whether nobody is waited for once patience is over."""
        return self._count(self.offers) >= CONFIRMING_PEERS or not self.making

    def _count(self, offers: Sequence[SnapshotOffer]) -> int:
        """Return the number of ``offers``; of their address ranges, if those who may answer are in
        several.
        """
        asked = [peer for peer, _ in self.sources if peer not in self.errors]
        ranges = {range_of(self.host.met.get(peer, "")) for peer in asked}
        return _ranges(offers) if len(ranges) > 1 else len(offers)


def agreed(offers: Sequence[SnapshotOffer]) -> list[SnapshotOffer]:
    """Return the offers of the snapshot that most address ranges offer, and most peers of equals,
    and then the latest believed one; none if no two peers offer the same.
    """
    same: defaultdict[bytes, list[SnapshotOffer]] = defaultdict(list)
    for offer in offers:
        same[offer.id].append(offer)
    limit = _limit(offers) if offers else 0

    def rank(group: Sequence[SnapshotOffer]) -> tuple[int, int, bool, int]:
        round = group[0].header.round
        return _ranges(group), len(group), round <= limit, round

    most = max(same.values(), key=rank, default=[])
    return most if len(most) >= CONFIRMING_PEERS else []
