"""The addresses to listen on: check that they can be bound, and replace port 0 by the port obtained."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from collections.abc import Sequence

from shoal.swarm.access.link import address_problem
from shoal.swarm.errors import StartupError
from shoal.swarm.p2p.multiaddr import by_quic, is_loopback
from shoal.swarm.wire.fields import MAX_ADDRESS


def check_free(listen: Sequence[str]) -> None:
    """Raise StartupError for the first of the listen addresses that cannot be bound.

    The daemon itself would not notice: it shares its port with any other p2pd of the same user (SO_REUSEPORT), and is satisfied
    when one of several addresses works.
    """
    for address in listen:
        found = re.match(r"/(ip4|ip6)/([^/]+)/(tcp|udp)/(\d+)", address)
        if found is None:
            raise StartupError(f"cannot listen on {address}: write it like /ip4/0.0.0.0/tcp/4001.")
        family = socket.AF_INET if found[1] == "ip4" else socket.AF_INET6
        kind = socket.SOCK_STREAM if found[3] == "tcp" else socket.SOCK_DGRAM
        if int(found[4]) > 65535:
            raise StartupError(f"cannot listen on {address}: a port is at most 65535.")
        try:
            with socket.socket(family, kind) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if kind == socket.SOCK_STREAM:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the daemon does: TIME_WAIT does not matter
                probe.bind((found[2], int(found[4])))
        except OSError as error:
            raise StartupError(f"cannot listen on {address}: {_bind_problem(error)}.") from error


def beside(listen: Sequence[str]) -> list[str]:
    """Return where to listen by QUIC beside these addresses: at their TCP ports, where those are known and free."""
    found = []
    for address in listen:
        quic = by_quic(address)
        if quic not in listen and "/udp/0/" not in quic and not is_loopback(address):
            with contextlib.suppress(StartupError):
                check_free([quic])
                found.append(quic)
    return found


def check_announced(announce: Sequence[str], peer_id: str) -> None:
    """Raise StartupError for the first of the addresses to announce that no record or link could hold, with the id behind it."""
    for address in announce:
        full = f"{address}/p2p/{peer_id}"
        problem = address_problem(full)
        if len(full) > MAX_ADDRESS:
            problem = f"it has {len(address)} characters, at most {MAX_ADDRESS - len(full) + len(address)} are allowed"
        if problem:
            raise StartupError(f"cannot announce {address[:80]}: {problem}; write it like /ip4/203.0.113.5/tcp/4001.")


def _bind_problem(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is taken by another program, choose another with --listen or stop that program"
    if error.errno == errno.EACCES:
        return "ports below 1024 need root, choose a higher one with --listen"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address, use /ip4/0.0.0.0/... to listen on all it has"
    return f"{error.strerror or error}, choose another address with --listen"


def fixed_ports(listen: Sequence[str], addresses: Sequence[str]) -> tuple[str, ...]:
    """Return ``listen`` with each port 0 replaced by the port in ``addresses``, so that a restart keeps it."""
    fixed = []
    for address in listen:
        found = re.match(r"(/(ip4|ip6)/[^/]+/(tcp|udp)/)0(?=/|$)", address)
        if found:
            ports = {m[1] for a in addresses if (m := re.match(rf"/{found[2]}/[^/]+/{found[3]}/(\d+)", a))}
            if len(ports) == 1:
                address = found[1] + ports.pop() + address[found.end() :]
        fixed.append(address)
    return tuple(fixed)


def as_before(listen: Sequence[str], before: Sequence[str]) -> tuple[str, ...]:
    """Return ``before`` if it differs from ``listen`` only in ports that are 0 there, and is free now; else ``listen``."""

    def any_port(address: str) -> str:
        return re.sub(r"(/(?:tcp|udp)/)[0-9]+(?=/|$)", r"\g<1>0", address, count=1)

    if len(listen) != len(before) or any(a not in (b, any_port(b)) for a, b in zip(listen, before, strict=True)):
        return tuple(listen)
    try:
        check_free(before)
    except StartupError:
        return tuple(listen)
    return tuple(before)


def obtain_ports(listen: Sequence[str]) -> tuple[str, ...]:
    """Return ``listen`` with each port 0 replaced by one that is free now."""
    chosen = []
    for address in listen:
        found = re.match(r"(/(ip4|ip6)/([^/]+)/(tcp|udp)/)0(?=/|$)", address)
        if found:
            family = socket.AF_INET if found[2] == "ip4" else socket.AF_INET6
            kind = socket.SOCK_STREAM if found[4] == "tcp" else socket.SOCK_DGRAM
            with socket.socket(family, kind) as probe:
                probe.bind((found[3], 0))
                address = f"{found[1]}{probe.getsockname()[1]}{address[found.end() :]}"
        chosen.append(address)
    return tuple(chosen)
