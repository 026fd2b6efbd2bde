"""Which addresses a link gets, so that it works as long as anybody of its swarm, or a bootstrap
node, can be reached.

The bootstrap nodes come first, for they are meant to be there always. Members that can be dialled
directly come before those behind a relay, those that this node met before those that it only read
of, and of each kind one of every address range before the second of any: one provider's fault, or
one stranger's many keys, then do not make up the whole link.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from shoal.swarm.access.address import address_problem
from shoal.swarm.access.link import MAX_ADDRESSES, Link
from shoal.swarm.p2p.addresses import by_turns, host_of, is_loopback, is_public_host

MAX_OF_SEEDS = 4
MAX_OWN = 4
RELAY = "/p2p-circuit"


class Announced(Protocol):
    """A member by what it announces of itself: full multiaddrs, and when (Unix seconds)."""

    @property
    def addresses(self) -> tuple[str, ...]: ...
    @property
    def issued(self) -> float: ...


def lasting_link(
    swarm: str,
    members: Mapping[str, Announced],
    *,
    seeds: Mapping[str, Sequence[str]],
    own: Sequence[str] = (),
    met: Container[str] = (),
    otherwise: Sequence[str] = (),
) -> Link:
    """Return a link without an invitation to the swarm with the id ``swarm``, of 16 addresses at
    most.

    Args:
        members: peer id -> what the other members announce, of those heard of lately.
        seeds: peer id -> addresses of the bootstrap nodes. own: addresses of this node, if it is a
            member.
        met: ids of peers that called this node or answered it.
        otherwise: addresses for the places that are left.

    Private addresses lead nobody from elsewhere to the swarm, so they are in a link only if none of
    these but ``members``, whose word this is, has another.

    Raises LinkError: there is no address at all.
    """
    far = any(map(_leads_far, [*own, *otherwise, *itertools.chain(*seeds.values())]))

    def kept(addresses: Sequence[str]) -> list[str]:
        return [address for address in addresses if _leads_far(address) or not far]

    of_seeds = kept(_by_rank([_usable(addresses, peer) for peer, addresses in seeds.items()]))[
        :MAX_OF_SEEDS
    ]
    mine = kept(_preferred([address for address in own if address_problem(address) is None]))
    theirs = [
        usable
        for peer in _ranked(members, met)
        if (usable := kept(_usable(members[peer].addresses, peer)))
    ]
    room = MAX_ADDRESSES - len(of_seeds) - len(mine[:MAX_OWN])
    # Stable, so this node stands before the others of its kind.
    members_first = sorted(
        [*mine[:MAX_OWN], *(addresses[0] for addresses in theirs[:room])], key=lambda a: RELAY in a
    )
    rest = [
        *(address for addresses in theirs for address in addresses[1:2]),
        *mine[MAX_OWN:],
        *kept(otherwise),
    ]
    wanted = list(
        dict.fromkeys(
            address
            for address in (*of_seeds, *members_first, *rest)
            if address_problem(address) is None
        )
    )
    return Link(swarm, tuple(wanted[:1])).also(wanted[1:])


def _ranked(members: Mapping[str, Announced], met: Container[str]) -> list[str]:
    """Return peer ids: direct before relayed, met before read of, then by turns over address
    ranges, the newest of each first.
    """
    kinds = defaultdict[tuple[bool, bool], list[tuple[str, str]]](list)
    for peer, member in sorted(members.items(), key=lambda item: (-item[1].issued, item[0])):
        best = next(iter(_usable(member.addresses, peer)), "")
        kinds[RELAY in best, peer not in met].append((peer, host_of(best)))
    return [peer for kind in sorted(kinds) for peer in by_turns(kinds[kind])]


def _usable(addresses: Sequence[str], peer: str) -> list[str]:
    """Return the addresses of ``peer`` that a link can hold, the best first; a record may name
    others' addresses too.
    """
    return _preferred(
        [a for a in addresses if a.endswith(f"/p2p/{peer}") and address_problem(a) is None]
    )


def _preferred(addresses: Sequence[str]) -> list[str]:
    """Return a peer's addresses, the best first: one that announces a relay cannot be dialled
    directly.

    Those on its own machine only if it has no others: elsewhere they lead to somebody else, or
    nowhere.
    """
    relayed = any(RELAY in address for address in addresses)
    addresses = [address for address in addresses if not is_loopback(address)] or addresses
    return sorted(
        addresses, key=lambda address: (relayed and RELAY not in address, not _leads_far(address))
    )


def _leads_far(address: str) -> bool:
    host = host_of(address)
    return is_public_host(host) if re.match("/ip[46]/", address) else not is_loopback(address)


def _by_rank(lists: Sequence[Sequence[str]]) -> list[str]:
    return [
        items[rank]
        for rank in range(max(map(len, lists), default=0))
        for items in lists
        if rank < len(items)
    ]
