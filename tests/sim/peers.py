"""A swarm on a simulated network: peers that train a little, exchange by the production code, and
know of each other by records.

Each peer holds a small tensor, its weights. A round is: compute for a while, hand in the weights
and what names the contribution, take the mean if there is one. `tests.sim.invariants` checks what
the mean holds, and that it counts once. With several fragments it computes on meanwhile, and waits
only where the same fragment is due again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from shoal.optim.codecs.buffer_tail import BufferTailCodec
from shoal.optim.codecs.mod4 import Mod4Codec
from shoal.optim.codecs.two_way import TwoWayCodec
from shoal.optim.exchange.base import Contribution, Mean, RoundKey
from shoal.optim.exchange.update_screen import UpdateScreen
from shoal.optim.outer.optimizer import ROUNDS_PER_EXCHANGE
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.exchange_base import ExchangeHandle
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.identity import Identity
from shoal.swarm.wire.messages import Member
from tests.sim.exact_codec import exact_two_way
from tests.sim.network import SimHost, SimNetwork, settled
from tests.support.records import member_of

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

SWARM, MODEL = "a" * 52, "0" * 64
EPOCH = 1.0e9  # Unix time at which every simulation begins
TTL, PERIOD = 12.0, 2.0  # seconds that a record lives, and between two of a peer
VALUES = 8  # floats that a peer trains

GATHERS = UpdateScreen()
GATHERS.gathers = True


@dataclass(frozen=True)
class Setting:
    """The kind of swarm, and its patience. Times in virtual seconds."""

    kind: Literal["pair", "group"]
    peers: int
    calm: float = 12.0
    """The time until which peers train and things go wrong; from then on they only average."""
    patience: float = 90.0
    """Seconds after that in which they must have come together; then they leave."""
    wait: float = 3.0
    chunk_timeout: float = 1.0
    exchange_timeout: float = 6.0
    pace: tuple[float, float] = (0.4, 1.0)
    """Seconds that a peer computes between two rounds: each has a pace of its own between these."""
    skew: float = 0.0
    """Seconds, at most, that a peer's clock is wrong."""
    lose: float = 0.0
    again: float = 0.0
    """The chances that a membership record is lost, and that it comes twice."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the exchange."""
    mod4: bool = False
    """Partners read each other's weights by their own; what names a contribution travels as
    float32.
    """
    butterfly: bool = False
    """Three members or more average a share each, by a codec of two ways that loses nothing."""

    @property
    def fragments(self) -> int:
        """Into which the weights are cut; with more than one, exchanges overlap with computing."""
        return int(self.options.get("fragments", 1))


@dataclass
class SimContribution:
    """A peer's contribution to one of its rounds."""

    peer: str
    serial: int
    weight: float
    tensors: list[Tensor]
    begun: float
    slept: float
    """Seconds that the peer had slept before it waited for the outcome."""
    needed: float = 0.0
    """When the peer began to wait for the outcome."""
    limit: float = 0.0
    """Seconds that it then waits at most."""
    ended: float | None = None
    mean: Mean | None = None
    leaders: set[str] = field(default_factory=set)
    """Peers at which it waited for its group.

    A leader's own contribution may be in another group, or in none.
    """


