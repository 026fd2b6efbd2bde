"""What a node says that finds nobody to join through."""

import asyncio

import pytest

from shoal.swarm.errors import StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.bootstrapper import Bootstrapper, HostOptions
from shoal.swarm.p2p.daemon import DaemonError
from shoal.swarm.p2p.peerstore import Peerstore

ME, BERT, CARL = (Identity.ephemeral().peer_id for _ in range(3))


class NobodyListens:
    """The daemon of a machine from which every address refuses."""

    async def connect(self, peer, addresses):
        raise DaemonError("dial to self" if peer == ME else "connection refused")


async def refused_by(*peers):
    """Return the sentence of a node ``ME`` that joins through addresses of ``peers``."""
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
    bootstrapper = Bootstrapper(None, ME, options, known, None)
    with pytest.raises(StartupError) as caught:
        await bootstrapper.enter(NobodyListens(), asyncio.get_running_loop().time() + 5)
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
