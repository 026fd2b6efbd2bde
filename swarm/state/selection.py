"""Serving this node's slow weights as snapshots, made between two steps, and choosing among those
of several peers.

A peer *offers* the id of its snapshot (`shoal.swarm.state.snapshot`). Nobody should begin from
weights on one stranger's word, so a second peer has to confirm them. What a second peer can
honestly say depends on the method:

* **All hold the same weights** (methods over the group): it offers the same id. Peers that are
  asked at the same moment may be a round apart; then those that are behind are asked once more, for
  the later round.
* **No two hold the same weights** (gossip, where copies are only near each other; or rounds that go
  by faster than two peers can be asked): it offers another id, and some chunks of both snapshots,
  which the newcomer draws after both were offered, are compared. The weights are confirmed if their
  distance is at most `NEAR` of the larger of both norms. This coarse test finds weights that are
  noise, zeros, of the wrong sign or scale, but not ones that were changed a little, or in a few
  places. Against those nothing protects a member of a gossip swarm either.
* **Only one peer answers**, as in a swarm of one member: its offer is taken unconfirmed.

Keys are free, so peers of one address range count as one wherever peers of several have answered:
theirs is taken that is offered, or confirmed, from the most ranges, and one range alone ends no
wait for others.

The later of two confirmed snapshots is taken, but a round is believed only if it is at most `AHEAD`
beyond the lower median of those that the ranges state: a node that begins in a round where nobody
is finds no partner. One that begins too early is told by the others which round they are in.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Shape
from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.exchange.context import LEAST_RATE
from shoal.swarm.p2p.addresses import one_each, range_of
from shoal.swarm.p2p.limits import StreamPlaces
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.state.snapshot import (
    SMALL_S,
    ChunkServer,
    Peer,
    Snapshot,
    SnapshotCache,
    Spool,
    State,
    chunks_in,
    download,
    encode,
    fetch_digests,
    make,
    nothing,
    snapshot_id,
)
from shoal.swarm.wire.envelope import CHUNK, fresh_nonce, pack, pack_names, unpack
from shoal.swarm.wire.messages import Answer, StateHeader, StateRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

STATE_PROTOCOL = "/shoal/state/2"
ANSWER_S = 5.0  # seconds in which a peer that is awake says whether it will hand out its weights
# seconds in which it then makes the snapshot, between two steps, if no round is exchanged meanwhile
MAKE_S = 60.0
GRACE_S = 10.0  # more for its answer to arrive
SAMPLE = 4  # chunks that are compared
# of the larger norm: unrelated weights are 1.4 apart, opposite ones 2, nothing and something 1
NEAR = 0.8
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


def believed(rounds: Iterable[int]) -> int:
    """Return the latest round that is believed if peers state these, at least one: a lone one far
    ahead of the others is not.
    """
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
    """Return the seconds in which a peer makes a snapshot of ``nbytes``: its step may be exchanging
    as much just now.
    """
    return MAKE_S + nbytes / LEAST_RATE


async def ask(host: Host, to: Peer, request: StateRequest, nbytes: int) -> StateHeader:
    """Ask one peer for the header of its snapshot, which has about ``nbytes`` bytes.

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
    can have any number of those. It ends ``patience`` seconds after the first offer at the latest.
    ``check`` raises ShoalError at a header that does not fit.
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
        while (
            pending
            and count(agreed(offers)) < ENOUGH
            and count(offers) < most
            and loop.time() < until
        ):
            left = None if until == math.inf else max(until - loop.time(), 0.0)
            _, pending = await asyncio.wait(
                pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if offers:
                until = min(until, loop.time() + patience)
    finally:
        for task in (
            asked
        ):  # in this order: that of a set is another in every run, and a simulation repeats itself
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    order = {peer: place for place, (peer, _) in enumerate(sources)}
    return sorted(offers, key=lambda offer: order[offer.peer]), errors


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
    return most if len(most) >= ENOUGH else []


async def choose(
    host: Host,
    request: StateRequest,
    offers: Sequence[SnapshotOffer],
    check: Callable[[str, StateHeader], None],
    *,
    equal: bool,
    patience: float,
    strict: bool,
) -> list[SnapshotOffer]:
    """Return the offers of the snapshot to take.

    ``equal``: peers of this method hold the same weights. ``strict``: where offers
    are of several address ranges, one of another range must confirm weights that are near others'.

    Raises UnconfirmedError if several peers answered, and no two hold weights near each other;
    NetworkError if they are gone.
    """
    found = agreed(offers)
    if len(offers) < ENOUGH or (found and _spread(found, offers)):
        return found or list(offers)
    later = max(offer.header.round for offer in plausible(offers))
    behind = [offer.source for offer in offers if offer.header.round < later]
    if equal and behind and not found:
        nbytes = offers[0].header.nbytes
        again, _ = await collect(
            host, request.model_copy(update={"since": later}), behind, check, patience, nbytes
        )
        # A peer that has reached the later round may have gone beyond it, and offers that now.
        latest = {offer.peer: offer for offer in (*offers, *again)}
        for every in ([*offers, *again], list(latest.values())):
            if (found := agreed(every)) and _spread(found, every):
                return found
    best = await _confirmed(host, request.swarm, offers, strict)
    return [offer for offer in offers if offer.id == best.id]


async def _confirmed(
    host: Host, swarm: str, offers: Sequence[SnapshotOffer], strict: bool
) -> SnapshotOffer:
    """Return the offer of the latest believed round to whose weights another peer's are near."""
    samples: dict[str, torch.Tensor] = {}
    in_slow = FLOAT32.nbytes(offers[0].header.shapes)  # all have the same: ``check`` saw to it
    chunks = sorted(
        random.Random(fresh_nonce()).sample(
            range(chunks_in(in_slow)), min(SAMPLE, chunks_in(in_slow))
        )
    )
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
        log.info(
            "the weights of peers %s and %s are %.3g apart",
            short(one.peer),
            short(other.peer),
            apart,
        )
        if apart <= NEAR:
            near[one.peer].append(other)
            near[other.peer].append(one)
    limit = _limit(compared)
    place = {one.peer: number for number, one in enumerate(offers)}

    def rank(one: SnapshotOffer) -> tuple[int, int, bool, int, int]:
        there = near[one.peer]
        round = one.header.round
        return (
            _ranges(there),
            len(there),
            round <= limit,
            -min(place[other.peer] for other in there),
            round,
        )

    best = max(compared, key=rank)
    if len(near[best.peer]) < ENOUGH or (strict and not _spread(near[best.peer], compared)):
        names = " and ".join(short(one.peer) for one in compared[:2])
        raise UnconfirmedError(
            f"peers {names} serve weights that lie far from each other, and no other peer confirms "
            "either."
        )
    return best


async def _sample(
    host: Host, swarm: str, offer: SnapshotOffer, chunks: Sequence[int], in_slow: int
) -> torch.Tensor:
    """Fetch the slow weights in ``chunks``: float32, one after another. Raises NetworkError."""
    header = offer.header
    sources = [offer.source]
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
    """Return the distance of two vectors over the larger norm: 0 if both are zero, infinite if a
    value is not finite.
    """
    larger = max(float(one.double().norm()), float(other.double().norm()))
    if not math.isfinite(larger):
        return math.inf
    return float((one.double() - other.double()).norm()) / larger if larger else 0.0


MAX_WAITING = 64  # callers that wait
# rounds: who wants a later one than this node's next ones would keep a place that others need
SOON = 64

DIVERGED = Answer(verdict="refuse", reason="its own have drifted too", round=0)
FAR = Answer(verdict="busy", reason="it is far from that round", round=0)


class StateServer:
    """Server of this node's slow weights.

    The training thread makes the copy, so no half-updated weights are handed out.

    It holds at most two snapshots (`SnapshotCache`), each with 4 bytes for every value of the slow
    weights and of the state that the rule shares. While both are being downloaded, further callers
    get the later of the two rather than a new one.
    """

    def __init__(
        self,
        host: Host,
        swarm: str,
        model: str,
        shapes: Sequence[Shape],
        clock: Callable[[], float] = time.monotonic,
        names: Sequence[str] = (),
    ) -> None:
        self._host = host
        self._swarm = swarm
        self._model = model
        self._shapes = tuple(shapes)
        self._names = pack_names(names)
        self._wanted: dict[asyncio.Future[Snapshot | Answer], tuple[StateRequest, str]] = {}
        """Callers that wait: what each asked for, and its peer id."""
        self._places = StreamPlaces(MAX_WAITING)
        self._making = False
        self._resting: Callable[[], State] | None = None
        # Held while the weights are copied in a block of `at_rest`.
        self._copying = threading.Lock()
        self._last: tuple[tuple[object, ...], bytes] | None = None
        self._kept = SnapshotCache(clock)
        self.diverged: int | None = (
            None  # round of this node's own weights while they have diverged from the group's
        )
        ChunkServer(host, swarm, self._kept)
        host.serve(STATE_PROTOCOL, self._answer)

    def keep(self, state: State) -> None:
        """Serve the snapshot that this node has just fetched itself: others may be downloading
        it.
        """
        if state.snapshot is not None:
            self._kept.put(state.snapshot)

    @contextmanager
    def at_rest(self, current: Callable[[], State]) -> Iterator[None]:
        """Hand out the weights to whoever asks in this block, in which the training thread does not
        change them.

        An evaluation may take minutes, for which a newcomer would wait otherwise. A copy in
        progress delays the end of the block.
        """
        self._resting = current
        try:
            self._offer_at_rest()
            yield
        finally:
            with self._copying:
                self._resting = None

    def _offer_at_rest(self) -> None:
        with self._copying:
            if self._resting is not None:
                self.offer(self._resting)

    def offer(self, current: Callable[[], State]) -> None:
        """Copy the weights if a caller waits for them; the training thread calls this between
        steps.

        Diverged weights are not handed out: callers wait until they are the group's again. But two
        peers that asked each other before either had diverged must not wait for each other.
        """
        self._kept.expire()
        wanted = list(self._wanted.items())
        if drifted := [
            future for future, (request, peer) in wanted if self._keeps_its_own(request, peer)
        ]:
            self._host.call(self._turn_away(drifted, DIVERGED), SMALL_S)
        if not wanted or self.diverged is not None or self._making:
            return
        state = current()
        if far := [future for future, (request, _) in wanted if request.since > state.round + SOON]:
            with suppress(NetworkError):  # the host is closing
                self._host.submit(self._turn_away(far, FAR))
        if all(request.since > state.round for _, (request, _) in wanted):
            return
        self._making = True
        try:
            version = state.version()
            if (
                self._last is not None
                and self._last[0] == version
                and (same := self._kept.get(self._last[1])) is not None
            ):
                self._host.submit(self._hand_out(same))
            elif self._kept.full():
                self._host.submit(self._hand_out(None))
            else:
                self._host.submit(
                    self._make(state, encode(state), version)
                )  # copied here, for the next step changes them
        except (NetworkError, OSError) as error:  # the host is closing, or a disk has failed
            self._making = False
            log.debug("weights are not served: %s", error)

    async def _turn_away(
        self, callers: Iterable[asyncio.Future[Snapshot | Answer]], answer: Answer
    ) -> None:
        for future in callers:
            if not future.done():
                future.set_result(answer)

    async def _make(
        self, state: State, payload: Tensor | Spool, version: tuple[object, ...]
    ) -> None:
        try:
            snapshot = await asyncio.get_running_loop().run_in_executor(
                None, make, state, payload, self._names
            )
            self._last = version, snapshot.id
            self._kept.put(snapshot)
            await self._hand_out(snapshot)
        except OSError as error:  # a full disk
            log.warning("the weights could not be copied for a peer that asked for them: %s", error)
        except Exception as error:  # nobody waits for this coroutine
            self._host.internal_errors.caught("weights", error)
        finally:
            self._making = False

    async def _hand_out(self, snapshot: Snapshot | None) -> None:
        """Answer all who wait for its round or an earlier one. None: with the latest that is
        kept.
        """
        for future, (request, _) in list(self._wanted.items()):
            found = self._kept.newest(request.since) if snapshot is None else snapshot
            if found is not None and found.header.round >= request.since:
                if not future.done():
                    future.set_result(found)
                self._wanted.pop(future, None)
        self._making = False

    def _keeps_its_own(self, request: StateRequest, peer: str) -> bool:
        """Return whether ``peer``, whose weights have diverged, must not wait for this node,
        because its own have diverged too.

        Peers that have diverged from each other must neither swap their weights nor wait in a
        circle. So each waits for those whose weights are of a later round, or of the same and whose
        peer id is lower; a peer that all others refuse keeps its own.
        """
        if not request.astray or (own := self.diverged) is None:  # which the training thread sets
            return False
        return (-request.round, peer) < (-own, self._host.peer_id)

    async def _answer(self, stream: Stream) -> None:
        request = unpack(await stream.receive(StateRequest.LIMIT, SMALL_S), StateRequest)
        await stream.send(pack(await self._reply(stream, request)), SMALL_S)

    async def _reply(self, stream: Stream, request: StateRequest) -> StateHeader | Answer:
        if request.swarm != self._swarm:
            return Answer(verdict="refuse", reason="this peer is in another swarm", round=0)
        if request.model != self._model:
            # Names and shapes in the header tell the difference, so that the newcomer's user can
            # mend it; no weights follow.
            return nothing(self._shapes, self._names)
        if self._keeps_its_own(request, stream.peer_id):
            return DIVERGED
        if not self._places.take(stream):
            return Answer(verdict="busy", reason="too many wait for this peer", round=0)
        future: asyncio.Future[Snapshot | Answer] = asyncio.get_running_loop().create_future()
        self._wanted[future] = request, stream.peer_id
        seconds = making_s(FLOAT32.nbytes(self._shapes))
        try:
            await stream.send(
                pack(Answer(verdict="wait", round=0)), SMALL_S
            )  # shows that this peer is awake
            if self._resting is not None:
                asyncio.get_running_loop().run_in_executor(None, self._offer_at_rest)
            found = await asyncio.wait_for(future, seconds)
            return found if isinstance(found, Answer) else found.header
        except TimeoutError:
            return Answer(
                verdict="busy", reason=f"no step was finished in {seconds:.0f} s", round=0
            )
        finally:
            self._places.free(stream)
            self._wanted.pop(future, None)
