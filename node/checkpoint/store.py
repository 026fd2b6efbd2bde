"""Checkpoints: nested Python state is saved exactly, to a folder such as ``step-00001000`` with two
files, and loaded from it.

``tensors.safetensors`` holds the tensors; ``state.json`` holds the rest, the SHA-256 of itself and
of the tensor file. Both are written in a temporary folder and synced to the disk; then one rename
makes them the checkpoint. So a process killed at any moment leaves the older checkpoints as they
were. Nothing is pickled. `shoal.node.checkpoint.writer` saves without stopping the training.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from torch import Tensor

from shoal.node.checkpoint.folder import SAVING, CheckpointError, listed, path_of
from shoal.node.inner_tensors import InnerTensors, OpaqueError, taken_apart

# Writing safetensors files tensor by tensor, without a copy of everything and without holding
# Python's lock.
#
# The library's own writer needs all tensors at once. It can read these files.

Kind = tuple[str, tuple[int, ...]]
"""Dtype as safetensors names it, and shape."""

BLOCK = 2**22  # bytes of one write
_NAMES = {
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
    if tensor.dtype not in _NAMES:
        raise TypeError(f"a safetensors file cannot hold {tensor.dtype}")
    return _NAMES[tensor.dtype], tuple(tensor.shape)


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
    for name, (dtype, shape) in sorted(
        kinds.items(), key=lambda item: (-_width(item[1][0]), item[0])
    ):
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
        for begin in range(0, size, BLOCK):
            write(content[begin : begin + BLOCK].data)
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
    return {"BOOL": 1}.get(dtype) or int("".join(filter(str.isdigit, dtype.split("_")[0]))) // 8


FORMAT = 2
"""Of a checkpoint that holds inner tensors or bytes of types that safetensors has no name for; all
others are of format 1.
"""
KEEP = 3
MAX_STATE_BYTES = 256 * 2**20
TENSORS, STATE = "tensors.safetensors", "state.json"
POINTS = ("begun", "block", "tensors", "state", "synced", "aside", "renamed", "pruned")
"""Moments of a save, in order, at each of which a process may die: the temporary folder exists; a
block of the tensor file is written; all of it; the other file; both are on the disk; an older
checkpoint of the same step, if any, was moved aside; the new one has its name; old ones are gone.
"""


ABLE = (
    "numbers, texts, bytes, tensors, arrays of numbers, and dicts, lists, tuples, sets and "
    "deques of these"
)


@dataclass(frozen=True)
class Packed:
    """Nested state in two parts: ``tree`` for JSON, and the tensors by the names that stand for
    them in it.
    """

    tree: Any
    tensors: dict[str, Tensor]
    format: int = 1


DEEPEST = 200  # levels of nested state: well within Python's own limit, which JSON meets too
_NUMBERS = "biufc"  # kinds of NumPy's dtypes
_SEQUENCES: dict[str, Callable[[Iterator[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


class UnpackableError(TypeError):
    """A value that a checkpoint cannot hold. ``place``: the keys that lead to it."""

    def __init__(self, value: Any, place: tuple[Any, ...], why: str = "") -> None:
        where = "".join(f"[{key!r:.40}]" for key in place)
        super().__init__(
            f"a checkpoint cannot hold a {type(value).__name__}{why}: "
            f"{shown(value)}{where and f', at {where}'}"
        )
        self.value, self.place, self.why = value, place, why


def shown(value: Any) -> str:
    """Return a few words that show a value.

    A tensor's own may need values that it does not have, or a wait for a GPU.
    """
    if isinstance(value, Tensor):
        form = "" if value.is_nested else f" of shape {tuple(value.shape)}"
        return f"{value.dtype}{form}"
    return f"{value!r:.80}"


class _Tensors(dict[str, Tensor]):
    """The tensors of a state by their names in the file, in the order in which they were found."""

    format = 1

    def keep(self, tensor: Tensor) -> str:
        name = str(len(self))
        self[name] = tensor
        return name


def pack(state: Any) -> Packed:
    """Split ``state`` into a tree and tensors, which are not copied.

    Raises UnpackableError if a checkpoint cannot hold it.
    """
    tensors = _Tensors()
    tree = _pack(state, tensors, ())
    return Packed(tree, tensors, tensors.format)


def _pack_tensor(value: Tensor, tensors: _Tensors, place: tuple[Any, ...]) -> Any:
    """Turn a tensor into a one-key object that names it, or the plain tensors that it consists
    of.
    """
    try:
        apart = taken_apart(value)
    except OpaqueError as error:
        raise UnpackableError(value, place, str(error)) from error
    return _pack_apart(apart, value, tensors, place)


def _pack_apart(
    apart: Tensor | InnerTensors, value: Tensor, tensors: _Tensors, place: tuple[Any, ...]
) -> Any:
    if isinstance(apart, InnerTensors):
        tensors.format = FORMAT
        inside = [
            [name, _pack_apart(inner, value, tensors, place)]
            for name, inner in apart.tensors.items()
        ]
        return {"inner": [apart.kind, inside]}
    if apart.is_nested:
        raise UnpackableError(value, place, " that is nested")
    if apart.is_quantized:
        raise UnpackableError(value, place, f" of {apart.dtype}")
    if apart.layout != torch.strided:
        raise UnpackableError(value, place, f" that is {apart.layout}")
    if apart.is_meta:
        raise UnpackableError(value, place, " without values")
    if apart.dtype in _NAMES:
        return {"tensor": tensors.keep(apart)}
    tensors.format = FORMAT
    dtype = str(apart.dtype).removeprefix("torch.")
    return {"bytes_of": [dtype, list(apart.shape), tensors.keep(as_bytes(apart))]}


def _pack(value: Any, tensors: _Tensors, place: tuple[Any, ...]) -> Any:
    """Turn ``value`` into JSON values; move each tensor to ``tensors`` and leave a one-key object
    in its place.
    """

    def each(values: Any) -> list[Any]:
        return [_pack(v, tensors, (*place, number)) for number, v in enumerate(values)]

    if len(place) > DEEPEST:
        raise UnpackableError(value, place[:4], f" that is nested {DEEPEST} deep, or holds itself")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        # JSON keeps finite floats exactly (the shortest text that reads back equal) but has no
        # others.
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, int):  # an IntEnum, for one
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Tensor):
        return _pack_tensor(value, tensors, place)
    if type(value) is list:
        return each(value)
    if type(value) in (tuple, torch.Size):
        return {"tuple": each(value)}
    if isinstance(value, dict):
        return {
            "dict": [
                [_pack(k, tensors, (*place, k)), _pack(v, tensors, (*place, k))]
                for k, v in value.items()
            ]
        }
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": each([value.real, value.imag])}
    if type(value) in (set, frozenset):
        return {type(value).__name__: each(sorted(value, key=repr))}
    if isinstance(value, deque):
        return {"deque": [value.maxlen, each(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
        flat = np.frombuffer(value.tobytes(), np.uint8).copy()
        return {"array": [value.dtype.str, list(value.shape), tensors.keep(torch.from_numpy(flat))]}
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return {"generator": tensors.keep(value.get_state())}
    raise UnpackableError(value, place)


def _dtype(name: Any) -> torch.dtype:
    """Return torch's type of that name. Raises ValueError if it has none."""
    found = vars(torch).get(str(name))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no type of torch: {name!r:.40}")
    return found


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "float":
        return float(inner)
    if kind == "tensor":
        return tensors[inner]
    if kind == "inner":
        name, inside = inner
        return InnerTensors(str(name), {str(n): _unpack(v, tensors) for n, v in inside})
    if kind == "bytes_of":
        name, shape, content = inner
        stored, form = tensors[content], _dtype(name)
        return stored.view(form).view(shape) if isinstance(stored, Tensor) else stored
    if kind == "dict":
        return {_unpack(k, tensors): _unpack(v, tensors) for k, v in inner}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_unpack(v, tensors) for v in inner)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "complex":
        return complex(*(_unpack(v, tensors) for v in inner))
    if kind == "deque":
        length, items = inner
        return deque((_unpack(v, tensors) for v in items), length)
    if kind == "dtype":
        return _dtype(inner)
    if kind == "device":
        return torch.device(str(inner))
    if kind == "array":
        name, shape, content = inner
        dtype, flat = np.dtype(str(name)), tensors[content]
        if dtype.kind not in _NUMBERS:
            raise ValueError(f"no array of numbers: {name!r:.40}")
        return (
            np.frombuffer(flat.numpy().tobytes(), dtype).reshape(shape).copy()
            if isinstance(flat, Tensor)
            else flat
        )
    if kind == "generator":
        state = tensors[inner]
        return torch.Generator().set_state(state) if isinstance(state, Tensor) else state
    raise ValueError(f"unknown kind {kind!r}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make the system write a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(
    folder: Path,
    step: int,
    state: Any,
    *,
    keep: int = KEEP,
    at: Callable[[str], None] = lambda point: None,
    hash_later: bool = False,
) -> Path:
    """Write ``state`` as the checkpoint of ``step`` and return its path; the newest ``keep`` are
    kept.

    ``state`` nests dicts, lists, tuples, sets and deques of None, bool, int, float, complex, str,
    bytes, tensors (any dtype, any device, any strides), NumPy's numbers and arrays of numbers,
    torch's dtypes, devices and generators of the CPU. Subclasses of dict come back as dict, NumPy's
    numbers as Python's, tensors on the CPU without gradient, tensors of a class of their own as
    `shoal.node.inner_tensors.InnerTensors`. It may be `Packed` already. ``at`` is called with each
    of the `POINTS` that is reached. ``hash_later``: read the tensor file once more to hash it, so
    that the tensors are written sooner.

    Raises:
        CheckpointError: the folder cannot be written (no permission, disk full); older checkpoints
            are as they were.
        UnpackableError: ``state`` holds something else. ValueError: it is too large for a file that
            is read again.
    """
    packed = state if isinstance(state, Packed) else pack(state)
    kinds = {name: kind(tensor) for name, tensor in packed.tensors.items()}
    final = path_of(folder, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=SAVING, dir=folder, ignore_cleanup_errors=True
        ) as name:
            temporary = Path(name)
            at("begun")
            written = hashlib.sha256()
            with (temporary / TENSORS).open("wb") as file:

                def write(data: Any) -> None:
                    file.write(data)
                    if not hash_later:
                        written.update(data)
                    at("block")

                write_tensors(write, kinds, packed.tensors.__getitem__)
            at("tensors")
            tensors = _sha256(temporary / TENSORS) if hash_later else written.hexdigest()
            body = {
                "format": packed.format,
                "step": step,
                "tensors_sha256": tensors,
                "state": packed.tree,
            }
            text = json.dumps(body)
            if len(text) > MAX_STATE_BYTES - 100:
                raise ValueError(
                    f"besides tensors it would take {len(text) >> 20} MiB, and could not be read "
                    "again"
                )
            digest = hashlib.sha256(text.encode()).hexdigest()
            (temporary / STATE).write_text(f"{digest}\n{text}\n", encoding="utf-8")
            at("state")
            for path in (temporary / TENSORS, temporary / STATE, temporary):
                sync(path)
            at("synced")
            if final.exists():
                old = folder / f".old-{final.name}"
                shutil.rmtree(old, ignore_errors=True)
                os.rename(final, old)
                at("aside")
            for other, path in listed(folder):
                if other > step and not path.name.startswith("."):  # within a run steps only grow
                    os.rename(path, folder / f".before-{path.name}")
            os.rename(temporary, final)
            sync(folder)
        at("renamed")
        others = [path for _, path in listed(folder) if path != final]
        for path in [p for p in others if p.name == f".old-{final.name}"] + others[keep - 1 :]:
            shutil.rmtree(path, ignore_errors=True)
        at("pruned")
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"Cannot save the checkpoint {str(final)!r} ({why}): free some space or choose another "
            "folder."
        ) from error
    return final


