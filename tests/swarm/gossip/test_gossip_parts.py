"""The parts of gossip by themselves: quotas, bounded queues and tables, fetching, and the end of a
node that still has records to publish."""

import asyncio
import copy
import functools

import pytest

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.gossip import bodies as bodies_module
from shoal.swarm.gossip import gossip as module
from shoal.swarm.gossip.bodies import (
    FETCHERS,
    MAX_PER_PUBLISHER,
    MAX_SOURCES,
    MAX_WAITING,
    BodyFetcher,
    BodyStore,
)
from shoal.swarm.gossip.envelope import BodyAnnouncement, BoundedQueue
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.gossip.outbox import MAX_MESSAGES
from shoal.swarm.identity import Identity
from shoal.swarm.internal_errors import InternalErrors
from shoal.swarm.manifest import swarm_id
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.topics.rollout_pool import RolloutPool
from tests.support.clock import Clock
from tests.support.loop_thread import LoopThread
from tests.support.reasons import raises_for

SWARM = swarm_id(b"")
PEERS = [Identity.ephemeral().peer_id for _ in range(6)]


def on_loop(test):
    """Run a test that is a coroutine; what it has begun is cancelled as it ends."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def test_a_quota_is_used_up_and_refills_with_time():
    clock = Clock()
    quotas = TokenBuckets(RateLimit(messages=60, nbytes=600), clock)
    assert all(quotas.take("a", 1, 0) for _ in range(60))
    assert not quotas.take("a", 1, 0)
    assert quotas.take("b", 1, 600)
    assert not quotas.take("b", 1, 1)  # bytes are used up, and the message is not charged
    clock.now = 1.0
    assert quotas.take("a", 1, 10)
    assert not quotas.take("a", 1, 0)
    assert quotas.take("b", 1, 10)
    clock.now = 1000.0
    assert all(quotas.take("a", 1, 10) for _ in range(60))
    assert not quotas.take("a", 1, 0)


def test_a_clock_that_goes_back_refills_nothing():
    clock = Clock()
    quotas = TokenBuckets(RateLimit(messages=1, nbytes=1), clock)
    assert quotas.take("a", 1, 1)
    clock.now = -1000.0
    assert not quotas.take("a", 1, 0)


def test_made_up_senders_displace_nobody_present():
    """Made up senders do not push out those who are here."""
    clock = Clock()
    quotas = TokenBuckets(RateLimit(messages=60, nbytes=60, senders=3), clock)
    assert all(quotas.take(sender, 1, 0) for sender in "abc")
    assert not quotas.take("d", 1, 0)
    assert quotas.take("a", 59, 0)
    clock.now = 1.0  # b and c are as if they had never sent anything
    assert quotas.take("d", 1, 0)
    assert quotas.take("e", 1, 0)
    assert not quotas.take("f", 1, 0)
    assert not quotas.take("a", 2, 0)  # its account was kept


def test_a_bounded_queue_drops_the_oldest():
    box = BoundedQueue(items=2, nbytes=100)
    assert box.put("a", 10) == box.put("b", 10) == []
    assert box.put("c", 10) == ["a"]
    assert box.put("d", 95) == ["b", "c"]
    assert box.put("e", 200) == ["d", "e"]
    assert len(box) == 0


@on_loop
async def test_a_bounded_queue_is_filled_from_another_thread():
    box = BoundedQueue(items=9, nbytes=9)
    waiting = asyncio.ensure_future(box.get())
    await asyncio.sleep(0)
    await asyncio.get_running_loop().run_in_executor(None, box.put, "a", 1)
    assert await asyncio.wait_for(waiting, 5) == "a"
    box.put("b", 1)
    box.put("c", 1)
    assert [await box.get(), await box.get()] == ["b", "c"]


def test_newest_entries_are_kept():
    """The newest entries are kept and a copy has the same bound."""
    kept = Newest(2)
    for key in ("a", "b", "a", "c"):
        kept[key] = None
    assert list(kept) == ["a", "c"]
    again = copy.copy(kept)
    again["d"] = None
    assert (list(again), list(kept)) == (["c", "d"], ["a", "c"])


def test_a_body_store_is_bounded(network):
    body_store = BodyStore(network.host(), SWARM, bodies=2, nbytes=10)
    for body in (b"one", b"two", b"three"):
        body_store.put(body)
    assert list(body_store._bodies.values()) == [b"two", b"three"]
    body_store.put(b"0123456789")
    assert list(body_store._bodies.values()) == [b"0123456789"]
    body_store.put(bytes(11))
    assert not body_store._bodies


def test_body_store_hands_out_whole_own_bodies(network):
    """A body store hands out whole bodies of its swarm only."""
    source, taker = network.host(), network.host()
    body_store, other = BodyStore(source, SWARM), BodyStore(taker, SWARM)
    stranger = BodyStore(network.host(), swarm_id(b"other"))
    body = bytes(range(256)) * 4000
    body_store.put(body)
    (digest,) = body_store._bodies

    def fetch(body_store, size):
        return taker.call(body_store.fetch(source.peer_id, digest, size, 5), 60)

    assert fetch(other, len(body)) == body
    with raises_for("unavailable", MessageError):
        fetch(stranger, len(body))
    with raises_for("digest", MessageError):
        fetch(other, 5)
    source.die()
    with pytest.raises(NetworkError):
        fetch(other, len(body))


class FakeShelf:
    """Peers that hand out bodies as and when the test says."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []
        self.gate = asyncio.Event()

    async def fetch(self, peer, sha256, nbytes, timeout):
        self.asked.append(peer)
        await self.gate.wait()
        answer = self.answers.get(peer, MessageError("Not here.", "unavailable"))
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def announcement(peer, number=0, size=9):
    digest = number.to_bytes(32, "big")
    return BodyAnnouncement(
        swarm=SWARM, peer=peer, encoding="plain", size=size, nbytes=size, sha256=digest
    )


