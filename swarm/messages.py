"""Every message on the wire: its fields and their bounds, how it is packed, and how it is signed.

A message is msgpack of ``[kind, version, fields]``. What comes from a peer is refused with a MessageError that names
the difference, in this order: size, kind, version, signature (if sealed), structure, fields. Nothing is decoded before
its size is known to be small, and containers are bounded one by one and in number, so that no message can make this
node allocate more than a small multiple of its own length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgpack
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from swarm.diagnosis import diagnose
from swarm.errors import MessageError
from swarm.identity import Identity, is_peer_id, verify

KIB = 1024
ENVELOPE = 160  # bytes that a seal adds to a packed message, at most
MAX_TENSORS = 65_536
MAX_DIMS = 131_072  # of all tensors together
MAX_RANK = 8
MAX_COUNT = 2**53  # steps, rounds: exact in every language's numbers
MAX_BYTES = 2**40

# Containers in one message: no schema below needs more, and every one that is announced costs memory.
_ARRAY_LENGTH, _MAP_LENGTH, _ARRAYS, _MAPS = 16, 64, 64, 8
_HEAD = 96  # bytes that surely hold the kind and version
_DECODE_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException)


def _printable(text: str) -> str:
    if not text.isprintable():  # control codes, line breaks, text direction marks: they end up on terminals
        raise ValueError("must hold printable characters only")
    return text


def _peer_id(text: str) -> str:
    if not is_peer_id(text):
        raise ValueError("must be the peer id of an Ed25519 key")
    return text


def _sentence(text: object) -> object:
    """A reason is for people: cut and cleaned at either end rather than a cause of further errors."""
    if not isinstance(text, str):
        return text
    return "".join(char if char.isprintable() else " " for char in text[:512])


def _shapes(value: object) -> object:
    """Shapes as the wire has them (per tensor: rank as u8, sizes as little-endian u32) or as tuples of int."""
    shapes: list[tuple[int, ...]] = []
    if isinstance(value, bytes):
        at = 0
        while at < len(value):
            rank = value[at]
            if rank > MAX_RANK or at + 1 + 4 * rank > len(value) or len(shapes) == MAX_TENSORS:
                raise ValueError("malformed shapes")
            shapes.append(struct.unpack_from(f"<{rank}I", value, at + 1))
            at += 1 + 4 * rank
    elif isinstance(value, tuple):
        for shape in value:
            if not isinstance(shape, tuple) or len(shape) > MAX_RANK or len(shapes) == MAX_TENSORS:
                raise ValueError(f"must be at most {MAX_TENSORS} tuples of at most {MAX_RANK} sizes")
            if not all(type(size) is int and 0 <= size < 2**32 for size in shape):
                raise ValueError("every size must be an integer from 0 to 2**32 - 1")
            shapes.append(shape)
    else:
        raise ValueError("must be shapes")
    if sum(map(len, shapes)) > MAX_DIMS:
        raise ValueError(f"must hold at most {MAX_DIMS} sizes in all")
    return tuple(shapes)


def _pack_shapes(shapes: tuple[tuple[int, ...], ...]) -> bytes:
    return b"".join(struct.pack(f"<B{len(shape)}I", len(shape), *shape) for shape in shapes)


SwarmId = Annotated[str, Field(pattern=r"^[a-z2-7]{52}$")]
PeerId = Annotated[str, Field(max_length=64), AfterValidator(_peer_id)]
Label = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_printable)]
Address = Annotated[str, Field(max_length=256, pattern=r"^/[\x21-\x7e]+$")]
Reason = Annotated[str, BeforeValidator(_sentence), Field(max_length=512)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Token = Annotated[str, Field(pattern=r"^[a-z0-9_.:,=+-]{1,64}$")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Sha256 = Annotated[bytes, Field(min_length=32, max_length=32)]
Nonce = Annotated[bytes, Field(min_length=16, max_length=16)]
# One byte string on the wire: long msgpack arrays would have to be allocated before their content is seen.
Shapes = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_shapes), PlainSerializer(_pack_shapes)]


class Message(BaseModel):
    """What all messages share. ``LIMIT`` is in packed bytes; ``AUTHOR`` names the field that must be the signer."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    KIND: ClassVar[str]
    VERSION: ClassVar[int] = 1
    LIMIT: ClassVar[int] = KIB
    AUTHOR: ClassVar[str | None] = None


