"""The exchange over torch.distributed, for processes started by torchrun; it needs no swarm.

    dist.init_process_group("gloo")           # or "nccl", for the training's own collectives
    opt = DiLoCo(inner, Distributed(), every=50)           # the mean over all ranks
    opt = NoLoCo(inner, Distributed(size=2), every=50)     # with one other rank, drawn anew

    mesh = init_device_mesh("cuda", (peers, gpus), mesh_dim_names=("peer", "shard"))
    fully_shard(model, mesh=mesh["shard"])    # before the inner optimizer is made
    opt = DiLoCo(inner, Distributed.for_shards(mesh), every=50, model=model)

With ``for_shards`` shard r of a peer averages with shard r of the others. Rules and codecs see a
shard as if it were the model; CO2's penalty, Decoupled DiLoCo's merge and topk2-senders then use
norms of a shard, and block-wise codecs its blocks. How a round goes, and what happens when a rank
or the store dies: docs/internals.md, "Several processes".
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import queue
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from shoal.optim.codecs.base import Codec, all_finite
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.codecs.mod4 import Mod4Codec, check_no_pair, for_pairs
from shoal.optim.codecs.pair_message import PairMessage, Reading
from shoal.optim.codecs.two_way import two_way
from shoal.optim.exchange.base import Contribution, Exchange, Handle, Mean, NoPartner, RoundKey
from shoal.optim.exchange.gloo_groups import GIVEN_UP, GlooGroups, Payload
from shoal.optim.exchange.pairing import chains, groups
from shoal.optim.exchange.store_consensus import (
    ProcessCoordinates,
    RoundTicket,
    StoreConsensus,
    StoreOffer,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

CLOSE_S = 1.0
"""Seconds that a round which was given up has to end."""
CONFIRM_S = 10.0
"""Seconds to wait for the votes of others, beyond those that the bytes took here."""
KEEP_ROUNDS = 64
"""Rounds after which a round's offers are deleted from the store; its decisions after twice as
many.
"""
_instances: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


@dataclass(eq=False)
class _Round(Handle):
    """Exchange in flight; also its handle."""

    key: RoundKey
    ticket: RoundTicket
    offer: StoreOffer | None
    payload: Payload | None
    limit: float
    chain: tuple[int, ...] = ()
    """The peers of the round in the order of their chain, if they are one."""
    finished: threading.Event = field(default_factory=threading.Event)
    mean: Mean | None = None
    learn: Callable[[], None] | None = None
    """What the codec does with a mean that counts: in the thread that asks for it, which may save
    the codec's state before.
    """
    error: BaseException | None = None

    def done(self) -> bool:
        return self.finished.is_set()

    def result(self, deadline: float | None = None) -> Mean | None:
        """Wait at most ``deadline`` seconds, then cancel the round, for all its members (and
        shards) or for none.
        """
        if not self.finished.wait(self.limit if deadline is None else min(deadline, self.limit)):
            self.ticket.closed.set()
            self.finished.wait(CLOSE_S)
            with self.ticket.lock:
                voted = self.ticket.voted
            if voted:  # the others may count on the mean: their decision will be in the store soon
                self.finished.wait(self.limit)
        if self.error is not None:
            raise self.error
        if self.learn is not None:
            self.learn()
            self.learn = None
        return self.mean


class Distributed(Exchange):
    """``Exchange`` between the processes of a torch.distributed job.

    Peer ids are "0", "1", ... in the order of ranks. All ranks of ``group`` must construct it, and
    start the same rounds in the same order.

    Args:
        group: the ranks; None: all.
        size: peers that average in a round, grouped anew each time (``groups``); 2: pairs, or a
            chain of three. 0: all.
        seed: of the pairing; the same for all.
        shards: processes of one peer, consecutive ranks. Each exchanges its own part of the model
            (FSDP2) or its copy (DDP) with those at the same place in the other peers.
        wait: seconds that a round waits for a rank. Later rounds do not wait for it until it comes
            to one again.
        exchange_timeout: seconds that moving the bytes of one round may take.

    Raises:
        ValueError: torch.distributed is not initialised, or the ranks cannot be cut into peers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        size: int = 0,
        seed: int = 0,
        shards: int = 1,
        wait: float = 60.0,
        exchange_timeout: float = 600.0,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialised: call init_process_group first, under "
                "torchrun"
            )
        ranks = tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
        if shards < 1 or len(ranks) % shards or size < 0:
            raise ValueError(
                f"{len(ranks)} ranks cannot be cut into peers of {shards} shards in groups of "
                f"{size}"
            )
        store = dist.distributed_c10d._get_default_store()
        if hasattr(store, "clone"):
            # A connection of its own: a wait in the other one would block this exchange.
            store = store.clone()
        peer, shard = divmod(ranks.index(dist.get_rank()), shards)
        self._pairing = _Pairing(seed, len(ranks) // shards, size)
        self._process = ProcessCoordinates(peer, shard, shards)
        self.peer = str(peer)
        self.shards = shards
        self.compares = self._pairing.is_of_all
        self._timeout = exchange_timeout
        self._limit = wait + 3 * exchange_timeout
        store = PrefixStore(f"shoal/{'-'.join(map(str, ranks))}/{next(_instances[ranks])}", store)
        self._consensus = StoreConsensus(store, self._process, wait)
        self._gloo = GlooGroups(store, self._process, exchange_timeout)
        self._kept = _KeptRounds(self._consensus)
        self._broken = False
        self._queue: queue.SimpleQueue[_Round | None] = queue.SimpleQueue()
        self._pending: deque[_Round] = deque()
        self._thread = threading.Thread(target=self._work, name="shoal-distributed", daemon=True)
        self._thread.start()
        # At interpreter exit a thread within torch would crash the process.
        self._closing = weakref.finalize(self, _close, self._queue, self._pending, self._thread)

    @classmethod
    def for_shards(
        cls,
        mesh: DeviceMesh,
        *,
        size: int = 0,
        seed: int = 0,
        wait: float = 60.0,
        exchange_timeout: float = 600.0,
    ) -> Distributed:
        """Construct it for a mesh of (peers, shards) over all ranks, as ``init_device_mesh`` makes
        it. ValueError for another.
        """
        if mesh.ndim != 2 or mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
            raise ValueError(
                "the mesh must have two dimensions, peers and shards, over all ranks in order: "
                f"{mesh.mesh.tolist()}"
            )
        return cls(
            size=size, seed=seed, shards=mesh.size(1), wait=wait, exchange_timeout=exchange_timeout
        )

    def start(self, contribution: Contribution) -> Handle:
        """Copy the tensors and begin an exchange in the background.

        ValueError from the codec, or unless the weight is positive.

        A contribution with NaN or infinity stays at home.
        """
        key = contribution.key
        weight = contribution.weight
        codec = contribution.codec
        tensors = list(contribution.tensors)
        if contribution.members:
            payload = _encoded(tensors, FLOAT32)
            members = tuple(sorted(map(int, contribution.members)))
            return self._begin(key, _offer(payload, weight), payload, members)
        if self._pairing.size > 2:
            check_no_pair(codec)
        if not 0 < weight < float("inf"):
            raise ValueError(
                f"weights must be positive and finite, got {weight}: a peer without weight calls "
                "absent(key)"
            )
        try:
            payload = _encoded(tensors, codec)
        except ValueError:
            self.absent(key)  # so that the others do not wait for this one
            raise
        if not all_finite(tensors):
            logger.warning(
                "round %d, fragment %d: the own contribution holds NaN or infinity, so the others "
                "go on without it: lower the learning rate or clip gradients.",
                key.round,
                key.fragment,
            )
            self.absent(key)
            return NoPartner()
        state = tuple(contribution.state) if self.compares else ()
        offer = _offer(payload, weight, state)
        return self._begin(
            key, offer, replace(payload, unweighted_count=contribution.unweighted_count)
        )

    def absent(self, key: RoundKey) -> None:
        """Stay out of this round, and inform the others, so that they do not wait."""
        self._begin(key, None, None)

    def close(self) -> None:
        """End the exchanges in flight without a mean, and inform the others that they need not wait
        any more.
        """
        self._closing()

    def _begin(
        self,
        key: RoundKey,
        offer: StoreOffer | None,
        payload: Payload | None,
        members: tuple[int, ...] | None = None,
    ) -> Handle:
        if self._broken or not self._closing.alive:
            return NoPartner()
        run = hashlib.sha256(key.run.encode()).hexdigest()[:16]
        chain: tuple[int, ...] = ()
        if members is None:
            group = self._pairing.group_of(self.peer, key.round)
            if self._pairing.size == 2 and len(group) == 3:
                chain = group
            peers = tuple(sorted(group))
            what = "fragment"
            use = self._kept.begin(key)
        else:
            peers = members
            what = "the state of fragment"
            use = self._kept.uses(key)
        name = f"round {key.round}, {what} {key.fragment} of {run}, {use}, {peers[0]}"
        limit = self._limit * (1 + len(self._pending))
        round = _Round(key, RoundTicket(name, peers), offer, payload, limit, chain)
        self._pending.append(round)
        self._queue.put(round)
        return round

    def _work(self) -> None:
        while (round := self._queue.get()) is not None:
            try:
                if not self._broken:
                    round.mean = self._meet(round)
            except RuntimeError as error:  # what the store raises
                self._broken = True
                logger.warning(
                    "the store of torch.distributed is gone (%s): later rounds have no partner. "
                    "Restart the job, best under torchrun --max-restarts.",
                    str(error).split("\n")[0],
                )
            except BaseException as error:
                round.error = error
            round.payload = None  # the handle may be kept for long
            self._pending.remove(round)
            round.finished.set()
        with contextlib.suppress(RuntimeError):
            self._consensus.leave()

    def _meet(self, round: _Round) -> Mean | None:
        """Find the members of the round, and return their mean if all of them have it."""
        ticket = round.ticket
        self._kept.add(round.key, ticket)
        if len(ticket.expected) < 2:
            return None
        offer = round.offer
        payload = round.payload
        if offer is None or payload is None or ticket.closed.is_set():
            self._consensus.arrive(ticket, None)
            return None
        self._consensus.arrive(ticket, offer)
        members = self._consensus.members(ticket)
        if self._process.peer not in members:
            return None
        mean: Mean | str = GIVEN_UP
        began = time.monotonic()
        try:
            mean = self._mean(round, members, offer, payload)
        finally:
            # The bytes arrive at about the same time everywhere, so a member that votes much later
            # is dead.
            limit = min(CONFIRM_S, self._timeout) + time.monotonic() - began
            counts = self._consensus.agree(ticket, members, isinstance(mean, Mean), limit)
            if not counts or not self._pairing.meet_again(members):
                self._gloo.drop(members)
        if not isinstance(mean, Mean) or not counts:
            reason = mean if isinstance(mean, str) else GIVEN_UP
            logger.warning("no mean in %s: %s.", ticket.label, reason)
            return None
        pairs = for_pairs(payload.codec)
        if pairs and payload.message:
            round.learn = functools.partial(_learn, pairs[0], payload.message, payload.readings)
        codec = two_way(payload.codec)
        if codec is not None and payload.average is not None:
            round.learn = functools.partial(codec.keep, payload.average)
        return mean

    def _mean(
        self, round: _Round, members: tuple[int, ...], offer: StoreOffer, payload: Payload
    ) -> Mean | str:
        """Move the bytes; return the mean, or the reason why there is none."""
        consensus = self._consensus
        ticket = round.ticket
        if round.chain and round.chain[1] not in members:
            return "the middle of a chain of three did not come"
        offers = consensus.offers(ticket, members)
        for other in offers:
            if other.what != offer.what:
                return f"peers sent {offer.what} and {other.what}; all must be set up alike"
        weights = [other.weight for other in offers]
        chain = round.chain if len(members) == len(round.chain) else ()
        mean = self._gloo.mean(
            ticket, members, weights, payload, lambda: consensus.over(ticket), chain
        )
        if isinstance(mean, Mean) and offer.state:
            mean = replace(mean, states=consensus.states(ticket, members))
        return mean


class _Pairing:
    """Who averages with whom: ``size`` of the ``peers`` peers; 0: all."""

    def __init__(self, seed: int, peers: int, size: int) -> None:
        self.size = size or peers
        self.is_of_all = not 0 < size < peers
        self._seed = seed
        self._peers = [str(number) for number in range(peers)]

    def group_of(self, me: str, round: int) -> tuple[int, ...]:
        """Return the peers that average with this one in the round, itself among them; three as a
        chain in their order.
        """
        if self.size == 2 and not self.is_of_all:
            drawn = chains(self._seed, round, self._peers)
        else:
            drawn = groups(self._seed, round, self._peers, self.size)
        for group in drawn:
            if me in group:
                return tuple(map(int, group))
        raise AssertionError("every peer is in a group")

    def meet_again(self, members: tuple[int, ...]) -> bool:
        """Return whether these are likely to meet again: a group of them has sockets.

        Members of a small group, or of a chain in a larger job, hardly ever do.
        """
        return self.is_of_all or len(members) == 2 or len(members) == len(self._peers)


class _KeptRounds:
    """The rounds of which the store still holds something."""

    def __init__(self, consensus: StoreConsensus) -> None:
        self._consensus = consensus
        self._uses: Counter[RoundKey] = Counter()
        self._old: deque[tuple[RoundKey, RoundTicket]] = deque()

    def begin(self, key: RoundKey) -> int:
        """Return how often ``key`` was begun: again after a load_state_dict is another round."""
        self._uses[key] += 1
        return self._uses[key]

    def uses(self, key: RoundKey) -> int:
        return self._uses[key]

    def add(self, key: RoundKey, ticket: RoundTicket) -> None:
        """Keep a round, and forget those that are long over."""
        self._old.append((key, ticket))
        if len(self._old) > KEEP_ROUNDS:
            _, past = self._old[-KEEP_ROUNDS - 1]
            self._consensus.forget_offer(past)
        if len(self._old) > 2 * KEEP_ROUNDS:
            oldest, past = self._old.popleft()
            self._consensus.forget(past)
            if all(oldest != other for other, _ in self._old):
                del self._uses[oldest]


def _encoded(tensors: Sequence[Tensor], codec: Codec) -> Payload:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    pairs = for_pairs(codec)
    if pairs is not None:
        message = pairs[0].post([tensor.clone() for tensor in tensors], pairs[1])
        return Payload(message.payload, shapes, codec, message=message)
    return Payload(codec.encode(tensors), shapes, codec)


def _learn(codec: Mod4Codec, message: PairMessage, readings: Sequence[Reading]) -> None:
    for reading in readings:
        codec.learn(message, reading)


def _offer(payload: Payload, weight: float, state: tuple[float, ...] = ()) -> StoreOffer:
    digest = hashlib.sha256(repr(payload.shapes).encode()).hexdigest()[:16]
    what = (
        f"{len(payload.shapes)} tensors of shapes {digest}, {payload.data.numel()} bytes of "
        f"{payload.codec.name}"
    )
    return StoreOffer(what, float(weight), state)


def _close(
    rounds: queue.SimpleQueue[_Round | None], pending: deque[_Round], thread: threading.Thread
) -> None:
    for round in list(pending):
        round.ticket.closed.set()
    rounds.put(None)
    thread.join(2 * CLOSE_S)
