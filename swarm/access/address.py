"""Which addresses a link or a record may hold, and what is wrong with others.

address_problem("/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW…")    # None
address_problem("/ip4/203.0.113.5/tcp/99999/p2p/12D3KooW…")   # "its port is not a number …"
"""

from __future__ import annotations

import ipaddress
import re

from shoal.swarm.identity import b58decode, is_peer_id

MAX_ADDRESS_CHARS = 512
MAX_RELAY_ID_CHARS = 64
MULTIHASH_BYTES = 34
"""Of the id of a peer whose key is not Ed25519: two bytes that say so, and a SHA-256."""
SHA256_MULTIHASH = b"\x12\x20"
MAX_PORT = 65_535

_HOST = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?"
)
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_TRANSPORTS = {"tcp": [], "udp": ["quic-v1"]}
"""Transport -> the parts of an address that follow its port."""


def address_problem(text: str) -> str | None:
    """Return why ``text`` is no address that a link can hold, or None if it is one.

    Allowed: ``/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT/p2p/ID``, ``…/udp/PORT/quic-v1/p2p/ID``, and
    either of them with ``/p2p-circuit/p2p/ID`` behind it (through a relay).
    """
    if len(text) > MAX_ADDRESS_CHARS or not text.startswith("/"):
        return "it does not start with / or is too long"
    parts = text[1:].split("/")
    if len(parts) < 4 or not _is_host(parts[0], parts[1]):
        return "its host is not /ip4, /ip6, /dns, /dns4 or /dns6 and a matching name"
    if not _PORT.fullmatch(parts[3]) or int(parts[3]) > MAX_PORT:
        return "its port is not a number from 1 to 65535"
    transport = _TRANSPORTS.get(parts[2])
    rest = parts[4:]
    if transport is None or rest[: len(transport)] != transport:
        return "its transport is not tcp or udp with quic-v1"
    return _destination_problem(rest[len(transport) :])


def _destination_problem(parts: list[str]) -> str | None:
    """Return why ``parts`` are not ``p2p/ID``, or that behind a relay."""
    through_relay = len(parts) == 5 and parts[0] == parts[3] == "p2p" and parts[2] == "p2p-circuit"
    if through_relay:
        if not _is_relay_id(parts[1]):
            return "the peer id of its relay is invalid"
        parts = parts[3:]
    if len(parts) != 2 or parts[0] != "p2p":
        return "it does not end with /p2p/ and a peer id"
    return None if is_peer_id(parts[1]) else "its peer id is invalid"


def _is_host(kind: str, host: str) -> bool:
    if kind in ("dns", "dns4", "dns6"):
        return _HOST.fullmatch(host) is not None
    try:
        parsed = {"ip4": ipaddress.IPv4Address, "ip6": ipaddress.IPv6Address}[kind](host)
    except (KeyError, ValueError):
        return False
    # A zone such as fe80::1%eth0 means something on one machine only.
    return "%" not in str(parsed)


def _is_relay_id(text: str) -> bool:
    """Return whether ``text`` is the id of a possible relay, which may have another key: an RSA
    key's id is a SHA-256 multihash.
    """
    if is_peer_id(text):
        return True
    if len(text) > MAX_RELAY_ID_CHARS:
        return False
    try:
        raw = b58decode(text)
    except ValueError:
        return False
    return len(raw) == MULTIHASH_BYTES and raw.startswith(SHA256_MULTIHASH)
