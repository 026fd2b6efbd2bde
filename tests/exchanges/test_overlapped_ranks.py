"""``Distributed`` with lags that each peer finds by itself: the order of rounds, their outcome, and
a job that starts again.
"""

from pathlib import Path

import overlap_jobs as jobs
import pytest
import torch

from shoal.optim import Simulation

JOBS = Path(jobs.__file__)


def expected(method, size, count=4, codec="float32"):
    names = [str(rank) for rank in range(count)]
    return Simulation(names, seed=5, size=size).run(
        lambda exchange: jobs.driven(int(exchange.peer), exchange, method, codec)
    )


@pytest.mark.parametrize("codec", ["float32", "mod4"])
def test_automatic_lag_equals_the_simulation(ranks, codec):
    """Pairs that find their lags end with the bits of the simulation."""
    found = ranks(4).call(JOBS, "overlapping", method="NoLoCo", size=2, codec=codec)
    wanted = expected("NoLoCo", 2, codec=codec)
    for rank, one in enumerate(found):
        assert one == wanted[str(rank)]
        assert all(len(members) == 2 for *_, members in one["rounds"])
    assert (
        len({(rank, lag) for rank, one in enumerate(found) for _, _, lag, _, _ in one["rounds"]})
        > 8
    )


def test_groups_that_find_their_lags_equal_the_simulation(ranks):
    found = ranks(3).call(JOBS, "overlapping", method="StreamingDiLoCo", size=0)
    wanted = expected("StreamingDiLoCo", 3, 3)
    for rank, one in enumerate(found):
        assert one["rounds"] == wanted[str(rank)]["rounds"]
        for what in ("slow", "fast"):
            for ours, theirs in zip(one[what], wanted[str(rank)][what], strict=True):
                assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("method", "size"), [("NoLoCo", 2), ("StreamingDiLoCo", 0)])
def test_rank_ahead_waits_at_its_next_send(ranks, method, size):
    """A rank that is ahead goes on until it sends a fragment again."""
    first, *others = ranks(2).call(JOBS, "ahead", method=method, size=size)
    assert first["sent"] == 4
    for one in (first, *others):
        assert all(members == ["0", "1"] for *_, members in one["rounds"])
        assert sorted(round for round, *_ in one["rounds"]) == list(range(len(one["rounds"])))


@pytest.mark.parametrize(("method", "size"), [("NoLoCo", 2), ("StreamingDiLoCo", 0)])
def test_job_restarts_with_uneven_flights(ranks, method, size):
    """A job starts again though its ranks have not the same exchanges in flight."""
    found = ranks(2).call(JOBS, "resumed", method=method, size=size, at=18)
    first, second = (set(one["under way"]) for one in found)
    assert first ^ second
    for one in found:
        rounds = {round: members for round, _, _, _, members in one["rounds"]}
        assert {round for round, members in rounds.items() if not members} == {
            *one["under way"]
        } - (first & second)
        assert all(members in ([], ["0", "1"]) for members in rounds.values())
    if method == "StreamingDiLoCo":
        assert (
            found[0]["slow"] == found[1]["slow"]
        )  # what one took and the other did not is equalised
