"""Whose addresses are in a link, and in which order; how a newcomer gets the manifest; and who is
dialled again when out of sight."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from shoal.swarm.access.link import Link
from shoal.swarm.errors import LinkError, MessageError, NetworkError
from shoal.swarm.identity import ID_HEADER, Identity, b58encode
from shoal.swarm.manifest import MANIFEST_PROTOCOL, Manifest, swarm_id
from shoal.swarm.membership import manifest_exchange
from shoal.swarm.membership.link_addresses import lasting_link
from shoal.swarm.membership.manifest_exchange import fetch_manifest, serve_manifest
from shoal.swarm.membership.reconnector import (
    DIALS_AT_ONCE,
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    REDIAL_S,
    Reconnector,
)
from shoal.swarm.wire.envelope import pack, seal
from shoal.swarm.wire.messages import ManifestReply, ManifestRequest

SWARM = swarm_id(b"a swarm")


class Record(NamedTuple):
    addresses: tuple
    issued: float = 1000.0


def peer(number):
    return b58encode(ID_HEADER + bytes([number]) * 32)


def at(number, host=None, port=4001):
    return f"/ip4/{host or f'198.{number}.0.1'}/tcp/{port}/p2p/{peer(number)}"


def relayed(number, by=99):
    return f"/ip4/9.9.9.9/tcp/4001/p2p/{peer(by)}/p2p-circuit/p2p/{peer(number)}"


def members(*numbers, **changes):
    return {peer(number): Record((at(number),), **changes) for number in numbers}


def chosen(others=(), **how):
    return lasting_link(SWARM, dict(others), **{"seeds": {}, **how}).bootstrap


def test_bootstrap_nodes_come_first_then_direct_members():
    """Bootstrap node's first then the node itself and direct members then relayed ones."""
    others = {**members(1), peer(2): Record((relayed(2),), 2000.0), **members(3, issued=1500.0)}
    found = chosen(others, seeds={peer(50): (at(50),), peer(51): (at(51),)}, own=[at(7)])
    assert found == (at(50), at(51), at(7), at(3), at(1), relayed(2))


def test_relayed_node_comes_after_dialable_ones():
    """A node behind a relay stands behind those that can be dialled."""
    assert chosen(members(1), own=[relayed(7)]) == (at(1), relayed(7))


def test_met_members_come_before_those_only_read_of():
    assert chosen(members(1, 2, 3), met={peer(3)}) == (at(3), at(1), at(2))
    assert chosen({**members(1), peer(2): Record((relayed(2),))}, met={peer(2)}) == (
        at(1),
        relayed(2),
    )


def test_each_range_comes_before_a_second_of_any():
    """One of each address range comes before the second of any."""
    crowd = {
        peer(number): Record((at(number, f"203.0.{number}.1"),), 2000.0 + number)
        for number in range(1, 30)
    }
    others = {**crowd, **members(40, 41)}
    found = chosen(others)
    assert found[:3] == (at(29, "203.0.29.1"), at(40), at(41))
    assert len(found) == 16
    assert found[3] == at(28, "203.0.28.1")


def test_a_full_link_keeps_bootstrap_nodes_and_the_node_itself():
    seeds = {peer(number): (at(number), at(number, port=4002)) for number in range(50, 56)}
    own = [at(7, port=port) for port in range(5000, 5008)]
    found = chosen(members(*range(10, 40)), seeds=seeds, own=own)
    assert len(found) == 16
    assert found[:4] == tuple(at(number) for number in range(50, 54))
    assert found[4:8] == tuple(own[:4])
    assert found[8:] == tuple(at(number) for number in sorted(range(10, 40), key=peer)[:8])


def test_second_addresses_fill_what_is_left_and_others_come_last():
    others = {peer(1): Record((at(1), at(1, port=4002), at(1, port=4003)))}
    found = chosen(
        others, seeds={peer(50): (at(50), at(50, port=4002))}, own=[at(7)], otherwise=[at(9), at(1)]
    )
    assert found == (at(50), at(50, port=4002), at(7), at(1), at(1, port=4002), at(9))


def test_outside_addresses_are_preferred():
    """An address beyond the machine is preferred and a relay where there is one."""
    here, lan = at(1, "127.0.0.1"), at(1, "192.168.0.7")
    assert chosen({peer(1): Record((here, lan))}) == (lan,)
    assert chosen({}, own=[here, at(1)]) == (at(1),)
    assert chosen({}, own=[here]) == (here,)
    assert chosen({peer(1): Record((lan, relayed(1)))}) == (relayed(1), lan)
    assert chosen({peer(1): Record((here,))}) == (here,)


