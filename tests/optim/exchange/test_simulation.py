import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import Faults, Mean, NoLoCo, RoundKey, Simulation
from shoal.optim.exchange.base import Contribution

PEERS = ["a", "b", "c", "d", "e"]
WAIT = 3.0


def one_hot(peer):
    return torch.eye(len(PEERS))[PEERS.index(peer)]


class Log:
    """Every peer's outcome of each round and the virtual seconds that it waited, dead peers included."""

    def __init__(self, simulation, rounds, pause):
        self.outcomes: dict[tuple[str, int], Mean | None] = {}
        self.waits: list[float] = []

        def peer(exchange):
            for round in range(rounds):
                exchange.sleep(pause(exchange.peer, round))
                before = simulation.now
                mean = exchange.start(Contribution(RoundKey("run", round), [one_hot(exchange.peer)], weight=1.0)).result()
                self.outcomes[exchange.peer, round] = mean
                self.waits.append(simulation.now - before)
            return simulation.now

        self.ends = simulation.run(peer)

    def bits(self):
        means = {at: mean and (mean.members, mean.tensors[0].tolist()) for at, mean in self.outcomes.items()}
        return means, self.waits, self.ends


def times(values, count):
    """Return a pure function of (peer, round) in half seconds, so that many events are simultaneous."""
    return lambda peer, round: values[(PEERS.index(peer) * count + round) % len(values)] / 2


@settings(max_examples=150, deadline=None)
@given(
    peers=st.integers(1, 5),
    size=st.integers(1, 4),
    seed=st.integers(0, 1000),
    pauses=st.lists(st.integers(0, 10), min_size=1, max_size=20),
    delays=st.lists(st.sampled_from([0, 0, 0, 1, 2, 5, 9]), min_size=1, max_size=20),
    drops=st.lists(st.booleans(), min_size=1, max_size=20),
    kills=st.dictionaries(st.sampled_from(PEERS), st.integers(0, 40).map(lambda x: x / 2), max_size=4),
)
def test_whatever_goes_wrong_nobody_waits_longer_and_a_group_commits_as_a_whole(peers, size, seed, pauses, delays, drops, kills):
    rounds = 4
    delay, drop = times(delays, rounds), times(drops, rounds)
    faults = Faults(lambda p, key: delay(p, key.round), lambda p, key: drop(p, key.round) > 0, kills)

    def once():
        return Log(Simulation(PEERS[:peers], seed=seed, size=size, wait=WAIT, faults=faults), rounds, times(pauses, rounds))

    log = once()
    assert max(log.waits, default=0.0) <= WAIT
    assert set(PEERS[:peers]) - set(kills) <= set(log.ends)
    for (peer, round), mean in log.outcomes.items():
        if mean is None:
            continue
        assert peer in mean.members
        assert 2 <= len(mean.members) <= size
        whole = sum(one_hot(member) for member in mean.members) / len(mean.members)
        assert torch.allclose(mean.tensors[0], whole, rtol=0, atol=1e-7)
        assert mean.weight == len(mean.members)
        for member in mean.members:
            assert drop(member, round) == 0
            if (member, round) not in log.outcomes:
                assert member in kills
                continue
            theirs = log.outcomes[member, round]
            assert theirs is not None
            assert theirs.members == mean.members
            assert torch.equal(theirs.tensors[0], mean.tensors[0])
    for peer in log.ends:
        assert all((peer, round) in log.outcomes for round in range(rounds))
    assert once().bits() == log.bits()


def test_without_faults_everyone_meets_somebody_and_an_odd_one_does_not_wait():
    log = Log(Simulation(PEERS, wait=WAIT), 20, lambda peer, round: 1.0)
    assert log.waits == [0.0] * 100
    for round in range(20):
        assert sum(log.outcomes[peer, round] is None for peer in PEERS) == 1


def test_a_late_partner_is_waited_for_but_not_longer_than_the_wait():
    log = Log(Simulation(["a", "b"], wait=WAIT), 1, lambda peer, round: 2.5 if peer == "b" else 0.0)
    assert log.outcomes["a", 0].members == ("a", "b")
    assert log.waits == [2.5, 0.0] or log.waits == [0.0, 2.5]
    log = Log(Simulation(["a", "b"], wait=WAIT), 1, lambda peer, round: 5.0 if peer == "b" else 0.0)
    assert log.outcomes == {("a", 0): None, ("b", 0): None}
    assert log.ends == {"a": WAIT, "b": 5.0}  # the late one finds nobody and goes on at once


def test_a_lost_contribution_leaves_its_whole_group_without_a_mean():
    faults = Faults(drop=lambda peer, key: (peer, key.round) == ("b", 1))
    log = Log(Simulation(PEERS, size=5, wait=WAIT, faults=faults), 3, lambda peer, round: 0.0)
    assert [[log.outcomes[peer, round] is None for peer in PEERS] for round in range(3)] == [[False] * 5, [True] * 5, [False] * 5]


def test_a_delayed_contribution_arrives_after_the_delay():
    log = Log(Simulation(["a", "b"], wait=WAIT, faults=Faults(delay=lambda peer, key: 1.25)), 1, lambda peer, round: 0.0)
    assert log.ends == {"a": 1.25, "b": 1.25}
    assert log.outcomes["a", 0].members == ("a", "b")


