"""What counts and what does not: lost confirms, damaged and poisoned payloads, and the promises of
every exchange.
"""

import asyncio
import math
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from shoal.optim import BFLOAT16, FLOAT32, RoundKey, codec_named
from shoal.optim.exchange.base import Contribution
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange import timeouts
from shoal.swarm.exchange.contribution import ExchangeAttempt
from shoal.swarm.exchange.pair import calls as pair_calls
from shoal.swarm.exchange.pair import transfer
from shoal.swarm.exchange.pair.calls import EXCHANGE_PROTOCOL
from shoal.swarm.exchange.pair.transfer import OUTCOME_PROTOCOL
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.messages import Answer, Commit, OutcomeReply, OutcomeRequest, Ready
from tests.support.fake_network import SWARM, paired
from tests.support.waiting import until

CHUNK_TIMEOUT = 0.5
# a deadline that no test sits out: what ends in half of it did not wait for it, however busy the
# machine
LONG = 60.0


class Pair:
    """A caller and a callee: the callee begins when it holds the caller's call."""

    def __init__(self, network, timeouts):
        self.exchanges = paired(network, 2, timeouts)
        self.hosts = [exchange._context.host for exchange in self.exchanges]

    def start(self, place, value, round=0, codec=FLOAT32):
        return self.exchanges[place].start(
            Contribution(RoundKey(SWARM, round), tensors(value), 1.0, codec)
        )

    def begin(self, caller=1.0, callee=3.0, codec=FLOAT32, round=0, look=lambda: None):
        first = self.start(0, caller, round, codec)
        until(lambda: self.exchanges[1].held.calls)
        self.seen = look()
        return first, self.start(1, callee, round, codec)

    def run(self, *args, **options):
        """What the caller and the callee got."""
        return [means(handle.result()) for handle in self.begin(*args, **options)]


def tensors(value):
    return [torch.full((300, 1000), value), torch.full((3,), -value)]


def means(mean):
    return None if mean is None else (mean.tensors[0][0, 0].item(), mean.tensors[1][-1].item())


@pytest.fixture
def pair(network):
    return Pair(network, ExchangeTimeouts(LONG, LONG, LONG))


@pytest.fixture
def brisk(network):
    """A pair whose deadlines are sat out: nothing depends on being within them."""
    return Pair(network, ExchangeTimeouts(LONG, CHUNK_TIMEOUT, LONG))


def lose(monkeypatch, kind):
    """Messages of this kind end the stream in place of arriving."""
    send = Stream.send

    async def losing(stream, data, timeout):
        if kind.KIND.encode() in data[:20]:
            stream.abort()
            raise NetworkError("lost")
        await send(stream, data, timeout)

    monkeypatch.setattr(Stream, "send", losing)


def test_both_commit(pair):
    assert pair.run() == [(2.0, -2.0)] * 2
    assert pair.run(5.0, 6.0, BFLOAT16, round=1) == [(5.5, -5.5)] * 2
    assert pair.hosts[0].traffic.sent == pair.hosts[1].traffic.received
    assert pair.hosts[1].traffic.sent == pair.hosts[0].traffic.received


def test_slow_link_gets_the_time_it_needs(network, monkeypatch):
    """A large contribution gets the time that a slow link needs."""
    monkeypatch.setattr(timeouts, "LEAST_RATE", 1e4)  # 1.2 MB may take two minutes
    pair = Pair(network, ExchangeTimeouts(LONG, LONG, exchange=1e-6))
    assert pair.run() == [(2.0, -2.0)] * 2


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("who", ["caller", "callee"])
def test_non_finite_weights_commit_at_neither(pair, poison, who):
    """Weights that are not finite are refused by the other and neither commits."""
    began = time.monotonic()
    assert pair.run(**{who: poison}) == [None, None]
    assert time.monotonic() - began < LONG / 2


