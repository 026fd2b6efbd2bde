"""Peers out of sight are dialled again, ever less often, a few at a time, unless they said goodbye."""

from itertools import pairwise
from types import SimpleNamespace

from shoal.swarm.identity import Identity
from shoal.swarm.membership.swarm_list import FIRST, LONGEST, REDIAL_S, TRIED, Reconnector

PEERS = [Identity.ephemeral().peer_id for _ in range(10)]


class Scene:
    def __init__(self, count):
        self.known = [f"/ip4/10.0.0.{number}/tcp/4001/p2p/{peer}" for number, peer in enumerate(PEERS[:count])]
        self.here, self.left = set(PEERS[:count]), set()
        host = SimpleNamespace(known=lambda: self.known)
        self.reconnector = Reconnector(host, SimpleNamespace(everyone=self.members, departed=lambda: dict.fromkeys(self.left)))

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


def test_a_lost_peer_is_dialled_ever_less_often_and_never_given_up():
    scene = Scene(2)
    scene.here.remove(PEERS[1])
    when = [now for now, peer in scene.dialled(4000) if peer == PEERS[1]]
    assert when[:5] == [10, 30, 70, 150, 310]
    assert {after - before for before, after in pairwise(when[5:])} == {LONGEST}


def test_who_came_back_and_is_lost_again_is_dialled_soon():
    scene = Scene(2)
    scene.here.remove(PEERS[1])
    scene.dialled(2000)
    scene.here.add(PEERS[1])
    assert scene.reconnector.due(2000.0) == []
    scene.here.remove(PEERS[1])
    assert scene.reconnector.due(2010.0) == []
    assert scene.reconnector.due(2010.0 + FIRST) == [scene.known[1]]


def test_a_few_at_a_time_and_each_gets_its_turn():
    scene = Scene(10)
    scene.here.clear()
    dials = scene.dialled(100)
    assert max(sum(when == now for when, _ in dials) for now, _ in dials) == TRIED
    assert {peer for now, peer in dials if now <= 30} == set(PEERS)


def test_who_said_goodbye_is_left_in_peace_until_it_is_seen_again():
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
