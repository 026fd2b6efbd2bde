"""How long an exchange may hold training: several times what is usual here; and who costs more than
it gives is passed over.
"""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch

from shoal.optim import FLOAT32, RoundKey
from shoal.optim.exchange.base import Contribution
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.contribution import ExchangeAttempt, encode_contribution
from shoal.swarm.exchange.pair.state import PairingAttempt, PairState
from shoal.swarm.exchange.pair.transfer import PartnerContribution
from shoal.swarm.exchange.pair_rounds import PairRounds
from shoal.swarm.exchange.round_evidence import RoundEvidence
from shoal.swarm.exchange.round_time import FIRST_RATE, FIRST_S, LEAST_S
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.exchange.training_time import (
    GIVES,
    OFTEN,
    PARTNERS,
    PEERS,
    SEVERAL,
    SPARE_S,
    TrainingTime,
)
from shoal.swarm.identity import Identity

SWARM, WAIT = "a" * 52, 0.05
THEIRS = PartnerContribution("peer", 1.0, [torch.zeros(2)])


OTHERS = ("one", "two", "three")


class Selector:
    def __init__(self):
        self.ends = []

    def ended(self, peer, round, *, met, over):
        self.ends.append((peer, met and not over))


def timed(periods=None, wait=10.0, fragments=1, trial=0.0):
    """A node's training time. ``periods``: seconds of a round of each fragment."""
    time = TrainingTime(ExchangeTimeouts(wait, trial=trial), fragments)
    time._periods = {fragment: (seconds, seconds) for fragment, seconds in (periods or {}).items()}
    return time


def run(transfer, holds=(), *, awaited=True, budget=WAIT, tries=False):
    """Let one transfer run; return its outcome, the selector's ends, the failures that were
    counted, and what it held.
    """
    context = PeerContext(None, Identity.ephemeral(), SWARM, "0" * 64, 0, dict)
    attempt = ExchangeAttempt(
        encode_contribution(SWARM, Contribution(RoundKey(SWARM, 0), [torch.zeros(2)], 1.0, FLOAT32))
    )
    selector, timeouts, time = Selector(), ExchangeTimeouts(WAIT, WAIT, WAIT), timed()
    time.budget = lambda nbytes, fragment, before: budget
    time.holds.update(zip(OTHERS, holds, strict=False))

    async def go():
        transfers = SimpleNamespace(
            run=lambda stream, attempt, theirs, caller, incoming: transfer(pairing)
        )
        evidence = RoundEvidence(context, 1)
        state = PairState(
            context, timeouts, transfers, selector, PairRounds(1, overlap=True), evidence, time
        )
        pairing = PairingAttempt(attempt, 0)
        if awaited:
            pairing.needed.set()
        offer = SimpleNamespace(nbytes=8)
        return await asyncio.wait_for(
            state.transfer(
                SimpleNamespace(peer_id="peer", is_trial=tries), pairing, offer, caller=True
            ),
            30,
        )

    received = asyncio.run(go())
    return (
        received,
        selector.ends,
        [kind for _, _, kind in attempt.stats._events],
        time.holds.get("peer"),
    )


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


async def breaks_off(pairing):
    return None


MET, NOT_MET = [("peer", True)], [("peer", False)]


@pytest.mark.parametrize(("transfer", "options", "outcome", "measured"), [
    (never, {}, (None, NOT_MET, ["timeout"]), True),  # longer than its budget
    (slow, {"budget": 30.0}, (THEIRS, MET, []), True),
    # what was committed counts though the rest is given up
    (committed_and_then_silent, {}, (THEIRS, MET, []), None),
    (never, {"tries": True}, (None, [], ["timeout"]), False),  # of a slow way
    (slow, {"tries": True, "budget": 30.0, "holds": [WAIT / 100] * 3}, (THEIRS, MET, []), False),
    (breaks_off, {"tries": True}, (None, NOT_MET, []), False),
])  # fmt: skip
def test_over_budget_is_given_up_and_charged(transfer, options, outcome, measured):
    """What takes longer than its budget is given up and a cost unless both tried."""
    *found, held = run(transfer, **options)
    assert tuple(found) == outcome
    assert measured is None or (held is not None and held >= WAIT) == measured


def test_time_in_which_training_goes_on_costs_nothing():
    received, ends, _, held = run(slow_until_training_needs_it, awaited=False)
    assert (received, ends) == (THEIRS, [("peer", True)])
    assert held < WAIT