def test_large_weights_whose_sum_overflows_are_no_reason_to_refuse(pair):
    big = 1e36  # 300,000 of them are beyond float32
    assert pair.run(big, big) == [(pytest.approx(big), pytest.approx(-big))] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_wrong_digest_commits_at_neither(brisk, monkeypatch, who):
    """A payload that does not match its digest is refused and neither commits."""
    swap = Stream.swap
    liar = brisk.hosts[who]

    async def damaging(stream, outgoing, incoming, **options):
        if stream in liar.streams:
            outgoing = memoryview(bytes(len(outgoing)))
        await swap(stream, outgoing, incoming, **options)

    monkeypatch.setattr(Stream, "swap", damaging)
    assert brisk.run() == [None, None]


def test_a_callee_whose_confirm_was_lost_asks_and_commits_too(pair, monkeypatch, network):
    lose(monkeypatch, Commit)
    assert pair.run() == [(2.0, -2.0)] * 2
    assert network.opened[-1] == (pair.hosts[1].peer_id, pair.hosts[0].peer_id, OUTCOME_PROTOCOL)


def test_if_ready_is_lost_neither_commits(pair, monkeypatch):
    lose(monkeypatch, Ready)
    assert pair.run() == [None, None]


def test_a_callee_that_cannot_ask_keeps_its_own_contribution(pair, monkeypatch):
    lose(monkeypatch, Commit)
    tell = transfer.PairTransfer._send

    async def last_words(transfers, stream, message):
        if isinstance(message, Commit):
            pair.hosts[0].dead = True
        await tell(transfers, stream, message)

    monkeypatch.setattr(transfer.PairTransfer, "_send", last_words)
    assert pair.run() == [(2.0, -2.0), None]


def test_early_question_calls_it_off_for_both(brisk, monkeypatch):
    """READY is on its way for longer than the callee waits: the answer to its question decides."""
    hear, asked = transfer.PairTransfer._receive, threading.Event()
    answer = transfer.PairTransfer._answer_outcome

    async def late(transfers, stream, *types):
        reply = await hear(transfers, stream, *types)
        if isinstance(reply, Ready):
            await transfers.test_asked.wait()
        return reply

    async def answering(transfers, stream):
        await answer(transfers, stream)
        asked.set()
        transfers.test_asked.set()

    monkeypatch.setattr(transfer.PairTransfer, "_receive", late)
    transfers = brisk.exchanges[0].state.transfers
    transfers.test_asked = asyncio.Event()
    brisk.hosts[0].handlers[OUTCOME_PROTOCOL] = lambda stream: answering(transfers, stream)
    assert brisk.run() == [None, None]
    assert asked.is_set()


def test_stranger_learns_no_outcome(pair, network):
    """A stranger who asks for an outcome learns nothing and changes nothing."""
    host = network.host()

    async def ask(nonce):
        stream = await host.open(pair.hosts[0].peer_id, OUTCOME_PROTOCOL, timeout=2)
        await stream.send(pack(OutcomeRequest(nonce=nonce)), 2)
        reply = unpack(await stream.receive(OutcomeReply.LIMIT, 2), OutcomeReply)
        stream.close()
        return reply.outcome

    assert pair.run() == [(2.0, -2.0)] * 2
    ((peer, nonce),) = pair.exchanges[0].state.transfers._outcomes
    assert peer == pair.hosts[1].peer_id
    assert host.call(ask(nonce), 60) == "unknown"


def test_silent_partner_costs_one_chunk_deadline(brisk, monkeypatch):
    """A partner that falls silent costs the chunk deadline and no more."""
    swap = Stream.swap
    silent = brisk.hosts[0]

    async def stalling(stream, outgoing, incoming, **options):
        if stream in silent.streams:
            options["chunk_timeout"] = LONG
            await Stream.receive(
                stream, 1 << 30, LONG
            )  # takes the bytes as a message that never ends
        await swap(stream, outgoing, incoming, **options)

    monkeypatch.setattr(Stream, "swap", stalling)
    _, handle = brisk.begin()
    began = time.monotonic()
    assert handle.result() is None
    assert time.monotonic() - began < LONG / 2


