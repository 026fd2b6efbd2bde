"""NoLoCo and local SGD against the authors' recursion in float64: both forms, odd groups, missing peers, weights, listeners.

And what follows from it, each against a reference of its own.
"""

import warnings
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


# -- what follows from it ----------------------------------------------------------------------------------------------------


def rounds(lab, peers, *, size=2, begin=None, **options):
    """Return {peer: (slow weights after each round (ROUNDS, 5), members of each round, virtual seconds at the end)}."""
    begin = begin or lab.own_start
    found = lab.run(NoLoCo, ROUNDS * EVERY, peers, size=size, begin=begin, every=EVERY, lag=0, **options)
    return {peer: (each.slow[EVERY - 1 :: EVERY], each.members, each.now) for peer, each in found.items()}


@pytest.mark.parametrize("pull", [None, 0.3])
def test_one_peer_without_momentum_is_lookahead(lab, pull):
    path, members, _ = rounds(lab, ["anna"], lr=0.7, momentum=0.0, pull=pull)["anna"]
    slow, expected = lab.own_start("anna"), []
    for _ in range(ROUNDS):
        slow = 0.3 * slow + 0.7 * lab.trained("anna", slow, EVERY)
        expected.append(slow)
    lab.close(path, expected)
    assert members == [()] * ROUNDS


def test_without_momentum_and_rates_of_one_it_is_pairwise_averaging(lab):
    found = rounds(lab, lab.PEERS, begin=lab.start, seed=SEED, lr=1.0, momentum=0.0, pull=1.0)
    weights = {peer: lab.start() for peer in lab.PEERS}
    for round in range(ROUNDS):
        for a, b in groups(SEED, round, lab.PEERS):
            weights[a] = weights[b] = (lab.trained(a, weights[a], EVERY) + lab.trained(b, weights[b], EVERY)) / 2
        for peer in lab.PEERS:
            lab.close(found[peer][0][round], weights[peer])


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize(("size", "seed", "pull"), [(2, 0, None), (2, 1, 0.1), (2, 2, 1.2), (3, 0, 0.9), (4, 0, 0.3), (5, 0, None)])
def test_the_mean_over_the_peers_depends_neither_on_the_pull_nor_on_the_pairing(lab, count, size, seed, pull):
    peers = [*lab.PEERS, "emil"][:count]
    found = rounds(lab, peers, loss=lab.linear, size=size, seed=seed, lr=0.2, momentum=0.5, pull=pull)
    slow = np.mean([lab.own_start(peer) for peer in peers], axis=0)
    displacement = EVERY * lab.RATE * np.mean([lab.problem(peer)[0][0] for peer in peers], axis=0)
    velocity, expected = 0.0, []
    for _ in range(ROUNDS):
        velocity = 0.5 * velocity + 0.2 * displacement
        slow = slow - velocity
        expected.append(slow)
    lab.close(np.mean([path for path, _, _ in found.values()], axis=0), expected)


def test_a_pull_of_one_alone_makes_a_pair_equal_and_keeps_the_mean(lab):
    found = rounds(lab, lab.PEERS, seed=2, lr=0.0, momentum=0.0, pull=1.0)
    total = np.mean([lab.own_start(peer) for peer in lab.PEERS], axis=0)
    for round in range(ROUNDS):
        for a, b in groups(2, round, lab.PEERS):
            lab.close(found[a][0][round], found[b][0][round])
        lab.close(np.mean([found[peer][0][round] for peer in lab.PEERS], axis=0), total)


RATES = [(0.5, 0.1, 0.798), (0.5, 0.3, 0.622), (0.5, 0.7, 0.695), (0.5, 1.0, 0.789), (0.5, 1.4, 0.943), (0.5, 1.6, 1.044),
         (0.9, 0.3, 0.978), (0.9, 0.45, 1.019), (0.9, 1.0, 1.203), (0.3, 1.9, 1.049)]  # fmt: skip


@pytest.mark.parametrize(("momentum", "pull", "rate"), RATES)
def test_the_spread_of_64_peers_contracts_at_the_predicted_rate_or_grows_beyond_the_limit(momentum, pull, rate):
    names = [f"peer-{index:02}" for index in range(64)]
    first = dict(zip(names, torch.randn(64, 256, generator=torch.Generator().manual_seed(1)), strict=True))

    def peer(exchange):
        weight = torch.nn.Parameter(first[exchange.peer].clone())
        opt = NoLoCo(torch.optim.SGD([weight], lr=0.0), exchange, every=1, lr=0.0, momentum=momentum, pull=pull, lag=0)
        path = []
        for _ in range(30):
            opt.step()
            path.append(opt.slow[0].double().numpy())
        return path

    stable = pull < 2 * (1 - momentum**2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        paths = np.array(list(Simulation(names).run(peer).values()))  # (peers, rounds, values)
    assert any("lets the peers drift apart" in str(warning.message) for warning in caught) is not stable
    variance = ((paths - paths.mean(axis=0)) ** 2).mean(axis=(0, 2))
    measured = np.exp(np.polyfit(np.arange(7, 29), np.log(variance[7:29]), 1)[0])  # behind the transient, above the float floor
    assert measured == pytest.approx(rate, abs=0.02)
    assert bool(measured < 1) is stable


@pytest.mark.parametrize("count", [4, 5])
def test_both_sides_of_a_pair_know_each_other_and_everyone_is_in_one(lab, count):
    found = rounds(lab, [*lab.PEERS, "emil"][:count], seed=4)
    for round in range(ROUNDS):
        met = {peer: members[round] for peer, (_, members, _) in found.items()}
        for peer, members in met.items():
            assert members == () or (len(members) == 2 and peer in members)
            assert all(met[other] == members for other in members)
        assert sum(members == () for members in met.values()) == count % 2


@pytest.mark.parametrize("pull", [None, 0.3])
def test_when_the_partner_is_gone_it_goes_on_as_lookahead_on_its_own_data(lab, pull):
    pair, gone = lab.PEERS[:2], 4.5 * EVERY * lab.STEP_S  # in the middle of the fifth round
    found = rounds(lab, pair, lr=0.7, momentum=0.5, pull=pull, faults=Faults(kill={"bert": gone}))
    assert list(found) == ["anna"]
    path, members, now = found["anna"]
    assert members == [("anna", "bert")] * 4 + [()] * (ROUNDS - 4)
    assert now == pytest.approx(ROUNDS * EVERY * lab.STEP_S)  # nobody waits for the dead
    lost = {("bert", round) for round in range(4, ROUNDS)}
    lab.close(path, noloco(lab, pair, 2, 0.7, 0.5, 0.7 if pull is None else pull, lost)["anna"], atol=2e-6)


def test_a_partner_that_stays_silent_costs_at_most_the_wait(lab):
    pair, lost = lab.PEERS[:2], {("bert", round) for round in range(1, ROUNDS, 3)}
    found = rounds(lab, pair, lr=0.7, momentum=0.5, faults=Faults(drop=lambda peer, key: (peer, key.round) in lost))
    expected = noloco(lab, pair, 2, 0.7, 0.5, 0.7, lost)
    for peer, (path, members, now) in found.items():
        assert members == [() if round % 3 == 1 else ("anna", "bert") for round in range(ROUNDS)]
        assert now == pytest.approx(ROUNDS * EVERY * lab.STEP_S + len(lost) * 10.0)
        lab.close(path, expected[peer], atol=2e-6)
