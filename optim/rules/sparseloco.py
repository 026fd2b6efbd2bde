"""SparseLoCo (2508.15706): DiLoCo without momentum, of the largest values in 2 bits.

    opt = SparseLoCo(inner, exchange, every=30)

The paper's mean and that of its authors' code: docs/methods.md, "SparseLoCo's two means".
"""

from __future__ import annotations

from typing import Any

from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.error_feedback import ErrorFeedback
from shoal.optim.codecs.topk import TopK2Codec
from shoal.optim.exchange.base import Exchange
from shoal.optim.outer.inner import Inner
from shoal.optim.rules.diloco import DiLoCo

RESIDUAL_DECAY = 0.95
"""What is left of the residual each round: the paper's."""


class SparseLoCo(DiLoCo):
    """SparseLoCo (2508.15706, algorithm 1): with residual e,

        sent <- top-k(g + e) in 2 bits;   e <- 0.95 (g + e - sent)          (the codec's part)
        slow <- slow - lr mean(sent);     fast <- slow

    There is no outer momentum: the residual plays its role. ``codec=None`` is the paper's top-k in
    chunks with 2 bits a value; its mean divides by the number of peers, that of
    ``codec_named("topk2-senders+matrices+ef:0.95")`` by those that sent an index, and does not cut
    vectors.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        codec: Codec | None = None,
        every: int = 30,
        lr: float = 1.0,
        **options: Any,
    ) -> None:
        options["codec"] = codec or ErrorFeedback(TopK2Codec(), RESIDUAL_DECAY)
        super().__init__(inner, exchange, every=every, lr=lr, momentum=0.0, **options)
