"""The signed offers that partners make each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.swarm.errors import MessageError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.contribution import Contribution
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import ENVELOPE, seal, unseal
from shoal.swarm.wire.pair import Offer

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream


def make_offer(context: PeerContext, contribution: Contribution, nonce: bytes) -> bytes:
    """Return the sealed offer of a contribution."""
    key, codec = contribution.key, contribution.codec
    return seal(
        Offer(
            swarm=context.swarm,
            round=key.round,
            fragment=key.fragment,
            nbytes=contribution.payload.nbytes,
            shapes=contribution.shapes,
            dtype="float32",
            codec=codec.name,
            sha256=contribution.sha256,
            weight=contribution.weight,
            model=context.model,
            nonce=nonce,
        ),
        context.identity,
    )


async def receive_offer(stream: Stream, seconds: float) -> Offer:
    """Receive the offer of the peer at the other end. Raises NetworkError or MessageError."""
    signer, offer = unseal(await stream.receive(Offer.LIMIT + ENVELOPE, seconds), Offer)
    if signer != stream.peer_id:
        raise MessageError(f"peer {short(stream.peer_id)} sent an offer that another peer signed: it was refused.")
    return offer
