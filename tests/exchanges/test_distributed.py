"""``Distributed`` beyond the guarantees of every exchange: training, failures, and their
warnings.
"""

import re
from pathlib import Path

import jobs
import pytest
import torch
import torch.distributed as dist

from shoal.optim import Distributed, Simulation
from shoal.optim.exchange.pairing import chains

JOBS = Path(jobs.__file__)


@pytest.mark.parametrize("codec", ["float32", "int8", "int8+matrices", "mod4"])
def test_training_in_pairs_ends_with_the_bits_of_the_simulation(ranks, codec):
    names = ["0", "1", "2", "3"]
    expected = Simulation(names, seed=5).run(
        lambda exchange: jobs.train(int(exchange.peer), exchange, "NoLoCo", codec=codec)
    )
    found = ranks(4).call(JOBS, "training", method="NoLoCo", size=2, codec=codec)
    assert found == [expected[name] for name in names]
    assert len({tuple(members) for rank in found for members in rank["members"]}) > 2


@pytest.mark.parametrize(("peers", "codec"), [(3, "float32"), (3, "mod4"), (5, "int8+matrices")])
def test_odd_number_in_pairs_equals_the_simulation(ranks, peers, codec):
    """The last three of a round are a chain: nobody is left over."""
    names = [str(number) for number in range(peers)]
    expected = Simulation(names, seed=5).run(
        lambda exchange: jobs.train(int(exchange.peer), exchange, "NoLoCo", codec=codec)
    )
    found = ranks(peers).call(JOBS, "training", method="NoLoCo", size=2, codec=codec)
    assert found == [expected[name] for name in names]
    assert all(len(members) in (2, 3) for rank in found for members in rank["members"])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_chain_goes_on_without_an_end(ranks, place):
    """The two that are left exchange if one of them is its middle."""
    (chain,) = chains(0, 0, ["0", "1", "2"])
    absent = int(chain[place])
    here = sorted({0, 1, 2} - {absent})
    found = ranks(3).call(JOBS, "chain_without", absent=absent)
    pair = [[sum(here) / 2], [str(rank) for rank in here]]
    expected = [pair if place != 1 and rank in here else None for rank in range(3)]
    assert found == expected


@pytest.mark.parametrize("shards", [1, 2])
def test_mod4_pairs_move_by_opposite_amounts(ranks, shards):
    """What one refuses counts on neither side, and shards are read shard by shard."""
    found = ranks(2 * shards).call(JOBS, "read_by_own_weights", shards=shards)
    for one, other in zip(found[:shards], found[shards:], strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert mine["members"] == theirs["members"] == ["0", "1"]
            assert mine["learnt"]
            assert theirs["learnt"]
            gains = torch.tensor([mine["gain"], theirs["gain"]])
            assert gains[0].abs().max() > 1e-3
            torch.testing.assert_close(
                gains[0], -gains[1], rtol=0, atol=1e-6
            )  # the rounding of a sum of float32
            assert not gains[:, :64].any()


def test_a_round_that_does_not_count_teaches_the_codec_nothing(ranks):
    for rounds in ranks(2).call(JOBS, "read_by_own_weights", fails_in=1):
        assert [one["learnt"] for one in rounds] == [True, False, True]
        assert ["members" in one for one in rounds] == [True, False, True]
        assert rounds[0]["rho"] == 1.5 != rounds[1]["rho"] == rounds[2]["rho"]


def test_training_with_everybody_equals_the_simulation(ranks):
    names = ["0", "1", "2", "3"]
    expected = Simulation(names, size=4).run(
        lambda exchange: jobs.train(int(exchange.peer), exchange, "DiLoCo")
    )
    found = ranks(4).call(JOBS, "training", method="DiLoCo", size=0)
    for rank, one in enumerate(found):
        assert one["members"] == [names] * 4
        assert one["slow"] == found[0]["slow"]
        for a, b in zip(one["slow"], expected[str(rank)]["slow"], strict=True):
            assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"codecs": ["float32", "float16", "float16"]},
            r"bytes of float\d\d and .* bytes of "
            r"float\d\d; all must be set up alike",
        ),
        ({"values": [[1.0, 2.0], [1.0], [1.0]]}, "peers sent 1 tensors of shapes"),
    ],
)
def test_misfit_is_no_mean_for_all(ranks, options, reason):
    """What does not fit is no mean for all and one sentence."""
    found = ranks(3).call(JOBS, "one_round", **{"values": [[1.0]] * 3, **options})
    for rank in found:
        assert (rank["mean"], rank["next"]) == (None, ["0", "1", "2"])
        (sentence,) = rank["logged"]
        assert re.search(f"{reason}|another rank has given it up", sentence)
    assert any(re.search(reason, rank["logged"][0]) for rank in found)


def test_refused_by_the_codec_is_an_error_there(ranks):
    """What its codec refuses is an error there and nobody waits for it."""
    values = [[float("nan")], [1.0], [3.0]]
    first, *others = ranks(3).call(JOBS, "one_round", values=values, codecs=["int8"] * 3)
    assert "NaN" in first["error"]
    assert [rank["mean"] for rank in others] == [[[2.0], ["1", "2"]]] * 2


