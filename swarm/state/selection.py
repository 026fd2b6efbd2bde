"""Choosing among several peers' snapshots: collect their offers, and require that a second peer confirms the one that is taken.

A peer *offers* the id of its snapshot (`shoal.swarm.state.snapshot`). Nobody should begin from weights on one stranger's word, so a
second peer has to confirm them. What a second peer can honestly say depends on the method:

* **All hold the same weights** (methods over the group): it offers the same id. Peers that are asked at the same moment may be a
  round apart; then those that are behind are asked once more, for the later round.
* **No two hold the same weights** (gossip, where copies are only near each other; or rounds that go by faster than two peers can be
  asked): it offers another id, and some chunks of both snapshots, which the newcomer draws after both were offered, are compared.
  The weights are confirmed if their distance is at most `NEAR` of the larger of both norms. This coarse test finds weights that are
  noise, zeros, of the wrong sign or scale, but not ones that were changed a little, or in a few places. Against those nothing
  protects a member of a gossip swarm either.
* **Only one peer answers**, as in a swarm of one member: its offer is taken unconfirmed.

Keys are free, so peers of one address range count as one wherever peers of several have answered: theirs is taken that is offered,
or confirmed, from the most ranges, and one range alone ends no wait for others.

The later of two confirmed snapshots is taken, but a round is believed only if it is at most `AHEAD` beyond the lower median of
those that the ranges state: a node that begins in a round where nobody is finds no partner. One that begins too early is told by
the others which round they are in.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

import torch

from shoal.optim.codecs.base import FLOAT32
from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.exchange.context import LEAST_RATE
from shoal.swarm.p2p.multiaddr import one_each, range_of
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.download import Peer, download, fetch_digests
from shoal.swarm.state.snapshot import chunks_in, snapshot_id
from shoal.swarm.wire.digest import CHUNK
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.pair import Answer
from shoal.swarm.wire.state import StateHeader, StateRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

STATE_PROTOCOL = "/shoal/state/2"
ANSWER_S = 5.0  # seconds in which a peer that is awake says whether it will hand out its weights
MAKE_S = 60.0  # seconds in which it then makes the snapshot, between two steps, if no round is exchanged meanwhile
GRACE_S = 10.0  # more for its answer to arrive
SAMPLE = 4  # chunks that are compared
NEAR = 0.8  # of the larger norm: unrelated weights are 1.4 apart, opposite ones 2, nothing and something 1
ENOUGH = 2  # peers that offer the same snapshot
AHEAD = 2  # rounds

log = logging.getLogger(__name__)


class NoStateError(NetworkError):
    """A peer has no weights to hand out: it said so, or did not even answer."""


class UnconfirmedError(NetworkError):
    """No two peers' weights are near each other."""


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


@dataclass(frozen=True)
class Collected:
    """Offers of several peers, in the order in which these were to be asked, and the errors of the others."""

    offers: list[SnapshotOffer]
    errors: dict[str, Exception]


def believed(rounds: Iterable[int]) -> int:
    """Return the latest round that is believed if peers state these, at least one: a lone one far ahead of the others is not."""
    return median_low(rounds) + AHEAD


def _limit(offers: Iterable[SnapshotOffer]) -> int:
    return believed(one_each((offer.host, offer.header.round) for offer in offers))


def _ranges(offers: Iterable[SnapshotOffer]) -> int:
    return len({range_of(offer.host) for offer in offers})


def _spread(some: Sequence[SnapshotOffer], offers: Sequence[SnapshotOffer]) -> bool:
    """Return whether ``some`` are of two address ranges, or all ``offers`` of one."""
    return _ranges(some) >= min(_ranges(offers), ENOUGH)


def plausible(offers: Sequence[SnapshotOffer]) -> list[SnapshotOffer]:
    limit = _limit(offers)
    return [offer for offer in offers if offer.header.round <= limit]


def making_s(nbytes: int) -> float:
    """Return the seconds in which a peer makes a snapshot of ``nbytes``: its step may be exchanging as much just now."""
    return MAKE_S + nbytes / LEAST_RATE


