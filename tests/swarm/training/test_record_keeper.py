"""The record that a training node keeps of itself: what is counted where."""

from types import SimpleNamespace

import pytest

from shoal.optim import RoundInfo, RoundKey
from shoal.swarm.internal_errors import OWN_ERROR, InternalErrors
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.training.record_keeper import RecordKeeper, RoundReport
from shoal.swarm.wire.record import MAX_BANNED, Checks, LinkUse, Rollouts
from tests.support.reporting_member import PEERS


def keeper_of(method="noloco", fragments=1):
    host = SimpleNamespace(restarts=0, internal_errors=InternalErrors())
    own_record = SimpleNamespace(link=lambda: LinkUse(bytes_sent=7))
    membership = SimpleNamespace(
        host=host,
        directory=SimpleNamespace(members=lambda: {"a": None}, own_record=own_record),
        manifest=SimpleNamespace(outer=OuterSettings(method=method)),
    )
    opt = SimpleNamespace(round=4, steps=40, tokens=400, lag=3, lag_auto=True, fragments=fragments)
    return RecordKeeper(membership, opt, SimpleNamespace(late=1))


def over(keeper, *members, fragment=0, **report):
    info = RoundInfo(RoundKey("run", 1, fragment), members, 10, 0)
    usual = {"sent": 1, "received": 1, "wait_s": 0.5, "rejected": []}
    keeper.round(info, RoundReport(**{**usual, **report}))


def test_each_exchange_counts_once():
    """Mutant: an own error, or a refusal, counts as nobody too."""
    keeper = keeper_of()
    over(keeper, "me", "bert")
    over(keeper, "me", why="nobody else is here")
    over(keeper, "me", error="ValueError: x")
    over(keeper, "me", rejected=["an update", "another"])
    exchanges = keeper.record().exchanges
    parts = (
        exchanges.with_partner,
        exchanges.without_partner,
        exchanges.failed,
    )
    assert (exchanges.ended, parts) == (4, (1, 1, 1))
    assert keeper.record().faults.contributions_refused == 2
    assert (exchanges.wait_s, exchanges.late, exchanges.lag_steps) == (2.0, 1, 3)


def test_nobody_is_no_fault_where_nobody_averages():
    keeper = keeper_of("none")
    over(keeper, "me")
    assert keeper.record().exchanges.without_partner == 0


def test_a_round_is_over_with_its_last_fragment():
    keeper = keeper_of(fragments=4)
    for fragment in range(5):  # the last average has a number of its own
        over(keeper, "me", "bert", fragment=fragment)
    assert keeper.record().exchanges.rounds == 2


def test_it_says_why_the_newest_had_no_partner():
    keeper = keeper_of()
    over(keeper, "me", why="bert could not be reached")
    assert keeper.record().exchanges.why == "bert could not be reached"
    over(keeper, "me", error="ValueError: x")
    assert keeper.record().exchanges.why == f"{OWN_ERROR} (ValueError: x)"
    over(keeper, "me", "bert")
    assert keeper.record().exchanges.why == ""


def test_reinforcement_learning_and_verification_are_counted():
    keeper = keeper_of()
    assert keeper.record().rollouts is keeper.record().checks is None
    for reward, seen in ((0.25, 8), (0.5, 20)):
        unused = {"not_drawn": 2, "no_spread": 3}
        keeper.learnt(reward=reward, own=4, foreign=2, seen=seen, unused=unused)
    found = keeper.record().rollouts
    assert found == Rollouts(
        reward=0.5,
        groups_own=8,
        groups_foreign=4,
        groups_seen=20,
        unused=(("no_spread", 3), ("not_drawn", 2)),
    )
    assert found.unused_share == 0.25
    assert Rollouts().unused_share is None
    assert len(PEERS) > MAX_BANNED
    keeper.bans(PEERS)
    keeper.checked(claims=5, checked=4, invalid=1)
    assert keeper.record().checks == Checks(
        claims=5, checked=4, invalid=1, banned=tuple(PEERS[:MAX_BANNED])
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_left_out(bad):
    keeper = keeper_of()
    keeper.lost(training=bad, held_out_first=2.0)
    keeper.learnt(reward=bad, own=1, foreign=0)
    keeper.rates = SimpleNamespace(steps_per_s=bad, tokens_per_s=bad, mfu=bad)
    record = keeper.record()
    assert (record.loss.training, record.loss.held_out_first) == (None, 2.0)
    assert record.rollouts.reward is None
    assert (record.progress.steps_per_s, record.progress.tokens_per_s) == (0.0, 0.0)
    assert (record.progress.mfu, record.progress.members) == (None, 1)
