"""What a slow link really gives, measured by two plain sockets: the benchmark's look at its own
ruler.

As a program (`python -m bench._link_check IP PORT SKIPPED`) it is the end that receives: it answers
the first bytes one by one, skips some that come while TCP still looks for its rate, and says how
many bytes a second came then.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from bench.exchange import Process

if TYPE_CHECKING:
    from bench._link import Link

PINGS = 5
SETTLED = 16  # one-way delays after which TCP has found its rate
COUNTED_S = 0.8  # seconds of bytes that are timed
TIMEOUT = 60.0


def check(link: Link, rate: float, delay: float) -> dict[str, Any]:
    """Rate in Mbit/s and one-way delay in ms that TCP finds from node 0 to node 1: half the median
    round trip.

    ``rate`` (bytes/s) and ``delay`` (s) as they should be say how many bytes it takes to tell.
    """
    skipped = round(rate * max(SETTLED * delay, 0.2))
    program = [sys.executable, "-m", "bench._link_check", link.ip(1)]
    receiver = Process("link check", 1, [*link.enter(1), *program, str(link.port(1)), str(skipped)])
    try:
        listening = receiver.answer()["port"]
        dialled = link.announced(1) or listening
        amount = skipped + round(rate * COUNTED_S)
        sender = Process(
            "link check", 0, [*link.enter(0), *program, str(dialled), str(amount), "send"]
        )
        try:
            trip = float(sender.answer(TIMEOUT)["trip_s"])
            found = float(receiver.answer(TIMEOUT)["rate"])
        finally:
            sender.close()
    finally:
        receiver.close()
    return {"mbit": found * 8 / 1e6, "delay_ms": trip * 500}


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def receive(ip: str, port: int, skipped: int) -> None:
    with socket.create_server((ip, port)) as server:
        server.settimeout(TIMEOUT)
        say(port=server.getsockname()[1])
        connection = server.accept()[0]
    with connection:
        connection.settimeout(TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            connection.sendall(connection.recv(1))
        began, counted, seen = 0.0, 0, 0
        while data := connection.recv(1 << 16):
            seen += len(data)
            if began:
                counted += len(data)
            elif seen >= skipped:
                began = time.monotonic()
        say(rate=counted / (time.monotonic() - began))


def send(ip: str, port: int, amount: int) -> None:
    with socket.create_connection((ip, port), TIMEOUT) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PINGS):
            began = time.monotonic()
            connection.sendall(b".")
            connection.recv(1)
            trips.append(time.monotonic() - began)
        connection.sendall(bytes(amount))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # until the other end has it all
    say(trip_s=statistics.median(trips))


if __name__ == "__main__":
    (send if len(sys.argv) > 4 else receive)(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
