"""The exchange with a group over libp2p: `shoal.optim.Exchange` for methods that want the mean of many peers.

See `shoal.swarm.exchange.group.member` for how a round's group forms, and for the guarantees; `leader` and `commit` for the
leader's side; `allgather` and `allreduce` for the bytes. Several rounds may be in flight at once, one for each fragment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Codec
from shoal.optim.codecs.mod4 import check_no_pair
from shoal.optim.exchange.base import RoundKey
from shoal.optim.exchange.on_demand import OnDemand
from shoal.optim.exchange.robust import TRUSTING, UpdateScreen
from shoal.swarm.exchange.attempt import ExchangeAttempt
from shoal.swarm.exchange.context import ExchangeTimeouts, Patience, PeerContext
from shoal.swarm.exchange.contribution import encode_contribution
from shoal.swarm.exchange.group.commit import DecisionLog, moved
from shoal.swarm.exchange.group.leader import FormationRules, GroupLeader
from shoal.swarm.exchange.group.liveness import LivenessView, RoundTracker
from shoal.swarm.exchange.group.member import GroupMember
from shoal.swarm.exchange.group.reduction import Outcome
from shoal.swarm.exchange.handle import ExchangeBase, ExchangeHandle
from shoal.swarm.exchange.training_time import TrainingTime
from shoal.swarm.wire.fields import Sketch
from shoal.swarm.wire.group import LARGEST_GROUP


class GroupExchange(ExchangeBase):
    """An exchange (`shoal.optim.Exchange`) among all members of a swarm, or among groups of them.

    Args:
        context: the node and its swarm; its host serves the group's protocols from now on.
        timeouts: how long a round, and the parts of it, may take.
        fragments: fragments that are sent in turn, each with the next round's number; 1 unless the schedule streams.
        quorum: members that make a group; 0: all in view.
        grace: seconds that further members have once the quorum is there.
        max_group: largest group; if more are ready they are divided into several (one of which may be larger by one).
        follow: move a contribution that comes too late to the swarm's round. False for what belongs to its round only, as SPARTA's
            masks do: then the round has no partner, and only ``next_round`` follows.
        gather: never all-reduce when this node leads: then a mean has the same bits in every run, at the price of more bytes.
        screen: decides which gathered contributions are refused and what the mean is. One that ``gathers`` takes no part in an
            all-reduce, whoever leads.

    Raises:
        ValueError: ``max_group`` or ``fragments`` out of range.
    """

    def __init__(
        self,
        context: PeerContext,
        timeouts: ExchangeTimeouts = ExchangeTimeouts(),  # noqa: B008 (frozen)
        *,
        fragments: int = 1,
        quorum: int = 0,
        grace: float = 1.0,
        max_group: int = 16,
        follow: bool = True,
        gather: bool = False,
        screen: UpdateScreen = TRUSTING,
    ) -> None:
        if not 2 <= max_group <= LARGEST_GROUP:
            raise ValueError(f"max_group must be between 2 and {LARGEST_GROUP}, got {max_group}")
        if fragments < 1 or quorum < 0 or not grace >= 0:
            raise ValueError(f"fragments must be positive, quorum and grace not negative: got {fragments}, {quorum}, {grace}")
        self._context, self._screen = context, screen
        self._rounds = RoundTracker(fragments)
        view, decisions = LivenessView(context, fragments), DecisionLog(context.host, context.identity, context.swarm)
        rules = FormationRules(quorum, grace, max_group, gather or screen.gathers)
        patience = Patience()
        time = TrainingTime(timeouts, patience, fragments)
        super().__init__(context.host, self._rounds, view.evidence, timeouts, patience)
        self._leader = GroupLeader(context, timeouts, rules, decisions, self._rounds, view, patience, time)
        self._groups = GroupMember(
            context, timeouts, self._leader, decisions, self._rounds, view, patience, time, largest=max_group + 1, follow=follow
        )
        self._largest = max_group + 1

    @property
    def sketches(self) -> Mapping[str, Sketch | None]:
        """Return what the other members of the newest group have shown, by peer id; none where a round has several groups."""
        return self._groups.sketches

    def start(
        self, key: RoundKey, tensors: Sequence[Tensor], weight: float = 1.0, codec: Codec = FLOAT32, even: int = 0
    ) -> ExchangeHandle[Outcome]:
        """Begin a round. Raises ValueError if ``key`` is of another run than this swarm, or if the codec refuses the tensors."""
        return self._begin(key, tensors, weight, codec, even)

    def borrow(
        self, key: RoundKey, tensors: OnDemand, weight: float = 1.0, codec: Codec = FLOAT32, even: int = 0
    ) -> ExchangeHandle[Outcome]:
        """Begin a round without a copy of the tensors where the codec sends plain floats (`shoal.optim.exchange.base.Borrows`)."""
        return self._begin(key, tensors, weight, codec, even)

    def _begin(self, key: RoundKey, tensors: Sequence[Tensor], weight: float, codec: Codec, even: int) -> ExchangeHandle[Outcome]:
        check_no_pair(codec)
        mine = replace(encode_contribution(self._context.swarm, key, tensors, weight, codec, even), sketch=self.sketch())
        self.moved = moved(mine.payload.nbytes, min(self._largest, len(self._context.members())))
        attempt = ExchangeAttempt[Outcome](mine, screen=self._screen, stats=self.stats)
        return ExchangeHandle(self, attempt, self._groups.meet(attempt), lambda outcome: outcome.mean())