def test_non_finite_rank_is_left_out_alone(ranks):
    """A contribution that is no number leaves out its rank alone with one sentence."""
    first, *others = ranks(3).call(JOBS, "one_round", values=[[float("nan")], [1.0], [3.0]])
    assert [rank["mean"] for rank in others] == [[[2.0], ["1", "2"]]] * 2
    assert (first["mean"], first["next"]) == (None, ["0", "1", "2"])
    (sentence,) = first["logged"]
    assert "the own contribution holds NaN or infinity, so the others go on without it" in sentence
    assert not any(rank["logged"] for rank in others)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["DiLoCo", "StreamingDiLoCo", "CO2", "SparseLoCo"])
def test_late_rank_takes_weights_and_momentum(ranks, method):
    """One rank stalls in round 2 until the others have given it up; its progress alone must not
    last.
    """
    found = ranks(4).call(JOBS, "stalling", method=method)
    stalled = found[3]["members"]
    assert stalled[2] == []
    assert found[0]["members"][2] == ["0", "1", "2"]
    assert all(one["members"][-1] == ["0", "1", "2", "3"] for one in found)
    assert all(one["held"] == found[0]["held"] for one in found)


def test_a_codec_for_pairs_is_refused_where_everybody_averages(ranks):
    for rank in ranks(3).call(JOBS, "one_round", values=[[1.0]] * 3, codecs=["mod4"] * 3):
        assert rank["error"].startswith(
            "mod4 is for pairs that read each other by their own weights, not for groups"
        )


def test_a_weight_of_nothing_is_refused(ranks):
    found = ranks(3).call(JOBS, "one_round", values=[[1.0]] * 3, weights=[0.0] * 3)
    assert all("absent(key)" in rank["error"] for rank in found)


def test_a_peer_without_weight_is_not_waited_for(ranks):
    for number, rank in enumerate(ranks(3).call(JOBS, "weightless")):
        others = [[str(peer) for peer in range(3) if peer != round] for round in range(3)]
        assert rank["members"] == [
            [] if round == number else members for round, members in enumerate(others)
        ]
        assert rank["seconds"] < 60  # what one wait would take


@pytest.mark.ci
@pytest.mark.parametrize("when", ["dies in transfer", "dies before its vote"])
def test_dead_rank_costs_one_round(ranks, when):
    """A rank that dies costs the round and the others go on."""
    *others, dead = ranks(3).call(
        JOBS, "one_round", values=[[1.0]] * 3, wait=1.0, exchange_timeout=3.0, spoil=when
    )
    assert dead is None
    for rank in others:
        assert (rank["mean"], rank["next"]) == (None, ["0", "1"])
        assert rank["logged"][0].startswith("no mean in round 0, fragment 0: ")
    if when == "dies in transfer":
        logged = "".join(sentence for rank in others for sentence in rank["logged"])
        assert "a connection between ranks failed" in logged
        assert "restart the job, best under torchrun --max-restarts" in logged


def test_stalled_rank_costs_one_round(ranks):
    """A rank whose bytes do not move costs the round for all."""
    codecs = ["float16"] * 3
    found = ranks(3).call(
        JOBS,
        "one_round",
        values=[[1.0]] * 3,
        codecs=codecs,
        exchange_timeout=1.0,
        spoil="stalls in transfer",
    )
    assert [rank["mean"] for rank in found] == [None] * 3
    assert [rank["next"] for rank in found] == [["0", "1", "2"]] * 3


def test_a_rank_that_has_left_is_not_waited_for(ranks):
    *others, gone = ranks(3).call(
        JOBS, "one_round", values=[[1.0]] * 3, wait=30.0, spoil="leaves before"
    )
    assert (gone["mean"], gone["next"]) == (None, None)
    assert [rank["mean"] for rank in others] == [[[1.0], ["0", "1"]]] * 2


def test_missing_store_warns_once(ranks):
    """Without the store no round has a partner and one warning is logged."""
    for rank in ranks(3).call(JOBS, "one_round", values=[[1.0]] * 3, spoil="store"):
        assert (rank["mean"], rank["next"]) == (None, None)
        (sentence,) = rank["logged"]
        assert sentence.startswith(
            "the store of torch.distributed is gone (connection reset): later rounds have no "
            "partner."
        )


def test_repeated_key_is_another_round(ranks):
    """A key that comes again is another round and the store does not grow."""
    for rank in ranks(2).call(JOBS, "same_key_again"):
        assert rank["found"] == [number + 0.5 for number in range(203)]
        assert rank["old"] == 128
        assert rank["left"] == 64
        assert rank["uses"] <= 129


def test_after_close_nothing_runs_any_more(ranks):
    assert ranks(2).call(JOBS, "threads_at_the_end") == [[0, None]] * 2


def test_it_needs_an_initialised_job():
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="call init_process_group first, under torchrun"):
        Distributed()


def test_ranks_that_are_no_peers_are_refused(ranks):
    assert all(
        "2 ranks cannot be cut into peers of 3 shards" in error
        for error in ranks(2).call(JOBS, "wrong_shards")
    )
