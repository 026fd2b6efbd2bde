"""Gossip among four real hosts: everybody receives everything once, large or small, also after a
daemon was killed.
"""

import functools
import hashlib
import itertools
import os
import signal
import zlib

import psutil
import pytest

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.gossip.envelope import Body, make_announcement, make_body, make_envelope
from shoal.swarm.p2p.rate_limit import RateLimit
from shoal.swarm.topics.rollout import Rollout
from shoal.swarm.wire.envelope import seal
from tests.support import gossip_nodes as nodes
from tests.support.gossip_nodes import SWARM
from tests.support.waiting import until


class Node(nodes.Node):
    """A host that takes part in the topic of rollouts and keeps what it gets."""

    def __init__(self, bootstrap=(), quota=None, handler=None, **options):
        super().__init__(bootstrap, **options)
        self.got = []
        self.topic = self.gossip.join(
            Rollout, handler or (lambda author, record: self.got.append((author, record))), quota
        )

    def record(self, **changes):
        return nodes.rollout_of(self.identity.peer_id, **changes)

    def large(self):
        """About 1.4 MB on the wire."""
        return self.record(
            completions=tuple(os.urandom(16_000).hex() for _ in range(64)), finish=("length",) * 64
        )

    def publish_raw(self, data):
        super().publish_raw(self.topic, data)

    @property
    def rejected(self):
        return self.topic.counters.rejected()

    @property
    def received(self):
        return self.topic.counters.events().get("received", 0)


def meet(all_of_them):
    """Wait until each knows that all others listen, over a stream that stays."""
    for node, other in itertools.permutations(all_of_them, 2):
        peer = other.identity.peer_id
        until(lambda node=node, other=other: nodes.are_linked(node, other))
        until(lambda node=node, peer=peer: peer in node.topic.listeners())


@pytest.fixture
def start():
    """Make so many nodes that know each other; ``last``: the options of the last one."""
    made = []

    def start(count, **last):
        for number in range(count):
            made.append(
                Node(
                    made[0].host.addresses() if made else (),
                    **(last if number == count - 1 else {}),
                )
            )
        meet(made)
        return list(made)

    yield start
    for node in made:
        node.close()


@pytest.fixture
def four(start):
    return start(4)


@pytest.fixture
def two(start):
    return start(2)


def repacked(record, identity):
    """Return another envelope of the same record than `make_envelope` makes."""
    body = make_body(record, identity)
    sealed = seal(record, identity)
    other = Body("plain", len(sealed), sealed)
    if body.encoding == "plain":
        other = Body("zlib", len(sealed), zlib.compress(sealed))
    return make_envelope(SWARM, other)


def in_order(found):
    return sorted(found, key=lambda item: item[1].nonce)


@pytest.mark.ci
def test_everybody_receives_what_the_others_publish_once(four):
    published = [
        (node.identity.peer_id, node.record(index=index)) for node in four for index in range(5)
    ]
    published += [(node.identity.peer_id, node.large()) for node in four]
    by_peer = {node.identity.peer_id: node for node in four}
    for peer, record in published:
        by_peer[peer].topic.publish(record)
    for node in four:
        foreign = [item for item in published if item[0] != node.identity.peer_id]
        until(lambda node=node, foreign=foreign: len(node.got) == len(foreign))
        assert in_order(node.got) == in_order(foreign)
        until(
            lambda node=node: (
                node.topic.counters.events()
                == {"sent": 6, "unsent": 0, "received": 18, "accepted": 18}
            )
        )
        assert not any(node.rejected.values())


def test_a_record_that_is_published_again_is_taken_once(four):
    first, second, *others = four
    record = first.record()
    first.topic.publish(record)
    for node in (second, *others):
        until(lambda node=node: node.got)
    second.publish_raw(repacked(record, first.identity))  # other bytes, the same record
    for node in others:
        until(lambda node=node: node.rejected.get("replayed") == 1)
        assert node.got == [(first.identity.peer_id, record)]
    until(lambda: first.rejected.get("replayed") == 1)  # its own, from another
    assert not first.got


@pytest.mark.ci
def test_killed_daemon_is_subscribed_again(four):
    """A killed daemon is subscribed again and what waited is sent."""
    victim, other = four[2], four[1]
    (p2pd,) = psutil.Process(victim.host._supervisor.daemon._child.pid).children()
    os.kill(p2pd.pid, signal.SIGKILL)
    until(lambda: not victim.host.alive)
    mine, theirs = victim.record(), other.record()
    victim.topic.publish(mine)
    until(lambda: victim.host.restarts == 1 and victim.host.alive)
    meet(four)
    other.topic.publish(theirs)
    until(lambda: (other.identity.peer_id, theirs) in victim.got)
    for node in four:
        if node is not victim:
            until(lambda node=node: (victim.identity.peer_id, mine) in node.got)


def test_gossip_survives_its_first_node(four):
    """The others go on without the node they all joined by."""
    first, *rest = four
    first.close()
    meet(rest)
    published = [
        (node.identity.peer_id, record) for node in rest for record in (node.record(), node.large())
    ]
    by_peer = {node.identity.peer_id: node for node in rest}
    for peer, record in published:
        by_peer[peer].topic.publish(record)
    newcomer = Node(rest[0].host.addresses())
    try:
        meet([*rest, newcomer])
        late = newcomer.record()
        newcomer.topic.publish(late)
        for node in rest:
            expected = [item for item in published if item[0] != node.identity.peer_id] + [
                (newcomer.identity.peer_id, late)
            ]
            until(lambda node=node, expected=expected: in_order(node.got) == in_order(expected))
    finally:
        newcomer.close()


