"""Fetching the slow weights of a swarm, for a newcomer, a node that has diverged, or ``shoal
pull``: whole, checked, or not at all.

The offers of several peers decide which snapshot to take (`shoal.swarm.state.selection`). Its
chunks then come from every peer that holds the very same bytes (`shoal.swarm.state.snapshot`):
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
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from shoal.optim.codecs.base import FLOAT32, Shape, all_finite
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.swarm.exchange.context import LEAST_RATE
from shoal.swarm.exchange.contribution import Outline
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.progress import FETCH_S, FetchProgress, while_it_moves
from shoal.swarm.state.selection import (
    ENOUGH,
    NoStateError,
    SnapshotOffer,
    UnconfirmedError,
    agreed,
    choose,
    collect,
    plausible,
)
from shoal.swarm.state.snapshot import (
    DIGEST,
    ChunkSink,
    MemorySink,
    Peer,
    Snapshot,
    State,
    chunk_size,
    chunks_in,
    digests_of,
    download,
    encode,
    fetch_digests,
    read,
    shapes_digest,
    snapshot_id,
)
from shoal.swarm.wire.envelope import MAX_COUNT, unpack_names
from shoal.swarm.wire.messages import StateHeader, StateRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

ATTEMPTS = 3
PATIENCE_S = 10.0  # seconds after the first offer in which a second peer may confirm it
BREAK_S = 100.0  # seconds of a break after which a download goes on: sources keep a snapshot 120
PAUSE_S = 5.0  # seconds between two tries in it
TELL_S = 10.0  # seconds between two reports of a fetch
LAST_ROUND = MAX_COUNT // 2  # whoever begins in it can go on for as many rounds again
FEW = 64  # peers that are asked at once, at most

log = logging.getLogger(__name__)

SinkT = TypeVar("SinkT", bound=ChunkSink)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ModelDiffersError(ShoalError):
    """This node's model has other names or shapes than the swarm's."""


@dataclass(frozen=True)
class StateQuery:
    """Query for a state that a node can use.

    ``shapes``, ``names``: of the slow weights; without names those are not compared. ``extra``:
    shapes of what its outer rule takes over beside them, by name; a source may have less, never
    other. ``equal``: in this method peers hold the same weights. ``confirmed``: a second peer must
    confirm the weights; otherwise the latest offer will do. ``fragments``: of this node's
    optimizer; None: a state without their rounds will do. ``attempts``: times that the sources are
    asked, at most.
    """

    request: StateRequest
    shapes: Sequence[Shape]
    extra: Mapping[str, Sequence[Shape]] = field(default_factory=dict)
    equal: bool = False
    confirmed: bool = True
    fragments: int | None = None
    patience: float = PATIENCE_S
    attempts: int = ATTEMPTS
    names: Sequence[str] = ()

    def check(self, peer: str, header: StateHeader) -> None:
        """Check that an offer fits: what is allocated follows from this node's own shapes, whatever
        the peer says.

        Raises ModelDiffersError, MessageError.
        """
        theirs = Outline(unpack_names(header.names), header.shapes)
        difference = Outline(tuple(self.names), tuple(self.shapes)).differs(theirs)
        if difference is not None:
            raise ModelDiffersError(
                f"This node's model does not fit the swarm: {difference} (in the swarm); use the "
                "swarm's model, task and options."
            )
        names = [name for name, _ in header.extra]
        unknown = [
            name
            for name, shaped in header.extra
            if name not in self.extra or shaped != shapes_digest(self.extra[name])
        ]
        if unknown or len(set(names)) < len(names):
            raise MessageError(
                f"peer {short(peer)} serves a state {unknown or names} that does not fit this "
                "node's outer rule."
            )
        every = [*self.shapes, *(shape for name in names for shape in self.extra[name])]
        if header.nbytes != FLOAT32.nbytes(every) or header.dtype != "float32":
            raise MessageError(
                f"peer {short(peer)} announced weights of {header.nbytes} bytes, "
                f"{FLOAT32.nbytes(every)} fit here."
            )
        if len(header.applied) % struct.calcsize("<Q"):
            raise MessageError(f"peer {short(peer)} sent a malformed list of rounds.")
        applied = [round for (round,) in struct.iter_unpack("<Q", header.applied)]
        if self.fragments is not None and len(applied) != self.fragments:
            raise MessageError(
                f"peer {short(peer)} states the rounds of {len(applied)} fragments, here are "
                f"{self.fragments}."
            )
        if header.round > LAST_ROUND or max(applied, default=0) > header.round:
            raise MessageError(
                f"peer {short(peer)} states a round that cannot be: "
                f"{max(header.round, *applied, 0)}."
            )

    def wanted(self, header: StateHeader) -> int:
        """Return how many of the snapshot's first bytes are to be fetched."""
        return header.nbytes


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
        mine = digests_of(own)
        same = (
            n
            for n in range(chunks_in(header.nbytes))
            if mine[n * DIGEST :][:DIGEST] == digests[n * DIGEST :][:DIGEST]
        )
        return MemorySink(header.nbytes, own, same)

    async def finish(self, header: StateHeader, digests: bytes, sink: MemorySink) -> State | None:
        state = read(Snapshot(header, sink.content, digests), self._extra)
        tensors = itertools.chain(
            state.slow, *state.extra.values()
        )  # one at a time: each may take memory
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
    most = FEW if query.equal or attempt else ENOUGH
    offers, errors = await collect(
        host,
        query.request,
        sources,
        query.check,
        query.patience,
        FLOAT32.nbytes(query.shapes),
        most,
    )
    for peer, error in errors.items():
        # The others are raised below.
        level = logging.WARNING if isinstance(error, NetworkError | MessageError) else logging.INFO
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
    mendable = next(
        (error for error in errors.values() if not isinstance(error, NetworkError | MessageError)),
        None,
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
    progress = progress or FetchProgress()
    # the sink of one snapshot at a time
    swarm = query.request.swarm
    opened = dict[bytes, SinkT]()
    left_out = set[str]()
    problem = NetworkError("none of the peers that were asked could serve weights.")
    unfinished = sinks.unfinished()
    failed = 0
    clock = asyncio.get_running_loop().time
    broke = -math.inf  # instant at which the download broke off last
    while failed < query.attempts:
        asked = [to for to in sources if to[0] not in left_out]
        if not asked:
            break
        header = unfinished
        offering = asked
        before = progress.moved
        digests = None if header is None else await _digests_held(host, query, header, asked)
        if header is None or digests is None:
            try:
                chosen = await choose_source(host, query, asked, failed)
            except UnconfirmedError as error:
                problem, failed = error, failed + 1
                continue
            except NetworkError as error:
                if clock() - broke < BREAK_S:
                    await asyncio.sleep(PAUSE_S)
                    continue
                if not isinstance(error, NoStateError):
                    raise
                if failed or progress.moved:
                    break
                return None
            header = chosen[0].header
            digests = None
            offering = [one.source for one in chosen]
            if len({peer for peer, _ in offering}) < ENOUGH:
                log.info(
                    "the weights of round %d are those of peer %s",
                    header.round,
                    short(chosen[0].peer),
                )
        id = snapshot_id(header)
        named = {peer for peer, _ in offering}
        if opened and id not in opened:
            failed += 1  # what came by now is of no use
        holders = [*offering, *(to for to in asked if to[0] not in named)]
        try:
            digests = digests or await fetch_digests(host, swarm, header, offering)
            if id not in opened:
                opened = {id: await sinks.open(header, digests)}
            wanted = query.wanted(header)
            progress.begin(
                wanted,
                sum(
                    chunk_size(header.nbytes, chunk)
                    for chunk in opened[id].have
                    if chunk < chunks_in(wanted)
                ),
            )
            left_out |= await download(
                host,
                swarm,
                header,
                digests,
                holders,
                opened[id],
                range(chunks_in(wanted)),
                progress.arrived,
            )
        except NetworkError as error:
            log.warning(
                "the weights of round %d could not be fetched whole: %s", header.round, error
            )
            problem = error
            left_out = left_out | (named if len(named) == 1 < len(asked) else set())
            failed = 0 if progress.moved > before else failed + 1
            if progress.moved:
                unfinished = header
                broke = clock()
            if failed > 1:
                unfinished = sinks.unfinished()
            continue
        result = await sinks.finish(header, digests, opened[id])
        if result is not None:
            return result
        left_out |= named
        unfinished, failed = sinks.unfinished(), failed + 1
    raise problem


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
    shapes = [*query.shapes, *(shape for shaped in query.extra.values() for shape in shaped)]
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
