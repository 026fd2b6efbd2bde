"""What counts and what does not when members of a group, or its leader, die, stop, lie, or are too
late.
"""

import asyncio
import contextlib
import functools
import gc
import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from shoal.optim import FLOAT32, RoundKey
from shoal.optim.codecs.registry import codec_named
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.on_demand import OnDemand
from shoal.optim.exchange.update_screen import TRUSTING, UpdateScreen
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.contribution import ContributionError, encode_contribution
from shoal.swarm.exchange.group import commit as group_commit
from shoal.swarm.exchange.group.commit import GroupCommit, MemberState
from shoal.swarm.exchange.group.decisions import DECISION_PROTOCOL, DecisionLog
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.group.leader import LEADER_PROTOCOL
from shoal.swarm.exchange.group.reduction import AllGather, AllReduce, Gathered
from shoal.swarm.exchange.group.roster import encode_list, ready_message
from shoal.swarm.exchange.group.streams import PAYLOAD_PROTOCOL
from shoal.swarm.exchange.pair.exchange import Averaged
from shoal.swarm.exchange.pair.transfer import PartnerContribution
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.wire.envelope import fresh_nonce, seal, unpack, unseal
from shoal.swarm.wire.messages import GroupReady, GroupReceipt, GroupReply, GroupReport

SWARM = "a" * 52
LARGE = (300, 1000)
WAYS = pytest.mark.parametrize("codec", [FLOAT32, codec_named("int8")], ids=["allreduce", "gather"])


def test_only_the_mean_is_held():
    """Of what was gathered the mean alone is held and it is computed once."""
    shapes = ((2, 3), (4,))
    own = SimpleNamespace(tensors=lambda: [torch.full(shape, 6.0) for shape in shapes])
    mine = SimpleNamespace(
        codec=FLOAT32, shapes=shapes, unweighted_count=0, key=RoundKey(SWARM, 0), payload=own
    )
    payloads = {
        peer: FLOAT32.encode([torch.full(shape, value) for shape in shapes])
        for peer, value in (("b", 3.0), ("c", 9.0))
    }
    held = [weakref.ref(payload) for payload in payloads.values()]
    gathered = Gathered(
        "a",
        mine,
        TRUSTING,
        {"a": (1.0, None), **{peer: (1.0, payload) for peer, payload in payloads.items()}},
    )
    del payloads
    assert all(held)
    means = [gathered.mean(), gathered.mean()]
    assert not any(ref() is not None for ref in held)
    assert means[0] is means[1]
    assert [tensor.tolist() for tensor in means[0].tensors] == [[[6.0] * 3] * 2, [6.0] * 4]


class FailingOnce(UpdateScreen):
    """A screen whose first mean fails, after it has begun to use up the contributions."""

    def __init__(self):
        self.calls = 0

    def mean(self, me, fragment, contributions, unweighted_count=0):
        self.calls += 1
        if self.calls == 1:
            _, _, tensors = contributions[0]
            next(iter(tensors)).fill_(math.nan)
            raise MemoryError("no memory for a mean")
        return super().mean(me, fragment, contributions, unweighted_count)


def gathered_of_two(screen):
    """Return a group's contributions, and a weak reference to the other member's."""
    shapes = ((4,),)
    own = SimpleNamespace(tensors=lambda: [torch.full(shape, 6.0) for shape in shapes])
    mine = SimpleNamespace(
        codec=FLOAT32, shapes=shapes, unweighted_count=0, key=RoundKey(SWARM, 0), payload=own
    )
    payload = FLOAT32.encode([torch.full(shape, 3.0) for shape in shapes])
    parts = {"a": (1.0, None), "b": (1.0, payload)}
    return Gathered("a", mine, screen, parts).mean, weakref.ref(payload)


