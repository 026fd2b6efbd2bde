"""Log for a peer that missed records: the base, the electorates and the signed records of the last rounds, as bytes.

A sequence of frames, each a length (4 bytes, big-endian) and that many bytes of msgpack, so nothing larger than a frame is built
before it is checked: hostile bytes cannot make a reader allocate more than a small multiple of what they take themselves.

    ["base", round]  ["standing", peer, 14 integers]*
    (["electorate", round, beacon, all] ["voter", peer, operator]* ["claims", ids]*)*      all: claims is None
    ["record", encoded, signature]*                                                        newest first, claims before votes
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import msgpack
from pydantic import TypeAdapter, ValidationError

from shoal.verification.consensus.records import LIMIT, Hash, Peer, Round, Signed, decode
from shoal.verification.consensus.reputation import Standing, Table
from shoal.verification.consensus.sortition import Electorate

MOST_BYTES = 8 << 20
MOST_FRAMES = 1 << 18
MOST_FRAME = LIMIT + 512
MOST_SIGNATURE = 256
IDS = 64  # claims in a frame
_peer: TypeAdapter[str] = TypeAdapter(Peer)
_round: TypeAdapter[int] = TypeAdapter(Round)
_hash: TypeAdapter[bytes] = TypeAdapter(Hash)
_numbers: TypeAdapter[tuple[int | None, ...]] = TypeAdapter(tuple[int | None, ...])
_NONE = Table(-1, {}, {})


@dataclass(frozen=True)
class Log:
    """Decoded log, of which only the form has been checked. ``base`` is the table of the rounds whose records are forgotten, of
    round -1 if there are none.
    """

    base: Table = _NONE
    electorates: tuple[Electorate, ...] = ()
    records: tuple[Signed, ...] = ()


def encode(log: Log) -> bytes:
    """Encode ``log`` in at most 8 MiB, without the last records that do not fit. Raises ValueError if the head is too large."""
    data = bytearray()
    for head in _head(log):
        data += _framed(head)
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
    base, standings, records = -1, {}, []
    electorates: list[tuple[int, bytes, bool]] = []
    voters: list[dict[str, str]] = []
    claims: list[set[bytes]] = []
    try:
        for kind, *parts in _frames(data):
            if kind == "base":
                (stated,) = parts
                base = -1 if stated == -1 else _round.validate_python(stated, strict=True)
            elif kind == "standing":
                standings[_peer.validate_python(parts[0], strict=True)] = Standing.of(
                    _numbers.validate_python(tuple(parts[1:]), strict=True)
                )
            elif kind == "electorate":
                round, beacon, everything = parts
                electorates.append(
                    (_round.validate_python(round, strict=True), _hash.validate_python(beacon, strict=True), bool(everything))
                )
                voters.append({})
                claims.append(set())
            elif kind == "voter":
                peer, operator = (_peer.validate_python(part, strict=True) for part in parts)
                voters[-1][peer] = operator
            elif kind == "claims":
                (ids,) = parts
                if not isinstance(ids, bytes) or not 0 < len(ids) <= IDS * 32 or len(ids) % 32:
                    raise ValueError("ids of claims have 32 bytes each")
                claims[-1].update(ids[at : at + 32] for at in range(0, len(ids), 32))
            elif kind == "record":
                encoded, signature = parts
                if not isinstance(encoded, bytes) or not isinstance(signature, bytes) or len(signature) > MOST_SIGNATURE:
                    raise ValueError("a record is bytes and a signature")
                records.append(Signed(decode(encoded), signature))
            else:
                raise ValueError("not a known kind of frame")
    except (ValidationError, ValueError, TypeError, IndexError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ValueError(f"A log is malformed: {str(error).splitlines()[0] if str(error) else 'a frame is damaged'}.") from error
    made = [
        Electorate(round, beacon, voters[at], None if everything else frozenset(claims[at]))
        for at, (round, beacon, everything) in enumerate(electorates)
    ]
    return Log(Table(base, dict(sorted(standings.items())), {}), tuple(made), tuple(records))


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
    at = count = 0
    while at < len(data):
        count += 1
        if count > MOST_FRAMES or at + 4 > len(data):
            raise ValueError("it has too many frames, or ends within one")
        (size,) = struct.unpack_from(">I", data, at)
        if not 0 < size <= MOST_FRAME or at + 4 + size > len(data):
            raise ValueError("a frame has a wrong size")
        frame = msgpack.unpackb(data[at + 4 : at + 4 + size], max_array_len=64, max_map_len=0, max_ext_len=0)
        if not isinstance(frame, list) or not frame:
            raise ValueError("a frame is not a list")
        yield frame
        at += 4 + size
