"""What a newcomer is told: the manifest of the right swarm, and weights that are whole or none."""

import math
import threading

import pytest
import torch

from swarm.errors import MessageError, NetworkError
from swarm.link import Link
from swarm.manifest import Manifest, swarm_id
from swarm.messages import Answer, ManifestReply, StateRequest, pack, seal
from swarm.stream import Stream
from swarm.welcome import (
    MANIFEST_PROTOCOL,
    STATE_PROTOCOL,
    ModelDiffersError,
    State,
    StateServer,
    begin_fetch,
    fetch_manifest,
    fetch_state,
    serve_manifest,
)

MODEL = "0" * 64
SHAPES = [(300, 1000), (3,)]


def sealed(host, name="mine"):
    return seal(Manifest(name=name, created=0.0, creator=host.peer_id, task="text", model=MODEL), host.identity)


def link(manifest, *hosts):
    return Link(swarm_id(manifest), tuple(f"/ip4/127.0.0.1/tcp/1/p2p/{host.peer_id}" for host in hosts))


def test_any_peer_of_the_link_that_has_the_manifest_will_do(network):
    me, dead, stranger, liar, friend = (network.host() for _ in range(5))
    manifest, other = sealed(friend), sealed(stranger, "other")
    dead.dead = True
    serve_manifest(stranger, swarm_id(other), other)
    serve_manifest(friend, swarm_id(manifest), manifest)

    async def lie(stream):
        await stream.receive(1000, 2)
        await stream.send(pack(ManifestReply(manifest=other, swarm=swarm_id(manifest))), 2)

    liar.serve(MANIFEST_PROTOCOL, lie)
    data, opened = fetch_manifest(me, link(manifest, dead, stranger, liar, friend))
    assert (data, opened.name) == (manifest, "mine")
    with pytest.raises(MessageError, match=r"Wrong swarm id: the peer .* belongs to swarm"):
        fetch_manifest(me, link(manifest, dead, stranger))
    with pytest.raises(MessageError, match="The wrong swarm id: the manifest that came belongs to swarm"):
        fetch_manifest(me, link(manifest, liar))
    with pytest.raises(NetworkError, match=r"No peer of the link handed out .* ask for a fresh link\."):
        fetch_manifest(me, link(manifest, dead))


@pytest.fixture
def giver(network):
    """A member that trains: it offers its weights between steps."""
    host = network.host()
    swarm = "a" * 52
    server = StateServer(host, swarm, MODEL, SHAPES)
    slow = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in SHAPES]
    stop, tick = threading.Event(), threading.Event()

    def train():
        while not stop.is_set():
            server.offer(lambda: State(7, 70, slow))
            tick.wait(0.01)

    thread = threading.Thread(target=train)
    thread.start()
    yield host, swarm, slow
    stop.set()
    thread.join(10)


def test_weights_come_whole(network, giver):
    host, swarm, slow = giver
    dead = network.host()
    dead.dead = True
    state = fetch_state(network.host(), swarm, MODEL, SHAPES, [(dead.peer_id, ()), (host.peer_id, ())])
    assert (state.round, state.step) == (7, 70)
    assert all(torch.equal(a, b) for a, b in zip(state.slow, slow, strict=True))


def test_weights_that_are_damaged_or_not_finite_are_not_used(network, giver, monkeypatch):
    host, swarm, slow = giver
    slow[1][0] = math.nan
    assert fetch_state(network.host(), swarm, MODEL, SHAPES, [(host.peer_id, ())]) is None
    slow[1][0] = 0.0
    swap = Stream.swap

    async def damaging(stream, outgoing, incoming, **options):
        await swap(stream, memoryview(bytes(len(outgoing))), incoming, **options)

    monkeypatch.setattr(Stream, "swap", damaging)
    assert fetch_state(network.host(), swarm, MODEL, SHAPES, [(host.peer_id, ())]) is None


MOMENTUM = [torch.full((300, 1000), 0.5), torch.tensor([1.0, 2.0, 3.0])]
COUNT = [torch.tensor(4.0), torch.tensor(5.0)]


@pytest.fixture
def rich(network):
    """A member that hands out a momentum, and a number for each parameter, beside its weights; once for each call."""
    host, swarm = network.host(), "a" * 52
    server = StateServer(host, swarm, MODEL, SHAPES)
    slow = [torch.full(shape, 2.0) for shape in SHAPES]
    extra = {"momentum": MOMENTUM, "count": COUNT}
    stop, tick = threading.Event(), threading.Event()

    def train():
        while not stop.is_set():
            server.offer(lambda: State(7, 70, slow, extra))
            tick.wait(0.01)

    thread = threading.Thread(target=train)
    thread.start()
    yield host, swarm, extra
    stop.set()
    thread.join(10)


