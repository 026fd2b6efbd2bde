"""Messages of an exchange between two peers."""

from __future__ import annotations

from typing import Literal

from shoal.swarm.wire.envelope import KIB, Message
from shoal.swarm.wire.fields import (
    Bytes,
    Count,
    Digest,
    Nonce,
    Reason,
    Sha256,
    Shapes,
    SwarmId,
    Token,
    Weight,
)


class Offer(Message):
    """Opens an exchange: what the sender is about to send, ``nbytes`` encoded bytes with digest ``sha256``."""

    KIND, VERSION, LIMIT = "offer", 2, 1024 * KIB
    swarm: SwarmId
    round: Count
    fragment: Count
    nbytes: Bytes
    shapes: Shapes
    dtype: Token
    codec: Token
    sha256: Sha256
    weight: Weight
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
