"""Peers of several processes each: FSDP2 and DDP inside a peer equal the same training in one
process a peer.
"""

from pathlib import Path

import pytest
import sharded_jobs as jobs
import torch

from shoal.optim import Faults, Simulation
from shoal.optim.exchange.pairing import partners_of

JOBS = Path(jobs.__file__)


def check(found, expected):
    for rank, one in enumerate(found):
        wanted = expected[str(rank // 2)]
        assert one["members"] == wanted["members"]
        for what in ("slow", "fast"):
            for a, b in zip(one[what], wanted[what], strict=True):
                assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-6)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["DiLoCo", "NoLoCo"])
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_two_peers_of_two_shards_equal_two_processes(four, kind, method):
    found = four.call(JOBS, "sharded", kind=kind, method=method)
    check(found, Simulation(["0", "1"]).run(lambda exchange: jobs.reference(exchange, method)))
    assert found[0]["members"] == [["0", "1"]] * 5
    assert found[0]["shapes"] == (
        [[3, 7], [3], [2, 5], [2]] if kind == "fsdp" else [[5, 7], [5], [3, 5], [3]]
    )


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_round_that_failed_for_one_shard_failed_for_all(four, kind):
    found = four.call(JOBS, "sharded", kind=kind, fails_in=2)
    faults = Faults(drop=lambda peer, key: key.round == 2)
    check(found, Simulation(["0", "1"], faults=faults).run(jobs.reference))
    assert [len(members) for members in found[0]["members"]] == [2, 2, 0, 2, 2]
    assert all(
        one["slow"] == found[0]["slow"] for one in found
    )  # though each peer went on alone in round 2


def test_looking_at_the_slow_weights_of_shards_changes_nothing(four):
    found = four.call(JOBS, "sharded", kind="fsdp", evaluates=True)
    check(found, Simulation(["0", "1"]).run(jobs.reference))


def test_all_shards_of_a_peer_have_the_same_partners(ranks):
    found = ranks(6).call(JOBS, "pairs", shards=2, rounds=6)
    for rank, rounds in enumerate(found):
        peer, shard = divmod(rank, 2)
        for round, met in enumerate(rounds):
            partners = partners_of(3, round, str(peer), ["0", "1", "2"])
            # The middle of the chain moves by half the way to each of the others.
            moved = partners if len(partners) == 2 else (str(peer), *partners)
            mean = sum(2 * int(member) + shard for member in moved) / 2
            assert met == [sorted({str(peer), *partners}), mean]


@pytest.mark.parametrize(
    ("job", "said"),
    [("wrong_mesh", "two dimensions, peers and shards"), ("without_model", "hand in model=")],
    ids=["another mesh", "no model"],
)
def test_what_cannot_be_sharded_is_refused(four, job, said):
    assert all(said in error for error in four.call(JOBS, job))
