"""The pool of rollouts by itself, and between two real hosts, one of which sends every hostile kind
of record.
"""

import os
import sys
import time
import zlib

import msgpack
import pytest

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.envelope import Body, GossipEnvelope, make_announcement, make_body
from shoal.swarm.gossip.gossip import Topic
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import swarm_id
from shoal.swarm.p2p.counters import Counters
from shoal.swarm.p2p.rate_limit import RateLimit
from shoal.swarm.topics.held_rollouts import PoolLimits
from shoal.swarm.topics.rollout import Rollout, pack_logps, pack_tokens
from shoal.swarm.topics.rollout_pool import REASONS, RolloutPool
from shoal.swarm.wire.envelope import ENVELOPE, pack, seal
from tests.support import gossip_nodes as nodes
from tests.support.clock import Clock
from tests.support.waiting import until

SWARM = swarm_id(b"")
ME, OTHER = Identity.ephemeral(), Identity.ephemeral()
NOW = 1_800_000_000.0
KNOWN = ("add", "1", b"\x80")


def record(identity=OTHER, **changes):
    return nodes.rollout_of(identity.peer_id, **{"issued": NOW, **changes})


# -- the pool by itself ----------------------------------------------------------------------------


class FakeTopic:
    counts = Topic.counts

    def __init__(self, handler):
        self.handler, self.counters, self.published = handler, Counters(), []

    def publish(self, message):
        self.published.append(message)


class FakeGossip:
    """Hands records to the pool as a topic does."""

    swarm, identity = SWARM, ME

    def join(self, kind, handler, quota):
        self.topic = FakeTopic(handler)
        return self.topic

    def deliver(self, rollout):
        """None, or the reason why it was refused."""
        try:
            self.topic.handler(rollout.peer, rollout)
        except MessageError as error:
            return error.reason
        return None


def pool_of(knows=lambda *env: env == KNOWN, **limits):
    gossip, clock = FakeGossip(), Clock()
    clock.now = NOW
    pool = RolloutPool(gossip, knows, limits=PoolLimits(**limits), clock=clock)
    pool.advance(10)
    return pool, gossip, clock


def test_what_came_is_drained_once_in_its_order():
    pool, gossip, _ = pool_of()
    records = [record(index=index) for index in range(5)]
    assert [gossip.deliver(item) for item in records] == [None] * 5
    assert pool.counts["held"] == 5
    assert pool.drain() == records
    assert pool.drain() == []


def test_own_records_carry_round_and_time():
    pool, gossip, _ = pool_of()
    made = pool.make(
        env="add",
        env_version="1",
        env_config=b"\x80",
        seed=1,
        index=2,
        completions=("a",),
        finish=("stop",),
        policy_version=3,
        temperature=0.5,
        tokens=(pack_tokens([1]),),
        logps=(pack_logps([-1]),),
        tokenizer="0" * 64,
    )
    assert (made.round, made.issued, made.peer, made.swarm) == (10, NOW, ME.peer_id, SWARM)
    pool.publish(made)
    assert gossip.topic.published == [made]


def test_age_is_counted_in_seconds_both_ways():
    pool, gossip, _ = pool_of(ttl=100.0)
    assert gossip.deliver(record(issued=NOW - 100)) is None
    assert gossip.deliver(record(issued=NOW - 101)) == "stale"
    assert gossip.deliver(record(issued=NOW + 59)) is None
    assert gossip.deliver(record(issued=NOW + 61)) == "future"
    assert gossip.deliver(record(round=2**53)) is None  # each node counts rounds of its own
    assert pool.counts["held"] == 3


def test_what_grows_old_in_the_pool_is_not_drained():
    pool, gossip, clock = pool_of(ttl=100.0)
    old, young = record(issued=NOW - 50), record()
    for item in (old, young):
        assert gossip.deliver(item) is None
    clock.now += 51
    assert pool.drain() == [young]
    assert gossip.deliver(record()) is None
    for number in (11, 12):  # what was issued since the last round began is kept
        pool.advance(number)
    clock.now += 50
    assert pool.drain() == []
    assert pool.counts["expired"] == 2


def test_a_node_whose_rounds_are_long_loses_nothing_of_them():
    """prime-rl #2960: what came early in a long round had expired before it could be used."""
    pool, gossip, clock = pool_of(ttl=100.0)
    early = record(issued=NOW)
    assert gossip.deliver(early) is None
    clock.now += 500
    late = record(issued=NOW + 10)
    assert gossip.deliver(late) is None  # sent early in this round, and late to come
    assert pool.drain() == [early, late]
    pool.advance(11)
    clock.now += 5
    assert gossip.deliver(record(issued=NOW)) is None
    assert gossip.deliver(record(issued=NOW - 1)) == "stale"
    for number in (12, 13):
        pool.advance(number)
    assert gossip.deliver(record(issued=clock.now - 101)) == "stale"  # its rounds are short again


