"""The list of public swarms at a bootstrap node: what is listed, for how long, and what is
refused.
"""

import asyncio
from types import SimpleNamespace

import msgpack
import pytest

from shoal.swarm.errors import MessageError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest, Title, swarm_id
from shoal.swarm.membership import seed_announcer, swarm_list
from shoal.swarm.membership.swarm_list import PublicSwarm, merged, read_listed
from shoal.swarm.seed.registry import MAX_MEMBERS, TTL_S, SeedRegistry
from shoal.swarm.wire.envelope import pack, seal, unpack
from shoal.swarm.wire.messages import (
    MAX_LISTED,
    Announcement,
    ListedSwarm,
    SeedRequest,
    SwarmsRequest,
)
from tests.sim.memory_stream import stream_pair
from tests.support.records import member_of

SEED = "/ip4/203.0.113.9/tcp/4001/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


def manifest(creator, name="ours", **fields):
    made = Manifest(
        name=name,
        created=0.0,
        creator=creator.peer_id,
        task="text",
        model="0" * 64,
        **{"public": True, **fields},
    )
    return seal(made, creator)


def announcement(who, sealed, **fields):
    values = {
        "params": 1000,
        "round_bytes": 4000,
        "memory": 0,
        "device": "cpu",
        "issued": 0.0,
        "swarm": swarm_id(sealed),
    }
    return seal(Announcement(peer=who.peer_id, manifest=sealed, **{**values, **fields}), who)


def member(who, swarm):
    return member_of(
        who.peer_id, swarm=swarm, addresses=(f"/ip4/203.0.113.1/tcp/1/p2p/{who.peer_id}",)
    )


class Place:
    """A bootstrap node's register, on a clock of the test's."""

    def __init__(self):
        self.now = 0.0
        self.registry = SeedRegistry(lambda: self.now)

    def joins(self, who, swarm, host=""):
        reply = self.registry.answer(
            who.peer_id, SeedRequest(swarm=swarm, record=seal(member(who, swarm), who)), host
        )
        assert reply.reason == ""

    def says(self, who, sealed, **fields):
        """Return why the announcement was refused."""
        return self.registry.listing(
            who.peer_id, SwarmsRequest(announcement=announcement(who, sealed, **fields))
        ).reason

    def listed(self, after=None):
        reply = self.registry.listing("somebody", SwarmsRequest(after=after))
        return [read_listed(packed, SEED) for packed in reply.swarms], reply.more


def test_a_public_swarm_is_listed_with_what_its_member_says():
    place, ada = Place(), Identity.ephemeral()
    sealed = manifest(ada)
    place.joins(ada, swarm_id(sealed))
    assert place.says(ada, sealed, params=135_000_000, round_bytes=5, memory=7) == ""
    (found,), more = place.listed()
    assert not more
    assert (found.swarm, found.title[:3], found.peers) == (
        swarm_id(sealed),
        ("ours", "text", "noloco"),
        1,
    )
    assert (found.params, found.round_bytes, found.memory) == (135_000_000, 5, 7)
    assert found.addresses == (SEED, f"/ip4/203.0.113.1/tcp/1/p2p/{ada.peer_id}")


def test_only_members_announce_public_swarms():
    """Only members may announce and only what its creator made public."""
    place, ada, eve = Place(), Identity.ephemeral(), Identity.ephemeral()
    public, private = manifest(ada), manifest(ada, public=False)
    assert place.says(ada, public) == "unknown"
    for sealed in (public, private):
        place.joins(ada, swarm_id(sealed))
    assert place.says(ada, private) == "private"
    unread = msgpack.packb([ada.peer_id, msgpack.packb(["manifest", 1, {"public": True}]), b""])
    place.joins(ada, swarm_id(unread))
    assert place.says(ada, unread) == "malformed", "nobody can read what it is"
    assert place.says(eve, public) == "unknown"
    stolen = announcement(ada, public)
    assert (
        place.registry.listing(eve.peer_id, SwarmsRequest(announcement=stolen)).reason == "forged"
    )
    assert place.says(ada, public, swarm=swarm_id(private)) == "forged"
    assert place.registry.listing(ada.peer_id, SwarmsRequest(announcement=stolen[:-1])).reason in (
        "truncated",
        "malformed",
        "forged",
    )
    assert place.listed() == ([], False)


