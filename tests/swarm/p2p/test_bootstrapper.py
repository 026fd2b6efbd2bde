"""What a node says that finds nobody to join through."""

import asyncio

import pytest

from shoal.swarm.errors import StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p import bootstrapper, hivemind_adapter
from shoal.swarm.p2p.bootstrapper import Bootstrapper, HostOptions
from shoal.swarm.p2p.daemon import DaemonError
from shoal.swarm.p2p.peerstore import Peerstore

ME, BERT, CARL = (Identity.ephemeral().peer_id for _ in range(3))


class NobodyListens:
    """The daemon of a machine from which every address refuses."""

    async def connect(self, peer, addresses):
        raise DaemonError("dial to self" if peer == ME else "connection refused")


def joining_through(*peers):
    """Return the bootstrapper of a node ``ME`` that joins through ``peers``, and their
    addresses.
    """
    addresses = [f"/ip4/127.0.0.1/tcp/{4001 + n}/p2p/{peer}" for n, peer in enumerate(peers)]
    known = Peerstore(ME, None, "")
    options = HostOptions(
        listen=(),
        announce=(),
        bootstrap=addresses,
        validator=None,
        light=False,
        relay="off",
        swarm=None,
        must_join=True,
    )
    return Bootstrapper(None, ME, options, known, None), addresses


async def refused_by(*peers):
    """Return the sentence of a node ``ME`` that joins through addresses of ``peers``."""
    joining, addresses = joining_through(*peers)
    with pytest.raises(StartupError) as caught:
        await joining.enter(NobodyListens(), asyncio.get_running_loop().time() + 5)
    return str(caught.value), addresses


async def test_a_reason_of_several_addresses_is_said_once():
    said, (first, second) = await refused_by(BERT, CARL)
    assert said == (
        f"no bootstrap peer can be reached: {first}, {second} refused the connection: no node "
        "listens there, start it or get a new link."
    )


async def test_its_own_addresses_in_a_link_are_skipped():
    """A link holds them where this node was a member before."""
    said, (_, other) = await refused_by(ME, BERT)
    assert said.startswith(f"no bootstrap peer can be reached: {other} refused the connection: ")


async def test_a_link_to_itself_alone_is_named():
    said, _ = await refused_by(ME)
    assert said.endswith(" is this node itself: give the address of another node.")


class BusyDHT:
    """A DHT node on a daemon that reaches everybody; its first calls get no answer."""

    def __init__(self, monkeypatch, lost):
        self.calls = []
        self.lost = lost
        monkeypatch.setattr(bootstrapper, "MEET_AGAIN_S", 0.0)
        monkeypatch.setattr(hivemind_adapter, "join_dht", self.join)
        monkeypatch.setattr(hivemind_adapter, "ping", self.ping)
        monkeypatch.setattr(hivemind_adapter, "count_peers", lambda dht: self.met())

    def met(self):
        return max(len(self.calls) - self.lost, 0)

    async def connect(self, peer, addresses):
        pass

    async def join(self, daemon, peers, *_):
        return self

    async def ping(self, dht, peer):
        self.calls.append(peer)
        if len(self.calls) <= self.lost:
            raise TimeoutError


async def entered(dht, seconds):
    joining, _ = joining_through(BERT)
    joining.hivemind_loaded.set()
    return await joining.enter(dht, asyncio.get_running_loop().time() + seconds)


async def test_busy_member_is_called_again_to_join(monkeypatch):
    """Fault: a member whose first answer was late was taken for one that is stopping."""
    dht = BusyDHT(monkeypatch, lost=2)
    assert await entered(dht, 30) is dht
    assert dht.calls == [BERT] * 3


async def test_calls_to_join_end_with_the_start(monkeypatch):
    """None is begun that could last beyond it."""
    dht = BusyDHT(monkeypatch, lost=2)
    with pytest.raises(StartupError, match=f"{BERT} answered but does not hold the swarm's rec"):
        await entered(dht, bootstrapper.CALL_S - 1)
    assert dht.calls == []
