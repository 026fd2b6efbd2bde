"""Slow links and latency: their arithmetic and closed forms, and that a link carries every byte;
how fast is not judged here.
"""

import itertools
import json
import math
import os
import socket
import subprocess
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench._line import Line
from bench._link import LinkError, Namespaces, destination
from bench._link_check import check
from bench._relay import Relays
from bench.latency import (
    SPREADS,
    STEPS,
    barrier_ratios,
    estimate,
    mean_of_max,
    sigma_of,
    tree_ratios,
    tree_times,
    variance_of_max,
)

SIZES = st.integers(1, 100_000)
GAPS = st.floats(0, 10)


def test_bytes_leave_one_after_another_and_arrive_a_delay_later():
    line = Line(rate=1000, delay=0.5)
    assert line.send(10.0, 200) == pytest.approx(10.7)
    assert line.send(10.0, 100) == pytest.approx(10.8)  # has waited for the first
    assert line.backlog(10.0) == pytest.approx(0.3)
    assert line.send(20.0, 100) == pytest.approx(20.6)  # the line was free again
    assert line.backlog(30.0) == 0.0
    assert line.bytes == 400


@given(
    st.lists(st.tuples(GAPS, SIZES), min_size=2, max_size=30), st.floats(1e3, 1e9), st.floats(0, 2)
)
def test_never_faster_than_its_rate_and_never_out_of_order(sends, rate, delay):
    line, now, arrivals = Line(rate, delay), 0.0, []
    for gap, size in sends:
        now += gap
        arrivals.append((line.send(now, size), now, size))
    for (earlier, _, _), (later, sent, size) in itertools.pairwise(arrivals):
        assert later - earlier >= size / rate * (1 - 1e-6) - 1e-9
        assert later >= sent + size / rate + delay - 1e-9
    total = sum(size for _, size in sends)
    busiest = now + total / rate + delay  # at the latest: everything had waited for the last
    assert arrivals[-1][0] <= busiest + 1e-6


def test_without_a_rate_only_the_delay_counts():
    line = Line(delay=2.0)
    assert [line.send(1.0, 10**9), line.send(1.5, 1)] == [3.0, 3.5]


@pytest.mark.parametrize(
    ("rate", "delay"), [(0, 0), (-1, 0), (float("nan"), 0), (1, -1), (1, float("inf"))]
)
def test_a_line_that_cannot_be(rate, delay):
    with pytest.raises(ValueError, match="positive rate"):
        Line(rate, delay)


def test_packets_are_for_nodes_of_this_net_only():
    head = bytes([0x45]) + bytes(15)
    assert destination(head + bytes([10, 99, 0, 2])) == 1
    assert destination(head + bytes([10, 98, 0, 2])) is None
    assert destination(bytes([0x60]) + bytes(39)) is None  # IPv6
    assert destination(head) is None


def test_relays_carry_both_ways_whole_and_to_the_end():
    relays = Relays(2, rate=1e8, delay=0.01)
    try:
        there, back = os.urandom(700_000), os.urandom(300_000)
        with socket.create_server(("127.0.0.1", relays.port(1))) as server:

            def answer():
                connection = server.accept()[0]
                with connection:
                    heard.append(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
                    connection.sendall(back)

            heard = []
            thread = threading.Thread(target=answer)
            thread.start()
            with socket.create_connection(("127.0.0.1", relays.announced(1)), 30) as caller:
                caller.settimeout(30)
                caller.sendall(there)
                caller.shutdown(socket.SHUT_WR)
                got = b"".join(iter(lambda: caller.recv(1 << 16), b""))
            thread.join(30)
        assert heard == [there]
        assert got == back
        assert relays.sent() == [len(there), len(back)]
    finally:
        relays.close()


def test_nobody_behind_a_relay_is_the_end_of_the_connection():
    relays = Relays(2, rate=1e8, delay=0.0)
    try:
        with socket.create_connection(("127.0.0.1", relays.announced(0)), 30) as caller:
            caller.settimeout(30)
            assert caller.recv(1) == b""
    finally:
        relays.close()


def test_relays_are_for_two():
    with pytest.raises(LinkError, match="run as root"):
        Relays(3, rate=1e6, delay=0.0)


@pytest.mark.ci
def test_namespaces_carry_and_leave_nothing():
    try:
        link = Namespaces(2, rate=1e8, delay=0.001)
    except LinkError as error:
        pytest.skip(str(error))
    try:
        found = check(link, 1e8, 0.001)
        assert found["mbit"] > 0
        assert found["delay_ms"] > 0
        assert link.sent()[0] > 10_000_000
        assert link.sent()[1] > 0
        names = [link.enter(node)[-1] for node in range(2)]
    finally:
        link.close()
    left = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=20
    ).stdout
    assert not any(name in left for name in names)


