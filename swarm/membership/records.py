"""Membership records as the DHT stores them: their keys, signatures and checks.

A record names the prefix of the trie (`shoal.swarm.membership.trie`) or of the bucket
(`shoal.swarm.membership.bucket_index`) under which it is stored, so that the node that stores it
can check it:

    {swarm}/m/        the root of the trie
    {swarm}/m/01      all peers whose bits begin with 01
    {swarm}/m/7/01    the bucket 01 of epoch 7
"""

from __future__ import annotations

import functools
import hashlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from shoal.swarm.errors import MessageError
from shoal.swarm.identity import Identity
from shoal.swarm.wire.envelope import seal, unseal
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from hivemind.dht.validation import DHTRecord

MAX_DEPTH = 48  # bits of the longest prefix
# A record may live so long: hardly more than `Directory` gives it. Of two records of a peer the DHT
# keeps the one that expires later, so an attacker that stored an old one with a longer life would
# keep the newer ones out.
MAX_TTL_S = 31.0
MAX_RECORD_BYTES = Member.LIMIT + 512
MSGPACK_HEAD_BYTES = 8  # around a record, at most
DATED_AHEAD_S = 600.0  # into the future that a record may be dated, to be stored at all
MAX_EPOCH = 10**12  # number of an epoch
MAX_EPOCH_DIGITS = 13
_PATTERN_BITS = frozenset("01")


class VerifiedRecord(NamedTuple):
    """Membership record whose signature was verified."""

    prefix: str
    member: Member


@functools.lru_cache(maxsize=4096)
def bits_of(peer_id: str) -> str:
    """Return the path of a peer in the trie: `MAX_DEPTH` characters 0 or 1."""
    return _first_bits(peer_id)


@functools.lru_cache(maxsize=32_768)  # asked of every member in view whenever the view is
def bits_in(swarm: str, epoch: int, peer_id: str) -> str:
    """Return the position of a peer in an epoch: `MAX_DEPTH` characters 0 or 1, uniform, and new in
    each epoch.
    """
    return _first_bits(f"shoal/bucket/1:{swarm}:{epoch}:{peer_id}")


def _first_bits(text: str) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    return f"{number:0256b}"[:MAX_DEPTH]


def bucket_prefix(epoch: int, bits: str) -> str:
    """Return the prefix of the peers whose position in ``epoch`` begins with ``bits``, of which
    there is at least one.
    """
    return f"{epoch}/{bits}"


def key_of(swarm: str, prefix: str) -> str:
    return f"{swarm}/m/{prefix}"


def make_record(prefix: str, member: Member, identity: Identity) -> bytes:
    data: bytes = msgpack.packb([prefix, seal(member, identity)])
    return data


# Each record is seen from several replicas, and several times before it changes.
@functools.lru_cache(maxsize=4096)
def open_record(data: bytes) -> VerifiedRecord | None:
    """Return the record in ``data``, or None if it is malformed or not signed by the member it
    describes. Never raises.
    """
    try:
        parts = msgpack.unpackb(data, use_list=False, max_ext_len=0, max_map_len=0, max_array_len=2)
        prefix, sealed = parts
        if not isinstance(prefix, str) or not isinstance(sealed, bytes):
            return None
        signer, member = unseal(sealed, Member)
    except (ValueError, TypeError, msgpack.UnpackException, MessageError):
        return None
    if signer != member.peer:
        return None
    path = _longest_prefix(prefix, member.swarm, signer)
    if path is None or not path.startswith(prefix):
        return None
    return VerifiedRecord(prefix, member)


def _longest_prefix(prefix: str, swarm: str, peer_id: str) -> str | None:
    """Return the prefix as far as any can go on a peer's way through the trie that ``prefix`` is
    of; None if it is of none.
    """
    epoch, slash, bits = prefix.rpartition("/")
    if len(bits) > MAX_DEPTH or not _PATTERN_BITS.issuperset(bits):
        return None
    if not slash:
        return bits_of(peer_id)
    if not bits or not _is_epoch(epoch):
        return None
    return bucket_prefix(int(epoch), bits_in(swarm, int(epoch), peer_id))


def _is_epoch(text: str) -> bool:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_EPOCH_DIGITS):
        return False
    return text == str(int(text)) and int(text) < MAX_EPOCH


class MemberValidator:
    """Validator that admits to the swarm's DHT only its members' own records, each under its place
    in the trie.

    hivemind drops *all* records of a key when one in an answer is wrong. So every node must come to
    the same result at any time; only the date is compared with this node's clock, with
    `DATED_AHEAD_S` of tolerance, so that nobody stores records for next year. `Directory` is
    stricter when it reads. hivemind's base class would bring hivemind; it asks a validator for
    these three methods.
    """

    def __init__(self, swarm: str) -> None:
        self._swarm = swarm

    def sign_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value)

    def strip_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value)

    def validate(self, record: DHTRecord) -> bool:
        """Return whether hivemind may store or return ``record``. Never raises."""
        if len(record.value) > MAX_RECORD_BYTES + MSGPACK_HEAD_BYTES:
            return False
        value = _unpacked(record.value, bytes)
        if value is None:
            return False
        verified = open_record(value)
        if verified is None:
            return False
        member = verified.member
        return (
            member.peer == _unpacked(record.subkey, str)
            and member.swarm == self._swarm
            and record.key == _dht_id(self._swarm, verified.prefix)
            and record.expiration_time <= member.issued + MAX_TTL_S
            and member.issued <= time.time() + DATED_AHEAD_S
        )


@functools.lru_cache(maxsize=1024)
def _dht_id(swarm: str, prefix: str) -> bytes:
    # Seconds of imports, which a node may still be at when it makes its validator.
    from hivemind.dht.routing import DHTID

    return bytes(DHTID.generate(source=key_of(swarm, prefix)).to_bytes())


def _unpacked(data: bytes, kind: type) -> Any:
    """Return ``data`` unpacked if it is a msgpack ``kind``, otherwise None."""
    try:
        value = msgpack.unpackb(data, max_ext_len=0, max_map_len=0, max_array_len=0)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return value if isinstance(value, kind) else None