def test_records_last_an_hour_at_most_however_long_a_round():
    _, gossip, clock = pool_of(ttl=100.0)
    clock.now += 1e6
    assert gossip.deliver(record(issued=clock.now - 3600)) is None
    assert gossip.deliver(record(issued=clock.now - 3601)) == "stale"


def test_a_nonce_is_taken_once_from_each_author():
    pool, gossip, _ = pool_of()
    first = record(nonce=bytes(16))
    assert gossip.deliver(first) is None
    assert gossip.deliver(first) == "replayed"
    assert gossip.deliver(record(nonce=bytes(16), index=99)) == "replayed"
    assert gossip.deliver(record(Identity.ephemeral(), nonce=bytes(16))) is None
    assert pool.counts["held"] == 2


def test_one_author_cannot_fill_the_pool():
    pool, gossip, _ = pool_of(per_sender=2)
    quiet = record(Identity.ephemeral())
    loud = [record(index=index) for index in range(4)]
    for item in (loud[0], quiet, *loud[1:]):
        assert gossip.deliver(item) is None
    assert pool.drain() == [quiet, *loud[2:]]
    assert pool.counts["displaced"] == 2


def test_the_pool_is_bounded_in_records_and_bytes():
    pool, gossip, _ = pool_of(records=3)
    records = [record(Identity.ephemeral()) for _ in range(5)]
    for item in records:
        gossip.deliver(item)
    assert pool.drain() == records[2:]
    pool, gossip, _ = pool_of(nbytes=50_000)
    records = [record(completions=("x" * 20_000, "")) for _ in range(4)]
    for item in records:
        gossip.deliver(item)
    assert pool.drain() == records[2:]
    assert pool.counts["displaced"] == 2


def test_the_pool_counts_memory_and_not_characters():
    """Fault: an emoji makes each character take four bytes, of which one was counted.

    Mutant: `nbytes` counts characters, or the bytes of UTF-8.
    """
    text = "x" * 20_000 + "\U0001f600"
    limit = 200_000
    pool, gossip, _ = pool_of(nbytes=limit)
    for _ in range(6):
        gossip.deliver(record(completions=(text, "")))
    held = pool.drain()
    taken = sum(sys.getsizeof(one) for rollout in held for one in rollout.completions)
    assert taken <= limit
    assert len(held) == 2


def test_unknown_environments_are_refused_also_when_the_question_fails():
    def knows(env, version, config):
        return (env, version, msgpack.unpackb(config)) == ("add", "1", {})

    pool, gossip, _ = pool_of(knows)
    assert gossip.deliver(record()) is None
    assert gossip.deliver(record(env="sub")) == "foreign-env"
    assert gossip.deliver(record(env_version="2")) == "foreign-env"
    assert gossip.deliver(record(env_config=b"\xc1")) == "foreign-env"
    assert gossip.deliver(record(swarm=swarm_id(b"x"))) == "foreign-swarm"
    assert pool.counts["held"] == 1


def test_banned_authors_records_are_dropped():
    """A banned author is refused and what is held of it is dropped."""
    pool, gossip, _ = pool_of()
    barred = set()
    pool.barred = barred.__contains__
    other = Identity.ephemeral()
    early, theirs, late = record(), record(other), record()
    assert [gossip.deliver(item) for item in (early, theirs)] == [None, None]
    barred.add(OTHER.peer_id)
    assert gossip.deliver(late) == "banned"
    assert pool.drain() == [theirs]
    assert (pool.counts["banned"], pool.counts["held"]) == (1, 0)
    barred.clear()
    assert (
        gossip.deliver(late) is None
    )  # a ban is over some day, and the record had not been counted as seen
    assert pool.drain() == [late]


# -- over the network ------------------------------------------------------------------------------


class Node(nodes.Node):
    def __init__(self, bootstrap=(), **limits):
        super().__init__(bootstrap)
        self.pool = RolloutPool(self.gossip, lambda *env: env == KNOWN, limits=PoolLimits(**limits))
        self.pool.advance(10)

    def record(self, **changes):
        return record(self.identity, **{"issued": time.time(), **changes})


