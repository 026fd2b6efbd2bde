"""A swarm of real hosts by invitation only: admitted peers, and what is served to the others."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest

from shoal.node.commands import creator as creators
from shoal.node.commands.creator import inviting_key
from shoal.node.commands.status import read_status
from shoal.node.config.settings import ConfigError, load
from shoal.node.runtime.join import new_manifest
from shoal.node.runtime.run_options import network
from shoal.swarm.access.invitation import issue
from shoal.swarm.access.link import Link
from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import AdmissionError, NetworkError
from shoal.swarm.gossip.bodies import BODY_PROTOCOL
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import open_manifest
from shoal.swarm.membership.manifest_exchange import fetch_manifest
from shoal.swarm.membership.membership import create, join
from shoal.swarm.membership.visit import visited
from shoal.swarm.state.offers import STATE_PROTOCOL
from shoal.swarm.state.state_server import StateServer
from shoal.swarm.topics.rollout_pool import RolloutPool
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.messages import Answer, StateRequest
from tests.support.reasons import raises_for
from tests.support.waiting import until

MODEL = "0" * 64
SHAPES = [(4,)]
ABOUT = {
    "name": "x",
    "round": 1,
    "step": 1,
    "loss": None,
    "steps_per_s": 1.0,
    "shard": 0,
    "shards": 1,
    "model": MODEL,
    "state": "training",
    "version": "0",
}


class Club:
    """The creator's node, and a way for others to come."""

    def __init__(self, folder):
        self.folder, self.members, self.identity = folder, [], Identity.ephemeral()
        settings = self.settings("creator", **{"swarm.invite_only": True})
        self.first = create(
            self.identity, new_manifest(settings, self.identity, MODEL), network(settings)
        )
        self.members.append(self.first)
        self.first.directory.announce(**ABOUT)
        self.first.directory.wait_for(1, 5.0)
        until(lambda: self.first.directory._publisher.prefix is not None)

    def settings(self, name, **more):
        return load(
            None,
            {"node.folder": self.folder / name, "node.listen": ["/ip4/127.0.0.1/tcp/0"], **more},
        )

    def link(self, invite=""):
        return Link(self.first.swarm, self.first.link().bootstrap, invite)

    def invited(self, **options):
        return self.link(issue(self.identity, self.first.swarm, lives=600.0, **options))

    def join(self, link, name="guest", identity=None, **more):
        membership = join(
            identity or Identity.ephemeral(), link, network(self.settings(name, **more))
        )
        self.members.append(membership)
        return membership


@pytest.fixture
def club(tmp_path):
    made = Club(tmp_path)
    yield made
    for membership in reversed(made.members):
        membership.close()


def stranger(club, monkeypatch):
    """A node of the swarm with a changed program: it does not look whether it may come in."""
    with monkeypatch.context() as patch:
        patch.setattr(AccessPolicy, "check_own", lambda access_policy: None)
        return club.join(club.link(), "stranger")


def asks(host, peer, protocol, message, addresses):
    async def ask():
        stream = await host.open(peer, protocol, addresses=addresses, timeout=30)
        try:
            await stream.send(pack(message), 5)
            return unpack(await stream.receive(4096, 5), Answer)
        finally:
            stream.close()

    return host.call(ask(), 60)


def test_a_members_link_has_the_others_addresses_and_no_invitation(club):
    guest = club.join(club.invited())
    guest.directory.announce(**ABOUT)
    assert guest.directory.wait_for(2, 30.0)
    link = guest.link()
    assert link.invite == ""
    assert {address.rpartition("/p2p/")[2] for address in link.bootstrap} == {
        guest.host.peer_id,
        club.first.host.peer_id,
    }
    assert link.bootstrap[0].endswith(guest.host.peer_id)
    with pytest.raises(AdmissionError, match="it has no invitation"):
        club.join(link, "third")
    assert club.first.directory.wait_for(2, 30.0)
    assert any(address.endswith(guest.host.peer_id) for address in club.first.link_now().bootstrap)


def test_who_was_let_in_comes_back_by_any_members_link(club, tmp_path):
    mine = Identity.load_or_create(tmp_path / "mine.key")
    club.join(club.invited(), "guest", mine).close()
    again = club.join(club.link(), "again", mine)
    assert again.directory.access_policy.ticket
    with pytest.raises(AdmissionError, match="it has no invitation"):
        club.join(club.link(), "third", Identity.load_or_create(tmp_path / "another.key"))


