"""A rollout as a record: a question's completions, in the form in which they travel.

SAPO (arXiv 2509.08721): the unit of sharing is one question with all its completions. They travel
as text, so that peers with other models and tokenizers can learn from it. Neither the question, the
answer nor a reward is in the record: the receiver makes the question anew from (env, env_version,
env_config, seed, index) and judges the completions itself.
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from shoal.swarm.wire.envelope import (
    KIB,
    Count,
    Digest,
    Label,
    Message,
    Moment,
    Nonce,
    PeerId,
    SwarmId,
)

MAX_COMPLETIONS = 64
MAX_TEXT_BYTES = 32 * KIB
"""Of one completion in UTF-8."""
MAX_TOKENS = 16_384
"""Of one completion."""
MAX_LOGP = 1e-3
"""A log-probability above zero by no more is float32's rounding."""
OVERHEAD_BYTES = 1024
"""About what a record takes in memory beside its completions."""

Finish = Literal["stop", "length"]
_FINISHES: tuple[Finish, ...] = ("stop", "length")


class Behaviour(NamedTuple):
    """One completion as its author's policy drew it: token ids (int64) and log-probabilities
    (float32), both of shape (T,).
    """

    tokens: Tensor
    logps: Tensor


def _pack_parts(parts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _parts(value: bytes) -> tuple[bytes, ...]:
    """Split one byte string into its parts, each after its length (u32, little-endian)."""
    parts: list[bytes] = []
    at = 0
    while at < len(value):
        if len(parts) == MAX_COMPLETIONS:
            raise _too_long(f"at most {MAX_COMPLETIONS} are allowed")
        if at + 4 > len(value):
            raise ValueError("the last length is cut short")
        (size,) = struct.unpack_from("<I", value, at)
        if at + 4 + size > len(value):
            raise ValueError("the last part is cut short")
        parts.append(value[at + 4 : at + 4 + size])
        at += 4 + size
    return tuple(parts)


def _too_long(why: str) -> PydanticCustomError:
    return PydanticCustomError("too_long", "{why}", {"why": why})


def _texts(value: object) -> object:
    if not isinstance(value, bytes):
        return value
    try:
        return tuple(part.decode("utf-8") for part in _parts(value))
    except UnicodeDecodeError:
        raise ValueError("must be UTF-8") from None


def _fits(text: str) -> str:
    size = len(text.encode("utf-8"))
    if size > MAX_TEXT_BYTES:
        raise _too_long(f"{size} bytes where at most {MAX_TEXT_BYTES} are allowed")
    return text


def _whole(part: bytes) -> bytes:
    if len(part) % 4:
        raise ValueError("must be numbers of 4 bytes")
    return part


def _finishes(value: object) -> object:
    """Read the wire form: a byte each, 0 for stop and 1 for length."""
    if not isinstance(value, bytes):
        return value
    if len(value) > MAX_COMPLETIONS:
        raise _too_long(f"at most {MAX_COMPLETIONS} are allowed")
    if any(code >= len(_FINISHES) for code in value):
        raise ValueError("must be 0 (stop) or 1 (length)")
    return tuple(_FINISHES[code] for code in value)


# One byte string each on the wire: long msgpack arrays would have to be allocated before their
# content is seen.
_PER_COMPLETION = Field(max_length=MAX_COMPLETIONS)
_Text = Annotated[str, AfterValidator(_fits)]
_Numbers = Annotated[bytes, Field(max_length=4 * MAX_TOKENS), AfterValidator(_whole)]
Texts = Annotated[
    tuple[_Text, ...],
    _PER_COMPLETION,
    BeforeValidator(_texts),
    PlainSerializer(lambda texts: _pack_parts([text.encode("utf-8") for text in texts])),
]
Numbers = Annotated[
    Annotated[tuple[_Numbers, ...], _PER_COMPLETION] | None,
    BeforeValidator(lambda value: _parts(value) if isinstance(value, bytes) else value),
    PlainSerializer(lambda parts: None if parts is None else _pack_parts(parts)),
]
Finishes = Annotated[
    tuple[Finish, ...],
    BeforeValidator(_finishes),
    PlainSerializer(lambda finishes: bytes(map(_FINISHES.index, finishes))),
]

# The name of a question, here and elsewhere.
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:+-]{1,128}$")]
EnvConfig = Annotated[bytes, Field(max_length=4 * KIB)]
QuestionSeed = Annotated[int, Field(ge=0, lt=2**63)]


