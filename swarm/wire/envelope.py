"""Packing, signing and opening of messages; the types of their fields, each with its bounds; the
digest of a payload.

A message is msgpack of ``[kind, version, fields]``. A wrong one from a peer is refused with a
MessageError that names the difference, in this order: size, kind, version, signature (if sealed),
structure, fields. Nothing is decoded before its size is known to be small, and containers are
bounded one by one and in number, so that no message can make this node allocate more than a small
multiple of the message's length.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import msgpack
from blake3 import blake3
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
)

from shoal.swarm.errors import MessageError, printable
from shoal.swarm.identity import Identity, is_peer_id, verify

MAX_TENSORS = 65_536
MAX_DIMS = 131_072  # of all tensors together
MAX_RANK = 8
MAX_COUNT = 2**53  # steps, rounds: exact in every language's numbers
MAX_BYTES = 2**40
MAX_REAL = 1e30  # whose squares can be summed
MAX_SHARE = 1e6
# a second; means and inverses of such are finite
MIN_RATE = 1e-9
MAX_RATE = 1e15
MAX_EXTRA = 8  # tensors for each parameter that a rule may share
MAX_BLAMED = 4  # (peer, failure) pairs in a record: the most frequent ones
SKETCH = 4  # numbers in a sketch of the slow weights

Reach = Literal["unknown", "direct", "local", "punched", "relayed", "unreachable"]
"""Who can dial a node: anybody (direct); those in its own network, where all are who looked
(local); nobody, but both ends punch holes in their routers, or a relay forwards; nobody
(unreachable)."""
Failure = Literal["unreachable", "timeout", "refused", "broken", "damaged", "suspicious"]
FAILURES: tuple[Failure, ...] = get_args(Failure)


def _printable(text: str) -> str:
    if (
        not text.isprintable()
    ):  # control codes, line breaks, text direction marks: they end up on terminals
        raise ValueError("must hold printable characters only")
    return text


def _peer_id(text: str) -> str:
    if not is_peer_id(text):
        raise ValueError("must be the peer id of an Ed25519 key")
    return text


def _sentence(text: object) -> object:
    """Cut and clean a reason, at either end: it is for people and should cause no further
    errors.
    """
    return printable(text[:512], other=" ") if isinstance(text, str) else text


def _rate(value: float) -> float:
    if 0 < value < MIN_RATE:
        raise ValueError(f"must be 0, or {MIN_RATE:g} at least")
    return value


def real(value: float | None) -> float | None:
    """Return a number of this node's as a message can hold it: None for what is not finite, or
    beyond `MAX_REAL`.
    """
    return value if value is not None and abs(value) <= MAX_REAL else None


def rate(value: float) -> float:
    """Return a speed of this node's as a message can hold it: 0 for what is none."""
    return value if MIN_RATE <= value <= MAX_RATE else 0.0


def share(value: float | None) -> float | None:
    """Return a utilisation of this node's as a message can hold it: None for what is none."""
    return value if value is not None and 0 <= value <= MAX_SHARE else None


def _shapes(value: object) -> object:
    """Read packed shapes (per tensor: rank as u8, sizes as little-endian u32). Raises
    ValueError.
    """
    if not isinstance(value, bytes):
        return value
    shapes: list[tuple[int, ...]] = []
    at = 0
    while at < len(value):
        rank = value[at]
        if rank > MAX_RANK or at + 1 + 4 * rank > len(value) or len(shapes) == MAX_TENSORS:
            raise ValueError("malformed shapes")
        shapes.append(struct.unpack_from(f"<{rank}I", value, at + 1))
        at += 1 + 4 * rank
    return tuple(shapes)


