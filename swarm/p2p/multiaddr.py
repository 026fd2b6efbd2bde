"""Multiaddrs and peer ids: text to bytes and back. Needs no hivemind."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from pathlib import Path

from shoal.swarm.identity import b58decode, b58encode

MAX_ID_BYTES = 64  # of a peer id of any kind, and characters of one that is read

# Name -> code, and bytes of the value; None: the length precedes it.
_PARTS: dict[str, tuple[int, int | None]] = {
    "ip4": (4, 4),
    "ip6": (41, 16),
    "tcp": (6, 2),
    "udp": (273, 2),
    "dns": (53, None),
    "dns4": (54, None),
    "dns6": (55, None),
    "dnsaddr": (56, None),
    "p2p": (421, None),
    "p2p-circuit": (290, 0),
    "tls": (448, 0),
    "quic": (460, 0),
    "quic-v1": (461, 0),
    "ws": (477, 0),
    "wss": (478, 0),
}
_NAMES = {code: (name, size) for name, (code, size) in _PARTS.items()}
_UNIX = 400


def varint(number: int) -> bytes:
    """Encode a number above or equal 0 as an unsigned LEB128 varint."""
    head = bytearray()
    while number > 127:
        head.append(number & 127 | 128)
        number >>= 7
    return bytes([*head, number])


def peer_bytes(peer_id: str) -> bytes:
    """Decode a base58 peer id of any kind. Raises ValueError."""
    raw = b58decode(peer_id) if len(peer_id) <= MAX_ID_BYTES else b""
    if not raw:
        raise ValueError(f"{peer_id[:80]!r} is no peer id")
    return raw


def to_bytes(address: str) -> bytes:
    """Encode a multiaddr.

    Raises ValueError if it is none, or has a part that this node does not know.
    """
    empty, *parts = address.split("/")
    rest = iter(parts)
    data = b""
    for name in rest:
        if name not in _PARTS:
            raise ValueError(f"{address[:80]!r} is no multiaddr that this node can use")
        code, size = _PARTS[name]
        value = b"" if size == 0 else _value(name, next(rest, ""))
        data += varint(code) + (varint(len(value)) if size is None else b"") + value
    if empty or not data:
        raise ValueError(f"{address[:80]!r} is no multiaddr")
    return data


def _value(name: str, text: str) -> bytes:
    if name in ("ip4", "ip6"):
        return (
            ipaddress.IPv4Address(text).packed
            if name == "ip4"
            else ipaddress.IPv6Address(text).packed
        )
    if name in ("tcp", "udp"):
        if not text.isdecimal() or int(text) > 65_535:
            raise ValueError(f"{text[:80]!r} is no port")
        return int(text).to_bytes(2, "big")
    if name == "p2p":
        return peer_bytes(text)
    if not text:
        raise ValueError(f"/{name} lacks a name")
    return text.encode()


def to_text(data: bytes) -> str:
    """Decode a binary multiaddr.

    Raises ValueError if it is none, or has a part that this node does not know.
    """
    text = ""
    at = 0
    while at < len(data):
        code, at = _read_varint(data, at)
        if code not in _NAMES:
            raise ValueError(
                f"the address {data.hex()[:80]} has a part that this node does not know"
            )
        name, size = _NAMES[code]
        if size is None:
            size, at = _read_varint(data, at)
        value = data[at : at + size]
        at = at + size
        if len(value) != size:
            raise ValueError(f"the address {data.hex()[:80]} is cut off")
        text += f"/{name}"
        if name in ("ip4", "ip6"):
            text += f"/{ipaddress.ip_address(value)}"
        elif name in ("tcp", "udp"):
            text += f"/{int.from_bytes(value, 'big')}"
        elif size:
            text += f"/{b58encode(value[:MAX_ID_BYTES]) if name == 'p2p' else value.decode()}"
    return text


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift, byte in enumerate(data[at : at + 4]):
        number |= (byte & 127) << 7 * shift
        if byte < 128:
            return number, at + shift + 1
    raise ValueError("a number in the address is cut off")


def unix_address(path: Path) -> bytes:
    """Encode ``/unix/PATH``, the address of a socket of this machine."""
    name = os.fsencode(path)
    return varint(_UNIX) + varint(len(name)) + name


def by_quic(address: str) -> str:
    """Return the address at which whoever listens at this one by TCP listens by QUIC, if so: at the
    same port.
    """
    return re.sub("/tcp/([0-9]+)(?=/p2p/|$)", r"/udp/\1/quic-v1", address)


def origin(address: bytes) -> str:
    """Return the IP address in a binary multiaddr of a direct connection over TCP or QUIC; empty
    for any other, as by a relay.
    """
    with contextlib.suppress(ValueError):
        match to_text(address).split("/"):
            case ["", "ip4" | "ip6", host, "tcp", _] | [
                "",
                "ip4" | "ip6",
                host,
                "udp",
                _,
                "quic-v1",
            ]:
                return host
    return ""
