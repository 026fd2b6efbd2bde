"""The benchmark of overlap runs, says what it promises, and leaves nothing behind; its timings are
not judged here.
"""

import importlib.util
import json

import pytest

from bench._overlap_report import predicted, tables, work
from bench.overlap import Plan, flat, missing, row
from shoal.swarm.exchange.cost import Line, forecast

SMALL = [
    "--delay",
    "1",
    "--mbit",
    "1000",
    "--layers",
    "1",
    "--fragments",
    "1",
    "--every",
    "4",
    "--lag",
    "2",
    "--step",
    "5",
    "--rounds",
    "2",
]
PLAN = Plan(
    nodes=2, mbit=100, layers=10, every=100, step_s=0.1, rounds=3, warm=2, fragments=4, lag=None
)


class FakeLink:
    def __init__(self, announced):
        self.port = announced

    def announced(self, node):
        return self.port


@pytest.mark.slow(reason="real processes over shaped links")
def test_pairs_and_groups_over_relays_and_who_cannot_use_them(program):
    done = program(
        "overlap.py",
        "--link",
        "relay",
        "--methods",
        "noloco,noloco-blocking,streaming,ddp",
        *SMALL,
        "--json",
    )
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result["plan"]["model_bytes"] == 4_000_000
    (at,) = result["delays"]
    assert at["link"] == "user-space relay"
    assert list(at["skipped"]) == ["ddp"]
    assert "run as root" in at["skipped"]["ddp"]
    rows = {row["method"]: row for row in at["rows"]}
    assert [rows[name]["rounds"] for name in ("noloco", "noloco-blocking", "streaming")] == [
        2,
        2,
        2,
    ]
    for found in rows.values():
        assert found["steps"] == 8
        assert found["wait_s"] == pytest.approx(found["wall_s"] - 8 * 0.005, abs=0.011)
        assert found["utilisation"] == pytest.approx(
            8 * 0.005 / found["wall_s"], rel=0.3
        )  # wall_s is rounded
    assert 8 <= rows["noloco-blocking"]["sent_mb"] < 10  # two whole models and what is around them
    assert "utilisation" in done.stderr


def window(wall_s, busy_s, waited_s, rounds, alone, lag):
    return {
        "wall_s": wall_s,
        "busy_s": busy_s,
        "waited_s": waited_s,
        "rounds": rounds,
        "alone": alone,
        "lag": lag,
    }


def test_rows_are_means_over_the_nodes():
    first = window(12.0, 9.0, 1.0, 3, 2, 5)
    second = window(10.0, 9.0, 2.0, 2, 1, 7)
    found = row("noloco", [first, second], [4_000_000, 6_000_000], 90)
    assert found == {
        "method": "noloco",
        "steps": 90,
        "rounds": 2,
        "wall_s": 11.0,
        "wait_s": 2.0,
        "blocked_s": 1.5,
        "utilisation": 0.8182,
        "least": 0.75,
        "nobody": 0.375,  # 3 of 8
        "sent_mb": 5.0,
        "lag": 7,
    }


def test_a_method_that_counts_nobody_says_none():
    assert row("ddp", [window(2.0, 1.0, 0.0, 3, None, None)], [1], 9)["nobody"] is None


def test_the_last_node_can_be_slower():
    plan = Plan(4, 100, 10, 100, 0.1, 3, 2, 4, None, slow=4)
    assert [plan.times_slower(rank) for rank in range(4)] == [1, 1, 1, 4]


def test_the_figures_of_all_delays_in_one_list():
    delays = [
        {"delay_ms": at, "rows": [{"method": "co2", "utilisation": 0.9 - at / 1000, "wall_s": 1.0}]}
        for at in (0, 50)
    ]
    assert flat(delays) == [
        {"method": "co2", "delay_ms": 0, "utilisation": 0.9},
        {"method": "co2", "delay_ms": 50, "utilisation": 0.85},
    ]


def test_record_has_figures_and_predictions():
    """The record has a table of figures and one of predictions."""
    plan = {
        "nodes": 2,
        "mbit": 100.0,
        "every": 100,
        "step_s": 0.1,
        "fragments": 4,
        "lag": None,
        "model_bytes": 40_000_000,
    }
    rows = [
        {"method": name, "delay_ms": at, "utilisation": 0.5}
        for name in ("alone", "noloco", "noloco-blocking")
        for at in (0, 50)
    ]
    shown = tables({"plan": plan, "rows": rows[:-1]}).split("\n")
    assert shown[0] == "| method | 0 ms | 50 ms |"
    assert shown[2] == "| no exchange at all | 0.500 | 0.500 |"
    assert shown[4] == "| **ours**, NoLoCo, `lag = 0` (all at once) | 0.500 | - |"
    expected = predicted("noloco", 50, plan)
    assert expected == forecast(work("noloco", plan), Line(12.5e6, 0.1)).utilisation
    assert shown[8].endswith(f" | {expected:.3f} / 0.500 |")
    assert work("torchft", plan) is None
    assert (work("noloco", plan).lag, work("streaming", {**plan, "lag": 7}).lag) == ("auto", 7)
    four_bits = work(
        "diloco", {**plan, "codec": "e3m0+ef"}
    )  # gathered, not summed: half a byte a value and a scale a tensor
    assert (four_bits.nbytes, four_bits.params, four_bits.sums) == (5_000_040, 10_000_000, False)
    assert (
        work("noloco-blocking", plan).lag,
        work("co2", plan).lag,
        work("diloco", plan).group,
    ) == (0, 100, "everyone")


def test_whole_rounds_and_for_ddp_about_the_same_time():
    assert PLAN.sync_s() == pytest.approx(3.2)
    assert PLAN.steps("streaming") == (200, 300)
    assert PLAN.steps("ddp") == (2, 9)  # 30 s of 3.3 s each


def test_a_rival_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        missing("torchft", FakeLink(None)) == "torchft is not installed (pip install -e '.[bench]')"
    )
    assert missing("noloco", FakeLink(None)) is None