def _dims(shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    if sum(map(len, shapes)) > MAX_DIMS:
        raise ValueError(f"must hold at most {MAX_DIMS} sizes in all")
    return shapes


def pack_shapes(shapes: tuple[tuple[int, ...], ...]) -> bytes:
    """Pack shapes: per tensor its rank as u8 and its sizes as little-endian u32."""
    return b"".join(struct.pack(f"<B{len(shape)}I", len(shape), *shape) for shape in shapes)


MAX_NAMES = 256 << 10  # bytes of packed names
MAX_NAMES_TEXT = 8 << 20  # bytes of names that are unpacked


def pack_names(names: Sequence[str]) -> bytes:
    """Pack names of parameters: UTF-8, a line each, compressed by zlib; empty if they take more
    than ``MAX_NAMES``.
    """
    text = "\n".join(printable(name) for name in names)
    packed = zlib.compress(text.encode(errors="replace"))
    return packed if len(packed) <= MAX_NAMES and len(text) <= MAX_NAMES_TEXT else b""


def unpack_names(packed: bytes) -> tuple[str, ...]:
    """Return the names, of which none is known to be printable.

    MessageError if they are malformed, or too long.
    """
    if not packed:
        return ()
    try:
        opened = zlib.decompressobj()
        text = opened.decompress(packed, MAX_NAMES_TEXT)
        if not opened.eof:
            raise MessageError("the names of the parameters are too long.")
        return tuple(text.decode().split("\n"))
    except (zlib.error, UnicodeDecodeError) as error:
        raise MessageError("the names of the parameters are malformed.") from error


SwarmId = Annotated[str, Field(pattern=r"^[a-z2-7]{52}$")]
PeerId = Annotated[str, Field(max_length=64), AfterValidator(_peer_id)]
Label = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_printable)]
SHORT_NAME = 16  # characters
ShortLabel = Annotated[str, Field(min_length=1, max_length=SHORT_NAME), AfterValidator(_printable)]
MAX_ADDRESS = 256  # characters of an address in a message
Version = Annotated[str, Field(pattern=r"^[!-~]{1,64}$")]
Address = Annotated[str, Field(max_length=MAX_ADDRESS, pattern=r"^/[\x21-\x7e]+$")]
Reason = Annotated[str, BeforeValidator(_sentence), Field(max_length=512)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Token = Annotated[str, Field(pattern=r"^[a-z0-9_.:,=+-]{1,64}$")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Real = Annotated[float, Field(ge=-MAX_REAL, le=MAX_REAL)]
Sketch = tuple[
    Count, Count, Annotated[tuple[Real, ...], Field(min_length=SKETCH, max_length=SKETCH)]
]
"""A round and fragment, and a sketch of the slow weights of that fragment after it
(`shoal.swarm.state.resync`).
"""
MAX_SECONDS = 1e9
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Moment = Annotated[float, Field(ge=0, le=MAX_COUNT)]
"""Unix seconds."""
Rate = Annotated[float, Field(ge=0, le=MAX_RATE), AfterValidator(_rate)]
Share = Annotated[float, Field(ge=0, le=MAX_SHARE)]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
"""Bytes that were sent or that a payload has, up to 1 TiB; a capacity is a `Count`."""
# Sums and products of such weights stay finite in float32. 0: takes part but is not counted.
MAX_WEIGHT = 1e30
Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]
Sha256 = Annotated[bytes, Field(min_length=32, max_length=32)]
Nonce = Annotated[bytes, Field(min_length=16, max_length=16)]
# One byte string on the wire: long msgpack arrays would have to be allocated before their content
# is seen.
Size = Annotated[int, Field(ge=0, lt=2**32)]
Shape = Annotated[tuple[Size, ...], Field(max_length=MAX_RANK)]
Shapes = Annotated[
    tuple[Shape, ...],
    Field(max_length=MAX_TENSORS),
    BeforeValidator(_shapes),
    AfterValidator(_dims),
    PlainSerializer(pack_shapes),
]


CHUNK = 1 << 20  # bytes


class HashList:
    """SHA-256 over the BLAKE3 digests of the payload's 1 MiB chunks.

    Plain SHA-256 of every byte, at both ends, costs more time than encrypting and moving the bytes
    does on a small machine (`make bench`); BLAKE3 is several times faster, and a list of its
    digests binds the payload just as well.
    """

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._hashed = 0
        self._list = hashlib.sha256()

    def advance(self, available: int) -> None:
        """Hash the complete chunks: the first ``available`` bytes of the payload are final."""
        end = len(self._payload)
        while self._hashed < end and available >= min(self._hashed + CHUNK, end):
            chunk = self._payload[self._hashed : min(self._hashed + CHUNK, end)]
            self._list.update(blake3(chunk).digest())
            self._hashed += len(chunk)

    def digest(self) -> bytes:
        """Return the 32 bytes. Raises ValueError while the payload is incomplete."""
        if self._hashed != len(self._payload):
            raise ValueError(f"only {self._hashed} of {len(self._payload)} bytes were hashed")
        return self._list.digest()


def digest(blocks: Iterable[memoryview]) -> bytes:
    """Return the digest of a complete payload, of which ``blocks`` are the chunks of 1 MiB, in
    order.
    """
    hashes = hashlib.sha256()
    for block in blocks:
        hashes.update(blake3(block).digest())
    return hashes.digest()


def chunks(payload: memoryview) -> Iterator[memoryview]:
    return (payload[start : start + CHUNK] for start in range(0, len(payload), CHUNK))


NONCES: ContextVar[Callable[[int], bytes]] = ContextVar(
    "nonces", default=secrets.token_bytes
)  # a simulation sets its own


def fresh_nonce() -> bytes:
    """Return 16 bytes that make equal messages differ: the only random numbers in the protocols of
    an exchange, and of gossip.
    """
    return NONCES.get()(16)


KIB = 1024
# Bytes of one gossiped message.
MAX_MESSAGE = 256 * KIB
ENVELOPE = 160  # bytes that a seal adds to a packed message, at most

# Containers in one message: no schema needs more, and every one that is announced costs memory.
_ARRAY_LENGTH = 16
_MAP_LENGTH = 64
_ARRAYS = 64
# A status has 1 + 7 groups + 6 rounds.
_MAPS = 16
_HEAD = 96  # bytes that surely hold the kind and version
_DECODE_ERRORS = (
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    msgpack.exceptions.UnpackException,
)


class Message(BaseModel):
    """The base of all messages.

    ``LIMIT`` is in packed bytes; ``AUTHOR`` names the field that must be the signer.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    KIND: ClassVar[str]
    VERSION: ClassVar[int] = 1
    LIMIT: ClassVar[int] = KIB
    AUTHOR: ClassVar[str | None] = None


M = TypeVar("M", bound=Message)


def pack(message: Message) -> bytes:
    """Pack ``message``. Raises MessageError if the bytes exceed its kind's LIMIT."""
    data: bytes = msgpack.packb([message.KIND, message.VERSION, message.model_dump()])
    if len(data) > message.LIMIT:
        raise MessageError(
            f"A {message.KIND} of {len(data)} bytes exceeds {message.LIMIT} bytes: make it "
            "smaller.",
            "oversized",
        )
    return data


def unpack(data: bytes, *types: type[M]) -> M:
    """Open the message in ``data``, which must be one of ``types``.

    Raises MessageError and nothing else.
    """
    return _fields(data, _kind(data, types))


def seal(message: Message, identity: Identity) -> bytes:
    """Sign ``message``: msgpack of ``[peer id, packed message, signature]``.

    Raises MessageError if it is too large.
    """
    payload = pack(message)
    sealed: bytes = msgpack.packb(
        [identity.peer_id, payload, identity.sign(_context(type(message)), payload)]
    )
    return sealed


def unseal(data: bytes, *types: type[M]) -> tuple[str, M]:
    """Open a sealed message; return its signer's peer id and the message.

    Raises MessageError and nothing else.
    """
    signer, payload, signature = _opened(data, max(kind.LIMIT for kind in types))
    kind = _kind(payload, types)
    if not verify(signer, _context(kind), payload, signature):
        raise MessageError(
            f"A {kind.KIND} was refused for its wrong signature: it was forged or damaged on its "
            "way.",
            "forged",
        )
    message = _fields(payload, kind)
    if kind.AUTHOR is not None and getattr(message, kind.AUTHOR) != signer:
        raise MessageError(
            f"A {kind.KIND} was refused as forged: another peer than its {kind.AUTHOR} signed it.",
            "forged",
        )
    return signer, message


def peek(data: bytes, limit: int) -> dict[Any, Any]:
    """Return the fields of a sealed message of at most ``limit`` bytes, bounded but neither
    verified nor validated.

    For data whose hash is known to be right. Raises MessageError and nothing else.
    """
    return _content(_opened(data, limit)[1], "message")


def _opened(data: bytes, limit: int) -> tuple[str, bytes, bytes]:
    """Return the peer id, the packed message of at most ``limit`` bytes, and the signature, which
    is not verified.
    """
    _check_size(data, limit + ENVELOPE)
    envelope = _decode(data, "signed message")
    if not isinstance(envelope, tuple) or [type(part) for part in envelope] != [str, bytes, bytes]:
        raise _malformed("signed message", "it is not [peer id, message, signature]")
    return envelope[0], envelope[1], envelope[2]


def _context(kind: type[Message]) -> str:
    return f"shoal/{kind.KIND}/{kind.VERSION}"


def _malformed(what: str, why: str, reason: str = "malformed") -> MessageError:
    return MessageError(
        f"A malformed {what} was refused ({why}): the peer is faulty or runs another version of "
        "shoal.",
        reason,
    )


def _check_size(data: bytes, limit: int) -> None:
    if len(data) > limit:
        raise _malformed(
            "message", f"{len(data)} bytes where at most {limit} are allowed", "oversized"
        )


def _kind(data: bytes, types: tuple[type[M], ...]) -> type[M]:
    """Find the one of ``types`` that this is by its first bytes.

    Raises MessageError on another kind, version or size.
    """
    _check_size(data, max(kind.LIMIT for kind in types))
    unpacker = msgpack.Unpacker(use_list=False, max_array_len=3, max_map_len=0, max_ext_len=0)
    unpacker.feed(data[:_HEAD])
    try:
        length = unpacker.read_array_header()
        name = unpacker.unpack()
        version = unpacker.unpack()
    except _DECODE_ERRORS as error:
        short = len(data) < _HEAD and isinstance(error, msgpack.exceptions.OutOfData)
        raise _malformed(
            "message",
            "it does not start with a kind and version",
            "truncated" if short else "malformed",
        ) from error
    if length != 3 or not isinstance(name, str) or type(version) is not int:
        raise _malformed("message", "it is not [kind, version, fields]")
    expected = " or ".join(sorted(kind.KIND for kind in types))
    kind = next((kind for kind in types if name == kind.KIND), None)
    if kind is None:
        raise MessageError(
            f"A message of kind {name!a} came in place of {expected}: run the same shoal at both "
            "ends.",
            "kind",
        )
    if version != kind.VERSION:
        where = "here" if version > kind.VERSION else "there"
        spoken = kind.VERSION
        raise MessageError(
            f"The peer's {name} has version {version}, this node speaks {spoken}: update shoal "
            f"{where}.",
            "version",
        )
    _check_size(data, kind.LIMIT)
    return kind


def _fields(data: bytes, kind: type[M]) -> M:
    try:
        return kind.model_validate(_content(data, kind.KIND))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # Names and texts in it may come from the peer: cut them, without control codes.
        field = ascii(".".join(map(str, first["loc"])) or "fields")[:80]
        reason = "oversized" if first["type"].endswith("too_long") else "malformed"
        raise _malformed(kind.KIND, f"{field}: {first['msg'][:200]}", reason) from None


def _content(data: bytes, what: str) -> dict[Any, Any]:
    content = _decode(data, what)
    if not isinstance(content, tuple) or len(content) != 3 or not isinstance(content[2], dict):
        raise _malformed(what, "it is not [kind, version, fields]")
    return content[2]


def _decode(data: bytes, what: str) -> Any:
    """Decode ``data`` to tuples, dicts and scalars, with bounds on every container.

    Raises MessageError.
    """
    try:
        return msgpack.unpackb(
            data,
            use_list=False,
            strict_map_key=True,
            list_hook=_bounded(_ARRAYS, tuple),
            object_pairs_hook=_bounded(_MAPS, _unique),
            max_array_len=_ARRAY_LENGTH,
            max_map_len=_MAP_LENGTH,
            max_ext_len=0,
        )
    except _DECODE_ERRORS as error:
        raise _malformed(what, "it does not decode within the limits", _reason(error)) from error


def _bounded(limit: int, build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make ``build`` callable ``limit`` times, which bounds the number of containers in a message,
    empty ones included.
    """
    count = 0

    def hook(content: Any) -> Any:
        nonlocal count
        count += 1
        if count > limit:
            raise ValueError("too many containers")
        return build(content)

    return hook


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Make a dict, refusing a key given twice: two readers might otherwise see two messages under
    one signature.
    """
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key is given twice")
    return content


def _reason(error: Exception) -> Literal["truncated", "nested", "malformed"]:
    """Return the word for what msgpack says of data that did not decode."""
    if isinstance(error, msgpack.exceptions.StackError):
        return "nested"
    return "truncated" if "incomplete" in str(error) else "malformed"