class Fetch:
    """A `BodyFetcher` whose every outcome is kept."""

    def __init__(self, met=None, **answers):
        self.body_store = FakeShelf({PEERS[int(key[1:])]: value for key, value in answers.items()})
        self.outcomes = asyncio.Queue()
        self.fetching = BodyFetcher(
            self.body_store, self.fetched, self.outcomes.put_nowait, met=met
        )
        self.running = asyncio.ensure_future(self.fetching.run())

    async def fetched(self, publisher, encoding, size, body):
        self.outcomes.put_nowait((publisher, body))

    async def outcome(self):
        return await asyncio.wait_for(self.outcomes.get(), 5)

    async def busy(self):
        for _ in range(20):
            await asyncio.sleep(0)


@on_loop
async def test_every_announcer_is_asked_until_one_has_it():
    fetch = Fetch(p0=NetworkError("gone."), p1=MessageError("Another body.", "digest"), p2=b"body")
    fetch.fetching.want(PEERS[0], announcement(PEERS[0]))
    for peer in PEERS[1:]:
        with pytest.raises(MessageError) as caught:
            fetch.fetching.want(peer, announcement(peer))
        assert caught.value.reason == "replayed"
    fetch.fetching.want(
        PEERS[1], announcement(PEERS[1], size=8)
    )  # what another claims of the same digest stands apart
    await fetch.busy()
    fetch.body_store.gate.set()
    assert {await fetch.outcome(), await fetch.outcome()} == {(PEERS[0], b"body"), "digest"}
    assert sorted(fetch.body_store.asked) == sorted([PEERS[0], PEERS[1], PEERS[2], PEERS[1]])
    assert len(fetch.body_store.asked) <= MAX_SOURCES + 1
    fetch.fetching.want(PEERS[2], announcement(PEERS[2]))  # done with, so it may be asked for again
    assert await fetch.outcome() == (PEERS[2], b"body")


@on_loop
async def test_unreachable_is_asked_again_and_refusal_not(monkeypatch):
    """Who could not be reached is asked again and who refused is not."""
    monkeypatch.setattr(bodies_module, "PAUSES", (0.0, 0.0))
    busy = NetworkError("busy.")
    fetch = Fetch(p0=[busy, busy, b"body"], p1=[busy] * 3)
    fetch.body_store.gate.set()
    fetch.fetching.want(PEERS[0], announcement(PEERS[0]))
    assert await fetch.outcome() == (PEERS[0], b"body")
    fetch.fetching.want(PEERS[2], announcement(PEERS[1], 1))
    assert await fetch.outcome() == "unavailable"
    assert fetch.body_store.asked == [PEERS[0]] * 3 + [PEERS[1], PEERS[2], PEERS[1], PEERS[1]]


