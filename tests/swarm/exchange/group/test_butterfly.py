"""The compressed butterfly of a group: its bits, what ends it, and who is named."""

import math
from dataclasses import replace

import pytest
import torch

from shoal.optim import RoundKey, Simulation
from shoal.optim.codecs.registry import codec_named
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.update_screen import UpdateScreen
from shoal.swarm.exchange.group.butterfly import Butterfly, contradicted, digest_of
from shoal.swarm.exchange.group.commit import GroupCommit
from shoal.swarm.exchange.group.decisions import DecisionLog
from shoal.swarm.exchange.group.roster import HeartbeatChannel, encode_list
from shoal.swarm.identity import Identity
from shoal.swarm.wire.envelope import fresh_nonce, seal
from shoal.swarm.wire.messages import GroupAverage, GroupReport

SWARM = "a" * 52
CODEC = "sign+ef,back=e3m0+ef"
SHAPES = [(64, 1000), (3000,), (5,)]


def tensors_of(number, round=0):
    generator = torch.Generator().manual_seed(100 * round + number)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def start(peers, codecs, round=0):
    """Let each peer contribute tensors of its own."""
    handles = []
    for number, (peer, codec) in enumerate(zip(peers, codecs, strict=True)):
        key = RoundKey(SWARM, round)
        tensors = tensors_of(number, round)
        handles.append(peer.exchange.start(Contribution(key, tensors, 1.0 + number, codec)))
    return handles


def one_codec_each(peers, name=CODEC):
    return [codec_named(name) for _ in peers]


def same(means):
    """Return the mean that all have."""
    for mean in means:
        assert mean.members == means[0].members
        assert all(map(torch.equal, mean.tensors, means[0].tensors))
    return means[0]


def of_simulation(peers, rounds, name=CODEC):
    """Return the mean of each round, and what each peer owes after them, by its id."""
    ids = [peer.id for peer in peers]

    def peer(exchange):
        codec = codec_named(name)
        means = []
        for round in range(rounds):
            number = ids.index(exchange.peer)
            key = RoundKey("run", round)
            contribution = Contribution(key, tensors_of(number, round), 1.0 + number, codec)
            means.append(exchange.start(contribution).result())
            codec.accepted()
        return means, codec.owed

    return Simulation(ids, size=len(ids)).run(peer)


@pytest.mark.parametrize("back", ["e3m0+ef", "auto:2+ef"])
def test_a_group_ends_with_the_bits_of_the_simulation(school, attempts, back):
    """Also in the next round, with what owners owe then."""
    name = f"sign+ef,back={back}"
    peers = school.peers(4)
    codecs = one_codec_each(peers, name)
    expected = of_simulation(peers, 2, name)
    for round in range(2):
        mean = same([handle.result() for handle in start(peers, codecs, round)])
        simulated = expected[peers[0].id][0][round]
        assert (mean.members, mean.weight) == (simulated.members, simulated.weight)
        assert all(map(torch.equal, mean.tensors, simulated.tensors))
        for codec in codecs:
            codec.accepted()
    for peer, codec in zip(peers, codecs, strict=True):
        assert all(map(torch.equal, codec.owed, expected[peer.id][1]))
    assert attempts == [("butterfly", 4, True)] * 2


class Gathering(UpdateScreen):
    gathers = True


@pytest.mark.parametrize(("count", "screen"), [(2, UpdateScreen()), (3, Gathering())])
def test_two_members_and_those_that_screen_gather(school, attempts, count, screen):
    peers = school.peers(count, screen=screen)
    codecs = one_codec_each(peers)
    same([handle.result() for handle in start(peers, codecs)])
    assert attempts == [("gather", count, True)]
    assert [codec.owed for codec in codecs] == [None] * count


def check_gathered(peers, codecs, handles, members):
    """Those who are left have the mean of whole contributions, and owe nothing new."""
    mean = same([handles[number].result() for number in members])
    assert mean.members == tuple(sorted(peers[number].id for number in members))
    assert [codecs[number].owed for number in members] == [None] * len(members)


def kill(peer):
    """As ``FakeHost.die``, from within the loop."""
    peer.host.dead = True
    for stream in peer.host.streams:
        stream.abort()


