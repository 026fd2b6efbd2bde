"""Invitations: who may use one, and what is said to who may not; which of several that came by the
same one are in.
"""

import base64
import itertools

import msgpack
import pytest

from shoal.swarm.access import invitation
from shoal.swarm.access.invitation import Admission, AdmittedBy, admission, entry_of, expiry, issue
from shoal.swarm.access.link import Link
from shoal.swarm.access.policy import EXPIRES_SOON_S, AccessPolicy, PeerLists
from shoal.swarm.errors import AdmissionError
from shoal.swarm.identity import Identity
from shoal.swarm.wire.envelope import pack, seal, unpack

SWARM, OTHER = "a" * 52, "b" * 51 + "a"
CREATOR, ANNA, BERT = (Identity.ephemeral() for _ in range(3))
NOW = 1_000_000.0
DAY = 86_400.0


def entry(text, who, *, swarm=SWARM, shown=None, now=NOW):
    return entry_of(
        admission(text, who, now) if shown is None else shown, who.peer_id, swarm, CREATOR.peer_id
    )


def access_policy(**options):
    clock = options.pop("clock", lambda: NOW)
    return AccessPolicy(
        options.pop("me", "me"), swarm=SWARM, creator=CREATOR.peer_id, clock=clock, **options
    )


def test_link_holder_shows_only_what_is_useless_to_others():
    """The holder of a link is admitted and shows only what is of no use to others."""
    text = issue(CREATOR, SWARM, lives=DAY, uses=2, now=NOW)
    shown = admission(text, ANNA, NOW + 5)
    found = entry(text, ANNA, shown=shown)
    assert isinstance(found, AdmittedBy)
    assert (found.since, found.expires, found.uses) == (NOW + 5, NOW + DAY, 2)
    assert "used by another peer" in entry(text, BERT, shown=shown)
    _, seed = invitation._parts(text)
    assert len(seed) == 32
    assert seed not in shown
    stolen = unpack(shown, Admission).model_copy(
        update={"since": NOW}
    )  # an earlier moment, for a better place
    assert "used by another peer" in entry(text, ANNA, shown=pack(stolen))


def test_an_invitation_for_a_peer_is_for_nobody_else():
    text = issue(CREATOR, SWARM, lives=DAY, peer=ANNA.peer_id, now=NOW)
    assert isinstance(entry(text, ANNA), AdmittedBy)
    assert f"is for peer {ANNA.peer_id}, not for {BERT.peer_id}" in entry(text, BERT)


def test_each_wrong_invitation_is_named():
    good = issue(CREATOR, SWARM, lives=DAY, now=NOW)
    assert "has no invitation" in entry(good, ANNA, shown=b"")
    assert f"is for swarm {SWARM}, not for {OTHER}" in entry(good, ANNA, swarm=OTHER)
    assert "not signed by the creator" in entry(issue(BERT, SWARM, lives=DAY, now=NOW), ANNA)
    assert "malformed or forged" in entry(good, ANNA, shown=pack(Admission()))
    assert "malformed or forged" in entry(good, ANNA, shown=b"\x80" * 100)
    found = entry(good, ANNA)
    assert expiry(found, NOW + DAY) == ""
    assert "expired on 1970-01-13" in expiry(found, NOW + DAY + 100)


def test_late_clock_is_admitted_within_limits():
    """A late clock is no reason to be refused but a moment before the invitation is."""
    text = issue(CREATOR, SWARM, lives=DAY, now=NOW)
    assert entry(text, ANNA, now=NOW - 1000).since == NOW
    sealed, seed = invitation._parts(text)
    signature = invitation._one_time(seed).sign(
        "shoal/entry/1", invitation._entry(sealed, ANNA.peer_id, 5.0)
    )
    early = pack(Admission(invitation=sealed, since=5.0, signature=signature))
    assert "before it was made" in entry(text, ANNA, shown=early)


TEXT = issue(CREATOR, SWARM, lives=DAY, now=NOW)


def test_a_record_of_another_kind_is_no_invitation():
    sealed = seal(Admission(), CREATOR)
    text = base64.urlsafe_b64encode(msgpack.packb([sealed, b""])).rstrip(b"=").decode()
    with pytest.raises(AdmissionError, match="damaged"):
        admission(text, ANNA, NOW)


@pytest.mark.parametrize("options", [{"lives": 0}, {"lives": float("inf")}, {"lives": 1, "uses": 0},
                                     {"lives": 1, "uses": 2, "peer": ANNA.peer_id}])  # fmt: skip
def test_what_makes_no_sense_is_not_issued(options):
    with pytest.raises(ValueError, match="lives must be positive"):
        issue(CREATOR, SWARM, **options)


