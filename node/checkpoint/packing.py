"""Nested Python state as JSON values and tensors, and back, exactly.

    packed = pack({"step": 3, "weights": torch.ones(2)})
    packed.tree     # {"dict": [["step", 3], ["weights", {"tensor": "0"}]]}
    packed.tensors  # {"0": tensor([1., 1.])}
    unpack(packed.tree, packed.tensors)

What JSON has stands as it is: None, booleans, integers, finite floats, texts, lists. Everything
else is an object with one key, its kind, as in `_UNPACKERS`. Nothing is pickled, so a state that is
read can hold no code.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.node.checkpoint.tensor_file import DTYPE_NAMES, as_bytes
from shoal.node.inner_tensors import InnerTensors, OpaqueError, taken_apart

PLAIN_FORMAT = 1
FORMAT = 2
"""Of a state with inner tensors, or with bytes of types that safetensors has no name for."""
MAX_DEPTH = 200
"""Levels of nested state: well within Python's limit of recursion, which JSON meets too."""
NUMBER_KINDS = "biufc"
"""Kinds of NumPy's dtypes that are numbers: booleans, integers, floats, complex numbers."""
ABLE = (
    "numbers, texts, bytes, tensors, arrays of numbers, and dicts, lists, tuples, sets and "
    "deques of these"
)

Place = tuple[Any, ...]
"""The keys that lead to a value in a nested state."""


@dataclass(frozen=True)
class Packed:
    """Nested state in two parts: ``tree`` for JSON, and the tensors by the names that stand for
    them in it.
    """

    tree: Any
    tensors: dict[str, Tensor]
    format: int = PLAIN_FORMAT


class UnpackableError(TypeError):
    """A value that a checkpoint cannot hold. ``place``: the keys that lead to it."""

    def __init__(self, value: Any, place: Place, why: str = "") -> None:
        keys = "".join(f"[{key!r:.40}]" for key in place)
        where = f", at {keys}" if keys else ""
        super().__init__(
            f"a checkpoint cannot hold a {type(value).__name__}{why}: {shown(value)}{where}"
        )
        self.value = value
        self.place = place
        self.why = why


def shown(value: Any) -> str:
    """Return a few words that show a value.

    Of a tensor its form: its values may not be there, or may be a wait for a GPU away.
    """
    if not isinstance(value, Tensor):
        return f"{value!r:.80}"
    if value.is_nested:
        return str(value.dtype)
    return f"{value.dtype} of shape {tuple(value.shape)}"


def pack(state: Any) -> Packed:
    """Split ``state`` into a tree and tensors, which are not copied.

    Raises UnpackableError if a checkpoint cannot hold it.
    """
    tensors = _Tensors()
    tree = _pack(state, tensors, ())
    return Packed(tree, tensors, tensors.format)


class _Tensors(dict[str, Tensor]):
    """The tensors of a state by their names in the file, in the order in which they were found."""

    format = PLAIN_FORMAT

    def keep(self, tensor: Tensor) -> str:
        name = str(len(self))
        self[name] = tensor
        return name


def _pack(value: Any, tensors: _Tensors, place: Place) -> Any:
    """Turn ``value`` into JSON values; keep its tensors in ``tensors``."""
    if len(place) > MAX_DEPTH:
        raise UnpackableError(
            value, place[:4], f" that is nested {MAX_DEPTH} deep, or holds itself"
        )
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    exact = _EXACT_PACKERS.get(type(value))
    if exact is not None:
        return exact(value, tensors, place)
    for kind, packer in _PACKERS.items():
        if isinstance(value, kind):
            return packer(value, tensors, place)
    raise UnpackableError(value, place)


def _pack_each(values: Any, tensors: _Tensors, place: Place) -> list[Any]:
    return [_pack(value, tensors, (*place, number)) for number, value in enumerate(values)]


