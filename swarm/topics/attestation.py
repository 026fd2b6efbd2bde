"""Records of verification in transit; none of their content is judged here.

A record is small, and signed by its author, so that any peer can pass it on and show it: the seal
of the message that carries it is the transport's and ends with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.identity import SIGNATURE_BYTES, Identity, verify
from shoal.swarm.p2p.rate_limit import RateLimit
from shoal.swarm.wire.envelope import KIB, Message, PeerId, SwarmId

CONTEXT = "shoal/verification/1"
MAX_RECORD_BYTES = 2048
QUOTA = RateLimit(messages=600, nbytes=2 << 20)
"""In a swarm of 100 in which each claims once in a round of 60 s and all claims are checked by 3, a
peer is drawn 3 times a round, and the busiest hardly ever more than 12 times. Each makes a
commitment, a reveal and a verdict, in 3 draws at most: 108, and some five others (entry, claim,
view, dispute, opening). This is five times as much: for rounds of 12 s, or for five claims.
"""

Handler = Callable[[str, bytes, bytes], None]
"""(author, record, signature)"""


class Attestation(Message):
    """A record of ``peer`` and its signature over it in the context "shoal/verification/1"
    (`sign_record`).
    """

    KIND = "attestation"
    LIMIT = 4 * KIB
    AUTHOR = "peer"
    swarm: SwarmId
    peer: PeerId
    record: Annotated[bytes, Field(min_length=1, max_length=MAX_RECORD_BYTES)]
    signature: Annotated[bytes, Field(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


def sign_record(identity: Identity, data: bytes) -> bytes:
    return identity.sign(CONTEXT, data)


def verify_record(peer: str, data: bytes, signature: bytes) -> bool:
    """Return whether ``peer`` signed the encoded record ``data``.

    Never raises, whatever it is given.
    """
    return isinstance(data, bytes) and verify(peer, CONTEXT, data, signature)


class Attestations:
    """The records of ``gossip``'s swarm. For any thread but the host's own.

    ``handler(author, record, signature)`` is called once for each record of another peer, on the
    host's loop, after its signature was verified (a wrong one is refused as ``forged``); it must
    not wait. It refuses a record by MessageError, whose reason is counted.
    """

    def __init__(self, gossip: Gossip, handler: Handler) -> None:
        self._swarm = gossip.swarm
        self._peer = gossip.identity.peer_id
        self._handler = handler
        self.topic = gossip.join(Attestation, self._take, QUOTA)

    def publish(self, record: bytes, signature: bytes) -> None:
        """Send a record of this node to everybody, soon; never waits.

        The own handler is not called.

        Raises MessageError if it is empty or larger than 2048 bytes (reason ``oversized``), or if
        the signature is not this node's (``forged``).
        """
        if not 0 < len(record) <= MAX_RECORD_BYTES:
            raise MessageError(
                f"A record of {len(record)} bytes cannot be published: 1 to {MAX_RECORD_BYTES} are "
                "allowed.",
                "oversized",
            )
        if not verify_record(self._peer, record, signature):
            raise MessageError(
                "A record cannot be published: its signature is not this node's.", "forged"
            )
        self.topic.publish(
            Attestation(swarm=self._swarm, peer=self._peer, record=record, signature=signature)
        )

    # -- on the loop -------------------------------------------------------------------------------

    def _take(self, author: str, attestation: Attestation) -> None:
        if attestation.swarm != self._swarm:
            raise MessageError("A record of another swarm was refused.", "foreign-swarm")
        if not verify_record(author, attestation.record, attestation.signature):
            raise MessageError("A record was refused: its signature is not its author's.", "forged")
        self._handler(author, attestation.record, attestation.signature)
