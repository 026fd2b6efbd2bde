"""A change of the settings goes from member to member, also to one that comes later; liars cost
ever fewer requests, and do not keep it from anybody.
"""

import time
from types import SimpleNamespace

import pytest

from shoal.swarm.changes import Change, ChangePart, ChangeReply
from shoal.swarm.errors import MessageError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.change_exchange import (
    MAX_ASKED,
    asking_order,
    newest_change,
    swap_change,
)
from shoal.swarm.membership.change_keeper import (
    ASKED_AT_ONCE,
    CHANGE_PROTOCOL,
    LOOK_S,
    MAX_PAUSE_S,
    ChangeKeeper,
)
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.wire.envelope import pack, seal
from tests.support.records import SWARM, member_of

CREATOR = Identity.ephemeral()
TRAIN = TrainSettings(steps=100, optimizer="adamw", lr=0.5)
MANIFEST = Manifest(
    name="x", created=1.0, creator=CREATOR.peer_id, task="text", model="0" * 64, train=TRAIN
)


def signed(number, lr=0.25, signer=CREATOR):
    parts = (ChangePart(round=4, lr=lr),)
    made = Change(swarm=SWARM, creator=signer.peer_id, number=number, parts=parts)
    return seal(made, signer)


class Listing:
    """The directory of a member: the other members, with the numbers that they state."""

    def __init__(self, stated):
        self.stated, self.renewed, self.own_record = stated, 0, SimpleNamespace()

    def members(self):
        return {
            peer: member_of(peer, change=number(), issued=time.time())
            for peer, number in self.stated.items()
        }

    def renew(self):
        self.renewed += 1


@pytest.fixture
def keep(network):
    """Make a member whose looks are the test's to call; ``stated``: peer -> a function that returns
    its number.
    """
    keepers = []

    def made(**stated):
        host = network.host()
        keeper = ChangeKeeper(host, Listing({**stated}), SWARM, MANIFEST, clock=lambda: made.now)
        keeper.close()  # its own looks
        keepers.append(keeper)
        return keeper, host

    made.now = 1000.0
    return made


def test_a_member_takes_what_another_has(network, keep):
    """Mutants: nobody asks; what is asked for is not kept; the number is not announced."""
    first, host = keep()
    first.take(signed(5))
    second, _ = keep(**{host.peer_id: lambda: first.number})
    second.fetch(5.0)
    assert (second.number, second.sealed) == (5, first.sealed)
    assert second._directory.own_record.change() == 5
    assert second._directory.renewed == 1
    assert second.settings_at(3) is TRAIN
    assert second.settings_at(4).lr == 0.25
    opened = len(network.opened)
    second.fetch(5.0)
    assert len(network.opened) == opened  # nobody states a higher number


def test_newest_change_wins(keep):
    """The newest of several wins and an older one is not taken back."""
    first, _ = keep()
    first.take(signed(5))
    assert not first.take(signed(4))
    assert not first.take(signed(5))
    assert first.take(signed(6))
    assert first.number == 6
    twins = [signed(7, lr=0.1), signed(7, lr=0.2)]
    one, _ = keep()
    other, _ = keep()
    for sealed in twins:
        one.take(sealed)
    for sealed in reversed(twins):
        other.take(sealed)
    assert one.sealed == other.sealed


def test_anothers_signature_is_refused_and_counted(network, keep):
    keeper, host = keep()
    with pytest.raises(MessageError, match="not signed by the creator of the swarm"):
        keeper.take(signed(9, signer=Identity.ephemeral()))
    visitor = network.host()
    forged = signed(9, signer=Identity.ephemeral())
    reply = network.call(swap_change(visitor, host.peer_id, (), SWARM, forged), 10)
    assert reply.reason.startswith("A change of the swarm's settings was refused")
    assert keeper.counters.rejected() == {"not the creator's": 1}
    assert keeper.number == 0


def test_visitor_hands_over_and_hears_changes(network, keep):
    """A visitor hands over a change and hears of a newer one."""
    keeper, host = keep()
    visitor = network.host()
    reply = network.call(swap_change(visitor, host.peer_id, (), SWARM, signed(5)), 10)
    assert (reply.change, reply.reason, keeper.number) == (signed(5), "", 5)
    reply = network.call(swap_change(visitor, host.peer_id, (), SWARM, signed(4)), 10)
    assert reply.reason == "this peer has a newer change of the settings"
    assert reply.change == signed(5)
    reply = network.call(swap_change(visitor, host.peer_id, (), "b" * 52, b""), 10)
    assert (reply.change, reply.reason) == (b"", f"this peer belongs to swarm {SWARM}")


