"""Which of several peers' weights to start from: what each states, and who vouches for it.

A peer *states* the id of its snapshot (swarm/snapshot.py). Nobody should begin from weights on one stranger's word, so a second
peer has to vouch for them. What a second peer can honestly say depends on the method:

* **Everyone holds the same** (methods over the group): it states the same id. Peers that are asked at the same moment may be a
  round apart; then those that are behind are asked once more, for the later round.
* **Nobody holds the same** (gossip, where copies are only near each other; or rounds that go by faster than two peers can be
  asked): it states an id of its own, and some chunks of both snapshots, which the newcomer draws after both were stated, are
  compared. The weights are vouched for if they lie within ``NEAR`` of the larger of both norms. That is a coarse test: it finds
  weights that are noise, zeros, of the wrong sign or scale, but not ones that were changed a little, nor in a few places. Against
  those nothing protects a member of a gossip swarm either.
* **A swarm of one member**: it is taken at its word, as is whoever alone answers. Its word is then all there is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shoal.optim.codecs.base import FLOAT32
from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.download import Peer, download, fetch_digests
from shoal.swarm.state.snapshot import chunks_in, snapshot_id
from shoal.swarm.wire.digest import CHUNK
from shoal.swarm.wire.member import pack, unpack
from shoal.swarm.wire.pair import Answer
from shoal.swarm.wire.state import StateHeader, StateRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

STATE_PROTOCOL = "/shoal/state/2"
ANSWER_S = 5.0  # seconds in which a peer that is awake says whether it will hand out its weights
PREPARE_S = 70.0  # seconds in which it then makes the snapshot, which it does between two steps
SAMPLE = 4  # chunks that are compared
NEAR = 0.8  # of the larger norm: unrelated weights are 1.4 apart, opposite ones 2, nothing and something 1
ENOUGH = 2  # peers that state the same

log = logging.getLogger(__name__)


class NoStateError(NetworkError):
    """A peer has no weights to hand out: it said so, or did not even answer."""


class NobodyVouchesError(NetworkError):
    """Peers hand out weights that lie far from each other."""


@dataclass(frozen=True)
class SnapshotOffer:
    """What ``peer`` says that it holds."""

    peer: str
    addresses: Sequence[str]
    header: StateHeader

    @property
    def id(self) -> bytes:
        """Of the snapshot."""
        return snapshot_id(self.header)

    @property
    def reached(self) -> Peer:
        """Whom to ask for it."""
        return self.peer, self.addresses


@dataclass(frozen=True)
class Collected:
    """What several peers said, and what was wrong with the others."""

    statements: list[SnapshotOffer]
    errors: dict[str, Exception]


async def ask(host: Host, to: Peer, request: StateRequest) -> StateHeader:
    """What one peer states. NoStateError, NetworkError or MessageError."""
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
            reply = unpack(await stream.receive(StateHeader.LIMIT, PREPARE_S), StateHeader, Answer)
    finally:
        stream.close()
    if isinstance(reply, Answer):
        kind = NoStateError if reply.verdict == "refuse" else NetworkError
        raise kind(f"peer {short(peer)} hands out no weights: {reply.reason}.")
    assert isinstance(reply, StateHeader)
    return reply


async def collect(
    host: Host,
    request: StateRequest,
    givers: Sequence[Peer],
    check: Callable[[str, StateHeader], None],
    patience: float,
    most: int = 64,
) -> Collected:
    """Ask all of ``givers`` at once; until two state the same, or all (or ``most``) have answered, or ``patience`` seconds after
    the first.

    ``check`` raises ShoalError at a header that does not fit.
    """
    statements: list[SnapshotOffer] = []
    errors: dict[str, Exception] = {}

    async def one(to: Peer) -> None:
        try:
            header = await ask(host, to, request)
            check(to[0], header)
            statements.append(SnapshotOffer(*to, header))
        except ShoalError as error:
            errors[to[0]] = error

    loop = asyncio.get_running_loop()
    asked = [asyncio.ensure_future(one(to)) for to in givers]
    pending: set[asyncio.Future[None]] = set(asked)
    until = math.inf
    try:
        while pending and not agreed(statements) and len(statements) < most and loop.time() < until:
            left = None if until == math.inf else max(until - loop.time(), 0.0)
            _, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if statements:
                until = min(until, loop.time() + patience)
    finally:
        for task in asked:  # in this order: that of a set is another in every run, and a simulation repeats itself
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return Collected(statements, errors)


def agreed(statements: Sequence[SnapshotOffer]) -> list[SnapshotOffer]:
    """Those that state what most do, of the latest round among equals; empty if no two state the same."""
    same: defaultdict[bytes, list[SnapshotOffer]] = defaultdict(list)
    for statement in statements:
        same[statement.id].append(statement)
    most = max(same.values(), key=lambda group: (len(group), group[0].header.round), default=[])
    return most if len(most) >= ENOUGH else []


async def choose(
    host: Host,
    request: StateRequest,
    statements: Sequence[SnapshotOffer],
    check: Callable[[str, StateHeader], None],
    draw: random.Random,
    *,
    equal: bool,
    patience: float,
) -> list[SnapshotOffer]:
    """The statements of the snapshot to take. ``equal``: peers of this method hold the same weights.

    Raises:
        NobodyVouchesError: several peers answered, and what no two of them hold is near each other.
        NetworkError: those whose weights were to be compared have gone.
    """
    found = agreed(statements)
    if found or len(statements) < ENOUGH:
        return found or list(statements)
    later = max(statement.header.round for statement in statements)
    behind = [statement.reached for statement in statements if statement.header.round < later]
    if equal and behind:
        again = await collect(host, request.model_copy(update={"since": later}), behind, check, patience)
        # Who has come to the later round may have gone beyond it, and states that now.
        latest = {statement.peer: statement for statement in (*statements, *again.statements)}
        found = agreed([*statements, *again.statements]) or agreed(list(latest.values()))
        if found:
            return found
    return [await _vouched_for(host, request.swarm, statements, draw)]


async def _vouched_for(host: Host, swarm: str, statements: Sequence[SnapshotOffer], draw: random.Random) -> SnapshotOffer:
    """The statement of the latest round to which that of another peer is near."""
    samples: dict[str, torch.Tensor] = {}
    in_slow = FLOAT32.nbytes(statements[0].header.shapes)  # those of all are the same: ``check`` saw to it
    chunks = sorted(draw.sample(range(chunks_in(in_slow)), min(SAMPLE, chunks_in(in_slow))))
    for statement in sorted(statements, key=lambda one: -one.header.round):
        try:
            samples[statement.peer] = await _sample(host, swarm, statement, chunks, in_slow)
        except NetworkError as error:
            log.info("no sample of the weights of peer %s: %s", short(statement.peer), error)
    compared = [statement for statement in statements if statement.peer in samples]
    if not compared:
        raise NetworkError("the peers that stated what they hold have gone.")
    if len(compared) == 1:
        return compared[0]
    near = {one.peer: 0 for one in compared}
    for one, other in itertools.combinations(compared, 2):
        apart = distance(samples[one.peer], samples[other.peer])
        log.info("the weights of peers %s and %s are %.3g apart", short(one.peer), short(other.peer), apart)
        if apart <= NEAR:
            near[one.peer] += 1
            near[other.peer] += 1
    best = max(compared, key=lambda one: (near[one.peer] > 0, one.header.round, near[one.peer]))
    if not near[best.peer]:
        names = " and ".join(short(one.peer) for one in compared[:2])
        raise NobodyVouchesError(f"peers {names} hand out weights that lie far from each other, and nobody says which are right.")
    return best


async def _sample(host: Host, swarm: str, statement: SnapshotOffer, chunks: Sequence[int], in_slow: int) -> torch.Tensor:
    """The slow weights in ``chunks``, float32, one after another. NetworkError."""
    header, holders = statement.header, [statement.reached]
    digests = await fetch_digests(host, swarm, header, holders)
    few = SampleSink()
    await download(host, swarm, header, digests, holders, few, chunks)
    data = b"".join(few.pieces[chunk][: max(in_slow - chunk * CHUNK, 0)] for chunk in chunks)
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


class SampleSink:
    """A sink for some chunks."""

    def __init__(self) -> None:
        self.pieces: dict[int, bytes] = {}

    @property
    def have(self) -> set[int]:
        """The chunks that are there."""
        return set(self.pieces)

    def write(self, chunk: int, data: memoryview) -> None:
        """Keep it."""
        self.pieces[chunk] = bytes(data)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of two vectors, over the larger of their norms; 0 if both are nothing, infinite if a value is not finite."""
    larger = max(float(one.double().norm()), float(other.double().norm()))
    if not math.isfinite(larger):
        return math.inf
    return float((one.double() - other.double()).norm()) / larger if larger else 0.0