def pair_of_two(screen):
    """Return what makes a pair's mean, and a weak reference to the partner's contribution."""
    own = [torch.full((4,), 6.0)]
    payload = SimpleNamespace(message=None, tensors=lambda: own)
    mine = SimpleNamespace(
        codec=FLOAT32, weight=1.0, unweighted_count=0, key=RoundKey(SWARM, 0), payload=payload
    )
    theirs = PartnerContribution("b", 1.0, [torch.full((4,), 3.0)])
    averaged = Averaged(screen, "a", mine)
    return functools.partial(averaged.learnt, (theirs,)), weakref.ref(theirs.values[0])


OF_TWO = pytest.mark.parametrize("of_two", [gathered_of_two, pair_of_two], ids=["group", "pair"])


@OF_TWO
def test_a_failed_mean_is_not_computed_again(of_two):
    """The fault: the second call, training's, averaged what the first had used up."""
    screen = FailingOnce()
    mean, _ = of_two(screen)
    with pytest.raises(MemoryError):
        mean()
    with pytest.raises(RuntimeError, match=r"^the mean of this exchange failed before$"):
        mean()
    assert screen.calls == 1


@OF_TWO
def test_a_failed_mean_keeps_no_contribution(of_two):
    """The fault: the error was kept, whose traceback names the frames that hold both."""
    gc.collect()
    gc.disable()
    try:
        mean, theirs = of_two(FailingOnce())
        with contextlib.suppress(MemoryError):
            mean()
        del mean
        assert theirs() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("screen", "lessons"), [(FailingOnce, 0), (UpdateScreen, 1)], ids=["failed", "mean"]
)
def test_a_codec_for_pairs_learns_only_from_a_mean(monkeypatch, screen, lessons):
    """Mutant: it learns before the mean is computed."""
    codec = codec_named("mod4")
    learnt = []
    monkeypatch.setattr(codec, "learn", lambda *seen: learnt.append(seen))
    weights = [torch.full((64,), 6.0)]
    mine = encode_contribution(SWARM, Contribution(RoundKey(SWARM, 0), weights, 1.0, codec))
    reading = mine.payload.message.read(codec.post(weights).payload)
    averaged = Averaged(screen(), "a", mine)
    with contextlib.suppress(MemoryError):
        averaged.learnt((PartnerContribution("b", 1.0, reading),))
    assert len(learnt) == lessons


def kill(peer):
    """As ``FakeHost.die``, from within the loop."""
    peer.host.dead = True
    for stream in peer.host.streams:
        stream.abort()


def freeze(monkeypatch, frozen):
    """Streams in ``frozen`` are those of a stopped process: they stay open, and nothing happens on
    them.
    """

    def freezing(name):
        usual = getattr(Stream, name)

        async def method(stream, *args, **options):
            if stream in frozen:
                await asyncio.Event().wait()
            result = await usual(stream, *args, **options)
            if stream in frozen:
                await asyncio.Event().wait()
            return result

        monkeypatch.setattr(Stream, name, method)

    for name in ("send", "receive", "swap"):
        freezing(name)


GATHERS = UpdateScreen()
GATHERS.gathers = True


def start(peers, codec, shape=LARGE):
    return [peer.start(0, float(number), codec, shape) for number, peer in enumerate(peers)]


def check_same(handles, dead=()):
    """The survivors hold the same whole mean, and at least their own contributions are in it."""
    means = [handle.result() for number, handle in enumerate(handles) if number not in dead]
    assert None not in means
    for mean in means:
        assert mean.members == means[0].members
        assert torch.equal(mean.tensors[0], means[0].tensors[0])
        assert len(mean.members) >= len(means)
    return means[0]


