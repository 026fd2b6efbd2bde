"""Weights for a newcomer, and for who has drifted: whole or none, from several peers, and which of
them; and large ones in files."""

import asyncio
import errno
import math
import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from shoal.optim.codecs.floats import FLOAT32
from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.state import spool, state_server
from shoal.swarm.state.chunk_server import CHUNKS_PROTOCOL
from shoal.swarm.state.download import ChunkSource
from shoal.swarm.state.offers import STATE_PROTOCOL
from shoal.swarm.state.query import ModelDiffersError, StateQuery
from shoal.swarm.state.snapshot import State, chunks_in, encode, make, read
from shoal.swarm.state.snapshot_cache import BUSY_S
from shoal.swarm.state.spool import Spool, spool_for
from shoal.swarm.state.state_server import MAX_WAIT_ROUNDS, REST_PER_COPY, StateServer
from shoal.swarm.state.sync import begin_fetch, fetch_state
from shoal.swarm.wire.envelope import CHUNK, pack, unpack
from shoal.swarm.wire.messages import Answer, StateHeader, StateRequest
from tests.support.clock import Clock
from tests.support.waiting import until

SWARM, MODEL = "a" * 52, "0" * 64
SHAPES = [(300, 1000), (3,)]


def query(extra=None, shapes=SHAPES, model=MODEL, swarm=SWARM, astray=False, round=0, **options):
    request = StateRequest(swarm=swarm, model=model, astray=astray, round=round)
    return StateQuery(request, shapes, extra or {}, **options)


def to(*hosts):
    return [(host.peer_id, ()) for host in hosts]


class Member:
    """A peer that trains, and offers its state between steps: in a thread, or when it is told."""

    def __init__(self, network, state):
        self.host, self.state = network.host(), state
        self.clock = Clock()
        self.server = StateServer(self.host, SWARM, MODEL, SHAPES, self.clock)
        self._stop, self._tick = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._train)
        self.steps = lambda: None

    def _train(self):
        while not self._stop.is_set():
            self.step()
            self.steps()
            self._tick.wait(0.005)

    def step(self):
        self.server.offer(lambda: self.state)

    def run(self):
        self._thread.start()
        return self

    def end(self):
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(60)


@pytest.fixture
def members(network):
    made = []

    def make(*states, run=True):
        new = [Member(network, state) for state in states]
        made.extend(new)
        return [member.run() for member in new] if run else new

    yield make
    for member in made:
        member.end()


def slow(seed=0, near=None):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return drawn if near is None else [a + 0.3 * b for a, b in zip(near, drawn, strict=True)]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def chunks_by(network, *hosts):
    return {
        host.peer_id: sum(
            1
            for me, peer, what in network.opened
            if peer == host.peer_id and what == CHUNKS_PROTOCOL
        )
        for host in hosts
    }


def test_weights_come_whole(network, members):
    (source,) = members(State(7, slow()))
    dead = network.host()
    dead.dead = True
    state = fetch_state(network.host(), query(), to(dead, source.host))
    assert state.round == 7
    assert equal(state.slow, source.state.slow)


def test_what_a_newcomer_holds_already_is_not_fetched(network, members):
    """Mutant: the digests are compared of the wrong chunks, or its own values stay where they
    differ.
    """
    (source,) = members(State(0, slow(), {"momentum": slow(1)}))
    held = State(
        0, [tensor.clone() for tensor in source.state.slow], {"momentum": slow(1), "more": slow(2)}
    )
    own = held.slow[0][0].clone()
    held.slow[0][-1, -1] += 1.0  # in the second chunk of 1 MiB of 3
    taken = []
    served = source.server._kept.get

    def counting(id):
        found = served(id)
        if found is not None:
            object.__setattr__(
                found,
                "chunk",
                lambda number: taken.append(number) or type(found).chunk(found, number),
            )
        return found

    source.server._kept.get = counting
    wanted = query({"momentum": SHAPES, "more": SHAPES})
    state = fetch_state(network.host(), wanted, to(source.host), held)
    assert equal([*state.slow, *state.extra["momentum"]], [*source.state.slow, *slow(1)])
    assert torch.equal(held.slow[0][0], own)
    assert set(taken) == {1}
    assert held.slow[0][-1, -1] == source.state.slow[0][-1, -1] + 1.0


