"""Rollouts as records, and as the training thread sees them: it publishes its own and drains those
of others, and never waits.

SAPO (arXiv 2509.08721): the unit of sharing is one question with all its completions. They travel
as text, so that peers with other models and tokenizers can learn from it. Neither the question, the
answer nor a reward is in the record: the receiver makes the question anew from (env, env_version,
env_config, seed, index) and judges the completions itself. The pool judges the swarm, environment
and age of a record. Those of a barred author are refused as ``banned``, or dropped if they were
held already.
"""

from __future__ import annotations

import functools
import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.rate_limit import RateLimit
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
    pack,
)

MAX_COMPLETIONS = 64
MAX_TEXT = 32 * KIB  # bytes of one completion in UTF-8
MAX_TOKENS = 16_384  # of one completion
ROUNDING = 1e-3  # a log-probability above zero by no more is float32's

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
    try:
        return (
            tuple(part.decode("utf-8") for part in _parts(value))
            if isinstance(value, bytes)
            else value
        )
    except UnicodeDecodeError:
        raise ValueError("must be UTF-8") from None


def _fits(text: str) -> str:
    if (size := len(text.encode("utf-8"))) > MAX_TEXT:
        raise _too_long(f"{size} bytes where at most {MAX_TEXT} are allowed")
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
Texts = Annotated[
    tuple[Annotated[str, AfterValidator(_fits)], ...], _PER_COMPLETION, BeforeValidator(_texts),
    PlainSerializer(lambda texts: _pack_parts([text.encode("utf-8") for text in texts])),
]  # fmt: skip
Numbers = Annotated[
    Annotated[
        tuple[Annotated[bytes, Field(max_length=4 * MAX_TOKENS), AfterValidator(_whole)], ...],
        _PER_COMPLETION,
    ]
    | None,
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
            if len(self.tokens) != len(self.completions) or list(map(len, self.tokens)) != list(
                map(len, self.logps)
            ):
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
        """About how much memory the record takes."""
        return 1024 + sum(
            map(
                len, (*self.completions, *(self.tokens or ()), *(self.logps or ()), self.env_config)
            )
        )


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=dtype)
        if data
        else torch.empty(0, dtype=dtype, device="cpu")
    )


