"""Taking over the slow weights of a swarm, for a newcomer and for who has drifted: whole, checked, or not at all.

Which weights is decided first, from what several peers state (swarm/statements.py); then they are taken from all who hold the very
same bytes, chunk by chunk (swarm/download.py): those that stated them, and, since everybody is asked, whoever has downloaded them
before. If the holders die, the peers are asked anew, and if any of them states the same weights the download goes on where it was.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.optim.codecs.base import FLOAT32, Shape
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.swarm.exchange.contribution import finite, shapes_differ
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.download import MemorySink, Peer, download, fetch_digests
from shoal.swarm.state.selection import ENOUGH, NobodyVouchesError, NoStateError, SnapshotOffer, agreed, choose, collect
from shoal.swarm.state.snapshot import Snapshot, State, chunks_in, read, shapes_digest
from shoal.swarm.wire.nonce import fresh_nonce
from shoal.swarm.wire.state import StateHeader, StateRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

ATTEMPTS = 3
PATIENCE_S = 10.0  # seconds after the first peer has answered in which a second one may vouch for it
FETCH_S = 3600.0  # seconds that everything may take
FEW = 64  # peers that are asked at once, at most

log = logging.getLogger(__name__)


class ModelDiffersError(ShoalError):
    """This node's model has other shapes than the swarm's."""


@dataclass(frozen=True)
class StateQuery:
    """What a node wants, and what it can use.

    ``shapes``: of the slow weights. ``extra``: of what its rule takes over beside them, under its names; a giver may have less,
    never other. ``equal``: in this method peers hold the same weights. ``vouched``: a second peer must vouch for them; else the
    latest that are stated will do.
    """

    request: StateRequest
    shapes: Sequence[Shape]
    extra: Mapping[str, Sequence[Shape]] = field(default_factory=dict)
    equal: bool = False
    vouched: bool = True
    patience: float = PATIENCE_S

    def check(self, peer: str, header: StateHeader) -> None:
        """Whether what a peer states fits: what is allocated follows from this node's own shapes, whatever the peer says.

        Raises:
            ModelDiffersError, MessageError.
        """
        difference = shapes_differ(tuple(self.shapes), header.shapes)
        if difference is not None:
            raise ModelDiffersError(
                f"This node's model does not fit the swarm: {difference} (in the swarm); use the task and options of the swarm."
            )
        names = [name for name, _ in header.extra]
        unknown = [name for name, shaped in header.extra if name not in self.extra or shaped != shapes_digest(self.extra[name])]
        if unknown or len(set(names)) < len(names):
            raise MessageError(f"peer {short(peer)} hands out a state {unknown or names} that does not fit this node's outer rule.")
        every = [*self.shapes, *(shape for name in names for shape in self.extra[name])]
        if header.nbytes != FLOAT32.nbytes(every) or header.dtype != "float32":
            raise MessageError(f"peer {short(peer)} announced weights of {header.nbytes} bytes, {FLOAT32.nbytes(every)} fit here.")
        if len(header.applied) % struct.calcsize("<Q"):
            raise MessageError(f"peer {short(peer)} sent a malformed list of rounds.")


async def settle(
    host: Host,
    wish: StateQuery,
    givers: Sequence[Peer],
    check: Callable[[str, StateHeader], None],
    attempt: int,
    draw: random.Random | None = None,
) -> list[SnapshotOffer]:
    """Ask ``givers``, and decide: the statements of the snapshot to take.

    Raises:
        NoStateError: all refused, or are gone.
        NetworkError: nobody stated anything of use.
        ModelDiffersError, or what else ``check`` raises for the user to mend: at all who answered.
    """
    # Copies that are not equal need not all be waited for: two will do, unless they had nothing to say for each other.
    most = FEW if wish.equal or attempt else ENOUGH
    heard = await collect(host, wish.request, givers, check, wish.patience, most)
    for peer, error in heard.errors.items():
        level = logging.WARNING if isinstance(error, NetworkError | MessageError) else logging.INFO  # the others are raised below
        log.log(level, "no weights from peer %s: %s", short(peer), error)
    if heard.statements:
        if not wish.vouched:
            return agreed(heard.statements) or [max(heard.statements, key=lambda one: one.header.round)]
        draw = draw or random.Random(fresh_nonce())
        return await choose(host, wish.request, heard.statements, check, draw, equal=wish.equal, patience=wish.patience)
    errors = list(heard.errors.values())
    mendable = next((error for error in errors if not isinstance(error, NetworkError | MessageError)), None)
    if mendable is not None:
        raise mendable
    if all(isinstance(error, NoStateError) for error in errors):
        raise NoStateError("all peers that were asked refused, or are gone.")
    raise NetworkError("none of the peers that were asked could hand out weights.")


async def take_over(host: Host, wish: StateQuery, givers: Sequence[Peer]) -> State | None:
    """Weights that fit; None if all of ``givers`` refused or are gone.

    Raises:
        ModelDiffersError: the givers' model has other shapes; the sentence names the first difference.
        NetworkError: one began, and failed; or nobody vouches for them.
    """
    swarm, begun, left_out = wish.request.swarm, dict[bytes, MemorySink](), set[str]()  # of one snapshot at a time
    problem = NetworkError("none of the peers that were asked could hand out weights.")
    for attempt in range(ATTEMPTS):
        asked = [to for to in givers if to[0] not in left_out]
        if not asked:
            break
        try:
            chosen = await settle(host, wish, asked, wish.check, attempt)
        except NoStateError:
            if attempt:
                break
            return None
        except NobodyVouchesError as error:
            problem = error
            continue
        header, id = chosen[0].header, chosen[0].id
        if len({one.peer for one in chosen}) < ENOUGH:
            log.info("the weights of round %d are those of peer %s", header.round, short(chosen[0].peer))
        stating = [one.reached for one in chosen]
        holders = [*stating, *(to for to in asked if to[0] not in {peer for peer, _ in stating})]
        if id not in begun:
            begun = {id: MemorySink(header.nbytes)}
        sink = begun[id]
        try:
            digests = await fetch_digests(host, swarm, header, stating)
            left_out |= await download(host, swarm, header, digests, holders, sink, range(chunks_in(header.nbytes)))
        except NetworkError as error:
            log.warning("the weights of round %d did not come whole: %s", header.round, error)
            problem = error
            continue
        state = read(Snapshot(header, sink.payload, digests), wish.extra)
        tensors = [*state.slow, *(tensor for part in state.extra.values() for tensor in part)]
        if await asyncio.get_running_loop().run_in_executor(None, finite, tensors):
            return state
        log.warning("the weights that peer %s stated are not finite and were not used", short(chosen[0].peer))
        left_out |= {one.peer for one in chosen}
    raise problem


def fetch_state(host: Host, wish: StateQuery, givers: Sequence[Peer]) -> State | None:
    """As ``take_over``, waiting for it."""
    return begin_fetch(host, wish, givers).result(FETCH_S + 10.0)


def begin_fetch(host: Host, wish: StateQuery, givers: Sequence[Peer]) -> concurrent.futures.Future[State | None]:
    """As ``take_over``, without waiting, from any thread. It ends within an hour."""

    async def bounded() -> State | None:
        try:
            return await asyncio.wait_for(take_over(host, wish, givers), FETCH_S)
        except asyncio.TimeoutError:
            raise NetworkError(f"the weights of the swarm did not come within {FETCH_S / 60:.0f} minutes.") from None

    return host.submit(bounded())
