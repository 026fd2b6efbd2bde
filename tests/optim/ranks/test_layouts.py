"""Peers of two ranks exchange with a peer of one process as two such peers do, bit by bit, with every method."""

from pathlib import Path

import pytest
import rank_jobs as jobs

from shoal.optim import METHODS, Simulation

JOBS = Path(jobs.__file__)


def expected(method, **options):
    """Train two peers of one process each, in this process."""
    return Simulation(["0", "1"]).run(lambda exchange: jobs.alone(exchange, method, **options))


def compare(found, wanted):
    assert found["members"] == wanted["members"]
    for what in ("slow", "fast"):
        for one, other in zip(found[what], wanted[what], strict=True):
            assert one == other, what
    assert found["state"] == wanted["state"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_have_the_bits_of_one_process_with_every_method(trio, kind):
    methods = [name for name in METHODS if name != "none"]
    first, second, other = trio.call(JOBS, "matrix", kind=kind, methods=methods)
    for method in methods:
        wanted = expected(method)
        compare(other[method], wanted["1"])
        compare(first[method], wanted["0"])
        assert second[method]["fast"] == first[method]["fast"]
        assert second[method]["members"] == first[method]["members"]
        assert not set(first[method]["owned"]) & set(second[method]["owned"])
        assert len(first[method]["owned"] + second[method]["owned"]) == 7
