"""How much processor time answers may take: what is charged, to whom, and until when."""

import asyncio
import contextlib
import logging

import pytest

from shoal.swarm.p2p.processor_time import STREAM_S, ProcessorTime, TimeLimits
from shoal.swarm.p2p.resource_manager import MAX_HANDLERS_PER_PEER, ResourceManager
from tests.support.clock import Clock

PEER = TimeLimits(of_peer_s=1.0, of_range_s=3.0, period_s=60.0)
WIDE = TimeLimits(of_peer_s=30.0, of_range_s=45.0, period_s=60.0)
HOME, OTHER = "10.1.0.1", "10.2.0.1"


class Work:
    """Answers that compute for so many seconds, by clocks of their own."""

    def __init__(self):
        self.wall, self.used = Clock(), Clock()
        self.budget = ProcessorTime(self.wall, lambda: self.used.now, strangers=PEER, members=WIDE)

    async def compute(self, *steps, fails=None):
        for seconds in steps:
            self.used.now += seconds
            asyncio.get_running_loop().call_soon(self._others_compute)
            await asyncio.sleep(0)
        if fails is not None:
            raise fails
        return "done"

    def _others_compute(self):
        self.used.now += 100.0

    def answer(self, peer, *steps, host=HOME, is_member=False, **options):
        work = self.compute(*steps, **options)
        return asyncio.run(self.budget.charged(work, peer, host, is_member=is_member))

    def is_spent(self, peer, host=HOME, is_member=False):
        return not self.budget.take_stream(peer, host, is_member=is_member)


@pytest.fixture
def work():
    return Work()


def test_only_an_answers_own_steps_are_charged(work):
    assert work.answer("a", 0.3, 0.3, 0.3) == "done"
    assert not work.is_spent("a")
    work.answer("a", 0.1)
    assert work.is_spent("a")
    assert not work.is_spent("b"), "another key has its own"


def test_time_comes_back_within_a_minute(work):
    work.answer("a", 1.5)
    work.wall.now = 29.0
    assert work.is_spent("a"), "half a second is owed"
    work.wall.now = 32.0
    assert not work.is_spent("a")


def test_keys_of_one_range_share_its_time(work):
    for number in range(4):
        work.answer(f"key {number}", 0.8)
    assert work.is_spent("new key")
    assert work.is_spent("new key", "10.1.255.255")
    assert not work.is_spent("new key", OTHER)


def test_members_have_time_of_their_own(work):
    for number in range(4):
        work.answer(f"key {number}", 0.8)
    assert not work.is_spent("member", is_member=True)
    work.answer("member", 29.0, is_member=True)
    assert not work.is_spent("member", is_member=True)
    work.answer("member", 1.0, is_member=True)
    assert work.is_spent("member", is_member=True)


def test_many_refused_streams_add_up(work):
    most = round(PEER.of_peer_s / STREAM_S)
    assert [work.is_spent("a") for _ in range(most + 2)] == [False] * most + [True] * 2
    work.wall.now = 30.0
    assert [work.is_spent("a") for _ in range(most)].count(False) == most // 2


def test_a_stream_refused_for_its_range_costs_nothing(work):
    for number in range(3):
        work.answer(f"key {number}", 1.0)
    assert [work.is_spent("a") for _ in range(10_000)] == [True] * 10_000
    assert not work.is_spent("a", OTHER), "its own time is whole"
    most = round(PEER.of_peer_s / STREAM_S) - 1
    assert [work.is_spent("a", OTHER) for _ in range(most + 1)] == [False] * most + [True]


def test_an_answer_that_fails_is_charged(work):
    with pytest.raises(KeyError):
        work.answer("a", 2.0, fails=KeyError())
    assert work.is_spent("a")


def test_a_cancelled_answer_is_cleaned_up_and_charged(work):
    cleaned = []

    async def answer():
        try:
            await asyncio.sleep(60)
        finally:
            work.used.now += 2.0
            cleaned.append(True)

    async def main():
        task = asyncio.ensure_future(work.budget.charged(answer(), "a", HOME, is_member=False))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())
    assert cleaned
    assert work.is_spent("a")


class Caller:
    partner = False

    def __init__(self, peer, origin):
        self.peer_id, self.origin = peer, origin


def test_a_spent_range_is_refused_with_one_sentence(work, caplog):
    manager = ResourceManager(clock=work.wall)
    manager.processor_time = work.budget
    manager.known = "member".__eq__
    manager.met = {"caller": HOME}
    manager.meter("/bulk/1", 1 << 20)
    flood = Caller("a", HOME)
    assert manager.acquire(flood, "/ask/1") == ""
    asyncio.run(manager.answer(flood, "/ask/1", work.compute(4.0)))
    manager.release(flood, "/ask/1", 0)
    with caplog.at_level(logging.WARNING):
        assert [manager.acquire(Caller(f"k{n}", HOME), "/ask/1") for n in range(3)] == ["time"] * 3
    (record,) = caplog.records
    assert record.getMessage() == (
        "peers from 10.1.0.0/16 that are no members have used up the processor time that answering "
        "them may take (0.5 s in 10 s): more of their streams are refused for now"
    )
    assert manager.calls("caller", 10) == "time"
    assert manager.refused() == {"time": 4}
    assert manager.acquire(Caller("member", HOME), "/ask/1") == ""
    assert manager.acquire(Caller("k", OTHER), "/ask/1") == ""
    assert manager.acquire(Caller("k", HOME), "/bulk/1") == "time", "opening one costs time too"


def test_new_streams_of_metered_protocols_cost_time(work):
    manager = ResourceManager(clock=work.wall)
    manager.processor_time = work.budget
    manager.known = lambda peer: False
    manager.meter("/bulk/1", 1 << 20)
    most = round(PEER.of_peer_s / STREAM_S)
    for _ in range(most):
        stream = Caller("a", HOME)
        assert manager.acquire(stream, "/bulk/1") == ""
        manager.release(stream, "/bulk/1", 0)
    assert manager.acquire(Caller("a", HOME), "/bulk/1") == "time"


def test_answers_that_are_metered_by_bytes_cost_no_time(work):
    manager = ResourceManager(clock=work.wall)
    manager.processor_time = work.budget
    manager.known = lambda peer: False
    manager.meter("/bulk/1", 1 << 20)
    asyncio.run(manager.answer(Caller("a", HOME), "/bulk/1", work.compute(10.0)))
    assert not work.is_spent("a")
    asyncio.run(manager.answer_call("a", work.compute(10.0)))
    assert work.is_spent("a")


def test_streams_that_crowd_use_up_time_too(work):
    """The fault: most streams of a flood were refused as crowded, which cost it nothing."""
    manager = ResourceManager(clock=work.wall)
    manager.processor_time = work.budget
    manager.known = lambda peer: False
    flood = [manager.acquire(Caller("a", HOME), "/ask/1") for _ in range(6000)]
    assert flood[MAX_HANDLERS_PER_PEER] == "crowded"
    assert flood[-1] == "time"
    assert flood.count("time") == 6000 - round(PEER.of_peer_s / STREAM_S)
