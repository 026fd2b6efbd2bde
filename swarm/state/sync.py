"""Fetching the slow weights of a swarm, for a newcomer, a node that has diverged, or ``shoal
pull``: whole, checked, or not at all.

The offers of several peers decide which snapshot to take (`shoal.swarm.state.selection`). Its
chunks then come from every peer that holds the very same bytes (`shoal.swarm.state.download`):
those that offered it and, since all sources are asked, those that have downloaded it before. If
these go away, as when the link breaks for a while, the download goes on from whoever holds the same
snapshot then; only if nobody does, another one is chosen.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from shoal.optim.codecs.base import Shape, all_finite
from shoal.optim.codecs.floats import FLOAT32
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.swarm.exchange.timeouts import LEAST_RATE
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.download import ChunkSink, MemorySink, Peer, download, fetch_digests
from shoal.swarm.state.offers import (
    CONFIRMING_PEERS,
    NoStateError,
    SnapshotOffer,
    agreed,
    collect,
    plausible,
)
from shoal.swarm.state.progress import FETCH_S, FetchProgress, while_it_moves
from shoal.swarm.state.query import ATTEMPTS, StateQuery
from shoal.swarm.state.selection import UnconfirmedError, choose
from shoal.swarm.state.snapshot import (
    DIGEST_BYTES,
    Snapshot,
    State,
    chunk_size,
    chunks_in,
    digests_of,
    encode,
    read,
    snapshot_id,
)
from shoal.swarm.wire.messages import StateHeader

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

BREAK_S = 100.0  # of a break after which a download goes on: sources keep a snapshot for 120
PAUSE_S = 5.0  # between two tries in it
TELL_S = 10.0  # between two reports of a fetch
MAX_ASKED = 64  # peers at once

log = logging.getLogger(__name__)

SinkT = TypeVar("SinkT", bound=ChunkSink)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SinkFactory(Protocol[SinkT, T_co]):
    """Maker of the sinks that a fetch fills, and of its result."""

    def unfinished(self) -> StateHeader | None:
        """Return the snapshot to go on with while any source holds it; None to take what the
        sources offer now.
        """
        ...

    async def open(self, header: StateHeader, digests: bytes) -> SinkT:
        """Return a sink for a snapshot.

        It is used again in later attempts that take the same snapshot.
        """
        ...

    async def finish(self, header: StateHeader, digests: bytes, sink: SinkT) -> T_co | None:
        """Return what is made of a full sink; None if its sources are not to be asked again."""
        ...


class _StateInMemory:
    """Sink factory that reads the snapshot as a state for a rule with ``extra`` shapes.

    ``held``: this node's own slow weights and shared state: what of it is the same is not fetched.
    """

    def __init__(self, extra: Mapping[str, Sequence[Shape]], held: State | None) -> None:
        self._extra = extra
        self._held = held

    def unfinished(self) -> None:
        return None

    async def open(self, header: StateHeader, digests: bytes) -> MemorySink:
        if self._held is None:
            return MemorySink(header.nbytes)
        return await asyncio.get_running_loop().run_in_executor(
            None, self._beside, self._held, header, digests
        )

    def _beside(self, held: State, header: StateHeader, digests: bytes) -> MemorySink:
        own = encode(replace(held, extra={name: held.extra[name] for name, _ in header.extra}))
        own_digests = digests_of(own)
        same = []
        for number in range(chunks_in(header.nbytes)):
            place = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
            if own_digests[place] == digests[place]:
                same.append(number)
        return MemorySink(header.nbytes, own, same)

    async def finish(self, header: StateHeader, digests: bytes, sink: MemorySink) -> State | None:
        state = read(Snapshot(header, sink.content, digests), self._extra)
        # One at a time: each may take memory.
        tensors = itertools.chain(state.slow, *state.extra.values())
        if await asyncio.get_running_loop().run_in_executor(None, all_finite, tensors):
            return state
        log.warning(
            "the weights of round %d that were fetched are not finite and were not used",
            header.round,
        )
        return None


async def choose_source(
    host: Host, query: StateQuery, sources: Sequence[Peer], attempt: int
) -> list[SnapshotOffer]:
    """Ask ``sources``, decide which snapshot to take, and return its offers.

    Raises NoStateError if all refused, or are gone; NetworkError if nobody offered anything of use;
    what ``query.check`` raises for the user to mend, as ModelDiffersError, if it did at all that
    answered.
    """
    # Copies that are not equal need not all be waited for: two will do, unless they did not confirm
    # each other.
    most = MAX_ASKED if query.equal or attempt else CONFIRMING_PEERS
    offers, errors = await collect(
        host,
        query.request,
        sources,
        query.check,
        query.patience,
        FLOAT32.nbytes(query.shapes),
        most,
    )
    mendable: Exception | None = None  # the first that the user can mend
    for peer, error in errors.items():
        level = logging.WARNING
        if not isinstance(error, NetworkError | MessageError):
            level = logging.INFO  # it is raised below
            mendable = mendable or error
        log.log(level, "no weights from peer %s: %s", short(peer), error)
    if offers:
        if not query.confirmed:
            return agreed(offers) or [max(plausible(offers), key=lambda one: one.header.round)]
        strict = not attempt  # later all have been waited for
        return await choose(
            host,
            query.request,
            offers,
            query.check,
            equal=query.equal,
            patience=query.patience,
            strict=strict,
        )
    if mendable is not None:
        raise mendable
    if all(isinstance(error, NoStateError) for error in errors.values()):
        raise NoStateError("all peers that were asked refused, or are gone.")
    raise NetworkError("none of the peers that were asked could serve weights.")


async def fetch_into(
    host: Host,
    query: StateQuery,
    sources: Sequence[Peer],
    sinks: SinkFactory[SinkT, T],
    progress: FetchProgress | None = None,
) -> T | None:
    """Download a snapshot that fits into a sink of ``sinks`` and return what they make of it; None
    if all refused or are gone.

    Raises ModelDiffersError, whose sentence names the first difference; NetworkError if a download
    began and failed, or no second peer confirms the weights.
    """
    return await _Fetch(host, query, sources, sinks, progress or FetchProgress()).run()


@dataclass(frozen=True)
class _Choice:
    """The snapshot to download."""

    header: StateHeader
    digests: bytes | None
    """Of its chunks, if they are known already."""
    sources: Sequence[Peer]
    """The peers that offer it, or may hold it."""


class _Fetch(Generic[SinkT, T]):
    """The tries of one fetch, with what each learns for the next."""

    def __init__(
        self,
        host: Host,
        query: StateQuery,
        sources: Sequence[Peer],
        sinks: SinkFactory[SinkT, T],
        progress: FetchProgress,
    ) -> None:
        self._host = host
        self._query = query
        self._sources = sources
        self._sinks = sinks
        self._progress = progress
        self._clock = asyncio.get_running_loop().time
        self._opened: dict[bytes, SinkT] = {}  # the sink of one snapshot at a time
        self._left_out: set[str] = set()  # peers that served something wrong
        self._unfinished = sinks.unfinished()
        self._failed = 0  # tries in a row that brought nothing
        self._broke_at = -math.inf  # when the download broke off last
        self._problem = NetworkError("none of the peers that were asked could serve weights.")

    async def run(self) -> T | None:
        while self._failed < self._query.attempts:
            asked = [to for to in self._sources if to[0] not in self._left_out]
            if not asked:
                break
            try:
                choice = await self._choose(asked)
            except UnconfirmedError as error:
                self._problem = error
                self._failed += 1
                continue
            except NetworkError as error:
                if self._clock() - self._broke_at < BREAK_S:
                    await asyncio.sleep(PAUSE_S)
                    continue
                if not isinstance(error, NoStateError):
                    raise
                if self._failed or self._progress.moved:
                    break
                return None
            result = await self._take(choice, asked)
            if result is not None:
                return result
        raise self._problem

    async def _choose(self, asked: Sequence[Peer]) -> _Choice:
        """Return the snapshot to go on with if anybody holds it; else one that is offered now."""
        if self._unfinished is not None:
            digests = await _digests_held(self._host, self._query, self._unfinished, asked)
            if digests is not None:
                return _Choice(self._unfinished, digests, asked)
        offers = await choose_source(self._host, self._query, asked, self._failed)
        header = offers[0].header
        sources = [offer.source for offer in offers]
        if len({peer for peer, _ in sources}) < CONFIRMING_PEERS:
            log.info(
                "the weights of round %d are those of peer %s", header.round, short(offers[0].peer)
            )
        return _Choice(header, None, sources)

    async def _take(self, choice: _Choice, asked: Sequence[Peer]) -> T | None:
        """Download the snapshot and return what is made of it; None if that failed."""
        header = choice.header
        offering = {peer for peer, _ in choice.sources}
        holders = [*choice.sources, *(to for to in asked if to[0] not in offering)]
        moved_before = self._progress.moved
        if self._opened and snapshot_id(header) not in self._opened:
            self._failed += 1  # what came by now is of no use
        try:
            digests = choice.digests
            if not digests:
                swarm = self._query.request.swarm
                digests = await fetch_digests(self._host, swarm, header, choice.sources)
            sink = await self._sink(header, digests)
            await self._download(header, digests, holders, sink)
        except NetworkError as error:
            log.warning(
                "the weights of round %d could not be fetched whole: %s", header.round, error
            )
            self._problem = error
            if len(offering) == 1 < len(asked):
                self._left_out |= offering
            self._note_break(header, self._progress.moved > moved_before)
            return None
        result = await self._sinks.finish(header, digests, sink)
        if result is None:
            self._left_out |= offering
            self._unfinished = self._sinks.unfinished()
            self._failed += 1
        return result

    async def _download(
        self, header: StateHeader, digests: bytes, holders: Sequence[Peer], sink: SinkT
    ) -> None:
        wanted = self._query.wanted(header)
        chunks = range(chunks_in(wanted))
        there = sum(chunk_size(header.nbytes, chunk) for chunk in sink.have if chunk in chunks)
        self._progress.begin(wanted, there)
        self._left_out |= await download(
            self._host,
            self._query.request.swarm,
            header,
            digests,
            holders,
            sink,
            chunks,
            self._progress.arrived,
        )

    def _note_break(self, header: StateHeader, has_moved: bool) -> None:
        """Note that the download broke off: the next try goes on with it, but for a second one in a
        row that brings nothing.
        """
        self._failed = 0 if has_moved else self._failed + 1
        if self._progress.moved:
            self._unfinished = header
            self._broke_at = self._clock()
        if self._failed > 1:
            self._unfinished = self._sinks.unfinished()

    async def _sink(self, header: StateHeader, digests: bytes) -> SinkT:
        """Return the sink of the snapshot, the same as in an earlier attempt."""
        id = snapshot_id(header)
        if id not in self._opened:
            self._opened = {id: await self._sinks.open(header, digests)}
        return self._opened[id]


async def _digests_held(
    host: Host, query: StateQuery, header: StateHeader, sources: Sequence[Peer]
) -> bytes | None:
    """Return the digests of a snapshot that was chosen before; None if it does not fit or none of
    ``sources`` holds it.
    """
    try:
        query.check(host.peer_id, header)
        return await fetch_digests(host, query.request.swarm, header, sources)
    except ShoalError as error:
        log.info("the unfinished download cannot go on: %s", error)
        return None


def fetch_state(
    host: Host,
    query: StateQuery,
    sources: Sequence[Peer],
    held: State | None = None,
    watch: Callable[[FetchProgress], None] = lambda progress: None,
) -> State | None:
    """Fetch a state that fits, in memory, and wait for it; see `fetch_into`.

    What of ``held`` is the same is not fetched. ``watch`` is given the progress as it begins.
    """
    progress = FetchProgress(_grace_s(query))
    watch(progress)
    return wait_for(begin_fetch(host, query, sources, held, progress), progress)


def wait_for(
    fetched: concurrent.futures.Future[T],
    progress: FetchProgress,
    tell: Callable[[str], None] = log.info,
) -> T:
    """Return what a fetch brings, and ``tell`` how far it is every ten seconds."""
    try:
        while progress.left_s > -TELL_S:  # its own bound is on the loop, which may hang
            done, _ = concurrent.futures.wait([fetched], TELL_S)
            if done:
                return fetched.result()
            if said := str(progress):
                tell(f"fetching the swarm's weights: {said}")
    except concurrent.futures.CancelledError:
        raise NetworkError("the weights were not fetched because the host is closing.") from None
    finally:
        fetched.cancel()
    raise NetworkError("the weights were given up, because this node's network does not answer.")


def _grace_s(query: StateQuery) -> float:
    """Return the seconds that fetching may take whatever comes: an hour, or three attempts at
    `LEAST_RATE`.
    """
    shapes = list(query.shapes)
    for shared in query.extra.values():
        shapes += shared
    return max(FETCH_S, ATTEMPTS * FLOAT32.nbytes(shapes) / LEAST_RATE)


def begin_fetch(
    host: Host,
    query: StateQuery,
    sources: Sequence[Peer],
    held: State | None = None,
    progress: FetchProgress | None = None,
) -> concurrent.futures.Future[State | None]:
    """Start `fetch_state` from any thread, without waiting; it goes on as long as it moves."""
    progress = progress or FetchProgress(_grace_s(query))
    fetch = fetch_into(host, query, sources, _StateInMemory(query.extra, held), progress)
    return host.submit(while_it_moves(fetch, progress))