def test_newcomer_need_not_wait_for_an_evaluation(network, members):
    """A newcomer need not wait for the end of an evaluation."""
    (source,) = members(State(7, slow()), run=False)
    with source.server.at_rest(lambda: source.state):  # nothing is done between steps meanwhile
        state = fetch_state(network.host(), query(), to(source.host))
    assert equal(state.slow, source.state.slow)


def test_who_asked_before_an_evaluation_is_served_as_it_begins(network, members):
    (source,) = members(State(7, slow()), run=False)
    fetched = begin_fetch(network.host(), query(), to(source.host))
    while not source.server._wanted:
        pass
    with source.server.at_rest(lambda: source.state):
        assert fetched.result(60).round == 7


def test_weights_loaded_during_a_copy_are_copied_again(network, members, monkeypatch):
    """Whoever holds the block loads others in it all the same: half of each must not go out."""
    (source,) = members(State(7, slow()), run=False)
    copies = []

    def load_meanwhile(state):
        copies.append(encode(state))
        if len(copies) == 1:
            state.slow[0].add_(1.0)
        return copies[-1]

    monkeypatch.setattr(state_server, "encode", load_meanwhile)
    fetched = begin_fetch(network.host(), query(), to(source.host))
    until(lambda: source.server._wanted)
    with source.server.at_rest(lambda: source.state):
        pass
    source.step()
    assert equal(fetched.result(60).slow, source.state.slow)
    assert len(copies) == 2


def test_after_an_evaluation_weights_are_copied_between_steps_only(network, members):
    (source,) = members(State(7, slow()), run=False)
    with source.server.at_rest(lambda: source.state):
        pass
    fetched = begin_fetch(network.host(), query(), to(source.host))
    while not source.server._wanted:
        pass
    source.server._offer_at_rest()  # a caller that came in time, but was slow
    assert source.server._wanted
    source.step()
    assert fetched.result(60).round == 7


def test_agreed_state_is_taken_from_all_holders(network, members):
    """What two state is taken from both and from who took it before."""
    first, second = members(State(7, slow(), applied=[6]), State(7, slow(), applied=[6]))
    before = members(State(9, slow(5), applied=[8]))[0]
    state = fetch_state(network.host(), query(equal=True), to(first.host, second.host))
    assert (
        state.snapshot.id
        == fetch_state(network.host(), query(equal=True), to(second.host, first.host)).snapshot.id
    )
    before.server.keep(state)
    network.opened.clear()
    again = fetch_state(network.host(), query(equal=True), to(first.host, second.host, before.host))
    assert equal(again.slow, state.slow)
    assert all(chunks_by(network, first.host, second.host, before.host).values())


def test_the_majority_is_taken_though_another_is_further(network, members):
    liar, one, other = members(
        State(900, slow(9), applied=[899]), *[State(7, slow(), applied=[6]) for _ in range(2)]
    )
    state = fetch_state(network.host(), query(equal=True), to(liar.host, one.host, other.host))
    assert (state.round, equal(state.slow, slow())) == (7, True)


def test_source_a_round_behind_is_asked_again(network, members):
    """Who is a round behind is asked again for the later one."""
    ahead, behind = members(State(8, slow(1), applied=[7]), State(7, slow(0), applied=[6]))

    def advance():  # its step after the first question has been answered
        if behind.server._last is not None and behind.state.round == 7:
            behind.state = State(8, slow(1), applied=[7])

    behind.steps = advance
    state = fetch_state(network.host(), query(equal=True), to(ahead.host, behind.host))
    assert (state.round, equal(state.slow, slow(1))) == (8, True)
    assert chunks_by(network, behind.host)[behind.host.peer_id] >= 2


