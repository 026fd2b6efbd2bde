"""Writing safetensors files by hand: tensor by tensor, so that neither a copy of everything nor Python's lock is held meanwhile.

The library's own writer wants all tensors at once. What is written here it reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

Kind = tuple[str, tuple[int, ...]]
"""dtype as safetensors names it, and shape."""

BLOCK = 2**22  # bytes of one write
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Sink(Protocol):
    """Where bytes go: a file opened for writing, or what also counts or hashes them."""

    def write(self, data: Any, /) -> Any:
        """Take all of ``data``."""
        ...


def kind(tensor: Tensor) -> Kind:
    """Of a tensor. TypeError if safetensors has no name for its type."""
    if tensor.dtype not in _NAMES:
        raise TypeError(f"a safetensors file cannot hold {tensor.dtype}")
    return _NAMES[tensor.dtype], tuple(tensor.shape)


def write_tensors(sink: Sink, kinds: Mapping[str, Kind], tensor_of: Callable[[str], Tensor]) -> int:
    """Write a whole safetensors file, in blocks of 4 MiB; returns its bytes.

    ``tensor_of`` is asked for each name once, just before its tensor is written (any device, any strides).

    Raises:
        SafetensorError: it returned a tensor of another size than ``kinds`` says.
        OSError: of the sink.
    """
    sizes: dict[str, int] = {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # The widest types first, so that each tensor is aligned, as the library does; its size follows from the type's name.
    offset = 0
    for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: (-_width(item[1][0]), item[0])):
        sizes[name] = math.prod(shape) * _width(dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + sizes[name]]}
        offset += sizes[name]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sink.write(len(text).to_bytes(8, "little") + text)
    for name, size in sizes.items():
        content = tensor_of(name).detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        if content.nbytes != size:
            raise SafetensorError(f"{name!r} has {content.nbytes} bytes where {size} were announced")
        for begin in range(0, size, BLOCK):
            sink.write(content[begin : begin + BLOCK].data)
    return 8 + len(text) + offset


def _width(dtype: str) -> int:
    """Bytes of a value of that type: F32 has 4, F8_E4M3 has 1, BOOL has 1, C64 has 8."""
    return {"BOOL": 1}.get(dtype) or int("".join(filter(str.isdigit, dtype.split("_")[0]))) // 8