@pytest.mark.parametrize(
    "far", [at(50), at(50).replace("/ip4/198.50.0.1", "/dns4/seed.example.org"), relayed(50)]
)
def test_private_addresses_stay_in_private_swarms(far):
    """Private addresses are handed on only in a swarm that is known by no other."""
    lan, cgnat = at(1, "192.168.0.7"), at(7, "100.64.1.2")
    others = {peer(1): Record((lan, at(1)), 2000.0), peer(2): Record((at(2, "10.0.0.2"),))}
    assert chosen(
        others, seeds={peer(50): (far,)}, own=[cgnat], otherwise=[at(9, "172.16.0.9")]
    ) == (far, at(1))
    assert chosen(others, own=[cgnat], otherwise=[far]) == (at(1), far)
    assert chosen(others, own=[cgnat, far])[0] == (at(1) if far == relayed(50) else far)
    assert not {lan, cgnat} & {*chosen(others, own=[cgnat, far])}


def test_public_claim_drops_no_private_address():
    """A members word of a public address drops no private one."""
    lan = at(7, "192.168.0.7")
    assert chosen(members(1), own=[lan]) == (lan, at(1))
    assert chosen({peer(1): Record((at(1, "10.0.0.1"), at(1)))}) == (at(1), at(1, "10.0.0.1"))


def test_malformed_and_foreign_addresses_are_left_out():
    """What a stranger names of others or malformed is left out."""
    victim = Record((at(2), "/ip4/1.2.3.4/tcp/1", f"/x/p2p/{peer(1)}"))
    with pytest.raises(LinkError, match="names no peer to join through"):
        chosen({peer(1): victim})
    assert chosen({peer(1): victim}, own=["/ip4/0/tcp/1", at(7)], otherwise=["/nonsense"]) == (
        at(7),
    )


def test_it_is_a_link_to_the_swarm_without_an_invitation():
    made = lasting_link(SWARM, members(1), seeds={})
    assert (made.swarm, made.invite) == (SWARM, "")
    assert Link.parse(str(made)) == made


def test_of_many_members_relayed_ones_are_left_out():
    """Of many members those behind relays are left out but not the node itself."""
    behind = {peer(number): Record((relayed(number),), 2000.0) for number in range(60, 80)}
    found = chosen({**behind, **members(*range(10, 40))}, own=[relayed(7)])
    assert found[-1] == relayed(7)
    assert len(found) == 16
    assert all(address in {at(number) for number in range(10, 40)} for address in found[:-1])


MODEL = "0" * 64


def sealed(host, name="mine"):
    return seal(
        Manifest(name=name, created=0.0, creator=host.peer_id, task="text", model=MODEL),
        host.identity,
    )


def link(manifest, *hosts):
    return Link(
        swarm_id(manifest), tuple(f"/ip4/127.0.0.1/tcp/1/p2p/{host.peer_id}" for host in hosts)
    )


def test_any_peer_with_the_manifest_will_do(network):
    """Any peer of the link that has the manifest will do."""
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
        fetch_manifest(me, link(manifest, dead, stranger), timeout=1)
    with pytest.raises(
        MessageError, match="The wrong swarm id: the manifest that came belongs to swarm"
    ):
        fetch_manifest(me, link(manifest, liar))
    with pytest.raises(NetworkError) as caught:
        fetch_manifest(me, link(manifest, dead), timeout=0.1)
    assert str(caught.value) == (
        "No peer served the swarm's manifest within 0.1 s, asked again and again "
        f"(/ip4/127.0.0.1/tcp/1/p2p/{dead.peer_id}: the peer is not there): they may be busy, so "
        "try again, or ask for a fresh link."
    )


def test_a_peer_that_says_nothing_delays_nobody(network):
    me, silent, friend = (network.host() for _ in range(3))
    manifest = sealed(friend)

    async def hang(stream):
        await asyncio.Event().wait()

    silent.serve(MANIFEST_PROTOCOL, hang)
    serve_manifest(friend, swarm_id(manifest), manifest)
    data, _ = fetch_manifest(
        me, link(manifest, silent, friend), timeout=5
    )  # half of what one that is silent may take
    assert data == manifest