def test_a_round_that_is_called_off_is_not_committed_afterwards(pair, monkeypatch):
    """Time is up while READY is awaited: what comes later changes nothing, and the partner goes on
    alone too.
    """
    decide = transfer.PairTransfer._decide
    entered, leave = threading.Event(), []

    async def slowly(transfers, stream, offer, received, decision, patience):
        event = asyncio.Event()
        leave.append((asyncio.get_running_loop(), event))
        entered.set()
        await event.wait()
        await decide(transfers, stream, offer, received, decision, patience)

    monkeypatch.setattr(transfer.PairTransfer, "_decide", slowly)
    first, second = pair.begin()
    assert entered.wait(60)
    pair.exchanges[0].hurry(0.0)
    began = time.monotonic()
    assert first.result() is None
    assert time.monotonic() - began < LONG / 2
    ((loop, event),) = leave
    loop.call_soon_threadsafe(event.set)
    assert second.result() is None
    assert first.result() is None


def test_caller_that_moved_on_decides_nothing(pair, monkeypatch):
    """Here the round is closed but not cancelled: a loop may see the one before the other."""
    hear = transfer.PairTransfer._receive

    async def closing(transfers, stream, seconds, *types):
        reply = await hear(transfers, stream, seconds, *types)
        if isinstance(reply, Ready):
            first._attempt.commit.close()
        return reply

    monkeypatch.setattr(transfer.PairTransfer, "_receive", closing)
    first, second = pair.begin()
    assert (first.result(), second.result()) == (None, None)
    ((outcome, _),) = pair.exchanges[0].state.transfers._outcomes.values()
    assert outcome == "aborted"


def test_a_loop_that_hangs_holds_no_training_thread(pair, network):
    first = pair.start(0, 1.0)
    hangs, over = threading.Event(), threading.Event()
    network.loop.call_soon_threadsafe(lambda: (hangs.set(), over.wait(60)))
    assert hangs.wait(60)
    pair.exchanges[0].hurry(0.0)
    assert first.result() is None
    assert not over.is_set()
    over.set()


@pytest.mark.ci
@pytest.mark.parametrize("slow", [0, 1])
def test_slow_verifier_has_time_by_its_values(brisk, monkeypatch, slow):
    """A partner that verifies slowly has the time that its values need."""
    problem = ExchangeAttempt.problem
    monkeypatch.setattr(transfer, "VERIFIED", 30_000.0)  # 10 s for these

    def slowly(attempt, peer, payload):
        if peer == brisk.hosts[1 - slow].peer_id:
            threading.Event().wait(3 * CHUNK_TIMEOUT)
        return problem(attempt, peer, payload)

    monkeypatch.setattr(ExchangeAttempt, "problem", slowly)
    assert brisk.run() == [(2.0, -2.0)] * 2


def near(pair, number, rounds=1, far=None):
    """Both sides' codecs of pairs, after as many rounds, with what they sent and got last; ``far``:
    how far the callee is away.
    """
    codecs, shape = [codec_named("mod4") for _ in range(2)], (300, 100)
    generator = torch.Generator().manual_seed(number)
    base = torch.randn(shape, generator=generator)
    for round in range(rounds):
        sent, handles = [], []
        for place, (exchange, codec) in enumerate(zip(pair.exchanges, codecs, strict=True)):
            moved = 0.01 * torch.randn(shape, generator=generator)
            codec.expect(f"run:{round}:0", [moved])
            sent.append(base + moved + (far if far is not None and place else 0.0))
            handles.append(
                exchange.start(Contribution(RoundKey(SWARM, round), [sent[-1]], 1.0, codec))
            )
            until(lambda place=place: place or pair.exchanges[1].held.calls)
        got = [handle.result() for handle in handles]
        for codec, mean in zip(codecs, got, strict=True):
            codec.rejected() if mean is None else codec.accepted()
    return sent, got