def test_copies_that_are_near_confirm_each_other(network, members):
    mine = slow()
    ahead, behind = members(State(8, mine), State(7, slow(1, near=mine)))
    state = fetch_state(network.host(), query(), to(behind.host, ahead.host))
    assert (state.round, equal(state.slow, mine)) == (8, True)


@pytest.mark.parametrize(
    "lie", [lambda t: -t, lambda t: 1000 * t, torch.zeros_like, lambda t: t.roll(1, 0).roll(7, -1)]
)
def test_weights_that_are_far_from_everybody_elses_are_not_taken(network, members, lie):
    mine = slow()
    liar, one, other = members(
        State(99, [lie(t) for t in mine]), State(8, mine), State(7, slow(1, near=mine))
    )
    state = fetch_state(network.host(), query(), to(liar.host, one.host, other.host))
    assert (state.round, equal(state.slow, mine)) == (8, True)
    with pytest.raises(
        NetworkError,
        match=r"serve weights that lie far from each other, and no other peer confirms either",
    ):
        fetch_state(network.host(), query(), to(liar.host, one.host))


def test_weights_that_are_damaged_or_not_finite_are_not_used(network, members, monkeypatch):
    (source,) = members(State(7, slow()))
    source.state.slow[1][0] = math.nan
    with pytest.raises(NetworkError, match="could serve weights"):
        fetch_state(network.host(), query(), to(source.host))
    source.state.slow[1][0] = 0.0
    assert fetch_state(network.host(), query(), to(source.host)).slow[1][0] == 0.0
    swap = Stream.swap

    async def damaging(stream, outgoing, incoming, **options):
        await swap(stream, memoryview(bytes(len(outgoing))), incoming, **options)

    monkeypatch.setattr(Stream, "swap", damaging)
    with pytest.raises(
        NetworkError, match="none of the peers that were asked holds the weights any more"
    ):
        fetch_state(network.host(), query(), to(source.host))


MOMENTUM = [torch.full((300, 1000), 0.5), torch.tensor([1.0, 2.0, 3.0])]
COUNT = [torch.tensor(4.0), torch.tensor(5.0)]


def test_the_state_of_the_rule_comes_with_the_weights(network, members):
    rich, poor = members(
        State(7, slow(), {"momentum": MOMENTUM, "count": COUNT}, [6, -1]),
        State(7, slow(), {}, [6, -1]),
    )
    state = fetch_state(
        network.host(),
        query({"momentum": SHAPES, "count": [(), ()], "start": SHAPES}),
        to(rich.host),
    )
    assert (equal(state.slow, slow()), sorted(state.extra), list(state.applied)) == (
        True,
        ["count", "momentum"],
        [6, -1],
    )
    for name, wanted in (("momentum", MOMENTUM), ("count", COUNT)):
        assert equal(state.extra[name], wanted)
    assert fetch_state(network.host(), query({"momentum": SHAPES}), to(poor.host)).extra == {}


@pytest.mark.parametrize(
    "extra", [None, {"momentum": SHAPES}, {"momentum": SHAPES, "count": [(1,), ()]}]
)
def test_unfit_state_is_not_taken(network, members, extra, caplog):
    """A state that does not fit the own rule is not taken."""
    (rich,) = members(State(7, slow(), {"momentum": MOMENTUM, "count": COUNT}))
    with pytest.raises(NetworkError, match="could serve weights"):
        fetch_state(network.host(), query(extra), to(rich.host))
    assert "does not fit this node's outer rule" in caplog.text


def test_another_model_is_told_the_difference_and_another_swarm_nothing(network, members):
    (source,) = members(State(7, slow()))
    with pytest.raises(ModelDiffersError, match=r"tensor 1 has shape \[4\] here and \[3\] there"):
        fetch_state(
            network.host(), query(shapes=[(300, 1000), (4,)], model="1" * 64), to(source.host)
        )
    assert fetch_state(network.host(), query(swarm="b" * 52), to(source.host)) is None