@WAYS
def test_all_members_get_the_same_bits(school, attempts, codec):
    """The way follows from the codec and every member gets the same bits."""
    peers = school.peers(5)
    torch.manual_seed(0)
    tensors = [torch.randn(LARGE) for _ in peers]
    handles = [
        peer.exchange.start(Contribution(RoundKey(SWARM, 0), [tensor], 1.0 + number, codec))
        for number, (peer, tensor) in enumerate(zip(peers, tensors, strict=True))
    ]
    mean = check_same(handles)
    expected = sum(tensor * (1.0 + number) for number, tensor in enumerate(tensors)) / 15
    torch.testing.assert_close(
        mean.tensors[0], expected, rtol=1e-6, atol=1e-6 if codec is FLOAT32 else 0.05
    )
    if codec is FLOAT32:  # whatever arrived first
        in_order = torch.zeros(LARGE)
        for number in sorted(range(5), key=lambda number: peers[number].id):
            in_order.add_(tensors[number], alpha=1.0 + number)
        assert torch.equal(mean.tensors[0], in_order / 15)
    assert attempts == [("allreduce" if codec is FLOAT32 else "gather", 5, True)]
    payload = codec.nbytes([LARGE])
    for peer in peers:  # an all-reduce sends 2 (K - 1) / K payloads, gathering K - 1
        assert peer.host.traffic.sent == pytest.approx(
            (1.6 if codec is FLOAT32 else 4) * payload, rel=0.05
        )


def called(peers):
    """Who has opened a stream for payloads to whom, in order."""
    return [
        (caller, other)
        for caller, other, protocol in peers[0].network.opened
        if protocol == PAYLOAD_PROTOCOL
    ]


@WAYS
def test_streams_between_members_stay_open_for_their_next_groups(school, codec):
    peers = school.peers(4)
    for round in range(8):
        check_same(
            [peer.start(round, float(number), codec, LARGE) for number, peer in enumerate(peers)]
        )
    calls = called(peers)
    assert len(calls) == len(set(calls))
    assert {frozenset(call) for call in calls} == {
        frozenset((a.id, b.id)) for a in peers for b in peers if a is not b
    }


@WAYS
def test_burst_of_bytes_keeps_no_buffer(school, codec):
    """Of a kept one's window a part is used up: the rest would wait for a round trip."""
    peers = school.peers(4)
    for round in range(2):
        check_same(
            [peer.start(round, float(number), codec, (4,)) for number, peer in enumerate(peers)]
        )
    assert len(called(peers)) == 2 * (12 if codec is FLOAT32 else 6)
    assert not any(peer.exchange._streams._kept._idle for peer in peers)


def test_leader_calls_among_gatherers(school):
    """Of two members that gather the leader calls else the first in order."""
    leader, *others = school.ranked(school.peers(4))
    check_same(start([leader, *others], codec_named("int8")))
    first, second, third = sorted(peer.id for peer in others)
    expected = [
        (leader.id, first),
        (leader.id, second),
        (leader.id, third),
        (first, second),
        (first, third),
        (second, third),
    ]
    assert sorted(called(others)) == sorted(expected)


@WAYS
def test_kept_stream_that_ended_is_replaced(school, monkeypatch, attempts, codec):
    """A kept stream that its other end has just ended is replaced."""
    peers = school.peers(4)
    check_same(start(peers, codec))
    kept = {stream for peer in peers for stream in peer.exchange._streams._kept._idle}
    before = called(peers)
    assert len(kept) == len(before)

    async def end():
        for peer in peers:
            monkeypatch.setattr(
                peer.host, "usable", lambda stream: True
            )  # the end of the stream is still on its way
            for stream in set(peer.host.streams) - kept:
                stream.abort()

    peers[0].host.call(end(), 60)
    handles = [peer.start(1, float(number), codec, LARGE) for number, peer in enumerate(peers)]
    assert check_same(handles).members == tuple(sorted(peer.id for peer in peers))
    assert set(called(peers)[len(before) :])
    assert attempts == [("allreduce" if codec is FLOAT32 else "gather", 4, True)] * 2
    assert all(peer.exchange.stats.report()["failures"] == () for peer in peers)