def test_when_a_peer_dies_the_others_pair_up_anew_at_once():
    alive = {"a", "b", "c", "d", "e"} - {"c"}
    log = Log(Simulation(PEERS, wait=WAIT, faults=Faults(kill={"c": 5.5})), 20, lambda peer, round: 1.0)
    assert set(log.ends) == alive
    for round in range(6, 20):
        assert all(log.outcomes[peer, round] is not None for peer in alive)
    assert max(log.waits) == 0.0


def test_the_dead_waiting_peer_is_gone_even_if_another_acts_at_the_very_moment():
    log = Log(Simulation(["a", "b"], wait=WAIT, faults=Faults(kill={"b": 2.0})), 1, lambda p, round: 2.0 if p == "a" else 0.0)
    assert log.outcomes == {("a", 0): None}
    assert log.ends == {"a": 2.0}


def test_nobody_waits_on_for_a_peer_that_came_to_its_end():
    def peer(exchange):
        if exchange.peer == "b":
            exchange.sleep(1.0)
            return None
        assert exchange.start(Contribution(RoundKey("run", 0), [one_hot("a")])).result() is None
        return exchange.simulation.now

    assert Simulation(["a", "b"], wait=WAIT).run(peer) == {"a": 1.0, "b": None}


def test_a_shorter_deadline_counts_and_the_exchange_is_over_then():
    def peer(exchange):
        if exchange.peer == "b":
            exchange.sleep(2.0)
        handle = exchange.start(Contribution(RoundKey("run", 0), [one_hot(exchange.peer)]))
        waiting = not handle.done()
        first = handle.result(0.5)
        return waiting, first, handle.done(), handle.result(), exchange.simulation.now

    assert Simulation(["a", "b"]).run(peer) == {"a": (True, None, True, None, 0.5), "b": (False, None, True, None, 2.0)}


def test_the_contribution_is_copied_at_the_start():
    def peer(exchange):
        tensor = one_hot(exchange.peer).clone()
        handle = exchange.start(Contribution(RoundKey("run", 0), [tensor]))
        tensor.fill_(9.0)
        exchange.sleep(1.0)
        return handle.result().tensors[0]

    results = Simulation(["a", "b"]).run(peer)
    assert results["a"].tolist() == results["b"].tolist() == [0.5, 0.5, 0, 0, 0]
    results["a"].zero_()
    assert results["b"].tolist() == [0.5, 0.5, 0, 0, 0]


def test_peers_of_different_runs_never_meet():
    def peer(exchange):
        return exchange.start(Contribution(RoundKey(exchange.peer, 0), [one_hot(exchange.peer)])).result()

    assert Simulation(["a", "b"], wait=WAIT).run(peer) == {"a": None, "b": None}


def test_an_exception_of_a_peer_surfaces_and_the_others_come_to_their_end():
    ended = []

    def peer(exchange):
        for round in range(3):
            if exchange.peer == "b" and round == 1:
                raise ZeroDivisionError("my own bug")
            exchange.sleep(1.0)
            exchange.start(Contribution(RoundKey("run", round), [one_hot(exchange.peer)])).result()
        ended.append((exchange.peer, exchange.simulation.now))

    with pytest.raises(ZeroDivisionError, match="my own bug"):
        Simulation(["a", "b", "c"], wait=WAIT).run(peer)
    assert ended == [("a", 3.0), ("c", 3.0)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("peer-") and not thread.daemon]


@pytest.mark.parametrize("seed", [0, 1])
def test_training_gives_the_same_bits_for_the_same_seed_and_others_for_another(seed):
    def peer(exchange):
        generator = torch.Generator().manual_seed(PEERS.index(exchange.peer))
        weight = torch.nn.Parameter(torch.zeros(50))
        opt = NoLoCo(torch.optim.AdamW([weight], lr=0.1), exchange, every=3, lag=0)
        for _ in range(30):
            opt.zero_grad()
            (weight - torch.randn(50, generator=generator)).square().sum().backward()
            opt.step()
            exchange.sleep(float(torch.rand((), generator=generator)))
        return weight.detach()

    def run(seed):
        delay, drop = (lambda p, key: 0.3 * (key.round % 2)), (lambda p, key: p == "c" and key.round == 4)
        faults = Faults(delay, drop, kill={"e": 9.0})
        return torch.stack(list(Simulation(PEERS, seed=seed, faults=faults).run(peer).values()))

    first = run(seed)
    assert first.shape == (4, 50)
    assert torch.equal(first, run(seed))
    assert not torch.equal(first, run(seed + 1))


def test_a_simulation_runs_once() -> None:
    simulation = Simulation(["a"])
    simulation.run(lambda exchange: None)
    with pytest.raises(RuntimeError, match="make a new one"):
        simulation.run(lambda exchange: None)


def test_tensors_of_finished_rounds_are_released() -> None:
    simulation = Simulation(["a", "b", "c"])

    def peer(exchange):
        for round in range(5):
            exchange.start(Contribution(RoundKey("r", round), [torch.zeros(4)])).result()

    simulation.run(peer)
    assert all(not tensors for _, _, tensors in simulation._posted.values())


def test_groups_stay_for_the_rounds_of_an_epoch_and_are_then_drawn_anew():
    log = Log(Simulation(PEERS, size=2, redrawn=4), 16, lambda peer, round: 0.0)
    members = [frozenset(log.outcomes[peer, round].members for peer in PEERS if log.outcomes[peer, round]) for round in range(16)]
    assert all(len(set(members[epoch : epoch + 4])) == 1 for epoch in range(0, 16, 4))
    assert len(set(members)) > 1
