"""What a slow link really gives, measured by two plain sockets: the benchmark's look at its own ruler.

As a program (`python -m bench._link_check IP PORT`) it is the end that receives: it answers the first bytes one by one, then says
how many bytes a second came.
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
SKIPPED = 2_000_000  # bytes in which TCP finds its rate and buckets empty
COUNTED = 8_000_000
TIMEOUT = 60.0


def check(link: Link) -> dict[str, Any]:
    """Rate in Mbit/s and one-way delay in ms that TCP finds from node 0 to node 1: half the median round trip."""
    port = link.port(1)
    receiver = Process("link check", 1, [*link.enter(1), sys.executable, "-m", "bench._link_check", link.ip(1), str(port)])
    try:
        listening = receiver.answer()["port"]
        dialled = link.announced(1) or listening
        command = [*link.enter(0), sys.executable, "-m", "bench._link_check", link.ip(1), str(dialled), "send"]
        sender = Process("link check", 0, command)
        try:
            trip = float(sender.answer(TIMEOUT)["trip_s"])
            rate = float(receiver.answer(TIMEOUT)["rate"])
        finally:
            sender.close()
    finally:
        receiver.close()
    return {"mbit": rate * 8 / 1e6, "delay_ms": trip * 500}


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def receive(ip: str, port: int) -> None:
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
            elif seen >= SKIPPED:
                began = time.monotonic()
        say(rate=counted / (time.monotonic() - began))


def send(ip: str, port: int) -> None:
    with socket.create_connection((ip, port), TIMEOUT) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PINGS):
            began = time.monotonic()
            connection.sendall(b".")
            connection.recv(1)
            trips.append(time.monotonic() - began)
        connection.sendall(bytes(SKIPPED + COUNTED))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # until the other end has it all
    say(trip_s=statistics.median(trips))


if __name__ == "__main__":
    (send if len(sys.argv) > 3 else receive)(sys.argv[1], int(sys.argv[2]))
