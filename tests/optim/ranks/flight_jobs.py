"""Programs of the processes in the tests of exchanges that are in flight in a peer of several ranks
(see ``rank_jobs``).
"""

import torch.distributed as dist
from rank_jobs import batches, full, groups, laid_out, make, make_model, numbers, step_of

from shoal.optim import Alone, Mean
from shoal.optim.exchange.base import Exchange, Handle
from shoal.optim.ranks.orders import load_whole, whole_slow, whole_state
from shoal.optim.ranks.ranks import Ranks


class Polled(Exchange):
    """Exchange with a peer whose tensors are all 0; an exchange is over after a number of polls
    that depends on its round.
    """

    def __init__(self):
        self.polls = 0

    def start(self, contribution):
        return Poll(
            self,
            [tensor / 2 for tensor in contribution.tensors],
            [1, 4, 2, 9][contribution.key.round % 4],
        )


class Poll(Handle):
    def __init__(self, exchange, tensors, left):
        self.exchange, self.tensors, self.left = exchange, tensors, left

    def done(self):
        self.exchange.polls += 1
        self.left -= 1
        return self.left <= 0

    def result(self, deadline=None):
        return Mean(self.tensors, 2.0, ("0", "x"))


def polled(opt, model, ranks=None, at=None, remake=None):
    """Train 40 steps; ``at`` that step go on in what ``remake`` returns.

    Return lags, weights and state.
    """
    lags = []
    for step, batch in enumerate(batches(0, 40)):
        if step == at:
            model, opt = remake(model, opt)
        opt.on_round = lambda info: lags.append([info.key.round, info.step, info.lag, info.late])
        step_of(model, opt, batch, ranks)
    opt.finish()
    return {"lags": lags, "lag": opt.lag, "slow": numbers(whole_slow(opt)), "fast": full(model)}


def agreeing(kind):
    """Train with a lag that rank 0 finds; the others never see that an exchange is over."""
    groups()
    if dist.get_rank() == 2:
        model = make_model()
        return polled(make("noloco, auto", model, Polled()), model)
    model, ranks = laid_out(kind), Ranks(groups()["ranks"], timeout=20.0)
    return polled(
        make("noloco, auto", model, Polled() if ranks.first else Alone(), ranks=ranks), model, ranks
    )


def interrupted(kind, method, at):
    """Train a peer of two ranks that is interrupted ``at`` that step, with exchanges in flight;
    process 2: one that is not.
    """
    groups()
    if dist.get_rank() == 2:
        model = make_model()
        return polled(make(method, model, Polled()), model)
    ranks, counts = Ranks(groups()["ranks"], timeout=20.0), []

    def made():
        model = laid_out(kind)
        return model, make(method, model, Polled() if ranks.first else Alone(), ranks=ranks)

    def remade(model, opt):
        counts.append(len(list(opt._in_flight)))
        state, (again, other) = whole_state(opt), made()
        again.load_state_dict(model.state_dict())
        load_whole(other, state if ranks.first else None)
        return again, other

    model, opt = made()
    return polled(opt, model, ranks, at, remade) | {"in flight": counts}