def test_budget_is_a_multiple_of_the_median():
    """The budget is several times the median of the partners and half a round."""
    time = timed({0: 3.0})
    time.holds.update(one=0.5, two=90.0, three=2.0)
    assert time.budget(10**9, 0) == SEVERAL * 2.0
    time.holds.update(three=0.01, one=0.02)
    assert time.budget(10**9, 0) == 1.5
    assert timed({0: 3.0}, fragments=3).budget(0, 0) == FIRST_S
    quick = timed({0: 0.1})
    quick.holds.update(one=0.01)
    assert quick.budget(10**9, 0) == LEAST_S


def test_first_budget_follows_the_bytes():
    """Before there is a measure the budget is for the bytes also of the last average."""
    assert timed().budget(0, 0) == FIRST_S
    assert timed().budget(3 * 10**6, 0) == 3 * 10**6 / FIRST_RATE > 3 * 8 / 1.0  # 3 MB at 1 Mbit/s


def test_rare_waits_are_spared():
    """Rare waits for a partner are spared until they are a part of all time."""
    time = timed({0: 0.1})
    time.holds.update(one=0.01)
    assert time.awaiting(100.0, 0) == SPARE_S > time.budget(0, 0)
    assert time.waited("one", 3.5) == 0.0  # it may itself have waited for one that is gone
    assert time.awaiting(100.0, 0) == SEVERAL * 3.5  # of a node that has met nobody else
    for peer in ("two", "three"):
        assert time.waited(peer, 0.0) == 0.0
    assert time.awaiting(100.0, 0) == LEAST_S
    assert time.awaiting(150.0, 0) == pytest.approx(0.5 + GIVES * 50.0)
    assert time.awaiting(1000.0, 0) == SPARE_S


def test_usual_waiting_is_no_cost():
    """Where all partners come late it is usual to wait and no cost."""
    time = timed({0: 3.0})
    for peer in ("one", "two", "three"):
        time.waited(peer, 2.0)
    assert time.awaiting(0.0, 0) == SEVERAL * 2.0
    assert time.waited("late", OFTEN * 2.0) == 0.0
    assert time.waited("later", OFTEN * 2.0 + 1.0) == pytest.approx(1.0)


def test_slack_covers_late_partners_until_used_up():
    """What training has to spare for late partners is no cost of theirs until it is used up."""
    time = timed({0: 0.2})
    assert [time.waited("one", seconds) for seconds in (3.0, 3.0, 3.0)] == [0.0, 2.0, 3.0]


def test_no_wait_exceeds_half_a_round():
    """No round waits longer than its patience for half a round."""
    time = timed({0: 30.0}, wait=10.0)
    time.holds.update(one=0.5)
    assert time.budget(0, 0) == 10.0
    assert timed({0: 30.0}, trial=20.0).budget(0, 0) == 30.0


def test_background_exchange_has_its_whole_time():
    """An exchange that usually goes on meanwhile has its whole time at the end."""
    time = timed({0: 10.0})
    for peer in ("one", "two"):
        time.spent(peer, 0, 0, 0.0, whole=True, took=20.0)
    assert time.budget(0, 0) == 30.0
    assert time.budget(0, 0, 20.0) == 10.0
    assert time.budget(0, 0, 40.0) == 5.0


def test_larger_fragment_has_more_time():
    """A fragment larger than the usual one has as much more time."""
    time = timed({0: 3.0, 1: 3.0}, wait=0.0, fragments=2)
    for peer in ("one", "two", "three"):
        time.spent(peer, 0, 0, 0.5, whole=True, took=0.5, nbytes=1000)
    assert time.budget(1000, 0) == SEVERAL * 0.5
    assert time.budget(10_000, 1) == SEVERAL * 5.0
    assert time.budget(100, 1) == SEVERAL * 0.5


def test_costly_peer_is_backed_off_until_repaid():
    """Who holds training for longer than it gives is passed over until it has given that."""
    time = timed({0: 10.0})
    time.holds.update(one=0.5)
    assert time.spent("peer", 0, 0, 1.4, whole=True) == {}  # often enough it takes so long
    assert time.spent("peer", 1, 0, 3.5, whole=True) == {"peer": math.ceil(2.0 / (GIVES * 10.0))}
    assert (
        time.spent("peer", 2, 0, 0.5, whole=True) == {}
    )  # nobody is passed over for what is usual