@pytest.mark.parametrize(
    ("held", "seconds", "taken"),
    [(True, 1.0, [7, 8, 8]), (False, 1.0, [7, 8, 9]), (True, 20.0, [7, 8, 9])],
    ids=["two downloads go on", "all ended", "they do not end"],
)
def test_third_newcomer_gets_the_later_snapshot(network, members, held, seconds, taken):
    """Who comes while two snapshots are being downloaded gets the later of them, but not for good:
    a stranger that let go of neither had everybody handed ever older weights.
    """
    (source,) = members(State(7, slow()), run=False)
    rounds, lasting = [], []
    for round in (7, 8, 9):
        source.state = at(round)
        source.clock.now += seconds
        host = network.host()
        coming = begin_fetch(host, query(), to(source.host))
        while not coming.done():
            source.step()
        state = coming.result(60)
        rounds.append(state.round)
        if held:
            ((peer, addresses),) = to(source.host)
            lasting.append(ChunkSource(host, SWARM, state.snapshot.id, peer, addresses))
            host.submit(lasting[-1].take(0, memoryview(bytearray(CHUNK)))).result(60)
    assert rounds == taken


def test_one_copy_serves_all(network, members, monkeypatch):
    """One copy is made for all who ask for the same weights."""
    (source,) = members(State(7, slow()))
    made = []
    monkeypatch.setattr(
        "shoal.swarm.state.state_server.encode",
        lambda state: made.append(state.round) or encode(state),
    )
    for _ in range(3):
        assert fetch_state(network.host(), query(), to(source.host)).round == 7
    source.state = at(8)
    assert fetch_state(network.host(), query(), to(source.host)).round == 8
    assert made == [7, 8]


def at(number):
    return State(number, [torch.full(shape, float(number)) for shape in SHAPES])


def requested(host, *sources, astray=True, round=5):
    return begin_fetch(
        host,
        query(astray=astray, round=round, equal=True, confirmed=False, patience=1.0),
        to(*sources),
    )


def adrift(host, round=5):
    server = StateServer(host, SWARM, MODEL, SHAPES)
    server.diverged = round
    return server


def test_lowest_drifted_keeps_its_own(network):
    """Of those that drifted the lowest keeps its own and the others take it."""
    low, middle, high = sorted((network.host() for _ in range(3)), key=lambda host: host.peer_id)
    servers = {host: adrift(host) for host in (low, middle, high)}
    assert (
        requested(low, middle, high).result(60) is None
    )  # refused by all: it is the one that the others come to
    waiting = {middle: requested(middle, high, low), high: requested(high, middle, low)}
    for host in (middle, high):
        servers[host].offer(lambda: at(9))  # of weights that have drifted nothing is handed out
    servers[low].diverged = None
    while not all(future.done() for future in waiting.values()):
        servers[low].offer(lambda: at(1))
    assert [waiting[host].result(60).round for host in (middle, high)] == [1, 1]


def test_later_round_keeps_its_own(network):
    """Of two that drifted the one of the later round keeps its own whatever their ids."""
    low, high = sorted((network.host() for _ in range(2)), key=lambda host: host.peer_id)
    servers = {low: adrift(low, 5), high: adrift(high, 6)}
    assert requested(high, low, round=6).result(60) is None
    coming = requested(low, high, round=5)
    servers[high].offer(lambda: at(9))
    servers[high].diverged = None
    while not coming.done():
        servers[high].offer(lambda: at(6))
    assert coming.result(60).round == 6


def test_a_newcomer_also_waits_until_weights_have_come_back(network):
    me, source = sorted((network.host() for _ in range(2)), key=lambda host: host.peer_id)
    server = adrift(source)
    coming = requested(me, source, astray=False)
    server.offer(lambda: at(1))
    server.diverged = None
    while not coming.done():
        server.offer(lambda: at(2))
    assert coming.result(60).round == 2


def test_gone_counts_as_refused_and_broken_does_not(network):
    """Who is gone counts like one who refuses and who breaks off does not."""
    me, dead, rude = (network.host() for _ in range(3))
    dead.dead = True

    async def busy(stream):
        await stream.receive(1000, 2)
        await stream.send(pack(Answer(verdict="busy", reason="no step was finished", round=0)), 2)

    rude.serve(STATE_PROTOCOL, busy)
    assert requested(me, dead).result(60) is None
    with pytest.raises(NetworkError, match="none of the peers that were asked"):
        requested(me, dead, rude).result(60)