@pytest.mark.parametrize("at", ["_exchange", "_received", "_send", "_answer"])
def test_a_member_that_dies_at_a_message_is_left_behind(school, monkeypatch, attempts, at):
    """The rest gather the same payloads."""
    peers = school.ranked(school.peers(4, chunk_timeout=3.0))
    codecs = one_codec_each(peers)
    victim = peers[-1]
    usual = getattr(Butterfly, at)

    async def dying(butterfly, *args):
        if butterfly._me == victim.id:
            kill(victim)
        return await usual(butterfly, *args)

    monkeypatch.setattr(Butterfly, at, dying)
    handles = start(peers, codecs)
    check_gathered(peers, codecs, handles, range(3))
    assert attempts == [("butterfly", 4, False), ("gather", 3, True)]


def test_who_dies_after_its_report_changes_nothing(school, monkeypatch, attempts):
    peers = school.ranked(school.peers(4))
    codecs = one_codec_each(peers)
    victim = peers[-1]
    send = HeartbeatChannel.send

    async def dying(channel, message):
        await send(channel, message)
        if isinstance(message, GroupReport) and channel.stream in victim.host.streams:
            kill(victim)

    monkeypatch.setattr(HeartbeatChannel, "send", dying)
    handles = start(peers, codecs)
    same([handle.result() for handle in handles[:3]])
    assert attempts == [("butterfly", 4, True)]
    assert all(codec.owed is not None for codec in codecs[:3])


def test_a_dead_leader_leaves_nobody_with_half_a_round(school, monkeypatch):
    peers = school.ranked(school.peers(4, chunk_timeout=3.0))
    codecs = one_codec_each(peers)

    def dying(commit, nonce):
        kill(peers[0])
        return 0

    monkeypatch.setattr(GroupCommit, "_all_or_none", dying)
    handles = start(peers, codecs)
    assert [handle.result() for handle in handles[1:]] == [None] * 3
    assert [codec.owed for codec in codecs[1:]] == [None] * 3


def test_who_went_on_alone_owes_nothing_new(school, monkeypatch):
    peers = school.peers(3)
    codecs = one_codec_each(peers)
    handles, settle = [], DecisionLog.settle

    def closing(decisions, nonce, *decided):
        handles[0]._attempt.commit.closed = True
        return settle(decisions, nonce, *decided)

    monkeypatch.setattr(DecisionLog, "settle", closing)
    handles.extend(start(peers, codecs))
    assert handles[0].result() is None
    assert codecs[0].owed is None
    same([handle.result() for handle in handles[1:]])
    assert all(codec.owed is not None for codec in codecs[1:])


def test_an_outcome_is_owed_once_training_takes_it(school):
    """A state that is saved before is that of a round still in flight."""
    peers = school.peers(3)
    codecs = one_codec_each(peers)
    handles = start(peers, codecs)
    school.until(lambda: all(handle.done() for handle in handles))
    assert [codec.owed for codec in codecs] == [None] * 3
    for handle in handles:
        handle.result()
    assert all(codec.owed is not None for codec in codecs)


def blamed(peer):
    return [(other, kind) for other, kind, _ in peer.exchange.stats.report().get("blamed", ())]


def test_an_owner_of_two_averages_is_named_by_the_leader(school, monkeypatch, attempts):
    peers = school.ranked(school.peers(4))
    codecs = one_codec_each(peers)
    liar, victim = peers[1], peers[2]
    answer = Butterfly._answer

    async def lying(butterfly, stream, signature, average):
        if butterfly._me == liar.id and stream.peer_id == victim.id:
            other = codecs[1].average(
                average.share,
                [torch.ones(*average.share.shapes[0])]
                + [torch.zeros(shape) for shape in average.share.shapes[1:]],
            )
            signature = signed(liar.host.identity, butterfly.group.nonce, digest_of(other.payload))
            average = other
        await answer(butterfly, stream, signature, average)

    monkeypatch.setattr(Butterfly, "_answer", lying)
    handles = start(peers, codecs)
    check_gathered(peers, codecs, handles, [0, 2, 3])
    assert attempts == [("butterfly", 4, False), ("gather", 3, True)]
    assert (liar.id, "suspicious") in blamed(peers[0])
    assert not {(peer.id, "suspicious") for peer in peers if peer is not liar} & {*blamed(peers[0])}
    assert handles[1].result() is None


def signed(identity, nonce, sha256):
    return seal(GroupAverage(swarm=SWARM, nonce=nonce, sha256=sha256), identity)