class Member(Message):
    """One peer's entry in the directory; ``steps_per_s`` in inner steps, ``issued`` in Unix seconds, loss in nats."""

    KIND, LIMIT, AUTHOR = "member", 4 * KIB, "peer"
    swarm: SwarmId
    peer: PeerId
    name: Label
    addresses: Annotated[tuple[Address, ...], Field(max_length=8)]
    round: Count
    step: Count
    loss: float | None
    steps_per_s: Annotated[float, Field(ge=0)]
    shard: Count
    shards: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    model: Digest
    state: Literal["waiting", "training", "leaving", "done"]
    issued: Annotated[float, Field(ge=0)]
    version: Label

    @model_validator(mode="after")
    def _shard_exists(self) -> Member:
        if self.shard >= self.shards:
            raise ValueError("shard must be below shards")
        return self


class ManifestRequest(Message):
    """Asks a peer for the signed manifest of its swarm."""

    KIND = "manifest-request"
    swarm: SwarmId


class ManifestReply(Message):
    """The sealed manifest, or None and the reason why not."""

    KIND, LIMIT = "manifest-reply", 64 * KIB
    manifest: Annotated[bytes, Field(max_length=60 * KIB)] | None
    swarm: SwarmId
    reason: Reason = ""


class Offer(Message):
    """Opens an exchange: what the sender is about to send, ``nbytes`` encoded bytes with digest ``sha256``."""

    KIND, LIMIT = "offer", 1024 * KIB
    swarm: SwarmId
    round: Count
    fragment: Count
    nbytes: Bytes
    shapes: Shapes
    dtype: Token
    codec: Token
    sha256: Sha256
    weight: Annotated[float, Field(gt=0)]
    model: Digest
    nonce: Nonce


class Answer(Message):
    """The reply to an offer; ``round`` is the answering peer's own."""

    KIND, LIMIT = "answer", 4 * KIB
    verdict: Literal["accept", "wait", "busy", "passed", "refuse"]
    reason: Reason = ""
    round: Count


class Ready(Message):
    """The sender holds the whole verified contribution of its partner."""

    KIND = "ready"
    nonce: Nonce
    sha256: Sha256


class Commit(Message):
    """The exchange is decided: both sides apply it."""

    KIND = "commit"
    nonce: Nonce


class Abort(Message):
    """The exchange is off: neither side applies it."""

    KIND, LIMIT = "abort", 4 * KIB
    nonce: Nonce
    reason: Reason = ""


class OutcomeRequest(Message):
    """Asks how an exchange ended, after a confirm was lost."""

    KIND = "outcome-request"
    nonce: Nonce


class OutcomeReply(Message):
    """How the exchange ended on the replying side."""

    KIND = "outcome-reply"
    outcome: Literal["committed", "aborted", "unknown"]


class StateRequest(Message):
    """Asks for a peer's slow weights, to start from them."""

    KIND = "state-request"
    swarm: SwarmId
    model: Digest


class StateHeader(Message):
    """Announces ``nbytes`` bytes of slow weights with digest ``sha256``."""

    KIND, LIMIT = "state-header", 1024 * KIB
    round: Count
    step: Count
    nbytes: Bytes
    shapes: Shapes
    dtype: Token
    sha256: Sha256


M = TypeVar("M", bound=Message)


def pack(message: Message) -> bytes:
    """The bytes of ``message``. Raises MessageError if they exceed its kind's LIMIT."""
    data: bytes = msgpack.packb([message.KIND, message.VERSION, message.model_dump()])
    if len(data) > message.LIMIT:
        raise MessageError(f"A {message.KIND} of {len(data)} bytes exceeds {message.LIMIT} bytes: make it smaller.", "oversized")
    return data


def unpack(data: bytes, *types: type[M]) -> M:
    """The message in ``data``, which must be one of ``types``. Raises MessageError and nothing else."""
    return _fields(data, _kind(data, types))


def seal(message: Message, identity: Identity) -> bytes:
    """``message`` signed: msgpack of ``[peer id, packed message, signature]``. Raises MessageError if too large."""
    payload = pack(message)
    sealed: bytes = msgpack.packb([identity.peer_id, payload, identity.sign(_context(type(message)), payload)])
    return sealed


