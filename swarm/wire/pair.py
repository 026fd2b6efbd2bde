"""The messages of an exchange between two peers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.swarm.wire.envelope import KIB, Message
from shoal.swarm.wire.fields import Bytes, Count, Digest, Nonce, Reason, Sha256, Shapes, SwarmId, Token, Weight

MAX_REFUSED = 4096 * KIB
Refused = Annotated[bytes, Field(max_length=MAX_REFUSED)]
"""The blocks of the receiver's contribution that the sender refused (`shoal.optim.codecs.mod4.Reading.bits`)."""


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

    KIND, VERSION, LIMIT = "ready", 2, MAX_REFUSED + KIB
    nonce: Nonce
    sha256: Sha256
    refused: Refused = b""


class Commit(Message):
    """Decision to apply the exchange on both sides."""

    KIND, VERSION, LIMIT = "commit", 2, MAX_REFUSED + KIB
    nonce: Nonce
    refused: Refused = b""


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

    KIND, VERSION, LIMIT = "outcome-reply", 2, MAX_REFUSED + KIB
    outcome: Literal["committed", "aborted", "unknown"]
    refused: Refused = b""
