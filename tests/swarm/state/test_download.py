"""Chunks from several peers at once: which is asked of whom, wrong ones, peers that die, and going
on where it stopped.
"""

import asyncio
import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.timeouts import LEAST_RATE
from shoal.swarm.state import chunk_server
from shoal.swarm.state.chunk_server import ChunkServer
from shoal.swarm.state.download import (
    ChunkPlan,
    ChunkSource,
    MemorySink,
    NotHeldError,
    download,
    fetch_digests,
)
from shoal.swarm.state.snapshot import Snapshot, State, chunk_size, chunks_in, encode, make
from shoal.swarm.state.snapshot_cache import BUSY_S, SnapshotCache
from shoal.swarm.wire.envelope import CHUNK

SWARM = "a" * 52
VALUES = 5 * CHUNK // 4 + 3  # float32: five chunks and twelve bytes


def test_a_chunk_is_not_asked_twice_of_one_source():
    """A second copy over the same slow uplink would only delay the first."""
    plan = ChunkPlan(range(1))
    assert plan.ask("b1", "b") == 0
    assert plan.ask("b2", "b") is None
    assert plan.ask("c1", "c") == 0
    plan.lost("b1")
    assert plan.ask("b2", "b") == 0


@settings(deadline=None)
@given(st.data(), st.integers(0, 12), st.integers(1, 4))
def test_every_chunk_comes_once_whatever_the_lanes_do(data, chunks, lanes):
    plan, alive, busy, arrived = ChunkPlan(range(chunks)), set(range(lanes)), {}, []
    while not plan.done:
        asked = [chunk for chunk in busy.values() if chunk not in arrived]
        assert all(asked.count(chunk) <= 2 for chunk in asked)
        assert plan.left == chunks - len(arrived)
        lane = data.draw(st.sampled_from(sorted(alive)))
        act = data.draw(st.sampled_from(["answer", "die"] if lane in busy else ["ask", "die"]))
        if act == "ask":
            chunk = plan.ask(lane, lane)
            if chunk is not None:
                assert chunk not in arrived
                busy[lane] = chunk
            else:  # everything that is left is with two others, or with this one
                assert all(asked.count(left) == 2 for left in set(range(chunks)) - set(arrived))
        elif act == "answer":
            chunk = busy.pop(lane)
            assert plan.got(chunk) == (chunk not in arrived)
            if chunk not in arrived:
                arrived.append(chunk)
        else:
            plan.lost(lane)
            busy.pop(lane, None)
            alive.discard(lane)
            alive.add(max(alive | {lane}) + 1)  # somebody else comes
    assert sorted(arrived) == list(range(chunks))


@settings(deadline=None)
@given(st.integers(0, 5 * CHUNK))
def test_chunks_cover_a_payload_exactly(nbytes):
    assert sum(chunk_size(nbytes, chunk) for chunk in range(chunks_in(nbytes))) == nbytes
    assert all(0 < chunk_size(nbytes, chunk) <= CHUNK for chunk in range(chunks_in(nbytes)))


def made(seed=0):
    state = State(3, [torch.randn(VALUES, generator=torch.Generator().manual_seed(seed))])
    return make(state, encode(state))


class Server:
    """A host that holds snapshots, and can answer as a test wants."""

    def __init__(self, network, *held):
        self.host, self.kept, self.asked = network.host(), SnapshotCache(), []
        for one in held:
            self.kept.put(one)
        ChunkServer(self.host, SWARM, self.kept)

    @property
    def source(self):
        return self.host.peer_id, ()


def take(network, wanted, sources, sink=None, chunks=None):
    """Download into ``sink``; return it, and the peers that sent a wrong chunk."""
    me, sink = network.host(), sink or MemorySink(wanted.header.nbytes)

    async def work():
        to = [server.source for server in sources]
        digests = await fetch_digests(me, SWARM, wanted.header, to)
        assert digests == wanted.digests
        every = range(chunks_in(wanted.header.nbytes)) if chunks is None else chunks
        return sink, await download(me, SWARM, wanted.header, digests, to, sink, every)

    return asyncio.run_coroutine_threadsafe(work(), network.loop).result(60)


@pytest.fixture
def spy(monkeypatch):
    """Notes which chunk is handed out, and lets a test put something else in its place: (snapshot
    id, chunk) -> bytes or None.
    """
    true, change, seen = chunk_server._chunk, {}, []

    def chunk_of(held, chunk):
        seen.append(chunk)
        found = true(held, chunk)
        act = change.get(chunk)
        return act(found) if act is not None and found is not None else found

    monkeypatch.setattr(chunk_server, "_chunk", chunk_of)
    return seen, change