# NoLoCo's figures 5A and 5B in numbers, by an earlier simulation that shares no code with this one.
FIGURE_5A = {  # peers -> all-reduce over pair, for each of SPREADS
    4: (2.0, 2.10, 2.22, 2.33, 2.42, 2.43),
    16: (4.0, 4.50, 5.19, 5.85, 6.47, 6.79),
    64: (6.0, 7.05, 8.66, 10.5, 12.3, 13.8),
    256: (8.0, 9.70, 12.6, 16.4, 20.4, 24.0),
}
FIGURE_5B = {
    16: (1.23, 1.13, 1.11, 1.06),
    64: (1.38, 1.24, 1.16, 1.11),
    256: (1.54, 1.32, 1.23, 1.16),
}
ERRORS = 4  # standard errors that a simulation may be off


def seeded():
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("cv", [0.1, 0.5, 1.0])
def test_slower_of_two_matches_the_closed_form(cv):
    """Mean and variance of the slower of two are the closed forms."""
    sigma = sigma_of(cv)
    slower = (
        torch.randn(400_000, 2, generator=seeded(), dtype=torch.float64)
        .mul(sigma)
        .add(0.3)
        .exp()
        .amax(1)
    )
    found = estimate(slower)
    assert abs(found.value - mean_of_max(sigma, 0.3)) < ERRORS * found.error
    squares = estimate((slower - mean_of_max(sigma, 0.3)) ** 2)
    assert abs(squares.value - variance_of_max(sigma, 0.3)) < ERRORS * squares.error


def test_closed_forms_at_known_points():
    assert mean_of_max(0.0) == pytest.approx(1.0)
    assert variance_of_max(0.0) == pytest.approx(0.0)
    for cv in SPREADS:  # coefficient of variation of one message, from its logarithm's deviation
        assert math.sqrt(math.expm1(sigma_of(cv) ** 2)) == pytest.approx(cv)


def test_without_spread_a_tree_is_as_many_hops_as_levels():
    for peers, levels in ((2, 1), (3, 2), (4, 2), (1024, 10), (10_000, 14)):
        assert tree_times(peers, 2, seeded(), (0.0,)).tolist() == [[levels, levels]]


def test_a_tree_of_two_is_the_pair():
    for found in tree_ratios(2, 50_000, seeded()):
        assert abs(found.value - 1) <= ERRORS * found.error


@pytest.mark.parametrize("peers", FIGURE_5A)
def test_tree_against_the_figure(peers):
    for found, expected in zip(tree_ratios(peers, 4000, seeded()), FIGURE_5A[peers], strict=True):
        assert abs(found.value - expected) <= max(
            ERRORS * found.error, 0.005 * expected
        )  # the table has three digits


@pytest.mark.parametrize("peers", FIGURE_5B)
def test_barriers_against_the_figure(peers):
    found = barrier_ratios(peers, 4, seeded())
    assert [cell.value for cell in found] == pytest.approx(FIGURE_5B[peers], rel=0.03)
    assert len(found) == len(STEPS)


def test_a_barrier_of_two_is_the_pair():
    assert [cell.value for cell in barrier_ratios(2, 2, seeded(), rounds=20)] == pytest.approx(
        [1.0] * len(STEPS)
    )


def test_one_line_of_json(program):
    done = program(
        "latency.py", "--peers", "4,10", "--samples", "2", "--runs", "2", "--json", timeout=120
    )
    result = json.loads(done.stdout)
    assert [row["peers"] for row in result["tree"]] == [4, 10]
    assert [cell["cv"] for cell in result["tree"][0]["cells"]] == list(SPREADS)
    assert [cell["steps"] for cell in result["barrier"][0]["cells"]] == list(STEPS)
    assert "pair exchange" in done.stderr
