"""Keeps an outer optimizer in step with its swarm: the round it is in, the weights it takes over, and those it hands out."""

from __future__ import annotations

from optim import OuterOptimizer, RoundInfo
from swarm.anchor import Anchor
from swarm.handle import Waiter
from swarm.membership import Membership
from swarm.welcome import State, StateServer


class Follower:
    """Of one optimizer; hands out its slow weights from now on. All is for the thread that trains.

    Args:
        membership, model: the swarm, and the digest of the model's shapes.
        exchange: the optimizer's.
    """

    def __init__(self, membership: Membership, model: str, opt: OuterOptimizer, exchange: Waiter) -> None:
        self._opt, self._exchange = opt, exchange
        self._server = StateServer(membership.host, membership.swarm, model, [tuple(tensor.shape) for tensor in opt.slow])
        self._anchor = Anchor(membership, model, self._server, opt)

    def begin_from(self, state: State) -> None:
        """Take over the weights and the round of a swarm that is under way."""
        self._opt.adopt(state.slow, round=state.round, into_model=True, shared=state.extra, applied=state.applied)
        self._anchor.joined(state)

    def begin(self) -> None:
        """Before the first step, when weights and round are those to start from."""
        self._exchange.next_round = self._opt.round

    def saw(self, info: RoundInfo) -> None:
        """After each exchange, from the optimizer's ``on_round``."""
        # Who fell behind met the others in a later round than its own: go on from there.
        moved = self._exchange.next_round > self._opt.round
        self._opt.round = max(self._opt.round, self._exchange.next_round)
        self._exchange.next_round = self._opt.round
        self._anchor.saw(info, moved=moved)

    def after_step(self) -> bool:
        """Between two steps. True if the swarm's weights were taken over just now, after a missed round."""
        back = self._anchor.settle()
        if back:
            self._exchange.next_round = self._opt.round
        self.offer()
        return back

    def offer(self) -> None:
        """Hand out the slow weights if somebody waits for them."""
        opt = self._opt
        self._server.offer(lambda: State(opt.round, opt.steps, opt.slow, opt.shared, opt.applied))