def test_listing_ends_when_all_fall_silent():
    """It is listed until its announcer or its members fall silent."""
    place, ada, bob = Place(), Identity.ephemeral(), Identity.ephemeral()
    sealed = manifest(ada)
    for who in (ada, bob):
        place.joins(who, swarm_id(sealed))
    place.says(ada, sealed, params=1)
    assert place.says(bob, sealed, params=2) == ""
    assert place.listed()[0][0].params == 1, "who came first stays"
    place.now += TTL_S - 1
    place.joins(bob, swarm_id(sealed))
    place.now += 2
    assert place.listed()[0] == [], "ada renewed nothing"
    place.says(bob, sealed, params=2)
    assert place.listed()[0][0].params == 2
    place.now += TTL_S - 10
    place.says(bob, sealed, params=2)  # he renews what he says, but not his record
    place.now += 11
    assert place.listed()[0] == []


def test_the_creators_word_displaces_whoever_came_first():
    """The fault: any free key that announced first said how large a swarm is, for as long as it
    renewed that.
    """
    place, ada, eve = Place(), Identity.ephemeral(), Identity.ephemeral()
    sealed = manifest(ada)
    for who in (eve, ada):
        place.joins(who, swarm_id(sealed))
        assert place.says(who, sealed, memory=1 if who is eve else 2) == ""
    assert place.says(eve, sealed, memory=1) == ""
    assert place.listed()[0][0].memory == 2


def test_a_bootstrap_node_says_no_more_members_than_one_keeps():
    """The fault: a made-up number came first of all, and chose which member's word on the sizes was
    shown.
    """
    ada = Identity.ephemeral()
    sealed = manifest(ada)
    listed = ListedSwarm(announcement=announcement(ada, sealed), peers=2**40)
    assert read_listed(pack(listed), SEED).peers == MAX_MEMBERS == 32


def test_another_announcer_takes_over():
    """Another takes over where the announcer fell silent while it is still listed."""
    place, ada, bob = Place(), Identity.ephemeral(), Identity.ephemeral()
    sealed = manifest(ada)
    for who in (ada, bob):
        place.joins(who, swarm_id(sealed))
    place.says(ada, sealed, params=1)
    place.now += TTL_S + 1
    place.joins(bob, swarm_id(sealed))
    assert place.says(bob, sealed, params=2) == ""
    assert place.listed()[0][0].params == 2


def test_public_swarms_take_no_room_of_private_ones(monkeypatch):
    """With one room for both, ten public swarms of as many ranges left a private one no place."""
    monkeypatch.setattr("shoal.swarm.seed.registry.MAX_SWARMS", 3)
    place, people = Place(), [Identity.ephemeral() for _ in range(10)]
    reasons = []
    for number, who in enumerate(people):
        sealed = manifest(who, f"s{number}")
        place.joins(who, swarm_id(sealed), f"10.{number}.0.1")
        reasons.append(place.says(who, sealed))
    assert reasons == [""] * 3 + ["full"] * 7
    assert len(place.listed()[0]) == 3
    for number in range(3):
        place.joins(people[number], "abc"[number] * 51 + "a", f"10.{number}.0.1")
    assert len(place.registry._swarms) == 6
    place.now += TTL_S + 1
    sealed = manifest(people[9], "s9")
    place.joins(people[9], swarm_id(sealed))
    assert place.says(people[9], sealed) == "", "places of the silent are free again"


def test_single_member_stays_listed_by_renewal(monkeypatch):
    """Forgotten and noted anew, it had asked for a private place, of which none was left."""
    monkeypatch.setattr("shoal.swarm.seed.registry.MAX_SWARMS", 2)
    place, ada = Place(), Identity.ephemeral()
    sealed = manifest(ada)
    place.joins(ada, swarm_id(sealed), "10.1.0.1")
    assert place.says(ada, sealed) == ""
    for number in (2, 3):
        place.joins(Identity.ephemeral(), "ab"[number - 2] * 51 + "a", f"10.{number}.0.1")
    place.joins(ada, swarm_id(sealed), "10.1.0.1")
    assert [found.swarm for found in place.listed()[0]] == [swarm_id(sealed)]
    assert place.registry._places[ada.peer_id] == 1
    place.now += TTL_S / 2
    place.joins(ada, swarm_id(sealed), "10.1.0.1")
    place.now += TTL_S / 2 + 1
    asked = SeedRequest(swarm=swarm_id(sealed))
    answer = place.registry.answer(Identity.ephemeral().peer_id, asked, "10.9.0.1")
    assert len(answer.members) == 1, "renewed"


