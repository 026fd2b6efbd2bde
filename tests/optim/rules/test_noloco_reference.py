"""NoLoCo and local SGD against the authors' recursion in float64: both forms, odd groups, missing peers, weights, listeners."""

from statistics import median_low

import numpy as np
import pytest
import torch

from shoal.optim import Faults, LocalSGD, NoLoCo, Simulation, groups

EVERY, ROUNDS, SEED = 4, 9, 3
LOST = {("bert", 2), ("dora", 5)}
WEIGHTS = {"anna": 1.0, "bert": 20.0, "cleo": 5.0, "dora": 0.5, "emil": 3.0}


def noloco(lab, peers, size, lr, momentum, pull, lost=(), weights=None, listens=()):
    """Return the slow weights of each peer after each round.

    With n = the members of a group that count, as in the authors' code (Eq. 1-3 with the sign of the second term that descends):

        v <- a v + (b / n) sum_j (slow_j - fast_j) + c (slow - (1/n) sum_j slow_j);   slow <- slow - v;   fast <- slow

    Ours: the first sum is weighted (up to four times the median weight), the second is not; who listens in round 0 counts in
    neither, and if all of a group listen, all count alike.
    """
    slow = {peer: lab.own_start(peer) for peer in peers}
    velocity = {peer: np.zeros(5) for peer in peers}
    path = {peer: [] for peer in peers}
    for round in range(ROUNDS):
        fast = {peer: lab.trained(peer, slow[peer], EVERY) for peer in peers}
        before = dict(slow)
        for group in groups(SEED, round, peers, size):
            failed = any((peer, round) in lost for peer in group)
            for peer in group:
                counted = [peer] if failed else [p for p in group if not (round == 0 and p in listens)]
                share = [1.0 if weights is None or not counted else weights[p] for p in counted or group]
                counted = counted or list(group)
                limit = 4 * median_low(share)
                share = [min(weight, limit) for weight in share]
                gradient = np.average([before[p] - fast[p] for p in counted], axis=0, weights=share)
                apart = before[peer] - np.mean([before[p] for p in counted], axis=0)
                velocity[peer] = momentum * velocity[peer] + lr * gradient + pull * apart
                slow[peer] = before[peer] - velocity[peer]
        for peer in peers:
            path[peer].append(slow[peer])
    return path


def check(lab, method, peers, size, expected, *, lost=(), weights=None, **options):
    """Compare with the real optimizer. All begin each round at the same time, so that nobody is late after a lost one."""

    def peer(exchange):
        parameter = torch.nn.Parameter(torch.tensor(lab.own_start(exchange.peer), dtype=torch.float32))
        more = options if weights is None else options | {"weight": lambda tokens, steps: weights[exchange.peer]}
        opt = method(torch.optim.SGD([parameter], lr=lab.RATE), exchange, every=EVERY, lag=0, **more)
        path = []
        for round in range(ROUNDS):
            exchange.sleep(100.0 * (round + 1) - exchange.simulation.now)
            for _ in range(EVERY):
                opt.zero_grad()
                lab.least_squares(exchange.peer, [parameter]).backward()
                opt.step()
            path.append((opt.slow[0].double().numpy().copy(), parameter.detach().double().numpy().copy()))
        return path

    faults = Faults(drop=lambda peer, key: (peer, key.round) in lost)
    for name, path in Simulation(peers, size=size, seed=SEED, faults=faults).run(peer).items():
        for found in zip(*path, strict=True):  # slow, then fast weights
            lab.close(found, expected[name], atol=2e-6)


FORMS = [(0.7, 0.5, None), (0.7, 0.5, 0.3), (0.4, 0.2, 1.1)]


@pytest.mark.parametrize("lost", [(), LOST], ids=["all there", "two missing"])
@pytest.mark.parametrize(("lr", "momentum", "pull"), FORMS)
@pytest.mark.parametrize(("count", "size"), [(4, 2), (5, 2), (4, 3), (5, 5)])
def test_it_is_the_authors_recursion(lab, count, size, lr, momentum, pull, lost):
    peers = [*lab.PEERS, "emil"][:count]
    expected = noloco(lab, peers, size, lr, momentum, lr if pull is None else pull, lost)
    check(lab, NoLoCo, peers, size, expected, lr=lr, momentum=momentum, pull=pull, lost=lost)


@pytest.mark.parametrize("pull", [None, 0.3])
@pytest.mark.parametrize("size", [2, 3])
def test_weights_count_in_the_pseudo_gradients_alone(lab, size, pull):
    peers = [*lab.PEERS, "emil"]
    expected = noloco(lab, peers, size, 0.7, 0.5, 0.7 if pull is None else pull, LOST, WEIGHTS)
    check(lab, NoLoCo, peers, size, expected, lr=0.7, momentum=0.5, pull=pull, lost=LOST, weights=WEIGHTS)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize("pull", [None, 0.3])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("listens", [("bert",), ("anna", "cleo"), ("anna", "bert", "cleo", "dora")])
def test_who_listens_is_pulled_to_those_who_count_and_they_are_not_pulled_to_him(lab, listens, size, pull, weights):
    def listening(inner, exchange, **options):
        opt = NoLoCo(inner, exchange, **options)
        if exchange.peer in listens:
            opt.listen()
        return opt

    expected = noloco(lab, lab.PEERS, size, 0.7, 0.5, 0.7 if pull is None else pull, weights=weights, listens=listens)
    check(lab, listening, lab.PEERS, size, expected, lr=0.7, momentum=0.5, pull=pull, weights=weights)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize("size", [2, 4])
def test_local_sgd_is_federated_averaging(lab, size, weights):
    """The mean of the weights; with uneven weights that of the displacements, from the plain mean of where they began."""
    expected = noloco(lab, lab.PEERS, size, 1.0, 0.0, 1.0, LOST, weights)
    check(lab, LocalSGD, lab.PEERS, size, expected, lost=LOST, weights=weights)
