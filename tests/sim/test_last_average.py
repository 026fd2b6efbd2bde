"""A node that is killed, or stalls, in the last average: those that are left end in time and with
one model.
"""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from shoal.optim.exchange.base import Contribution, RoundKey
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.training import last_average
from shoal.swarm.training.last_average import LONGEST_WAIT_S, LastAverage
from tests.sim.clock import VirtualLoop
from tests.sim.isolation import isolated
from tests.sim.network import Links, SimNetwork, Trace, settled
from tests.sim.peers import EPOCH, MODEL, SWARM, TTL
from tests.support.records import member_of

STEP, FLOATS = 100, 50_000
LINKS = Links(latency=0.02, jitter=0.0, bandwidth=float(FLOATS))
"""The bytes of one model take four seconds."""
MIDDLE_S, LAST_BYTES_S = 2.0, 4.18
"""When, of three peers, half of the bytes have moved, and all but the decision."""


class Ending:
    """A peer whose last step is done: its place in the swarm, and its part in the last average."""

    def __init__(self, swarm, number):
        self.swarm, self.name = swarm, f"p{number}"
        self.identity = swarm.network.identity(self.name)
        self.id = self.identity.peer_id
        self.host = swarm.network.host(self.name, self.identity)
        self.killed_at = self.ended_at = None
        self.weights, self.members = torch.full((FLOATS,), float(2**number)), ()
        directory = SimpleNamespace(
            members=swarm.members,
            look=lambda: None,
            is_barred=lambda peer: False,
            own=lambda: swarm.members()[self.id],
        )
        membership = SimpleNamespace(
            directory=directory,
            host=self.host,
            identity=self.identity,
            swarm=SWARM,
            manifest=SimpleNamespace(train=SimpleNamespace(seed=0)),
        )
        self.last = LastAverage(membership, OuterSettings(), 1, MODEL)

    async def end(self):
        """Do what `OuterOptimizer.average_over` does, in a coroutine."""
        self.last.begin(STEP)
        for number in range(2):
            contribution = Contribution(RoundKey(SWARM, number, 1), [self.weights.clone()])
            mean = await settled(self.last.inner.start(contribution))
            if mean is not None:
                self.weights, self.members = mean.tensors[0], mean.members
            if self.last.enough(self.members):
                break
        self.ended_at = self.swarm.loop.time()


class EndingSwarm:
    """So many peers at their end, on one virtual clock, of which ``victim`` is killed at
    ``fault_at``, or stalls for ``stall_s``.
    """

    def __init__(self, count, victim, fault_at, monkeypatch, stall_s=None):
        self.loop = VirtualLoop()
        monkeypatch.setattr(last_average, "time", SimpleNamespace(monotonic=self.loop.time))
        with isolated(self.loop) as errors:
            self.network = SimNetwork(self.loop, 0, LINKS, Trace())
            self.peers = [Ending(self, number) for number in range(count)]
            hit = self.peers[victim]
            self.left = [peer for peer in self.peers if peer is not hit or stall_s is not None]
            tasks = {peer: peer.host.start(peer.end()) for peer in self.peers}
            if stall_s is None:
                self.loop.call_at(fault_at, partial(self.kill, hit))
            else:
                self.loop.call_at(fault_at, partial(self.network.sleep, hit.id))
                self.loop.call_at(fault_at + stall_s, partial(self.network.wake, hit.id))
            ends = [tasks[peer] for peer in self.left]
            self.loop.run_until_complete(asyncio.wait(ends, timeout=10 * LONGEST_WAIT_S))
            for end in ends:
                end.result()
            self.network.end()
        assert errors.found == []

    def kill(self, peer):
        peer.killed_at = self.loop.time()
        self.network.kill(peer.id)

    def members(self):
        """Return who is there as all know it: the record of one that was killed outlives it."""
        now = self.loop.time()
        return {
            peer.id: member_of(
                peer.id, name=peer.name, step=STEP, model=MODEL, issued=EPOCH, finished=True
            )
            for peer in self.peers
            if peer.killed_at is None or now < peer.killed_at + TTL
        }


@pytest.mark.parametrize(
    ("victim", "kill_at", "counts"),
    [
        (0, MIDDLE_S, False),
        (1, MIDDLE_S, False),
        (2, MIDDLE_S, False),
        (0, LAST_BYTES_S, False),  # it led the group, and had not decided
        (1, LAST_BYTES_S, True),
        (2, LAST_BYTES_S, True),
    ],
)
def test_those_left_by_a_killed_node_end_with_one_model(monkeypatch, victim, kill_at, counts):
    """Mutants: there is no second try; the second waits for the killed one, whose record is there.

    ``counts``: what it sent had come, and is in the mean.
    """
    swarm = EndingSwarm(3, victim, kill_at, monkeypatch)
    one, other = swarm.left
    killed = swarm.peers[victim]
    assert killed.ended_at is None
    assert torch.equal(one.weights, other.weights)
    members = swarm.peers if counts else swarm.left
    assert set(one.members) == set(other.members) == {peer.id for peer in members}
    mean = sum(2.0**number for number, peer in enumerate(swarm.peers) if peer in members)
    torch.testing.assert_close(one.weights, torch.full((FLOATS,), mean / len(members)))
    assert max(one.ended_at, other.ended_at) < LONGEST_WAIT_S
    for peer in swarm.left:
        assert peer.last.report.missing == (() if counts else (killed.name,))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stall_s", [1.0, 6.0, 20.0])
def test_node_that_stalls_is_met_again(monkeypatch, victim, stall_s):
    """The fault: the other found it silent and led itself, and so did it: both waited out 120 s.

    Mutants: a missing member is not asked where it is; it is asked once.
    """
    swarm = EndingSwarm(2, victim, 0.001, monkeypatch, stall_s)
    one, other = swarm.left
    assert torch.equal(one.weights, other.weights)
    assert set(one.members) == set(other.members) == {one.id, other.id}
    assert max(one.ended_at, other.ended_at) < 2 * stall_s + 8.0