def test_pages_have_all_swarms_once():
    place, people = Place(), [Identity.ephemeral() for _ in range(2 * MAX_LISTED + 1)]
    made = [manifest(who, f"s{number}") for number, who in enumerate(people)]
    for who, sealed in zip(people, made, strict=True):
        place.joins(who, swarm_id(sealed))
        place.says(who, sealed)
    found, more, after = [], True, None
    while more:
        page, more = place.listed(after)
        assert 1 <= len(page) <= MAX_LISTED
        found += page
        after = page[-1].swarm
    assert [one.swarm for one in found] == sorted(map(swarm_id, made))


def test_what_a_seed_lists_is_checked():
    ada = Identity.ephemeral()
    public, private = manifest(ada), manifest(ada, public=False)

    def listed(**fields):
        return pack(
            ListedSwarm(**{"announcement": announcement(ada, public), "peers": 1, **fields})
        )

    assert read_listed(listed(), SEED).addresses == (SEED,)
    other = seal(member(ada, "b" * 52), ada)
    assert read_listed(listed(contacts=(other,)), SEED).addresses == (SEED,), (
        "a member of another swarm"
    )
    for wrong in (
        listed(announcement=announcement(ada, private)),
        listed(announcement=announcement(ada, public, swarm=swarm_id(private))),
        listed(contacts=(b"x",)),
        listed()[:-1],
    ):
        with pytest.raises(MessageError):
            read_listed(wrong, SEED)


def test_the_largest_answer_fits():
    """Manifests of the largest size, with records of the largest size, in a whole page."""
    place, people = Place(), [Identity.ephemeral() for _ in range(MAX_LISTED)]
    for who in people:
        options = {f"o{number}": "x" * 1000 for number in range(11)}
        sealed = manifest(who, task_options=options)
        place.joins(who, swarm_id(sealed))
        assert place.says(who, sealed) == ""
    reply = place.registry.listing("somebody", SwarmsRequest())
    assert len(reply.swarms) == MAX_LISTED
    assert unpack(pack(reply), type(reply)) == reply


def test_unreadable_entries_hide_no_page(monkeypatch):
    """With a first page of them only, the client ended there."""
    place, people = Place(), [Identity.ephemeral() for _ in range(MAX_LISTED + 1)]
    for who in people:
        sealed = manifest(who, who.peer_id[-8:])
        place.joins(who, swarm_id(sealed))
        place.says(who, sealed)
    bad = sorted(place.registry._listed)[:MAX_LISTED]
    checked = swarm_list.title_of

    def title(sealed):
        if swarm_id(sealed) in bad:
            raise MessageError("A malformed manifest was refused: it names no task and method.")
        return checked(sealed)

    async def asked(stream, request):
        return place.registry.listing("somebody", request)

    class Daemon:
        async def connect(self, peer, addresses):
            pass

        async def open(self, peer, protocol):
            return stream_pair()[0]

    monkeypatch.setattr(swarm_list, "title_of", title)
    monkeypatch.setattr(swarm_list, "ask_swarms", asked)
    (found,) = asyncio.run(swarm_list._listed_by(Daemon(), SEED))
    assert found.swarm == max(place.registry._listed)


def test_several_seeds_are_merged():
    title = Title("n", "text", "noloco")
    small, large, other = (
        PublicSwarm(swarm, title, peers, params, 1, 0, "cpu", addresses)
        for swarm, peers, params, addresses in (
            ("a", 2, 1, ("x", "y")),
            ("a", 5, 9, ("z", "x")),
            ("b", 3, 1, ("w",)),
        )
    )
    first, second = merged([small, other, large])
    assert (first.swarm, first.peers, first.params, set(first.addresses)) == (
        "a",
        5,
        9,
        {"x", "y", "z"},
    )
    assert second == other


@pytest.mark.parametrize(("state", "times"), [("training", 1), ("leaving", 0), ("done", 0)])
def test_a_member_that_leaves_announces_its_swarm_no_more(monkeypatch, state, times):
    """The bootstrap node has just forgotten it, and would answer that it does not know it."""
    announced = []
    me = Identity.ephemeral()

    async def opened(*_, **__):
        return SimpleNamespace(close=lambda: None)

    async def ask(*_):
        return []

    async def announce(*_):
        announced.append(state)

    host = SimpleNamespace(
        submit=lambda work: work.close(),
        known=None,
        meet=None,
        seeds=lambda: {"seed": ()},
        open=opened,
    )
    directory = SimpleNamespace(everyone=None, departed=None, members=dict)
    directory.own = lambda: member_of(me.peer_id, state=state)
    announcer = seed_announcer.SeedAnnouncer(host, directory, me, "a" * 52)
    announcer._announced, announcer._announce = object(), announce
    monkeypatch.setattr(seed_announcer, "ask_seed", ask)
    asyncio.run(announcer._report())
    assert len(announced) == times
