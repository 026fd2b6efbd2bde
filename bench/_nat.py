"""Home routers in network namespaces, as root on Linux: the four classic kinds of NAT (RFC 3489),
and none.

    seed   peer-1 ...   public machines
      |      |
    [    wan     ]      routes, limits nothing
      |      |
    router router       nftables, in these namespaces only
      |      |
    home-0 home-1 ...   the machine at home; others may be put beside it, or it moved to another
                        router

All kinds map one inside port to the same outside port, but `symmetric`, which takes another for
each destination. They differ in who may send to a mapped port: anybody (`full`), an address that
was sent to (`address`), or an address and port (`port`, `symmetric`). `none` is a machine with a
public address and no router. The same holds for TCP and UDP. Nobody answers to what is not let in,
no router speaks UPnP or NAT-PMP, and none sends back inside what was meant for its own outer
address (hairpin).

Between a router and the internet is a cable, or an `Uplink` with a rate, a delay, buffers and loss:
a TUN interface at either end, and a process that carries the packets between them (``python
bench/_nat.py``), for few kernels have netem.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import heapq
import itertools
import json
import math
import os
import random
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # called by its path, Python looks only beside this file

from bench._line import Line  # noqa: E402
from bench._link import tun  # noqa: E402

T = TypeVar("T")

KINDS = ("none", "full", "address", "port", "symmetric")
NAME = "rch-"
CLONE_NEWNET = 0x40000000
_WORKS = (
    "table ip works { chain leave { type nat hook postrouting priority srcnat; oifname none "
    "masquerade; }; }"
)
_CUT = "table inet cut { chain whole { type filter hook forward priority -5; policy drop; }; }"
_serial = itertools.count()
LAN = "192.168.{}"  # the network of a home

# `open` has what was sent: protocol, port at home, and with `address` to whom. An endpoint of it is
# let in by DNAT.
_CONE = """
  set open {{
    type inet_proto . inet_service{type}; flags dynamic,timeout; timeout 1h; size 65535;
  }}
  chain outward {{ type filter hook forward priority 0;
    iifname "in" meta l4proto {{ tcp, udp }} update @open {{ meta l4proto . th sport{to} }}
  }}
  chain inward {{ type nat hook prerouting priority dstnat;
    iifname "out" meta l4proto . th dport{by} @open dnat to {host}
  }}
