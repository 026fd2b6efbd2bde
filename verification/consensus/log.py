"""A log, for a peer that missed records: base, electorates, and the signed records of some rounds.

    data = encode(Log(base, electorates, records))
    log = decode_log(data)                             # only the form has been checked

It is a sequence of frames, each a length (4 bytes, big-endian) and that many bytes of msgpack, so
hostile bytes cannot make a reader allocate more than a small multiple of what they take:

    ["base", round]  ["standing", peer, 14 integers]*
    (["electorate", round, beacon, all] ["voter", peer, operator]* ["claims", ids]*)*
    ["record", encoded, signature]*                    newest first, claims before votes

``all``: the claims of the electorate are None.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgpack
from pydantic import ConfigDict, TypeAdapter, ValidationError

from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.records import (
    LIMIT,
    MAX_MSGPACK_ITEMS,
    Claim,
    Dispute,
    Hash,
    Opening,
    Peer,
    Round,
    Signed,
    decode,
)
from shoal.verification.consensus.reputation import MOST_STANDINGS, Standing, Table
from shoal.verification.consensus.rulings import Rules
from shoal.verification.consensus.sortition import Electorate

MOST_BYTES = 8 << 20
"""Bytes of a log."""
MOST_FRAMES = 1 << 18
"""Frames of a log."""
MOST_PAIRS = 1 << 20
"""Voters times cases of their round, in all rounds of a log: as of 200 peers whose claims are all
checked. Each pair costs a hash and its place in the order of a draw, all of them some seconds.
"""
MOST_FRAME = LIMIT + 512
"""Bytes of a frame."""
MOST_SIGNATURE = 256
"""Bytes of a signature."""
IDS = 64
"""Claims in a frame."""
ID_BYTES = 32
"""Bytes of a claim's id."""
LENGTH_BYTES = 4
"""Bytes of a frame's length."""

_STRICT = ConfigDict(strict=True)
_peer: TypeAdapter[str] = TypeAdapter(Peer, config=_STRICT)
_round: TypeAdapter[int] = TypeAdapter(Round, config=_STRICT)
_hash: TypeAdapter[bytes] = TypeAdapter(Hash, config=_STRICT)
_numbers: TypeAdapter[tuple[int | None, ...]] = TypeAdapter(tuple[int | None, ...], config=_STRICT)
EMPTY = Table(-1, {}, {})


@dataclass(frozen=True)
class Log:
    """Decoded log, of which only the form has been checked.

    ``base`` is the table of the rounds whose records are forgotten, of round -1 if there are none.
    """

    base: Table = EMPTY
    electorates: tuple[Electorate, ...] = ()
    records: tuple[Signed, ...] = ()


def encode(log: Log) -> bytes:
    """Encode ``log`` in at most 8 MiB, without the last records that do not fit.

    Raises ValueError if the head is too large.
    """
    data = bytearray(b"".join(map(_framed, _head(log))))
    if len(data) > MOST_BYTES:
        raise ValueError(f"base and electorates take {len(data)} bytes, above {MOST_BYTES}")
    for signed in log.records:
        frame = _framed(["record", signed.record.encoded, signed.signature])
        if len(data) + len(frame) > MOST_BYTES:
            break
        data += frame
    return bytes(data)