def test_who_leads_may_choose_to_gather_always(school, attempts):
    handles = start(school.peers(4, screen=GATHERS), FLOAT32)
    assert check_same(handles).tensors[0][0, 0].item() == 1.5
    assert attempts == [("gather", 4, True)]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_small_payload_and_half_floats_are_reduced(school, attempts, name):
    """A half width float and a payload with fewer values than members are all reduced."""
    handles = [
        peer.start(0, float(number), codec_named(name), (3,))
        for number, peer in enumerate(school.peers(5))
    ]
    assert check_same(handles).tensors[0].tolist() == [2.0] * 3
    assert attempts == [("allreduce", 5, True)]


@pytest.mark.thinned(3)
@WAYS
@pytest.mark.parametrize("how", ["dies", "stops"])
def test_stopped_member_is_left_behind(school, monkeypatch, attempts, codec, how):
    """A member that dies or stops in the middle is left behind."""
    peers = school.ranked(school.peers(5, chunk_timeout=3.0))
    victim, frozen = peers[-1], []
    freeze(monkeypatch, frozen)
    received, swap = AllReduce._received, AllGather._swap

    def end(me):
        if me == victim.id:
            kill(victim) if how == "dies" else frozen.extend(victim.host.streams)

    async def at_part(reduction, *args):
        end(reduction._me)
        return await received(reduction, *args)

    async def at_swap(gathering, stream):
        end(gathering._me)
        await swap(gathering, stream)

    monkeypatch.setattr(AllReduce, "_received", at_part)
    monkeypatch.setattr(AllGather, "_swap", at_swap)
    handles = start(peers, codec)
    mean = check_same(handles, dead={4})
    if len(mean.members) == 4:
        assert mean.tensors[0][0, 0].item() == pytest.approx(1.5, abs=0.02)
    if codec is FLOAT32:
        assert attempts == [("allreduce", 5, False), ("gather", 4, True)]
    assert all(victim.id not in peer.exchange._view.expected(0) for peer in peers[:-1])


def test_departed_reporter_has_no_say():
    """Those who stayed hold all three contributions: that the one who went lacked one of them
    leaves nobody out.
    """
    members = {name: MemberState(None, b"", None, 0.0) for name in "abc"}
    leader = SimpleNamespace(decisions=None, needed=lambda fragment: asyncio.Event())
    commit = GroupCommit(leader, (0, 0), members, alone=True)
    nonce = fresh_nonce()
    for name, held in (("a", 0b111), ("b", 0b111), ("c", 0b101)):
        members[name].report(GroupReport(nonce=nonce, held=held))
    members["c"].leave()
    assert commit._common(nonce) == 0b111


@WAYS
def test_leader_dead_before_deciding_leaves_own_weights(school, monkeypatch, codec):
    """A leader that dies before it decides leaves everybody with its own."""
    leader, *others = peers = school.ranked(school.peers(4))
    reports = GroupCommit._reports

    async def dying(commit, *args):
        await reports(commit, *args)
        kill(leader)
        await asyncio.Event().wait()

    monkeypatch.setattr(GroupCommit, "_reports", dying)
    handles = start(peers, codec)
    assert [handle.result(60) for handle in handles[1:]] == [None] * 3
    assert all(handle._future.done() and not handle._future.cancelled() for handle in handles[1:])
    assert all(peer.exchange.next_round == 1 for peer in others)


def test_silent_leader_is_noticed(school, monkeypatch):
    """A leader that stops before it decides is noticed by its silence."""
    leader, *_ = peers = school.ranked(school.peers(4, chunk_timeout=0.5))
    frozen, reports = [], GroupCommit._reports
    freeze(monkeypatch, frozen)

    async def stopping(commit, *args):
        frozen.extend(leader.host.streams)
        await reports(commit, *args)

    monkeypatch.setattr(GroupCommit, "_reports", stopping)
    handles = start(peers, FLOAT32)
    assert [handle.result(60) for handle in handles[1:]] == [None] * 3
    assert all(handle._future.done() and not handle._future.cancelled() for handle in handles[1:])


