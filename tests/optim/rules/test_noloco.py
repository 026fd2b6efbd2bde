"""NoLoCo's equivalences, each against an independent float64 reference, through the real optimizer and the simulated exchange."""

import warnings

import numpy as np
import pytest
import torch

from shoal.optim import Faults, NoLoCo, Simulation, groups

PEERS = ["anna", "bert", "cleo", "dora"]
STEP_S, RATE, EVERY, ROUNDS = 0.1, 0.05, 5, 12
TOLERANCE = 1e-6


def problem(peer):
    """Return the peer's own least squares: 8 rows, 5 weights."""
    rng = np.random.default_rng(sum(peer.encode()))
    rows = rng.normal(size=(8, 5)).astype(np.float32)
    return rows, (rows @ rng.uniform(-0.4, 0.4, size=5)).astype(np.float32)


def start(peer):
    """Return the same weights for all peers, as NoLoCo requires."""
    return np.linspace(-0.3, 0.2, 5).astype(np.float32)


def own_start(peer):
    """Return other weights for each peer, which then converge."""
    return np.random.default_rng(sum(peer.encode()) + 1).uniform(-0.5, 0.5, size=5).astype(np.float32)


def least_squares(peer, weights):
    rows, targets = (torch.from_numpy(array) for array in problem(peer))
    return (rows @ torch.cat(weights) - targets).square().sum() / 16


def linear(peer, weights):
    """Return a loss of constant gradient: a round's displacement does not depend on the slow weights."""
    return torch.cat(weights) @ torch.from_numpy(problem(peer)[0][0])


def simulate(peers=PEERS, *, begin=start, loss=least_squares, size=2, seed=0, faults=None, rounds=ROUNDS, **method):
    """Return {peer: (slow weights after each round (rounds, 5), members of each round, virtual seconds at the end)}."""

    def peer(exchange):
        first = torch.from_numpy(begin(exchange.peer))
        weights = [torch.nn.Parameter(first[:3].clone()), torch.nn.Parameter(first[3:].clone())]
        slow, members = [], []

        def record(info):
            slow.append(torch.cat(opt.slow).double().numpy())
            members.append(info.members)

        opt = NoLoCo(torch.optim.SGD(weights, lr=RATE), exchange, every=EVERY, on_round=record, **method, lag=0)
        for _ in range(rounds * EVERY):
            opt.zero_grad()
            loss(exchange.peer, weights).backward()
            exchange.sleep(STEP_S)
            opt.step()
        return np.array(slow), members, exchange.simulation.now

    return Simulation(peers, seed=seed, size=size, faults=faults).run(peer)


def trained(peer, weights):
    """Take EVERY steps of gradient descent on the peer's least squares, in float64."""
    rows, targets = (array.astype(np.float64) for array in problem(peer))
    for _ in range(EVERY):
        weights = weights - RATE * rows.T @ (rows @ weights - targets) / 8
    return weights


def close(found, expected):
    assert np.shape(found) == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("pull", [None, 0.1, 1.2])
def test_1_with_everyone_in_the_group_it_is_diloco_with_heavy_ball(pull):
    found = simulate(size=4, lr=0.6, momentum=0.5, pull=pull)
    slow, velocity, expected = start("").astype(np.float64), 0.0, []
    for _ in range(ROUNDS):
        velocity = 0.5 * velocity + np.mean([slow - trained(peer, slow) for peer in PEERS], axis=0)
        slow = slow - 0.6 * velocity
        expected.append(slow)
    for path, members, _ in found.values():
        close(path, expected)
        assert members == [tuple(PEERS)] * ROUNDS


@pytest.mark.parametrize("pull", [None, 0.3])
def test_2_one_peer_without_momentum_is_lookahead(pull):
    path, members, _ = simulate(["anna"], lr=0.7, momentum=0.0, pull=pull)["anna"]
    slow, expected = start("").astype(np.float64), []
    for _ in range(ROUNDS):
        slow = 0.3 * slow + 0.7 * trained("anna", slow)
        expected.append(slow)
    close(path, expected)
    assert members == [()] * ROUNDS


@pytest.mark.parametrize("pull", [None, 0.3])
def test_2_one_peer_with_momentum_is_snoo_with_heavy_ball(pull):
    path, _, _ = simulate(["anna"], lr=0.7, momentum=0.5, pull=pull)["anna"]
    before = slow = start("").astype(np.float64)
    expected = []
    for _ in range(ROUNDS):  # heavy ball written without a buffer
        before, slow = slow, slow + 0.7 * (trained("anna", slow) - slow) + 0.5 * (slow - before)
        expected.append(slow)
    close(path, expected)


def test_3_without_momentum_and_rates_of_one_it_is_pairwise_averaging():
    found = simulate(seed=3, lr=1.0, momentum=0.0, pull=1.0)
    weights = {peer: start(peer).astype(np.float64) for peer in PEERS}
    for round in range(ROUNDS):
        for a, b in groups(3, round, PEERS):
            weights[a] = weights[b] = (trained(a, weights[a]) + trained(b, weights[b])) / 2
        for peer in PEERS:
            close(found[peer][0][round], weights[peer])


def noloco(peers, lr, momentum, pull, met, begin=start):
    """Yield {peer: slow} after each round of the normative two-tensor form; ``met(round)`` lists the groups."""
    slow = {peer: begin(peer).astype(np.float64) for peer in peers}
    velocity = {peer: np.zeros(5) for peer in peers}
    for round in range(ROUNDS):
        moved = {peer: slow[peer] - trained(peer, slow[peer]) for peer in peers}
        for group in met(round):
            middle = np.mean([slow[peer] for peer in group], axis=0)
            gradient = np.mean([moved[peer] for peer in group], axis=0)
            for peer in group:
                velocity[peer] = momentum * velocity[peer] + lr * gradient + pull * (slow[peer] - middle)
                slow[peer] = slow[peer] - velocity[peer]
        yield dict(slow)