def unseal(data: bytes, *types: type[M]) -> tuple[str, M]:
    """The signer's peer id and the message, both verified. Raises MessageError and nothing else."""
    _check_size(data, max(kind.LIMIT for kind in types) + ENVELOPE)
    envelope = _decode(data, "signed message")
    if not isinstance(envelope, tuple) or [type(part) for part in envelope] != [str, bytes, bytes]:
        raise _malformed("signed message", "it is not [peer id, message, signature]", diagnose(data))
    signer, payload, signature = envelope
    kind = _kind(payload, types)
    if not verify(signer, _context(kind), payload, signature):
        raise MessageError(f"A {kind.KIND} was refused for its wrong signature: it was forged or damaged on its way.", "forged")
    message = _fields(payload, kind)
    if kind.AUTHOR is not None and getattr(message, kind.AUTHOR) != signer:
        raise MessageError(f"A {kind.KIND} was refused as forged: another peer than its {kind.AUTHOR} signed it.", "forged")
    return signer, message


def _context(kind: type[Message]) -> str:
    return f"shoal/{kind.KIND}/{kind.VERSION}"


def _malformed(what: str, why: str, reason: str = "malformed") -> MessageError:
    return MessageError(f"A malformed {what} was refused ({why}): the peer is faulty or runs another version of shoal.", reason)


def _check_size(data: bytes, limit: int) -> None:
    if len(data) > limit:
        raise _malformed("message", f"{len(data)} bytes where at most {limit} are allowed", "oversized")


def _kind(data: bytes, types: tuple[type[M], ...]) -> type[M]:
    """Which of ``types`` this is, from its first bytes alone. Raises MessageError on another kind, version or size."""
    _check_size(data, max(kind.LIMIT for kind in types))
    unpacker = msgpack.Unpacker(use_list=False, max_array_len=3, max_map_len=0, max_ext_len=0)
    unpacker.feed(data[:_HEAD])
    try:
        length, name, version = unpacker.read_array_header(), unpacker.unpack(), unpacker.unpack()
    except _DECODE_ERRORS as error:
        raise _malformed("message", "it does not start with a kind and version", diagnose(data)) from error
    if length != 3 or not isinstance(name, str) or type(version) is not int:
        raise _malformed("message", "it is not [kind, version, fields]", diagnose(data))
    expected = " or ".join(sorted(kind.KIND for kind in types))
    kind = next((kind for kind in types if name == kind.KIND), None)
    if kind is None:
        raise MessageError(f"A message of kind {name!a} came in place of {expected}: run the same shoal at both ends.", "kind")
    if version != kind.VERSION:
        where, spoken = "here" if version > kind.VERSION else "there", kind.VERSION
        raise MessageError(f"The peer's {name} has version {version}, this node speaks {spoken}: update shoal {where}.", "version")
    _check_size(data, kind.LIMIT)
    return kind


def _fields(data: bytes, kind: type[M]) -> M:
    content = _decode(data, kind.KIND)
    if not isinstance(content, tuple) or len(content) != 3 or not isinstance(content[2], dict):
        raise _malformed(kind.KIND, "it is not [kind, version, fields]", diagnose(data))
    try:
        return kind.model_validate(content[2])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # Names and texts in it may be the peer's: cut, and no control codes.
        field = ascii(".".join(map(str, first["loc"])) or "fields")[:80]
        reason = "oversized" if first["type"].endswith("too_long") else diagnose(data)
        raise _malformed(kind.KIND, f"{field}: {first['msg'][:200]}", reason) from None


def _decode(data: bytes, what: str) -> Any:
    """``data`` as tuples, dicts and scalars, with bounds on every container. Raises MessageError."""
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
        raise _malformed(what, "it does not decode within the limits", diagnose(data)) from error


def _bounded(limit: int, build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``build``, callable ``limit`` times: bounds the number of containers in a message, empty ones included."""
    count = 0

    def hook(content: Any) -> Any:
        nonlocal count
        count += 1
        if count > limit:
            raise ValueError("too many containers")
        return build(content)

    return hook


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict, refusing a key given twice: two readers might otherwise see two messages under one signature."""
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key is given twice")
    return content
