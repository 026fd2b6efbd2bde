"""Statuses go out when there is news, and now and then; how often depends on how many nodes there
are.
"""

import threading

import pytest

from shoal.swarm.topics.status import (
    BEAT_S,
    GAP_S,
    PER_SECOND,
    RecordPublisher,
    Status,
)
from shoal.swarm.wire.record import Progress, Round
from tests.support import gossip_nodes as nodes
from tests.support.gossip_nodes import SWARM
from tests.support.waiting import until


class Node(nodes.Node):
    made = 0

    def status(self):
        self.made += 1
        return Status(
            swarm=SWARM,
            peer=self.identity.peer_id,
            name="anna",
            addresses=(),
            progress=Progress(state="training", round=self.made, step=1),
            issued=float(self.made),
            version="1",
            rounds=(
                Round(
                    round=1,
                    step=1,
                    loss=1.0,
                    members=2,
                    partners=(),
                    bytes_sent=1,
                    bytes_received=1,
                    wait_s=0.0,
                ),
            ),
        )


def test_nodes_check_what_they_only_pass_on():
    with nodes.two(Node) as both:
        speaker, watcher = both
        heard = []
        first = RecordPublisher(speaker.gossip, Status, speaker.status, lambda: 2)
        second = RecordPublisher(
            watcher.gossip,
            Status,
            watcher.status,
            lambda: 2,
            lambda author, status: heard.append((author, status)),
        )
        until(lambda: speaker.identity.peer_id in second.topic.listeners())
        first.hint()
        until(lambda: heard)
        assert heard[0][0] == speaker.identity.peer_id
        assert {status.peer for _, status in heard} == {speaker.identity.peer_id}
        until(lambda: first.topic.counters.events().get("accepted", 0) >= 1)
        assert not first.topic.counters.rejected()
        first.close()
        second.close()


@pytest.mark.ci
def test_a_status_that_cannot_be_made_costs_that_one():
    node = Node()
    made = threading.Semaphore(0)

    def make():
        made.release()
        raise ValueError("a loss that is no number")

    gossip = RecordPublisher(node.gossip, Status, make, lambda: 1)
    try:
        for _ in range(2):
            assert made.acquire(timeout=60)
    finally:
        gossip.close()
        node.close()


@pytest.mark.parametrize("members", [0, 1, 4, 10, 100, 5000])
def test_all_nodes_together_say_about_so_much(members):
    gossip = RecordPublisher.__new__(RecordPublisher)
    gossip._members, gossip._beat = lambda: members, BEAT_S
    least, most = gossip.gaps()
    assert GAP_S <= least <= most
    assert most >= BEAT_S
    assert members / least <= PER_SECOND
    assert members <= 10 or members / most == pytest.approx(PER_SECOND)
