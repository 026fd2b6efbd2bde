"""The two meetings of a chain's middle: what each decides, and what they decide together."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from shoal.optim import RoundKey
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.pairing import chains
from shoal.swarm.exchange.contribution import ExchangeAttempt, encode_contribution
from shoal.swarm.exchange.pair.exchange import Ended, PairExchange
from shoal.swarm.exchange.pair.held_calls import HeldCalls
from shoal.swarm.exchange.pair.state import PairingAttempt, PairState, Phase, Step
from tests.support.partner_selection import SEED, directory, selector

SWARM = "a" * 52
ENDS = "one", "other"


def middle():
    """The meetings of a middle with both ends."""
    mine = Contribution(RoundKey(SWARM, 3), [torch.zeros(2)])
    first = PairingAttempt(ExchangeAttempt(encode_contribution(SWARM, mine)), 3, ENDS[0])
    first.second = first.beside(ENDS[1])
    return first, first.second


def state_of(*pairings):
    state = PairState(*[None] * 7)
    state.under_way.update(enumerate(pairings))
    return state


def test_each_meeting_commits_by_itself():
    first, second = middle()
    assert second.attempt.commit.commit("theirs")
    assert (first.attempt.commit.received, first.attempt.outcomes()) == (None, ("theirs",))
    assert first.attempt.commit.commit("its")
    assert first.attempt.outcomes() == ("its", "theirs")


def test_closed_round_commits_in_neither_meeting():
    """Else an end would count a mean whose middle has gone on."""
    first, second = middle()
    first.attempt.close()
    assert not first.attempt.commit.commit("its")
    assert not second.attempt.commit.commit("theirs")


@pytest.mark.parametrize("which", [0, 1])
def test_round_is_left_out_for_either_transfer(which):
    pairings = middle()
    pairings[which].attempt.commit.leave_out = lambda: True
    assert pairings[0].attempt.leave_out()


@pytest.mark.parametrize(
    ("step", "received", "stays"),
    [
        (Step.TRANSFERRING, None, True),
        (Step.ACCEPTED, None, True),
        (Step.SEARCHING, "theirs", True),
        (Step.OFFERING, None, False),
    ],
)
def test_contribution_that_counts_moves_to_no_other_round(step, received, stays):
    """It would be in means of two rounds."""
    first, second = middle()
    second.phase = Phase(step)
    second.attempt.commit.received = received
    moves = []
    exchange = SimpleNamespace(
        rounds=SimpleNamespace(overlap=False, move=lambda *args: moves.append(args))
    )
    first.swarm_round = 5
    how = PairExchange._move(exchange, first, None)
    assert how is (Ended.OVER if stays else Ended.MOVED)
    assert (first.attempt.key.round, len(moves)) == ((3, 0) if stays else (5, 1))


def test_call_of_an_end_belongs_to_its_meeting():
    first, second = middle()
    state = state_of(first)
    assert [state.meeting(0, peer) for peer in (*ENDS, "third")] == [first, second, first]
    assert state.meeting(1, ENDS[0]) is None


def test_held_calls_of_both_ends_are_kept():
    """Of those that came for the round before it began; a third peer's is answered."""

    class Taken:
        def __init__(self):
            self.answers = []

        def done(self):
            return bool(self.answers)

        def set_result(self, answer):
            self.answers.append(answer)

    first, _ = middle()
    held = HeldCalls(state_of(first))
    taken = {peer: Taken() for peer in (*ENDS, "third")}
    held.calls = {(0, peer): (3, each) for peer, each in taken.items()}
    held.release(first)
    assert [taken[peer].answers for peer in taken] == [[], [], [None]]


def test_meeting_that_ends_ends_the_other():
    """An exchange of the second meeting after the first is over would be in no mean here."""

    async def main():
        first, second = middle()
        second.work = asyncio.ensure_future(asyncio.Event().wait())
        await asyncio.sleep(0)
        await PairExchange._end_second(None, first)
        assert (first.second, second.work.cancelled()) == (None, True)

    asyncio.run(main())


def test_either_meeting_tells_both_that_one_was_met():
    """Else who listens in vain does so for as long as training can wait."""
    selector = SimpleNamespace(ended=lambda *args, **options: None)
    evidence = SimpleNamespace(met=lambda peers, round: None)
    state = PairState(None, None, None, selector, None, evidence, None)
    for which in (0, 1):
        pairings = middle()
        state.ended(pairings[which], ENDS[which], "theirs")
        assert [pairing.met.is_set() for pairing in pairings] == [True, True]


@pytest.mark.parametrize("called", [True, False])
def test_second_partner_that_called_meanwhile_is_called_back(called):
    """It was turned away while this node was calling it."""

    async def main():
        _, second = middle()
        calls = []

        async def call(pairing, peer, seconds):
            calls.append(peer)
            if called and len(calls) == 1:
                pairing.turned_away.append(peer)
            return None, False

        async def listen(pairing, seconds):
            calls.append("listens")

        exchange = SimpleNamespace(
            time=SimpleNamespace(patience=lambda fragment: 9.0),
            rounds=SimpleNamespace(overlap=True),
            _try=call,
            _listen=listen,
        )
        await PairExchange._meet_second(exchange, second)
        assert calls == [ENDS[1]] * (1 + called) + ["listens"]

    asyncio.run(main())


@pytest.mark.parametrize("peer", [*ENDS, "third"])
def test_payloads_of_both_partners_come_ahead(peer):
    class Silent:
        peer_id = peer

        async def receive_ahead(self, view, advance):
            await asyncio.Event().wait()

        async def more(self, seconds):
            await asyncio.Event().wait()

    async def main():
        selector = SimpleNamespace(partners=lambda round: ENDS, expects_slower=lambda *call: False)
        rounds = SimpleNamespace(overlap=True)
        state = PairState(None, None, None, selector, rounds, None, None, sizes={0: 16})
        held = HeldCalls(state)
        offer = SimpleNamespace(round=3, fragment=0, nbytes=16)
        held._places[0] = SimpleNamespace(
            take=lambda stream: True, free=lambda stream: None, peers=1
        )
        holding = asyncio.ensure_future(held.hold(Silent(), offer))
        await asyncio.sleep(0)
        held.calls[0, peer][1].set_result(None)
        _, incoming = await holding
        assert (incoming is not None) == (peer in ENDS)

    asyncio.run(main())


def five():
    """Five peers: a pair and a chain, as the round has them."""
    here = directory(5)
    return here, *chains(SEED, 0, here)


def selected(here, me, dead):
    node = selector(me, here)
    for peer in dead:
        node.failed(peer)
    return node.of(0), node.second(0)


def test_middle_gives_its_second_to_one_left_over():
    """The last of the chain, which has no pair, is with the one whose partner is dead."""
    here, (one, other), (end, middle, last) = five()
    (partner, order), second = selected(here, middle, {other})
    assert (partner, order[0], second) == (end, end, None)
    assert selected(here, one, {other})[0] == (other, [last])
    assert selected(here, last, {other})[0][0] == one


def test_middle_keeps_its_second_where_nobody_is_left_over():
    here, (one, other), (end, middle, last) = five()
    (partner, _), second = selected(here, middle, {one, other})
    assert (partner, second) == (end, last)
    assert selected(here, last, {one, other})[0][0] == middle


def test_first_meeting_leaves_the_second_partner_alone():
    """It would be met twice, and the first partner never."""
    here, _, (end, middle, last) = five()
    (partner, order), second = selected(here, middle, set())
    assert (partner, order[0], second) == (end, end, last)
    assert last not in order
