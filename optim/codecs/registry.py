"""Codecs by their names.

    NAME[+ef[:BETA]]        NAME: float32, float16, bfloat16 (or fp32, fp16, bf16), int8, e3m0,
    topk2[:PART],
                            topk2-senders[:PART], sign, auto:BITS, mod4 (without +ef)

``int8``; ``e3m0+ef`` is e3m0 with error feedback; ``topk2+ef:0.95`` is SparseLoCo's, whose residual
fades by 0.95 a round; ``topk2:0.1+ef`` keeps a tenth of the values in place of a 64th; ``auto:2``
spends 2 bits a value, more on some tensors than on others. The ``name`` of a codec is its one
canonical spelling.
"""

from __future__ import annotations

import re

from shoal.optim.codecs.adaptive import AutoCodec
from shoal.optim.codecs.base import BFLOAT16, FLOAT16, FLOAT32, BufferTailCodec, Codec
from shoal.optim.codecs.error_feedback import ErrorFeedback
from shoal.optim.codecs.mod4 import Mod4Codec
from shoal.optim.codecs.quantized import E3M0Codec, Int8Codec, SignCodec
from shoal.optim.codecs.topk import TopK2Codec


class TopK2SendersCodec(TopK2Codec):
    """``TopK2Codec``, with the mean of SparseLoCo's authors' code in place of their paper's
    (``exchange.averaging``).
    """

    base = "topk2-senders"


def beyond_senders(codec: Codec) -> int | None:
    """Return how many tensors, the last ones, are not averaged at each index over the peers that
    sent it; None if none is.
    """
    if isinstance(codec, BufferTailCodec):
        inner = beyond_senders(codec.codec)
        return None if inner is None else inner + codec.count
    if isinstance(codec, ErrorFeedback):
        return beyond_senders(codec.codec)
    return 0 if isinstance(codec, TopK2SendersCodec) else None


INT8, E3M0, SIGN, TOPK2 = Int8Codec(), E3M0Codec(), SignCodec(), TopK2Codec()

_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (FLOAT32, FLOAT16, BFLOAT16, INT8, E3M0, TOPK2, TopK2SendersCodec(), SIGN)
}
_SHORT: dict[str, Codec] = {"fp32": FLOAT32, "fp16": FLOAT16, "bf16": BFLOAT16}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_NAME = re.compile(
    rf"(?P<base>[a-z0-9-]+)(?::(?P<number>{_NUMBER}))?(?P<ef>\+ef(?::(?P<beta>{_NUMBER}))?)?",
    re.ASCII,
)


def codec_named(name: str) -> Codec:
    """Return the codec of that name, a new instance if it has state.

    ValueError for an unknown name lists the known ones.
    """
    match = _NAME.fullmatch(name) if len(name) <= 64 else None
    codec = _base(match["base"], match["number"]) if match else None
    if match is None or codec is None or (match["ef"] and isinstance(codec, Mod4Codec)):
        names = ", ".join(_CODECS)
        raise ValueError(
            f"unknown codec {name[:64]!r}: choose one of {names}, topk2:PART or auto:BITS, each "
            "with +ef or +ef:BETA for error "
            "feedback, or mod4"
        )
    return ErrorFeedback(codec, float(match["beta"] or 1)) if match["ef"] else codec


def _base(base: str, number: str | None) -> Codec | None:
    if base == "auto":
        return (
            AutoCodec(float(number), (FLOAT32, BFLOAT16, INT8, E3M0, SIGN, TOPK2))
            if number
            else None
        )
    if base == "mod4":
        return None if number else Mod4Codec()
    codec = _CODECS.get(base) or _SHORT.get(base)
    if number is None:
        return codec
    return type(codec)(float(number)) if isinstance(codec, TopK2Codec) else None