@pytest.fixture
def two(network):
    """Two hosts, the one with the lower peer id first, and the server of the other."""
    lower, higher = sorted((network.host() for _ in range(2)), key=lambda host: host.peer_id)
    return lower, higher


def ask(network, asking, asked, *, astray, since=0):
    """A question, answered with "wait"; returns what hears the next answer."""

    async def begin():
        stream = await asking.open(asked.peer_id, STATE_PROTOCOL, timeout=30)
        await stream.send(
            pack(StateRequest(swarm=SWARM, model=MODEL, astray=astray, round=5, since=since)), 5
        )
        assert unpack(await stream.receive(Answer.LIMIT, 5), Answer).verdict == "wait"
        return stream

    stream = asking.call(begin(), 60)

    async def hear(seconds):
        said = unpack(await stream.receive(StateHeader.LIMIT, seconds), Answer, StateHeader)
        return said.verdict if isinstance(said, Answer) else said.round

    return lambda: asking.call(hear(5), 60)


def never():
    raise AssertionError("weights that have drifted are handed to nobody")


def test_drifted_node_turns_away_lower_ids(network, two):
    """Who drifts turns away those with lower ids that drifted too."""
    lower, higher = two
    server = StateServer(higher, SWARM, MODEL, [(4,)])
    answer = ask(network, lower, higher, astray=True)
    server.diverged = 5
    server.offer(never)
    assert answer() == "refuse"


def test_far_round_request_keeps_no_place(network, two):
    """The fault: a caller may state any round to wait for, and 64 such kept all newcomers out for a
    minute each.
    """
    asking, asked = two
    server = StateServer(asked, SWARM, MODEL, [(4,)])
    far = ask(network, asking, asked, astray=False, since=2**53)
    near = ask(network, asking, asked, astray=False, since=5 + MAX_WAIT_ROUNDS)
    server.offer(lambda: State(5, [torch.zeros(4)], {}, [4]))
    assert far() == "busy"
    assert len(server._wanted) == 1
    server.offer(lambda: State(5 + MAX_WAIT_ROUNDS, [torch.zeros(4)], {}, [4]))
    assert near() == 5 + MAX_WAIT_ROUNDS


@pytest.mark.parametrize(
    ("first_asks", "astray"), [(True, False), (False, True)], ids=["a newcomer", "a higher id"]
)
def test_others_wait_until_it_is_back(network, two, first_asks, astray):
    asking, asked = two if first_asks else two[::-1]
    server = StateServer(asked, SWARM, MODEL, [(4,)])
    ask(network, asking, asked, astray=astray)
    server.diverged = 5
    server.offer(never)
    assert len(server._wanted) == 1


def test_a_copy_that_fails_ends_neither_training_nor_serving(network, two, monkeypatch):
    """The fault: a stranger's question ended the node, or nobody was served ever after."""
    asking, asked = two
    server = StateServer(asked, SWARM, MODEL, [(4,)])
    answer = ask(network, asking, asked, astray=False)
    state = State(5, [torch.zeros(4)], {}, [4])
    with monkeypatch.context() as patch:
        patch.setattr(state_server, "encode", Mock(side_effect=MemoryError("no memory")))
        server.offer(lambda: state)
    assert asked.internal_errors.report()["weights"]["count"] == 1
    server.offer(lambda: state)
    assert answer() == 5