def busy(host, manifest, times):
    """Have ``host`` end the first ``times`` streams on which it is asked without an answer; return
    who has asked.
    """
    asked = []

    async def answer(stream):
        await stream.receive(ManifestRequest.LIMIT, 2)
        asked.append(stream.peer_id)
        if len(asked) <= times:
            stream.abort()
            return
        await stream.send(pack(ManifestReply(manifest=manifest, swarm=swarm_id(manifest))), 2)

    host.serve(MANIFEST_PROTOCOL, answer)
    return asked


def test_busy_member_is_asked_again_for_the_manifest(network, monkeypatch):
    """Fault: it was asked once, and the swarm seemed to be gone."""
    monkeypatch.setattr(manifest_exchange, "ASK_AGAIN_S", 0.01)
    me, friend, stranger = (network.host() for _ in range(3))
    manifest, other = sealed(friend), sealed(stranger, "other")
    serve_manifest(stranger, swarm_id(other), other)
    asked = busy(friend, manifest, times=3)
    data, _ = fetch_manifest(me, link(manifest, friend, stranger))
    assert data == manifest
    assert len(asked) == 4
    # One that is in another swarm is so for good.
    assert [peer for _, peer, _ in network.opened].count(stranger.peer_id) == 1


def test_members_beyond_the_link_are_asked_too(network):
    """A node hears of them while it asks the link's, which may be about to leave."""
    me, leaving, friend = (network.host() for _ in range(3))
    manifest = sealed(friend)
    serve_manifest(friend, swarm_id(manifest), manifest)

    async def leave(stream):
        me.heard += link(manifest, friend).bootstrap
        stream.abort()

    leaving.serve(MANIFEST_PROTOCOL, leave)
    data, _ = fetch_manifest(me, link(manifest, leaving))
    assert data == manifest


PEERS = [Identity.ephemeral().peer_id for _ in range(10)]


class Scene:
    def __init__(self, count):
        self.known = [
            f"/ip4/10.0.0.{number}/tcp/4001/p2p/{peer}" for number, peer in enumerate(PEERS[:count])
        ]
        self.here, self.left = set(PEERS[:count]), set()
        host = SimpleNamespace(known=lambda: self.known)
        self.reconnector = Reconnector(
            host, SimpleNamespace(everyone=self.members, departed=lambda: dict.fromkeys(self.left))
        )

    def members(self):
        return dict.fromkeys(self.here)

    def dialled(self, seconds):
        """(when, peer) of every dial."""
        return [
            (now, address.rpartition("/")[2])
            for now in range(0, seconds, int(REDIAL_S))
            for address in self.reconnector.due(float(now))
        ]


def test_nobody_is_dialled_who_is_in_view():
    assert Scene(5).dialled(1000) == []


def test_lost_peer_is_dialled_ever_less_often():
    """A lost peer is dialled ever less often and never given up."""
    scene = Scene(2)
    scene.here.remove(PEERS[1])
    when = [now for now, peer in scene.dialled(4000) if peer == PEERS[1]]
    assert when[:5] == [10, 30, 70, 150, 310]
    assert {after - before for before, after in pairwise(when[5:])} == {MAX_PAUSE_S}


def test_who_came_back_and_is_lost_again_is_dialled_soon():
    scene = Scene(2)
    scene.here.remove(PEERS[1])
    scene.dialled(2000)
    scene.here.add(PEERS[1])
    assert scene.reconnector.due(2000.0) == []
    scene.here.remove(PEERS[1])
    assert scene.reconnector.due(2010.0) == []
    assert scene.reconnector.due(2010.0 + FIRST_PAUSE_S) == [scene.known[1]]


def test_a_few_at_a_time_and_each_gets_its_turn():
    scene = Scene(10)
    scene.here.clear()
    dials = scene.dialled(100)
    assert max(sum(when == now for when, _ in dials) for now, _ in dials) == DIALS_AT_ONCE
    assert {peer for now, peer in dials if now <= 30} == set(PEERS)


def test_departed_peer_is_left_in_peace():
    """Who said goodbye is left in peace until it is seen again."""
    scene = Scene(2)
    scene.here.remove(PEERS[1])
    scene.left = {PEERS[1]}
    assert scene.dialled(100) == []
    scene.left = set()  # the goodbye expires
    assert scene.dialled(1000) == []
    scene.here.add(PEERS[1])
    scene.reconnector.due(1000.0)
    scene.here.remove(PEERS[1])
    assert scene.reconnector.due(1010.0) == []
    assert scene.reconnector.due(1020.0) == [scene.known[1]]
