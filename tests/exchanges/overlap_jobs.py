"""Programs of the ranks in the tests of ``Distributed`` with lags that each peer finds by itself
(see ``jobs``).
"""

import torch
import torch.distributed as dist

from shoal import optim
from shoal.optim import Distributed, codec_named
from shoal.optim.exchange.base import Exchange, Handle

STEPS, EVERY, FRAGMENTS = 30, 8, 4


class Driven(Exchange):
    """Exchange whose outcome is seen after a number of polls that depends on peer and round, and is
    there by then.
    """

    def __init__(self, real):
        self.real, self.peer, self.compares, self.absent = (
            real,
            real.peer,
            real.compares,
            real.absent,
        )

    def start(self, contribution):
        polls = [1, 5, 2, 3, 9, 1, 4][(contribution.key.round + 3 * int(self.peer)) % 7]
        handle = self.real.start(contribution)
        return handle if contribution.members else Seen(handle, polls)

    def close(self):
        self.real.close()


class Seen(Handle):
    def __init__(self, real, polls):
        self.real, self.polls = real, polls

    def done(self):
        self.polls -= 1
        if self.polls <= 0:
            self.real.result()
        return self.polls <= 0

    def result(self, deadline=None):
        return self.real.result(deadline)


class Training:
    """One peer's training."""

    def __init__(self, peer, exchange, method, lag="auto", **options):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
        self.batches = [
            torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * peer + step))
            for step in range(STEPS)
        ]
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.infos = []
        self.opt = getattr(optim, method)(
            inner,
            exchange,
            every=EVERY,
            fragments=[[p] for p in self.model.parameters()],
            lag=lag,
            on_round=self.infos.append,
            **options,
        )

    def step(self, number):
        self.opt.zero_grad()
        self.opt.count(5)
        self.model(self.batches[number]).square().mean().backward()
        self.opt.step()

    def train(self, start=0, stop=STEPS):
        for number in range(start, stop):
            self.step(number)
        return self

    def found(self):
        return {
            "slow": [tensor.flatten().tolist() for tensor in self.opt.slow],
            "fast": [tensor.flatten().tolist() for tensor in self.opt.parameters],
            "rounds": [
                [info.key.round, info.step, info.lag, info.late, list(info.members)]
                for info in self.infos
            ],
            "lag": self.opt.lag,
        }


def driven(peer, exchange, method, codec="float32"):
    training = Training(peer, Driven(exchange), method, codec=codec_named(codec)).train()
    training.opt.finish()
    return training.found()


def overlapping(method, size, codec="float32"):
    exchange = Distributed(size=size, seed=5)
    found = driven(dist.get_rank(), exchange, method, codec)
    exchange.close()
    return found


def ahead(method, size):
    """Let one rank take all steps that it can without the others, who begin only then."""
    rank, exchange = dist.get_rank(), Distributed(size=size, seed=5)
    marks = dist.PrefixStore(f"ahead/{method}", dist.distributed_c10d._get_default_store())
    training = Training(rank, exchange, method)
    alone = EVERY // FRAGMENTS + EVERY - 1  # then the first fragment is sent again
    if rank == 0:
        training.train(0, alone)
        sent = len(list(training.opt._in_flight))
        marks.set("ahead", "-")
        training.train(alone)
    else:
        sent = None
        marks.wait(["ahead"])
        training.train()
    training.opt.finish()
    exchange.close()
    return training.found() | {"sent": sent}


def resumed(method, size, at):
    """Save all ranks at a step at which not all have the same exchanges in flight, and go on from
    that.
    """
    rank, exchange = dist.get_rank(), Distributed(size=size, seed=5)
    first = Training(rank, Driven(exchange), method).train(0, at)
    state, weights = first.opt.state_dict(), first.model.state_dict()
    under_way = [pending.context.key.round for pending in first.opt._in_flight]
    dist.barrier()
    exchange.close()
    exchange = Distributed(size=size, seed=5)
    again = Training(rank, Driven(exchange), method)
    again.model.load_state_dict(weights)
    again.opt.load_state_dict(state)
    again.train(at)
    again.opt.finish()
    exchange.close()
    return again.found() | {"under way": under_way}