def test_a_snapshot_comes_from_all_who_hold_it(network):
    wanted = made()
    sources = [Server(network, wanted) for _ in range(3)] + [
        Server(network, made(1)),
        Server(network),
    ]
    sink, wrong = take(network, wanted, sources)
    assert (sink.have, wrong) == (set(range(6)), set())
    assert torch.equal(sink.content, wanted.content)


def answered(network, server, id, chunk, nbytes):
    """Return how often a chunk of so many bytes is sent on one stream to who asks 50 times, and the
    error that ended it.
    """

    async def work():
        count = 0
        with contextlib.closing(ChunkSource(network.host(), SWARM, id, *server.source)) as source:
            try:
                while count < 50:
                    with contextlib.suppress(NotHeldError):
                        await source.take(chunk, memoryview(bytearray(nbytes)))
                    count += 1
            except NetworkError as error:
                return count, type(error)
        return count, None

    return asyncio.run_coroutine_threadsafe(work(), network.loop).result(60)


@pytest.mark.parametrize(("chunk", "nbytes"), [(5, 12), (0, CHUNK), (None, 6 * 32)])
def test_a_stream_serves_a_chunk_once(network, chunk, nbytes):
    """`models_per_hour` counts downloads: one stream that never ended took as many as the uplink
    could send, or the last chunk, which has few bytes, without end.
    """
    wanted = made()
    server = Server(network, wanted)
    assert answered(network, server, wanted.id, chunk, nbytes) == (1, NetworkError)


def test_a_stream_ends_at_what_is_not_held(network):
    """The fault: a stranger asked for what nobody holds on one stream without end."""
    assert answered(network, Server(network), bytes(32), 0, CHUNK) == (1, NetworkError)


def test_wrong_chunk_is_fetched_elsewhere(network, caplog):
    """A wrong chunk is fetched elsewhere and its giver is named."""
    wanted = made()
    spoiled = Snapshot(
        wanted.header,
        wanted.content.clone().index_fill_(0, torch.arange(VALUES * 4), 1),
        wanted.digests,
    )
    liar, honest = Server(network, spoiled), Server(network, wanted)
    sink, wrong = take(network, wanted, [liar, honest])
    assert wrong == {liar.host.peer_id}
    assert torch.equal(sink.content, wanted.content)
    assert (
        f"…{liar.host.peer_id[-8:]} served a chunk of the weights that does not match its digest"
        in caplog.text
    )


def test_foreign_digests_are_not_believed(network, caplog):
    """Digests that are not those of the snapshot are not believed."""
    wanted = made()
    liar = Server(network, Snapshot(wanted.header, wanted.content, bytes(len(wanted.digests))))
    sink, _ = take(network, wanted, [liar, Server(network, wanted)])
    assert torch.equal(sink.content, wanted.content)
    assert "served digests that are not those of the weights it offered" in caplog.text
    with pytest.raises(NetworkError, match="holds the weights any more"):
        take(network, wanted, [liar])


def test_dead_giver_costs_its_chunks_only(network, spy):
    """A giver that dies in the middle costs only its chunks."""
    wanted = made()
    dying, other = Server(network, wanted), Server(network, wanted)
    _, change = spy
    dead = []

    def die(data):
        dying.host.dead = True
        for stream in dying.host.streams:
            stream.abort()
        dead.append(True)
        change.clear()
        return data

    change[0] = die
    sink, wrong = take(network, wanted, [dying, other])
    assert (dead, wrong, torch.equal(sink.content, wanted.content)) == ([True], set(), True)


def test_what_has_come_is_not_asked_for_again(network, spy):
    wanted = made()
    source = Server(network, wanted)
    seen, change = spy

    def gone(data):
        source.kept._held.clear()
        return data

    change[3] = gone
    sink = MemorySink(wanted.header.nbytes)
    with pytest.raises(NetworkError, match="chunks missing"):
        take(network, wanted, [source], sink)
    came = set(sink.have)
    assert came
    source.kept.put(wanted)
    change.clear()
    seen.clear()
    take(network, wanted, [source], sink)
    assert not set(seen) & came
    assert torch.equal(sink.content, wanted.content)


def test_some_chunks_can_be_had_alone(network, spy):
    wanted = made()
    sink, _ = take(network, wanted, [Server(network, wanted)], chunks=[1, 5])
    assert (sink.have, set(spy[0])) == ({1, 5}, {None, 1, 5})