def liar_of(network):
    """Return a member that serves nothing, and a list that grows whenever it is asked."""
    liar = network.host()
    asked = []

    async def nothing(stream):
        await stream.receive(4096, 2.0)
        asked.append(1)
        await stream.send(pack(ChangeReply()), 2.0)

    liar.serve(CHANGE_PROTOCOL, nothing)
    return liar, asked


def test_invalid_number_costs_ever_fewer_requests(network, keep):
    """Fault: a member that states 2^53 is asked again and again, and hides those who have one.

    Mutant: its pause is a minute each time.
    """
    liar, asked = liar_of(network)
    honest, host = keep()
    honest.take(signed(5))
    keeper, _ = keep(**{liar.peer_id: lambda: 2**53, host.peer_id: lambda: 5})
    for _ in range(3):
        keeper.fetch(5.0)
    assert (len(asked), keeper.number) == (1, 5)
    found = []
    for pause in (60.0, 120.0, 240.0):
        for wait in (pause - 1.0, 1.0):
            keep.now += wait
            keeper.fetch(5.0)
            found.append(len(asked))
    assert found == [1, 2, 2, 3, 3, 4]
    for _ in range(9):
        keep.now += MAX_PAUSE_S
        keeper.fetch(5.0)
    assert len(asked) >= 12  # never given up: it may have been unreachable


def test_member_that_served_is_asked_again_at_once(network, keep):
    """Mutant: a member is left alone for a minute although it served what it stated."""
    first, host = keep()
    first.take(signed(5))
    second, _ = keep(**{host.peer_id: lambda: first.number})
    second.fetch(5.0)
    first.take(signed(6))
    second.fetch(5.0)
    assert second.number == 6


def made_up(count):
    return {Identity.ephemeral().peer_id: lambda: 2**53 for _ in range(count)}


def test_met_member_is_asked_before_records_of_strangers(keep):
    """Fault: the highest numbers came first, so made-up records kept the change from the members.

    Mutants: the highest number first; the members as the directory has them.
    """
    honest, host = keep()
    honest.take(signed(5))
    keeper, own = keep(**made_up(20), **{host.peer_id: lambda: 5})
    own.met[host.peer_id] = "10.1.0.1"
    keeper.fetch(5.0)
    assert keeper.number == 5


def test_met_liars_do_not_starve_who_was_not_met(keep):
    """Fault: 90 liars, each asked once a minute, took all the requests there are.

    Mutant: the pause does not double.
    """
    honest, host = keep()
    honest.take(signed(5))
    liars = made_up(120)
    keeper, own = keep(**liars, **{host.peer_id: lambda: 5})
    own.met.update(dict.fromkeys(liars, "10.2.0.1"))
    looks = 0
    while keeper.number == 0:
        keeper.fetch(5.0)
        keep.now += LOOK_S
        looks += 1
        assert looks <= 3 * len(liars) / ASKED_AT_ONCE + 1


def test_unknown_members_are_asked_as_drawn():
    """Mutant: those that were not met come in the order of the directory, the same everywhere."""
    members = [member_of(peer, change=1) for peer in made_up(100)]
    assert asking_order(members, {}) != asking_order(members, {})
    met = {members[60].peer: "10.1.0.1", members[70].peer: "10.1.0.2", members[80].peer: "10.2.0.1"}
    first = [member.peer for member in asking_order(members, met)[:3]]
    assert set(first) == set(met)
    assert members[80].peer in first[:2]  # one of each address range in turn


def test_visitor_asks_members_that_it_met_first(network, keep):
    """Fault: eight made-up records hid the change from `shoal status`."""
    keeper, host = keep()
    keeper.take(signed(5))
    stated = {**made_up(5 * MAX_ASKED), host.peer_id: lambda: 5}
    members = {peer: member_of(peer, change=number()) for peer, number in stated.items()}
    visitor = network.host()
    visitor.met[host.peer_id] = "10.1.0.1"
    found = newest_change(visitor, SWARM, MANIFEST, members)
    assert found is not None
    assert found.number == 5


def test_a_visitor_finds_the_newest(network, keep):
    hosts = []
    for number in (5, 8, 6):
        keeper, host = keep()
        keeper.take(signed(number))
        hosts.append((host, number))
    members = {
        host.peer_id: member_of(host.peer_id, change=number, issued=time.time())
        for host, number in hosts
    }
    found = newest_change(network.host(), SWARM, MANIFEST, members)
    assert found is not None
    assert found.number == 8
    nobody = {CREATOR.peer_id: member_of(CREATOR.peer_id, issued=time.time())}
    assert newest_change(network.host(), SWARM, MANIFEST, nobody) is None