def prove(packed: Packed) -> None:
    """Write and read the first value of each tensor, in memory: what the files would do, without
    their bytes.

    Raises UnpackableError: a tensor cannot be written, or the state comes back as another one.
    """
    firsts: dict[str, Tensor] = {}
    # One of each form is enough, and each costs a wait for its device.
    seen: set[tuple[torch.dtype, torch.device, bool, bool]] = set()
    for name, tensor in packed.tensors.items():
        firsts[name] = torch.zeros((), dtype=tensor.dtype, device="cpu")
        form = (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
        if tensor.numel() and form not in seen:
            seen.add(form)
            try:
                firsts[name] = as_bytes(tensor[(0,) * tensor.ndim].to("cpu"))
            except (RuntimeError, TypeError) as error:
                why = next(iter(str(error).splitlines()), type(error).__name__)
                raise UnpackableError(
                    tensor, (), f" whose values cannot be read ({why})"
                ) from error
    parts: list[bytes] = []
    kinds = {name: kind(tensor) for name, tensor in firsts.items()}
    write_tensors(lambda data: parts.append(bytes(data)), kinds, firsts.__getitem__)
    load_tensors(b"".join(parts))
    _unpack(json.loads(json.dumps(packed.tree)), _Names())


class _Damage(Exception):
    """A file is damaged; the message names it and the damage."""


WRONG = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError)
"""What a file of another form leads to: RuntimeError is torch's, and Python's where it is nested
too deep.
"""