def _pack_float(value: float, tensors: _Tensors, place: Place) -> Any:
    """JSON keeps finite floats exactly, by the shortest text that reads back equal; it has no
    others.
    """
    if math.isfinite(value):
        return float(value)
    return {"float": repr(float(value))}


def _pack_dict(value: dict[Any, Any], tensors: _Tensors, place: Place) -> Any:
    items = []
    for key, inner in value.items():
        packed_key = _pack(key, tensors, (*place, key))
        items.append([packed_key, _pack(inner, tensors, (*place, key))])
    return {"dict": items}


def _pack_array(value: np.ndarray[Any, Any], tensors: _Tensors, place: Place) -> Any:
    if value.dtype.kind not in NUMBER_KINDS:
        raise UnpackableError(value, place)
    flat = np.frombuffer(value.tobytes(), np.uint8).copy()
    return {"array": [value.dtype.str, list(value.shape), tensors.keep(torch.from_numpy(flat))]}


def _pack_generator(value: torch.Generator, tensors: _Tensors, place: Place) -> Any:
    if value.device.type != "cpu":
        raise UnpackableError(value, place)
    return {"generator": tensors.keep(value.get_state())}


def _pack_tensor(value: Tensor, tensors: _Tensors, place: Place) -> Any:
    """Turn a tensor into an object that names it, or names the plain tensors it consists of."""
    try:
        apart = taken_apart(value)
    except OpaqueError as error:
        raise UnpackableError(value, place, str(error)) from error
    return _pack_apart(apart, value, tensors, place)


def _pack_apart(
    apart: Tensor | InnerTensors, value: Tensor, tensors: _Tensors, place: Place
) -> Any:
    if isinstance(apart, InnerTensors):
        tensors.format = FORMAT
        inside = []
        for name, inner in apart.tensors.items():
            inside.append([name, _pack_apart(inner, value, tensors, place)])
        return {"inner": [apart.kind, inside]}
    if apart.is_nested:
        raise UnpackableError(value, place, " that is nested")
    if apart.is_quantized:
        raise UnpackableError(value, place, f" of {apart.dtype}")
    if apart.layout != torch.strided:
        raise UnpackableError(value, place, f" that is {apart.layout}")
    if apart.is_meta:
        raise UnpackableError(value, place, " without values")
    if apart.dtype in DTYPE_NAMES:
        return {"tensor": tensors.keep(apart)}
    tensors.format = FORMAT
    dtype = str(apart.dtype).removeprefix("torch.")
    return {"bytes_of": [dtype, list(apart.shape), tensors.keep(as_bytes(apart))]}


Packer = Callable[[Any, _Tensors, Place], Any]

_EXACT_PACKERS: dict[type, Packer] = {
    list: _pack_each,
    tuple: lambda value, tensors, place: {"tuple": _pack_each(value, tensors, place)},
    torch.Size: lambda value, tensors, place: {"tuple": _pack_each(value, tensors, place)},
    set: lambda value, tensors, place: {"set": _pack_each(sorted(value, key=repr), tensors, place)},
    frozenset: lambda value, tensors, place: {
        "frozenset": _pack_each(sorted(value, key=repr), tensors, place)
    },
}
"""Of these types but not of their subclasses, such as a named tuple, which would come back as
another type.
"""

_PACKERS: dict[type, Packer] = {
    float: _pack_float,
    int: lambda value, tensors, place: int(value),  # an IntEnum, for one
    str: lambda value, tensors, place: str.__str__(value),
    Tensor: _pack_tensor,
    dict: _pack_dict,
    bytes: lambda value, tensors, place: {"bytes": value.hex()},
    bytearray: lambda value, tensors, place: {"bytes": value.hex()},
    complex: lambda value, tensors, place: {
        "complex": _pack_each([value.real, value.imag], tensors, place)
    },
    deque: lambda value, tensors, place: {
        "deque": [value.maxlen, _pack_each(value, tensors, place)]
    },
    torch.dtype: lambda value, tensors, place: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value, tensors, place: {"device": str(value)},
    np.ndarray: _pack_array,
    torch.Generator: _pack_generator,
}
"""Of these types and their subclasses."""


