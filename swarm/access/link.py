"""``shoal://`` links: the swarm id and a few addresses of peers, which are enough to join.

    shoal://<swarm id>?peer=/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW…&peer=…

The links of `shoal invite` also have an invitation, ``&invite=…`` (`shoal.swarm.access.invitation`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, unquote

from shoal.swarm.errors import LinkError
from shoal.swarm.identity import b58decode, is_peer_id

SCHEME = "shoal://"
MAX_CHARS = 4096
MAX_ADDRESSES = 16
AGAIN = "copy the whole link again"

# The last character carries one bit of the hash, so it is a or q.
_SWARM = re.compile(r"[a-z2-7]{51}[aq]")
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_INVITE = re.compile(r"[A-Za-z0-9_-]{1,1536}")


def address_problem(text: str) -> str | None:
    """Return why ``text`` is no address that a link can hold, or None if it is one.

    Allowed: ``/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT/p2p/ID``, ``…/udp/PORT/quic-v1/p2p/ID``, and either of them with
    ``/p2p-circuit/p2p/ID`` behind it (through a relay).
    """
    if len(text) > 512 or not text.startswith("/"):
        return "it does not start with / or is too long"
    parts = text[1:].split("/")
    if len(parts) < 4 or not _is_host(parts[0], parts[1]):
        return "its host is not /ip4, /ip6, /dns, /dns4 or /dns6 and a matching name"
    if not _PORT.fullmatch(parts[3]) or int(parts[3]) > 65_535:
        return "its port is not a number from 1 to 65535"
    transport = {"tcp": [], "udp": ["quic-v1"]}.get(parts[2])
    rest = parts[4:]
    if transport is None or rest[: len(transport)] != transport:
        return "its transport is not tcp or udp with quic-v1"
    rest = rest[len(transport) :]
    if len(rest) == 5 and rest[0] == rest[3] == "p2p" and rest[2] == "p2p-circuit":
        if not _is_relay_id(rest[1]):
            return "the peer id of its relay is invalid"
        rest = rest[3:]
    if len(rest) != 2 or rest[0] != "p2p":
        return "it does not end with /p2p/ and a peer id"
    return None if is_peer_id(rest[1]) else "its peer id is invalid"


def _quoted(text: str) -> str:
    """Quote ``text`` for an error message: short, and without control characters."""
    quoted = ascii(text)
    return quoted if len(quoted) <= 160 else quoted[:156] + "...'"


def _is_host(kind: str, host: str) -> bool:
    if kind in ("dns", "dns4", "dns6"):
        return _HOST.fullmatch(host) is not None
    try:
        parsed = {"ip4": ipaddress.IPv4Address, "ip6": ipaddress.IPv6Address}[kind](host)
    except (KeyError, ValueError):
        return False
    return "%" not in str(parsed)  # a zone such as fe80::1%eth0 means something on one machine only


def _is_relay_id(text: str) -> bool:
    """Return whether ``text`` is the id of a possible relay, which may have another key: an RSA key's id is a SHA-256 multihash."""
    try:
        return is_peer_id(text) or (len(text) <= 64 and len(raw := b58decode(text)) == 34 and raw[:2] == b"\x12\x20")
    except ValueError:
        return False


@dataclass(frozen=True)
class Link:
    """A swarm and its bootstrap peers: ``swarm`` is its id, ``bootstrap`` 1 to 16 addresses, ``invite`` an invitation or nothing.

    Raises LinkError.
    """

    swarm: str
    bootstrap: tuple[str, ...]
    invite: str = ""

    def __post_init__(self) -> None:
        if not _SWARM.fullmatch(self.swarm):
            raise LinkError(f"The swarm id in the link is not 52 characters of a-z and 2-7: {AGAIN}.")
        if not self.bootstrap:
            raise LinkError(f"The link names no peer to join through (?peer=…): {AGAIN}.")
        if len(self.bootstrap) > MAX_ADDRESSES:
            raise LinkError(f"The link holds {len(self.bootstrap)} addresses, at most {MAX_ADDRESSES} are allowed: remove some.")
        for address in self.bootstrap:
            if problem := address_problem(address):
                raise LinkError(f"The address {_quoted(address)} in the link is malformed, {problem}: {AGAIN}.")
        if self.invite and not _INVITE.fullmatch(self.invite):
            raise LinkError(f"The invitation in the link is malformed: {AGAIN}.")
        if len(str(self)) > MAX_CHARS:
            raise LinkError(f"The link is longer than {MAX_CHARS} characters: remove some of its addresses.")

    def __str__(self) -> str:
        parts = [f"peer={quote(address, safe='/:')}" for address in self.bootstrap]
        return f"{SCHEME}{self.swarm}?" + "&".join([*parts, f"invite={self.invite}"] if self.invite else parts)

    def also(self, addresses: Iterable[str]) -> Link:
        """Return a link with these addresses behind its own, as far as they are valid and the bounds of a link allow."""
        link = self
        for address in addresses:
            if len(link.bootstrap) == MAX_ADDRESSES:
                break
            if address not in link.bootstrap and address_problem(address) is None:
                with contextlib.suppress(LinkError):  # too long with this one
                    link = Link(self.swarm, (*link.bootstrap, address), self.invite)
        return link

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse the link in ``text``; white space around it is ignored. Raises LinkError."""
        text = text.strip()
        if len(text) > MAX_CHARS:
            raise LinkError(f"The link is longer than {MAX_CHARS} characters: {AGAIN}.")
        if not text.startswith(SCHEME):
            raise LinkError(f"{_quoted(text)} does not start with {SCHEME}: pass the link that `shoal up` printed.")
        swarm, _, query = text[len(SCHEME) :].partition("?")
        addresses, invite = [], ""
        for part in query.split("&") if query else []:
            name, _, value = part.partition("=")
            if name == "invite" and not invite and value:
                invite = value
                continue
            if name != "peer":
                raise LinkError(f"The link holds an unknown part {_quoted(part)}: quote it in the shell, and {AGAIN}.")
            addresses.append(unquote(value))  # bytes that are no UTF-8 become a character that no address may have
        return cls(swarm, tuple(addresses), invite)
