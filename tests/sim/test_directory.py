"""Membership on a simulated network: everybody is seen within the bounds, and the dead for as long as their records live."""

import asyncio
import random

import pytest

from shoal.swarm.membership.dht import CAP
from tests.records import member_of
from tests.sim.clock import VirtualLoop
from tests.sim.directory import EPOCH, PERIOD, TTL, Board, SimDirectory
from tests.sim.memory_stream import NOTHING
from tests.sim.network import Links, SimNetwork, Trace


class Swarm:
    """So many peers, each with its directory, that stand in the table from the start."""

    def __init__(self, loop, peers, **options):
        self.loop, self.network = loop, SimNetwork(loop, 0, Links(0.05, 0.0), Trace())
        self.board = Board(self.network)
        self.hosts = [self.network.host(f"p{number}", self.network.identity(f"p{number}")) for number in range(peers)]
        self.rounds = [0] * peers
        self.directories = [self.directory(number, **options) for number in range(peers)]
        for directory in self.directories:
            directory.settle()

    def directory(self, number, **options):
        def record():
            issued = EPOCH + self.loop.time()
            return member_of(self.hosts[number].peer_id, name=f"p{number}", round=self.rounds[number], issued=issued)

        return SimDirectory(self.board, self.hosts[number], record, random.Random(number), **options)

    def run(self, seconds):
        self.loop.call_later(seconds, self.loop.stop, context=NOTHING)
        self.loop.run_forever()

    def start(self):
        for host, directory in zip(self.hosts, self.directories, strict=True):
            host.start(directory.run())


@pytest.fixture
def make():
    loop, made = VirtualLoop(), []

    def swarm(peers, **options):
        made.append(Swarm(loop, peers, **options))
        return made[-1]

    yield swarm
    made[0].network.end()
    loop.close()


def test_all_are_seen_and_no_key_is_overfull(make):
    swarm = make(100)
    swarm.start()
    swarm.run(1.0)
    assert all(len(directory.members()) == 100 for directory in swarm.directories)
    keys = {prefix: swarm.board.under(prefix) for prefix in swarm.board._keys}
    assert len(keys) > 3
    assert max(map(len, keys.values())) <= CAP
    assert all(directory.nbytes > 100 * 200 for directory in swarm.directories)


def test_no_more_is_read_than_a_node_reads(make):
    swarm = make(100, limit=40)
    swarm.start()
    swarm.run(3.0)
    assert all(40 <= len(directory.members()) < 100 for directory in swarm.directories)


def test_a_new_round_is_known_after_a_reading_and_the_dead_are_forgotten(make):
    swarm = make(3)
    swarm.start()
    swarm.run(2.0)
    swarm.rounds[0] = 5
    swarm.directories[0].announce()
    assert swarm.directories[0].members()[swarm.hosts[0].peer_id].round == 5
    swarm.run(PERIOD + 1.0)
    assert swarm.directories[1].members()[swarm.hosts[0].peer_id].round == 5
    swarm.network.kill(swarm.hosts[0].peer_id)
    swarm.run(PERIOD)
    assert swarm.hosts[0].peer_id in swarm.directories[1].members()
    swarm.run(TTL)
    assert all(len(directory.members()) == 2 for directory in swarm.directories[1:])


def test_an_announcement_is_published_once(make):
    """Who is often asked to look reads often, and does not publish with each reading."""
    swarm = make(2)
    swarm.start()
    swarm.run(2.0)
    (one, _), put, posted = swarm.directories, swarm.board.put, []
    swarm.board.put = lambda prefix, record: (posted.append(record.member.peer), put(prefix, record))
    one.announce()
    seconds = 4 * PERIOD
    for number in range(int(2 * seconds)):
        swarm.loop.call_later(number / 2, one.look, context=NOTHING)
    swarm.run(seconds)
    assert 4 <= posted.count(swarm.hosts[0].peer_id) <= 1 + seconds / (0.75 * PERIOD)


def test_one_link_carries_all_that_a_host_sends(make):
    """Two streams of 1 MB at 1 MB/s: together they take two seconds where the link is shared, else one."""
    swarm = make(3)

    async def took(shared):
        swarm.network.links = Links(0.0, 0.0, 1e6, shared=shared)
        ends = []

        async def swallow(stream):
            room = bytearray(1_000_000)
            await stream.swap(memoryview(b""), memoryview(room), chunk_timeout=9, deadline=swarm.loop.time() + 9)
            ends.append(swarm.loop.time())

        for host in swarm.hosts[1:]:
            host.serve("/x", swallow)
        began = swarm.loop.time()
        streams = [await swarm.hosts[0].open(host.peer_id, "/x", timeout=1.0) for host in swarm.hosts[1:]]
        data = memoryview(bytes(1_000_000))
        swaps = (s.swap(data, memoryview(bytearray()), chunk_timeout=9, deadline=swarm.loop.time() + 9) for s in streams)
        await asyncio.gather(*swaps)
        await asyncio.sleep(1.0)
        for stream in streams:
            stream.close()
        return max(ends) - began

    assert swarm.loop.run_until_complete(took(False)) == pytest.approx(1.0, abs=0.01)
    assert swarm.loop.run_until_complete(took(True)) == pytest.approx(2.0, abs=0.01)


def test_a_call_that_would_wait_is_refused(make):
    swarm = make(1)

    async def after(future):
        return await future

    async def calls():
        future = swarm.loop.create_future()
        with pytest.raises(RuntimeError, match="would have to wait"):
            swarm.hosts[0].call(after(future), 1.0)
        future.set_result(7)
        return swarm.hosts[0].call(after(future), 1.0)

    assert swarm.loop.run_until_complete(calls()) == 7
