"""Exchanges that were in flight when a peer was saved, or took over other weights: met again bit by
bit, or counted by nobody.
"""

import copy
import itertools

import pytest
import torch

from tests.support.split_swarm import Swarm
from tests.support.waiting import until

STEPS = 18


def saved(node):
    return copy.deepcopy(
        (node.opt.whole_state(), node.model.state_dict(), node.data.get_state(), list(node.rounds))
    )


def load(node, state):
    outer, model, data, rounds = state
    node.model.load_state_dict(model)
    node.data.set_state(data)
    node.opt.load_state_dict(outer)
    node.rounds = list(rounds)
    node.outer_sync.begin()


def outcome(swarm):
    """All that later steps depend on, by node; and the rounds that each was in."""
    swarm.quiet()
    found = {}
    for node in swarm.nodes:
        tensors = [
            *node.opt.slow,
            *node.model.parameters(),
            *itertools.chain(*node.opt.rule_state.values()),
        ]
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        found[node.number] = flat, (node.opt.round, node.opt.applied, node.rounds)
    return found


def step(swarm):
    list(swarm.pool.map(lambda node: node.step(), swarm.nodes))


@pytest.fixture
def swarm(network):
    made = []

    def make():
        made.append(Swarm(network, "overlapped", 2))
        return made[-1]

    yield make
    for each in made:
        each.quiet()
        each.pool.shutdown()


def test_resumed_flight_meets_in_its_own_round(swarm):
    """What was in flight is met again in its own round bit for bit."""
    straight, states = swarm(), []
    for _ in range(STEPS):
        states.append({node.number: saved(node) for node in straight.nodes})
        step(straight)
    expected = outcome(straight)
    under_way = [at for at, state in enumerate(states) if len(state[0][0]["in_flight"]) == 2]
    assert under_way
    for at in under_way[-2:]:
        resumed = swarm()
        for node in resumed.nodes:
            load(node, states[at][node.number])
        first, second = resumed.nodes
        alone = resumed.pool.submit(first.step)
        # The other has not begun yet: it holds the calls for the rounds that it will begin anew,
        # and does not send them ahead.
        until(lambda second=second: len(second.exchange.held.calls) == 2)
        second.step()
        alone.result()
        for _ in range(at + 1, STEPS):
            step(resumed)
        found = outcome(resumed)
        for number, (weights, rounds) in expected.items():
            assert found[number][1] == rounds
            assert torch.equal(found[number][0], weights)


@pytest.mark.ci
def test_what_a_peer_drops_for_others_weights_counts_nowhere(swarm):
    one, other = swarm().nodes
    met = []
    other.opt.on_round = lambda info: met.append(info.members)
    for _ in range(2):
        one.step()
    (dropped,) = one.opt._in_flight
    taken = [tensor + 1 for tensor in one.opt.slow]
    one.opt.adopt(taken, round=7, into_model=True, applied=[6, 5])
    assert not list(one.opt._in_flight)
    until(dropped.handle.done)
    for _ in range(5):
        other.step()
    assert met == [()]
    assert dropped.handle.result() is None
    for pending in list(other.opt._in_flight):
        pending.handle.close()  # its wait would be sat out
    for tensors in (one.opt.slow, one.model.parameters()):
        assert all(torch.equal(now, wanted) for now, wanted in zip(tensors, taken, strict=True))
