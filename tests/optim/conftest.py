"""A small world for the methods' equivalences: four peers, each with its own least squares over
five weights.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shoal.optim import Simulation

PEERS = ["anna", "bert", "cleo", "dora"]
RATE, STEP_S = 0.05, 0.1


def problem(peer):
    """Return the peer's least squares: 8 rows, 5 weights."""
    rng = np.random.default_rng(sum(peer.encode()))
    rows = rng.normal(size=(8, 5))
    return rows, rows @ rng.uniform(-0.4, 0.4, size=5)


def start(peer=""):
    return np.linspace(-0.3, 0.2, 5)


def own_start(peer):
    return np.random.default_rng(sum(peer.encode()) + 1).uniform(-0.5, 0.5, size=5)


def gradient(peer, weights):
    rows, targets = problem(peer)
    return rows.T @ (rows @ weights - targets) / 8


def trained(peer, weights, steps):
    """Take ``steps`` steps of gradient descent in float64."""
    for _ in range(steps):
        weights = weights - RATE * gradient(peer, weights)
    return weights


def least_squares(peer, weights):
    rows, targets = (torch.tensor(array, dtype=torch.float32) for array in problem(peer))
    return (rows @ torch.cat(list(weights)) - targets).square().sum() / 16


def linear(peer, weights):
    """Return a loss of constant gradient: a round's displacement does not depend on the slow
    weights.
    """
    return torch.cat(list(weights)) @ torch.tensor(problem(peer)[0][0], dtype=torch.float32)


def run(
    method,
    steps,
    peers=PEERS,
    *,
    size=None,
    seed=0,
    begin=start,
    loss=least_squares,
    faults=None,
    inner=None,
    finish=False,
    **o,
):
    """Return {peer: slow and fast weights after each step (steps, 5), members of each exchange,
    virtual seconds, optimizer}.

    The parameters are weights 0-2 and 3-4. ``method(inner, exchange, **o)`` makes the optimizer.
    """
    make = inner or (lambda weights: torch.optim.SGD(weights, lr=RATE))

    def peer(exchange):
        first = torch.tensor(begin(exchange.peer), dtype=torch.float32)
        weights = [torch.nn.Parameter(first[:3].clone()), torch.nn.Parameter(first[3:].clone())]
        model = torch.nn.ParameterDict({"0": weights[0], "1": weights[1]})
        infos, slow, fast = [], [], []
        options = {
            name: value(exchange.peer, weights) if callable(value) else value
            for name, value in o.items()
        }
        if isinstance(options.get("fragments"), int):
            options["model"] = model
        opt = method(make(weights), exchange, on_round=infos.append, **options)
        for step in range(steps):
            opt.zero_grad()
            loss(exchange.peer, weights).backward()
            exchange.sleep(STEP_S)
            opt.step()
            if finish and step == steps - 1:
                opt.finish()
            slow.append(torch.cat(opt.slow).double().numpy())
            fast.append(torch.cat(weights).detach().double().numpy())
        members = [info.members for info in infos]
        now = exchange.simulation.now
        return SimpleNamespace(
            slow=np.array(slow), fast=np.array(fast), members=members, infos=infos, now=now, opt=opt
        )

    simulation = Simulation(peers, seed=seed, size=size or len(peers), faults=faults)
    return simulation.run(peer)


def close(found, expected, atol=1e-6):
    assert np.shape(found) == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.fixture(scope="session")
def lab():
    return SimpleNamespace(
        PEERS=PEERS,
        RATE=RATE,
        STEP_S=STEP_S,
        problem=problem,
        start=start,
        own_start=own_start,
        gradient=gradient,
        trained=trained,
        least_squares=least_squares,
        linear=linear,
        run=run,
        close=close,
    )
