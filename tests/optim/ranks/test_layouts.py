"""Peers of two ranks exchange with a peer of one process as two such peers do, bit by bit, with
every method.
"""

from pathlib import Path

import pytest
import rank_jobs as jobs

from shoal.optim import METHODS, Simulation

JOBS = Path(jobs.__file__)
FLIGHTS = JOBS.with_name("flight_jobs.py")


def expected(method, **options):
    """Train two peers of one process each, in this process."""
    return Simulation(["0", "1"]).run(lambda exchange: jobs.alone(exchange, method, **options))


def compare(found, wanted):
    assert found["members"] == wanted["members"]
    for what in ("slow", "fast"):
        for one, other in zip(found[what], wanted[what], strict=True):
            assert one == other, what
    assert found["state"] == wanted["state"]


PLAIN = [
    *(name for name in METHODS if name != "none"),
    *(
        name
        for name in jobs.KNOBS
        if "," in name and not {"auto", "muon", "mod4"} & {*name.split(", ")}
    ),
]
MOD4 = [name for name in jobs.KNOBS if "mod4" in name]


@pytest.mark.thinned(6)
@pytest.mark.parametrize("methods", [PLAIN, ["diloco, muon"], MOD4], ids=["adamw", "muon", "mod4"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_equal_one_process(trio, kind, methods):
    """Two ranks have the bits of one process with every method."""
    first, second, other = trio.call(JOBS, "matrix", kind=kind, methods=methods)
    for method in methods:
        wanted = expected(method)
        compare(other[method], wanted["1"])
        compare(first[method], wanted["0"])
        assert second[method]["fast"] == first[method]["fast"]
        assert second[method]["members"] == first[method]["members"]
        assert not set(first[method]["owned"]) & set(second[method]["owned"])
        assert len(first[method]["owned"] + second[method]["owned"]) == 7


def test_rank_0_never_holds_more_of_others_than_a_fragment(trio):
    for kind in ("ddp", "fsdp"):
        found = trio.call(JOBS, "bounded", kind=kind)[0]
        assert 0 < found["most"] <= found["fragment"] < found["all"]


def test_rank_0_decides_round_length(trio):
    """Buffers are the mean over ranks and rank 0 decides the length of rounds."""
    first, second, other = trio.call(JOBS, "normed")
    assert [step["position"] for step in first] == [step["position"] for step in second]
    assert sum(step["averaged"] for step in first) > 1
    for one, two, three in zip(first, second, other, strict=True):
        assert one["averaged"] == two["averaged"] == three["averaged"]
        if one["averaged"]:
            assert one["now"] == two["now"] == three["now"]
            for own, twin, theirs, now in zip(
                one["own"], two["own"], three["own"], one["now"], strict=True
            ):
                mean = [((a + b) / 2 + c) / 2 for a, b, c in zip(own, twin, theirs, strict=True)]
                assert now == pytest.approx(mean, abs=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_apply_when_rank_0_sees_it(trio, kind):
    """All ranks apply when rank 0 sees that it is there."""
    first, second, alone = trio.call(FLIGHTS, "agreeing", kind=kind)
    assert first == alone
    assert {name: second[name] for name in ("lags", "lag", "fast")} == {
        name: alone[name] for name in ("lags", "lag", "fast")
    }
    assert any(late for *_, late in alone["lags"])
    assert len({lag for _, _, lag, _ in alone["lags"]}) > 2


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "method", ["gasloc, overlapped", "noloco, two tensors", "decoupled", "co2", "eager"]
)
def test_what_is_in_flight_is_begun_anew_by_all_ranks(trio, method):
    for kind in ("ddp", "fsdp"):
        first, second, alone = trio.call(
            FLIGHTS,
            "interrupted",
            kind=kind,
            method=method,
            at=13 if method in ("co2", "eager") else 20,
        )
        assert first.pop("in flight") == second.pop("in flight") != [0]
        assert first == alone
        assert second["fast"] == alone["fast"]