def gains(sent, got):
    return [mean.tensors[0].double() - own.double() for own, mean in zip(sent, got, strict=True)]


def test_mod4_partners_move_by_opposite_amounts(pair):
    """Partners that read each other by their own weights move by opposite amounts."""
    sent, got = near(pair, 1, rounds=3)
    one, other = gains(sent, got)
    apart = sent[1].double() - sent[0].double()
    torch.testing.assert_close(one, -other, rtol=0, atol=1e-6)  # the rounding of a sum of float32
    assert (one - apart / 2).norm() < 0.2 * apart.norm()
    assert [exchange.stats.turned_down() for exchange in pair.exchanges] == [0, 0]


AWAY = torch.where(torch.arange(300)[:, None] < 32, 1.0, 0.0)  # 50 of 469 blocks


def test_blocks_that_one_refuses_count_on_neither_side(pair):
    sent, got = near(pair, 1, far=AWAY)
    one, other = gains(sent, got)
    assert not one[:32].any()
    assert not other[:32].any()
    torch.testing.assert_close(one, -other, rtol=0, atol=1e-6)
    assert (
        one[33:].count_nonzero() > 0.8 * one[33:].numel()
    )  # small differences vanish in the same dither


def test_lost_confirm_still_brings_refused_blocks(pair, monkeypatch, network):
    """A callee whose confirm was lost learns the refused blocks too."""
    lose(monkeypatch, Commit)
    sent, got = near(pair, 1, far=AWAY)
    one, other = gains(sent, got)
    assert network.opened[-1] == (pair.hosts[1].peer_id, pair.hosts[0].peer_id, OUTCOME_PROTOCOL)
    torch.testing.assert_close(one, -other, rtol=0, atol=1e-6)
    assert not other[:32].any()


def test_wholly_distant_partner_is_turned_down(pair):
    """So a node that nobody can read fetches the weights of the others
    (`shoal.swarm.state.resync`).
    """
    sent, got = near(pair, 1, far=torch.ones(300, 100))
    assert all(gain.count_nonzero() < 0.05 * gain.numel() for gain in gains(sent, got))
    assert [exchange.stats.turned_down() for exchange in pair.exchanges] == [1, 1]
    failures = [exchange.stats.report()["failures"] for exchange in pair.exchanges]
    assert failures == [(), ()]  # the fault: both sides called an honest late joiner suspicious


def test_who_is_far_away_again_is_suspicious(pair):
    """Mutant: a peer that nobody can read is suspicious to nobody."""
    away = torch.ones(300, 100)
    near(pair, 1, rounds=2, far=away)
    assert [dict(exchange.stats.report()["failures"]) for exchange in pair.exchanges] == [
        {"suspicious": 1},
        {"suspicious": 1},
    ]
    assert [exchange.stats.turned_down() for exchange in pair.exchanges] == [1, 1]


def refuse(monkeypatch, kind, refused):
    """Messages of this kind say that their sender refused these blocks."""
    send = Stream.send

    async def lying(stream, data, timeout):
        if kind.KIND.encode() in data[:20]:
            data = pack(unpack(data, kind).model_copy(update={"refused": refused}))
        await send(stream, data, timeout)

    monkeypatch.setattr(Stream, "send", lying)


@pytest.mark.parametrize("kind", [Ready, Commit])
@pytest.mark.parametrize("refused", [b"\xff", bytes(60), bytes(5000)])
def test_blocks_that_were_never_sent_cannot_be_refused(pair, monkeypatch, kind, refused):
    """Of 469 blocks: 59 bytes. The peer that is told so applies nothing, in a sentence."""
    refuse(monkeypatch, kind, refused)
    _, got = near(pair, 1)
    deceived = 0 if kind is Ready else 1
    assert got[deceived] is None
    failed = pair.exchanges[deceived].stats.of(RoundKey(SWARM, 0)).failures
    assert [kind for _, kind in failed] == ["damaged"]


