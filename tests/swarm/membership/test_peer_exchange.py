"""Peer exchange between members on a simulated network: who is found, whom nobody believes, and
what strangers do not get.
"""

import asyncio
import random

import pytest

from shoal.swarm.access.invitation import admission, issue
from shoal.swarm.access.policy import AccessPolicy, PeerLists
from shoal.swarm.membership.directory import TTL_S
from shoal.swarm.membership.peer_exchange import (
    LOOK_S,
    MAX_AGE_S,
    MAX_OFFERED,
    SHUFFLE_PROTOCOL,
    SHUFFLE_S,
    SHUFFLES_OF_ALL,
    SHUFFLES_OF_EACH,
    PeerExchange,
    Shuffle,
    ShuffleReply,
)
from shoal.swarm.membership.peer_views import ACTIVE_PEERS, MAX_OF_SOURCE, PASSIVE_PEERS, Contact
from shoal.swarm.wire.envelope import pack, seal, unpack, unseal
from shoal.swarm.wire.messages import Member
from tests.sim.clock import VirtualLoop
from tests.sim.directory import EPOCH
from tests.sim.memory_stream import NOTHING
from tests.sim.network import Links, SimNetwork, Trace
from tests.support.directory_hosts import Meeting
from tests.support.records import member_of

SWARM, ELSEWHERE = "a" * 52, "b" * 52


class Book:
    """A directory that reads nothing: it has what it was given, and what it hears."""

    def __init__(self, node):
        self.node, self.heard, self.access_policy, self.given = (
            node,
            {},
            AccessPolicy(node.peer_id),
            {},
        )
        self.gone, self.barred, self.state = {}, set(), "training"

    def own(self):
        return self.node.member(state=self.state) if self.state else None

    def everyone(self):
        oldest = self.node.now() - TTL_S
        found = {**self.given, **{p: m for p, m in self.heard.items() if m.issued >= oldest}}
        return {peer: member for peer, member in found.items() if peer not in self.gone}

    def departed(self):
        return self.gone

    def is_barred(self, peer):
        return peer in self.barred or self.access_policy.blocks(peer)

    def hear(self, member):
        if not self.access_policy.record(member.peer, member.admission, member.issued, True):
            return False
        self.heard[member.peer] = member
        return True


class Node:
    def __init__(self, world, number, **fields):
        self.world, self.fields = world, fields
        self.host = Meeting(world.network, f"p{number}", world.network.identity(f"p{number}"))
        self.peer_id, self.identity = self.host.peer_id, self.host.identity
        self.host.at = f"10.{number}.0.1"
        self.address = f"/ip4/10.{number}.0.1/tcp/1/p2p/{self.peer_id}"
        self.book = Book(self)
        self.exchange = PeerExchange(
            self.host, self.book, self.identity, SWARM, clock=self.now, chance=random.Random(number)
        )

    def now(self):
        return EPOCH + self.world.loop.time()

    def member(self, **changes):
        usual = {
            "addresses": (self.address,),
            "issued": self.now(),
            "admission": self.book.access_policy.ticket,
        }
        return member_of(self.peer_id, **{**usual, **self.fields, **changes})

    def sees(self):
        return set(self.book.everyone())

    def told(self, *others):
        """As if those members stood in the directory, for good."""
        self.book.given = {other.peer_id: other.member(issued=EPOCH + 1e6) for other in others}

    def ask(self, other, **changes):
        """The answer to a shuffle; None if the stream just ends."""
        return self.world.loop.run_until_complete(self.host.start(self.asking(other, **changes)))

    async def asking(self, other, **changes):
        stream = await self.host.open(other.peer_id, SHUFFLE_PROTOCOL, timeout=5.0)
        fields = {"swarm": SWARM, "record": seal(self.member(), self.identity), "want": MAX_OFFERED}
        await stream.send(pack(Shuffle(**{**fields, **changes})), 5.0)
        try:
            return unpack(await stream.receive(ShuffleReply.LIMIT, 20.0), ShuffleReply)
        except Exception:
            return None
        finally:
            stream.close()