def test_without_an_invitation_one_sentence_says_so_before_anything_else(club):
    with pytest.raises(
        AdmissionError,
        match=r"may not come in: it has no invitation .* by invitation only: ask the creator",
    ):
        club.join(club.link())
    assert [thread.name for thread in threading.enumerate()].count(
        "shoal-host"
    ) == 1  # the newcomer's host is closed again
    with pytest.raises(AdmissionError, match="for peer"):
        club.join(club.invited(peer=Identity.ephemeral().peer_id))
    with pytest.raises(AdmissionError, match="expired"):
        club.join(
            club.link(issue(club.identity, club.first.swarm, lives=1.0, now=time.time() - 1000))
        )


@pytest.mark.ci
def test_only_the_invited_are_met(club, monkeypatch):
    """Who is invited is met by all and who is not by nobody."""
    anna, bert = club.join(club.invited(), "anna"), club.join(club.invited(), "bert")
    creator = club.first
    for member in (creator, anna):
        StateServer(member.host, member.swarm, MODEL, SHAPES)
    # Weights are asked for before anybody could have read a record of the newcomer: it shows its
    # invitation first.
    wanted = StateRequest(swarm=creator.swarm, model=MODEL)
    assert (
        asks(
            bert.host, creator.host.peer_id, STATE_PROTOCOL, wanted, creator.host.addresses()
        ).verdict
        == "wait"
    )
    # Two guests, neither of whom has a record yet, may meet too; and each learns of the other.
    assert not anna.directory.access_policy._users.entry(bert.host.peer_id)
    answer = asks(
        bert.host,
        anna.host.peer_id,
        STATE_PROTOCOL,
        StateRequest(swarm=bert.swarm, model=MODEL),
        anna.host.addresses(),
    )
    assert answer.verdict == "wait"
    assert anna.directory.access_policy.admits(bert.host.peer_id)
    assert bert.directory.access_policy.admits(anna.host.peer_id)
    for state in (anna, bert):
        state.directory.announce(**ABOUT)
    ids = {m.host.peer_id for m in (creator, anna, bert)}
    until(
        lambda: all(
            m.directory.refresh(10) or set(m.directory.members()) == ids
            for m in (creator, anna, bert)
        )
    )

    spy = stranger(club, monkeypatch)
    spy.directory.announce(**ABOUT)
    until(lambda: spy.directory._publisher.prefix is not None)
    for member in (creator, anna):
        member.directory.refresh(10)
        assert set(member.directory.everyone()) == ids
        assert not member.directory.addresses(spy.host.peer_id)
    with pytest.raises(NetworkError, match="does not let this node in: it has no invitation"):
        asks(
            spy.host,
            anna.host.peer_id,
            STATE_PROTOCOL,
            StateRequest(swarm=spy.swarm, model=MODEL),
            anna.host.addresses(),
        )
    # A program that does not even show an invitation is not answered at all.
    spy.host.introduce = None
    for protocol in (STATE_PROTOCOL, BODY_PROTOCOL, "/shoal/exchange/1", "/shoal/group/1"):
        anna.host.serve(protocol, lambda stream: asyncio.sleep(60))
        with raises_for("broken", NetworkError):
            asks(
                spy.host,
                anna.host.peer_id,
                protocol,
                StateRequest(swarm=spy.swarm, model=MODEL),
                anna.host.addresses(),
            )
    assert anna.host.resource_manager.refused()["uninvited"] == 4
    # The manifest says that an invitation is needed, so every peer gets it; and the directory shows
    # the members.
    assert fetch_manifest(spy.host, club.link())[1].invite_only


def test_visitor_needs_an_invitation_to_fetch(club):
    """A visitor sees the members and may fetch by an invitation only."""
    creator = club.first
    StateServer(creator.host, creator.swarm, MODEL, SHAPES)
    wanted = StateRequest(swarm=creator.swarm, model=MODEL)
    with visited(club.link()) as (host, manifest, members, _):
        assert manifest.invite_only
        assert set(members) == {creator.host.peer_id}
        with pytest.raises(NetworkError, match="has no invitation"):
            asks(host, creator.host.peer_id, STATE_PROTOCOL, wanted, creator.host.addresses())
    with visited(club.invited()) as (host, _, _, _):
        assert (
            asks(
                host, creator.host.peer_id, STATE_PROTOCOL, wanted, creator.host.addresses()
            ).verdict
            == "wait"
        )


