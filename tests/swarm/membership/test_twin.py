"""Two nodes with copies of one key: each is told where the other is, and the second before it
announces itself.
"""

import asyncio
import itertools
import time
from types import SimpleNamespace

import pytest

from shoal.swarm.access.link import Link
from shoal.swarm.errors import AdmissionError
from shoal.swarm.identity import Identity
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.membership import Membership, NetworkOptions, join
from shoal.swarm.membership.records import key_of, make_record
from shoal.swarm.membership.twin_watch import CLOCKS_APART_S
from shoal.swarm.repeats import Repeats
from tests.support.directory_hosts import Shelf
from tests.support.records import ABOUT, SWARM, member_of

ME = Identity.ephemeral()
WHERE = f"/ip4/192.0.2.7/tcp/4001/p2p/{ME.peer_id}"


@pytest.fixture
def clock(monkeypatch):
    """Let time pass only where something sleeps."""
    passed = itertools.count()
    now = SimpleNamespace(at=time.time(), slept=0.0)

    def sleep(seconds):
        now.at, now.slept = now.at + seconds, now.slept + seconds
        next(passed)

    monkeypatch.setattr("shoal.swarm.membership.directory.time.time", lambda: now.at)
    monkeypatch.setattr("shoal.swarm.membership.directory.time.sleep", sleep)
    return now


def publish(shelf, issued, state="training"):
    """Store a record in this node's name, of another node with its key or of an earlier run."""
    record = member_of(ME.peer_id, addresses=(WHERE,), issued=issued, state=state)
    shelf.keys[key_of(SWARM, "")][ME.peer_id] = make_record("", record, ME)


def said_of(directory):
    """Return what the node's user would be told now."""
    node = SimpleNamespace(directory=directory, identity=ME, _said=Repeats())
    node._twin_said = lambda address: Membership._twin_said(node, address)
    try:
        Membership.check_alone(node)
    except AdmissionError as error:
        return str(error)
    return ""


SAID = (
    f"Another node runs with this node's key, {ME.peer_id}, at {WHERE}, so exchanges with both of "
    "them fail: stop one of the two, and start it again with a key of its own (--identity FILE; "
    "where the swarm is by invitation, with a new invitation)."
)


def test_both_of_two_are_told(clock):
    shelf = Shelf()
    directory = Directory(shelf, ME, SWARM)
    directory.announce(**ABOUT)
    asyncio.run(directory._publish())
    directory.refresh(5.0)
    assert directory.twin() == ""  # its own record
    clock.at += CLOCKS_APART_S + 1
    publish(shelf, clock.at)
    directory.refresh(5.0)
    assert directory.twin() == WHERE
    assert directory.twin() == ""  # until it is seen again


def test_the_second_is_refused_before_it_announces_itself(clock):
    """Fault: the two blamed a third's slow link."""
    shelf = Shelf()
    publish(shelf, clock.at - 2.0)
    directory = Directory(shelf, ME, SWARM)
    directory.refresh(5.0)

    def renewed(key):
        publish(shelf, clock.at)
        return Shelf.get(shelf, key)

    shelf.get = renewed
    assert said_of(directory) == SAID


def test_a_node_that_died_a_moment_ago_may_return(clock):
    """Mutant: the record of its own last run is taken for another node."""
    shelf = Shelf()
    publish(shelf, clock.at - 2.0)
    directory = Directory(shelf, ME, SWARM)
    directory.refresh(5.0)
    assert said_of(directory) == ""
    assert 5.0 < clock.slept < 12.0


@pytest.mark.parametrize("left", [True, False])
def test_without_such_a_record_nobody_waits(clock, left):
    shelf = Shelf()
    if left:
        publish(shelf, clock.at - 2.0, state="leaving")
    directory = Directory(shelf, ME, SWARM)
    directory.refresh(5.0)
    assert (said_of(directory), clock.slept) == ("", 0.0)


def test_a_link_to_this_very_key_is_refused_at_once():
    """Fault: it tried to dial itself, and asked for a fresh link."""
    with pytest.raises(AdmissionError) as refused:
        join(ME, Link(SWARM, (WHERE,)), NetworkOptions())
    assert str(refused.value) == (
        f"The link leads only to the node of this very key, {ME.peer_id}: if that node runs on "
        "another machine, start this one with a key of its own (--identity FILE); if it has ended, "
        "take a link of another member (shoal link), or go on from its checkpoint (--resume)."
    )
