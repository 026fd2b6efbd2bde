"""The trie of membership keys: reading it, and placing one's own record, so that no key grows with the swarm.

A record is stored under the shortest prefix of its peer's bits whose key holds fewer than ``cap`` others. A reader starts at the
root and descends from every key that is at least a quarter full: a key that was full may have lost peers since, and those below it
must not vanish from view. They move up when it is less than half full, a few at a time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping

from shoal.swarm.errors import NetworkError
from shoal.swarm.membership.dht_record import MAX_DEPTH, bits_of

CAP = 32  # records per key, but for a few that raced
CROWD = 2  # times ``cap`` records of a key are used at most: the first by their bits, whoever is beyond moves on by `place`
MAX_KEYS = 128  # keys that are read for the sake of known peers, when strangers' records have used up the limit
AT_ONCE = 8  # keys read at a time
RISE = 1 / 8  # chance per reading to move up to a half-empty parent: otherwise all below would move there together
RISE_HIDDEN = 1 / 2  # the same when the parent holds so few that readers no longer look below it

Names = Mapping[str, object]  # peer id -> its record: the peers under a key


async def read(
    get: Callable[[str], Awaitable[Names]],
    own: str,
    *,
    now: str | None = None,
    cap: int = CAP,
    limit: int = 1024,
    known: Collection[str] = (),
) -> dict[str, Names]:
    """Return the records under each prefix of the trie, about ``limit`` in all, those near the ``own`` bits first.

    The path down to the reader's own prefix ``now`` is read in any case, and for the peers in ``known`` up to `MAX_KEYS` keys, so
    that no number of strangers' records hides them. A key that cannot be read is left out, with all below it.

    Raises NetworkError: the root cannot be read.
    """
    found: dict[str, Names] = {"": await get("")}
    total = len(found[""])
    queue = _children("", found[""], own, now or "", cap)
    missing = {peer: bits_of(peer) for peer in known if peer not in found[""]}
    while queue:
        if total >= limit:
            ways = {bits[:depth] for bits in missing.values() for depth in {len(prefix) for prefix in queue}}
            queue = [prefix for prefix in queue if prefix in ways] if len(found) < MAX_KEYS else []
        batch, queue = queue[:AT_ONCE], queue[AT_ONCE:]
        answers = await asyncio.gather(*(get(prefix) for prefix in batch), return_exceptions=True)
        for prefix, answer in zip(batch, answers, strict=True):
            if isinstance(answer, NetworkError):
                continue
            if isinstance(answer, BaseException):
                raise answer
            found[prefix] = answer
            for peer in answer:
                missing.pop(peer, None)
            total += len(answer)
            queue += _children(prefix, answer, own, now or "", cap)
    return found


def _has_children(count: int, cap: int) -> bool:
    return count >= max(1, cap // 4)


def _children(prefix: str, names: Names, own: str, now: str, cap: int) -> list[str]:
    on_path = now.startswith(prefix) and len(prefix) < len(now)
    if len(prefix) >= MAX_DEPTH or not (on_path or _has_children(len(names), cap)):
        return []
    return sorted((prefix + "0", prefix + "1"), key=lambda child: not own.startswith(child))


def place(me: str, now: str | None, seen: Mapping[str, Names], *, cap: int = CAP, chance: float | None = None) -> str:
    """Return the prefix under which ``me`` should publish, given its prefix ``now`` (None: no record yet) and what was read.

    ``chance``: a number in [0, 1) in place of a random one.
    """
    bits = bits_of(me)
    depth = 0
    if now is not None:
        if now not in seen:
            return now
        # More than fit may have raced into one key. All agree which stay: the first by their bits.
        before = sum(bits_of(name) < bits for name in seen[now] if name != me)
        if before < cap:
            parent = now[:-1]
            if now and parent in seen and (above := _others(me, seen[parent])) < max(1, cap // 2):
                dice = random.random() if chance is None else chance
                if dice < (RISE if _has_children(above, cap) else RISE_HIDDEN):
                    return parent
            return now
        depth = len(now) + 1
    while depth < MAX_DEPTH and _others(me, seen.get(bits[:depth], {})) >= cap:
        depth += 1
    return bits[:depth]


def _others(me: str, names: Names) -> int:
    return len(names) - (me in names)
