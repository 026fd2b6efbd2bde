"""How long an exchange may hold training: several times what is usual here; and who takes more is passed over."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from shoal.optim import FLOAT32, RoundKey
from shoal.swarm.exchange.attempt import ExchangeAttempt
from shoal.swarm.exchange.context import ExchangeTimeouts, Patience, PeerContext
from shoal.swarm.exchange.contribution import encode_contribution
from shoal.swarm.exchange.pair import meeting
from shoal.swarm.exchange.pair.meeting import PairingAttempt, PairState
from shoal.swarm.exchange.pair.rounds import PairRounds
from shoal.swarm.exchange.pair.transfer import PartnerContribution
from shoal.swarm.exchange.round_evidence import RoundEvidence
from shoal.swarm.identity import Identity

SWARM, WAIT = "a" * 52, 0.05
THEIRS = PartnerContribution("peer", 1.0, [torch.zeros(2)])


class Selector:
    def __init__(self):
        self.ends = []

    def ended(self, peer, round, *, met):
        self.ends.append((peer, met))


def run(transfer, holds=(), *, awaited=True):
    """Let one transfer run; return its outcome, the selector's ends, the failures that were counted, and the node's holds."""
    context = PeerContext(None, Identity.ephemeral(), SWARM, "0" * 64, 0, dict)
    attempt = ExchangeAttempt(encode_contribution(SWARM, RoundKey(SWARM, 0), [torch.zeros(2)], 1.0, FLOAT32))
    selector, timeouts = Selector(), ExchangeTimeouts(WAIT, WAIT, WAIT)

    async def go():
        transfers = SimpleNamespace(run=lambda stream, attempt, theirs, caller: transfer(pairing))
        state = PairState(
            context, timeouts, transfers, selector, Patience(), PairRounds(1), RoundEvidence(context, 1), overlap=True
        )
        state.holds.extend(holds)
        pairing = PairingAttempt(attempt, 0)
        if awaited:
            pairing.needed.set()
        received = await asyncio.wait_for(state.transfer(SimpleNamespace(peer_id="peer"), pairing, None, caller=True), 30)
        return received, [*state.holds]

    received, held = asyncio.run(go())
    return received, selector.ends, [kind for _, _, kind in attempt.stats._events], held


async def never(pairing):
    await asyncio.Event().wait()


async def committed_and_then_silent(pairing):
    pairing.attempt.commit.commit(THEIRS)
    await asyncio.Event().wait()


async def quick(pairing):
    pairing.attempt.commit.commit(THEIRS)
    return THEIRS


async def slow(pairing):
    await asyncio.sleep(3 * WAIT)
    return await quick(pairing)


async def slow_until_training_needs_it(pairing):
    await asyncio.sleep(3 * WAIT)
    pairing.needed.set()
    return await quick(pairing)


def test_what_takes_several_times_the_usual_is_given_up_and_counted_against_the_peer():
    received, ends, failures, held = run(never, [0.001] * 4)
    assert (received, ends, failures, held) == (None, [("peer", False)], ["timeout"], [0.001] * 4)


def test_what_was_committed_counts_though_the_rest_is_given_up():
    received, ends, failures, _ = run(committed_and_then_silent, [0.001] * 4)
    assert (received, ends, failures) == (THEIRS, [("peer", True)], [])


def test_without_a_measure_the_transfers_own_deadlines_hold():
    assert run(slow)[:3] == (THEIRS, [("peer", True)], [])


def test_time_in_which_training_goes_on_costs_nothing():
    received, ends, _, held = run(slow_until_training_needs_it, [0.001] * 4, awaited=False)
    assert (received, ends) == (THEIRS, [("peer", True)])
    assert held[-1] < WAIT


def test_slow_links_are_usual_where_all_have_them_and_one_slow_peer_does_not_make_the_usual():
    assert run(slow, [3 * WAIT] * 4)[0] is THEIRS
    assert run(slow, [*[3 * WAIT] * 8, *[0.001] * 4])[0] is None  # a quarter of the exchanges kept to less


def test_an_exchange_that_ends_well_but_holds_training_for_long_passes_its_partner_over(monkeypatch):
    monkeypatch.setattr(meeting, "COSTLY_S", WAIT)
    monkeypatch.setattr(meeting.Patience, "of", lambda *args: 60.0)
    received, ends, failures, _ = run(slow, [0.001] * 4)
    assert (received, ends, failures) == (THEIRS, [("peer", False)], [])


@pytest.mark.parametrize("usual", [0.0, 1.0])
def test_nobody_is_passed_over_for_what_is_usual(usual):
    assert run(quick, [usual] * 4)[1] == [("peer", True)]
