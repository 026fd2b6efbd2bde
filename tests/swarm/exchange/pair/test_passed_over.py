"""The choice of partners: the free ones find each other where some are dead; who spends the rounds
of others is passed over, for a while."""

import copy
import hashlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim import FLOAT32, RoundKey
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.pairing import chains, groups, partner_of, partners_of
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.pair import calls
from shoal.swarm.exchange.pair import exchange as pair_exchange
from shoal.swarm.exchange.pair.calls import make_offer
from shoal.swarm.exchange.pair.selector import PairSelector
from shoal.swarm.exchange.pair.transfer import PairTransfer
from shoal.swarm.exchange.passed_over import BROKEN, PassedOver
from shoal.swarm.exchange.terms import FORGOTTEN, REMEMBERED, TERMS
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from tests.support.fake_network import paired
from tests.support.partner_selection import MODEL, SEED, Directory, directory, selector


@given(st.integers(2, 12), st.integers(0, 50), st.data())
def test_those_left_over_name_each_other(count, round, data):
    here = directory(count)
    dead = data.draw(st.sets(st.sampled_from(sorted(here))))
    alone = {}
    for me in sorted(here.keys() - dead):
        node = selector(me, here)
        assert node.left_over(round) is None
        assert node.of(round)[0] == partners_of(SEED, round, me, here)[0]
        for peer in dead:
            node.failed(peer)
        partner, order = node.of(round)
        if partner in dead:
            alone[me] = set(order)
            assert partner not in order
        else:
            assert order[0] == partner
    odd = {me for me in here.keys() - dead if partner_of(SEED, round, me, here) is None}
    for me, others in alone.items():
        assert others == (alone.keys() | odd) - {me}


@pytest.mark.parametrize("sign", ["called", "record", "gone"])
def test_a_sign_of_life_ends_it(sign):
    here = directory(2)
    node = selector("peer-0", here)
    node.failed("peer-1")
    assert node.of(0) == ("peer-1", [])
    if sign == "called":
        node.alive("peer-1")
    elif sign == "record":
        here.see("peer-1", issued=2.0)
    else:
        record = here.pop("peer-1")
        assert node.of(0) == (None, [])
        here["peer-1"] = record
    assert node.of(0) == ("peer-1", ["peer-1"])


def test_leaver_has_a_partner_until_its_last_round():
    """Its last record states the round that would have been its next."""
    here, gone = directory(2), Directory()
    gone.see("peer-2", round=5)
    node = PairSelector(
        PeerContext(None, SimpleNamespace(peer_id="peer-0"), "swarm", MODEL, SEED, lambda: here),
        lambda: gone,
    )
    three = {"peer-0", "peer-1", "peer-2"}
    for round in range(10):
        peers = three if round < 5 else three - {"peer-2"}
        assert node.of(round)[0] == partners_of(SEED, round, "peer-0", peers)[0], round


def test_who_is_not_in_the_directory_is_not_remembered():
    node = selector("peer-0", directory(1))
    node.failed("peer-9")
    assert node._unreached == {}


SWARM = "a" * 52
ROUNDS = 29


def damaged(patch, exchange):
    """Its payload does not match the digest that it announced."""

    def lying(context, contribution, nonce):
        if context is exchange._context:
            payload = copy.copy(contribution.payload)
            payload.sha256 = hashlib.sha256(payload.sha256).digest()
            contribution = replace(contribution, payload=payload)
        return make_offer(context, contribution, nonce)

    patch.setattr(calls, "make_offer", lying)


def busy(patch, exchange):
    """It is never free."""

    async def judge(stream, offer):
        from shoal.swarm.wire.messages import Answer

        return None, Answer(verdict="busy", round=offer.round), None

    async def call(pairing, peer, seconds):
        return None

    patch.setattr(exchange.answerer, "_judge", judge)
    patch.setattr(exchange.caller, "call", call)


