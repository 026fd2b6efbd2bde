"""Membership on a simulated network: everybody is seen within the bounds, and the dead for as long
as their records live.
"""

import asyncio

import pytest

from shoal.swarm.membership.trie import CAP
from tests.sim.directory import PERIOD_S, TTL_S
from tests.sim.memory_stream import NOTHING
from tests.sim.network import Links


@pytest.fixture
def full(make):
    """Make a swarm of so many peers that stand in its table from the start."""

    def swarm(peers, **options):
        made = make(bucket=0, **options)
        made.add(peers, size=1, over=0.0)
        return made

    return swarm


def test_all_are_seen_and_no_key_is_overfull(full):
    swarm = full(100)
    swarm.run(1.0)
    assert all(len(directory.members()) == 100 for _, directory in swarm.all)
    keys = {prefix: swarm.boards[0].under(prefix) for prefix in swarm.boards[0]._keys}
    assert len(keys) > 3
    assert max(map(len, keys.values())) <= CAP
    assert all(directory.nbytes > 100 * 200 for _, directory in swarm.all)


def test_no_more_is_read_than_a_node_reads(full):
    swarm = full(100, limit=40)
    swarm.run(3.0)
    assert all(40 <= len(directory.members()) < 100 for _, directory in swarm.all)


def test_new_round_is_known_after_a_reading(full):
    """A new round is known after a reading and the dead are forgotten."""
    swarm = full(3)
    swarm.run(2.0)
    (host, mine), (_, another), _ = swarm.all
    swarm.rounds[host.peer_id] = 5
    mine.announce()
    assert mine.members()[host.peer_id].round == 5
    swarm.run(PERIOD_S + 1.0)
    assert another.members()[host.peer_id].round == 5
    swarm.network.kill(host.peer_id)
    swarm.run(PERIOD_S)
    assert host.peer_id in another.members()
    swarm.run(TTL_S)
    assert all(len(directory.members()) == 2 for _, directory in swarm.all[1:])


def test_an_announcement_is_published_once(full):
    """Who is often asked to look reads often, and does not publish with each reading."""
    swarm = full(2)
    swarm.run(2.0)
    ((host, one), _), (board,), posted = swarm.all, swarm.boards, []
    put = board.put
    board.put = lambda prefix, record: (posted.append(record.member.peer), put(prefix, record))
    one.announce()
    seconds = 4 * PERIOD_S
    for number in range(int(2 * seconds)):
        swarm.loop.call_later(number / 2, one.look, context=NOTHING)
    swarm.run(seconds)
    assert 4 <= posted.count(host.peer_id) <= 1 + seconds / (0.75 * PERIOD_S)


def test_one_link_carries_all_that_a_host_sends(full):
    """Two streams of 1 MB at 1 MB/s: together they take two seconds where the link is shared, else
    one.
    """
    swarm = full(3)
    sender, *receivers = (host for host, _ in swarm.all)

    async def took(shared):
        swarm.network.links = Links(0.0, 0.0, 1e6, shared=shared)
        ends = []

        async def swallow(stream):
            room = bytearray(1_000_000)
            await stream.swap(
                memoryview(b""), memoryview(room), chunk_timeout=9, deadline=swarm.loop.time() + 9
            )
            ends.append(swarm.loop.time())

        for host in receivers:
            host.serve("/x", swallow)
        began = swarm.loop.time()
        streams = [await sender.open(host.peer_id, "/x", timeout=1.0) for host in receivers]
        data = memoryview(bytes(1_000_000))
        swaps = (
            s.swap(data, memoryview(bytearray()), chunk_timeout=9, deadline=swarm.loop.time() + 9)
            for s in streams
        )
        await asyncio.gather(*swaps)
        await asyncio.sleep(1.0)
        for stream in streams:
            stream.close()
        return max(ends) - began

    assert swarm.loop.run_until_complete(took(False)) == pytest.approx(1.0, abs=0.01)
    assert swarm.loop.run_until_complete(took(True)) == pytest.approx(2.0, abs=0.01)


def test_a_call_that_would_wait_is_refused(full):
    swarm = full(1)
    ((host, _),) = swarm.all

    async def after(future):
        return await future

    async def calls():
        future = swarm.loop.create_future()
        with pytest.raises(RuntimeError, match="would have to wait"):
            host.call(after(future), 1.0)
        future.set_result(7)
        return host.call(after(future), 1.0)

    assert swarm.loop.run_until_complete(calls()) == 7