"""
_ROUTER = """
table ip nat {{
  {cone}
  chain leave {{ type nat hook postrouting priority srcnat;
    oifname "out" meta l4proto {{ tcp, udp }} masquerade{ports}
    oifname "out" masquerade
  }}
  chain guard {{ type filter hook forward priority 1;
    iifname "out" ct status dnat accept
    iifname "out" ct state new drop
  }}
  chain input {{ type filter hook input priority 0; iifname "out" ct state new drop; }}
}}
"""


class NatError(Exception):
    """Why there are no such networks here, in one sentence."""


def rules(kind: str, host: str) -> str:
    """Rules for nftables of a router of one of `KINDS` but ``none``, between interfaces ``in``,
    where ``host`` is, and ``out``.
    """
    cone = ""
    if kind == "full":
        cone = _CONE.format(type="", to="", by="", host=host)
    elif kind == "address":
        cone = _CONE.format(type=" . ipv4_addr", to=" . ip daddr", by=" . ip saddr", host=host)
    elif kind not in ("port", "symmetric"):
        raise ValueError(f"no kind of router: {kind}")
    return _ROUTER.format(cone=cone, ports=" fully-random" if kind == "symmetric" else "")


@dataclasses.dataclass(frozen=True)
class Uplink:
    """What is between a router and the internet."""

    delay: float = 0.0
    """Seconds one way."""
    up: float = math.inf
    """Bytes a second from home."""
    down: float = math.inf
    """Bytes a second to it."""
    up_buffer: float = 2.0
    """Seconds of bytes that wait to leave home before packets are dropped."""
    down_buffer: float = 0.5
    """The same towards home."""
    loss: float = 0.0
    """The share of packets that are lost each way, at random."""


class Internet:
    """Homes behind routers of the given kinds, a ``seed`` and ``peers`` other public machines.

    NatError if that does not work here.

    Places are named ``seed``, ``peer-1``..., ``home-0``..., ``router-0``... . libp2p takes their
    outer addresses for public ones; no packet leaves the namespaces. ``same_lan``: all homes use
    the same private addresses, as many do. ``uplinks``: of the homes, in their order; those without
    one have a cable.
    """

    def __init__(
        self,
        homes: Sequence[str],
        peers: int = 1,
        *,
        same_lan: bool = False,
        uplinks: Sequence[Uplink | None] = (),
    ) -> None:
        if os.geteuid() != 0:
            raise NatError("network namespaces need root")
        for tool, package in (("ip", "iproute2"), ("nft", "nftables")):
            if shutil.which(tool) is None:
                raise NatError(f"the command {tool} is not installed (package {package})")
        if any(uplinks) and not Path("/dev/net/tun").exists():
            raise NatError("uplinks need /dev/net/tun")
        self._number = next(_serial)
        self._made: list[str] = []
        self._ips: dict[str, str] = {}
        self._lans: dict[
            str, tuple[str, int]
        ] = {}  # router -> its network, and the host in it that was added last
        self._wires: dict[str, subprocess.Popen[str]] = {}
        _remove_stale()
        try:
            try:
                self._add("wan")
                self._forward("wan")
                self.nft("wan", "-f", "-", rules=_WORKS)
            except (OSError, subprocess.SubprocessError) as error:
                raise NatError(
                    f"network namespaces with nftables do not work here ({error})"
                ) from error
            for name in ("seed", *(f"peer-{number + 1}" for number in range(peers))):
                self._public(name)
            for number, (kind, uplink) in enumerate(itertools.zip_longest(homes, uplinks)):
                self._home(number, kind, LAN.format(7 if same_lan else 7 + number), uplink)
        except BaseException:
            self.close()
            raise

    def _home(self, number: int, kind: str, lan: str, uplink: Uplink | None) -> None:
        home = f"home-{number}"
        if kind == "none":
            self._public(home, uplink)
            return
        router = f"router-{number}"
        self._public(router, uplink)
        self._forward(router)
        # An address of its own: that of a cable would go with it, and neighbours would lose their
        # router for a minute.
        _call(
            "ip",
            "-n",
            self.full(router),
            "link",
            "add",
            "in",
            "address",
            "02:00:00:00:00:01",
            "type",
            "bridge",
        )
        self._address(router, "in", f"{lan}.1")
        self._lans[router] = (lan, 1)
        self._add(home)
        self._plug(home, router)
        self.nft(router, "-f", "-", rules=rules(kind, f"{lan}.2"))

    def _plug(self, home: str, router: str) -> None:
        """Put a cable between ``home`` and the bridge of ``router``, and give it the next address
        there.
        """
        lan, last = self._lans[router]
        self._lans[router] = (lan, last + 1)
        port = f"in{last + 1}"
        self._veth(router, port, home, "out")
        _call("ip", "-n", self.full(router), "link", "set", port, "master", "in", "up")
        self._address(home, "out", f"{lan}.{last + 1}", f"{lan}.1")
        self._ips[home] = self._ips[router]

    def _public(self, name: str, uplink: Uplink | None = None) -> None:
        net, its = f"11.0.{len(self._ips) + 1}", f"to{len(self._ips)}"
        self._add(name)
        if uplink is None:
            self._veth("wan", its, name, "out")
        else:
            self._wires[name] = self._wire(name, its, uplink)
        self._address("wan", its, f"{net}.1")
        self._address(name, "out", f"{net}.2", f"{net}.1")
        self._ips[name] = f"{net}.2"

    def _wire(self, name: str, its: str, uplink: Uplink) -> subprocess.Popen[str]:
        what = [*dataclasses.astuple(uplink), [self.full(name), "out"], [self.full("wan"), its]]
        made = subprocess.Popen(
            [sys.executable, __file__, json.dumps(what)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert made.stdout is not None
        if made.stdout.readline() != "ready\n":
            made.kill()
            raise NatError("no TUN interface can be made here")
        return made

    def _add(self, name: str) -> None:
        _call("ip", "netns", "add", self.full(name))
        self._made.append(self.full(name))
        _call("ip", "-n", self.full(name), "link", "set", "lo", "up")

    def _forward(self, name: str) -> None:
        _call(*self.enter(name), "sysctl", "-qw", "net.ipv4.ip_forward=1")

    def _veth(self, first: str, its: str, second: str, own: str) -> None:
        _call(
            "ip",
            "-n",
            self.full(first),
            "link",
            "add",
            its,
            "type",
            "veth",
            "peer",
            "name",
            own,
            "netns",
            self.full(second),
        )

    def _address(self, name: str, device: str, ip: str, gateway: str = "") -> None:
        _call("ip", "-n", self.full(name), "addr", "add", f"{ip}/24", "dev", device)
        _call("ip", "-n", self.full(name), "link", "set", device, "up")
        if gateway:
            _call("ip", "-n", self.full(name), "route", "add", "default", "via", gateway)

    def full(self, place: str) -> str:
        """The namespace of a place."""
        return f"{NAME}{os.getpid()}-{self._number}-{place}"

    def enter(self, place: str) -> list[str]:
        """What to put before a command so that it runs there."""
        return ["ip", "netns", "exec", self.full(place)]

    def nft(self, place: str, *arguments: str, rules: str | None = None) -> None:
        """Call nft at a place, with ``rules`` on its standard input.

        OSError or subprocess.TimeoutExpired.
        """
        _call(*self.enter(place), "nft", *arguments, text=rules)

    def ip(self, place: str) -> str:
        """The public address of a place; of a home: its router's."""
        return self._ips[place]

    def at(self, place: str, make: Callable[[], T]) -> T:
        """Call ``make`` in a thread that is in that namespace: a socket stays in the one in which
        it was made. NatError.
        """
        return inside(self.full(place), make)

    def cut(self, router: str, cut: bool) -> None:
        """Have ``router`` lose every packet that it should pass on, or no more. OSError."""
        self.nft(router, "-f", "-", rules=_CUT) if cut else self.nft(
            router, "delete", "table", "inet", "cut"
        )

    def move(self, router: str) -> str:
        """Give ``router`` another public address, and have it forget who spoke with whom; return
        the address. OSError.
        """
        net, old = self._ips[router].rpartition(".")[0], self._ips[router]
        self._ips[router] = f"{net}.3"
        for change in (("addr", "del", f"{old}/24"), ("addr", "add", f"{net}.3/24")):
            _call("ip", "-n", self.full(router), *change, "dev", "out")
        _call("ip", "-n", self.full(router), "route", "replace", "default", "via", f"{net}.1")
        return self._ips[router]

    def neighbour(self, router: str) -> str:
        """Put one more machine behind ``router``, and return its name. OSError."""
        home = f"home-{sum(place.startswith('home-') for place in self._ips)}"
        self._add(home)
        self._plug(home, router)
        return home

    def roam(self, home: str, router: str) -> None:
        """Take ``home`` off its router, and put it behind another one, with another private
        address. OSError.
        """
        _call("ip", "-n", self.full(home), "link", "del", "out")
        self._plug(home, router)

    def local(self, place: str) -> str:
        """The address of a place in its own network. OSError."""
        found = json.loads(
            _call("ip", "-n", self.full(place), "-4", "-j", "addr", "show", "dev", "out")
        )
        return str(found[0]["addr_info"][0]["local"])

    def processes(self, place: str) -> list[int]:
        """The ids of the processes that run at a place. OSError."""
        return [int(pid) for pid in _call("ip", "netns", "pids", self.full(place)).split()]

    def carried(self, router: str) -> list[dict[str, Any]]:
        """What the uplink of ``router`` has carried so far, from home and to it; the longest queue
        is since the last call.
        """
        wire = self._wires[router]
        assert wire.stdin is not None
        assert wire.stdout is not None
        wire.stdin.write("\n")
        wire.stdin.flush()
        return list(json.loads(wire.stdout.readline()))

    def received(self, place: str) -> int:
        """The bytes that a place has received. OSError."""
        found = json.loads(_call("ip", "-n", self.full(place), "-s", "-j", "link", "show", "out"))
        return int(found[0]["stats64"]["rx"]["bytes"])

    def close(self) -> None:
        """Remove the namespaces, and with them the rules; end the uplinks."""
        for wire in self._wires.values():
            wire.communicate(timeout=10)  # it ends with its input
        self._wires = {}
        for name in self._made:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _call("ip", "netns", "del", name)
        self._made = []