class World:
    def __init__(self):
        self.loop = VirtualLoop()
        self.network = SimNetwork(self.loop, 0, Links(0.02, 0.0), Trace())
        self.nodes = []

    def node(self, **fields):
        self.nodes.append(Node(self, len(self.nodes) + 1, **fields))
        return self.nodes[-1]

    def many(self, count):
        return [self.node() for _ in range(count)]

    def run(self, seconds):
        self.loop.call_later(seconds, self.loop.stop, context=NOTHING)
        self.loop.run_forever()


@pytest.fixture
def world():
    made = World()
    yield made
    assert made.network.errors == []
    made.network.end()
    made.loop.close()


def ids(nodes):
    return {node.peer_id for node in nodes}


def test_newcomer_finds_others_without_a_directory(world):
    """A newcomer that knows one member finds the others without a directory."""
    nodes = world.many(8)
    for node in nodes[1:]:
        node.told(nodes[0])
    world.run(3 * SHUFFLE_S)
    for node in nodes:
        assert ids(nodes) - {node.peer_id} <= {
            *node.exchange.views.active,
            *node.exchange.views.passive,
        }
        assert len(node.exchange.views.active) == ACTIVE_PEERS
        assert len(node.sees() - ids(nodes[:1])) >= ACTIVE_PEERS - 1


def test_the_swarm_outlives_the_peer_by_which_all_came(world):
    nodes = world.many(6)
    for node in nodes[1:]:
        node.told(nodes[0])
    world.run(2 * SHUFFLE_S)
    world.network.kill(nodes[0].peer_id)
    for node in nodes[1:]:
        node.told()
    late = world.node()
    late.told(nodes[3])
    world.run(2 * SHUFFLE_S)
    assert late.sees() == ids(nodes[1:])
    for node in nodes[1:]:
        assert late.peer_id in {*node.exchange.views.active, *node.exchange.views.passive}
        assert nodes[0].peer_id not in {*node.exchange.views.active, *node.exchange.views.passive}


def test_a_node_that_comes_back_begins_with_what_it_kept(world):
    nodes = world.many(4)
    nodes[0].host.remember(
        [nodes[2].address, f"/ip4/10.9.9.9/tcp/1/p2p/{world.network.identity('gone').peer_id}"]
    )
    for node in nodes[1:]:
        node.told(nodes[1])
    world.run(3 * SHUFFLE_S)
    assert nodes[0].sees() == ids(nodes[1:])
    assert nodes[1].address in nodes[0].host.known()


def test_active_peer_is_asked_before_its_record_expires(
    world,
):
    """An active peer that the directory shows costs nothing and any other is asked before its
    record expires.
    """
    one, other = world.many(2)
    one.told(other)
    other.told(one)
    world.run(3 * LOOK_S)
    calls = world.network._number
    world.run(SHUFFLE_S - 3 * LOOK_S - 1)
    quiet = world.network._number - calls
    one.told()
    other.told()
    seen = []
    for _ in range(30):
        world.run(2.0)
        seen.append(one.sees() == {other.peer_id})
    assert all(seen[5:])  # once asked, the record never expires
    assert quiet <= 2  # no more than a shuffle each
    assert world.network._number - calls - quiet >= 60 / (TTL_S / 2 + 1.2 * LOOK_S)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swarm": ELSEWHERE}, "foreign-swarm"),
        ({"record": "another's"}, "another's"),
        ({"record": "foreign"}, "foreign-swarm"),
        ({"record": "leaving"}, "old"),
        ({"record": "stale"}, "old"),
        ({"record": b"junk"}, "malformed"),
        ({"record": "forged"}, "forged"),
    ],
)
def test_recordless_caller_gets_none(world, changes, reason):
    """A caller that shows no record of its own gets none."""
    one, other, caller, third = world.many(4)
    one.told(other)
    world.run(2 * LOOK_S)
    made = {
        "another's": seal(third.member(), third.identity),
        "foreign": seal(caller.member(swarm=ELSEWHERE), caller.identity),
        "leaving": seal(caller.member(state="leaving"), caller.identity),
        "stale": seal(caller.member(issued=caller.now() - 200), caller.identity),
        "forged": seal(caller.member(), caller.identity)[:-1] + b"\x00",
    }
    if isinstance(record := changes.get("record"), str):
        changes = {"record": made[record]}
    reply = caller.ask(one, **changes)
    assert (reply.record, reply.offered) == (None, ())
    assert reply.reason
    assert one.exchange.counters.rejected() == {reason: 1}
    assert caller.peer_id not in one.sees()
    assert not one.exchange.views.knows(caller.peer_id)


