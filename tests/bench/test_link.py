"""The slow links of the benchmarks: their arithmetic, and that they carry every byte; how fast is not judged here."""

import itertools
import os
import socket
import subprocess
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench._line import Line
from bench._link import LinkError, Namespaces, destination
from bench._link_check import check
from bench._relay import Relays

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


@given(st.lists(st.tuples(GAPS, SIZES), min_size=2, max_size=30), st.floats(1e3, 1e9), st.floats(0, 2))
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


@pytest.mark.parametrize(("rate", "delay"), [(0, 0), (-1, 0), (float("nan"), 0), (1, -1), (1, float("inf"))])
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
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    assert not any(name in left for name in names)