def _read(path: Path) -> dict[str, Any]:
    """Check both files and return what `save` wrote beside the tensors. Raises _Damage or
    OSError.
    """
    file = path / STATE
    if odd := [
        name for name in (STATE, TENSORS) if (path / name).exists() and not (path / name).is_file()
    ]:
        raise _Damage(
            f"{str(path / odd[0])!r} is no file of bytes"
        )  # a pipe, or a device, has no end
    if file.stat().st_size > MAX_STATE_BYTES:
        raise _Damage(f"{str(file)!r} is too large")
    digest, _, text = file.read_bytes().partition(b"\n")
    text = text.removesuffix(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise _Damage(f"{str(file)!r} is not as it was written")
    try:
        body: dict[str, Any] = json.loads(text)
        if body["format"] not in range(1, FORMAT + 1):
            raise _Damage(
                f"{str(file)!r} has format {body['format']!r:.40}, where this version of shoal "
                f"knows 1 to {FORMAT}"
            )
        if _sha256(path / TENSORS) != body["tensors_sha256"]:
            raise _Damage(f"{str(path / TENSORS)!r} is not as it was written")
        return body
    except WRONG as error:
        raise _Damage(f"{str(path)!r} cannot be read, {type(error).__name__}") from error


class TensorName(str):
    """Placeholder of a tensor: its name in the tensor file."""

    __slots__ = ()


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> TensorName:
        return TensorName(name)


def outline(path: Path) -> tuple[Path, Any]:
    """Return the tensor file and the state, with a `TensorName` for each tensor, of the checkpoint
    ``path`` or the newest in it.

    Raises CheckpointError if there is none, or it is damaged.
    """
    try:
        found = [(0, path)] if (path / STATE).exists() else listed(path)
        if not found:
            raise CheckpointError(
                f"There is no checkpoint in {str(path)!r}: name a checkpoint's folder, or a node's."
            )
        newest = found[0][1]
        return newest / TENSORS, _unpack(_read(newest)["state"], _Names())
    except _Damage as damage:
        raise CheckpointError(f"The checkpoint is damaged: {damage}: take another one.") from damage
    except WRONG as error:
        raise CheckpointError(
            f"The checkpoint in {str(path)!r} is damaged ({type(error).__name__}): take another "
            "one."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"Cannot read {error.filename!r} ({error.strerror}): check the path and its "
            "permissions."
        ) from error


def load(folder: Path) -> tuple[int, Any]:
    """Return (step, state) of the newest checkpoint in ``folder``, or of ``folder`` if it is a
    checkpoint itself.

    Raises CheckpointError if there is none, or it is damaged; the sentence says how to fall back to
    an older one.
    """
    try:
        found = [(0, folder)] if (folder / STATE).exists() else listed(folder)
        if not found:
            raise CheckpointError(
                f"There is no checkpoint in {str(folder)!r}: start without --resume."
            )
        newest = found[0][1]
        body = _read(newest)
        try:
            return int(body["step"]), _unpack(body["state"], load_file(newest / TENSORS))
        except (*WRONG, SafetensorError) as error:
            raise _Damage(f"{str(newest)!r} cannot be read, {type(error).__name__}") from error
    except _Damage as damage:
        path = str(found[0][1])
        if len(found) > 1:
            todo = f"delete {path!r} to continue from the one of step {found[1][0]}"
        else:
            todo = f"there is no older one, so delete {path!r} and start without --resume"
        raise CheckpointError(f"The checkpoint is damaged: {damage}: {todo}.") from damage
    except FileNotFoundError as error:
        older = (
            f"delete {str(found[0][1])!r} to continue from an older one, or start without --resume"
        )
        raise CheckpointError(
            f"The checkpoint is damaged: {error.filename!r} is missing: {older}."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"Cannot read the checkpoint {error.filename!r} ({error.strerror}): check its "
            "permissions."
        ) from error