def test_what_a_sink_raises_ends_the_download(network):
    class Full(MemorySink):
        def write(self, chunk, data):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        take(network, made(), [Server(network, made())], Full(1))


def test_wrong_size_is_refused_early(network, spy, caplog):
    """A piece of another size is refused before it is taken."""
    wanted = made()
    spy[1][0] = lambda data: memoryview(bytes(CHUNK + 1))
    with pytest.raises(NetworkError, match="chunks missing"):
        take(network, wanted, [Server(network, wanted)])
    assert f"announced a chunk of {CHUNK + 1} bytes where {CHUNK} fit" in caplog.text


def cache_and_three():
    """Return the time of an empty cache, which tests move, the cache, and three snapshots."""
    now = [0.0]
    return now, SnapshotCache(lambda: now[0]), [made(seed) for seed in range(3)]


def test_two_snapshots_are_kept_and_none_that_nobody_asks_for():
    now, kept, (one, two, three) = cache_and_three()
    kept.put(one)
    now[0] = 1.0
    kept.put(two)
    assert kept.full()
    now[0] = 20.0
    assert not kept.full()
    assert kept.get(one.id) is one
    kept.put(three)
    assert kept.get(two.id) is None
    now[0] = 100.0
    assert kept.get(one.id) is one
    now[0] = 150.0
    kept.expire()
    assert (kept.get(one.id), kept.get(three.id)) == (one, None)


def test_a_snapshot_is_kept_for_its_downloads_only():
    now, kept, (slow, quick, newer) = cache_and_three()
    kept.put(slow)
    with kept.read(slow.id):
        kept.put(quick)
        assert kept.full()  # its download is about to begin
        with kept.read(quick.id), kept.read(quick.id):
            pass
        assert not kept.full()  # who asks again gets newer weights at once, however often it asks
        now[0] = 100.0
        assert kept.get(quick.id) is quick
        kept.put(newer)
        assert (kept.get(slow.id), kept.get(quick.id)) == (slow, None)


def test_snapshots_that_are_never_let_go_give_way():
    """The fault: streams that never ended kept two snapshots for good, and all were handed those.
    Mutants: no bound on the time of a download; a bound that is the older's, or without its bytes;
    the one that was requested less recently gives way.
    """
    now, kept, (older, newer, newest) = cache_and_three()
    kept.put(older)
    now[0] = 50.0
    kept.put(newer)
    with kept.read(older.id), kept.read(newer.id):
        assert kept.get(older.id) is older
        # The older was offered until then, to who may need so long for it.
        now[0] += BUSY_S + newer.header.nbytes / LEAST_RATE - 1
        assert kept.full()
        now[0] += 2.0
        assert kept.get(older.id) is older
        assert not kept.full()
        kept.put(newest)
        assert kept.full()
        assert [kept.get(one.id) for one in (older, newer, newest)] == [None, newer, newest]


def test_id_follows_from_the_content_alone():
    """The id follows from what is held and from nothing else."""
    state = State(3, [torch.ones(5)], {"momentum": [torch.ones(5)]}, [2])
    same = State(3, [torch.ones(5)], {"momentum": [torch.ones(5)]}, [2])
    others = [
        State(4, [torch.ones(5)], {"momentum": [torch.ones(5)]}, [2]),
        State(3, [torch.ones(5)], {"momentum": [torch.zeros(5)]}, [2]),
        State(3, [torch.ones(5)], {"step": [torch.ones(5)]}, [2]),
        State(3, [torch.ones(5)], {"momentum": [torch.ones(5)]}, [1]),
        State(3, [torch.ones(10)], {}, [2]),
    ]
    ids = [make(one, encode(one)).id for one in (state, same, *others)]
    assert ids[0] == ids[1]
    assert len(set(ids)) == len(others) + 1


def test_a_state_has_another_version_after_every_change():
    state = State(3, [torch.ones(5)], {"momentum": [torch.ones(5)]}, [2])
    version = state.version()
    assert state.version() == version
    state.extra["momentum"][0].mul_(2)
    assert state.version() != version


def test_a_lane_waits_for_news_without_asking(network):
    # One chunk and many lanes: the others wait, and end when it is there.
    wanted = make(State(1, [torch.ones(3)]), encode(State(1, [torch.ones(3)])))
    sink, _ = take(network, wanted, [Server(network, wanted) for _ in range(4)])
    assert torch.equal(sink.content, wanted.content)
