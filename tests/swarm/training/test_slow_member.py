"""What a node says that waits in each round: who is slow, or that the network is."""

from types import SimpleNamespace

import pytest

from shoal.optim import RoundInfo, RoundKey, Seconds, Steps, Tokens
from shoal.swarm.exchange.cost import UNEVEN_SHARE
from shoal.swarm.identity import Identity
from shoal.swarm.training.group_speeds import group_speeds
from shoal.swarm.training.lag_report import LATE_ROUNDS, WAITED_S, LagReport
from tests.support.clock import Clock
from tests.support.records import member_of

ME, ANNA, BERT, CARL = (Identity.ephemeral().peer_id for _ in range(4))
NAMES = {ME: "me", ANNA: "anna", BERT: "bert", CARL: "carl"}
EVERY = 16
STEP_S = 0.1
QUARTER = {ME: 10.0, ANNA: 10.0, BERT: 2.5}
"""Inner steps a second, of one member a quarter of the others'."""
FOR_BERT_S = EVERY * (1 / QUARTER[BERT] - STEP_S)
"""What a quick node waits for it in each round."""
NETWORK = "Exchanges take this node longer than a round"


class Node:
    """A node that has averaged with everyone of ``speeds``, all of whose exchanges take a round."""

    def __init__(self, speeds, *, length=None, rate=None):
        self.speeds = dict(speeds)
        self.clock = Clock()
        opt = SimpleNamespace(
            lag=EVERY,
            lag_auto=True,
            schedule=SimpleNamespace(every=EVERY),
            shapes=[(250, 250)],
            length=length or Steps(),
        )
        self.report = LagReport(opt, lambda: rate, self.clock, self._group_speeds)
        self.said = []
        self.rounds = 0

    def _group_speeds(self, group):
        members = {
            peer: member_of(peer, name=NAMES[peer], steps_per_s=speed)
            for peer, speed in self.speeds.items()
        }
        return group_speeds(members, group, ME)

    def wait(self, seconds, rounds=LATE_ROUNDS + 1, sent=0):
        """Compute ``rounds`` rounds and wait so long in each; return what is said meanwhile."""
        before = len(self.said)
        for _ in range(rounds):
            self.rounds += 1
            self.clock.now += EVERY * STEP_S + seconds
            info = RoundInfo(
                RoundKey("run", self.rounds), tuple(self.speeds), EVERY * self.rounds, EVERY
            )
            self.report.on_round(info, seconds, sent)
            self.said += [said for _, said in self.report.news()]
        return self.said[before:]


def test_slow_member_is_named_once_with_its_cost():
    assert Node(QUARTER).wait(FOR_BERT_S, 3 * LATE_ROUNDS) == [
        "bert is slow: an inner step takes it 400 ms and this node 100 ms, and all wait for the "
        "slowest in every round, so this node computes 25 % of the time: free its processor, or "
        "begin the swarm again with `--round seconds:auto`, in which nobody waits for it, with "
        "this method or, as `shoal plan --uneven` advises, with pairs (`--method noloco`)."
    ]


def test_slow_member_is_named_before_the_link():
    """In the time that it takes the link carries all that is sent."""
    (said,) = Node(QUARTER, rate=125_000.0).wait(FOR_BERT_S, sent=500_000)
    assert said.startswith("bert is slow: ")


@pytest.mark.parametrize(
    "speeds",
    [
        {ME: 10.0, ANNA: 10.0, BERT: 9.7},
        {ME: 2.5, ANNA: 10.0, BERT: 10.0},
    ],
    ids=["alike", "slowest"],
)
def test_network_is_named_where_nobody_is_slower(speeds):
    (said,) = Node(speeds).wait(2.0)
    assert said.startswith(NETWORK)


def test_network_is_named_for_most_of_a_wait():
    (said,) = Node(QUARTER).wait(2.1 * FOR_BERT_S)
    assert said.startswith(NETWORK)
    (said,) = Node(QUARTER).wait(1.9 * FOR_BERT_S)
    assert said.startswith("bert is slow: ")


def test_member_that_is_a_little_slower_is_no_news():
    """A group brings more than the wait for it costs, and the network has no part in that."""
    speeds = {ME: 10.0, ANNA: 10.0, BERT: 8.8}
    assert Node(speeds).wait(EVERY * (1 / 8.8 - STEP_S)) == []


def test_node_that_is_about_as_slow_names_nobody():
    speeds = {ME: 2.5, ANNA: 10.0, BERT: 2.45}
    assert Node(speeds).wait(EVERY * (1 / 2.45 - 1 / 2.5)) == []


def test_slow_member_that_comes_later_is_named_too():
    node = Node({ME: 10.0, ANNA: 10.0})
    (first,) = node.wait(2.0)
    assert first.startswith(NETWORK)
    node.speeds = QUARTER
    (second,) = node.wait(FOR_BERT_S)
    assert second.startswith("bert is slow: ")


def test_network_is_not_named_for_a_slow_member_that_left():
    """The fault: what had been waited for it was laid to the link once it was gone."""
    node = Node(QUARTER)
    node.wait(FOR_BERT_S, LATE_ROUNDS - 1)
    node.speeds = {ME: 10.0, ANNA: 10.0}
    assert node.wait(2.0, LATE_ROUNDS - 1) == []
    assert len(node.wait(2.0, 1)) == 1


def test_uneven_is_less_than_a_share_of_the_mean():
    limit = 2 * 10.0 * UNEVEN_SHARE / (3 - UNEVEN_SHARE)
    for slowest, uneven in ((limit - 0.01, True), (limit + 0.01, False)):
        members = {
            peer: member_of(peer, steps_per_s=speed)
            for peer, speed in {ME: 10.0, ANNA: 10.0, BERT: slowest}.items()
        }
        assert group_speeds(members, members, ME).uneven is uneven


def test_only_members_of_the_exchange_count():
    """One that is left out, or has just come, holds nobody up."""
    members = {
        peer: member_of(peer, name=NAMES[peer], steps_per_s=speed)
        for peer, speed in {**QUARTER, CARL: 0.1}.items()
    }
    assert group_speeds(members, tuple(QUARTER), ME) == (10.0, 7.5, 2.5, "bert")


@pytest.mark.parametrize("unknown", [ME, ANNA, BERT], ids=["me", "anna", "bert"])
def test_nothing_is_blamed_before_all_speeds_are_known(unknown):
    """A record is some seconds old: quick rounds had blamed the network before it came."""
    node = Node({**QUARTER, unknown: 0.0})
    assert node.wait(FOR_BERT_S) == []
    node.speeds = QUARTER
    (said,) = node.wait(FOR_BERT_S, 1)
    assert said.startswith("bert is slow: ")


@pytest.mark.parametrize("length", [Seconds(1.6, Clock()), Tokens(100)], ids=["seconds", "tokens"])
def test_speeds_count_in_rounds_of_steps_alone(length):
    (said,) = Node(QUARTER, length=length).wait(FOR_BERT_S)
    assert said.startswith(NETWORK)


def test_one_round_without_a_wait_begins_the_count_anew():
    node = Node(QUARTER)
    node.wait(FOR_BERT_S, LATE_ROUNDS - 1)
    node.wait(WAITED_S, 1)
    assert node.wait(FOR_BERT_S, LATE_ROUNDS - 1) == []
    assert len(node.wait(FOR_BERT_S, 1)) == 1