@pytest.fixture(scope="module")
def pair():
    """An attacker and its victim."""
    with nodes.two(Node, quota=RateLimit(messages=60)) as (attacker, victim):
        until(lambda: victim.pool.topic.listeners() and attacker.pool.topic.listeners())
        yield attacker, victim


def envelope(body, **changes):
    return pack(
        GossipEnvelope(
            **{
                "swarm": SWARM,
                "encoding": body.encoding,
                "size": body.size,
                "body": body.data,
                **changes,
            }
        )
    )


def plain(sealed):
    return Body("plain", len(sealed), sealed)


def signed(node, payload):
    return envelope(
        plain(
            msgpack.packb(
                [node.identity.peer_id, payload, node.identity.sign("shoal/rollout/1", payload)]
            )
        )
    )


def sealed(node, **changes):
    return node.seal(node.record(**changes))


def elsewhere(node):
    """A record of another swarm in a parcel of this one."""
    return envelope(make_body(node.record(swarm=swarm_id(b"x")), node.identity))


def announced(node):
    return make_announcement(SWARM, Body("zlib", 300_000, os.urandom(100)), node.identity)


HOSTILE = {
    "truncated": lambda node: sealed(node)[:-9],
    "oversized": lambda node: envelope(
        make_body(node.record(), node.identity), size=Rollout.LIMIT + ENVELOPE + 1
    ),
    "nested": lambda node: signed(node, b"\x93\xa7rollout\x01" + b"\x91" * 100_000),
    "malformed": lambda node: signed(node, msgpack.packb(["rollout", 1, {}])),
    "version": lambda node: signed(node, msgpack.packb(["rollout", 2, node.record().model_dump()])),
    "kind": lambda node: signed(node, msgpack.packb(["weights", 1, node.record().model_dump()])),
    "bomb": lambda node: envelope(Body("zlib", 1000, zlib.compress(bytes(50 << 20), 9))),
    "forged": lambda node: envelope(plain(seal(record(OTHER, issued=time.time()), node.identity))),
    "foreign-swarm": elsewhere,
    "foreign-env": lambda node: sealed(node, env="mul"),
    "stale": lambda node: sealed(node, issued=time.time() - 700),
    "future": lambda node: sealed(node, issued=time.time() + 90),
    "unavailable": announced,
}


def publish(node, data):
    node.send_frames(node.pool.topic, data)


def settled(pool):
    """Whether everything that was received has met its end."""
    counts = pool.counts
    return counts["received"] == counts["accepted"] + sum(counts["rejected"].values())


def rejected_since(pool, before):
    now = pool.counts["rejected"]
    return {reason: now[reason] - before[reason] for reason in now if now[reason] != before[reason]}


@pytest.mark.parametrize("reason", HOSTILE)
def test_each_hostile_record_has_its_counter_and_nothing_else_happens(pair, reason):
    attacker, victim = pair
    before = victim.pool.counts
    publish(attacker, HOSTILE[reason](attacker))
    good = attacker.record()
    attacker.pool.publish(good)
    until(lambda: victim.pool.counts["received"] == before["received"] + 2 and settled(victim.pool))
    assert rejected_since(victim.pool, before["rejected"]) == {reason: 1}
    assert victim.pool.drain() == [good]


def test_replayed_records_have_their_counter(pair):
    attacker, victim = pair
    before = victim.pool.counts
    nonce = os.urandom(16)
    data = sealed(attacker, nonce=nonce)
    publish(attacker, data)
    publish(attacker, data)
    publish(attacker, sealed(attacker, nonce=nonce, index=3))  # signed anew
    until(lambda: victim.pool.counts["received"] == before["received"] + 2 and settled(victim.pool))
    assert rejected_since(victim.pool, before["rejected"]) == {"replayed": 1}
    assert victim.gossip.neighbours.counters.rejected() == {"replayed": 1}
    assert len(victim.pool.drain()) == 1


def test_a_flood_has_its_counter(pair):
    attacker, victim = pair
    before = victim.pool.counts
    for _ in range(80):
        publish(attacker, sealed(attacker))
    until(lambda: victim.pool.counts["received"] == before["received"] + 80)
    until(lambda: settled(victim.pool))
    assert rejected_since(victim.pool, before["rejected"])["quota"] >= 20


def test_every_reason_has_a_row_from_the_start():
    pool, _, _ = pool_of()
    assert pool.counts["rejected"] == dict.fromkeys(REASONS, 0)
    assert set(HOSTILE) | {"replayed", "quota", "overflow", "digest", "banned", "unwelcome"} == set(
        REASONS
    )
