import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim import candidates, groups, order, partner_of, weighted_mean
from shoal.optim.exchange.base import counted_weights

PEERS = st.lists(st.text(max_size=8), unique=True, min_size=1, max_size=12)
SEEDS = st.integers(0, 2**63)
ROUNDS = st.integers(0, 10**9)


@given(SEEDS, ROUNDS, PEERS, st.randoms())
def test_both_sides_name_each_other_whatever_order_they_see(seed, round, peers, random):
    other_order = random.sample(peers, len(peers))
    alone = 0
    for me in peers:
        partner = partner_of(seed, round, me, [peer for peer in other_order if peer != me])
        if partner is None:
            alone += 1
        else:
            assert partner != me
            assert partner_of(seed, round, partner, peers) == me
    assert alone == len(peers) % 2


@given(SEEDS, ROUNDS, PEERS, st.integers(1, 5), st.randoms())
def test_everyone_is_in_exactly_one_group(seed, round, peers, size, random):
    found = groups(seed, round, peers, size)
    assert found == groups(seed, round, random.sample(peers, len(peers)) + peers, size)
    assert sorted(itertools.chain(*found)) == sorted(peers)
    assert all(len(group) == size for group in found[:-1])
    assert 1 <= len(found[-1]) <= size


@given(SEEDS, ROUNDS, PEERS)
def test_candidates_are_everyone_else_mate_first_then_onwards_from_me(seed, round, peers):
    ordered = order(seed, round, peers)
    assert sorted(ordered) == sorted(peers)
    for here, me in enumerate(ordered):
        found = candidates(seed, round, me, peers)
        assert sorted([*found, me]) == sorted(peers)
        partner = partner_of(seed, round, me, peers)
        onwards = [peer for peer in ordered[here + 1 :] + ordered[:here] if peer != partner]
        assert found == ([] if partner is None else [partner]) + onwards


@given(SEEDS, ROUNDS, PEERS, st.data())
def test_a_peer_that_sees_fewer_others_keeps_their_order(seed, round, peers, data):
    me = data.draw(st.sampled_from(peers))
    seen = data.draw(st.lists(st.sampled_from(peers), unique=True))
    full, partial = order(seed, round, peers), order(seed, round, {*seen, me})
    assert partial == [peer for peer in full if peer in {*seen, me}]


def test_the_order_is_by_the_documented_hash_so_that_other_implementations_can_agree():
    ordered = sorted("abcd", key=lambda peer: hashlib.sha256(f"shoal/pairing/1:7:3:{peer}".encode()).digest())
    assert order(7, 3, "dcba") == ordered
    assert groups(7, 3, "dcba") == [tuple(ordered[:2]), tuple(ordered[2:])]


def test_a_group_of_nobody_is_refused():
    with pytest.raises(ValueError, match="at least one peer, got size 0"):
        groups(0, 0, ["a"], 0)


def test_partners_are_uniform_and_fresh_each_round():
    peers = [f"peer-{index}" for index in range(8)]
    rounds = 2100
    met: dict[str, list[str]] = {peer: [] for peer in peers}
    for round in range(rounds):
        for a, b in groups(5, round, peers):
            met[a].append(b)
            met[b].append(a)
    for me in peers:
        assert len(met[me]) == rounds
        counts = Counter(met[me])
        expected = rounds / 7
        chi_square = sum((counts[peer] - expected) ** 2 / expected for peer in peers if peer != me)
        assert chi_square < 22.46  # 6 degrees of freedom: one in a thousand is above
        repeats = sum(a == b for a, b in itertools.pairwise(met[me]))
        assert abs(repeats - expected) < 4 * np.sqrt(expected)  # the last partner is as likely as any other


CONTRIBUTIONS = st.lists(
    st.tuples(st.floats(2**-6, 100, width=32), st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=3, max_size=3)),
    min_size=1,
    max_size=5,
)


def mean_of(contributions):
    return weighted_mean([(peer, weight, [torch.tensor(v[:2]), torch.tensor(v[2])]) for peer, weight, v in contributions])


@given(CONTRIBUTIONS, st.randoms())
def test_the_mean_has_the_same_bits_whatever_the_order_of_arguments(given, random):
    named = [(f"peer-{index}", weight, values) for index, (weight, values) in enumerate(given)]
    first, second = mean_of(named), mean_of(random.sample(named, len(named)))
    assert first.members == second.members == tuple(sorted(peer for peer, _, _ in named))
    assert first.weight == second.weight
    assert all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))
    flat = torch.cat([t.reshape(-1) for t in first.tensors]).double().numpy()
    weights, _ = counted_weights([weight for _, weight, _ in named])
    expected = np.average([values for _, _, values in named], axis=0, weights=weights)
    scale = np.abs([values for _, _, values in named]).max() + 1e-30
    assert np.abs(flat - expected).max() <= 1e-6 * scale


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-100), min_size=2, max_size=2))
def test_the_mean_of_an_equal_pair_is_correctly_rounded(pair):
    mean = weighted_mean([("b", 1.0, [torch.tensor([pair[0]])]), ("a", 1.0, [torch.tensor([pair[1]])])])
    assert mean.tensors[0].item() == np.float32((np.float64(pair[0]) + np.float64(pair[1])) / 2)
    assert mean.members == ("a", "b")
