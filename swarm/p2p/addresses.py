"""Addresses of peers: their forms, where they lead, those met before (kept in a file), and those
not to be dialled again at once.

The ones met before lead to the swarm when every address of the link is dead. So most places are for
peers that have answered, one of each address range before the second of any: however many others
are heard of, they do not displace them. The file also has the addresses that this node listened on:
peers that have only old addresses find it again on the same port. Needs no hivemind.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low
from typing import TypeVar

N = TypeVar("N", int, float)
T = TypeVar("T")


def is_loopback(address: str) -> bool:
    """Return whether a multiaddr reaches no further than this machine."""
    return is_loopback_host(host_of(address))


def is_loopback_host(host: str) -> bool:
    """Return whether an IP address or a name reaches no further than this machine."""
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def is_public_host(host: str) -> bool:
    """Return whether ``host`` is a public IP address, which leads to the same machine from every
    network.
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_global
    return False


def host_asked(header: str) -> str:
    """Return the host in HTTP's header ``Host``, which may be any text, without the port."""
    return (header.rpartition("]")[0].strip("[") or header.partition(":")[0]).lower()


@functools.lru_cache(maxsize=4096)
def range_of(host: str) -> str:
    """Return the address range of an IP address; of anything else, as a name, its last two
    labels.
    """
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return ".".join(host.lower().split(".")[-2:])
    return str(ipaddress.ip_network((ip, 16 if ip.version == 4 else 32), strict=False))


def host_of(address: str) -> str:
    """Return the IP address or name in a multiaddr; nothing if it has none."""
    return "".join(address.split("/")[2:3])


def by_peer(addresses: Iterable[str]) -> dict[str, list[str]]:
    """Return peer id -> its addresses, of full multiaddrs."""
    found: dict[str, list[str]] = {}
    for address in addresses:
        found.setdefault(address.rpartition("/p2p/")[2], []).append(address)
    return found


def range_met(peer: str, said: Sequence[str], met: Mapping[str, str]) -> str:
    """Return the address range in which a peer was ``met``, or is as it ``said`` (its addresses);
    one for all that say nothing.
    """
    return range_of(met.get(peer) or host_of(said[0] if said else ""))


def by_turns(hosts: Iterable[tuple[T, str]], place: Callable[[str], str] = range_of) -> list[T]:
    """Return the peers, or whatever, of (peer, host): first one of each ``place``, by default an
    address range, then a second, and so on.
    """
    turns: Counter[str] = Counter()
    placed = []
    for peer, host in hosts:
        where = place(host)
        placed.append((turns[where], peer))
        turns[where] += 1
    return [peer for _, peer in sorted(placed, key=lambda each: each[0])]


def known_first(said: Iterable[tuple[str, Sequence[str]]], met: Mapping[str, str]) -> list[str]:
    """Return the peers of (peer, addresses that it says) by turns: first those that were ``met``,
    by where, then the others, by the first of these.
    """
    known = []
    others = []
    for peer, addresses in said:
        if met.get(peer):
            known.append((peer, met[peer]))
        else:
            others.append((peer, host_of(addresses[0] if addresses else "")))
    return [*by_turns(known), *by_turns(others)]


def one_each(values: Iterable[tuple[str, N]]) -> list[N]:
    """Return of (host, value) one value for each address range, the lower median of its values:
    keys cost nothing.
    """
    ranges = defaultdict[str, list[N]](list)
    for host, value in values:
        ranges[range_of(host)].append(value)
    return [median_low(each) for each in ranges.values()]


def of_ranges(values: Iterable[tuple[str, N]], met: Mapping[str, str]) -> list[N]:
    """Return of (peer, value) one value for each address range at which peers were ``met``, or all
    values if none was.
    """
    every = list(values)
    return one_each((met[peer], value) for peer, value in every if met.get(peer)) or [
        value for _, value in every
    ]
