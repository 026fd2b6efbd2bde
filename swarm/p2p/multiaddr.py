"""libp2p addresses: their text and binary forms, and what an address says of where a peer is. Needs no hivemind."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median_low
from typing import TypeVar

from shoal.swarm.identity import b58decode, b58encode

N = TypeVar("N", int, float)

MAX_ID = 64  # bytes of a peer id of any kind, and characters of one that is read

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

# Codes of the parts of a direct connection's address, as varints.
_IP4, _IP6, _TCP = b"\x04", b"\x29", b"\x06"
_UDP, _QUIC = b"\x91\x02", b"\xcd\x03"


def varint(number: int) -> bytes:
    """Encode a number above or equal 0 as an unsigned LEB128 varint."""
    head = bytearray()
    while number > 127:
        head.append(number & 127 | 128)
        number >>= 7
    return bytes([*head, number])


def peer_bytes(peer_id: str) -> bytes:
    """Decode a base58 peer id of any kind. Raises ValueError."""
    raw = b58decode(peer_id) if len(peer_id) <= MAX_ID else b""
    if not raw:
        raise ValueError(f"{peer_id[:80]!r} is no peer id")
    return raw


def to_bytes(address: str) -> bytes:
    """Encode a multiaddr. Raises ValueError if it is none, or has a part that this node does not know."""
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
        return ipaddress.IPv4Address(text).packed if name == "ip4" else ipaddress.IPv6Address(text).packed
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
    """Decode a binary multiaddr. Raises ValueError if it is none, or has a part that this node does not know."""
    text, at = "", 0
    while at < len(data):
        code, at = _read_varint(data, at)
        if code not in _NAMES:
            raise ValueError(f"the address {data.hex()[:80]} has a part that this node does not know")
        name, size = _NAMES[code]
        if size is None:
            size, at = _read_varint(data, at)
        value, at = data[at : at + size], at + size
        if len(value) != size:
            raise ValueError(f"the address {data.hex()[:80]} is cut off")
        text += f"/{name}"
        if name in ("ip4", "ip6"):
            text += f"/{ipaddress.ip_address(value)}"
        elif name in ("tcp", "udp"):
            text += f"/{int.from_bytes(value, 'big')}"
        elif size:
            text += f"/{b58encode(value[:MAX_ID]) if name == 'p2p' else value.decode()}"
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


def without_peer(address: str) -> str:
    """Cut off the last ``/p2p/ID``, if there is one: the form in which the daemon takes an address."""
    return address.rpartition("/p2p/")[0] or address


def by_quic(address: str) -> str:
    """Return the address at which whoever listens at this one by TCP listens by QUIC, if so: at the same port."""
    return re.sub("/tcp/([0-9]+)(?=/p2p/|$)", r"/udp/\1/quic-v1", address)


def origin(address: bytes) -> str:
    """Return the IP address in a binary multiaddr of a direct connection over TCP or QUIC; empty for any other, as by a relay."""
    for code, size in ((_IP4, 4), (_IP6, 16)):
        host, rest = address[1 : 1 + size], address[1 + size :]
        if address[:1] == code and len(host) == size:
            tcp = rest[:1] == _TCP and len(rest) == 3
            quic = rest[:2] == _UDP and rest[4:] == _QUIC
            return str(ipaddress.ip_address(host)) if tcp or quic else ""
    return ""


def is_loopback(address: str) -> bool:
    """Return whether a multiaddr reaches no further than this machine."""
    parts = address.split("/")
    return len(parts) > 2 and is_loopback_host(parts[2])


def is_loopback_host(host: str) -> bool:
    """Return whether an IP address or a name reaches no further than this machine."""
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def is_public_host(host: str) -> bool:
    """Return whether ``host`` is a public IP address, which leads to the same machine from every network."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_global
    return False


def host_asked(header: str) -> str:
    """Return the host in HTTP's header ``Host``, which may be any text, without the port."""
    return (header.rpartition("]")[0].strip("[") or header.partition(":")[0]).lower()


@functools.lru_cache(maxsize=4096)
def range_of(host: str) -> str:
    """Return the address range of an IP address; of anything else, as a name, its last two labels."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return ".".join(host.lower().split(".")[-2:])
    return str(ipaddress.ip_network((ip, 16 if ip.version == 4 else 32), strict=False))


def host_of(address: str) -> str:
    """Return the IP address or name in a multiaddr; nothing if it has none."""
    return "".join(address.split("/")[2:3])


def by_turns(hosts: Iterable[tuple[str, str]]) -> list[str]:
    """Return the peers of (peer, host): first one of each address range, then a second of each, and so on."""
    turns: Counter[str] = Counter()
    placed = []
    for peer, host in hosts:
        where = range_of(host)
        placed.append((turns[where], peer))
        turns[where] += 1
    return [peer for _, peer in sorted(placed, key=lambda each: each[0])]


def known_first(claimed: Iterable[tuple[str, str]], met: Mapping[str, str]) -> list[str]:
    """Return the peers of (peer, host that it claims) by turns: first those that were ``met``, by where, then the others."""
    hosts = list(claimed)
    there = [(peer, met[peer]) for peer, _ in hosts if met.get(peer)]
    return [*by_turns(there), *by_turns((peer, host) for peer, host in hosts if not met.get(peer))]


def one_each(values: Iterable[tuple[str, N]]) -> list[N]:
    """Return of (host, value) one value for each address range, the lower median of its values: keys cost nothing."""
    ranges = defaultdict[str, list[N]](list)
    for host, value in values:
        ranges[range_of(host)].append(value)
    return [median_low(each) for each in ranges.values()]


def of_ranges(values: Iterable[tuple[str, N]], met: Mapping[str, str]) -> list[N]:
    """Return of (peer, value) one value for each address range at which peers were ``met``, or all values if none was."""
    every = list(values)
    return one_each((met[peer], value) for peer, value in every if met.get(peer)) or [value for _, value in every]