class Rollout(Message):
    """A group of completions to one question, all drawn by one policy at one temperature.

    ``env_config`` are the bytes from which the environment makes its configuration (canonical, so
    that equal configurations are equal bytes); ``seed`` and ``index`` name the question.
    ``policy_version`` counts the author's updates, ``round`` is the author's when it drew them,
    ``issued`` is in Unix seconds. ``tokens`` (int32) and ``logps`` (float32, natural logarithm,
    under the policy that drew them) are packed little-endian, per completion, for peers whose
    tokenizer has the digest ``tokenizer``: all three are given, or none.

    The fields are flat, since they are the layout of the record on the wire.
    """

    KIND = "rollout"
    LIMIT = 4096 * KIB
    AUTHOR = "peer"
    swarm: SwarmId
    peer: PeerId
    env: EnvName
    env_version: Label
    env_config: EnvConfig
    seed: QuestionSeed
    index: Count
    completions: Texts
    finish: Finishes
    tokens: Numbers = None
    logps: Numbers = None
    tokenizer: Digest | None = None
    policy_version: Count
    temperature: Annotated[float, Field(ge=0, le=100)]
    round: Count
    nonce: Nonce
    issued: Moment

    @model_validator(mode="after")
    def _consistent(self) -> Rollout:
        if not self.completions or len(self.finish) != len(self.completions):
            raise ValueError("must hold completions, each with its finish reason")
        given = [part is not None for part in (self.tokens, self.logps, self.tokenizer)]
        if any(given) != all(given):
            raise ValueError("tokens, logps and tokenizer go together")
        if self.tokens is not None and self.logps is not None:
            token_bytes = [len(part) for part in self.tokens]
            logp_bytes = [len(part) for part in self.logps]
            if len(token_bytes) != len(self.completions) or token_bytes != logp_bytes:
                raise ValueError("every completion needs a log-probability for each of its tokens")
            _check_numbers(b"".join(self.tokens), b"".join(self.logps))
        return self

    def behaviours(self) -> tuple[Behaviour, ...]:
        """Return token ids and log-probabilities of each completion; empty if the author gave
        none.
        """
        pairs = zip(self.tokens or (), self.logps or (), strict=True)
        return tuple(
            Behaviour(_tensor(ids, torch.int32).long(), _tensor(logps, torch.float32))
            for ids, logps in pairs
        )

    @functools.cached_property
    def nbytes(self) -> int:
        """About how much memory the record takes; one emoji gives all of its text four bytes a
        character.
        """
        numbers = (*(self.tokens or ()), *(self.logps or ()), self.env_config)
        return OVERHEAD_BYTES + sum(map(sys.getsizeof, self.completions)) + sum(map(len, numbers))


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype)


def _check_numbers(tokens: bytes, logps: bytes) -> None:
    if not tokens:
        return
    if int(_tensor(tokens, torch.int32).min()) < 0:
        raise ValueError("a token id is negative")
    found = _tensor(logps, torch.float32)
    if not bool(found.isfinite().all()) or float(found.max()) > MAX_LOGP:
        raise ValueError("a log-probability is not finite, or above zero")


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Return one completion's token ids in the form of a rollout.

    Raises struct.error for an id that is not an int32.
    """
    return struct.pack(f"<{len(ids)}i", *ids)


def pack_logps(logps: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(logps)}f", *logps)