def _check_numbers(tokens: bytes, logps: bytes) -> None:
    if not tokens:
        return
    if int(_tensor(tokens, torch.int32).min()) < 0:
        raise ValueError("a token id is negative")
    found = _tensor(logps, torch.float32)
    if not bool(found.isfinite().all()) or float(found.max()) > ROUNDING:
        raise ValueError("a log-probability is not finite, or above zero")


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Return one completion's token ids in the form of a rollout.

    Raises struct.error for an id that is not an int32.
    """
    return struct.pack(f"<{len(ids)}i", *ids)


def pack_logps(logps: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(logps)}f", *logps)


log = logging.getLogger(__name__)

CLOCK = 60.0  # seconds a record may be dated ahead of our clock
REMEMBERED = 16_384  # nonces
MAX_TTL_S = 3600.0  # that a record lasts however long the rounds of this node take

Knows = Callable[[str, str, bytes], bool]

REASONS = (
    "truncated",
    "oversized",
    "nested",
    "malformed",
    "version",
    "kind",
    "bomb",
    "forged",
    "replayed",
    "quota",
    "overflow",
    "digest",
    "unavailable",
    "foreign-swarm",
    "foreign-env",
    "stale",
    "future",
    "banned",
    "unwelcome",
)


@dataclass(frozen=True)
class PoolLimits:
    """The limits on what a pool accepts and keeps."""

    ttl: float = 600.0
    """Seconds since the record was issued; it lasts longer if this node's last round began before.
    """
    per_sender: int = 64
    """Records of one author held at a time; a newer one displaces the oldest."""
    records: int = 1024
    """Records held at a time, of all authors."""
    nbytes: int = 128 << 20
    """Bytes held at a time."""
    quota: RateLimit = field(default_factory=RateLimit)
    """The limit of one publisher in a minute."""


class RolloutPool:
    """The rollouts of ``gossip``'s swarm. For any thread but the host's own.

    ``knows(env, env_version, env_config)``: returns whether this node can make the questions of
    that environment; quick, on the host's loop; an exception counts as no. ``barred``: tells peers
    whose records are refused; quick, for any thread; it may be set later.
    """

    def __init__(
        self,
        gossip: Gossip,
        knows: Knows,
        *,
        limits: PoolLimits | None = None,
        clock: Callable[[], float] = time.time,
        barred: Callable[[str], bool] = lambda peer: False,
    ) -> None:
        self._swarm = gossip.swarm
        self._peer = gossip.identity.peer_id
        self._knows = knows
        self._clock = clock
        self._limits = limits or PoolLimits()
        self.barred = barred
        self._lock = threading.Lock()  # guards the next five
        self._held: list[Rollout] = []  # in the order of arrival
        self._round = 0
        self._began = self._began_before = clock()  # this round of the node, and the one before
        self._lost = {"expired": 0, "displaced": 0, "banned": 0}  # of those that were accepted
        self.bytes_sent = self.bytes_received = 0
        """Of records published and drained, each once: GossipSub sends some to several neighbours,
        and frames them.
        """
        self._nonces = Newest[tuple[str, bytes], None](
            REMEMBERED
        )  # (author, nonce); on the loop only
        self.topic = gossip.join(Rollout, self._take, self._limits.quota)

    def advance(self, round: int) -> None:
        """Note that this node begins ``round``."""
        with self._lock:
            self._round = round
            self._began_before, self._began = self._began, self._clock()

    def _oldest(self, now: float) -> float:
        """Return when the oldest record that is of use was issued: what came in a long round is not
        too old at its end.
        """
        return max(min(now - self._limits.ttl, self._began_before), now - MAX_TTL_S)

    def make(self, **fields: Any) -> Rollout:
        """Return a record of this node in its present round, with the other ``fields``.

        Raises pydantic's ValidationError.
        """
        nonce = secrets.token_bytes(16)
        issued = self._clock()
        return Rollout(
            swarm=self._swarm,
            peer=self._peer,
            round=self._round,
            nonce=nonce,
            issued=issued,
            **fields,
        )

    def publish(self, rollout: Rollout) -> None:
        """Share ``rollout`` with the swarm, soon; never waits.

        Raises MessageError if it is larger than 4 MiB, or another's.
        """
        self.bytes_sent += len(pack(rollout))
        self.topic.publish(rollout)

    def drain(self) -> list[Rollout]:
        """Return all records since the last call that are neither too old by now nor of a barred
        peer, in the order of arrival.
        """
        with self._lock:
            self._expire()
            held = self._held
            self._held = []
        barred = {peer for peer in {rollout.peer for rollout in held} if self.barred(peer)}
        drained = [rollout for rollout in held if rollout.peer not in barred]
        with self._lock:
            self._lost["banned"] += len(held) - len(drained)
        self.bytes_received += sum(len(pack(rollout)) for rollout in drained)
        return drained

    @property
    def counts(self) -> dict[str, Any]:
        """The numbers of records ``sent``, ``unsent``, ``received``, ``accepted``; ``held``;
        accepted but then ``expired`` or ``displaced`` before they were drained, or ``banned`` with
        their author; and ``rejected``, by reason.
        """
        counted = self.topic.counts
        with self._lock:
            here = {"held": len(self._held), **self._lost}
        return {**counted, **here, "rejected": {**dict.fromkeys(REASONS, 0), **counted["rejected"]}}

    # -- on the loop -------------------------------------------------------------------------------

    def _take(self, author: str, rollout: Rollout) -> None:
        if rollout.swarm != self._swarm:
            raise MessageError("A rollout of another swarm was refused.", "foreign-swarm")
        if self.barred(author):
            raise MessageError("A rollout was refused: its author is banned for a while.", "banned")
        if (author, rollout.nonce) in self._nonces:
            raise MessageError("A rollout was refused: its nonce was used before.", "replayed")
        now = self._clock()
        if rollout.issued > now + CLOCK:
            raise MessageError("A rollout was refused: it is dated in the future.", "future")
        with self._lock:
            oldest = self._oldest(now)
        if rollout.issued < oldest:
            raise MessageError("A rollout was refused: it is too old.", "stale")
        if not self._is_known(rollout):
            raise MessageError("A rollout of an unknown environment was refused.", "foreign-env")
        self._nonces[author, rollout.nonce] = None
        with self._lock:
            self._held.append(rollout)
            self._make_room(author)

    def _is_known(self, rollout: Rollout) -> bool:
        try:
            return self._knows(rollout.env, rollout.env_version, rollout.env_config)
        except Exception:  # a peer's configuration may make it fail
            log.debug("environment %r was not recognised", rollout.env, exc_info=True)
            return False

    def _make_room(self, author: str) -> None:
        self._expire()
        before = len(self._held)
        theirs = [at for at, held in enumerate(self._held) if held.peer == author]
        if len(theirs) > self._limits.per_sender:
            del self._held[theirs[0]]
        nbytes = sum(held.nbytes for held in self._held)
        while self._held and (
            len(self._held) > self._limits.records or nbytes > self._limits.nbytes
        ):
            nbytes -= self._held.pop(0).nbytes
        self._lost["displaced"] += before - len(self._held)

    def _expire(self) -> None:
        oldest = self._oldest(self._clock())
        fresh = [held for held in self._held if held.issued >= oldest]
        self._lost["expired"] += len(self._held) - len(fresh)
        self._held = fresh