class SimPeer:
    """One peer, from its first process to its last."""

    def __init__(self, swarm: SimSwarm, number: int) -> None:
        self.swarm, self.number, self.name = swarm, number, f"p{number}"
        self.identity: Identity = swarm.network.identity(self.name)
        self.id = self.identity.peer_id
        self.chance = random.Random(f"peer {swarm.seed} {number}")
        self.pace = self.chance.uniform(*swarm.setting.pace)
        self.weight = float(self.chance.choice([1, 1, 1, 2, 3]))
        self.skew = self.chance.uniform(-swarm.setting.skew, swarm.setting.skew)
        self.weights = torch.rand(VALUES, generator=torch.Generator().manual_seed(number))
        self.serial = self.round = self.turn = 0
        """The number of the newest contribution, the next round, and the fragment that is sent in
        it.
        """
        self.left_out: list[tuple[int, float]] = []
        """Fragments, and when, that were due while their exchange still moved bytes: as the
        optimizer does with lag "auto".
        """
        self.went_back = 0
        """Times that it returned to an earlier round, where the others were."""
        self.slept = 0.0
        """Seconds that it has slept."""
        self.slow = self.weights
        """Its weights as the newest round of each fragment left them."""
        self.codecs: list[Mod4Codec] | list[TwoWayCodec] = []
        if swarm.setting.mod4:
            self.codecs = [Mod4Codec() for _ in range(swarm.setting.fragments)]
        """Those of the fragments, which a process that was killed has from its checkpoint."""
        self.gone = False
        self.begin()

    def begin(self) -> None:
        """Start a process: the first, or one after the last was killed."""
        if self.swarm.setting.butterfly:
            self.codecs = [exact_two_way() for _ in range(self.swarm.setting.fragments)]
        for codec in self.codecs:
            if codec.pending:
                codec.rejected()
        self.host: SimHost = self.swarm.network.host(self.name, self.identity)
        self.seen: dict[str, Member] = {}
        self.in_flight: dict[int, tuple[SimContribution, ExchangeHandle[Any]]] = {}
        """By fragment."""
        self.rounds: dict[int, asyncio.Task[None]] = {}
        self.due: dict[int, asyncio.Event] = {}
        """Set once training waits for the exchange of the fragment."""
        self.state: Literal["training", "leaving"] = "training"
        setting = self.swarm.setting
        way = PairExchange if setting.kind == "pair" else GroupExchange
        options = dict(setting.options)
        if options.pop("gather", False):
            options["screen"] = GATHERS
        if setting.kind == "pair":
            options |= {
                "departed": self.departed,
                "overlap": setting.fragments > 1,
                "speed": lambda member: member.steps_per_s,
            }
        context = PeerContext(
            cast("Host", self.host), self.identity, SWARM, MODEL, self.swarm.seed, self.members
        )
        timeouts = ExchangeTimeouts(setting.wait, setting.chunk_timeout, setting.exchange_timeout)
        self.exchange: PairExchange | GroupExchange = way(context, timeouts, **options)
        self.exchange.next_round = self.round
        self.host.start(self._announce())
        self.host.start(self._train())

    # -- who is there ------------------------------------------------------------------------------

    def wall(self) -> float:
        return EPOCH + self.swarm.network.loop.time() + self.skew

    def record(self) -> Member:
        return member_of(
            self.id,
            name=self.name,
            round=self.round,
            state=self.state,
            issued=self.wall(),
            steps_per_s=1 / self.pace,
        )

    def receive(self, member: Member) -> None:
        """Take another peer's record, unless a newer one is known."""
        known = self.seen.get(member.peer)
        if known is None or known.issued < member.issued:
            self.seen[member.peer] = member

    def _live(self, *states: str) -> dict[str, Member]:
        oldest = self.wall() - TTL
        return {
            peer: member
            for peer, member in self.seen.items()
            if member.issued >= oldest and member.state in states
        }

    def members(self) -> dict[str, Member]:
        return self._live("training") | (
            {self.id: self.record()} if self.state == "training" else {}
        )

    def departed(self) -> dict[str, Member]:
        return self._live("leaving")

    def _send_record(self) -> None:
        record, setting = self.record(), self.swarm.setting
        for other in self.swarm.peers:
            if other is not self and not other.gone:
                network = self.swarm.network
                network.datagram(
                    self.host,
                    other.host,
                    partial(other.receive, record),
                    setting.lose,
                    setting.again,
                )

    async def _announce(self) -> None:
        while self.state == "training":
            self._send_record()
            await asyncio.sleep(PERIOD * self.chance.uniform(0.8, 1.0))

    # -- what it does ------------------------------------------------------------------------------

    async def _train(self) -> None:
        swarm = self.swarm
        await asyncio.sleep(self.chance.uniform(0.0, 0.5))
        while not swarm.over:
            await asyncio.sleep(self.pace * self.chance.uniform(0.8, 1.2))
            if swarm.network.loop.time() < swarm.setting.calm:
                self.weights = self.weights + 0.1 * torch.randn(VALUES, generator=swarm.noise)
            fragment = self.turn
            if fragment in self.rounds:  # it is in one exchange at a time
                if self._lasts(fragment):
                    self.left_out.append((fragment, swarm.network.loop.time()))
                    self.round, self.turn = (
                        self.round + 1,
                        (self.turn + 1) % swarm.setting.fragments,
                    )
                    continue
                self.due[fragment].set()
                await self.rounds[fragment]
            self.due[fragment] = asyncio.Event()
            self.rounds[fragment] = self.host.start(self._round(fragment))
            if swarm.setting.fragments == 1:
                self.due[fragment].set()
                await self.rounds[fragment]
        for due in self.due.values():
            due.set()
        await asyncio.gather(*self.rounds.values())
        self.state = "leaving"
        self._send_record()
        swarm.network.note(self.name, "left")

    def _lasts(self, fragment: int) -> bool:
        """Return whether the exchange of a fragment that is due still moves bytes, and has been
        left its time fewer than twice.
        """
        if fragment not in self.in_flight or self.swarm.setting.fragments == 1:
            return False
        mine, handle = self.in_flight[fragment]
        since = sum(which == fragment and when >= mine.begun for which, when in self.left_out)
        return since < ROUNDS_PER_EXCHANGE - 1 and handle.leave_out()

    async def _round(self, fragment: int) -> None:
        swarm, loop, part = (
            self.swarm,
            self.swarm.network.loop,
            slice(fragment, None, self.swarm.setting.fragments),
        )
        self.serial += 1
        named = torch.zeros(swarm.setting.peers)
        named[self.number] = self.serial
        mine = SimContribution(
            self.id,
            self.serial,
            self.weight,
            [self.weights[part].clone(), named],
            loop.time(),
            self.slept,
        )
        swarm.contributions[self.number, self.serial] = mine
        key = RoundKey(SWARM, self.exchange.due(self.round, fragment), fragment)
        codec = self.codecs[fragment] if self.codecs else None
        if codec is None:
            handle = self.exchange.start(Contribution(key, mine.tensors, self.weight))
        elif isinstance(codec, TwoWayCodec):
            contribution = Contribution(key, mine.tensors, self.weight, codec)
            handle = self.exchange.start(contribution)
        else:
            codec.expect(f"{SWARM}:{key.round}:{fragment}", [self.weights[part] - self.slow[part]])
            handle = self.exchange.start(
                Contribution(key, mine.tensors, self.weight, BufferTailCodec(codec, 1))
            )
        self.in_flight[fragment] = mine, handle
        self.round = max(self.round, key.round) + 1
        self.turn = (self.turn + 1) % swarm.setting.fragments
        swarm.network.note(self.name, f"round {key.round} begins")
        arrived, due = (
            asyncio.wrap_future(handle._future),
            asyncio.ensure_future(self.due[fragment].wait()),
        )
        await asyncio.wait({arrived, due}, return_when=asyncio.FIRST_COMPLETED)
        due.cancel()
        mine.needed, mine.slept, mine.limit = loop.time(), self.slept, handle.limit
        mean = await settled(handle)
        mine.ended, mine.mean = loop.time(), mean
        self.round = max(self.round, self.exchange.next_round)  # as `OuterSync` does
        self.exchange.next_round = self.round
        if (back := self.exchange.back(self.round)) is not None:
            self.round, self.went_back = back, self.went_back + 1
        if mean is not None:
            since = self.weights[part] - mine.tensors[0]
            self.weights = self.weights.clone()
            self.weights[part] = mean.tensors[0] + since
        if codec is not None:
            self.slow = self.slow.clone()
            self.slow[part] = mine.tensors[0] if mean is None else mean.tensors[0]
            if mean is not None:
                codec.accepted()
            elif isinstance(codec, TwoWayCodec):
                codec.rejected(mine.tensors)
            else:
                codec.rejected()
        with_whom = (
            "alone"
            if mean is None
            else " ".join(sorted(swarm.named[peer] for peer in mean.members))
        )
        last = (
            f"round {self.round - 1}"
            if swarm.setting.fragments == 1
            else f"round {key.round} of fragment {fragment}"
        )
        swarm.network.note(self.name, f"{last} ends: {with_whom}")
        swarm.outcome(self, mine)
        del self.in_flight[fragment]


class SimSwarm:
    """All peers of one simulation."""

    def __init__(self, network: SimNetwork, setting: Setting, seed: int) -> None:
        self.network, self.setting, self.seed = network, setting, seed
        self.noise = torch.Generator().manual_seed(seed)
        self.contributions: dict[tuple[int, int], SimContribution] = {}
        """By the peer's number and the contribution's serial number."""
        self.over = False
        """True once a peer that ends a round should leave."""
        self.peers: list[SimPeer] = []
        self.named: dict[str, str] = {}
        for number in range(setting.peers):
            peer = SimPeer(self, number)
            self.peers.append(peer)
            self.named[peer.id] = peer.name

    def outcome(self, peer: SimPeer, mine: SimContribution) -> None:
        """Note a finished round; for observers to replace."""

    def spread(self) -> float:
        """Return the largest difference of a value between two peers that are there."""
        held = torch.stack([peer.weights for peer in self.peers if not peer.gone])
        return float((held.max(0).values - held.min(0).values).max())
