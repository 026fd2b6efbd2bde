"""Checkpoints: nested Python state, saved to a folder such as ``step-00001000`` and loaded from it.

    save(folder, 1000, {"model": model.state_dict()})
    step, state = load(folder)

``tensors.safetensors`` holds the tensors; ``state.json`` holds the rest, the SHA-256 of itself and
of the tensor file. Both are written in a temporary folder and synced to the disk; then one rename
makes them the checkpoint. So a process killed at any moment leaves the older checkpoints as they
were. Nothing is pickled. `shoal.node.checkpoint.writer` saves without stopping the training.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file
from torch import Tensor

from shoal.node.checkpoint.folder import SAVING, CheckpointError, listed, path_of
from shoal.node.checkpoint.packing import (
    FORMAT,
    Packed,
    TensorNames,
    UnpackableError,
    pack,
    unpack,
)
from shoal.node.checkpoint.tensor_file import as_bytes, kind, write_tensors
from shoal.swarm.errors import write_remedy

KEEP = 3
"""Checkpoints that stay in a folder, the newest."""
MAX_STATE_BYTES = 256 * 2**20
DIGEST_LINE_BYTES = 100
"""At most, of the first line of the state file."""
TENSORS = "tensors.safetensors"
STATE = "state.json"
POINTS = ("begun", "block", "tensors", "state", "synced", "aside", "renamed", "pruned")
"""Moments of a save, in order, at each of which a process may die: the temporary folder exists; a
block of the tensor file is written; all of it; the other file; both are on the disk; an older
checkpoint of the same step, if any, was moved aside; the new one has its name; old ones are gone.
"""


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
    final = path_of(folder, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=SAVING, dir=folder, ignore_cleanup_errors=True
        ) as name:
            temporary = Path(name)
            at("begun")
            _write_files(temporary, step, packed, at, hash_later)
            _put_in_place(temporary, final, step, at)
        at("renamed")
        _prune(final, keep)
        at("pruned")
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"Cannot save the checkpoint {str(final)!r} ({why}): {write_remedy(error)} or choose "
            "another folder."
        ) from error
    return final


def _write_files(
    folder: Path, step: int, packed: Packed, at: Callable[[str], None], hash_later: bool
) -> None:
    """Write both files to the disk."""
    written = hashlib.sha256()
    with (folder / TENSORS).open("wb") as file:

        def write(data: Any) -> None:
            file.write(data)
            if not hash_later:
                written.update(data)
            at("block")

        kinds = {name: kind(tensor) for name, tensor in packed.tensors.items()}
        write_tensors(write, kinds, packed.tensors.__getitem__)
    at("tensors")
    body = {
        "format": packed.format,
        "step": step,
        "tensors_sha256": _sha256(folder / TENSORS) if hash_later else written.hexdigest(),
        "state": packed.tree,
    }
    text = json.dumps(body)
    if len(text) > MAX_STATE_BYTES - DIGEST_LINE_BYTES:
        raise ValueError(
            f"besides tensors it would take {len(text) >> 20} MiB, and could not be read again"
        )
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / STATE).write_text(f"{digest}\n{text}\n", encoding="utf-8")
    at("state")
    for path in (folder / TENSORS, folder / STATE, folder):
        sync(path)
    at("synced")


def _put_in_place(temporary: Path, final: Path, step: int, at: Callable[[str], None]) -> None:
    """Give the new checkpoint its name. One of the same step, and those of later steps, make way.

    Within a run steps only grow: later ones are of a run that was resumed from an earlier step.
    """
    folder = final.parent
    if final.exists():
        older = _aside(final)
        shutil.rmtree(older, ignore_errors=True)
        os.rename(final, older)
        at("aside")
    for other_step, path in listed(folder):
        if other_step > step and not path.name.startswith("."):
            os.rename(path, folder / f".before-{path.name}")
    os.rename(temporary, final)
    sync(folder)


def _prune(final: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and what made way for the newest."""
    others = [path for _, path in listed(final.parent) if path != final]
    for path in others:
        if path == _aside(final):
            shutil.rmtree(path, ignore_errors=True)
    for path in others[keep - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def _aside(final: Path) -> Path:
    return final.parent / f".old-{final.name}"


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
    unpack(json.loads(json.dumps(packed.tree)), TensorNames())


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
    for part in (file, path / TENSORS):
        if part.exists() and not part.is_file():  # a pipe, or a device, has no end
            raise _Damage(f"{str(part)!r} is no file of bytes")
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
        return newest / TENSORS, unpack(_read(newest)["state"], TensorNames())
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
                f"There is no checkpoint in {str(folder)!r}: check the folder, or start without it."
            )
        newest = found[0][1]
        body = _read(newest)
        try:
            return int(body["step"]), unpack(body["state"], load_file(newest / TENSORS))
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
