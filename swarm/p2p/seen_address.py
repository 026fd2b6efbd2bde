"""The address by QUIC from which a node's packets come, as others see it.

    await ask_seen(daemon, asked, traffic)     # "/ip4/203.0.113.5/udp/40001/quic-v1", or nothing

Behind a router a machine does not know it; bootstrap nodes and members tell it (`tell_seen`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.p2p.addresses import host_of
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon
from shoal.swarm.p2p.messages import receive_message, send_message
from shoal.swarm.p2p.reachability import LOWEST_PORT
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.envelope import Message
from shoal.swarm.wire.messages import SEEN_PROTOCOL

MESSAGE_S = 5.0
"""For one small message."""
DIAL_S = 3
"""Of a dial, in which QUIC sends 8 packets to an address where nobody answers."""
HIGHEST_PORT = 65_535
MAX_ADDRESS_CHARS = 128
NATIVE = ipaddress.IPv6Network("2000::/3")

ADDRESS_UNKNOWN = (NetworkError, MessageError, *DAEMON_GONE, ValueError, asyncio.TimeoutError)
"""What a peer raises that does not tell the address."""


class Seen(Message):
    """The address that the asker's connection by QUIC comes from; empty if it has none."""

    KIND = "seen"
    address: Annotated[str, Field(max_length=MAX_ADDRESS_CHARS)]


async def tell_seen(daemon: Daemon, stream: Stream) -> None:
    """Answer one stream of `SEEN_PROTOCOL`. Raises NetworkError or another of `DAEMON_GONE`."""
    ways = (await daemon.ways()).get(stream.peer_id, [])
    own = [way for way in ways if "/quic-v1" in way and host_of(way) == stream.origin]
    # An asker that has moved is for half a minute connected from where it was too; the newest is
    # the last.
    address = own[-1][:MAX_ADDRESS_CHARS] if own else ""
    await send_message(stream, Seen(address=address), MESSAGE_S)


async def ask_seen(
    daemon: Daemon, asked: Iterable[tuple[str, list[str]]], traffic: TrafficMeter
) -> str:
    """Return the address from which the daemon's packets come; nothing if nobody answers.

    ``asked``: peers and their addresses, in the order in which they are asked.
    """
    for peer, addresses in asked:
        with contextlib.suppress(*ADDRESS_UNKNOWN):
            await asyncio.wait_for(daemon.connect(peer, addresses, seconds=DIAL_S), MESSAGE_S)
            ends = await asyncio.wait_for(daemon.open(peer, SEEN_PROTOCOL), MESSAGE_S)
            with contextlib.closing(Stream(peer, *ends, traffic)) as stream:
                seen = await receive_message(stream, Seen, MESSAGE_S)
            if seen.address:
                return seen.address
    return ""


def usable(address: str) -> bool:
    """Return whether an address of a stranger's may be dialled: by QUIC, a public IP address, and
    no system's port.
    """
    parts = address.split("/")
    if len(parts) != 6 or parts[1] not in ("ip4", "ip6"):
        return False
    if (parts[3], parts[5]) != ("udp", "quic-v1"):
        return False
    if not parts[4].isdecimal():
        return False
    try:
        ip = ipaddress.ip_address(parts[2])
        port = int(parts[4])
    except ValueError:
        return False
    return _is_public(ip) and LOWEST_PORT <= port <= HIGHEST_PORT


def _is_public(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether anybody may be meant by ``ip``; an IPv6 address must not hold one of IPv4."""
    if not ip.is_global or ip.is_multicast:
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return True
    return ip in NATIVE and ip.sixtofour is None and ip.teredo is None
