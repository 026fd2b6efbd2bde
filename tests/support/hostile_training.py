"""Simulated peers that learn one line, some of them hostile."""

import torch

from bench._attacks import Board, Honest, Hostile
from shoal.optim import DiLoCo, LocalSGD, NoLoCo, Simulation
from shoal.swarm.exchange.robust import DistanceScreen


def train(method, attack, make_defence, peers=8, hostile=2, rounds=24, warmup=0):
    """Each learns the same line from data of its own.

    Distance to it of the honest peers' slow weights, and their watches.
    """
    names = [f"p{number}" for number in range(peers)]
    bad = set(names[-hostile:]) if attack else set()
    watches, board = {name: make_defence() for name in names if name not in bad}, Board()
    goal = torch.linspace(-2, 2, 12)

    def peer(exchange):
        random = torch.Generator().manual_seed(names.index(exchange.peer))
        weight = torch.nn.Parameter(torch.zeros(12))
        wire = Hostile(exchange, board, attack) if exchange.peer in bad else Honest(exchange, board)
        inner = torch.optim.SGD([weight], lr=0.05)
        warm = torch.optim.lr_scheduler.LambdaLR(
            inner, lambda step: min(1.0, (step + 1) / max(warmup, 1))
        )
        opt = METHODS[method](inner, wire)
        if isinstance(wire, Hostile) and method != "diloco":
            wire.slow = opt.slow
        for _ in range(5 * rounds):
            exchange.sleep(1.0)
            weight.grad = weight.detach() - goal - 0.5 * torch.randn(12, generator=random)
            opt.step()
            warm.step()
        return (opt.slow[0] - goal).norm().item()

    size = peers if method == "diloco" else 2
    found = Simulation(names, seed=3, size=size, wait=30.0, screens=watches).run(peer)
    return max(found[name] for name in watches), watches


METHODS = {
    "noloco": lambda inner, wire: NoLoCo(inner, wire, every=5, lr=0.7, momentum=0.3, lag=0),
    "local": lambda inner, wire: LocalSGD(inner, wire, every=5, lag=0),
    "diloco": lambda inner, wire: DiLoCo(inner, wire, every=5, lr=0.7, momentum=0.3),
}


def defended(method):
    robust = "centered-clip" if method == "diloco" else "clipped-gossip"
    return lambda: DistanceScreen(
        robust=robust, sends="displacement" if method == "diloco" else "weights"
    )
