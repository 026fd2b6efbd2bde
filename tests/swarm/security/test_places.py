"""Tables of limited size that any peer may enter: one address range that fills them gives way to
others.
"""

import asyncio
from types import SimpleNamespace

import pytest

from shoal.swarm.exchange.group import leader as group_leader
from shoal.swarm.exchange.group import streams
from shoal.swarm.exchange.group.leader import MAX_PENDING, PendingGroup
from shoal.swarm.exchange.group.streams import PeerStreams
from shoal.swarm.exchange.pair import held_calls as pair_held_calls
from shoal.swarm.exchange.pair.held_calls import HeldCalls
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.state import chunk_server as chunk_server_module
from shoal.swarm.state import state_server as state_server_module
from shoal.swarm.state.chunk_server import ChunkServer
from shoal.swarm.state.state_server import StateServer
from shoal.swarm.wire.envelope import pack, seal
from shoal.swarm.wire.messages import GroupHello, GroupReceipt, StateRequest
from tests.support.fake_network import group_ready

SWARM, MODEL, MOST = "a" * 52, "0" * 64, 4
HOME, CROWD = "10.1.0.1", "10.2.0.1"


class Caller:
    """A stream on which ``says`` was sent, and then nothing."""

    def __init__(self, peer, origin, says=None, partner=False):
        self.peer_id, self.origin, self.partner = peer, origin, partner
        self._says, self.answers, self.ended = says, [], asyncio.Event()

    async def receive(self, limit, timeout):
        if self._says is not None:
            says, self._says = self._says, None
            return says
        await self.ended.wait()
        raise ConnectionError

    async def send(self, data, timeout):
        self.answers.append(data)

    async def more(self, timeout):
        await self.ended.wait()
        return False

    def abort(self):
        self.ended.set()

    close = abort


class Served:
    """The host of a server; ``handler`` is what that serves last."""

    def serve(self, protocol, handler):
        self.handler = handler


def chunk_server(monkeypatch):
    monkeypatch.setattr(chunk_server_module, "MAX_SERVED", MOST)
    host = Served()
    ChunkServer(host, SWARM, None)
    return host.handler, None


def state_server(monkeypatch):
    monkeypatch.setattr(state_server_module, "MAX_WAITING", MOST)
    host = Served()
    StateServer(host, SWARM, MODEL, [(3,)])
    return host.handler, pack(StateRequest(swarm=SWARM, model=MODEL))


def peer_streams(monkeypatch):
    monkeypatch.setattr(streams, "MAX_HELD", MOST)
    host = Served()
    PeerStreams(host, None, 60.0)
    return host.handler, pack(GroupHello(nonce=bytes(16)))


def held_calls(monkeypatch):
    monkeypatch.setattr(pair_held_calls, "MAX_HELD", MOST)
    nobody = SimpleNamespace(partners=lambda round: (), expects_slower=lambda peer, round: False)
    state = SimpleNamespace(rounds=SimpleNamespace(overlap=True), sizes={}, selector=nobody)
    waiting = HeldCalls(state)
    return lambda stream: waiting.hold(stream, SimpleNamespace(round=3, fragment=0, nbytes=0)), None


@pytest.mark.parametrize("table", [chunk_server, state_server, peer_streams, held_calls])
def test_full_table_yields_to_another_range(monkeypatch, table):
    """The fault: it was first come, so a few keys of one host, renewed in time, kept everybody else
    out.
    """

    async def main():
        serve, says = table(monkeypatch)
        crowd = [Caller(f"e{number}", CROWD, says) for number in range(MOST + 1)]
        home = Caller("ada", HOME, says)
        tasks = [asyncio.ensure_future(serve(each)) for each in crowd[:MOST]]
        await asyncio.sleep(0)
        beyond = asyncio.ensure_future(serve(crowd[MOST]))
        for _ in range(3):
            await asyncio.sleep(0)
        assert beyond.done()  # one more of the crowd is turned away
        tasks.append(asyncio.ensure_future(serve(home)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert [each.peer_id for each in crowd[:MOST] if each.ended.is_set()] == ["e0"]
        assert not tasks[-1].done()
        assert not home.ended.is_set()
        for task in (*tasks, beyond):
            task.cancel()
        await asyncio.gather(*tasks, beyond, return_exceptions=True)

    asyncio.run(main())


def test_places_are_shared_by_range_then_peer():
    """Places are shared by range then by peer and in one range partners come first."""
    places = StreamPlaces(4)
    first, second = Caller("a", CROWD), Caller("a", CROWD)
    partner = Caller("b", CROWD, partner=True)
    home = [Caller(f"h{number}", HOME) for number in range(3)]
    assert all(map(places.take, (Caller("c", CROWD), first, second, partner)))
    assert places.take(home[0])
    assert first.ended.is_set()  # of whoever has most the oldest, not the table's
    assert places.take(home[1])
    assert list(places.peers) == ["a", "b", "h0", "h1"]
    assert not places.take(home[2])  # no range has more than its own
    assert places.take(Caller("d", CROWD, partner=True))
    assert second.ended.is_set()
    assert not partner.ended.is_set()
    assert not places.take(Caller("e", CROWD, partner=True))  # nobody but partners is left there
    places.free(partner)
    places.free(partner)
    assert places.take(Caller("f", ""))
    assert places.peers.total() == 4


def test_group_leader_keeps_its_own_place(monkeypatch, school):
    """A group leader gives places to other ranges and never its own away."""
    monkeypatch.setattr(group_leader, "MAX_WAITING", MOST)
    one = school.peers(1)[0]
    leader, context = one.exchange._leader, one.exchange._context
    leader.start = lambda work: work.close()  # no group is formed
    people = [Identity.ephemeral() for _ in range(MOST + 1)]

    def caller(who, origin):
        ready = group_ready(context)
        return Caller(who.peer_id, origin, seal(ready, who))

    async def main():
        own = caller(context.identity, "")
        crowd, home = [caller(who, CROWD) for who in people], caller(Identity.ephemeral(), HOME)
        tasks = [asyncio.ensure_future(leader.serve(each)) for each in (own, *crowd)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert [GroupReceipt.KIND.encode() in each.answers[0] for each in crowd] == [True] * len(
            crowd
        )
        assert [b"noted" in each.answers[0] for each in crowd] == [True] * MOST + [False]
        tasks.append(asyncio.ensure_future(leader.serve(home)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert b"noted" in home.answers[0]
        assert [each.ended.is_set() for each in (own, crowd[0], crowd[1])] == [False, True, False]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    one.host.call(main(), 60)


def test_a_leader_whose_rounds_are_taken_gives_the_furthest_up(school):
    """The fault: thirty-two keys that each wait for two rounds to come took all rounds of a
    leader.
    """
    one = school.peers(1)[0]
    leader, context, gone = one.exchange._leader, one.exchange._context, []
    waiting = lambda round: SimpleNamespace(dismiss=lambda: gone.append(round))  # noqa: E731
    leader._pending = {
        (round, 0): PendingGroup({"x": waiting(round)}) for round in range(100, 100 + MAX_PENDING)
    }
    ready = group_ready(context, round=3)
    assert leader._judge("y", ready).verdict == "noted"
    assert gone == [99 + MAX_PENDING]
    assert (
        leader._judge("y", ready.model_copy(update={"round": 99 + MAX_PENDING + 1})).verdict
        == "busy"
    )