def test_small_costs_add_up_and_are_repaid():
    """What it costs little by little adds up and what rounds give is taken from it."""
    time = timed({0: 10.0})
    time.holds.update(one=0.5, two=0.5)
    little = [bool(time.spent("peer", 0, 0, 2.0, whole=True)) for _ in range(4)]
    assert little == [False, False, False, True]
    later = math.ceil(2.0 / (GIVES * 10.0)) + 1
    assert not time.spent("peer", later, 0, 2.0, whole=True)


def test_without_a_measure_nothing_is_dear():
    """Over a satellite the first exchange with each takes longer than any on the ground: who was
    given up was passed over.
    """
    time = timed({0: 10.0})
    assert time.spent("peer", 0, 0, 5.0, whole=False) == {}
    assert time.spent("peer", 1, 0, 5.0, whole=True) == {}


def test_given_up_exchange_costs_from_its_first_second():
    """What was given up is a cost from its first second."""
    time = timed({0: 10.0})
    time.holds.update(one=1.0)
    assert time.spent("peer", 0, 0, 2.0, whole=False)
    assert time.budget(0, 0) == 5.0  # and it is the measure of a node that meets nobody else


def test_held_fragment_costs_its_share():
    """Who keeps a fragment from being sent costs that share of the exchanges."""
    time = timed({0: 10.0}, fragments=4)
    for one in ("one", "two", "three"):
        assert time.spent(one, 0, 0, 0.0, whole=True, took=9.0) == {}  # within a round
    assert time.spent("peer", 1, 0, 0.0, whole=True, took=30.0) == {
        "peer": math.ceil(20.0 / 4 / (GIVES * 2.5))
    }
    time.took.update(dict.fromkeys(("one", "two", "three", "peer"), 30.0))
    assert (
        time.spent("another", 2, 0, 0.0, whole=True, took=30.0) == {}
    )  # where all links are slow nobody is
    time.took.update(dict.fromkeys(("one", "two", "three", "peer"), 1.0))
    time.holds.update(dict.fromkeys(("one", "two", "three", "peer"), 29.0))
    assert (
        time.spent("waited for", 3, 0, 29.0, whole=True, took=30.0) == {}
    )  # no round went by without this fragment


def test_transfer_reports_that_it_moves():
    """A transfer says that it moves for as long as it does."""
    seen = []

    async def looks(pairing):
        seen.append(pairing)
        assert pairing.attempt.commit.leave_out is not None
        return await quick(pairing)

    assert run(looks)[0] == THEIRS
    assert seen[0].attempt.commit.leave_out is None


def test_slower_link_becomes_usual():
    """A link that has become slower is usual from then on."""
    time = timed({0: 10.0})
    time.holds.update(peer=1.0)
    time.spent("peer", 0, 0, 5.0, whole=False)
    assert time.budget(0, 0) == SEVERAL * 5.0


def test_slow_first_partner_is_found_out_later():
    """A slow first partner is found out once there is another."""
    time = timed({0: 10.0})
    assert time.spent("peer", 0, 0, 24.0, whole=True) == {}
    assert time.spent("one", 1, 0, 0.1, whole=True).keys() == {"peer"}


def test_first_partner_is_not_charged_twice():
    """Of two that were left, one had been given up once, for a second, and was passed over for 128
    rounds: it was charged again when the node had met another.
    """
    time = timed({0: 1.0})
    assert time.spent("peer", 0, 0, 0.05, whole=True) == {}
    assert time.spent("peer", 1, 0, 1.0, whole=False) == {}
    assert time.spent("one", 3, 0, 0.05, whole=True) == {}
    assert time.spent("peer", 4, 0, 1.0, whole=False).keys() == {"peer"}


def test_tables_are_bounded():
    time = timed({0: 10.0})
    for number in range(PEERS + 10):
        time.spent(str(number), 0, 0, 9.0, whole=True)
    assert (len(time.holds), len(time.took), len(time._owed)) == (PARTNERS, PARTNERS, PEERS)


def test_who_is_waited_for_in_vain_is_passed_over():
    """Of two public nodes and one that holds calls each waited eight seconds in every other round
    of two.
    """
    time = timed({0: 2.0})
    assert time.cost("peer", 0, 0, 0.5) == 0
    assert time.cost("peer", 1, 0, 1.0) == math.ceil((0.5 - 2 * GIVES + 1.0) / (2 * GIVES))
    assert time.cost("other", 1, 0, 0.9) == 0