@WAYS
def test_decision_heard_once_reaches_all(school, monkeypatch, codec):
    """A decision that one member heard before the leader died reaches all."""
    leader, heard, *_ = peers = school.ranked(school.peers(4))
    tell, told = GroupCommit._send, asyncio.Event()

    async def telling(commit, member, message):
        if not isinstance(message, GroupReply):
            await tell(commit, member, message)
        elif member.channel.peer == heard.id:
            await tell(commit, member, message)
            await asyncio.wait_for(heard_it(), 60)
            kill(leader)
            told.set()
        else:
            await told.wait()

    async def heard_it():
        while not heard.exchange._decisions._sealed:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(GroupCommit, "_send", telling)
    assert len(check_same(start(peers, codec), dead={0}).members) == 4


def test_a_member_whose_line_broke_asks_the_leader(school, monkeypatch, network):
    leader, unlucky, *_ = peers = school.ranked(school.peers(3))
    tell = GroupCommit._send

    async def losing(commit, member, message):
        if isinstance(message, GroupReply) and member.channel.peer == unlucky.id:
            member.channel.stream.abort()
        else:
            await tell(commit, member, message)

    monkeypatch.setattr(GroupCommit, "_send", losing)
    assert len(check_same(start(peers, FLOAT32)).members) == 3
    assert (unlucky.id, leader.id, DECISION_PROTOCOL) in network.opened


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("count", [3, 5])
def test_a_contribution_that_is_not_finite_is_left_out(school, attempts, poison, count):
    peers = school.peers(count)
    handles = start(peers[:-1], FLOAT32)
    bad = peers[-1].start(0, poison, FLOAT32, LARGE)
    mean = check_same(handles)
    assert mean.members == tuple(sorted(peer.id for peer in peers[:-1]))
    assert mean.tensors[0][0, 0].item() == pytest.approx((count - 2) / 2)
    assert bad.result() is None
    assert [way for way, _, _ in attempts] == (
        ["gather"] if count == 3 else ["allreduce", "gather"]
    )


def test_wrong_digest_is_left_out(school, monkeypatch):
    """A payload that does not match its digest is left out."""
    peers = school.peers(3)
    liar, swap = peers[0], Stream.swap

    async def damaging(stream, outgoing, incoming, **options):
        if stream in liar.host.streams:
            outgoing = memoryview(bytes(len(outgoing)))
        await swap(stream, outgoing, incoming, **options)

    monkeypatch.setattr(Stream, "swap", damaging)
    handles = [peer.start(0, 1.0 + number, FLOAT32, LARGE) for number, peer in enumerate(peers)]
    assert check_same(handles, dead={0}).tensors[0][0, 0].item() == 2.5
    assert handles[0].result() is None


def test_unreachable_pair_does_not_both_take_part(school, monkeypatch):
    """Two members that cannot reach each other do not both take part."""
    peers = school.peers(4, screen=GATHERS)
    apart = {peer.id for peer in peers[:2]}
    swap = AllGather._swap

    async def cut(gathering, stream):
        if {gathering._me, stream.peer_id} == apart:
            stream.abort()
        else:
            await swap(gathering, stream)

    monkeypatch.setattr(AllGather, "_swap", cut)
    means = [handle.result() for handle in start(peers, FLOAT32)]
    assert [mean is None for mean in means].count(True) == 1
    assert (means[0] is None) != (means[1] is None)
    assert len({mean.members for mean in means if mean is not None}) == 1
    assert len(means[2].members) == 3


def reseal(listed, change, identity=None):
    """The sealed ready messages of a group, the first one changed and signed by somebody else."""
    first, *others = listed
    _, ready = unseal(first, GroupReady)
    return [seal(ready.model_copy(update=change), identity or Identity.ephemeral()), *others]


