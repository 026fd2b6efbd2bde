"""Codecs under which an index is averaged over the peers that sent it, and not over all."""

from __future__ import annotations

from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.error_feedback import ErrorFeedback
from shoal.optim.codecs.tail import BufferTailCodec
from shoal.optim.codecs.topk import TopK2Codec


class TopK2SendersCodec(TopK2Codec):
    """``TopK2Codec``, with the mean of SparseLoCo's authors' code in place of their paper's (``exchange.averaging``)."""

    base = "topk2-senders"


def beyond_senders(codec: Codec) -> int | None:
    """Return how many tensors, the last ones, are not averaged at each index over the peers that sent it; None if none is."""
    if isinstance(codec, BufferTailCodec):
        inner = beyond_senders(codec.codec)
        return None if inner is None else inner + codec.count
    if isinstance(codec, ErrorFeedback):
        return beyond_senders(codec.codec)
    return 0 if isinstance(codec, TopK2SendersCodec) else None