def test_a_link_carries_an_invitation():
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{ANNA.peer_id}"
    link = Link(SWARM, (address,), TEXT)
    assert Link.parse(str(link)) == link
    assert Link.parse(str(link)).invite == TEXT
    assert Link.parse(str(Link(SWARM, (address,)))).invite == ""


# -- the policy ------------------------------------------------------------------------------------


def test_an_open_swarm_admits_all_peers_that_are_not_denied():
    assert AccessPolicy().admits(ANNA.peer_id)
    lists = PeerLists(allow=frozenset({ANNA.peer_id, BERT.peer_id}), deny=frozenset({BERT.peer_id}))
    picky = AccessPolicy("me", lists=lists)
    assert [picky.admits(peer) for peer in (ANNA.peer_id, BERT.peer_id, CREATOR.peer_id, "me")] == [
        True,
        False,
        False,
        True,
    ]
    assert [picky.denies(peer) for peer in (ANNA.peer_id, BERT.peer_id, CREATOR.peer_id)] == [
        False,
        True,
        False,
    ]
    assert "does not want" in picky.refusal(BERT.peer_id, b"")


def test_the_creator_needs_nothing_and_others_an_invitation():
    at = access_policy()
    assert at.admits(CREATOR.peer_id)
    assert at.refusal(CREATOR.peer_id, b"") == ""
    assert not at.admits(ANNA.peer_id)
    assert "has no invitation" in at.refusal(ANNA.peer_id, b"")
    assert at.refusal(ANNA.peer_id, admission(TEXT, ANNA, NOW)) == ""
    assert at.admits(ANNA.peer_id)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_first_come_are_in_whatever_the_order(order):
    """The first come are in whatever the order in which they are seen."""
    text = issue(CREATOR, SWARM, lives=DAY, uses=2, now=NOW)
    invited = [(Identity.ephemeral(), NOW + i) for i in range(3)]
    at = access_policy(clock=lambda: NOW + 5)
    for i in order:
        who, came = invited[i]
        assert at.record(who.peer_id, admission(text, who, came), NOW + 5, True)
    assert [at.admits(who.peer_id) for who, _ in invited] == [True, True, False]
    last, came = invited[2]
    assert f"is used by peer {invited[1][0].peer_id} already" in at.refusal(
        last.peer_id, admission(text, last, came)
    )


def test_place_is_free_after_leaving_or_silence():
    """A place is free again when its holder leaves or is silent."""
    time = [NOW]
    at = access_policy(clock=lambda: time[0], ttl=30.0)
    first, second = admission(TEXT, ANNA, NOW), admission(TEXT, BERT, NOW + 1)
    at.record(ANNA.peer_id, first, NOW, True)
    at.record(BERT.peer_id, second, NOW, True)
    assert not at.admits(BERT.peer_id)
    at.record(ANNA.peer_id, first, NOW, False)
    assert at.admits(BERT.peer_id)
    at.record(ANNA.peer_id, first, NOW, True)
    assert not at.admits(BERT.peer_id)
    time[0] += 31
    at.record(BERT.peer_id, second, time[0], True)
    assert at.admits(BERT.peer_id)
    assert at.admits(ANNA.peer_id)  # it was first, and comes back
    at.record(ANNA.peer_id, first, time[0], True)
    assert not at.admits(BERT.peer_id)


def test_expired_invitation_is_reported_before():
    """An invited peer is out when its invitation expires which is reported before."""
    time = [NOW]
    at = access_policy(me=ANNA.peer_id, ticket=admission(TEXT, ANNA, NOW), clock=lambda: time[0])
    at.record(
        BERT.peer_id,
        admission(issue(CREATOR, SWARM, lives=DAY, peer=BERT.peer_id, now=NOW), BERT),
        NOW,
        True,
    )
    at.check_own()
    assert at.admits(BERT.peer_id)
    assert at.expiry_event() == ""
    time[0] += DAY - EXPIRES_SOON_S + 600
    assert "expires in 50 minutes" in at.expiry_event()
    assert not at.has_expired()
    assert at.expiry_event() == ""
    time[0] += DAY
    assert "do not meet this node any more, for its invitation expired" in at.expiry_event()
    assert at.has_expired()
    assert at.expiry_event() == ""
    assert not at.admits(BERT.peer_id)
    with pytest.raises(AdmissionError, match="This node may not come in: its invitation expired"):
        at.check_own()


def test_what_is_noted_of_peers_is_bounded(monkeypatch):
    monkeypatch.setattr("shoal.swarm.access.policy.MAX_PEERS", 3)
    at = access_policy()
    for _ in range(5):
        who = Identity.ephemeral()
        at.record(
            who.peer_id,
            admission(issue(CREATOR, SWARM, lives=DAY, peer=who.peer_id, now=NOW), who),
            NOW,
            True,
        )
    assert len(at._users._users) == len(at._users._by_invitation) == 3
    assert at.admits(who.peer_id)