def test_with_another_codec_no_block_can_be_refused(pair, monkeypatch):
    refuse(monkeypatch, Ready, b"\x01")
    assert pair.run()[0] is None


def test_partners_with_other_codecs_refuse_each_other_and_apply_nothing(pair):
    first = pair.start(0, 1.0, codec=codec_named("mod4"))
    second = pair.start(1, 3.0)
    pair.exchanges[0].hurry(2.0)
    pair.exchanges[1].hurry(2.0)
    assert (first.result(), second.result()) == (None, None)
    said = [exchange.stats.of(RoundKey(SWARM, 0)).failures for exchange in pair.exchanges]
    assert "refused" in [kind for failures in said for _, kind in failures]


def calls(network):
    return sum(protocol == EXCHANGE_PROTOCOL for _, _, protocol in network.opened)


def test_one_stream_serves_all_calls_of_a_pair(pair, network):
    for round in range(5):
        assert pair.run(round=round) == [(2.0, -2.0)] * 2
    assert calls(network) == 1


@pytest.mark.parametrize("noticed", [True, False])
def test_kept_stream_that_ended_costs_no_round(pair, network, monkeypatch, noticed):
    """A kept stream that the partner has ended costs no round."""
    assert pair.run() == [(2.0, -2.0)] * 2
    if not noticed:  # its end is on the way when the next call begins
        monkeypatch.setattr(pair.hosts[0], "usable", lambda stream: True)
    pair.hosts[1].call(cut(pair.hosts[1]), 60)
    assert pair.run(round=1) == [(2.0, -2.0)] * 2
    assert calls(network) == 2
    assert pair.exchanges[0].stats.of(RoundKey(SWARM, 1)).failures == []


async def cut(host):
    for stream in host.streams:
        stream.abort()


def test_a_partner_that_comes_later_has_the_payload_by_then(pair):
    nbytes = 4 * 300_003
    assert pair.run() == [(2.0, -2.0)] * 2
    came = pair.hosts[1].traffic.received
    first = pair.start(0, 5.0, 1)
    until(lambda: pair.hosts[1].traffic.received >= came + nbytes)
    second = pair.start(1, 7.0, 1)
    assert [means(handle.result()) for handle in (first, second)] == [(6.0, -6.0)] * 2
    assert pair.hosts[1].traffic.received < came + nbytes + 4096  # once


@pytest.mark.parametrize("early", [0, 1])
def test_payload_is_sent_ahead_by_round_trip(pair, monkeypatch, early):
    """Where the round trip is known either sends ahead as soon as an answer would be here."""
    monkeypatch.setattr(pair_calls, "HELD_S", 10 * LONG)
    monkeypatch.setattr(Stream, "round_trip", 0.001)
    late, held, nbytes = pair.hosts[1 - early].traffic, pair.exchanges[1 - early].held, 4 * 300_003
    for round in range(2):  # the first opens a stream, on which the second goes
        came = late.received
        first = pair.start(early, 5.0, round)
        until(lambda: late.received >= came + nbytes if round else held.calls)  # noqa: B023
        second = pair.start(1 - early, 7.0, round)
        assert [means(handle.result()) for handle in (first, second)] == [(6.0, -6.0)] * 2


def test_a_contribution_of_another_size_is_not_sent_ahead(pair, monkeypatch):
    """The partner, which knows only the size of its own last one, would take it for something else
    than a payload.
    """
    monkeypatch.setattr(pair_calls, "HELD_S", 0.0)
    assert pair.run() == [(2.0, -2.0)] * 2
    for codec, ahead in ((BFLOAT16, False), (BFLOAT16, True), (FLOAT32, False)):
        round = pair.exchanges[0].next_round
        handles = pair.begin(
            5.0, 7.0, codec, round, lambda: [stream.is_ahead for stream in pair.hosts[0].streams]
        )
        assert pair.seen == [ahead]
        assert [means(handle.result()) for handle in handles] == [(6.0, -6.0)] * 2