async def ask(host: Host, to: Peer, request: StateRequest, nbytes: int) -> StateHeader:
    """Ask one peer for the header of its snapshot, which has about ``nbytes`` bytes.

    Raises:
        NoStateError: it refuses, or does not answer.
        NetworkError, MessageError: it is busy, breaks off, or does not keep to the protocol.
    """
    peer, addresses = to
    try:
        stream = await host.open(peer, STATE_PROTOCOL, addresses=addresses, timeout=ANSWER_S)
    except NetworkError as error:
        raise NoStateError(str(error)) from error
    try:
        try:
            await stream.send(pack(request), ANSWER_S)
            reply = unpack(await stream.receive(StateHeader.LIMIT, ANSWER_S), StateHeader, Answer)
        except NetworkError as error:
            raise NoStateError(str(error)) from error
        if isinstance(reply, Answer) and reply.verdict == "wait":
            reply = unpack(await stream.receive(StateHeader.LIMIT, making_s(nbytes) + GRACE_S), StateHeader, Answer)
    finally:
        stream.close()
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
) -> Collected:
    """Ask all ``sources`` for a snapshot of about ``nbytes``, until two offer the same one or all (or ``most``) have answered.

    Where they are in several address ranges, as many ranges are waited for, not peers: one range can have any number of those.
    It ends ``patience`` seconds after the first offer at the latest. ``check`` raises ShoalError at a header that does not fit.
    """
    offers: list[SnapshotOffer] = []
    errors: dict[str, Exception] = {}

    async def one(to: Peer) -> None:
        try:
            header = await ask(host, to, request, nbytes)
            check(to[0], header)
            offers.append(SnapshotOffer(*to, header, host.met.get(to[0], "")))
        except ShoalError as error:
            errors[to[0]] = error

    def count(some: Sequence[SnapshotOffer]) -> int:
        ranges = {range_of(host.met.get(peer, "")) for peer, _ in sources if peer not in errors}
        return _ranges(some) if len(ranges) > 1 else len(some)

    loop = asyncio.get_running_loop()
    asked = [asyncio.ensure_future(one(to)) for to in sources]
    pending: set[asyncio.Future[None]] = set(asked)
    until = math.inf
    try:
        while pending and count(agreed(offers)) < ENOUGH and count(offers) < most and loop.time() < until:
            left = None if until == math.inf else max(until - loop.time(), 0.0)
            _, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if offers:
                until = min(until, loop.time() + patience)
    finally:
        for task in asked:  # in this order: that of a set is another in every run, and a simulation repeats itself
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    order = {peer: place for place, (peer, _) in enumerate(sources)}
    return Collected(sorted(offers, key=lambda offer: order[offer.peer]), errors)


def agreed(offers: Sequence[SnapshotOffer]) -> list[SnapshotOffer]:
    """Return the offers of the snapshot that most address ranges offer, and most peers of equals, and then the latest believed one;
    none if no two peers offer the same.
    """
    same: defaultdict[bytes, list[SnapshotOffer]] = defaultdict(list)
    for offer in offers:
        same[offer.id].append(offer)
    limit = _limit(offers) if offers else 0

    def rank(group: Sequence[SnapshotOffer]) -> tuple[int, int, bool, int]:
        round = group[0].header.round
        return _ranges(group), len(group), round <= limit, round

    most = max(same.values(), key=rank, default=[])
    return most if len(most) >= ENOUGH else []