def test_reports_tell_a_lying_owner_from_a_lying_reporter():
    one, two, three = [Identity.ephemeral() for _ in range(3)]
    nonce = fresh_nonce()
    honest = [signed(identity, nonce, bytes(32)) for identity in (one, two, three)]
    other = signed(two, nonce, bytes([1] * 32))
    ids = [identity.peer_id for identity in (one, two, three)]

    def found(*reports):
        return contradicted(dict(zip(ids, map(encode_list, reports), strict=True)), SWARM, nonce)

    assert found(honest, honest, honest) == set()
    assert found(honest, honest, [honest[0], other, honest[2]]) == {ids[1]}
    # What a reporter cannot show is signed says nothing of the owner.
    forged = signed(Identity.ephemeral(), nonce, bytes([1] * 32))
    assert found(honest, honest, [honest[0], forged, honest[2]]) == {ids[2]}
    old = signed(two, fresh_nonce(), bytes([1] * 32))
    assert found(honest, [honest[0], old, honest[2]], honest) == {ids[1]}
    torn = {ids[0]: b"\x00", ids[1]: encode_list(honest[:2])}
    assert contradicted(torn, SWARM, nonce) == {ids[0]}


async def short(butterfly, stream, payload):
    await stream.send(payload[:-1].numpy().tobytes(), 5)


async def not_finite(butterfly, stream, payload):
    payload = payload.clone()
    payload[:4] = torch.tensor([math.nan]).view(torch.uint8)
    await stream.send(payload.numpy().tobytes(), 5)


async def too_much(butterfly, stream, payload):
    await stream.send(payload.numpy().tobytes() + b"x", 5)


@pytest.mark.parametrize("wrong", [short, not_finite, too_much])
def test_a_share_that_cannot_be_used_is_named(school, monkeypatch, attempts, wrong):
    """The group gathers then, and what the liar announced counts."""
    peers = school.ranked(school.peers(3))
    codecs = one_codec_each(peers)
    liar = peers[-1]
    send = Butterfly._send

    async def lying(butterfly, stream, payload):
        own = butterfly._own
        is_average = own is not None and payload is own.payload
        usual = butterfly._me != liar.id or is_average
        await (send if usual else wrong)(butterfly, stream, payload)

    monkeypatch.setattr(Butterfly, "_send", lying)
    handles = start(peers, codecs)
    check_gathered(peers, codecs, handles, range(3))
    assert attempts == [("butterfly", 3, False), ("gather", 3, True)]
    named = {peer for one in peers[:2] for peer, kind in blamed(one) if kind == "damaged"}
    assert named == {liar.id}


@pytest.mark.parametrize(
    "how", ["another digest", "another nonce", "another signer", "no values", "too short"]
)
def test_an_average_that_is_not_as_signed_is_refused(school, monkeypatch, attempts, how):
    peers = school.ranked(school.peers(3))
    codecs = one_codec_each(peers)
    liar = peers[-1]
    answer = Butterfly._answer

    async def lying(butterfly, stream, signature, average):
        identity = Identity.ephemeral() if how == "another signer" else liar.host.identity
        nonce = fresh_nonce() if how == "another nonce" else butterfly.group.nonce
        digest = digest_of(average.payload)
        if how == "another digest":
            digest = bytes(32)
        if how == "no values" and butterfly._me == liar.id:
            payload = average.payload.clone()
            payload[:128] = 255  # words that encode no block
            average = replace(average, payload=payload)
            digest = digest_of(payload)
        if how == "too short" and butterfly._me == liar.id:
            average = replace(average, payload=average.payload[:-4])
        if butterfly._me == liar.id:
            signature = signed(identity, nonce, digest)
        await answer(butterfly, stream, signature, average)

    monkeypatch.setattr(Butterfly, "_answer", lying)
    handles = start(peers, codecs)
    check_gathered(peers, codecs, handles, range(3))
    assert attempts == [("butterfly", 3, False), ("gather", 3, True)]
    assert (liar.id, "damaged") in [*blamed(peers[0]), *blamed(peers[1])]


def test_a_decision_on_other_averages_is_refused(school, monkeypatch):
    settle = DecisionLog.settle

    def lying(decisions, nonce, mean, averages=b""):
        return settle(decisions, nonce, mean, b"others")

    monkeypatch.setattr(DecisionLog, "settle", lying)
    peers = school.peers(3)
    codecs = one_codec_each(peers)
    assert [handle.result() for handle in start(peers, codecs)] == [None] * 3
    assert [codec.owed for codec in codecs] == [None] * 3