def test_a_publisher_has_a_quota(start):
    first, second = start(2, quota=RateLimit(messages=5, nbytes=1 << 20))
    for index in range(8):
        first.topic.publish(first.record(index=index))
    until(lambda: second.rejected.get("quota") == 3)
    assert len(second.got) == 5
    assert second.received == 8


def test_repeating_a_message_does_not_use_up_its_publishers_quota(start):
    first, second = start(2, quota=RateLimit(messages=2))
    first.send_frames(first.topic, *[first.seal(first.record())] * 5)
    first.topic.publish(first.record())
    until(lambda: second.received == 2 and len(second.got) == 2)
    assert not any(second.rejected.values())
    assert second.gossip.neighbours.counters.rejected() == {"replayed": 4}


def test_quota_counts_what_a_body_decompresses_to(start):
    first, second = start(2, quota=RateLimit(messages=100, nbytes=1 << 20))
    for _ in range(3):
        first.topic.publish(first.record(completions=("0" * 20_000,) * 20, finish=("stop",) * 20))
    until(lambda: second.rejected.get("quota") == 1)
    assert len(second.got) == 2
    assert second.received == 3


def test_wrong_body_costs_one_record(two):
    """A body that is not the announced one costs one record."""
    first, second = two
    body = make_body(first.large(), first.identity)
    data = make_announcement(SWARM, body, first.identity)
    other = bytearray(body.data)
    other[100] ^= 1
    first.gossip.body_store._bodies[hashlib.sha256(body.data).digest()] = bytes(other)
    first.publish_raw(data)
    until(lambda: second.rejected.get("digest") == 1)
    good = first.large()
    first.topic.publish(good)
    until(lambda: second.got == [(first.identity.peer_id, good)])
    assert {reason for reason, count in second.rejected.items() if count} == {"digest"}


def test_a_body_of_another_size_is_refused(two):
    first, second = two
    body = make_body(first.large(), first.identity)
    data = make_announcement(SWARM, body, first.identity)
    first.gossip.body_store._bodies[hashlib.sha256(body.data).digest()] = body.data + b"more"
    first.publish_raw(data)
    until(lambda: second.rejected.get("digest") == 1)


@pytest.mark.ci
def test_a_body_whose_author_is_gone_costs_one_record(four):
    gone, publisher, reader, _ = four
    body = make_body(gone.large(), gone.identity)
    data = make_announcement(SWARM, body, gone.identity)
    gone.close()
    publisher.publish_raw(data)  # passed on by one who does not hold the body
    until(lambda: reader.rejected.get("unavailable") == 1)
    good = publisher.record()
    publisher.topic.publish(good)
    until(lambda: reader.got == [(publisher.identity.peer_id, good)])


def test_a_body_is_taken_from_whoever_announced_it(four):
    author, announcer, reader, _ = four
    record = author.large()
    body = make_body(record, author.identity)
    data = make_announcement(SWARM, body, announcer.identity)
    announcer.gossip.body_store.put(body.data)
    announcer.publish_raw(data)
    until(lambda: reader.got == [(author.identity.peer_id, record)])


def test_a_body_that_claims_too_much_is_not_fetched(two):
    first, second = two
    data = make_announcement(SWARM, Body("zlib", 5 << 20, b"small"), first.identity)
    first.publish_raw(data)
    until(lambda: second.rejected.get("oversized") == 1)


def test_a_handler_that_fails_costs_one_record(start):
    taken = []

    def handler(author, record):
        if record.index == 1:
            raise KeyError("a bug")
        if record.index == 2:
            raise MessageError("I do not like it.", "ugly")
        taken.append(record.index)

    first, second = start(2, handler=handler)
    for index in range(4):
        first.topic.publish(first.record(index=index))
    until(lambda: sorted(taken) == [0, 3])
    until(lambda: second.topic.counters.events() == {"received": 4, "accepted": 2})
    until(lambda: {k: v for k, v in second.rejected.items() if v} == {"failed": 1, "ugly": 1})


def test_what_cannot_be_published_is_said_at_once(two):
    first, second = two
    with pytest.raises(MessageError) as refused:
        first.topic.publish(second.record())
    assert refused.value.reason == "forged"
    huge = ("x" * 32_768,) * 64
    tokens = tuple(bytes(40_000) for _ in range(64))
    record = first.record(
        completions=huge, finish=("stop",) * 64, tokens=tokens, logps=tokens, tokenizer="0" * 64
    )
    with pytest.raises(MessageError) as refused:
        first.topic.publish(record)
    assert refused.value.reason == "oversized"


def test_a_closed_topic_is_silent(two):
    first, second = two
    second.gossip.close()
    until(lambda: second.topic._running.done())
    first.topic.publish(first.record())
    until(lambda: first.topic.counters.events().get("sent") == 1)
    assert not second.got
    second.host.close()
    with pytest.raises(NetworkError):
        second.topic.listeners()


def test_nodes_that_use_no_relay_hear_each_other():
    make = functools.partial(Node, relay="off")
    with nodes.two(make) as both:
        meet(both)
        for node, other in (both, both[::-1]):
            published = [node.record(), node.large()]
            for record in published:
                node.topic.publish(record)
            expected = [(node.identity.peer_id, record) for record in published]
            until(lambda other=other, expected=expected: in_order(other.got) == in_order(expected))
