"""The messages of an exchange between two peers."""

from __future__ import annotations

from typing import Literal

from shoal.swarm.wire.envelope import KIB, Message
from shoal.swarm.wire.fields import Bytes, Count, Digest, Nonce, Reason, Sha256, Shapes, SwarmId, Token, Weight


class Offer(Message):
    """Offer of an exchange: a description of the payload, ``nbytes`` encoded bytes with digest ``sha256``."""

    KIND, LIMIT = "offer", 1024 * KIB
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
    """Message that the sender holds the whole verified contribution of its partner."""

    KIND = "ready"
    nonce: Nonce
    sha256: Sha256


class Commit(Message):
    """Decision to apply the exchange on both sides."""

    KIND = "commit"
    nonce: Nonce


class Abort(Message):
    """Decision that neither side applies the exchange."""

    KIND, LIMIT = "abort", 4 * KIB
    nonce: Nonce
    reason: Reason = ""


class OutcomeRequest(Message):
    """Question for the outcome of an exchange, after a confirmation was lost."""

    KIND = "outcome-request"
    nonce: Nonce


class OutcomeReply(Message):
    """The outcome of the exchange on the replying side."""

    KIND = "outcome-reply"
    outcome: Literal["committed", "aborted", "unknown"]
