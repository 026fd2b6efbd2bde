"""The trie of membership records: where a peer publishes its own, and which keys it reads.

Keys are the nodes of a binary trie over the bits of sha256(peer id). A record is stored under the
shortest prefix of its peer's bits whose key holds fewer than ``cap`` others, so no key grows with
the swarm. A reader starts at the root and descends from every key that is at least a quarter full.
Why, and how records move up again: docs/internals.md, "Keys of membership".
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TypeVar

from shoal.swarm.errors import NetworkError
from shoal.swarm.membership.records import MAX_DEPTH, bits_of

N = TypeVar("N")

CAP = 32  # records per key, but for a few that raced
# Times ``cap`` records of a key are used at most: the first by their bits, whoever is beyond moves
# on by `place`.
CROWD_FACTOR = 2
READ_LIMIT = 1024  # records read, about
# Keys that are read for the sake of known peers, when strangers' records have used up the limit.
MAX_KEYS = 128
KEYS_AT_ONCE = 8  # read at a time
# Chance per reading to move up to a half-empty parent: otherwise all below would move there
# together.
RISE_CHANCE = 1 / 8
# The same when the parent holds so few that readers no longer look below it.
RISE_HIDDEN_CHANCE = 1 / 2

Names = Mapping[str, object]  # peer id -> its record: the peers under a key
Get = Callable[[str], Awaitable[N]]


async def read_all(get: Get[N], keys: Iterable[str]) -> dict[str, N]:
    """Return what is under each of ``keys``; one that cannot be read (NetworkError) is left out."""
    keys = tuple(keys)
    answers = await asyncio.gather(*map(get, keys), return_exceptions=True)
    found: dict[str, N] = {}
    for key, answer in zip(keys, answers, strict=True):
        if not isinstance(answer, BaseException):
            found[key] = answer
        elif not isinstance(answer, NetworkError):
            raise answer
    return found


async def read(
    get: Get[Names],
    own: str,
    *,
    now: str | None = None,
    cap: int = CAP,
    limit: int = READ_LIMIT,
    known: Collection[str] = (),
) -> dict[str, Names]:
    """Return the records under each prefix of the trie, about ``limit`` in all, those near the
    ``own`` bits first.

    The path down to the reader's own prefix ``now`` is read in any case, and for the peers in
    ``known`` up to `MAX_KEYS` keys, so that no number of strangers' records hides them. A key that
    cannot be read is left out, with all below it.

    Raises NetworkError: the root cannot be read.
    """
    found: dict[str, Names] = {"": await get("")}
    total = len(found[""])
    queue = _children("", found[""], own, now or "", cap)
    missing = {peer: bits_of(peer) for peer in known if peer not in found[""]}
    while queue:
        if total >= limit and len(found) >= MAX_KEYS:
            break
        if total >= limit:
            queue = _leading_to(missing.values(), queue)
        batch = queue[:KEYS_AT_ONCE]
        queue = queue[KEYS_AT_ONCE:]
        answers = await read_all(get, batch)
        found |= answers
        for prefix, names in answers.items():
            for peer in names:
                missing.pop(peer, None)
            total += len(names)
            queue += _children(prefix, names, own, now or "", cap)
    return found


def _leading_to(peers_bits: Iterable[str], prefixes: list[str]) -> list[str]:
    """Return the ``prefixes`` that are on the way to any of these peers."""
    lengths = {len(prefix) for prefix in prefixes}
    wanted: set[str] = set()
    for bits in peers_bits:
        wanted.update(bits[:length] for length in lengths)
    return [prefix for prefix in prefixes if prefix in wanted]


def _has_children(count: int, cap: int) -> bool:
    """Return whether readers look below a key that holds ``count`` records."""
    return count >= max(1, cap // 4)


def _children(prefix: str, names: Names, own: str, now: str, cap: int) -> list[str]:
    """Return the prefixes below one that are read, the one on the way to the ``own`` bits first."""
    on_path = now.startswith(prefix) and len(prefix) < len(now)
    if len(prefix) >= MAX_DEPTH or not (on_path or _has_children(len(names), cap)):
        return []
    return sorted((prefix + "0", prefix + "1"), key=lambda child: not own.startswith(child))


def place(
    me: str,
    now: str | None,
    seen: Mapping[str, Names],
    *,
    cap: int = CAP,
    chance: float | None = None,
) -> str:
    """Return the prefix under which ``me`` should publish, given its prefix ``now`` (None: no
    record yet) and what was read.

    ``chance``: a number in [0, 1) in place of a random one.
    """
    if now is None:
        return _first_with_room(me, 0, seen, cap)
    if now not in seen:
        return now
    # More than fit may have raced into one key. All agree which stay: the first by their bits.
    bits = bits_of(me)
    before = sum(bits_of(name) < bits for name in seen[now] if name != me)
    if before >= cap:
        return _first_with_room(me, len(now) + 1, seen, cap)
    parent = now[:-1]
    if now and parent in seen:
        above = _others(me, seen[parent])
        if above < max(1, cap // 2):
            dice = random.random() if chance is None else chance
            if dice < (RISE_CHANCE if _has_children(above, cap) else RISE_HIDDEN_CHANCE):
                return parent
    return now


def _first_with_room(me: str, depth: int, seen: Mapping[str, Names], cap: int) -> str:
    """Return the shortest prefix from ``depth`` on whose key has room."""
    bits = bits_of(me)
    while depth < MAX_DEPTH and _others(me, seen.get(bits[:depth], {})) >= cap:
        depth += 1
    return bits[:depth]


def _others(me: str, names: Names) -> int:
    return len(names) - (me in names)