@pytest.mark.parametrize("is_partner", [False, True])
def test_copies_for_strangers_take_little_of_training(network, two, is_partner):
    """The fault: asking again and again took all of a training thread whose copies take long.

    Mutants: no rest after copies; one after each; one without end; a partner, whose weights may
    have diverged, gets old ones too.
    """
    asking, asked = two
    clock = Clock()
    server = StateServer(asked, SWARM, MODEL, [(4,)], clock)
    handler = asked.handlers[STATE_PROTOCOL]
    copied = []

    async def marked(stream):
        stream.partner = is_partner
        await handler(stream)

    def copying(round):
        clock.now += 3.0
        copied.append(round)
        return State(round, [torch.zeros(4)], {}, [round - 1])

    asked.serve(STATE_PROTOCOL, marked)

    def offered(round):
        answer = ask(network, asking, asked, astray=False)
        server.offer(lambda: copying(round))
        return answer()

    assert offered(5) == 5
    assert offered(6) == 6  # who was behind by a round
    clock.now += BUSY_S + 1  # nobody downloads them
    assert offered(7) == (7 if is_partner else 6)
    clock.now += REST_PER_COPY * 3.0
    assert offered(8) == 8
    assert copied == ([5, 6, 7, 8] if is_partner else [5, 6, 8])


def test_who_waits_for_a_copy_holds_no_thread_of_exchanges(network, two):
    asking, asked = two
    server = StateServer(asked, SWARM, MODEL, [(4,)])
    began, go_on = threading.Event(), threading.Event()

    def slow_copy():
        began.set()
        assert go_on.wait(60)
        return State(5, [torch.zeros(4)], {}, [4])

    with server.at_rest(slow_copy):
        many = 8 + (os.cpu_count() or 1)  # more than asyncio's own threads
        answers = [ask(network, asking, asked, astray=False) for _ in range(many)]
        assert began.wait(60)
        assert asked.call(asyncio.to_thread(lambda: 7), 60) == 7
        go_on.set()
        assert {answer() for answer in answers} == {5}


STATE = State(
    3,
    [torch.arange(700_000.0), torch.ones(3)],
    {"momentum": [torch.zeros(700_000), torch.ones(3)]},
    [2],
)


def test_a_snapshot_in_a_file_is_the_one_in_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    in_memory = make(STATE, encode(STATE))
    monkeypatch.setattr(spool, "SPOOLED_BYTES", 1)
    content = encode(STATE)
    assert isinstance(content, Spool)
    filed = make(STATE, content)
    assert filed.id == in_memory.id
    assert torch.equal(in_memory.content, FLOAT32.encode([*STATE.slow, *STATE.extra["momentum"]]))
    for number in range(chunks_in(filed.header.nbytes)):
        assert bytes(filed.chunk(number)) == bytes(in_memory.chunk(number))
    for state in (read(one, {"momentum": [(1000, 700), (3,)]}) for one in (filed, in_memory)):
        assert [len(part) for part in (state.slow, state.extra["momentum"])] == [2, 2]
        assert all(torch.equal(one, two) for one, two in zip(state.slow, STATE.slow, strict=True))
        assert torch.equal(state.extra["momentum"][0], torch.zeros(1000, 700))
        assert torch.equal(state.extra["momentum"][-1], STATE.extra["momentum"][1])
    assert list(tmp_path.iterdir()) == []  # it has no name


def test_small_snapshot_is_in_memory(monkeypatch):
    """A small snapshot or one for which there is no room is in memory."""
    assert spool_for(1000) is None

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert spool_for(1 << 30) is None


def test_changes_of_what_was_read_do_not_reach_the_file():
    spool = Spool(8)
    spool.write(0, memoryview(bytes(range(8))))
    spool.mapped(0, (2,)).fill_(9)
    assert bytes(spool.read(2, 4)) == bytes([2, 3, 4, 5])


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="the system does not list what is mapped"
)
def test_what_was_read_takes_memory_only_while_it_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(spool, "SPOOLED_BYTES", 1)
    state, maps = (
        read(make(STATE, encode(STATE)), {"momentum": [(700_000,), (3,)]}),
        Path("/proc/self/maps"),
    )
    assert maps.read_text().count(str(tmp_path)) == 0
    taken = state.slow[1]
    assert maps.read_text().count(str(tmp_path)) == 1
    assert taken.tolist() == [1.0, 1.0, 1.0]  # it begins within a page
    del taken
    assert maps.read_text().count(str(tmp_path)) == 0
