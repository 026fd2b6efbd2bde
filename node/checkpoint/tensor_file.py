"""Safetensors files written tensor by tensor, without a copy of all tensors in memory.

The library's own writer takes all tensors at once and holds Python's lock meanwhile. It can read
these files.

    with path.open("wb") as file:
        write_tensors(file.write, {"w": kind(weight)}, {"w": weight}.__getitem__)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

Kind = tuple[str, tuple[int, ...]]
"""Dtype as safetensors names it, and shape."""

BLOCK_BYTES = 4 * 2**20
"""Of one write."""
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
}


def kind(tensor: Tensor) -> Kind:
    """Return the kind of a tensor. Raises TypeError if safetensors has no name for its type."""
    if tensor.dtype not in DTYPE_NAMES:
        raise TypeError(f"a safetensors file cannot hold {tensor.dtype}")
    return DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)


def write_tensors(
    write: Callable[[Any], object], kinds: Mapping[str, Kind], tensor_of: Callable[[str], Tensor]
) -> int:
    """Write a whole safetensors file by ``write``, in blocks of 4 MiB; return its bytes.

    ``tensor_of`` is called for each name once, just before its tensor is written (any device, any
    strides).

    Raises:
        SafetensorError: it returned a tensor of another size than ``kinds`` declares.
        OSError: of ``write``.
    """
    sizes: dict[str, int] = {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # The widest types first, so that each tensor is aligned, as the library does; its size follows
    # from the type's name.
    offset = 0
    widest_first = sorted(kinds, key=lambda name: (-_width(kinds[name][0]), name))
    for name in widest_first:
        dtype, shape = kinds[name]
        sizes[name] = math.prod(shape) * _width(dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + sizes[name]],
        }
        offset += sizes[name]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write(len(text).to_bytes(8, "little") + text)
    for name, size in sizes.items():
        content = as_bytes(tensor_of(name).detach().to("cpu")).numpy()
        if content.nbytes != size:
            raise SafetensorError(
                f"{name!r} has {content.nbytes} bytes where {size} were announced"
            )
        for begin in range(0, size, BLOCK_BYTES):
            write(content[begin : begin + BLOCK_BYTES].data)
    return 8 + len(text) + offset


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the values of a plain tensor as bytes, in their order; a view where they lie so
    already.
    """
    values = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if values.stride(0) != 1:  # a view of one value, which counts as contiguous
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8)


def _width(dtype: str) -> int:
    """Return the bytes of a value of that type: 4 for F32, 1 for F8_E4M3 and BOOL, 8 for C64."""
    if dtype == "BOOL":
        return 1
    letters_and_bits, _, _ = dtype.partition("_")
    return int(letters_and_bits.lstrip("BFIUC")) // 8
