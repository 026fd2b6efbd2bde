"""Membership records in the DHT: their keys, signatures and checks.

Keys are the nodes of a binary trie over the bits of sha256(peer id): ``{swarm}/m/`` is the root, ``{swarm}/m/01`` the key of all
peers whose bits begin with 01. ``{swarm}/m/7/01`` is the key of those whose bits of epoch 7 begin so: each epoch has a trie of its
own, whose leaves are the buckets (`shoal.swarm.membership.buckets`). A record names the prefix under which it is stored, so that
the node that stores it can check it.

No key grows with the swarm. A record is stored under the shortest prefix of its peer's bits whose key holds fewer than ``cap``
others. A reader starts at the root and descends from every key that is at least a quarter full: a key that was full may have lost
peers since, and those below it must not vanish from view. They move up when it is less than half full, a few at a time.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.wire.envelope import seal, unseal
from shoal.swarm.wire.member import Member

if TYPE_CHECKING:
    from hivemind.dht.validation import DHTRecord

log = logging.getLogger(__name__)

MAX_DEPTH = 48  # bits of the longest prefix
# Seconds a record may live: hardly more than `Directory` gives it. Of two records of a peer the DHT keeps the one that expires
# later, so an attacker that stored an old one with a longer life would keep the newer ones out.
MAX_TTL = 31.0
MAX_RECORD = Member.LIMIT + 512  # bytes
AHEAD = 600.0  # seconds into the future a record may be dated, to be stored at all
MAX_EPOCH = 10**12  # number of an epoch
_PATTERN_BITS = frozenset("01")


class VerifiedRecord(NamedTuple):
    """Membership record whose signature was verified."""

    prefix: str
    member: Member


@functools.lru_cache(maxsize=4096)
def bits_of(peer_id: str) -> str:
    """Return the path of a peer in the trie: `MAX_DEPTH` characters 0 or 1."""
    number = int.from_bytes(hashlib.sha256(peer_id.encode()).digest(), "big")
    return f"{number:0256b}"[:MAX_DEPTH]


@functools.lru_cache(maxsize=32_768)  # asked of every member in view whenever the view is
def bits_in(swarm: str, epoch: int, peer_id: str) -> str:
    """Return the position of a peer in an epoch: `MAX_DEPTH` characters 0 or 1, uniform, and new in each epoch."""
    number = int.from_bytes(hashlib.sha256(f"shoal/bucket/1:{swarm}:{epoch}:{peer_id}".encode()).digest(), "big")
    return f"{number:0256b}"[:MAX_DEPTH]


def bucket_prefix(epoch: int, bits: str) -> str:
    """Return the prefix of the peers whose position in ``epoch`` begins with ``bits``, of which there is at least one."""
    return f"{epoch}/{bits}"


def _path(prefix: str, swarm: str, peer_id: str) -> str | None:
    """Return the prefix as far as any can go on a peer's way through the trie that ``prefix`` is of; None if it is of none."""
    epoch, slash, bits = prefix.rpartition("/")
    if len(bits) > MAX_DEPTH or not _PATTERN_BITS.issuperset(bits):
        return None
    if not slash:
        return bits_of(peer_id)
    if not (
        bits and epoch.isascii() and epoch.isdigit() and len(epoch) <= 13 and epoch == str(int(epoch)) and int(epoch) < MAX_EPOCH
    ):
        return None
    return bucket_prefix(int(epoch), bits_in(swarm, int(epoch), peer_id))


def key_of(swarm: str, prefix: str) -> str:
    """Return the DHT key of a node of the trie."""
    return f"{swarm}/m/{prefix}"


@functools.lru_cache(maxsize=1024)
def _dht_id(swarm: str, prefix: str) -> bytes:
    from hivemind.dht.routing import DHTID  # seconds of imports, which a node may still be at when it makes its validator

    return bytes(DHTID.generate(source=key_of(swarm, prefix)).to_bytes())


def make_record(prefix: str, member: Member, identity: Identity) -> bytes:
    """Return the signed record to store under ``prefix``."""
    data: bytes = msgpack.packb([prefix, seal(member, identity)])
    return data


@functools.lru_cache(maxsize=4096)  # each record is seen from several replicas, and several times before it changes
def open_record(data: bytes) -> VerifiedRecord | None:
    """Return the record in ``data``, or None if it is malformed or not signed by the member it describes. Never raises."""
    try:
        parts = msgpack.unpackb(data, use_list=False, max_ext_len=0, max_map_len=0, max_array_len=2)
        prefix, sealed = parts
        if not isinstance(prefix, str) or not isinstance(sealed, bytes):
            return None
        signer, member = unseal(sealed, Member)
    except (ValueError, TypeError, msgpack.UnpackException, MessageError):
        return None
    path = _path(prefix, member.swarm, signer)
    return VerifiedRecord(prefix, member) if signer == member.peer and path is not None and path.startswith(prefix) else None


class MemberValidator:
    """Validator that admits to the swarm's DHT only its members' own records, each under its place in the trie.

    hivemind drops *all* records of a key when one in an answer is wrong. So every node must come to the same result at any time;
    only the date is compared with this node's clock, with ten minutes of tolerance, so that nobody stores records for next year.
    `Directory` is stricter when it reads. hivemind's base class would bring hivemind; it asks a validator for these three methods.
    """

    def __init__(self, swarm: str) -> None:
        self._swarm = swarm

    def sign_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value)

    def strip_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value)

    def validate(self, record: DHTRecord) -> bool:
        """Return whether hivemind may store or return ``record``. Never raises."""
        if len(record.value) > MAX_RECORD + 8:
            return False
        value, subkey = _unpacked(record.value, bytes), _unpacked(record.subkey, str)
        found = open_record(value) if value is not None else None
        if found is None:
            return False
        member = found.member
        return (
            member.peer == subkey
            and member.swarm == self._swarm
            and record.key == _dht_id(self._swarm, found.prefix)
            and record.expiration_time <= member.issued + MAX_TTL
            and member.issued <= time.time() + AHEAD
        )


def _unpacked(data: bytes, kind: type) -> Any:
    """Return ``data`` unpacked if it is a msgpack ``kind``, otherwise None."""
    try:
        found = msgpack.unpackb(data, max_ext_len=0, max_map_len=0, max_array_len=0)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return found if isinstance(found, kind) else None


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
