"""A newcomer gets the manifest of the right swarm."""

import asyncio

import pytest

from shoal.swarm.access import Link
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.manifest import Manifest, swarm_id
from shoal.swarm.membership.admission import MANIFEST_PROTOCOL, fetch_manifest, serve_manifest
from shoal.swarm.wire.envelope import pack, seal
from shoal.swarm.wire.messages import ManifestReply

MODEL = "0" * 64


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
    with pytest.raises(NetworkError, match=r"No peer of the link served .* ask for a fresh link\."):
        fetch_manifest(me, link(manifest, dead))


def test_a_peer_that_says_nothing_delays_nobody(network):
    me, silent, friend = (network.host() for _ in range(3))
    manifest = sealed(friend)

    async def hang(stream):
        await asyncio.Event().wait()

    silent.serve(MANIFEST_PROTOCOL, hang)
    serve_manifest(friend, swarm_id(manifest), manifest)
    data, _ = fetch_manifest(me, link(manifest, silent, friend), timeout=5)  # half of what one that is silent may take
    assert data == manifest
