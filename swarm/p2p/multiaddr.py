"""Where a peer's connection comes from, as the daemon tells it with every incoming stream."""

from __future__ import annotations

import contextlib
import ipaddress

# Codes of the parts of a binary multiaddr, as varints.
_IP4, _IP6, _TCP = b"\x04", b"\x29", b"\x06"
_UDP, _QUIC = b"\x91\x02", b"\xcd\x03"


def origin(address: bytes) -> str:
    """The IP address in a binary multiaddr of a direct connection over TCP or QUIC; empty for any other, such as by a relay."""
    for code, size in ((_IP4, 4), (_IP6, 16)):
        host, rest = address[1 : 1 + size], address[1 + size :]
        if address[:1] == code and len(host) == size:
            tcp = rest[:1] == _TCP and len(rest) == 3
            quic = rest[:2] == _UDP and rest[4:] == _QUIC
            return str(ipaddress.ip_address(host)) if tcp or quic else ""
    return ""


def is_loopback(address: str) -> bool:
    """Whether a multiaddr reaches no further than this machine."""
    parts = address.split("/")
    with contextlib.suppress(IndexError, ValueError):
        return parts[2] == "localhost" or ipaddress.ip_address(parts[2]).is_loopback
    return False
