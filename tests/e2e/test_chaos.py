"""``python -m bench.chaos`` with real nodes: what it says, and that nothing is left of it, even
when it is killed.
"""

import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHAOS = {"before": ("env", f"PYTHONPATH={ROOT}"), "program": ("-m", "bench.chaos")}
KEYS = {
    "kills",
    "rejoins",
    "max_stall_s",
    "median_stall_s",
    "steps_lost",
    "loss_first",
    "loss_last",
    "throughput_kept",
    "orphans",
    "rss_slope",
    "fd_slope",
    "join_s",
    "resume_s",
    "troubles",
    "unharmed",
}


@pytest.mark.slow(reason="real nodes are killed and come back")
@pytest.mark.parametrize("lag", ["auto", 0])
def test_nodes_are_killed_come_back_and_leave_nothing_behind(shoal, lag):
    report = shoal.start(
        "--peers",
        3,
        "--minutes",
        0.3,
        "--kills-per-minute",
        4,
        "--stops-per-minute",
        3,
        "--no-unharmed",
        "--every",
        5,
        "--set",
        f"outer.lag={lag}",
        "--json",
        **CHAOS,
    ).json(240)
    assert report.keys() >= KEYS
    assert (
        report["kills"],
        report["stops"],
        report["steps_lost"],
        report["orphans"],
        report["troubles"],
    ) == (1, 1, 0, 0, [])
    assert report["loss_last"] < report["loss_first"]
    assert report["max_stall_s"] >= report["median_stall_s"] > 0
    assert report["throughput_kept"] is None
    assert shoal.left() == []
    assert not list(shoal.tmp.glob("shoal-chaos-*"))


@pytest.mark.slow(reason="a run of bench.chaos starts real nodes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_when_it_is_ended_in_the_middle(shoal, eventually, number):
    run = shoal.start(
        "--peers",
        2,
        "--minutes",
        5,
        "--kills-per-minute",
        0,
        "--stops-per-minute",
        60,
        "--no-unharmed",
        "--keep",
        "kept",
        **CHAOS,
    )
    eventually(lambda: "sleeps" in run.said(), 180, "a node that sleeps")
    run.signal(number)
    assert run.wait() == (130 if number == signal.SIGINT else -number)
    eventually(lambda: not shoal.left(), 60, "the end of all nodes and daemons")