def test_pull_where_the_creator_is_needs_no_invitation(club, tmp_path, monkeypatch):
    """The creator's key on this machine admits a visitor; elsewhere a sentence says what to do."""
    creator, own = club.first, tmp_path / "own.key"
    StateServer(creator.host, creator.swarm, MODEL, SHAPES)
    wanted = StateRequest(swarm=creator.swarm, model=MODEL)
    monkeypatch.setattr(creators, "default_identity_path", lambda: own)
    monkeypatch.setattr(creators, "RUNS", tmp_path / "runs")
    with (
        pytest.raises(AdmissionError, match="gives its weights by invitation only: pull where its"),
        visited(club.link(), creators.admitted),
    ):
        pass
    club.identity.write_to(own)
    with visited(club.link(), creators.admitted) as (host, _, _, _):
        answer = asks(host, creator.host.peer_id, STATE_PROTOCOL, wanted, creator.host.addresses())
    assert answer.verdict == "wait"


def test_pull_by_ones_own_used_invitation_says_what_to_do(club, tmp_path, monkeypatch):
    """Fault: the members refused one by one, and the sentence was to try again, which cannot help.

    Mutants: only the invitation itself is judged, not who uses it; only members are judged so.
    """
    link = club.invited()
    anna = club.join(link, "anna")
    anna.directory.announce(**ABOUT)
    until(lambda: anna.directory._publisher.prefix is not None)
    with pytest.raises(AdmissionError) as refused, visited(link, creators.admitted):
        pass
    assert str(refused.value) == (
        "This command counts as a peer of its own, and may not come in: its invitation, for 1, is "
        f"used by peer {anna.host.peer_id} already: ask the creator of the swarm for a new link "
        "(`shoal invite`)."
    )
    monkeypatch.setattr(creators, "default_identity_path", lambda: tmp_path / "own.key")
    monkeypatch.setattr(creators, "RUNS", tmp_path / "runs")
    bert = Identity.ephemeral().peer_id
    manifest = club.first.manifest
    with pytest.raises(AdmissionError) as refused:
        creators.admitted(club.invited(peer=bert), manifest, anna.host.peer_id)
    assert str(refused.value) == (
        f"The invitation in the link is for peer {bert} alone, and this command counts as a peer "
        f"of its own in the swarm {manifest.name!r}: pull where its creator's node runs, or by a "
        "link that the creator makes for this (`shoal invite`)."
    )


def test_used_single_invitation_names_its_user(club):
    """The second who comes by a link for one is told who uses it."""
    link = club.invited()
    anna = club.join(link, "anna")
    anna.directory.announce(**ABOUT)
    until(lambda: anna.directory._publisher.prefix is not None)
    with pytest.raises(AdmissionError, match=f"used by peer {anna.host.peer_id} already"):
        club.join(link, "bert")
    again = club.join(club.invited(uses=2), "carl")
    again.directory.announce(**ABOUT)
    until(lambda: again.directory._publisher.prefix is not None)
    until(lambda: club.first.directory.refresh(10) or len(club.first.directory.members()) == 3)


@pytest.mark.ci
def test_what_a_stranger_gossips_is_not_taken(club, monkeypatch):
    anna, spy = club.join(club.invited(), "anna"), stranger(club, monkeypatch)
    anna.directory.announce(**ABOUT)
    pools = []
    entry = club.first.host
    for member in (club.first, anna, spy):
        gossip = Gossip(
            member.host,
            member.identity,
            member.swarm,
            members=dict if member is club.first else lambda: {entry.peer_id: entry.addresses()},
            is_member=member.directory.vouches,
            access_policy=member.directory.access_policy,
            look=member.directory.look,
        )
        pools.append(RolloutPool(gossip, lambda *env: True))
    until(lambda: len(pools[0].topic.listeners()) == 2)
    until(lambda: club.first.directory.access_policy.admits(anna.host.peer_id))
    for pool in reversed(pools[1:]):
        until(lambda pool=pool: pool.topic.listeners())
        pool.publish(rollout(pool))
    until(lambda: pools[0].counts["accepted"])
    assert {record.peer for record in pools[0].drain()} == {anna.host.peer_id}
    assert pools[0].counts["received"] == 1, "what the spy sends is not even read"


