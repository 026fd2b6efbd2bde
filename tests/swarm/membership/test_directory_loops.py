"""Reading and publishing do not wait for each other, and of two records of a peer the newer one counts: a board in memory."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership import directory as directory_module
from shoal.swarm.membership.dht import bits_of, key_of, make_record
from shoal.swarm.membership.directory import Directory
from shoal.swarm.wire.messages import Member
from tests.clocks import LoopThread, until
from tests.swarm.membership.conftest import ABOUT

SWARM = "a" * 52


class Board(LoopThread):
    """The part of a host that a directory needs. ``reading`` is called for each reading of the root."""

    def __init__(self, reading):
        super().__init__()
        self.reading, self.keys, self.stored, self.reads = reading, {}, 0, 0

    def addresses(self):
        return ()

    def remember(self, addresses):
        list(addresses)

    async def store(self, key, subkey, value, ttl):
        self.stored += 1
        return True

    async def get(self, key):
        self.reads += 1
        await self.reading(self)
        return dict(self.keys.get(key, {}))


@pytest.fixture
def start():
    boards = []

    def made(reading):
        board = Board(reading)
        boards.append(board)
        return board, Directory(board, Identity.ephemeral(), SWARM, period=0.05, ttl=6.0)

    yield made
    for board in boards:
        board.close()


async def never_again(board):
    if board.reads > 1:
        await asyncio.Event().wait()


async def broken(board):
    raise NetworkError("the DHT did not answer.")


@pytest.mark.parametrize("reading", [never_again, broken])
def test_a_node_is_published_again_and_again_however_its_reading_goes(start, reading):
    board, directory = start(reading)
    directory.announce(**ABOUT)
    until(lambda: board.stored >= 4)
    assert directory._prefix == ""


def test_an_older_record_does_not_replace_a_newer_one(start):
    """As when another node of the DHT still has the record from under another key, or an earlier reading."""

    async def at_once(board):
        pass

    board, directory = start(at_once)
    other, now = Identity.ephemeral(), time.time()

    def put(prefix, round, issued):
        member = Member(**{**ABOUT, "round": round}, swarm=SWARM, peer=other.peer_id, addresses=(), issued=issued)
        board.keys[key_of(SWARM, prefix)] = {other.peer_id: make_record(prefix, member, other)}

    directory._prefix = bits_of(other.peer_id)[:1]  # so that the key below the root is read as well
    directory._run_future.cancel()
    put("", 7, now)
    put(bits_of(other.peer_id)[:1], 5, now - 2)
    directory.refresh(10)
    assert directory.members()[other.peer_id].round == 7
    put("", 6, now - 1)
    directory.refresh(10)
    assert directory.members()[other.peer_id].round == 7
    put("", 8, now + 1)
    directory.refresh(10)
    assert directory.members()[other.peer_id].round == 8


class SlowBoard(Board):
    """A reading and a publication take so many seconds of the clock ``now``, in which nothing else happens."""

    def __init__(self, reading_s, publication_s):
        super().__init__(self.read)
        self.reading_s, self.publication_s, self.now = reading_s, publication_s, 0.0

    async def read(self, board):
        self.now += self.reading_s

    async def store(self, key, subkey, value, ttl):
        self.now += self.publication_s
        return await super().store(key, subkey, value, ttl)


@pytest.mark.parametrize(
    ("reading_s", "publication_s", "expected"), [(0.9, 0.9, set()), (1.2, 0.9, {3.6}), (0.9, 1.2, {3.6}), (20.0, 1.2, {4.5, 3.6})]
)
def test_what_took_long_is_followed_by_a_rest_so_that_peers_in_haste_do_not_starve_each_other(
    monkeypatch, reading_s, publication_s, expected
):
    board, rests, sleep = SlowBoard(reading_s, publication_s), [], asyncio.sleep

    async def pause(self, wake, seconds):
        board.now += seconds
        await sleep(0)

    async def resting(seconds):
        rests.append(round(seconds, 6))
        await sleep(0)

    monkeypatch.setattr(Directory, "_sleep", pause)
    monkeypatch.setattr(directory_module, "time", SimpleNamespace(monotonic=lambda: board.now, time=time.time))
    monkeypatch.setattr(directory_module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": resting}))
    try:
        directory = Directory(board, Identity.ephemeral(), SWARM, period=5.0, ttl=27.0)
        directory.announce(**ABOUT)
        until(lambda: min(board.reads, board.stored) >= 3)
        directory.close()
    finally:
        board.close()
    assert {seconds for seconds in rests if seconds > directory_module.GAP} == expected