class _Way:
    """One direction of an uplink."""

    def __init__(
        self, source: int, target: int, rate: float, delay: float, buffer: float, loss: float
    ) -> None:
        self.source, self.target = source, target
        self._line, self._buffer, self._loss, self._random = (
            Line(rate, delay),
            buffer,
            loss,
            random.Random(source),
        )
        self.told = {"bytes": 0, "packets": 0, "dropped": 0, "lost": 0, "queue_s": 0.0}

    def due(self, size: int, now: float) -> float | None:
        """Return when a packet of ``size`` bytes arrives; None: it does not."""
        queue = self._line.backlog(now)
        self.told["queue_s"] = max(self.told["queue_s"], round(queue, 3))
        if queue > self._buffer:
            self.told["dropped"] += 1
            return None
        self.told["packets"] += 1
        self.told["bytes"] += size
        arrives = self._line.send(now, size)
        if self._random.random() < self._loss:
            self.told["lost"] += 1
            return None
        return arrives


def carry(uplink: Uplink, ends: Sequence[Sequence[str]]) -> None:
    """Be the uplink between two interfaces (namespace, name) until standard input ends; at each
    line of it tell what it carried.
    """
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # or a busy machine would be a slower line
    home, wan = (inside(namespace, partial(tun, device)) for namespace, device in ends)
    print("ready", flush=True)
    ways = {
        home: _Way(home, wan, uplink.up, uplink.delay, uplink.up_buffer, uplink.loss),
        wan: _Way(wan, home, uplink.down, uplink.delay, uplink.down_buffer, uplink.loss),
    }
    waiting: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    while True:
        pause = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else 1.0
        for file in select.select([*ways, 0], [], [], pause)[0]:
            if file == 0:
                if not sys.stdin.readline():
                    return
                print(json.dumps([way.told for way in ways.values()]), flush=True)
                for way in ways.values():
                    way.told["queue_s"] = 0.0
                continue
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):  # then see to what is due
                    packet, now = os.read(file, 65536), time.monotonic()
                    if packet[0] >> 4 != 4:
                        continue  # what the kernel says by IPv6 to nobody
                    if (due := ways[file].due(len(packet), now)) is not None:
                        heapq.heappush(waiting, (due, next(order), ways[file].target, packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the interface is going down: a lost packet
                os.write(target, packet)


def enter_here(namespace: str) -> None:
    """Put the calling thread, and what it starts, into a namespace. OSError."""
    with Path(f"/var/run/netns/{namespace}").open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def inside(namespace: str, make: Callable[[], T]) -> T:
    """Call ``make`` in a thread of its own that is in that namespace, and return or raise what it
    does.
    """
    found: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            enter_here(namespace)
            found.append(make())
        except BaseException as error:  # raised in the calling thread
            failed.append(error)

    thread = threading.Thread(target=work, name=namespace)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def udp(port: int = 0) -> socket.socket:
    """A UDP socket at this port of all addresses."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(30)
    made.bind(("0.0.0.0", port))
    return made


def tcp(port: int = 0, *, listen: bool = False) -> socket.socket:
    """A TCP socket at this port of all addresses, which several may share."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.settimeout(30)
    made.bind(("0.0.0.0", port))
    if listen:
        made.listen(8)
    return made


def _call(*command: str, text: str | None = None) -> str:
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _remove_stale() -> None:
    """Remove what a benchmark that was killed has left behind."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for line in _call("ip", "netns", "list").splitlines():
            found = re.match(rf"{NAME}(\d+)-[\w-]+", line)
            if found and not Path(f"/proc/{found[1]}").exists():
                _call("ip", "netns", "del", found[0])


if __name__ == "__main__":
    *shape, first, second = json.loads(sys.argv[1])
    carry(Uplink(*shape), (first, second))