def rollout(pool):
    return pool.make(
        env="e",
        env_version="1",
        env_config=bytes(32),
        seed=0,
        index=0,
        completions=("a",),
        finish=("stop",),
        policy_version=0,
        temperature=1.0,
    )


def test_only_the_creator_invites_and_only_where_it_is_needed(club, tmp_path, monkeypatch):
    """Fault: without --identity the creator, whose key is another file, was told to make a new key,
    which cannot invite.
    """
    manifest = open_manifest(club.first.sealed)
    other, absent, own = tmp_path / "other.key", tmp_path / "absent.key", tmp_path / "own.key"
    key = Identity.create(other)
    club.identity.write_to(own)
    lost = "if it is lost, begin a new swarm \\(shoal up --resume-from\\).$"
    with pytest.raises(
        AdmissionError,
        match=f"^Only the swarm's creator, {club.identity.peer_id}, can invite, and the key in "
        f"{other} is {key.peer_id}: name the "
        f"creator's key file with --identity; {lost}",
    ):
        inviting_key(manifest, other)
    monkeypatch.setattr(creators, "default_identity_path", lambda: absent)
    monkeypatch.setattr(creators, "RUNS", tmp_path / "runs")
    with pytest.raises(
        AdmissionError,
        match=f"^Only the swarm's creator, {club.identity.peer_id}, can invite, and none of the "
        "key files that were looked at is "
        f"that one \\({absent}\\): name the one with which `shoal up` made the swarm by "
        f"--identity; {lost}",
    ):
        inviting_key(manifest, None)
    for name, path in (("bert", other), ("anna", own), ("carl", absent)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        link = {"link": "x", "identity": str(path)}
        (tmp_path / "runs" / name / "link.json").write_text(json.dumps(link))
    assert inviting_key(manifest, None).peer_id == club.identity.peer_id
    with pytest.raises(AdmissionError, match="is open"):
        inviting_key(manifest.model_copy(update={"invite_only": False}), None)
    with pytest.raises(
        AdmissionError, match="by invitation only, and this node's key is not its creator's"
    ):
        create(key, club.first.sealed, network(club.settings("x")))


def test_denied_peer_is_met_nowhere(club):
    """Who is denied is met nowhere and who is not allowed neither."""
    anna, bert = Identity.ephemeral(), Identity.ephemeral()
    first = club.join(club.invited(), "anna", anna, **{"peers.deny": [bert.peer_id]})
    second = club.join(club.invited(), "bert", bert, **{"peers.allow": [club.identity.peer_id]})
    for state in (first, second):
        state.directory.announce(**ABOUT)
    until(lambda: club.first.directory.refresh(10) or len(club.first.directory.members()) == 3)
    for one, other in ((first, second), (second, first)):
        until(lambda one=one: one.directory.refresh(10) or len(one.directory.members()) == 2)
        assert other.host.peer_id not in one.directory.everyone()
        assert one.directory.is_barred(other.host.peer_id)
    with pytest.raises(NetworkError, match="is on this node's deny list"):
        first.host.call(first.host.open(bert.peer_id, STATE_PROTOCOL, timeout=30), 60)
    second.host.introduce = None
    with raises_for("broken", NetworkError):
        asks(
            second.host,
            anna.peer_id,
            "/shoal/manifest/1",
            StateRequest(swarm=first.swarm, model=MODEL),
            first.host.addresses(),
        )
    assert first.host.resource_manager.refused()[
        "denied"
    ]  # the manifest is for any other peer, not for a denied one


@pytest.mark.ci
def test_creators_change_reaches_late_joiners(club, tmp_path):
    """As `shoal change` does it, by a visitor without an invitation, and told by `shoal status`."""
    key = tmp_path / "creator.key"
    club.identity.write_to(key)
    guest = club.join(club.invited(), "guest")
    guest.directory.announce(**ABOUT)
    assert club.first.directory.wait_for(2, 30.0)
    until(lambda: guest.directory._publisher.prefix is not None)
    made = creators.change(club.link(), {"train.lr": 0.5, "train.steps": 7}, key)
    assert (made["round"], made["members"]) == (1 if made["now"] == 0 else 2, 2)
    assert made["said"].startswith(
        f"train.lr=0.5, train.steps=7 from round {made['round']} on, which begins at step "
    )
    for member in (club.first, guest):
        until(lambda member=member: member.changes.number)
        train = member.changes.settings_at(made["round"])
        assert (train.lr, train.steps) == (0.5, 7)
        assert member.changes.settings_at(made["round"] - 1) == member.manifest.train
    late = club.join(club.invited(), "late")
    late.directory.refresh(10.0)
    until(lambda: late.changes.fetch(5.0) or late.changes.number)
    assert late.changes.sealed == club.first.changes.sealed
    later = creators.change(club.link(), {"train.lr": 0.25}, key, made["round"] + 5)
    assert later["round"] == made["round"] + 5
    until(lambda: club.first.changes.number > late.changes.number or late.changes.newest.parts[1:])
    parts = club.first.changes.newest.parts
    assert [(part.round, part.lr, part.steps) for part in parts] == [
        (made["round"], 0.5, 7),
        (later["round"], 0.25, None),
    ]
    shown = read_status(club.link())["changes"]
    assert [one["round"] for one in shown] == [made["round"], later["round"]]


@pytest.mark.ci
def test_the_creator_ends_a_run_for_all_members(club, tmp_path):
    key = tmp_path / "creator.key"
    club.identity.write_to(key)
    every = club.first.manifest.outer.resolved().every
    club.first.directory.announce(**{**ABOUT, "round": 40, "step": 40 * every})
    until(lambda: not club.first.directory._publisher.urgent)
    made = creators.end(club.link(), key, 60)
    until(lambda: club.first.changes.number)
    assert made["changed"] == {"steps": 60 * every}
    assert club.first.changes.settings_at(59).steps == club.first.manifest.train.steps
    assert club.first.changes.settings_at(60).steps == 60 * every


def test_who_came_late_ends_in_the_same_round():
    """Fault: it had to do the steps of the first ones, alone, after they had ended.

    Mutants: its round counts fragments; a member ahead of its round puts the end off; the end is at
    step 0, which is no end.
    """
    manifest = open_manifest(new_manifest(load(), Identity.ephemeral(), MODEL))
    every, fragments = manifest.outer.resolved().every, manifest.outer.fragments_a_round
    assert fragments > 1

    def end(*steps):
        members = {
            str(number): SimpleNamespace(step=step, round=50 * fragments + 1)
            for number, step in enumerate(steps)
        }
        return creators._steps_to_end(manifest, members, 60)["steps"]

    assert end(50 * every, 50 * every + 1) == end(50 * every + 1) == 60 * every
    assert end(50 * every, 20 * every) == 30 * every
    assert creators._steps_to_end(
        manifest, {"late": SimpleNamespace(step=0, round=60 * fragments)}, 60
    ) == {"steps": 1}


def test_rounds_that_are_no_steps_end_for_every_member_alike(club):
    outer = club.first.manifest.outer.model_copy(update={"round": "seconds:30"})
    manifest = club.first.manifest.model_copy(update={"outer": outer})
    members = {str(step): SimpleNamespace(step=step) for step in (70, 90)}
    assert creators._steps_to_end(manifest, members, 9) == {"steps": 70}
    members["0"] = SimpleNamespace(step=0)
    assert creators._steps_to_end(manifest, members, 9) == {"steps": 1}


@pytest.mark.parametrize(
    ("given", "at", "said"),
    [
        (
            {},
            None,
            "Nothing would change: name a setting, such as --set train.lr=1e-4 or --set "
            "train.steps=4000.",
        ),
        ({"train.lrr": 1.0}, None, "There is no setting 'train.lrr': did you mean 'train.lr'?"),
        (
            {"train.lr": "x"},
            None,
            "The setting train.lr='x' cannot be used: it should be a valid number.",
        ),
        (
            {"train.steps": -1},
            None,
            "The setting train.steps=-1 cannot be used: it should be greater than or equal to 0.",
        ),
    ],
)
def test_what_cannot_be_changed_is_said_before_anybody_is_asked(given, at, said):
    with pytest.raises(ConfigError) as refused:
        creators.wanted(given)
    assert str(refused.value) == said


def test_a_round_that_is_over_is_refused(club, tmp_path):
    key = tmp_path / "creator.key"
    club.identity.write_to(key)
    club.first.directory.announce(**{**ABOUT, "round": 40})
    until(lambda: club.first.directory.own().round == 40)
    time_is_up = r"^Round 1 is over, for the swarm is in round \d+: leave --at out, or name a later"
    until(lambda: not club.first.directory._publisher.urgent)
    with pytest.raises(ConfigError, match=time_is_up):
        creators.change(club.link(), {"train.lr": 0.5}, key, 1)