def ask(network, rich, extra):
    host, swarm, _ = rich
    return fetch_state(network.host(), swarm, MODEL, SHAPES, [(host.peer_id, ())], extra)


def test_the_state_of_the_rule_comes_with_the_weights(network, rich):
    state = ask(network, rich, {"momentum": SHAPES, "count": [(), ()], "start": SHAPES})
    assert all(bool((tensor == 2.0).all()) for tensor in state.slow)
    assert sorted(state.extra) == ["count", "momentum"]
    for name, wanted in (("momentum", MOMENTUM), ("count", COUNT)):
        assert all(torch.equal(got, tensor) for got, tensor in zip(state.extra[name], wanted, strict=True))
    rich[2].clear()
    assert ask(network, rich, {"momentum": SHAPES}).extra == {}


@pytest.mark.parametrize("extra", [None, {"momentum": SHAPES}, {"momentum": SHAPES, "count": [(1,), ()]}])
def test_a_state_that_does_not_fit_the_own_rule_is_not_taken(network, rich, extra, caplog):
    assert ask(network, rich, extra) is None
    assert "does not fit this node's outer rule" in caplog.text


def test_a_state_of_the_rule_that_is_not_finite_is_not_taken(network, rich):
    rich[2]["momentum"] = [MOMENTUM[0], torch.tensor([1.0, math.inf, 3.0])]
    assert ask(network, rich, {"momentum": SHAPES, "count": [(), ()]}) is None


def test_another_model_is_told_the_difference_and_another_swarm_nothing(network, giver):
    host, swarm, _ = giver
    with pytest.raises(ModelDiffersError, match=r"tensor 1 has shape \[4\] here and \[3\] there"):
        fetch_state(network.host(), swarm, "1" * 64, [(300, 1000), (4,)], [(host.peer_id, ())])
    assert fetch_state(network.host(), "b" * 52, MODEL, SHAPES, [(host.peer_id, ())]) is None


SWARM = "a" * 52


def requested(host, *givers, astray=True):
    request = StateRequest(swarm=SWARM, model=MODEL, astray=astray)
    return begin_fetch(host, request, SHAPES, [(giver.peer_id, ()) for giver in givers])


def adrift(host):
    server = StateServer(host, SWARM, MODEL, SHAPES)
    server.astray = True
    return server


def at(number):
    return State(number, 0, [torch.full(shape, float(number)) for shape in SHAPES])


def test_of_three_that_drifted_the_lowest_keeps_its_own_and_the_others_take_them_in_turn(network):
    low, middle, high = sorted((network.host() for _ in range(3)), key=lambda host: host.peer_id)
    servers = {host: adrift(host) for host in (low, middle, high)}
    assert requested(low, middle, high).result(10) is None  # refused by all: it is the one that the others come to
    waiting = {middle: requested(middle, high, low), high: requested(high, middle, low)}
    for host in (middle, high):
        servers[host].offer(lambda: at(9))  # of weights that have drifted nothing is handed out
    servers[low].astray = False
    while not waiting[middle].done():
        servers[low].offer(lambda: at(1))
    assert waiting[middle].result(10).round == 1
    assert not waiting[high].done()
    servers[middle].astray = False
    while not waiting[high].done():
        servers[middle].offer(lambda: at(2))
    assert waiting[high].result(10).round == 2


def test_a_newcomer_also_waits_until_weights_have_come_back(network):
    me, giver = sorted((network.host() for _ in range(2)), key=lambda host: host.peer_id)
    server = adrift(giver)
    coming = requested(me, giver, astray=False)
    server.offer(lambda: at(1))
    server.astray = False
    while not coming.done():
        server.offer(lambda: at(2))
    assert coming.result(10).round == 2


def test_who_is_gone_counts_like_one_who_refuses_and_who_breaks_off_does_not(network):
    me, dead, rude = (network.host() for _ in range(3))
    dead.dead = True

    async def busy(stream):
        await stream.receive(1000, 2)
        await stream.send(pack(Answer(verdict="busy", reason="no step was finished", round=0)), 2)

    rude.serve(STATE_PROTOCOL, busy)
    assert requested(me, dead).result(10) is None
    with pytest.raises(NetworkError, match="none of the peers that were asked"):
        requested(me, dead, rude).result(10)