class TensorName(str):
    """Placeholder of a tensor: its name in the tensor file."""

    __slots__ = ()


class TensorNames(dict[str, Any]):
    """In place of the tensors of a state: the placeholder of each."""

    def __missing__(self, name: str) -> TensorName:
        return TensorName(name)


def unpack(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the state of a ``tree`` that `pack` made, with its ``tensors`` by name.

    Raises ValueError, KeyError or TypeError (of torch also RuntimeError) where it is none.
    """
    if isinstance(tree, list):
        return [unpack(inner, tensors) for inner in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    unpacker = _UNPACKERS.get(kind)
    if unpacker is None:
        raise ValueError(f"unknown kind {kind!r}")
    return unpacker(inner, tensors)


def _unpack_dict(inner: Any, tensors: Mapping[str, Any]) -> Any:
    return {unpack(key, tensors): unpack(value, tensors) for key, value in inner}


def _unpack_inner(inner: Any, tensors: Mapping[str, Any]) -> Any:
    kind, inside = inner
    parts = {str(name): unpack(value, tensors) for name, value in inside}
    return InnerTensors(str(kind), parts)


def _unpack_bytes_of(inner: Any, tensors: Mapping[str, Any]) -> Any:
    dtype_name, shape, name = inner
    stored = tensors[name]
    dtype = _dtype(dtype_name)
    if not isinstance(stored, Tensor):
        return stored
    return stored.view(dtype).view(shape)


def _unpack_bytes(inner: Any, tensors: Mapping[str, Any]) -> Any:
    return bytes.fromhex(inner)


def _unpack_array(inner: Any, tensors: Mapping[str, Any]) -> Any:
    dtype_name, shape, name = inner
    dtype = np.dtype(str(dtype_name))
    stored = tensors[name]
    if dtype.kind not in NUMBER_KINDS:
        raise ValueError(f"no array of numbers: {dtype_name!r:.40}")
    if not isinstance(stored, Tensor):
        return stored
    return np.frombuffer(stored.numpy().tobytes(), dtype).reshape(shape).copy()


def _unpack_deque(inner: Any, tensors: Mapping[str, Any]) -> Any:
    length, items = inner
    return deque(unpack(items, tensors), length)


def _unpack_generator(inner: Any, tensors: Mapping[str, Any]) -> Any:
    stored = tensors[inner]
    if not isinstance(stored, Tensor):
        return stored
    return torch.Generator().set_state(stored)


def _dtype(name: Any) -> torch.dtype:
    """Return torch's type of that name. Raises ValueError if it has none."""
    dtype = vars(torch).get(str(name))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no type of torch: {name!r:.40}")
    return dtype


Unpacker = Callable[[Any, Mapping[str, Any]], Any]

_UNPACKERS: dict[str, Unpacker] = {
    "float": lambda inner, tensors: float(inner),
    "tensor": lambda inner, tensors: tensors[inner],
    "inner": _unpack_inner,
    "bytes_of": _unpack_bytes_of,
    "dict": _unpack_dict,
    "tuple": lambda inner, tensors: tuple(unpack(value, tensors) for value in inner),
    "set": lambda inner, tensors: {unpack(value, tensors) for value in inner},
    "frozenset": lambda inner, tensors: frozenset(unpack(value, tensors) for value in inner),
    "bytes": _unpack_bytes,
    "complex": lambda inner, tensors: complex(*(unpack(value, tensors) for value in inner)),
    "deque": _unpack_deque,
    "dtype": lambda inner, tensors: _dtype(inner),
    "device": lambda inner, tensors: torch.device(str(inner)),
    "array": _unpack_array,
    "generator": _unpack_generator,
}
"""Kind of an object in the tree -> what makes the value of what it holds."""
