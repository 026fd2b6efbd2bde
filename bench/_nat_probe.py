"""What a home's router does with UDP and TCP, found out by packets alone: the questions of RFC
5780, for `bench._nat`'s networks.

To show that a packet does not arrive, one that must arrive is sent after it: on one processor,
virtual cables keep the order.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from bench._nat import Internet, tcp, udp

PORT, FIRST, SECOND = 4001, 5001, 5002  # at home; two of the seed's


@dataclass(frozen=True)
class Seen:
    """The behaviour of one protocol: a port's mapping, and who may send to it."""

    same: bool
    """The outside port is the inside one, and the same for two destinations."""
    closed: bool
    """Nothing is let in before something was sent."""
    other: bool
    """A machine is let in to which nothing was sent."""
    another_port: bool
    """A machine is let in from a port to which nothing was sent."""


EXPECTED = {
    "none": Seen(same=True, closed=False, other=True, another_port=True),
    "full": Seen(same=True, closed=True, other=True, another_port=True),
    "address": Seen(same=True, closed=True, other=False, another_port=True),
    "port": Seen(same=True, closed=True, other=False, another_port=False),
    "symmetric": Seen(same=False, closed=True, other=False, another_port=False),
}


@contextlib.contextmanager
def _one_processor() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def probe_udp(net: Internet, home: str) -> Seen:
    """Find out by UDP what the router of ``home`` does.

    Raises OSError if not even what it must let through arrives.
    """
    with contextlib.ExitStack() as stack, _one_processor():
        own, far = (
            stack.enter_context(net.at(place, partial(udp, PORT))) for place in (home, "peer-1")
        )
        first, second = (
            stack.enter_context(net.at("seed", partial(udp, port))) for port in (FIRST, SECOND)
        )
        far.sendto(b"unasked", (net.ip(home), PORT))
        own.sendto(b"", (net.ip("seed"), FIRST))
        outside = first.recvfrom(64)[1]
        far.sendto(b"other", outside)
        second.sendto(b"another port", outside)
        first.sendto(b"answer", outside)
        found: list[bytes] = []
        while b"answer" not in found:
            found.append(own.recv(64))
        own.sendto(b"", (net.ip("peer-1"), PORT))
        again = far.recvfrom(64)[1]
        return Seen(
            same=outside == again == (net.ip(home), PORT),
            closed=b"unasked" not in found,
            other=b"other" in found,
            another_port=b"another port" in found,
        )


def probe_tcp(net: Internet, home: str) -> Seen:
    """Find out by TCP what the router of ``home`` does.

    Raises OSError if not even what it must let through arrives.
    """
    with contextlib.ExitStack() as stack, _one_processor():
        made = stack.enter_context
        listening = made(net.at(home, partial(tcp, PORT, listen=True)))
        seed, far = (
            made(net.at(place, partial(tcp, FIRST, listen=True))) for place in ("seed", "peer-1")
        )
        unasked, other = (
            made(net.at("peer-1", partial(tcp, port))) for port in (FIRST + 10, FIRST + 11)
        )
        another = made(net.at("seed", partial(tcp, SECOND)))
        _begin(unasked, (net.ip(home), PORT))
        own = made(net.at(home, partial(tcp, PORT)))
        own.connect((net.ip("seed"), FIRST))
        answering, outside = seed.accept()
        made(answering)
        _begin(other, outside)
        _begin(another, outside)
        answering.sendall(b"answer")
        if own.recv(64) != b"answer":
            raise OSError("the connection from home ended")
        arrived = _callers(listening)
        second = made(net.at(home, partial(tcp, PORT)))
        second.connect((net.ip("peer-1"), FIRST))
        asking, again = far.accept()
        made(asking)
        return Seen(
            same=outside == again == (net.ip(home), PORT),
            closed=(net.ip("peer-1"), FIRST + 10) not in arrived,
            other=(net.ip("peer-1"), FIRST + 11) in arrived,
            another_port=(net.ip("seed"), SECOND) in arrived,
        )


def _begin(caller: socket.socket, to: tuple[str, int]) -> None:
    caller.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        caller.connect(to)


def _callers(listening: socket.socket) -> set[tuple[str, int]]:
    listening.setblocking(False)
    found = set()
    with contextlib.suppress(BlockingIOError):
        while True:
            connection, address = listening.accept()
            connection.close()
            found.add(address)
    return found