def decode_log(data: bytes) -> Log:
    """Decode a log. Raises ValueError if ``data`` is too large or malformed in any part."""
    reader = _LogReader()
    try:
        for kind, *parts in _frames(data):
            reader.take(kind, parts)
    except (
        ValidationError,
        ValueError,
        TypeError,
        IndexError,
        msgpack.exceptions.UnpackException,
        RecursionError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else "a frame is damaged"
        raise ValueError(f"A log is malformed: {reason}.") from error
    return reader.log()


def pairs_to_draw(electorates: Iterable[Electorate], ledger: Ledger) -> int:
    """Return how many peers are ranked, counted once for each case of ``ledger``, to rule by these
    ``electorates``.
    """
    known = {electorate.round: electorate for electorate in electorates}
    voters = Counter({round: len(electorate.operators) for round, electorate in known.items()})
    pairs = 0
    for record in ledger:
        if isinstance(record, Dispute | Opening):
            # Those who voted on the claim are not drawn again.
            pairs += voters[record.round] + voters[ledger.stamp(record)]
        elif isinstance(record, Claim) and record.round in known:
            claims = known[record.round].claims
            if claims is None or record.id in claims:
                pairs += voters[record.round]
    return pairs


def is_stale(base: Table, round: int, rules: Rules) -> bool:
    """Return whether ``base`` is older in ``round`` than that of a peer that forgets as it should;
    fading its standings since then could take minutes.
    """
    return bool(base.standings) and base.round < round - 2 * rules.kept_rounds


@dataclass
class _ElectorateFrames:
    """What the frames of one electorate have told so far."""

    round: int
    beacon: bytes
    voters: dict[str, str]
    claims: set[bytes] | None

    def electorate(self) -> Electorate:
        claims = None if self.claims is None else frozenset(self.claims)
        return Electorate(self.round, self.beacon, self.voters, claims)


class _LogReader:
    """A log in the making, frame by frame. Any exception: the frame is malformed."""

    def __init__(self) -> None:
        self._base = -1
        self._standings: dict[str, Standing] = {}
        self._electorates: list[_ElectorateFrames] = []
        self._records: list[Signed] = []

    def take(self, kind: object, parts: list[object]) -> None:
        """Take a frame of that kind."""
        if kind == "base":
            (stated,) = parts
            self._base = -1 if stated == -1 else _round.validate_python(stated)
        elif kind == "standing":
            row = _numbers.validate_python(tuple(parts[1:]))
            self._standings[_peer.validate_python(parts[0])] = Standing.of(row)
        elif kind == "electorate":
            round, beacon, everything = parts
            self._take_electorate(round, beacon, everything)
        elif kind == "voter":
            peer, operator = map(_peer.validate_python, parts)
            self._electorates[-1].voters[peer] = operator
        elif kind == "claims":
            (ids,) = parts
            self._take_claims(ids)
        elif kind == "record":
            encoded, signature = parts
            self._take_record(encoded, signature)
        else:
            raise ValueError("not a known kind of frame")

    def log(self) -> Log:
        """Return the log. ValueError if it has more peers than there can be."""
        largest = len(self._standings)
        for frames in self._electorates:
            largest = max(largest, len(frames.voters))
        if largest > MOST_STANDINGS:
            raise ValueError(f"A log is malformed: it has more than {MOST_STANDINGS} peers.")
        base = Table(self._base, dict(sorted(self._standings.items())), {})
        electorates = tuple(frames.electorate() for frames in self._electorates)
        return Log(base, electorates, tuple(self._records))

    def _take_electorate(self, round: object, beacon: object, everything: object) -> None:
        frames = _ElectorateFrames(
            round=_round.validate_python(round),
            beacon=_hash.validate_python(beacon),
            voters={},
            claims=None if everything else set(),
        )
        self._electorates.append(frames)

    def _take_claims(self, ids: object) -> None:
        if not isinstance(ids, bytes) or not 0 < len(ids) <= IDS * ID_BYTES or len(ids) % ID_BYTES:
            raise ValueError(f"ids of claims have {ID_BYTES} bytes each")
        claims = self._electorates[-1].claims
        if claims is not None:
            claims.update(ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES))

    def _take_record(self, encoded: object, signature: object) -> None:
        if not isinstance(encoded, bytes) or not isinstance(signature, bytes):
            raise ValueError("a record is bytes and a signature")
        if len(signature) > MOST_SIGNATURE:
            raise ValueError("a record is bytes and a signature")
        self._records.append(Signed(decode(encoded), signature))


def _head(log: Log) -> Iterator[list[object]]:
    yield ["base", log.base.round]
    for peer, standing in log.base.standings.items():
        yield ["standing", peer, *standing.row]
    for electorate in log.electorates:
        yield ["electorate", electorate.round, electorate.beacon, electorate.claims is None]
        for peer, operator in sorted(electorate.operators.items()):
            yield ["voter", peer, operator]
        ids = sorted(electorate.claims or ())
        for start in range(0, len(ids), IDS):
            yield ["claims", b"".join(ids[start : start + IDS])]


def _framed(frame: list[object]) -> bytes:
    packed = bytes(msgpack.packb(frame))
    return struct.pack(">I", len(packed)) + packed


def _frames(data: bytes) -> Iterator[list[object]]:
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has {len(data)} bytes, above {MOST_BYTES}")
    at = 0
    count = 0
    while at < len(data):
        count += 1
        if count > MOST_FRAMES or at + LENGTH_BYTES > len(data):
            raise ValueError("it has too many frames, or ends within one")
        (size,) = struct.unpack_from(">I", data, at)
        at += LENGTH_BYTES
        if not 0 < size <= MOST_FRAME or at + size > len(data):
            raise ValueError("a frame has a wrong size")
        frame = msgpack.unpackb(
            data[at : at + size], max_array_len=MAX_MSGPACK_ITEMS, max_map_len=0, max_ext_len=0
        )
        if not isinstance(frame, list) or not frame:
            raise ValueError("a frame is not a list")
        yield frame
        at += size