@pytest.mark.parametrize(
    "forge",
    [
        lambda listed: [listed[0].replace(b"weight", b"weighs"), *listed[1:]],
        lambda listed: reseal(listed, {"round": 5}),
        lambda listed: [*listed, listed[0]],
        lambda listed: listed[:1],
        lambda listed: [*listed[:-1], listed[-1][:-5]],
    ],
    ids=["altered", "another-round", "twice", "left-out", "cut"],
)
def test_a_leader_that_forges_its_group_is_refused(school, monkeypatch, forge):
    peers = school.peers(3, wait=1.0)
    monkeypatch.setattr(
        group_commit, "encode_list", lambda listed: encode_list(forge(list(listed)))
    )
    means = [handle.result() for handle in start(peers, FLOAT32)]
    assert means == [None] * 3


def test_a_leader_cannot_speak_for_another_member(school, monkeypatch):
    peers = school.peers(4, wait=1.0, chunk_timeout=1.0, screen=GATHERS)
    monkeypatch.setattr(
        group_commit, "encode_list", lambda listed: encode_list(reseal(listed, {"weight": 9.0}))
    )
    means = {
        peer.id: handle.result() for peer, handle in zip(peers, start(peers, FLOAT32), strict=True)
    }
    assert means[min(means)] is None  # whose place was taken
    for mean in means.values():
        assert mean is None or (set(mean.members) < set(means) and mean.weight == len(mean.members))


def test_a_leader_gets_one_more_attempt_not_one_after_another(school, monkeypatch):
    """Each attempt has a deadline of its own, so training had been held for half an hour."""

    async def endless(commit):
        for _ in range(9):
            await commit._try_reduction("allreduce", 0.0)

    reductions, reduce = [], GroupExchange._reduce

    async def counted(exchange, channel, group, *rest):
        reductions.append((exchange._context.me, group.reduction))
        return await reduce(exchange, channel, group, *rest)

    monkeypatch.setattr(GroupExchange, "_reduce", counted)
    monkeypatch.setattr(GroupCommit, "_all_or_none", lambda commit, nonce: 0)
    monkeypatch.setattr(GroupCommit, "run", endless)
    assert [handle.result() for handle in start(school.peers(3, wait=1.0), FLOAT32)] == [None] * 3
    assert len(reductions) == len(set(reductions)) == 3


def test_a_second_attempt_brings_no_new_member(school, monkeypatch):
    """The fault: in the second, a leader could add whom it wanted, also a banned one."""

    async def adding(commit):
        *few, (last, late) = commit._members.items()
        until = asyncio.get_running_loop().time() + 60.0
        commit._members = dict(few)
        assert not await commit._try_reduction("allreduce", until)
        commit._members[last] = late
        await commit._try_reduction("gather", until)

    monkeypatch.setattr(GroupCommit, "_all_or_none", lambda commit, nonce: 0)
    monkeypatch.setattr(GroupCommit, "run", adding)
    peers = school.peers(4, wait=1.0, chunk_timeout=1.0)
    assert [handle.result() for handle in start(peers, FLOAT32)] == [None] * 4


@pytest.mark.parametrize("used", ["decided", "under way"])
def test_a_nonce_that_was_used_is_refused(school, monkeypatch, used):
    """The fault: a second group of the same nonce took the streams of the first."""
    monkeypatch.setattr(group_commit, "fresh_nonce", lambda: bytes(16))
    peers = school.peers(3, wait=1.0)
    for peer in peers:
        if used == "decided":
            peer.exchange._decisions.remember(bytes(16), b"")
        else:
            peer.exchange._streams._running[bytes(16)] = None
    assert [handle.result() for handle in start(peers, FLOAT32)] == [None] * 3


def test_a_decision_for_one_member_is_none(school, monkeypatch):
    monkeypatch.setattr(GroupCommit, "_common", lambda commit, nonce: 1)
    peers = school.peers(3)
    assert [handle.result() for handle in start(peers, FLOAT32)] == [None] * 3
    assert all(peer.exchange.evidence.partners == frozenset() for peer in peers)