def test_member_gets_records_of_answering_peers(world):
    """A member gets the record and those of peers that answered."""
    one, other, caller = world.many(3)
    one.told(other)
    world.run(2 * LOOK_S)
    liar = world.network.identity("made up")
    one.exchange.views.hint(Contact(liar.peer_id, (), "x", "x", b"x", one.now()))
    reply = caller.ask(one)
    assert unseal(reply.record, Member)[0] == one.peer_id
    assert [unseal(record, Member)[0] for record in reply.offered] == [other.peer_id]
    assert caller.peer_id in one.sees()
    assert caller.ask(one, want=0).offered == ()


def test_the_caller_dials_what_its_partner_offers_in_return(world):
    one, hub, *others = world.many(5)
    one.exchange.close()
    hub.told(*others)
    world.run(3 * LOOK_S)
    contact = Contact(hub.peer_id, (hub.address,), "x", "x")
    assert world.loop.run_until_complete(one.host.start(one.exchange._swap(contact, MAX_OFFERED)))
    assert set(one.exchange.views.hints) == ids(others)
    assert {hint.source for hint in one.exchange.views.hints.values()} == {hub.peer_id}
    assert one.sees() == {hub.peer_id}


def test_an_offered_peer_is_never_believed(world):
    """It is dialled, and only what it then says of itself is in the view."""
    one, liar = world.many(2)
    made_up = world.network.identity("made up")
    ghost = liar.member(
        peer=made_up.peer_id, addresses=(f"/ip4/192.0.2.1/tcp/1/p2p/{made_up.peer_id}",)
    )
    liar.ask(one, offered=(seal(ghost, made_up),))
    assert made_up.peer_id in one.exchange.views.hints
    assert made_up.peer_id not in one.sees()
    dialled = world.network.trace.events
    world.run(3 * LOOK_S)
    assert world.network.trace.events > dialled
    assert made_up.peer_id not in one.exchange.views.hints
    assert not one.exchange.views.knows(made_up.peer_id)
    assert one.sees() == {liar.peer_id}


@pytest.mark.parametrize(
    "changes",
    [
        {"swarm": ELSEWHERE},
        {"state": "leaving"},
        {"issued": EPOCH - MAX_AGE_S - 1},
        {"issued": EPOCH + 1000},
        {"addresses": ()},
        {"addresses": ("/unix/tmp/x",)},
        {"addresses": ("another's",)},
    ],
)
def test_a_wrong_offer_is_no_hint(world, changes):
    one, liar, third = world.many(3)
    if changes.get("addresses") == ("another's",):
        changes = {"addresses": (liar.address,)}
    liar.ask(one, offered=(seal(third.member(**changes), third.identity),))
    assert one.exchange.views.hints == {}
    assert one.exchange.counters.rejected() == {"unusable": 1}


def test_forged_offer_spoils_no_other(world):
    """A forged offer is refused and the others of its message are not."""
    one, liar, third = world.many(3)
    good = seal(third.member(), third.identity)
    liar.ask(one, offered=(good[:-1] + b"\x00", good))
    assert set(one.exchange.views.hints) == {third.peer_id}
    assert one.exchange.counters.rejected() == {"forged": 1}