@pytest.mark.parametrize("begin", [start, own_start])
@pytest.mark.parametrize(("lr", "momentum", "pull"), [(0.7, 0.5, None), (0.7, 0.5, 0.7), (0.4, 0.3, None), (0.7, 0.5, 0.3)])
def test_4_sending_only_the_fast_weights_is_the_two_tensor_form_with_pull_equal_to_lr(lr, momentum, pull, begin):
    found = simulate(seed=1, begin=begin, lr=lr, momentum=momentum, pull=pull)
    gamma = lr if pull is None else pull
    reference = noloco(PEERS, lr, momentum, gamma, lambda round: groups(1, round, PEERS), begin)
    for round, expected in enumerate(reference):
        for peer in PEERS:
            close(found[peer][0][round], expected[peer])


@pytest.mark.parametrize("peers", [PEERS, [*PEERS, "emil"]])
@pytest.mark.parametrize(("size", "seed", "pull"), [(2, 0, None), (2, 1, 0.1), (2, 2, 1.2), (3, 0, 0.9), (4, 0, 0.3), (5, 0, None)])
def test_5_the_mean_over_the_peers_depends_neither_on_the_pull_nor_on_the_pairing(peers, size, seed, pull):
    found = simulate(peers, begin=own_start, loss=linear, size=size, seed=seed, lr=0.2, momentum=0.5, pull=pull)
    slow = np.mean([own_start(peer).astype(np.float64) for peer in peers], axis=0)
    displacement = EVERY * RATE * np.mean([problem(peer)[0][0].astype(np.float64) for peer in peers], axis=0)
    velocity, expected = 0.0, []
    for _ in range(ROUNDS):
        velocity = 0.5 * velocity + 0.2 * displacement
        slow = slow - velocity
        expected.append(slow)
    close(np.mean([path for path, _, _ in found.values()], axis=0), expected)


def test_6_a_pull_of_one_alone_makes_a_pair_equal_and_keeps_the_mean():
    found = simulate(begin=own_start, seed=2, lr=0.0, momentum=0.0, pull=1.0)
    total = np.mean([own_start(peer).astype(np.float64) for peer in PEERS], axis=0)
    for round in range(ROUNDS):
        for a, b in groups(2, round, PEERS):
            close(found[a][0][round], found[b][0][round])
        close(np.mean([found[peer][0][round] for peer in PEERS], axis=0), total)


RATES = [(0.5, 0.1, 0.798), (0.5, 0.3, 0.622), (0.5, 0.7, 0.695), (0.5, 1.0, 0.789), (0.5, 1.4, 0.943), (0.5, 1.6, 1.044),
         (0.9, 0.3, 0.978), (0.9, 0.45, 1.019), (0.9, 1.0, 1.203), (0.3, 1.9, 1.049)]  # fmt: skip


@pytest.mark.parametrize(("momentum", "pull", "rate"), RATES)
def test_7_the_spread_of_64_peers_contracts_at_the_predicted_rate_or_grows_beyond_the_limit(momentum, pull, rate):
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


@pytest.mark.parametrize("peers", [PEERS, [*PEERS, "emil"]])
def test_8_both_sides_of_a_pair_know_each_other_and_everyone_is_in_one(peers):
    found = simulate(peers, seed=4)
    for round in range(ROUNDS):
        met = {peer: members[round] for peer, (_, members, _) in found.items()}
        for peer, members in met.items():
            assert members == () or (len(members) == 2 and peer in members)
            assert all(met[other] == members for other in members)
        assert sum(members == () for members in met.values()) == len(peers) % 2


@pytest.mark.parametrize("pull", [None, 0.3])
def test_9_when_the_partner_is_gone_it_goes_on_as_lookahead_on_its_own_data(pull):
    gone = 4.5 * EVERY * STEP_S  # in the middle of the fifth round
    found = simulate(PEERS[:2], lr=0.7, momentum=0.5, pull=pull, faults=Faults(kill={"bert": gone}))
    assert list(found) == ["anna"]
    path, members, now = found["anna"]
    assert members == [("anna", "bert")] * 4 + [()] * (ROUNDS - 4)
    assert now == pytest.approx(ROUNDS * EVERY * STEP_S)  # nobody waits for the dead
    gamma = 0.7 if pull is None else pull
    reference = noloco(PEERS[:2], 0.7, 0.5, gamma, lambda round: [PEERS[:2]] if round < 4 else [["anna"]])
    close(path, [slow["anna"] for slow in reference])


def test_9_a_partner_that_stays_silent_costs_at_most_the_wait():
    lost = Faults(drop=lambda peer, key: peer == "bert" and key.round % 3 == 1)
    found = simulate(PEERS[:2], lr=0.7, momentum=0.5, faults=lost)
    for _, members, now in found.values():
        assert members == [() if round % 3 == 1 else ("anna", "bert") for round in range(ROUNDS)]
        assert now == pytest.approx(ROUNDS * EVERY * STEP_S + 4 * 10.0)
    reference = noloco(PEERS[:2], 0.7, 0.5, 0.7, lambda round: [["anna"], ["bert"]] if round % 3 == 1 else [PEERS[:2]])
    for round, expected in enumerate(reference):
        for peer in PEERS[:2]:
            close(found[peer][0][round], expected[peer])
