"""Several meetings of one node at once, one for each fragment: each by itself, all rounds of a node
in step, and what they hold in memory."""

import asyncio
import gc
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim import (
    BFLOAT16,
    FLOAT32,
    Delayed,
    Every,
    NoLoCo,
    RoundKey,
    Streaming,
    StreamingDiLoCo,
)
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.pairing import partner_of
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.contribution import encode_contribution
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.pair.calls import EXCHANGE_PROTOCOL, make_offer, receive_offer
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.pair.selector import PairSelector
from shoal.swarm.exchange.pair.state import PairingAttempt, Step
from shoal.swarm.exchange.pair.transfer import PairTransfer
from shoal.swarm.exchange.pair_rounds import PairRounds
from shoal.swarm.exchange.passed_over import TERMS
from shoal.swarm.exchange.round_time import SHARE
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.exchange.training_time import TrainingTime
from shoal.swarm.state.catch_up import in_step
from shoal.swarm.wire.envelope import unpack
from shoal.swarm.wire.messages import Answer
from tests.sim.clock import VirtualLoop
from tests.support.pair_peers import LONG, MODEL, SEED, SWARM, Peer, at_once, value
from tests.support.partner_selection import directory, selector
from tests.support.waiting import until


class Overlapping(Peer):
    """A peer that sends ``fragments`` in turn, without waiting for the last."""

    def __init__(self, network, fragments=4, wait=20.0, overlap=False):
        super().__init__(network, wait=wait, limit=5.0, fragments=fragments, overlap=overlap)
        self.fragments = fragments

    def send(self, round, value=0.0, fragment=None, shape=(4,)):
        fragment = round % self.fragments if fragment is None else fragment
        return self.exchange.start(
            Contribution(RoundKey(SWARM, round, fragment), [torch.full(shape, value)], 1.0, FLOAT32)
        )

    def listens(self, round):
        pairing = self.exchange.state.under_way.get(round % self.fragments)
        return pairing is not None and pairing.phase.step == Step.LISTENING

    @property
    def held(self):
        return self.exchange.held.calls


