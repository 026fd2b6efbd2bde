"""The exchange with a group over libp2p: what ``optim.Exchange`` promises, for methods that want the mean of many peers.

How a round's group comes about is in swarm/group_join.py (a member's side, and what is guaranteed) and swarm/group_lead.py (the
leader's); how the bytes move, in swarm/group_gather.py and swarm/group_allreduce.py. Several rounds may be in flight at once, one
for each fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Codec
from shoal.optim.exchange.base import RoundKey
from shoal.optim.exchange.robust import TRUSTING, UpdateScreen
from shoal.swarm.exchange.contribution import contribution
from shoal.swarm.exchange.group.decision_log import DecisionLog
from shoal.swarm.exchange.group.leader import GroupLeader
from shoal.swarm.exchange.group.liveness import LivenessView
from shoal.swarm.exchange.group.member import LEADER_PROTOCOL, GroupMember
from shoal.swarm.exchange.group.reduction import Outcome
from shoal.swarm.exchange.group.rounds import RoundTracker
from shoal.swarm.exchange.handle import CommitState, ExchangeBase, ExchangeHandle
from shoal.swarm.identity import Identity
from shoal.swarm.wire.group import MAX_GROUP
from shoal.swarm.wire.member import Member

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host


class GroupExchange(ExchangeBase):
    """``optim.Exchange`` among all members of a swarm, or among groups of them.

    Args:
        host: the node's host; it serves the group's protocols from now on.
        identity: signs what this node brings, and what it decides.
        swarm: the swarm id, which is also the run in every ``RoundKey``.
        model: ``model_digest`` of the parameters; members with another one are never met.
        seed: of the order of peers in a round, the same for all.
        members: who is there now (``Directory.members``).
        look: called when somebody unknown calls (``Directory.look``).
        barred: peers with whom this node is in no group (``Directory.is_barred``).
        fragments: fragments that are sent in turn, each with the next round's number; 1 unless the schedule streams.
        quorum: members that make a group; 0: all in view.
        grace: seconds that further members have once the quorum is there.
        max_group: largest group; if more are ready they are dealt into several (one of which may be larger by one).
        follow: move a contribution that comes too late to the swarm's round. False for what belongs to its round only, as SPARTA's
            masks do: then it goes on alone, and only ``next_round`` follows.
        gather: never all-reduce, as this node leads: then a mean has the same bits in every run, at the price of more bytes.
        wait: seconds that a round waits for its group.
        chunk_timeout: seconds without a byte, or a sign of life, after which a transfer, or a peer, is given up.
        exchange_timeout: seconds that one reduction may take.
        defence: what to refuse where payloads are gathered, and what to take for the mean. One that ``gathers`` takes no part in an
            all-reduce, whoever leads.

    Raises:
        ValueError: ``max_group`` or ``fragments`` out of range.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        *,
        swarm: str,
        model: str,
        seed: int,
        members: Callable[[], Mapping[str, Member]],
        look: Callable[[], None] = lambda: None,
        barred: Callable[[str], bool] = lambda peer: False,
        fragments: int = 1,
        quorum: int = 0,
        grace: float = 1.0,
        max_group: int = 16,
        follow: bool = True,
        gather: bool = False,
        wait: float = 10.0,
        chunk_timeout: float = 5.0,
        exchange_timeout: float = 120.0,
        defence: UpdateScreen = TRUSTING,
    ) -> None:
        if not 2 <= max_group < MAX_GROUP:
            raise ValueError(f"max_group must be between 2 and {MAX_GROUP - 1}, got {max_group}")
        if fragments < 1 or quorum < 0 or not grace >= 0:
            raise ValueError(f"fragments must be positive, quorum and grace not negative: got {fragments}, {quorum}, {grace}")
        self._swarm, self._model, self._defence = swarm, model, defence
        self._rounds = RoundTracker(fragments)
        view = LivenessView(members, model, identity.peer_id, barred)
        decisions = DecisionLog(host, identity, swarm)

        async def reach(peer: str, seconds: float) -> None:
            (await host.open(peer, LEADER_PROTOCOL, addresses=view.addresses(peer), timeout=seconds)).close()

        self._leader = GroupLeader(
            identity.peer_id, decisions, self._rounds, swarm=swarm, model=model, seed=seed, view=view, look=look,
            reach=reach, quorum=quorum, grace=grace, max_group=max_group, gather=gather or defence.gathers, wait=wait,
            chunk_timeout=chunk_timeout, exchange_timeout=exchange_timeout,
        )  # fmt: skip
        self._groups = GroupMember(
            host, identity, self._leader, decisions, self._rounds, swarm=swarm, model=model, seed=seed, view=view,
            largest=max_group + 1, follow=follow, wait=wait, chunk_timeout=chunk_timeout, exchange_timeout=exchange_timeout,
        )  # fmt: skip
        # What one round can take at most: forming the group, one reduction, its confirm.
        super().__init__(host, self._rounds, wait + exchange_timeout + 8 * chunk_timeout)

    def start(
        self, key: RoundKey, tensors: Sequence[Tensor], weight: float = 1.0, codec: Codec = FLOAT32
    ) -> ExchangeHandle[Outcome]:
        """Begin a round. ValueError if ``key`` is of another run than this swarm, or the codec refuses the tensors."""
        mine = contribution(self._swarm, key, tensors, weight, codec, self._defence, self.stats)
        decision: CommitState[Outcome] = mine.decision
        return ExchangeHandle(self, decision, self._groups.meet(mine), lambda outcome: outcome.mean())