def test_only_partners_of_two_rounds_fill_memory(pair):
    """And only with as much as its own contribution."""
    assert pair.run() == [(2.0, -2.0)] * 2
    held, me = pair.exchanges[1].held, pair.hosts[0].peer_id
    full, other = 4 * 300_003, 4 * 300_004
    assert pair.exchanges[1].state.sizes == {0: full}

    class Kept(dict):
        def __delitem__(self, call):
            self.pop(call, None)

    class Silent:
        def __init__(self, peer):
            self.peer_id, self.origin, self.partner, self.received = peer, "", False, 0

        async def receive_ahead(self, incoming, arrived):
            self.received = len(incoming)
            await asyncio.sleep(LONG)

        async def more(self, seconds):
            await asyncio.sleep(seconds)

    async def holding():
        received, tasks = [], []
        for peer, round, nbytes in [
            (me, 1, other),
            ("stranger", 1, full),
            (me, 1, full),
            (me, 2, full),
            (me, 3, full),
        ]:
            stream = Silent(peer)
            tasks.append(
                asyncio.ensure_future(
                    held.hold(stream, SimpleNamespace(round=round, fragment=0, nbytes=nbytes))
                )
            )
            for _ in range(3):
                await asyncio.sleep(0)
            received.append(stream.received)
            held.calls = Kept()  # else one peer holds one call with a fragment
        for task in tasks:
            task.cancel()
            await asyncio.wait({task})
        return received

    assert pair.hosts[1].call(holding(), 60) == [0, 0, full, full, 0]
    assert not held._receiving.total()


def test_a_newcomers_first_payload_waits_in_the_stream(pair):
    """It does not know its own size yet, which the partner's payload must have.

    Mutant: the payload is taken for a message, and its caller for one that has gone on.
    """
    assert pair.run() == [(2.0, -2.0)] * 2
    held, me = pair.exchanges[1].held, pair.hosts[0].peer_id
    pair.exchanges[1].state.sizes.clear()

    class Speaking:
        peer_id, origin, partner = me, "", False
        receive_ahead = None

        async def more(self, seconds):
            return True

    async def holding():
        offer = SimpleNamespace(round=1, fragment=0, nbytes=4)
        task = asyncio.ensure_future(held.hold(Speaking(), offer))
        for _ in range(50):
            await asyncio.sleep(0)
        is_held = not task.done()
        task.cancel()
        await asyncio.wait({task})
        return is_held

    assert pair.hosts[1].call(holding(), 60)


def test_a_held_call_ends_with_its_stream(pair):
    """Also at a newcomer, where its payload might wait in the stream.

    Mutant: it is held for as long as that, and the caller's next call is turned away.
    """
    pair.start(0, 1.0)
    calls = pair.exchanges[1].held.calls
    until(lambda: calls)
    ((key, first),) = calls.items()

    async def hang_up():
        for stream in list(pair.hosts[0].streams):
            stream.abort()

    pair.hosts[0].call(hang_up(), 30)
    until(lambda: calls.get(key) is not first)


def test_turned_down_peer_sends_nothing_ahead(pair):
    """Who was turned down sends no payload ahead the next time."""
    assert pair.run() == [(2.0, -2.0)] * 2
    caller = pair.exchanges[0].caller
    assert caller._welcome
    answer = pair.exchanges[1].answerer._judge

    async def busy(stream, offer):
        await stream.more(2.0)  # until the payload has begun to come
        return None, Answer(verdict="busy", round=offer.round), None

    pair.exchanges[1].answerer._judge = busy
    pair.exchanges[0].hurry(LONG)
    handle = pair.start(0, 1.0, 1)
    assert handle.result() is None
    assert not caller._welcome
    pair.exchanges[1].answerer._judge = answer