def test_two_peers_meet_in_all_fragments_at_once(network):
    a, b = Overlapping(network), Overlapping(network)
    first = [a.send(round, float(round)) for round in range(4)]
    until(lambda: len(b.held) == 4)
    assert not any(handle.done() for handle in first)
    second = {
        round: b.send(round, round + 2.0) for round in range(4)
    }  # as an optimizer does: numbers grow
    assert [value(handle.result()) for handle in first] == [1.0, 2.0, 3.0, 4.0]
    assert [value(second[round].result()) for round in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert a.exchange.next_round == b.exchange.next_round == 4
    assert not a.exchange.state.under_way


def test_every_fragment_has_the_partner_of_its_round(network):
    peers = [Overlapping(network, 3) for _ in range(4)]
    ids = [peer.id for peer in peers]
    rounds, met = range(18), {}

    def train(peer):
        handles = {}
        for round in rounds:
            if round >= 3:  # a fragment is in one exchange at a time
                met[peer.id, round - 3] = handles[round - 3].result()
            handles[round] = peer.send(round)
        for round in rounds[-3:]:
            met[peer.id, round] = handles[round].result()

    at_once(train, peers)
    expected = {
        (peer, round): tuple(sorted((peer, partner_of(SEED, round, peer, ids))))
        for peer in ids
        for round in rounds
    }
    assert {key: mean and mean.members for key, mean in met.items()} == expected


def test_a_meeting_that_breaks_off_leaves_the_other_fragments_alone(network, monkeypatch):
    a, b = Overlapping(network, 2), Overlapping(network, 2)
    swap = PairTransfer._swap

    async def broken(self, stream, attempt, *args):
        if attempt.key.fragment == 0:
            stream.abort()
            raise NetworkError("cut.", "broken")
        return await swap(self, stream, attempt, *args)

    monkeypatch.setattr(PairTransfer, "_swap", broken)
    handles = [
        peer.send(round, float(number)) for round in (0, 1) for number, peer in ((1, a), (3, b))
    ]
    assert [value(handle.result()) for handle in handles] == [None, None, 2.0, 2.0]


def test_late_peer_moves_all_its_fragments(network):
    """Who is late moves to the round of the same fragment with all that it sends."""
    a, b = Overlapping(network), Overlapping(network)
    b.rounds = {a.id: 10, b.id: 3}
    a.exchange.next_round = 8
    behind = [b.send(round, 1.0) for round in (0, 1, 2)]
    until(lambda: len(a.held) == 3)
    assert sorted((fragment, round) for (fragment, _), (round, _) in a.held.items()) == [
        (0, 8),
        (1, 9),
        (2, 10),
    ]
    assert b.exchange.next_round == 11  # and its last fragment is sent in that one
    on_time = [a.send(round, 3.0) for round in (8, 9, 10)]
    assert [value(handle.result()) for handle in behind + on_time] == [2.0] * 6
    b.exchange.next_round = 11  # as the optimizer does
    assert [value(handle.result()) for handle in (b.send(11, 1.0), a.send(11, 3.0))] == [2.0, 2.0]
    assert a.exchange.next_round == b.exchange.next_round == 12


def test_unaware_contributions_move_as_far(network):
    """What the optimizer hands in before it knows of a move is moved as far."""
    a, b = Overlapping(network), Overlapping(network)
    b.rounds = {a.id: 10, b.id: 3}
    a.exchange.next_round = 8
    late = b.send(0, 1.0)
    until(lambda: a.held)
    later = b.send(1, 1.0)
    until(lambda: len(a.held) == 2)
    assert b.exchange.next_round == 10
    assert [value(handle.result()) for handle in (a.send(8, 3.0), a.send(9, 3.0), late, later)] == [
        2.0
    ] * 4


def test_call_for_a_skipped_round_is_released(network):
    """a waits for b with fragment 1 in round 5. b learns of c, with fragment 0, that the swarm is
    at 8: it will never be at 5.
    """
    while True:
        a, b, c = peers = [Overlapping(network, wait=LONG) for _ in range(3)]
        ids = [peer.id for peer in peers]
        if partner_of(SEED, 5, a.id, ids) == b.id and partner_of(SEED, 4, b.id, ids) == c.id:
            break
    for peer in peers:
        peer.sees, peer.rounds = ids, dict.fromkeys(ids, 9)
    c.exchange.next_round = 8
    a.send(5)
    until(lambda: b.held)
    b.send(4)
    until(
        lambda: a.exchange.next_round >= 10
    )  # 14 where b, odd in round 8, asks a next, who is in its round 9 by then


def test_abandoned_transfer_counts_at_neither(network, monkeypatch):
    """As the weights that it was made of were replaced.

    The caller, or the callee, learns of it by the end of the stream.
    """
    swap = PairTransfer._swap
    for giver in (0, 1):
        caller, callee = pair = Overlapping(network, wait=LONG), Overlapping(network, wait=LONG)
        for peer in pair:
            peer.sees = [caller.id, callee.id]
        both, let_go = threading.Barrier(3), threading.Event()

        async def slow(self, *args, both=both, let_go=let_go):
            await asyncio.to_thread(both.wait, LONG)
            while not let_go.is_set():
                await asyncio.sleep(0.01)
            return await swap(self, *args)

        monkeypatch.setattr(PairTransfer, "_swap", slow)
        handles = [caller.send(0)]
        until(lambda callee=callee: callee.held)
        handles.append(callee.send(0))
        both.wait(LONG)
        handles[giver].close()
        until(handles[giver].done)
        until(lambda peer=pair[giver]: not peer.exchange.state.under_way)
        let_go.set()
        assert handles[1 - giver].result() is None
        assert handles[giver]._attempt.commit.received is None


def test_caller_that_moved_on_is_no_failure_once(network):
    """The node that accepted listens on, and meets who comes next."""
    (a, later), partner = (
        [Overlapping(network, wait=0.2, overlap=True) for _ in range(2)],
        network.host(),
    )
    round = next(
        r
        for r in range(1000)
        if partner_of(SEED, r, a.id, [a.id, partner.peer_id, later.id]) is None
    )
    handle = a.send(round, 1.0)

    until(lambda: a.listens(round))

    async def call_and_go():
        context = PeerContext(partner, partner.identity, SWARM, MODEL, SEED, dict)
        mine = encode_contribution(
            SWARM,
            Contribution(RoundKey(SWARM, round, round % 4), [torch.zeros(4)], 1.0, FLOAT32, 0),
        )
        stream = await partner.open(a.id, EXCHANGE_PROTOCOL, timeout=LONG)
        await stream.send(make_offer(context, mine, bytes(16)), LONG)
        answer = unpack(await stream.receive(Answer.LIMIT, LONG), Answer)
        await receive_offer(stream, LONG)
        stream.close()
        return answer.verdict

    missed = a.exchange._selector.passed.misses
    assert partner.submit(call_and_go()).result(LONG) == "accept"
    until(lambda: a.exchange.state.under_way[round % 4].withdrawn)
    assert not missed
    assert not handle.done()
    other = later.send(round, 3.0)
    until(lambda: handle.done() and other.done())
    assert [value(handle.result()), value(other.result())] == [2.0, 2.0]
    round = next(
        r
        for r in range(round + 4, 1000, 4)
        if partner_of(SEED, r, a.id, [a.id, partner.peer_id, later.id]) is None
    )
    a.send(round)
    until(lambda: a.listens(round))
    assert partner.submit(call_and_go()).result(LONG) == "accept"
    until(lambda: a.exchange.state.under_way[round % 4].phase.outcome is None)
    assert not missed
    assert partner.submit(call_and_go()).result(LONG) == "accept"
    until(lambda: list(missed) == [partner.peer_id])


def test_the_last_average_keeps_no_step(network):
    a, b = Overlapping(network), Overlapping(network)
    b.rounds = {a.id: 7, b.id: 5}
    handles = [a.send(7, 1.0, fragment=4), b.send(5, 3.0, fragment=4)]
    assert [value(handle.result()) for handle in handles] == [2.0, 2.0]


def test_a_fragment_that_is_not_of_the_swarm_is_refused(network, caplog):
    a, b = Overlapping(network, 9), Overlapping(network, 2)
    assert a.send(3, fragment=3).result() is None
    assert not b.held
    assert "there are 2 fragments here" in caplog.text


def test_each_meeting_has_the_time_that_its_own_bytes_need(network):
    a = Overlapping(network, 2)
    large, small = a.send(0, shape=(3_000_000,)), a.send(1)
    assert large.limit > small.limit
    assert [handle.result(0.0) for handle in (large, small)] == [None, None]


@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_a_move_keeps_every_later_contribution_in_its_step(fragments, sent, data):
    """Whatever moves, and however late the optimizer learns of it."""
    rounds, counted = PairRounds(fragments), 0
    for number in range(sent):
        own = rounds.hand_in(counted)
        counted, fragment = counted + 1, number % fragments
        rounds.begin(own, counted - 1, fragment)
        assert own == number
        if data.draw(st.booleans()):
            now = rounds.next_round - 1
            rounds.move(own, now + fragments * data.draw(st.integers(0, 3)), fragment)
        assert (rounds.next_round - 1) % fragments == fragment
        if data.draw(st.booleans()):
            counted = max(counted, rounds.next_round)
            rounds.next_round = counted
    assert rounds.next_round >= sent


@given(st.integers(1, 5), st.lists(st.sampled_from(["send", "leave out", "apply", 1, 2, 3])))
def test_skipped_round_keeps_its_numbers(fragments, events):
    """Whatever was in flight then and moves later (by so many steps), and whenever the optimizer
    learns of it.
    """
    rounds, counted, turn, flying = PairRounds(fragments, overlap=True), 0, 0, []
    for event in events:
        if event == "send":
            own = rounds.hand_in(counted)
            rounds.begin(own, rounds.next_round - 1, turn % fragments)
            flying.append((own, turn % fragments))
        elif event == "leave out":
            rounds.leave_out()
        elif event == "apply":
            counted = max(counted, rounds.next_round)
            rounds.next_round = counted
        elif flying:
            own, fragment = flying.pop(0)
            rounds.move(own, own + rounds._shift + event * fragments, fragment)
        if event in ("send", "leave out"):
            counted, turn = counted + 1, turn + 1
        assert rounds.next_round % fragments == counted % fragments == turn % fragments


@given(st.integers(1, 5), st.integers(0, 60), st.integers(0, 60), st.none() | st.integers(0, 60))
def test_caller_is_held_or_sent_later_in_step(fragments, round, next_round, at):
    """A caller is met held or sent to a later round in its own step."""
    rounds, fragment = PairRounds(fragments), round % fragments
    rounds.next_round = next_round
    instead = rounds.instead(round, fragment, at)
    if round == at:
        assert instead is None
    elif instead is None:
        assert round >= next_round or (at is not None and at > round >= at)
    else:
        assert instead > round
        assert (instead - round) % fragments == 0
        assert instead - fragments < (at if at is not None and at > round else next_round)


def test_nobody_is_sent_to_an_unbegun_round():
    """While training goes on nobody is sent to a round that nobody has begun."""
    rounds = PairRounds(4, overlap=True)
    for round in range(10):
        rounds.begin(rounds.hand_in(round), round, round % 4)
    assert [rounds.instead(round, 0, None) for round in (0, 4, 8, 12)] == [8, 8, None, None]
    assert [rounds.through(round, 0, None) for round in (4, 8, 12)] == [False, True, False]
    assert not rounds.through(8, 0, 8)
    rounds.move(9, 17, 1)  # and with it all others, so that it will not be in 10, 11, 12
    assert [rounds.instead(round, 0, None) for round in (4, 8, 12, 16, 20)] == [
        8,
        None,
        None,
        None,
        None,
    ]
    assert [rounds.through(round, 0, None) for round in (8, 12, 16, 20)] == [
        True,
        True,
        True,
        False,
    ]


def test_needed_outcome_waits_for_no_absentee(network):
    """Until then the node listens; who comes late, but before, is met."""
    peers = [Overlapping(network, wait=0.2, overlap=True) for _ in range(3)]
    round = next(
        r
        for r in range(1000)
        if partner_of(SEED, r, peers[0].id, [peer.id for peer in peers]) is None
    )
    handle = peers[0].send(round, 1.0)
    until(lambda: peers[0].listens(round))
    assert not handle.done()
    peers[1].host.die()
    late = peers[2].send(round, 3.0)
    until(lambda: handle.done() and late.done())
    assert [value(handle.result()) for handle in (handle, late)] == [2.0, 2.0]
    alone = peers[0].send(round + 4, 1.0)
    assert alone.result() is None
    assert not alone._attempt.commit.closed  # it ended by itself


@pytest.mark.parametrize("failures", [1, 2])
def test_lonely_peer_retries_those_that_failed_once(network, failures):
    """In a small swarm one that had been cut off found the only free one each round, which turned
    it away for eight rounds.
    """
    a, b, *busy = [Overlapping(network, wait=0.2, overlap=True) for _ in range(5)]
    ids = [peer.id for peer in (a, b, *busy)]
    round = next(r for r in range(4, 1000) if partner_of(SEED, r, a.id, ids) is None)
    for number in reversed(range(failures)):
        a.exchange._selector.passed.missed(b.id, round - 4 * number, 1)
    for peer in busy:
        peer.host.die()
    first, second = a.send(round, 1.0), b.send(round, 3.0)
    if failures == 1:
        until(lambda: first.done() and second.done())
    means = [first.result(), second.result()]
    assert [mean is not None for mean in means] == [failures == 1] * 2


@pytest.mark.parametrize(("needed", "over"), [(0.0, 1.0), (0.25, 1.0), (5.0, 5.0)])
def test_who_has_listened_long_enough_costs_training_no_more(needed, over):
    """Seconds of a virtual clock after the listening began."""
    loop, pairing = VirtualLoop(), PairingAttempt(None, 0)
    matchmaker = SimpleNamespace(rounds=SimpleNamespace(overlap=True), _timeouts=None)

    async def listen():
        began = loop.time()
        loop.call_later(needed, pairing.needed.set)
        assert await PairExchange._listen(matchmaker, pairing, 1.0) is None
        return loop.time() - began

    assert loop.run_until_complete(listen()) == pytest.approx(over)
    loop.close()


@given(st.integers(1, 5), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_who_moves_stays_in_step_and_within_the_limit(fragments, mine, wanted, limit):
    """A liar that answered a round of another fragment put a peer out of step for good: it met
    nobody any more.
    """
    moved = PairRounds(fragments).within(wanted, 0, mine, limit)
    assert moved == mine or (mine < moved <= min(wanted, limit) and (moved - mine) % fragments == 0)


def test_failures_are_forgotten_no_faster_with_fragments():
    """Rounds are sent four times as often, so four times as many of them are the same time."""
    plain, cut = (
        selector("peer-0", directory(2)),
        PairSelector(selector("peer-0", directory(2))._context, fragments=4),
    )
    for node, step in ((plain, 1), (cut, 4)):
        node.passed.missed("peer-1", 0)
        assert [node.takes("peer-1", step * TERMS[0] - less) for less in (1, 0)] == [False, True]
        node.passed.met("peer-2", step)
        node.passed.missed("peer-1", step)
        assert [node.takes("peer-1", step * TERMS[1] - less) for less in (1, 0)] == [False, True]


def test_meetings_with_one_dead_peer_are_one_failure():
    """Meetings that a dead peer ends at once are one failure."""
    node = PairSelector(selector("peer-0", directory(2))._context, fragments=4)
    for round in (6, 7, 5, 9):
        node.passed.missed("peer-1", round)
    assert not node.takes("peer-1", 4 * TERMS[0] - 1)
    assert node.takes("peer-1", 4 * TERMS[0])


def test_patience_is_per_fragment():
    """Patience is of the time between two rounds of one fragment."""
    time = TrainingTime(ExchangeTimeouts(1.0), 4)
    for sending in range(12):
        period = time.begin(25.0 * sending, sending % 4)
        assert period == (100.0 if sending >= 4 else float("inf"))
    assert [time.patience(fragment) for fragment in range(5)] == [SHARE * 100.0] * 4 + [1.0]


@pytest.mark.parametrize(("schedule", "position", "round", "applied", "expected"), [
    (Every(10), 0, 9, [8], 9),
    (Streaming(40, 4, 5), 0, 9, [8, 5, 6, 7], 12),  # a newcomer begins with fragment 0
    (Streaming(40, 4, 5), 15, 9, [8, 5, 6, 7], 9),  # the next is fragment 1
    (Streaming(40, 4, 5), 0, 2, [0, -1, -1, -1], 4),
    (Streaming(40, 4, 5), 10, 2, [0, -1, -1, -1], 5),
    (Streaming(40, 4, 5), 0, 9, [6, 7, 8, 5], 10),  # after a last average the steps are others
    (Delayed(40, 2), 0, 5, [4, 3], 6),
])  # fmt: skip
def test_newcomer_begins_where_its_fragment_is_sent(schedule, position, round, applied, expected):
    """A newcomer begins in a round in which its fragment is sent."""
    opt = SimpleNamespace(schedule=schedule, position=position)
    assert in_step(opt, SimpleNamespace(round=round, applied=applied)) == expected


FRAGMENTS, VALUES = (
    4,
    300_000,
)  # a fragment's payload is larger than what is too small to be used again
OF_AN_EXCHANGE = (
    "PartnerContribution",
    "EncodedContribution",
    "ExchangeAttempt",
    "PairingAttempt",
    "Gathered",
)


@pytest.fixture
def uncollected():
    """What is in a ring of references stays, as it does for long in a node, where hardly any
    objects are made meanwhile.
    """
    gc.disable()
    gc.freeze()  # what is there already is not looked at
    yield
    gc.unfreeze()
    gc.enable()


def of_exchanges():
    return [held for held in gc.get_objects() if type(held).__name__ in OF_AN_EXCHANGE]


def storages():
    tensors = [
        held for held in gc.get_objects() if type(held) in (torch.Tensor, torch.nn.Parameter)
    ]
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return {place: nbytes for place, nbytes in found.items() if nbytes >= VALUES}


@pytest.mark.parametrize("ends", ["met", "broken", "alone"])
def test_contributions_are_gone_with_their_mean(network, uncollected, monkeypatch, ends):
    a, b = (
        Overlapping(network, wait=LONG if ends == "met" else 0.1, overlap=True) for _ in range(2)
    )

    async def broken(self, stream, *args):
        stream.abort()
        raise NetworkError("cut.", "broken")

    if ends == "broken":
        monkeypatch.setattr(PairTransfer, "_swap", broken)
    for first in range(0, 3 * FRAGMENTS, FRAGMENTS):
        senders = [(a, 1.0)] if ends == "alone" else [(a, 1.0), (b, 3.0)]
        handles = [
            peer.send(round, sent)
            for peer, sent in senders
            for round in range(first, first + FRAGMENTS)
        ]
        assert {value(handle.result()) for handle in handles} == {2.0 if ends == "met" else None}
        del handles
    until(lambda: not of_exchanges())  # the last coroutines have still to end


def trained(method, exchange):
    weights = [torch.nn.Parameter(torch.zeros(VALUES)) for _ in range(FRAGMENTS)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return method(
        torch.optim.SGD(weights, lr=0.1),
        exchange,
        every=2 * FRAGMENTS,
        lag=2 * FRAGMENTS - 1,
        run=SWARM,
    )


def in_groups(network, peer):
    context = PeerContext(
        peer.host, peer.host.identity, SWARM, MODEL, SEED, peer.members, peer.look
    )
    return GroupExchange(context, ExchangeTimeouts(LONG, 5.0, 20.0), fragments=FRAGMENTS)


@pytest.mark.parametrize(
    ("method", "codec"),
    [(NoLoCo, FLOAT32), (NoLoCo, BFLOAT16), (StreamingDiLoCo, FLOAT32)],
    ids=["noloco", "noloco-bfloat16", "streaming"],
)
def test_payloads_in_flight_are_held_once(network, uncollected, method, codec):
    """All fragments in flight hold what was sent and what came once."""
    peers = [Overlapping(network, FRAGMENTS, wait=LONG, overlap=True) for _ in range(2)]
    exchanges = [peer.exchange if method is NoLoCo else in_groups(network, peer) for peer in peers]
    made = partial(method, fragments=FRAGMENTS, codec=codec)
    optimizers = [trained(made, exchange) for exchange in exchanges]

    def held():
        return sum(storages().values()) / (4 * VALUES * FRAGMENTS * len(optimizers))

    alone = held()
    assert alone == 4.0  # weights, gradients, slow weights, momentum
    for _ in range(3):
        for _ in range(2 * FRAGMENTS):
            for optimizer in optimizers:
                optimizer.step()
        assert [len(list(optimizer._in_flight)) for optimizer in optimizers] == [
            FRAGMENTS,
            FRAGMENTS,
        ]
        for optimizer in optimizers:
            assert all(pending.result() is not None for pending in optimizer._in_flight)
        until(
            lambda: held() == alone + 2.0
        )  # what was sent, and what came, in which the mean is computed
    for optimizer in optimizers:
        optimizer.finish()
    until(lambda: held() == alone)
