"""Detection of differing weights, by sketches in records of the same round, and who gives way."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.outer.sketch import NUMBERS, sketch
from shoal.swarm.identity import Identity
from shoal.swarm.state.drift import DOUBTFUL_ROUNDS, DriftDetector, SplitDecision
from shoal.swarm.wire.envelope import SKETCH
from tests.support.records import member_of

MODEL = "0" * 64
PEERS = sorted(Identity.ephemeral().peer_id for _ in range(6))


def member(peer, newest, **changes):
    return member_of(peer, **{"issued": 1.0, "sketch": newest, **changes})


def at(place, round):
    """The sketch of weights that move by 1 a round, from ``place``."""
    return (place, float(round), 0.0, 0.0)


def walk(rounds, places, most=16):
    """{peer: drift} after ``rounds`` rounds in which each is at its place."""
    made = {peer: DriftDetector(peer, MODEL, most) for peer in places}
    for peer, place in places.items():
        for round in range(rounds):
            made[peer].finished(round, 0, at(place, round))
    return made


def records(drifts, **changes):
    return {peer: member(peer, drift.newest, **changes) for peer, drift in drifts.items()}


def yielding(drifts):
    there = records(drifts)
    return {
        peer: found
        for peer, drift in drifts.items()
        if (found := drift.split(there, {}, PEERS)) is not None
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sketches_of_equal_weights_are_equal_and_of_others_far(dtype):
    random = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(33, 7, generator=random).to(dtype),
        torch.randn(5, generator=random).to(dtype),
    ]
    moved = [
        tensor + 0.01 * torch.randn(tensor.shape, generator=random).to(dtype) for tensor in weights
    ]
    length = (
        sum(
            (a.double() - b.double()).square().sum().item()
            for a, b in zip(weights, moved, strict=True)
        )
        ** 0.5
    )
    assert len(sketch(weights)) == NUMBERS == SKETCH
    assert sketch(weights) == sketch([tensor.clone() for tensor in weights])
    assert 0.2 * length < math.dist(sketch(weights), sketch(moved)) < 3 * length


def test_a_swarm_that_is_together_does_nothing():
    assert yielding(walk(5, dict.fromkeys(PEERS, 0.0))) == {}
    assert (
        yielding(walk(5, {peer: 0.01 * place for place, peer in enumerate(PEERS)})) == {}
    )  # rounding


def test_the_smaller_part_gives_way_to_the_larger():
    drifts = walk(5, {peer: 3.0 * (place in (0, 4)) for place, peer in enumerate(PEERS)})
    assert yielding(drifts) == {
        peer: SplitDecision(frozenset({0}), frozenset(PEERS[place] for place in (1, 2, 3, 5)))
        for peer in (PEERS[0], PEERS[4])
    }


def test_equal_parts_keep_the_lowest_id():
    """Of two equal parts that with the lowest peer id stays."""
    drifts = walk(5, {peer: 3.0 * (place in (0, 4, 5)) for place, peer in enumerate(PEERS)})
    assert yielding(drifts).keys() == {PEERS[1], PEERS[2], PEERS[3]}


@given(st.lists(st.sampled_from([0.0, 5.0]), min_size=2, max_size=6))
def test_one_part_gives_way_and_all_unite(places):
    """Of two parts one gives way and then all are together."""
    given_places = dict(zip(PEERS, places, strict=False))
    drifts = walk(4, given_places)
    found = yielding(drifts)
    assert len({given_places[peer] for peer in found}) <= 1
    for peer, split in found.items():
        (place,) = {given_places[source] for source in split.sources}
        drifts[peer].moved()
        given_places = given_places | {peer: place}
    for round in range(4, 8):
        for peer, place in given_places.items():
            drifts[peer].finished(round, 0, at(place, round))
    assert len(set(given_places.values())) == 1
    assert yielding(drifts) == {}


def test_record_of_a_missed_round_says_nothing():
    """A record of a round that this node was not in says nothing."""
    drift, other = walk(3, {PEERS[1]: 0.0})[PEERS[1]], walk(9, {PEERS[0]: 3.0})[PEERS[0]]
    assert drift.split(records({PEERS[0]: other}), {}, PEERS) is None


def test_incomplete_view_waits_a_little():
    """While it cannot tell of everybody a node waits a little."""
    drifts = walk(3, dict.fromkeys(PEERS[:2], 3.0) | {PEERS[2]: 0.0})
    there = records(drifts) | {PEERS[3]: member(PEERS[3], None)}
    found = [drifts[PEERS[2]].split(there, {}, PEERS) for _ in range(DOUBTFUL_ROUNDS)]
    assert found[:-1] == [None] * (DOUBTFUL_ROUNDS - 1)
    assert found[-1].sources == frozenset(PEERS[:2])


@pytest.mark.parametrize("changes", [{"model": "1" * 64}, {"state": "waiting"}])
def test_who_does_not_train_the_same_is_not_compared(changes):
    drifts = walk(3, {PEERS[0]: 3.0, PEERS[1]: 0.0})
    assert drifts[PEERS[1]].split(records(drifts, **changes), {}, PEERS) is None


def test_where_the_rounds_have_several_groups_weights_differ_by_design():
    drifts = walk(3, {PEERS[0]: 3.0, PEERS[1]: 3.0, PEERS[2]: 0.0}, most=2)
    assert yielding(drifts) == {}


def test_weights_that_are_not_finite_say_nothing():
    drift = walk(3, {PEERS[0]: 0.0})[PEERS[0]]
    drift.finished(3, 0, (float("nan"), 0.0, 0.0, 0.0))
    assert drift.newest is None
    drift.finished(4, 0, at(0.0, 4))
    assert drift.newest == (4, 0, at(0.0, 4))


def test_unknown_round_movement_judges_nobody():
    """Before it knows how far a round moves it judges nobody."""
    assert yielding(walk(1, {PEERS[0]: 3.0, PEERS[1]: 0.0})) == {}


def test_what_the_group_shows_counts_where_no_record_has_come():
    """Mutants: only records are compared, so that quick rounds end before; the side that stays
    learns nothing.
    """
    drifts = walk(3, {PEERS[0]: 0.0, PEERS[1]: 0.0, PEERS[2]: 3.0})
    late = {peer: member(peer, None, state="waiting") for peer in PEERS[:3]}
    shown = {peer: drift.newest for peer, drift in drifts.items()}
    found = {
        peer: drift.split(late, {p: shown[p] for p in shown if p != peer}, PEERS)
        for peer, drift in drifts.items()
    }
    assert found == {
        PEERS[0]: None,
        PEERS[1]: None,
        PEERS[2]: SplitDecision(frozenset({0}), frozenset(PEERS[:2])),
    }
    assert [drifts[peer].apart for peer in PEERS[:3]] == [{PEERS[2]}, {PEERS[2]}, set(PEERS[:2])]


def test_what_a_group_member_shows_is_newer_than_its_record():
    drift, other = walk(3, {PEERS[1]: 0.0})[PEERS[1]], walk(3, {PEERS[0]: 3.0})[PEERS[0]]
    there = records({PEERS[0]: other})
    assert (
        drift.split(there, {PEERS[0]: drift.newest}, PEERS) is None
    )  # it has taken over this node's weights since
    assert drift.apart == set()
    assert (
        drift.split(there, {PEERS[0]: None}, PEERS) is None
    )  # it knows that its own have diverged
    assert drift.apart == set()


def test_records_of_peers_that_it_never_met_are_no_majority():
    """The fault: keys are free, and as many made-up records as members sent an honest node to
    whoever made them, for weights.
    """
    drifts = walk(3, dict.fromkeys(PEERS[:3], 0.0) | dict.fromkeys(PEERS[3:], 3.0))
    there = records(drifts)
    for peer in PEERS[:3]:
        assert [drifts[peer].split(there, {}, PEERS[:3]) for _ in range(DOUBTFUL_ROUNDS)] == [
            None
        ] * DOUBTFUL_ROUNDS
        assert drifts[peer].apart == set()
    crowd = there | {Identity.ephemeral().peer_id: member(PEERS[0], None) for _ in range(100)}
    drifts[PEERS[2]].finished(3, 0, at(3.0, 3))
    for peer in PEERS[:2]:
        drifts[peer].finished(3, 0, at(0.0, 3))
    found = drifts[PEERS[2]].split(
        crowd | records({peer: drifts[peer] for peer in PEERS[:2]}), {}, PEERS[:2]
    )
    assert found is not None
    assert found.sources == frozenset(PEERS[:2])


def test_excluding_leader_moves_nobody():
    """Mutant: a group of one liar counts for the swarm, whose other members have only just joined
    by their records.
    """
    drift = walk(3, {PEERS[1]: 0.0})[PEERS[1]]
    there = {peer: member(peer, None, state="waiting") for peer in PEERS}
    lie = {PEERS[0]: (2, 0, at(9.0, 2))}
    assert [drift.split(there, lie, PEERS) for _ in range(DOUBTFUL_ROUNDS - 1)] == [None] * (
        DOUBTFUL_ROUNDS - 1
    )
    assert drift.apart == set()
    honest = dict.fromkeys(PEERS[2:], drift.newest)
    for _ in range(DOUBTFUL_ROUNDS):  # a liar among honest ones is only named
        assert drift.split(there, lie | honest, PEERS) is None
        assert drift.apart == {PEERS[0]}
