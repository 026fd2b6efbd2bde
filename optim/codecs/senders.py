"""Codecs under which an index is averaged over the peers that sent it, and not over all."""

from __future__ import annotations

from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.error_feedback import ErrorFeedback
from shoal.optim.codecs.tail import BufferTailCodec
from shoal.optim.codecs.topk import TopK2Codec


class TopK2SendersCodec(TopK2Codec):
    """``TopK2Codec``, with the mean of SparseLoCo's authors' code in place of their paper's (``exchange.averaging``)."""

    name = "topk2-senders"


def by_sender(codec: Codec, count: int) -> int:
    """Return how many of ``count`` tensors, the first ones, are averaged at each index over the peers that sent it."""
    if isinstance(codec, BufferTailCodec):
        return by_sender(codec.codec, count - codec.count)
    if isinstance(codec, ErrorFeedback):
        return by_sender(codec.codec, count)
    return count if isinstance(codec, TopK2SendersCodec) else 0