def commit_of(*names):
    """A group of ``names`` that "a" has formed."""

    def member():
        channel = SimpleNamespace(stream=SimpleNamespace(close=lambda: None))
        return MemberState(channel, b"", SimpleNamespace(nbytes=8, codec="float32"), 0.0)

    nobody = SimpleNamespace(is_turned_away=lambda peer, round: False)
    leader = SimpleNamespace(
        me="a",
        gather=False,
        decisions=None,
        needed=lambda fragment: asyncio.Event(),
        timeouts=ExchangeTimeouts(),
        time=SimpleNamespace(reducing=lambda nbytes, fragment: 0.01),
        view=SimpleNamespace(attendance=nobody),
    )
    return GroupCommit(leader, (0, 0), {name: member() for name in names}, alone=True)


def test_a_leader_that_is_no_member_waits_no_longer():
    """The fault: who leads several groups, or before its own turn, waited for who never reports
    until the members gave it up, and blamed it.
    """
    nonce = fresh_nonce()

    async def waits():
        commit = commit_of(*"bcde")
        commit._began = asyncio.get_running_loop().time()
        for name in "bcd":
            commit._members[name].report(GroupReport(nonce=nonce, held=15))
        await asyncio.wait_for(commit._reports(nonce, math.inf, False), 30.0)

    asyncio.run(waits())


def test_a_part_of_the_wrong_length_is_named(school, monkeypatch, attempts):
    """The fault: such a member made every round gather, and nobody learnt who it was."""
    one, *_, liar = peers = school.peers(4)
    parts = AllReduce._parts

    def shorter(reduction, peer, values):
        *found, last = parts(reduction, peer, values)
        is_cut = reduction._me == liar.id != peer
        return [*found, slice(last.start, last.stop - is_cut)]

    monkeypatch.setattr(AllReduce, "_parts", shorter)
    check_same(start(peers, FLOAT32))
    assert attempts == [("allreduce", 4, False), ("gather", 4, True)]
    blamed = one.exchange.stats.report()["blamed"]
    assert [(peer, kind) for peer, kind, _ in blamed] == [(liar.id, "damaged")]


def test_who_is_dropped_after_the_first_attempt_is_let_go(monkeypatch):
    """The fault: it waited for the others' end, and blamed the leader."""
    gone = []

    async def failing(commit, reduction, until):
        gone.append([name for name, member in everybody.items() if member.over.is_set()])
        commit._liars = {"c"}
        return False

    monkeypatch.setattr(GroupCommit, "_try_reduction", failing)
    commit = commit_of(*"abcde")
    everybody = dict(commit._members)
    asyncio.run(commit.run())
    assert gone == [[], ["c"]]


@pytest.mark.parametrize("codec", ["sign+ef", "int8"])
def test_training_is_told_what_cannot_be_sent(school, codec):
    """Encoded while training goes on, it is an error of the training that waits for the outcome:
    no round without a partner, and nobody's fault.
    """
    one, *others = peers = school.peers(3, wait=1.0)
    shape, codec = (4, 8), codec_named(codec)
    diverged = OnDemand([torch.full(shape, math.nan)])
    mine = one.exchange.start(Contribution(RoundKey(SWARM, 0), diverged, codec=codec))
    rest = [peer.start(0, 2.0, codec.fresh(), shape) for peer in others]
    with pytest.raises(ContributionError, match="lower the learning rate"):
        mine.result()
    assert [len(handle.result().members) for handle in rest] == [2, 2]
    assert [peer.host.internal_errors.total for peer in peers] == [0] * 3


def test_own_errors_of_a_leader_are_counted(school):
    """The fault: its members waited in vain, and nobody said why."""
    peer = school.peers(1)[0]

    async def fails():
        raise ZeroDivisionError

    async def begin():
        peer.exchange._leader.start(fails())

    peer.host.submit(begin()).result(30)
    school.until(lambda: peer.host.internal_errors.total == 1)


