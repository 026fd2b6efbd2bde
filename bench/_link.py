"""Slow links between processes on one machine: each node in a network namespace of its own, as root
on Linux.

A node's only way out is a TUN interface. The kernel limits its rate (`tc tbf`); this process reads
the packets at the other end, holds each for the delay, limits what a node receives to the same
rate, and writes it into the receiver's interface. So TCP meets a real bandwidth and a real round
trip, and no program needs to know about it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from bench._line import Line

NET = "10.99.0."
DEVICE = "link0"  # as a node sees it
MTU = 9000  # larger than the internet's, for fewer packets through Python
BURST = 128 * 1024  # bytes that tbf lets through at once
BUFFERS = {
    "tcp_wmem": "4096 65536 33554432",
    "tcp_rmem": "4096 131072 33554432",
}  # or TCP could not fill 100 Mbit/s at 400 ms
QUEUE_S = 0.4  # seconds of bytes that a queue holds before it drops
NAME = "shoal-bench-"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class LinkError(Exception):
    """Why there is no such link, in one sentence."""


class Link(Protocol):
    """What the benchmark asks of a slow network of some nodes, numbered from 0."""

    kind: str

    def enter(self, node: int) -> list[str]:
        """What to put before a command so that it runs as that node."""
        ...

    def ip(self, node: int) -> str:
        """Under which the node listens."""
        ...

    def port(self, node: int) -> int:
        """On which the node must listen; 0: any."""
        ...

    def announced(self, node: int) -> int | None:
        """The port to announce instead of the own; None: nothing to announce."""
        ...

    def sent(self) -> list[int]:
        """Bytes that each node has sent so far, headers included where they are seen."""
        ...

    def close(self) -> None:
        """Remove it all."""
        ...


class Namespaces:
    """``nodes`` namespaces with ``rate`` bytes/s each way and ``delay`` seconds one way.

    ``knobs``: of net.ipv4, beside those of
    the buffers. LinkError if that does not work here.
    """

    kind = "namespaces, tc tbf"

    def __init__(
        self,
        nodes: int,
        rate: float,
        delay: float,
        *,
        mtu: int = MTU,
        knobs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if os.geteuid() != 0:
            raise LinkError("network namespaces need root")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise LinkError(f"the command {tool} is not installed (package iproute2)")
        self._names = [f"{NAME}{os.getpid()}-{node}" for node in range(nodes)]
        self._files: list[int] = []
        self._lines = [Line(rate, delay) for _ in range(nodes)]
        self._sent = [0] * nodes
        self.dropped = 0
        self._mtu, self._knobs = mtu, {**BUFFERS, **knobs}
        self._ended = False
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)
        _remove_stale()
        try:
            for node in range(nodes):
                self._make(node, rate)
        except (LinkError, OSError) as error:
            self.close()
            raise LinkError(f"network namespaces do not work here ({error})") from error
        self._thread.start()

    def _make(self, node: int, rate: float) -> None:
        name, device = self._names[node], f"shoal{os.getpid() % 100_000}-{node}"
        _call("ip", "netns", "add", name)
        self._files.append(tun(device))
        _call("ip", "link", "set", device, "netns", name)
        _call("ip", "-n", name, "link", "set", device, "name", DEVICE)
        _call("ip", "-n", name, "link", "set", "lo", "up")
        _call("ip", "-n", name, "addr", "add", f"{self.ip(node)}/24", "dev", DEVICE)
        _call(
            "ip",
            "-n",
            name,
            "link",
            "set",
            DEVICE,
            "mtu",
            str(self._mtu),
            "txqueuelen",
            "20000",
            "up",
        )
        for knob, value in self._knobs.items():
            _call("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.{knob}={value}")
        shape = (
            "rate",
            f"{round(rate * 8)}bit",
            "burst",
            str(BURST),
            "latency",
            f"{round(QUEUE_S * 1000)}ms",
        )
        _call("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *shape)

    def enter(self, node: int) -> list[str]:
        return ["ip", "netns", "exec", self._names[node]]

    def ip(self, node: int) -> str:
        return f"{NET}{node + 1}"

    def port(self, node: int) -> int:
        return 0

    def announced(self, node: int) -> int | None:
        return None

    def sent(self) -> list[int]:
        return list(self._sent)

    def _carry(self) -> None:
        """The thread that is the wire."""
        waiting: list[deque[tuple[float, bytes]]] = [deque() for _ in self._files]
        while not self._ended:
            heads = [queue[0][0] for queue in waiting if queue]
            pause = min(max(min(heads) - time.monotonic(), 0.0), 0.2) if heads else 0.2
            for file in select.select(self._files, [], [], pause)[0]:
                self._take(self._files.index(file), file, waiting)
            now = time.monotonic()
            for file, queue in zip(self._files, waiting, strict=True):
                while queue and queue[0][0] <= now:
                    self._put(file, queue.popleft()[1])

    def _take(self, source: int, file: int, waiting: list[deque[tuple[float, bytes]]]) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):  # then see to what is due
                packet = os.read(file, 65536)
                target = destination(packet)
                if target is None or not 0 <= target < len(waiting):
                    continue
                self._sent[source] += len(packet)
                line, now = self._lines[target], time.monotonic()
                if line.backlog(now) > QUEUE_S:
                    self.dropped += 1
                    continue
                waiting[target].append((line.send(now, len(packet)), packet))

    def _put(self, file: int, packet: bytes) -> None:
        try:
            os.write(file, packet)
        except OSError:  # the interface is full or going down: a lost packet, as on any wire
            self.dropped += 1

    def close(self) -> None:
        self._ended = True
        if self._thread.is_alive():
            self._thread.join(2)
        for file in self._files:
            os.close(file)
        self._files = []
        for name in self._names:
            with contextlib.suppress(LinkError):
                _call("ip", "netns", "del", name)


def tun(device: str) -> int:
    """Make a TUN interface in the namespace of the calling thread; return the file that is its
    other end. OSError.
    """
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(file)
        raise
    return file


def destination(packet: bytes) -> int | None:
    """The node that an IPv4 packet is for; None for anything else."""
    if (
        len(packet) < 20
        or packet[0] >> 4 != 4
        or packet[16:19] != bytes(int(part) for part in NET.split(".") if part)
    ):
        return None
    return packet[19] - 1


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise LinkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _remove_stale() -> None:
    """What a benchmark that was killed has left behind."""
    for line in _call("ip", "netns", "list").splitlines():
        found = re.match(rf"{NAME}(\d+)-\d+\b", line)
        if found and not Path(f"/proc/{found[1]}").exists():
            with contextlib.suppress(LinkError):
                _call("ip", "netns", "del", found[0])