async def choose(
    host: Host,
    request: StateRequest,
    offers: Sequence[SnapshotOffer],
    check: Callable[[str, StateHeader], None],
    draw: random.Random,
    *,
    equal: bool,
    patience: float,
    strict: bool = False,
) -> list[SnapshotOffer]:
    """Return the offers of the snapshot to take. ``equal``: peers of this method hold the same weights. ``strict``: where offers
    are of several address ranges, one of another range must confirm weights that are near others'.

    Raises:
        UnconfirmedError: several peers answered, and no two of them hold weights near each other.
        NetworkError: the peers whose weights were to be compared are gone.
    """
    found = agreed(offers)
    if len(offers) < ENOUGH or (found and _spread(found, offers)):
        return found or list(offers)
    later = max(offer.header.round for offer in plausible(offers))
    behind = [offer.source for offer in offers if offer.header.round < later]
    if equal and behind and not found:
        nbytes = offers[0].header.nbytes
        again = await collect(host, request.model_copy(update={"since": later}), behind, check, patience, nbytes)
        # A peer that has reached the later round may have gone beyond it, and offers that now.
        latest = {offer.peer: offer for offer in (*offers, *again.offers)}
        for every in ([*offers, *again.offers], list(latest.values())):
            if (found := agreed(every)) and _spread(found, every):
                return found
    best = await _confirmed(host, request.swarm, offers, draw, strict)
    return [offer for offer in offers if offer.id == best.id]


async def _confirmed(host: Host, swarm: str, offers: Sequence[SnapshotOffer], draw: random.Random, strict: bool) -> SnapshotOffer:
    """Return the offer of the latest believed round to whose weights another peer's are near."""
    samples: dict[str, torch.Tensor] = {}
    in_slow = FLOAT32.nbytes(offers[0].header.shapes)  # all have the same: ``check`` saw to it
    chunks = sorted(draw.sample(range(chunks_in(in_slow)), min(SAMPLE, chunks_in(in_slow))))
    for offer in sorted(offers, key=lambda one: -one.header.round):
        try:
            samples[offer.peer] = await _sample(host, swarm, offer, chunks, in_slow)
        except NetworkError as error:
            log.info("no sample of the weights of peer %s: %s", short(offer.peer), error)
    compared = [offer for offer in offers if offer.peer in samples]
    if not compared:
        raise NetworkError("the peers that offered weights are gone.")
    if len(compared) == 1:
        return compared[0]
    near = {one.peer: [one] for one in compared}
    for one, other in itertools.combinations(compared, 2):
        apart = distance(samples[one.peer], samples[other.peer])
        log.info("the weights of peers %s and %s are %.3g apart", short(one.peer), short(other.peer), apart)
        if apart <= NEAR:
            near[one.peer].append(other)
            near[other.peer].append(one)
    limit = _limit(compared)
    place = {one.peer: number for number, one in enumerate(offers)}

    def rank(one: SnapshotOffer) -> tuple[int, int, bool, int, int]:
        there, round = near[one.peer], one.header.round
        return _ranges(there), len(there), round <= limit, -min(place[other.peer] for other in there), round

    best = max(compared, key=rank)
    if len(near[best.peer]) < ENOUGH or (strict and not _spread(near[best.peer], compared)):
        names = " and ".join(short(one.peer) for one in compared[:2])
        raise UnconfirmedError(f"peers {names} serve weights that lie far from each other, and no other peer confirms either.")
    return best


async def _sample(host: Host, swarm: str, offer: SnapshotOffer, chunks: Sequence[int], in_slow: int) -> torch.Tensor:
    """Fetch the slow weights in ``chunks``: float32, one after another. Raises NetworkError."""
    header, sources = offer.header, [offer.source]
    digests = await fetch_digests(host, swarm, header, sources)
    sink = SampleSink()
    await download(host, swarm, header, digests, sources, sink, chunks)
    data = b"".join(sink.chunks[chunk][: max(in_slow - chunk * CHUNK, 0)] for chunk in chunks)
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


class SampleSink:
    """Sink that keeps some chunks of a snapshot."""

    def __init__(self) -> None:
        self.chunks: dict[int, bytes] = {}

    @property
    def have(self) -> set[int]:
        return set(self.chunks)

    def write(self, chunk: int, data: memoryview) -> None:
        self.chunks[chunk] = bytes(data)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the distance of two vectors over the larger norm: 0 if both are zero, infinite if a value is not finite."""
    larger = max(float(one.double().norm()), float(other.double().norm()))
    if not math.isfinite(larger):
        return math.inf
    return float((one.double() - other.double()).norm()) / larger if larger else 0.0
