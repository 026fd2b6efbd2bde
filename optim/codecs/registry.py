"""Codecs by their names.

    NAME[+matrices | +hidden][+ef[:BETA]]

    NAME: float32, float16, bfloat16 (or fp32, fp16, bf16), int8, e3m0, sign, topk2[:PART],
    topk2-senders[:PART], auto:BITS; mod4, which takes none of the two

    NAME+ef[:BETA],back=NAME        # averages come back by the second (``two_way``)

``e3m0+ef`` is e3m0 with error feedback; ``topk2+ef:0.95`` is SparseLoCo's, whose residual fades by
0.95 a round; ``topk2:0.1+ef`` keeps a tenth of the values in place of a 64th; ``auto:2`` spends 2
bits a value, more on some tensors than on others; ``sign+matrices+ef`` sends vectors whole
(``partial``). The ``name`` of a codec is its one canonical spelling.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from shoal.optim.codecs.adaptive import AutoCodec
from shoal.optim.codecs.base import Codec, Shape
from shoal.optim.codecs.buffer_tail import BufferTailCodec
from shoal.optim.codecs.e3m0 import E3M0Codec
from shoal.optim.codecs.error_feedback import ErrorFeedback
from shoal.optim.codecs.floats import BFLOAT16, FLOAT16, FLOAT32, FLOAT_CODECS
from shoal.optim.codecs.mod4 import Mod4Codec
from shoal.optim.codecs.partial import PartialCodec, Scope
from shoal.optim.codecs.quantized import Int8Codec, SignCodec
from shoal.optim.codecs.topk import TopK2Codec
from shoal.optim.codecs.two_way import SEPARATOR, TwoWayCodec


class TopK2SendersCodec(TopK2Codec):
    """``TopK2Codec``, with the mean of SparseLoCo's authors' code in place of their paper's
    (``exchange.averaging``).
    """

    base = "topk2-senders"


def sent_by_senders(codec: Codec, shapes: Sequence[Shape]) -> list[bool] | None:
    """Return for each tensor whether it is averaged at each index over the peers that sent that
    index; None if ``codec`` has the usual mean.
    """
    if isinstance(codec, BufferTailCodec):
        head = sent_by_senders(codec.codec, shapes[: -codec.count])
        return None if head is None else head + [False] * codec.count
    if isinstance(codec, ErrorFeedback):
        return sent_by_senders(codec.codec, shapes)
    if isinstance(codec, PartialCodec) and isinstance(codec.codec, TopK2SendersCodec):
        return [not whole for whole in codec.flags(shapes)]
    return [True] * len(shapes) if isinstance(codec, TopK2SendersCodec) else None


INT8 = Int8Codec()
E3M0 = E3M0Codec()
SIGN = SignCodec()
TOPK2 = TopK2Codec()

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (*FLOAT_CODECS, INT8, E3M0, TOPK2, TopK2SendersCodec(), SIGN)
}
"""Codecs that a name alone chooses; mod4 is apart, since it takes no suffix."""
_SHORT: dict[str, Codec] = {"fp32": FLOAT32, "fp16": FLOAT16, "bf16": BFLOAT16}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_NAME = re.compile(
    rf"(?P<base>[a-z0-9-]+)(?::(?P<number>{_NUMBER}))?(?:\+(?P<scope>matrices|hidden))?"
    rf"(?P<ef>\+ef(?::(?P<beta>{_NUMBER}))?)?",
    re.ASCII,
)
WHY_WHOLE = {
    "float32": "sends all tensors whole already",
    "mod4": "is read by the partner's own weights, all tensors alike",
}
"""Why a codec takes neither +matrices nor +hidden."""
LONGEST_NAME = 64
"""Characters; a message between peers admits no more."""


def codec_named(name: str) -> Codec:
    """Return the codec of that name, a new instance if it has state.

    ValueError for an unknown name lists the known ones.
    """
    up, separator, back = name.partition(SEPARATOR)
    if separator and len(name) <= LONGEST_NAME:
        return two_way_codec(codec_named(up), codec_named(back))
    match = _NAME.fullmatch(name) if len(name) <= LONGEST_NAME else None
    if match is None:
        raise _unknown(name)
    codec = _base(match["base"], match["number"])
    if codec is None or (match["ef"] and isinstance(codec, Mod4Codec)):
        raise _unknown(name)
    if match["scope"]:
        why = WHY_WHOLE.get(codec.name)
        if why is not None:
            raise ValueError(f"{codec.name} {why}: leave out +{match['scope']}")
        codec = PartialCodec(codec, cast(Scope, match["scope"]))
    if match["ef"]:
        return ErrorFeedback(codec, float(match["beta"] or 1))
    return codec


def two_way_codec(codec: Codec, back: Codec) -> TwoWayCodec:
    """Return the codec of contributions by ``codec`` and averages by ``back``. ValueError if they
    do not fit.
    """
    if not isinstance(codec, ErrorFeedback):
        raise ValueError(
            f"averages can be sent back by a codec of their own only where contributions have "
            f"error feedback: choose {codec.name}+ef, or leave out the codec of the way back"
        )
    return TwoWayCodec(codec.codec, codec.beta, back)


def _unknown(name: str) -> ValueError:
    names = ", ".join(CODECS)
    return ValueError(
        f"unknown codec {name[:LONGEST_NAME]!r}: choose one of {names}, topk2:PART or auto:BITS, "
        "each with +matrices or +hidden if vectors (and embeddings) are to be sent whole, then "
        "with +ef or +ef:BETA for error feedback, or mod4"
    )


def _base(base: str, number: str | None) -> Codec | None:
    """Return the codec without suffixes, or None if there is no such one."""
    if base == "auto":
        if number is None:
            return None
        return AutoCodec(float(number), (FLOAT32, BFLOAT16, INT8, E3M0, SIGN, TOPK2))
    if base == "mod4":
        return None if number else Mod4Codec()
    codec = CODECS.get(base) or _SHORT.get(base)
    if number is None:
        return codec
    return type(codec)(float(number)) if isinstance(codec, TopK2Codec) else None