def hangs_up(patch, exchange):
    """It ends the stream once it is to send its weights."""

    async def run(self, stream, attempt, theirs, **options):
        if self is exchange.state.transfers:
            stream.abort()
            return None
        return await right(self, stream, attempt, theirs, **options)

    right = PairTransfer.run
    patch.setattr(PairTransfer, "run", run)


def not_a_number(patch, exchange):
    """What it sends holds NaN."""


def swarm(network, count):
    return paired(network, count, ExchangeTimeouts(2.5, 5.0, 20.0), SEED)


def trained(exchanges, rounds, values, first=0):
    """All rounds from ``first`` on, one after another; for each the members of every exchange's
    mean.
    """
    met = []
    for number in range(first, first + rounds):
        handles = [
            exchange.start(
                Contribution(RoundKey(SWARM, number), [torch.full((4,), value)], 1.0, FLOAT32)
            )
            for exchange, value in zip(exchanges, values, strict=True)
        ]
        met.append(
            [() if (mean := handle.result()) is None else mean.members for handle in handles]
        )
    return met


BY_THE_CLOCK = (
    "on a busy machine a peer falls out of the step that this test keeps for all, and meets nobody "
    "for some rounds"
)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "attack",
    [
        damaged,
        not_a_number,
        hangs_up,
        pytest.param(busy, marks=pytest.mark.slow(reason=BY_THE_CLOCK)),
    ],
)
def test_wasteful_peer_is_found_and_never_averaged(network, monkeypatch, attack):
    """By turns they would meet in a third of the rounds."""
    monkeypatch.setattr(
        pair_exchange, "WORTH", 1e9
    )  # these rounds are too short to be worth a wait
    monkeypatch.setattr(
        pair_exchange, "LINGER", 0.04
    )  # of a wait that leaves a busy machine its time
    monkeypatch.setattr(pair_exchange, "SEARCH", 0.06)
    exchanges = swarm(network, 3)
    attack(monkeypatch, exchanges[2])
    met = trained(exchanges, ROUNDS, [1.0, 3.0, float("nan") if attack is not_a_number else 1.0])
    assert all(
        len(mine) in (0, 2) and (mine == theirs or not (mine and theirs)) for mine, theirs, _ in met
    )
    assert not any(hostile for *_, hostile in met)
    hostile = exchanges[2]._context.me
    assert all(hostile in exchange._selector.passed.misses for exchange in exchanges[:2])
    assert sum(bool(mine) for mine, _, _ in met) >= ROUNDS / 3


def test_three_honest_peers_are_all_met_in_turn(network):
    """Each round's chain is the one that everybody computes, also where it is the same twice: who
    was met is not passed over.
    """
    exchanges = swarm(network, 3)
    peers = [exchange._context.me for exchange in exchanges]
    chain = lambda number: chains(SEED, number, peers)[0]  # noqa: E731
    first = next(
        number for number in itertools.count(0, TERMS[0]) if chain(number) == chain(number + 1)
    )  # the keys are random
    for number, members in enumerate(trained(exchanges, 12, [1.0, 2.0, 3.0], first), first):
        one, middle, other = chain(number)
        whole = {one: {one, middle}, middle: {one, middle, other}, other: {middle, other}}
        assert [set(mine) for mine in members] == [whole[peer] for peer in peers]


def test_backoff_grows_and_one_exchange_ends_it():
    """It is passed over ever longer and comes back with one exchange."""
    node = selector("peer-0", directory(2))
    for round, back in ((0, 8), (8, 32), (32, 64), (70, 96)):
        node.passed.met("peer-2", round)
        node.passed.missed("peer-1", round)
        assert [node.takes("peer-1", at) for at in (round, round + 1, back - 1, back)] == [
            False,
            False,
            False,
            True,
        ]
    node.passed.met("peer-1", 0)
    assert node.takes("peer-1", 96)
    node.passed.missed("peer-1", 96)
    assert node.takes("peer-1", 96 + TERMS[0])


