"""Small loops of one's own in sessions on loopback, which threads of this process run."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import shoal
from shoal.optim import Simulation

HERE = shoal.NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",), relay="off")

EVERY, ROUNDS = 5, 4


def seeded(net, seed):
    """Return ``net`` with the weights of its layers drawn from a generator of its own.

    torch.manual_seed is the whole process's: of two threads that seed it at once, as peers do
    here, each draws some of the other's numbers.
    """
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in net:
            for parameter in layer.parameters():
                bound = layer.in_features**-0.5
                parameter.uniform_(-bound, bound, generator=numbers)
    return net


def model(seed):
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return seeded(net, seed)


def loop(opt, module, data_seed, steps=EVERY * ROUNDS):
    data = torch.Generator().manual_seed(data_seed)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=data).to(next(module.parameters()))
        (module(x) - x.sum(1, keepdim=True)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def beside(session, step, join):
    """Return what ``join(end)`` returns, beside a thread that steps in ``session``.

    ``end()`` lets that thread leave its session: a peer that leaves first waits for the last
    average with it.
    """
    over = threading.Event()

    def train():
        with session:
            while not over.wait(0.01):  # one that spins would hold up the network's threads
                step()

    def joined():
        try:
            return join(over.set)
        finally:
            over.set()

    return together(train, joined)[1]


def together(*jobs):
    """Run the jobs in threads; their results, or the first exception.

    A last average that two peers cannot commit holds them up to its own deadlines.
    """
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(240) for future in [pool.submit(job) for job in jobs]]


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.05)


def trained(session, make, module, data_seed):
    """The slow weights after the loop of a session whose optimizer ``make(session)`` is."""
    with session as s:
        opt = make(s)
        loop(opt, module, data_seed)
        return [t.clone() for t in opt.slow]


def simulated(make, net):
    """The same of two simulated peers: ``make(module, exchange)``, of ``net()`` each."""

    def peer(exchange):
        module = net()
        opt = make(module, exchange)
        loop(opt, module, int(exchange.peer))
        return [t.clone() for t in opt.slow]

    return Simulation(["1", "2"]).run(peer).values()


def square(seed, frozen=False):
    """Return a model whose matrices, and vectors, have one shape: in another order they would be
    averaged too.
    """
    net = seeded(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))), seed)
    net[3].weight = net[1].weight  # tied
    net[0].weight.requires_grad_(not frozen)
    return net


def decayed(module):
    """Return one optimizer with decay and no-decay groups, as nanoGPT's."""
    several = [[p for p in module.parameters() if (p.ndim > 1) is wide] for wide in (True, False)]
    return torch.optim.SGD([{"params": params, "weight_decay": 0.0} for params in several], lr=0.05)


def several(module):
    """Return two optimizers, of vectors and of matrices, in the opposite order, as Muon beside
    AdamW.
    """
    found = list(reversed(list(module.parameters())))
    return [
        torch.optim.SGD([p for p in found if (p.ndim > 1) is wide], lr=0.05)
        for wide in (False, True)
    ]
