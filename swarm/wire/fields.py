"""The types of the fields of messages, each with its bounds."""

from __future__ import annotations

import struct
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from shoal.swarm.errors import printable
from shoal.swarm.identity import is_peer_id

MAX_TENSORS = 65_536
MAX_DIMS = 131_072  # of all tensors together
MAX_RANK = 8
MAX_COUNT = 2**53  # steps, rounds: exact in every language's numbers
MAX_BYTES = 2**40
MAX_REAL = 1e30  # whose squares can be summed
MAX_SHARE = 1e6
MIN_RATE, MAX_RATE = 1e-9, 1e15  # a second; means and inverses of such are finite
MAX_EXTRA = 8  # tensors for each parameter that a rule may share
MAX_BLAMED = 4  # (peer, failure) pairs in a record: the most frequent ones
SKETCH = 4  # numbers in a sketch of the slow weights

Reach = Literal["unknown", "direct", "local", "punched", "relayed", "unreachable"]
"""Who can dial a node: anybody (direct); those in its own network, where all are who looked (local); nobody, but both ends punch
holes in their routers, or a relay forwards; nobody (unreachable)."""
Failure = Literal["unreachable", "timeout", "refused", "broken", "damaged", "suspicious"]
FAILURES: tuple[Failure, ...] = get_args(Failure)


def _printable(text: str) -> str:
    if not text.isprintable():  # control codes, line breaks, text direction marks: they end up on terminals
        raise ValueError("must hold printable characters only")
    return text


def _peer_id(text: str) -> str:
    if not is_peer_id(text):
        raise ValueError("must be the peer id of an Ed25519 key")
    return text


def _sentence(text: object) -> object:
    """Cut and clean a reason, at either end: it is for people and should cause no further errors."""
    if not isinstance(text, str):
        return text
    return printable(text[:512], other=" ")


def _rate(value: float) -> float:
    if 0 < value < MIN_RATE:
        raise ValueError(f"must be 0, or {MIN_RATE:g} at least")
    return value


def real(value: float | None) -> float | None:
    """Return a number of this node's as a message can hold it: None for what is not finite, or beyond `MAX_REAL`."""
    return value if value is not None and abs(value) <= MAX_REAL else None


def rate(value: float) -> float:
    """Return a speed of this node's as a message can hold it: 0 for what is none."""
    return value if MIN_RATE <= value <= MAX_RATE else 0.0


def share(value: float | None) -> float | None:
    """Return a utilisation of this node's as a message can hold it: None for what is none."""
    return value if value is not None and 0 <= value <= MAX_SHARE else None


def _shapes(value: object) -> object:
    """Read shapes, packed (per tensor: rank as u8, sizes as little-endian u32) or as tuples of int. Raises ValueError."""
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


def pack_shapes(shapes: tuple[tuple[int, ...], ...]) -> bytes:
    """Pack shapes: per tensor its rank as u8 and its sizes as little-endian u32."""
    return b"".join(struct.pack(f"<B{len(shape)}I", len(shape), *shape) for shape in shapes)


SwarmId = Annotated[str, Field(pattern=r"^[a-z2-7]{52}$")]
PeerId = Annotated[str, Field(max_length=64), AfterValidator(_peer_id)]
Label = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_printable)]
ShortLabel = Annotated[str, Field(min_length=1, max_length=16), AfterValidator(_printable)]
MAX_ADDRESS = 256
"""Characters of an address in a message."""
Address = Annotated[str, Field(max_length=MAX_ADDRESS, pattern=r"^/[\x21-\x7e]+$")]
Reason = Annotated[str, BeforeValidator(_sentence), Field(max_length=512)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Token = Annotated[str, Field(pattern=r"^[a-z0-9_.:,=+-]{1,64}$")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Real = Annotated[float, Field(ge=-MAX_REAL, le=MAX_REAL)]
Sketch = tuple[Count, Count, Annotated[tuple[Real, ...], Field(min_length=SKETCH, max_length=SKETCH)]]
"""A round and fragment, and a sketch of the slow weights of that fragment after it (`shoal.swarm.state.resync`)."""
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Moment = Annotated[float, Field(ge=0, le=MAX_COUNT)]
"""Unix seconds."""
Rate = Annotated[float, Field(ge=0, le=MAX_RATE), AfterValidator(_rate)]
Share = Annotated[float, Field(ge=0, le=MAX_SHARE)]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
# Sums and products of such weights stay finite in float32. 0: takes part but is not counted.
MAX_WEIGHT = 1e30
Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]
Sha256 = Annotated[bytes, Field(min_length=32, max_length=32)]
Nonce = Annotated[bytes, Field(min_length=16, max_length=16)]
# One byte string on the wire: long msgpack arrays would have to be allocated before their content is seen.
Shapes = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_shapes), PlainSerializer(pack_shapes)]
