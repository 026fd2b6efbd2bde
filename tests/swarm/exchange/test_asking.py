"""How an exchange was decided is asked over a slow link too, in virtual time."""

import pytest

from shoal.swarm.exchange.group.decisions import DecisionLog
from shoal.swarm.exchange.pair.transfer import PairTransfer
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.wire.envelope import KIB
from tests.sim.clock import VirtualLoop
from tests.sim.isolation import isolated
from tests.sim.network import Links, SimNetwork, Trace

SWARM, NONCE = "a" * 52, bytes(16)
ONE_WAY_S = 0.35
"""Over a satellite, to the ground and back at both ends."""
TIMEOUTS = ExchangeTimeouts()


class Two:
    """Two hosts that are far apart: the first asks, the second knows."""

    def __init__(self, loop):
        self.loop = loop
        self.network = SimNetwork(loop, 1, Links(ONE_WAY_S, 0.0, 1e6), Trace())
        self.identities = [self.network.identity(name) for name in ("asks", "knows")]
        self.asks, self.knows = (self.network.host(one.peer_id, one) for one in self.identities)

    def run(self, work):
        return self.loop.run_until_complete(work)


@pytest.fixture
def two():
    loop = VirtualLoop(busy=10_000_000)
    with isolated(loop):
        made = Two(loop)
        yield made
        made.network.end()


def test_a_callee_learns_the_outcome_over_a_slow_link(two):
    """The fault: it had a second, in which a new stream and an answer had to fit."""
    callee, caller = PairTransfer(two.asks, TIMEOUTS), PairTransfer(two.knows, TIMEOUTS)
    caller._settle((two.asks.peer_id, NONCE), "committed", b"blocks")
    assert two.run(callee._ask(two.knows.peer_id, NONCE, KIB)) == b"blocks"


def test_a_member_learns_the_decision_over_a_slow_link(two):
    member, leader = (
        DecisionLog(host, identity, SWARM, TIMEOUTS.asking)
        for host, identity in zip((two.asks, two.knows), two.identities, strict=True)
    )
    leader.expect(NONCE)
    sealed = leader.settle(NONCE, 3)
    peer = two.knows.peer_id
    assert two.run(member.ask(peer, NONCE, [(peer, ())])) == sealed


def test_who_never_answers_is_not_waited_for(two):
    callee = PairTransfer(two.asks, TIMEOUTS)
    PairTransfer(two.knows, TIMEOUTS)
    two.network.part({two.asks.peer_id: 0, two.knows.peer_id: 1})
    assert two.run(callee._ask(two.knows.peer_id, NONCE, KIB)) is None
    assert two.loop.time() <= TIMEOUTS.asking