def test_own_groups_nonce_is_refused(school, monkeypatch):
    """A member of it knows the nonce: with a group of the same it would answer for this node's
    decision.
    """
    monkeypatch.setattr(group_commit, "fresh_nonce", lambda: bytes(16))
    peers = school.peers(3, wait=1.0)
    for peer in peers:
        peer.exchange._decisions.expect(bytes(16))
    assert [handle.result() for handle in start(peers, FLOAT32)] == [None] * 3


def test_a_forged_decision_is_not_believed(school, monkeypatch):
    settle = DecisionLog.settle

    def forging(decisions, nonce, *decided):
        decisions._identity = Identity.ephemeral()
        return settle(decisions, nonce, *decided)

    monkeypatch.setattr(DecisionLog, "settle", forging)
    assert [handle.result() for handle in start(school.peers(3), FLOAT32)] == [None] * 3


def test_a_ready_message_that_another_peer_signed_is_refused(school, network):
    liar, victim = school.peers(2)

    async def lie():
        stream = await liar.host.open(victim.id, LEADER_PROTOCOL, timeout=30)
        mine = encode_contribution(
            SWARM, Contribution(RoundKey(SWARM, 0), [torch.zeros(4)], 1.0, FLOAT32)
        )
        await stream.send(seal(ready_message(mine, SWARM, "0" * 64, 5.0), Identity.ephemeral()), 30)
        return unpack(await stream.receive(GroupReceipt.LIMIT, 30), GroupReceipt)

    receipt = liar.host.call(lie(), 60)
    assert receipt.verdict == "refuse"
    assert "another peer" in receipt.reason


def test_strangers_get_no_payload(school, monkeypatch):
    peers = school.peers(3)
    stranger = school.peers(1)[0]
    for peer in peers:
        peer.sees = [other.id for other in peers]
    refused, run = [], AllGather.run

    async def nothing(stream):
        with pytest.raises(NetworkError):
            await stream.receive(1 << 20, 3.0)

    async def running(gathering):
        await stranger.exchange._streams.call(
            gathering._me, gathering.group.nonce, 1 << 20, nothing
        )
        refused.append(gathering._me)
        await run(gathering)

    monkeypatch.setattr(AllGather, "run", running)
    check_same(start(peers, FLOAT32))
    assert sorted(refused) == sorted(peer.id for peer in peers)


def test_who_went_on_alone_meanwhile_applies_nothing(school, monkeypatch):
    peers = school.peers(3)
    handles, settle = [], DecisionLog.settle

    def closing(decisions, nonce, *decided):
        handles[0]._attempt.commit.closed = True
        return settle(decisions, nonce, *decided)

    monkeypatch.setattr(DecisionLog, "settle", closing)
    handles.extend(start(peers, FLOAT32))
    assert handles[0].result() is None
    assert check_same(handles, dead={0}).tensors[0][0, 0].item() == 1.0


def test_called_off_member_is_not_in_the_group(school):
    """Who was called off before the group was formed is not in it."""
    leader, second, third = school.ranked(school.peers(3, wait=2.0))
    early = leader.start(0, 9.0)
    school.until(lambda: leader.waiting() == 1)
    assert early.result(0.0) is None
    school.until(lambda: leader.waiting() == 0)
    assert school.values([second.start(0, 1.0), third.start(0, 3.0)]) == [2.0, 2.0]
    assert early.result() is None


def test_a_rounds_payloads_are_gone_with_its_mean(school):
    peers = school.peers(3)
    gc.collect()
    gc.disable()
    try:
        assert None not in [handle.result() for handle in start(peers, FLOAT32)]
        for peer in peers:
            peer.host.call(
                asyncio.sleep(0.1), 5
            )  # the rest of the round, in the simulated loop's time
        assert [
            type(held).__name__
            for held in gc.get_objects()
            if type(held).__name__ in ("Gathered", "EncodedContribution")
        ] == []
    finally:
        gc.enable()
