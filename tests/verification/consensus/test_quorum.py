"""Which root counts, whom to ask, what an electorate is made of, and what a vote is worth."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.verification.consensus.electorate import electorate, root, void
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.odds import drawn, least_audit, vote
from shoal.verification.consensus.records import Entry, View
from shoal.verification.consensus.reputation import ScoreRules, Standing, Table, compute_scores
from shoal.verification.consensus.rulings import first_draws
from shoal.verification.consensus.sortition import Electorate
from shoal.verification.consensus.view_quorum import ViewQuorum
from tests.support.consensus_stories import RULES, Story, claim_of, digest

PEERS = tuple(f"p{number}" for number in range(9))
EMPTY = Table(-1, {}, {})


def one(number):
    return Electorate(
        7, digest("beacon", number), {peer: peer for peer in PEERS}, frozenset({digest(number)})
    )


def view(peer, number, table=0, round=7):
    return View(
        peer=peer, run="run", round=round, root=root(one(number)), table=digest("table", table)
    )


def stated(numbers, own=0, voters=PEERS, tables=None):
    agreement = ViewQuorum(7)
    for at, number in enumerate(numbers):
        agreement.take(view(PEERS[at], number, (tables or [0] * len(numbers))[at]))
    agreement.propose(view(PEERS[0], own, (tables or [0])[0]), one(own), voters)
    return agreement


def test_what_most_state_counts_and_who_has_it_opens_it():
    agreement = stated([0, 0, 0, 0, 0, 1, 1, 2])
    assert agreement.electorate == one(0)
    assert agreement.sources() == ()


def test_differing_log_asks_only_its_holders():
    """Who has another asks those who state it and takes nothing else."""
    agreement = stated([0, 1, 1, 1, 1, 1])
    assert agreement.electorate is None
    assert agreement.sources() == PEERS[1:6]
    assert not agreement.learned(one(2))
    assert not agreement.learned(replace(one(1), round=8))
    assert agreement.learned(one(1))
    assert agreement.electorate == one(1)


@pytest.mark.parametrize("numbers", [[0, 0, 0], [0, 0, 0, 1, 1, 1, 2, 2, 2]])
def test_a_third_or_less_counts_for_nothing(numbers):
    """No more than a third counts for nothing but one asks them."""
    agreement = stated(numbers)
    assert agreement.root is None
    assert len(agreement.sources()) in (2, 3)


def test_of_two_halves_all_take_the_same():
    roots = {stated([0] * 4 + [1] * 4, own).root for own in (0, 1)}
    assert roots == {min(root(one(0)), root(one(1)))}


def test_strangers_do_not_count_unless_nobody_is_known():
    agreement = stated([0] * 4 + [1] * 5, voters=PEERS[:4])
    assert agreement.root == root(one(0))
    assert stated([0] * 4 + [1] * 5, voters=None).root == root(one(1))


def test_two_views_of_one_peer_count_as_none():
    agreement = stated([0, 0, 1, 1, 1], voters=PEERS[:5])
    with pytest.raises(ValueError, match="two views"):
        agreement.take(view(PEERS[3], 0))
    with pytest.raises(ValueError, match="not one of round"):
        agreement.take(view(PEERS[8], 0, round=8))
    agreement.take(view(PEERS[4], 1))  # again, the same: harmless
    assert agreement.root == min(root(one(0)), root(one(1)))


def test_who_has_another_table_asks_for_it():
    agreement = stated([0] * 5, tables=[1, 2, 2, 2, 2])
    assert agreement.electorate == one(0)
    assert agreement.table == digest("table", 2)
    assert agreement.sources() == PEERS[1:5]


def test_the_table_of_a_minority_is_not_asked_for():
    assert stated([0] * 5, tables=[2, 2, 2, 1, 1]).sources() == ()


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=9, max_size=9), st.integers(0, 3))
def test_more_than_a_third_counts_for_all(numbers, own):
    """What counts is the same for all and stated by more than a third."""
    agreement, other = stated(numbers, own=numbers[0]), ViewQuorum(7)
    for at in reversed(range(9)):
        other.take(view(PEERS[at], numbers[at]))
    other.propose(view(PEERS[8], numbers[8]), one(numbers[8]), PEERS)
    assert agreement.root == other.root
    if agreement.root is not None:
        assert sum(root(one(number)) == agreement.root for number in numbers) > 3


# -- electorates -----------------------------------------------------------------------------------


def entry(peer, round, operator=None):
    return Entry(
        peer=peer, run="run", round=round, operator=operator or peer, anchor=digest(peer, round)
    )


def made(records, table=EMPTY, rules=None, round=10, electorates=None):
    return electorate(
        "run",
        round,
        Ledger(records),
        electorates or {},
        rules or replace(RULES, life=8, claims=2),
        table,
    )


def test_who_entered_lately_and_is_not_banned_can_be_drawn():
    table = Table(8, {"banned": Standing(until=12), "was": Standing(until=11)}, {})
    records = [
        entry("new", 10),
        entry("old", 3),
        entry("gone", 2),
        entry("later", 11),
        entry("banned", 9),
        entry("was", 9, "op"),
    ]
    assert made(records, table).operators == {"new": "new", "old": "old", "was": "op"}
    assert made([entry("twice", 9), entry("twice", 9, "other"), entry("a", 9)]).operators == {
        "a": "a"
    }


def test_strangers_claims_are_drawn_by_lot():
    """Claims of strangers are drawn for by lot and slots used twice never."""
    rules = replace(RULES, life=8, claims=2, strangers=3)
    proven = Standing()
    proven.claims["valid"] = 2
    table = Table(8, dict.fromkeys(PEERS[:4], proven), {})
    strangers = [f"s{number}" for number in range(20)]
    records = [entry(peer, 5) for peer in (*PEERS, *strangers)]
    claims = [claim_of(peer) for peer in (*PEERS[:4], *strangers)]
    twice = [claim_of(PEERS[0], slot=1), claim_of(PEERS[0], slot=1, output=digest("another"))]
    unknown = [claim_of("never-entered"), claim_of("too-late")]
    found = made([*records, entry("too-late", 8), *claims, *twice, *unknown], table, rules)
    assert found.claims is not None
    assert {claim.id for claim in claims[:4]} <= found.claims
    assert len(found.claims) == 4 + 3
    assert not found.claims & {claim.id for claim in (*twice, *unknown)}
    shown = {10: found}
    assert [bool(first_draws(claim, shown, rules)) for claim in (*claims[:4], *twice)] == [
        True
    ] * 4 + [False] * 2


def test_an_audit_that_picks_no_claim_takes_one():
    """Its votes make the next beacon, which nobody may know in advance."""
    rules = replace(RULES, life=8, claims=2, audit=0.0)
    proven = Standing()
    proven.claims["valid"] = 2
    table = Table(8, dict.fromkeys(PEERS[:4], proven), {})
    entries = [entry(peer, 5) for peer in (*PEERS[:4], "stranger")]
    claims = [claim_of(peer) for peer in (*PEERS[:4], "stranger")]
    for number in range(4):  # another beacon, another claim
        salts_from = {9: replace(one(number), round=9)}
        found = made([*entries, *claims], table, rules, electorates=salts_from).claims
        assert len(found) == 1
        assert found < {claim.id for claim in claims[:4]}
    assert made([*entries, claims[-1]], table, rules).claims == {claims[-1].id}
    assert made([*entries, claim_of("never-entered")], table, rules).claims == frozenset()


def test_void_round_draws_nobody():
    """A void round draws nobody and its root is its own."""
    assert void("run", 7).operators == {}
    assert first_draws(claim_of("a", 7), {7: void("run", 7)}, RULES) == ()
    assert (
        len(
            {
                root(void("run", 7)),
                root(void("run", 8)),
                root(one(0)),
                root(one(1)),
                root(replace(one(0), claims=None)),
            }
        )
        == 5
    )


# -- forgetting ------------------------------------------------------------------------------------

BEHAVIOUR = st.sampled_from(["valid", "invalid", "absent", "withheld"])
MANY = tuple(f"p{number:02}" for number in range(12))
EVENT = st.tuples(
    st.integers(4, 23), st.sampled_from(MANY), st.tuples(BEHAVIOUR, BEHAVIOUR, BEHAVIOUR)
)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(EVENT, max_size=14),
    st.lists(st.integers(0, 26), min_size=1, max_size=3),
    st.sampled_from([1, 3, 64]),
)
def test_reckoning_with_pruning_equals_reckoning_without(events, cuts, ban):
    story, prices = Story(MANY), ScoreRules(ban=ban)
    for slot, (round, peer, behaviours) in enumerate(events):
        claim = story.claim(peer, round, slot, behaviours)
        if slot % 3 == 0:
            story.dispute(MANY[-1], claim, "valid", round=round + 2)
    whole, ledger, base = Ledger(story.records), Ledger(story.records), EMPTY
    for cut in sorted(cuts):
        base = compute_scores(ledger, story.electorates, story.rules, prices, cut, base).base()
        ledger = ledger.newer(cut + 1, RULES.life)
    for round in range(max(cuts), 32):
        pruned = compute_scores(ledger, story.electorates, story.rules, prices, round, base)
        full = compute_scores(whole, story.electorates, story.rules, prices, round)
        assert pruned.standings == full.standings
        assert pruned.digest == full.digest
        assert pruned.rulings == {
            key: ruling for key, ruling in full.rulings.items() if ruling.claim.round > max(cuts)
        }


CLAIMS = 10**6
SHARES = st.floats(0, 1)


@pytest.mark.parametrize(
    ("n", "collude", "expected"), [(3, 0.0, 2.98e-4), (3, 0.1, 0.0330), (7, 0.1, 0.00376)]
)
def test_the_figures_of_the_design(n, collude, expected):
    assert vote(n, collude).wrong_accepted == pytest.approx(expected, rel=0.02)
    assert vote(n, collude).honest_rejected == pytest.approx(expected, rel=0.02)


@settings(deadline=None)
@given(st.sampled_from([1, 3, 5]), SHARES, SHARES, SHARES, SHARES)
def test_against_enumeration_of_all_seats(n, collude, lazy, miss, alarm):
    lazy *= 1 - collude
    works = 1 - collude - lazy
    accept = {"colluding": 1.0, "lazy": 1.0, "works": miss}
    reject = {"colluding": 1.0, "lazy": 0.0, "works": alarm}
    share = {"colluding": collude, "lazy": lazy, "works": works}

    def majority(chance):
        total = 0.0
        for kinds in itertools.product(share, repeat=n):
            for votes in itertools.product((0, 1), repeat=n):
                if sum(votes) > n // 2:
                    total += math.prod(
                        share[kind] * (chance[kind] if voted else 1 - chance[kind])
                        for kind, voted in zip(kinds, votes, strict=True)
                    )
        return total

    odds = vote(n, collude, lazy=lazy, miss=miss, alarm=alarm)
    assert odds.wrong_accepted == pytest.approx(majority(accept), abs=1e-9)
    assert odds.honest_rejected == pytest.approx(majority(reject), abs=1e-9)


@settings(deadline=None)
@given(st.integers(1, 9), SHARES, st.integers(9, 60))
def test_a_draw_is_a_distribution_with_the_right_mean(n, share, population):
    for chances, mean in (
        (drawn(n, share), n * share),
        (drawn(n, share, population), n * round(share * population) / population),
    ):
        assert sum(chances) == pytest.approx(1)
        assert sum(c * chance for c, chance in enumerate(chances)) == pytest.approx(mean, abs=1e-9)


def within_three_errors(count, chance):
    return abs(count / CLAIMS - chance) <= 3 * math.sqrt(chance * (1 - chance) / CLAIMS) + 1e-12


@pytest.mark.parametrize("n", [3, 7])
def test_a_million_claims_in_a_small_population_with_lazy_peers(n):
    population, colluding, lazy = 20, 4, 5
    random = torch.Generator().manual_seed(n)
    # The n smallest of as many random numbers as there are peers are a draw without replacement.
    accepted = rejected = 0
    for _ in range(10):
        seats = (
            torch.rand(CLAIMS // 10, population, generator=random).topk(n, largest=False).indices
        )
        slips = torch.rand(CLAIMS // 10, n, generator=random) < 0.01
        hostile, idle = seats < colluding, (seats >= colluding) & (seats < colluding + lazy)
        accepted += int(((hostile | idle | slips).sum(1) > n // 2).sum())
        rejected += int(((hostile | (slips & ~idle)).sum(1) > n // 2).sum())
    odds = vote(n, colluding / population, lazy=lazy / population, population=population)
    assert within_three_errors(accepted, odds.wrong_accepted)
    assert within_three_errors(rejected, odds.honest_rejected)


def test_when_cheating_does_not_pay():
    rate = least_audit(gain=1.0, penalty=60.0, detected=0.99)
    assert rate * 60.0 * 0.99 == pytest.approx(1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: vote(4),
        lambda: vote(3, 1.1),
        lambda: vote(3, 0.6, lazy=0.6),
        lambda: vote(3, miss=-0.1),
        lambda: vote(5, population=4),
        lambda: drawn(0, 0.5),
        lambda: least_audit(1, 0, 1),
    ],
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=r"\w"):
        wrong()
