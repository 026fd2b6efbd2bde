"""A chain of three: who is in it, what its middle takes, and what that keeps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim import RoundKey, Simulation, partner_of, partners_of, weighted_mean
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.codecs.mod4 import Mod4Codec
from shoal.optim.codecs.registry import codec_named
from shoal.optim.exchange.averaging import mean_of, middle_mean
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.pairing import chains
from shoal.optim.exchange.update_screen import TRUSTING


@given(st.integers(0, 99), st.integers(0, 99), st.integers(2, 12))
def test_each_partner_names_the_other(seed, round, count):
    """One partner each, and two for one peer if the number is odd."""
    peers = [f"peer-{number}" for number in range(count)]
    partners = {me: partners_of(seed, round, me, peers) for me in peers}
    for me, found in partners.items():
        assert me not in found
        assert all(me in partners[other] for other in found)
        assert partner_of(seed, round, me, peers) in (*found[:1], None)
    assert sorted(map(len, partners.values())) == [1] * (count - count % 2) + [2] * (count % 2)


def middle(own, one, other, unweighted_count=0):
    """What the middle takes whose three peers hold 0, 1 and 10 with these weights."""

    def held(value):
        return [torch.full((2,), value) for _ in range(2)]

    means = []
    for name, weight, value in (("a", one, 1.0), ("c", other, 10.0)):
        pair = [("b", own, held(0.0)), (name, weight, held(value))]
        means.append(weighted_mean(pair, unweighted_count))
    return middle_mean(FLOAT32, held(0.0), own, means, unweighted_count)


@pytest.mark.parametrize(
    ("weights", "expected", "counted", "weight"),
    [
        ((1.0, 1.0, 1.0), 5.5, 3, 3.0),
        ((2.0, 1.0, 1.0), 1 / 3 + 10 / 3, 3, 4.0),
        ((0.0, 1.0, 1.0), 5.5, 2, 2.0),  # a newcomer's own weights do not count
        ((1.0, 0.0, 1.0), 5.0, 2, 2.0),
        ((1.0, 3.0, 3.0), 5.5, 3, 7.0),  # .75 and .75 of the ways would lead beyond both
        ((0.0, 0.0, 0.0), 5.5, 3, 3.0),
    ],
)
def test_the_middle_moves_by_both_and_not_beyond(weights, expected, counted, weight):
    mean = middle(*weights)
    assert mean.tensors[0].tolist() == pytest.approx([expected] * 2)
    assert (mean.counted, mean.weight, mean.members) == (counted, weight, ("a", "b", "c"))


def test_tensors_with_a_plain_mean_move_whatever_the_weights():
    plain, weighted = middle(2.0, 1.0, 1.0, unweighted_count=1).tensors
    assert plain.tolist() == [5.5, 5.5]
    assert weighted.tolist() == pytest.approx([11 / 3] * 2)


def test_what_senders_alone_sent_does_not_count_twice():
    codec = codec_named("topk2-senders")
    own = torch.zeros(128)
    own[5] = 4.0
    theirs = torch.zeros(128)
    theirs[3] = 4.0
    means = []
    for name in ("a", "c"):
        pair = [("b", 1.0, [own.clone()]), (name, 1.0, [theirs.clone()])]
        means.append(mean_of(TRUSTING, codec, "b", 0, pair))
    (taken,) = middle_mean(codec, [own], 1.0, means).tensors
    assert (taken[3], taken[5]) == (4.0, 4.0)


@pytest.mark.parametrize("count", [3, 5])
def test_mod4_keeps_the_mean_of_an_odd_number(count):
    """Each exchange moves its two peers by opposite amounts, the middle by the sum."""
    before = {f"p{number}": 0.01 * torch.randn(640) for number in range(count)}

    def peer(exchange):
        held = before[exchange.peer]
        codec = Mod4Codec()
        for round in range(6):
            codec.expect(f"run:{round}", [held])
            mean = exchange.start(
                Contribution(RoundKey("run", round), [held], codec=codec)
            ).result()
            codec.accepted()
            assert len(mean.members) > 1
            held = mean.tensors[0]
        return held

    after = Simulation(list(before), seed=3).run(peer)
    torch.testing.assert_close(
        sum(after.values()), sum(before.values()), rtol=0, atol=count * 2.0**-28
    )
    spread = [torch.stack(list(held.values())).std(0).mean() for held in (before, after)]
    assert spread[1] < spread[0] / 4


def test_a_chain_is_the_last_three_of_the_order():
    peers = list("abcdefg")
    found = chains(5, 2, peers)
    assert [len(chain) for chain in found] == [2, 2, 3]
    assert partners_of(5, 2, found[-1][1], peers) == (found[-1][0], found[-1][2])
    assert partners_of(5, 2, "a", []) == ()
