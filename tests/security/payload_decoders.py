"""Decoders of the payloads of exchanges."""

import torch

from shoal.node.verify.material import decode_material as decode_material
from shoal.optim.codecs.mod4 import Mod4Codec
from shoal.optim.codecs.registry import CODECS, codec_named
from shoal.optim.weight_patch import PatchError, apply, bits_of, encode
from tests.security.decoder import Decoder, one


def codecs():
    shapes = [(64, 64), (5000,), (), (0,), (3,)]
    torch.manual_seed(1)
    tensors = [torch.randn(shape) for shape in shapes]
    for name in [*CODECS, "topk2:0.1", "auto:4", "int8+ef", "sign+matrices"]:
        codec = codec_named(name)
        size = codec.nbytes(shapes)

        def read(data, codec=codec, size=size):
            # A payload of another size is refused before it is received; the rest is filled as it
            # comes.
            whole = (
                data
                if len(data) >= size // 2
                else (data * (size // max(len(data), 1) + 1))[:size]
                if data
                else b""
            )
            return codec.decode(
                torch.frombuffer(bytearray(whole), dtype=torch.uint8)
                if whole
                else torch.zeros(0, dtype=torch.uint8),
                shapes,
            )

        yield one(
            f"payload {name}",
            "optim/codecs/topk.py:_restore",
            read,
            lambda codec=codec: codec.encode(tensors).numpy().tobytes(),
            None,
            ValueError,
            sound=lambda found: [tuple(one.shape) for one in found] == shapes,
            sentence=False,
        )
    message = Mod4Codec().post(tensors)
    half = Mod4Codec().post([tensor * 2 for tensor in tensors]).payload
    yield one(
        "payload mod4",
        "optim/codecs/pair_message.py:_stream",
        lambda data: message.read(torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)),
        lambda: half.numpy().tobytes(),
        None,
        ValueError,
        sound=lambda reading: (
            reading.kept.shape == message.own.sizes.shape
            and bool(reading.values[reading.kept].isfinite().all())
        ),
        sentence=False,
    )
    yield Decoder(
        "refused blocks of mod4",
        ("optim/codecs/pair_message.py:PairMessage.refused",),
        message.refused,
        lambda: [bytes(-(-len(message.own.sizes) // 8)), b"\xa5" * -(-len(message.own.sizes) // 8)],
        refuses=(ValueError,),
        sound=lambda refused: refused.shape == message.own.sizes.shape,
        sentence=False,
    )
    before = bits_of(tensors)
    after = before.clone()
    after[::50] += 1
    yield one(
        "patch of weights",
        "optim/weight_patch.py:PatchHeader.read optim/weight_patch.py:_unzip",
        lambda data: apply(data, before),
        lambda: encode(before, after),
        None,
        PatchError,
        sound=lambda found: found.shape == before.shape and found.dtype == before.dtype,
    )