def test_what_one_partner_offers_is_a_part_of_a_view(world):
    one, liar = world.many(2)
    crowd = [world.network.identity(f"crowd {number}") for number in range(40)]
    for at in range(0, 35, MAX_OFFERED):
        records = [
            seal(
                liar.member(
                    peer=each.peer_id, addresses=(f"/ip4/11.{at}.{n}.1/tcp/1/p2p/{each.peer_id}",)
                ),
                each,
            )
            for n, each in enumerate(crowd[at : at + MAX_OFFERED])
        ]
        liar.ask(one, offered=tuple(records))
    named = [*one.exchange.views.hints.values(), *one.exchange.views.passive.values()]
    assert [each.source for each in named] == MAX_OF_SOURCE * [liar.peer_id]
    assert MAX_OF_SOURCE < PASSIVE_PEERS / 3


def test_shuffles_of_one_peer_and_of_all_are_limited(world):
    world.network.links = Links(0.0, 0.0)
    one, caller, *others = world.many(2 + SHUFFLES_OF_ALL // SHUFFLES_OF_EACH)
    assert all(caller.ask(one) is not None for _ in range(SHUFFLES_OF_EACH))
    assert caller.ask(one) is None
    # The last of the others found nothing left.
    answered = sum(other.ask(one) is not None for other in others for _ in range(SHUFFLES_OF_EACH))
    assert answered == SHUFFLES_OF_ALL - SHUFFLES_OF_EACH
    assert one.exchange.counters.rejected() == {"rate": 1 + SHUFFLES_OF_EACH}
    world.run(60.0)
    assert caller.ask(one) is not None


def test_future_member_says_so_and_calls_nobody(world):
    """A node that is no member yet says so and calls nobody."""
    one, other = world.many(2)
    one.book.state = None
    one.told(other)
    world.run(3 * LOOK_S)
    assert other.sees() == set()
    assert "not joined yet" in other.ask(one).reason
    one.book.state = "leaving"
    assert other.ask(one).record is None


def test_barred_and_departed_peers_leave_the_views(world):
    one, *others = world.many(4)
    one.told(*others)
    world.run(4 * LOOK_S)
    assert ids(others) <= {*one.exchange.views.active, *one.exchange.views.passive}
    one.book.barred.add(others[0].peer_id)
    one.book.gone[others[1].peer_id] = others[1].member()
    others[1].exchange.close()  # it calls no more, and would still answer
    world.run(2 * LOOK_S)
    known = {*one.exchange.views.active, *one.exchange.views.passive, *one.exchange.views.hints}
    assert known == {others[2].peer_id}
    assert others[0].ask(one).record is None


def test_silent_peer_costs_its_deadlines_only(world):
    """A peer that is silent costs no more than its deadlines."""
    one, silent, other = world.many(3)

    async def hang(stream):
        await asyncio.sleep(1e6)

    silent.host.serve(SHUFFLE_PROTOCOL, hang)
    one.told(silent, other)
    world.run(4 * LOOK_S)
    assert set(one.exchange.views.active) == {other.peer_id}


def test_by_invitation_only_nobody_else_takes_part(world):
    creator, invited, stranger, third = world.many(4)

    def policy(node, ticket=b""):
        return AccessPolicy(
            node.peer_id, swarm=SWARM, creator=creator.peer_id, ticket=ticket, clock=node.now
        )

    invitation = issue(
        creator.identity, SWARM, lives=3600.0, peer=invited.peer_id, now=invited.now()
    )
    invited.book.access_policy = policy(invited, admission(invitation, invited.identity))
    creator.book.access_policy = policy(creator)
    creator.told(invited)
    world.run(2 * LOOK_S)
    assert creator.sees() == {invited.peer_id}
    assert stranger.ask(creator).record is None
    assert stranger.ask(creator).offered == ()
    assert creator.exchange.counters.rejected() == {"denied": 2}
    # Nor is a stranger dialled that a member offers.
    invited.ask(creator, offered=(seal(third.member(), third.identity),))
    assert creator.exchange.views.hints == {}


def test_unwanted_peer_is_not_met(world):
    """A peer that the user does not want to meet is not met."""
    one, other = world.many(2)
    one.book.access_policy = AccessPolicy(
        one.peer_id, lists=PeerLists(deny=frozenset({other.peer_id}))
    )
    one.told(other)
    world.run(3 * LOOK_S)
    assert one.exchange.views.active == {}
    assert other.sees() == set()
