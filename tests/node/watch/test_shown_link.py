"""The link on the page: whose addresses it has, what it never has, and a QR code that says the
same.
"""

import pytest

pytest.importorskip("segno", reason="segno is not installed")

import segno

from shoal.node.watch.events import Connected, Disconnected
from shoal.node.watch.swarm_view import SwarmView
from shoal.node.watch.web import IN_CODE, REFRESH_S, ShownLink
from shoal.swarm.access.link import Link
from shoal.swarm.identity import Identity
from tests.support.watched_peers import NOW, SWARM


def at(peer, number):
    return f"/ip4/198.{number}.0.1/tcp/4001/p2p/{peer}"


GONE, SEED = (at(Identity.ephemeral().peer_id, number) for number in (50, 60))


def shown(view, given, clock=lambda: 0.0):
    return Link.parse(ShownLink(given, clock).picture(view)["text"])


def test_it_has_members_that_are_heard_and_no_invitation(authors):
    anna, bert, carl = authors
    view = SwarmView()
    given = Link(SWARM, (GONE, SEED), "secret")
    view.take(Connected(time=NOW, peer=SEED.rpartition("/p2p/")[2]))
    view.take(anna.heard(addresses=(at(anna.peer, 1),)))
    view.take(bert.heard(addresses=(at(bert.peer, 2),), at=NOW + 1))
    view.take(carl.heard(addresses=(at(carl.peer, 3),), state="leaving"))
    found = shown(view, given)
    assert (found.swarm, found.invite) == (SWARM, "")
    assert found.bootstrap == (SEED, at(bert.peer, 2), at(anna.peer, 1), GONE)
    view.tick(NOW + 600)  # all are silent
    view.take(Disconnected(time=NOW + 600, peer=SEED.rpartition("/p2p/")[2]))
    assert shown(view, given).bootstrap == (GONE, SEED)


def test_a_member_of_the_given_link_is_no_bootstrap_node(authors):
    anna, bert, _ = authors
    view = SwarmView()
    view.take(Connected(time=NOW, peer=anna.peer))
    view.take(anna.heard(addresses=(at(anna.peer, 1),)))
    view.take(bert.heard(addresses=(at(bert.peer, 2),), at=NOW + 1))
    given = Link(SWARM, (at(anna.peer, 9),))
    assert shown(view, given).bootstrap == (at(anna.peer, 1), at(bert.peer, 2), at(anna.peer, 9))


def test_shown_link_stays_for_a_while(authors):
    """It stays the same for a while once somebody was heard."""
    now = [0.0]
    made = ShownLink(Link(SWARM, (GONE,)), lambda: now[0])
    view = SwarmView()
    before = made.picture(view)["text"]
    view.take(authors[0].heard(addresses=(at(authors[0].peer, 1),)))
    first = made.picture(view)["text"]
    assert first != before
    view.take(authors[1].heard(addresses=(at(authors[1].peer, 2),)))
    now[0] = REFRESH_S - 0.1
    assert made.picture(view)["text"] == first
    now[0] = REFRESH_S
    assert authors[1].peer in made.picture(view)["text"]


def test_code_has_few_addresses():
    """The code is of a link with few addresses and each module is drawn once."""
    given = Link(SWARM, tuple(at(Identity.ephemeral().peer_id, number) for number in range(1, 17)))
    found = ShownLink(given).picture(SwarmView())
    matrix = segno.make_qr(
        str(Link(SWARM, given.bootstrap[:IN_CODE])), error="l", boost_error=False
    ).matrix
    drawn = set()
    for part in found["qr"]["path"].removesuffix("z").split("z"):
        place, _, run = part.removeprefix("M").partition("h")
        x, y = map(int, place.split())
        width = int(run.partition("v")[0])
        assert part == f"M{x} {y}h{width}v1h{-width}"
        cells = {(x + step, y) for step in range(width)}
        assert not cells & drawn
        drawn |= cells
    assert drawn == {(x, y) for y, row in enumerate(matrix) for x, dark in enumerate(row) if dark}
    assert found["qr"]["size"] == len(matrix) <= 97  # a phone reads it from a screen