@given(
    st.lists(st.integers(0, 60), max_size=6),
    st.lists(st.integers(0, 60), max_size=6),
    st.sampled_from([1, 4]),
)
def test_mutual_backoff_ends_in_the_same_round(mine, theirs, fragments):
    """With terms from each one's own failure they came back by turns, each turned away by the
    other: for good (seed 71291).
    """
    nodes = [
        PairSelector(selector(f"peer-{number}", directory(2))._context, fragments=fragments)
        for number in (0, 1)
    ]
    for node, other, failures in zip(nodes, ("peer-1", "peer-0"), (mine, theirs), strict=True):
        for round in sorted(failures):
            node.passed.missed(other, round)
    for round in range(61, 61 + 2 * TERMS[BROKEN - 1] * fragments):
        takes = [
            node.takes(other, round)
            for node, other in zip(nodes, ("peer-1", "peer-0"), strict=True)
        ]
        if all(takes):
            return
        for number in (0, 1):
            if takes[number]:  # it calls in vain
                nodes[number].passed.missed(f"peer-{1 - number}", round)
    pytest.fail("they never meet again")


def test_repeated_cost_lengthens_the_backoff():
    """The first time this node itself may have slept: two that are all there are did not meet for
    128 rounds.
    """
    for over, terms in (
        (1, (8, 32, 128, 512, 1024)),
        (100, (8, 128, 512, 1024)),
        (500, (8, 512, 1024)),
    ):
        passed, round = PassedOver(1), 0
        for back in terms:
            passed.missed("peer", round, over)
            assert [passed.at("peer", back - 1), passed.at("peer", back)] == [True, False]
            round = back


def test_what_breaks_off_while_nobody_is_met_counts_once():
    """It may be this node's own line: two that lost each other for a minute did not meet for
    ten.
    """
    passed = PassedOver(1)
    for round in (0, 3, 6):
        passed.missed("peer", round)
    assert (passed.at("peer", 7), passed.at("peer", 8)) == (True, False)
    passed.missed("peer", 8)
    assert (passed.at("peer", 15), passed.at("peer", 16)) == (True, False)
    passed.met("other", 9)
    passed.missed("peer", 16)
    assert (passed.at("peer", 31), passed.at("peer", 32)) == (True, False)


def test_all_backed_off_retries_single_failures():
    """All others passed over a node whose line had been cut, and it them, for as long as the term
    went, though all was whole.
    """
    here = directory(4)
    node = selector("peer-0", here)
    others = sorted(here.keys() - {"peer-0"})
    partner = partner_of(SEED, 1, "peer-0", here)
    for count, peer in enumerate(others, 1):
        node.passed.missed(peer, 0, 1)
        assert node.takes(peer, 1) == (count == len(others))
    assert node.of(1)[1][0] == partner
    assert all(node.takes(peer, 1) for peer in others)
    node.passed.missed(partner, 1, 1)
    assert not node.takes(partner, 2)
    assert [node.takes(peer, 2) for peer in others if peer != partner] == [True, True]


def test_backoff_does_not_hold_in_earlier_rounds():
    """Who was passed over is not in rounds to which this node went back."""
    passed = PassedOver(1)
    passed.missed("peer", 100, 1)
    assert [passed.at("peer", round) for round in (50, 100, 103, 104)] == [False, True, True, False]
    passed.met("other", 101)
    passed.missed("peer", 50)
    assert [passed.at("peer", round) for round in (50, 63, 64)] == [True, True, False]


def test_call_of_an_unreachable_peer_ends_its_term():
    """One that slept for a minute, or was killed and returned, was met again after eight rounds."""
    node = selector("peer-0", directory(3))
    partner = node.partner(0)
    node.failed(partner)
    node.tried(partner, 0)
    node.alive(partner)
    assert node.takes(partner, 1)
    node.failed(partner)
    node.tried(partner, 1)  # and calls in vain: from now on that is no sign
    node.alive(partner)
    assert [node.takes(partner, TERMS[1] - 1), node.takes(partner, TERMS[1])] == [False, True]