@on_loop
async def test_publisher_has_a_share_of_waiting_fetchers():
    """A publisher keeps no more than its share of fetchers waiting."""
    fetch = Fetch()
    for number in range(MAX_PER_PUBLISHER):
        fetch.fetching.want(PEERS[0], announcement(PEERS[0], number))
    with pytest.raises(MessageError) as caught:
        fetch.fetching.want(PEERS[0], announcement(PEERS[0], 99))
    assert caught.value.reason == "quota"
    await fetch.busy()
    assert len(fetch.body_store.asked) == FETCHERS
    fetch.body_store.gate.set()
    assert [await fetch.outcome() for _ in range(MAX_PER_PUBLISHER)] == [
        "unavailable"
    ] * MAX_PER_PUBLISHER
    fetch.fetching.want(PEERS[0], announcement(PEERS[0], 99))
    assert await fetch.outcome() == "unavailable"


@on_loop
async def test_announcers_of_one_range_leave_a_source_to_others():
    """The fault: the first four announcers were asked, and free keys that named the same body hid
    its author.
    """
    crowd = [Identity.ephemeral().peer_id for _ in range(MAX_SOURCES)]
    fetch = Fetch(met=dict.fromkeys(crowd, "10.1.0.1") | {PEERS[0]: "10.2.0.1"}, p0=b"body")
    fetch.fetching.want(crowd[0], announcement(crowd[0]))
    for peer in (*crowd[1:], PEERS[0]):
        with pytest.raises(MessageError):
            fetch.fetching.want(peer, announcement(peer))
    fetch.body_store.gate.set()
    assert await fetch.outcome() == (crowd[0], b"body")


@on_loop
async def test_bodies_of_one_range_displace_no_others():
    """Bodies of one range or of nobody met do not displace anothers."""
    fetch = Fetch(met={PEERS[0]: "10.2.0.1"}, p0=b"body")
    fetch.fetching.want(PEERS[0], announcement(PEERS[0]))
    for number in range(1, 2 * MAX_WAITING):
        fetch.fetching.want(f"publisher {number}", announcement(PEERS[1], number))
    assert [await fetch.outcome() for _ in range(MAX_WAITING)] == ["overflow"] * MAX_WAITING
    assert fetch.outcomes.empty()
    fetch.body_store.gate.set()
    assert (PEERS[0], b"body") in [await fetch.outcome() for _ in range(FETCHERS)]


ME = Identity.ephemeral()
LONG = 30.0


class Host(LoopThread):
    """A host whose daemon is away until it is allowed to run."""

    def __init__(self):
        super().__init__()
        self.alive, self.met = False, {}

    def serve(self, *args, **kwargs):
        pass

    def allow(self):
        self.alive = True


async def tasks():
    return len(asyncio.all_tasks())


@pytest.fixture
def host():
    made = Host()
    yield made
    while made.call(tasks(), LONG) > 1:  # those of a closed topic end
        pass
    made.close()


@pytest.fixture
def pool(host):
    gossip = Gossip(host, ME, "a" * 52, members=dict)
    yield RolloutPool(gossip, lambda *env: True)
    gossip.close()


def publish(pool, count):
    for index in range(count):
        pool.publish(
            pool.make(
                env="e",
                env_version="1",
                env_config=b"{}",
                seed=1,
                index=index,
                completions=("x",),
                finish=("stop",),
                policy_version=0,
                temperature=1.0,
            )
        )


def test_records_that_wait_are_published_before_flush_returns(host, pool):
    publish(pool, 3)
    assert not pool.topic.flush(0.05)
    assert pool.counts["sent"] == 0
    host.allow()
    assert pool.topic.flush(LONG)
    assert pool.counts["sent"] == 3
    assert pool.topic.flush(0.0)


def test_unpublishable_record_is_given_up(host, pool, monkeypatch):
    """What cannot be published is given up and not waited for."""
    host.internal_errors = InternalErrors()

    def fail(*_):
        raise ValueError("a bug")

    monkeypatch.setattr(module.envelope, "make_body", fail)
    host.allow()
    publish(pool, 2)
    assert pool.topic.flush(LONG)
    assert (pool.counts["sent"], pool.counts["unsent"]) == (0, 2)
    assert host.internal_errors.total == 2


def test_what_the_outbox_dropped_is_not_waited_for(host, pool):
    publish(pool, MAX_MESSAGES + 5)
    host.allow()
    assert pool.topic.flush(LONG)
    assert pool.counts["sent"] + pool.counts["unsent"] == MAX_MESSAGES + 5
