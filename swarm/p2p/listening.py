"""Addresses to listen on and to announce: whether they can be, and which ports they get."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from collections.abc import Sequence

from shoal.swarm.access.address import address_problem
from shoal.swarm.errors import ListenError, StartupError
from shoal.swarm.p2p.addresses import is_loopback
from shoal.swarm.p2p.multiaddr import by_quic
from shoal.swarm.wire.envelope import MAX_ADDRESS

_BIND_PROBLEMS = {
    errno.EADDRINUSE: "the port is taken by another program, choose another with --listen or stop "
    "that program",
    errno.EACCES: "ports below 1024 need root, choose a higher one with --listen",
    errno.EADDRNOTAVAIL: "this machine has no such address, use /ip4/0.0.0.0/... to listen on all "
    "it has",
}


def _socket(ip: str, transport: str) -> socket.socket:
    """Return a socket for an address of ``ip4`` or ``ip6`` and ``tcp`` or ``udp``."""
    family = socket.AF_INET if ip == "ip4" else socket.AF_INET6
    return socket.socket(family, socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM)


def check_free(listen: Sequence[str]) -> None:
    """Raise StartupError for the first of the listen addresses that cannot be bound.

    The daemon itself would not notice: it shares its port with any other p2pd of the same user
    (SO_REUSEPORT), and is satisfied when one of several addresses works.
    """
    for address in listen:
        found = re.match(r"/(ip4|ip6)/([^/]+)/(tcp|udp)/(\d+)", address)
        if found is None:
            raise StartupError(f"cannot listen on {address}: write it like /ip4/0.0.0.0/tcp/4001.")
        if int(found[4]) > 65535:
            raise StartupError(f"cannot listen on {address}: a port is at most 65535.")
        try:
            with _socket(found[1], found[3]) as probe:
                if found[1] == "ip6":
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if found[3] == "tcp":
                    # As the daemon does: TIME_WAIT does not matter.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((found[2], int(found[4])))
        except OSError as error:
            other = f"{error.strerror or error}, choose another address with --listen"
            raise ListenError(
                f"cannot listen on {address}: {_BIND_PROBLEMS.get(error.errno or 0, other)}."
            ) from error


def beside(listen: Sequence[str]) -> list[str]:
    """Return where to listen by QUIC beside these addresses: at their TCP ports, where those are
    known and free.
    """
    found = []
    for address in listen:
        quic = by_quic(address)
        if quic not in listen and "/udp/0/" not in quic and not is_loopback(address):
            with contextlib.suppress(StartupError):
                check_free([quic])
                found.append(quic)
    return found


def check_announced(announce: Sequence[str], peer_id: str) -> None:
    """Raise StartupError for the first of the addresses to announce that no record or link could
    hold, with the id behind it.
    """
    for address in announce:
        full = f"{address}/p2p/{peer_id}"
        problem = address_problem(full)
        if len(full) > MAX_ADDRESS:
            problem = (
                f"it has {len(address)} characters, at most "
                f"{MAX_ADDRESS - len(full) + len(address)} are allowed"
            )
        if problem:
            raise StartupError(
                f"cannot announce {address[:80]}: {problem}; write it like "
                "/ip4/203.0.113.5/tcp/4001."
            )


_ANY_PORT = re.compile(r"^(/(ip4|ip6)/([^/]+)/(tcp|udp)/)0(?=/|$)")


def fixed_ports(listen: Sequence[str], addresses: Sequence[str]) -> tuple[str, ...]:
    """Return ``listen`` with each port 0 replaced by the port in ``addresses``, so that a restart
    keeps it.
    """

    def obtained(found: re.Match[str]) -> str:
        ports = {
            m[1] for a in addresses if (m := re.match(rf"/{found[2]}/[^/]+/{found[4]}/(\d+)", a))
        }
        return found[1] + (ports.pop() if len(ports) == 1 else "0")

    return tuple(_ANY_PORT.sub(obtained, address) for address in listen)


def obtain_ports(listen: Sequence[str]) -> tuple[str, ...]:
    """Return ``listen`` with each port 0 replaced by one that is free now."""

    def free(found: re.Match[str]) -> str:
        with _socket(found[2], found[4]) as probe:
            probe.bind((found[3], 0))
            return f"{found[1]}{probe.getsockname()[1]}"

    return tuple(_ANY_PORT.sub(free, address) for address in listen)


ANYWHERE = ("/ip4/0.0.0.0/tcp/0",)
"""Where a node listens if its user names no address."""
_LISTEN = re.compile(r"/(ip4|ip6)/[0-9a-fA-F.:]+/(tcp|udp)/[0-9]{1,5}(/|$)")


def as_before(listen: Sequence[str], before: Sequence[str]) -> tuple[str, ...]:
    """Return ``before`` if it differs from ``listen`` only in ports that are 0 there, or no address
    was named (`ANYWHERE`); else ``listen``.
    """
    if tuple(listen) == ANYWHERE and before and all(map(_LISTEN.match, before)):
        return tuple(before)
    port = re.compile(r"(?<=/tcp/|/udp/)[0-9]+(?=/|$)")
    same = len(listen) == len(before) and all(
        a in (b, port.sub("0", b, count=1)) for a, b in zip(listen, before, strict=True)
    )
    return tuple(before if same else listen)