def test_call_of_a_peer_that_broke_off_ends_nothing():
    node = selector("peer-0", directory(3))
    node.ended("peer-1", 0, met=False)
    node.alive("peer-1")
    assert not node.takes("peer-1", 1)


def test_lone_node_prefers_training_alone_to_a_costly_peer():
    """Without anybody else a node trains on alone rather than with one that costs time."""
    node = selector("peer-0", directory(2))
    node.passed.missed("peer-1", 0, 1)
    node.passed.missed("peer-1", 1)
    assert node.of(1) == ("peer-1", [])
    assert node.of(TERMS[1]) == ("peer-1", ["peer-1"])


def test_failures_of_long_ago_are_forgotten():
    node = selector("peer-0", directory(2))
    for round in (0, 10, 20):
        node.passed.missed("peer-1", round)
    later = TERMS[BROKEN - 1] + FORGOTTEN
    node.passed.missed("peer-1", later)
    assert node.takes("peer-1", later + TERMS[0])


def test_no_more_peers_are_remembered_than_there_is_room_for():
    node = selector("peer-0", directory(2))
    for number in range(3 * REMEMBERED):
        node.passed.missed(f"peer-{number}", 0)
    assert len(node.passed.misses) == REMEMBERED


def test_a_peer_with_nobody_else_is_tried_all_the_same():
    node = selector("peer-0", directory(2))
    node.passed.missed("peer-1", 0)
    assert node.of(1) == ("peer-1", ["peer-1"])


@given(st.integers(3, 12), st.integers(0, 50), st.data())
def test_shared_failures_keep_the_other_pairs(count, round, data):
    """Who has seen the same failures agrees and the other pairs stay."""
    here = directory(count)
    second = {}
    hostile = data.draw(st.sets(st.sampled_from(sorted(here)), max_size=count - 1))
    partners = {}
    for me in sorted(here.keys() - hostile):
        node = selector(me, here)
        for peer in hostile:
            node.passed.missed(peer, round)
        partner, order = node.of(round)
        partners[me] = partner if partner not in hostile else None
        second[me] = node.second(round)
        usual = partner_of(SEED, round, me, here)
        if usual is not None and usual not in hostile:
            assert (partner, order[0]) == (usual, usual)
    for me, partner in partners.items():
        assert partner is None or me in (partners[partner], second[partner])
    assert sum(partner is None for partner in partners.values()) <= 1


def test_pairs_are_computed_by_all_members():
    """The order of pairs does not depend on who is passed over, so that views that differ disagree
    about few pairs.
    """
    here = directory(8)
    pairs = groups(SEED, 0, here)
    node = PairSelector(selector(pairs[0][0], here)._context)
    node.passed.missed(pairs[1][0], 0)
    assert node.of(0)[0] == pairs[0][1]


@pytest.mark.parametrize("hostile", [True, False])
def test_two_honest_peers_meet_nine_rounds_of_ten(hostile):
    """The choice of partners alone, of two honest peers and one that always breaks off (or never
    does).
    """
    share = []
    for seed in range(60):
        here = Directory()
        for number in range(3):
            here.see(f"{seed} {number}")
        a, b, bad = here
        nodes = {peer: selector(peer, here) for peer in (a, b)}
        met = []
        for round in range(ROUNDS):
            chosen = {peer: node.of(round)[0] for peer, node in nodes.items()}
            met.append(chosen[a] == b or chosen[b] == a)
            for peer, node in nodes.items():
                if chosen[peer] == bad and hostile:
                    node.passed.missed(bad, round)
                elif met[-1]:
                    node.passed.met(a if peer == b else b, round)
        share.append(sum(met[8:]) / len(met[8:]))
    assert (sum(share) / len(share) >= 0.85) == hostile
