"""Home routers in network namespaces, as root on Linux: the four classic kinds of NAT (RFC 3489), and none.

    seed   peer-1 ...   public machines
      |      |
    [    wan     ]      routes, limits nothing
      |      |
    router router       nftables, in these namespaces only
      |      |
    home-0 home-1 ...   the machine at home

All kinds map one inside port to the same outside port, but `symmetric`, which takes another for each destination. They differ in
who may send to a mapped port: anybody (`full`), an address that was sent to (`address`), or an address and port (`port`,
`symmetric`). `none` is a machine with a public address and no router. The same holds for TCP and UDP. Nobody answers to what is
not let in, and no router speaks UPnP or NAT-PMP.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

KINDS = ("none", "full", "address", "port", "symmetric")
NAME = "rch-"
CLONE_NEWNET = 0x40000000
_WORKS = "table ip works { chain leave { type nat hook postrouting priority srcnat; oifname none masquerade; }; }"
_CUT = "table inet cut { chain whole { type filter hook forward priority -5; policy drop; }; }"
_serial = itertools.count()
LAN = "192.168.{}"  # the network of a home

# `open` has what was sent: protocol, port at home, and with `address` to whom. An endpoint of it is let in by DNAT.
_CONE = """
  set open {{ type inet_proto . inet_service{type}; flags dynamic,timeout; timeout 1h; size 65535; }}
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
    """Rules for nftables of a router of one of `KINDS` but ``none``, between interfaces ``in``, where ``host`` is, and ``out``."""
    cone = ""
    if kind == "full":
        cone = _CONE.format(type="", to="", by="", host=host)
    elif kind == "address":
        cone = _CONE.format(type=" . ipv4_addr", to=" . ip daddr", by=" . ip saddr", host=host)
    elif kind not in ("port", "symmetric"):
        raise ValueError(f"no kind of router: {kind}")
    return _ROUTER.format(cone=cone, ports=" fully-random" if kind == "symmetric" else "")


class Internet:
    """Homes behind routers of the given kinds, a ``seed`` and ``peers`` other public machines. NatError if that does not work here.

    Places are named ``seed``, ``peer-1``..., ``home-0``..., ``router-0``... . libp2p takes their outer addresses for public ones;
    no packet leaves the namespaces. ``same_lan``: all homes use the same private addresses, as many do.
    """

    def __init__(self, homes: Sequence[str], peers: int = 1, *, same_lan: bool = False) -> None:
        if os.geteuid() != 0:
            raise NatError("network namespaces need root")
        for tool, package in (("ip", "iproute2"), ("nft", "nftables")):
            if shutil.which(tool) is None:
                raise NatError(f"the command {tool} is not installed (package {package})")
        self._number = next(_serial)
        self._made: list[str] = []
        self._ips: dict[str, str] = {}
        _remove_stale()
        try:
            try:
                self._add("wan")
                self._forward("wan")
                self.nft("wan", "-f", "-", rules=_WORKS)
            except (OSError, subprocess.SubprocessError) as error:
                raise NatError(f"network namespaces with nftables do not work here ({error})") from error
            for name in ("seed", *(f"peer-{number + 1}" for number in range(peers))):
                self._public(name)
            for number, kind in enumerate(homes):
                self._home(number, kind, LAN.format(7 if same_lan else 7 + number))
        except BaseException:
            self.close()
            raise

    def _home(self, number: int, kind: str, lan: str) -> None:
        home = f"home-{number}"
        if kind == "none":
            self._public(home)
            return
        router = f"router-{number}"
        outside = self._public(router)
        self._add(home)
        self._cable(router, "in", home, "out", lan)
        self._forward(router)
        self.nft(router, "-f", "-", rules=rules(kind, f"{lan}.2"))
        self._ips[home] = outside

    def _public(self, name: str) -> str:
        net = f"11.0.{len(self._ips) + 1}"
        self._add(name)
        self._cable("wan", f"to{len(self._ips)}", name, "out", net)
        self._ips[name] = f"{net}.2"
        return self._ips[name]

    def _add(self, name: str) -> None:
        _call("ip", "netns", "add", self.full(name))
        self._made.append(self.full(name))
        _call("ip", "-n", self.full(name), "link", "set", "lo", "up")

    def _forward(self, name: str) -> None:
        _call(*self.enter(name), "sysctl", "-qw", "net.ipv4.ip_forward=1")

    def _cable(self, router: str, its: str, node: str, own: str, net: str) -> None:
        first, second = self.full(router), self.full(node)
        _call("ip", "-n", first, "link", "add", its, "type", "veth", "peer", "name", own, "netns", second)
        for name, device, host in ((first, its, 1), (second, own, 2)):
            _call("ip", "-n", name, "addr", "add", f"{net}.{host}/24", "dev", device)
            _call("ip", "-n", name, "link", "set", device, "up")
        _call("ip", "-n", second, "route", "add", "default", "via", f"{net}.1")

    def full(self, place: str) -> str:
        """The namespace of a place."""
        return f"{NAME}{os.getpid()}-{self._number}-{place}"

    def enter(self, place: str) -> list[str]:
        """What to put before a command so that it runs there."""
        return ["ip", "netns", "exec", self.full(place)]

    def nft(self, place: str, *arguments: str, rules: str | None = None) -> None:
        """Call nft at a place, with ``rules`` on its standard input. OSError or subprocess.TimeoutExpired."""
        _call(*self.enter(place), "nft", *arguments, text=rules)

    def ip(self, place: str) -> str:
        """The public address of a place; of a home: its router's."""
        return self._ips[place]

    def at(self, place: str, make: Callable[[], T]) -> T:
        """Call ``make`` in a thread that is in that namespace: a socket stays in the one in which it was made. NatError."""
        return inside(self.full(place), make)

    def cut(self, router: str, cut: bool) -> None:
        """Have ``router`` lose every packet that it should pass on, or no more. OSError."""
        self.nft(router, "-f", "-", rules=_CUT) if cut else self.nft(router, "delete", "table", "inet", "cut")

    def move(self, router: str) -> str:
        """Give ``router`` another public address, and have it forget who spoke with whom; return the address. OSError."""
        net, old = self._ips[router].rpartition(".")[0], self._ips[router]
        self._ips[router] = f"{net}.3"
        for change in (("addr", "del", f"{old}/24"), ("addr", "add", f"{net}.3/24")):
            _call("ip", "-n", self.full(router), *change, "dev", "out")
        _call("ip", "-n", self.full(router), "route", "replace", "default", "via", f"{net}.1")
        return self._ips[router]

    def received(self, place: str) -> int:
        """The bytes that a place has received. OSError."""
        found = json.loads(_call("ip", "-n", self.full(place), "-s", "-j", "link", "show", "out"))
        return int(found[0]["stats64"]["rx"]["bytes"])

    def close(self) -> None:
        """Remove the namespaces, and with them the rules."""
        for name in self._made:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _call("ip", "netns", "del", name)
        self._made = []


def enter_here(namespace: str) -> None:
    """Put the calling thread, and what it starts, into a namespace. OSError."""
    with Path(f"/var/run/netns/{namespace}").open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def inside(namespace: str, make: Callable[[], T]) -> T:
    """Call ``make`` in a thread of its own that is in that namespace, and return or raise what it does."""
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
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
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
