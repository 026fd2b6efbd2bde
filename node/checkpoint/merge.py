"""The weighted mean of several checkpoints (``shoal merge``).

    merge([Path("anna"), Path("ben")], Path("mean.safetensors"), weights=[1, 2])

It is as Branch-Train-Merge (2208.03306) merges its experts, computed tensor by tensor in float64,
so that only one tensor of each checkpoint is in memory at a time. Floating-point tensors are
averaged; counters, masks and the like are of the first one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.node.checkpoint import store as checkpoint
from shoal.node.checkpoint.folder import CheckpointError
from shoal.node.checkpoint.packing import TensorName
from shoal.node.checkpoint.store import sync
from shoal.node.checkpoint.tensor_file import Kind, write_tensors
from shoal.node.inner_tensors import InnerTensors
from shoal.swarm.errors import ShoalError


class MergeError(ShoalError):
    """The checkpoints do not fit each other, or the result cannot be written."""


@dataclass(frozen=True)
class _Source:
    """One checkpoint: its tensor file and, for each name in the model, the name in that file."""

    path: Path
    file: Path
    names: dict[str, str]


def merge(
    paths: Sequence[Path],
    out: Path,
    *,
    weights: Sequence[float] | None = None,
    slow: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Write the weighted mean of the checkpoints to ``out``, whole or not at all; return a report.

    Args:
        paths: safetensors files, checkpoints (``step-...``), or nodes' folders, of which the newest
            checkpoint is taken.
        weights: one for each path, not negative; only their ratios count. None: equal.
        slow: take the slow weights, float32, in place of the parameters.
        force: replace ``out`` if it exists.

    Raises MergeError or CheckpointError, whose sentence names the first difference; ``out`` is as
    it was.
    """
    shares = _shares(weights, len(paths))
    if out.exists() and not force:
        raise MergeError(
            f"The file {str(out)!r} exists: choose another name, or pass --force to replace it."
        )
    sources = [_source(path, slow) for path in paths]
    with ExitStack() as stack:
        try:
            files = [
                stack.enter_context(safe_open(source.file, framework="pt")) for source in sources
            ]
            kinds = [_kinds(source, file) for source, file in zip(sources, files, strict=True)]
        except (OSError, SafetensorError) as error:
            raise MergeError(
                f"A checkpoint cannot be read ({error!s:.200}): name safetensors files, or shoal's "
                "own."
            ) from error
        for source, theirs in zip(sources[1:], kinds[1:], strict=True):
            _check_same(sources[0].path, kinds[0], source.path, theirs)

        def mean(name: str) -> Tensor:
            both = zip(sources, files, strict=True)
            tensors = (file.get_tensor(source.names[name]) for source, file in both)
            return _mean(tensors, shares)

        size = _write(out, kinds[0], mean)
    return {
        "out": str(out),
        "sources": [str(source.path) for source in sources],
        "weights": shares,
        "tensors": len(kinds[0]),
        "values": sum(math.prod(shape) for _, shape in kinds[0].values()),
        "bytes": size,
    }


def parse_weights(text: str) -> list[float]:
    """Return the numbers in a text such as ``1,2,0.5``. Raises MergeError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise MergeError(
            f"The weights {text!r} are not numbers: write one for each checkpoint, such as 1,2,0.5."
        ) from None


def _shares(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return the weights over their sum."""
    if count < 1:
        raise MergeError("There is nothing to merge: name at least one checkpoint.")
    given = [1.0] * count if weights is None else list(weights)
    if len(given) != count:
        raise MergeError(
            f"There are {count} checkpoints and {len(given)} weights: give one for each, such as "
            "1,2,0.5."
        )
    total = math.fsum(given)
    if not all(0 <= weight < math.inf for weight in given) or not 0 < total < math.inf:
        raise MergeError(
            "The weights must be finite, not negative, and not all 0: only their ratios count."
        )
    return [weight / total for weight in given]


def _source(path: Path, slow: bool) -> _Source:
    """Open one checkpoint. Raises MergeError or CheckpointError."""
    if path.is_file():
        if slow:
            raise MergeError(
                f"The file {str(path)!r} holds one set of weights: --slow is for the checkpoints "
                "of nodes."
            )
        return _Source(path, path, {})
    if not path.is_dir():
        raise MergeError(f"There is no checkpoint {str(path)!r}: check the path.")
    file, state = checkpoint.outline(path)
    try:
        trainer = state["trainer"]
        for name, value in trainer["model"].items():
            if isinstance(value, InnerTensors):
                raise MergeError(
                    f"The checkpoint in {str(path)!r} holds {name!r} as {value.kind:.60}, which "
                    "has no mean: merge models without it."
                )
        # Beside tensors a module may keep anything (get_extra_state), of which there is no mean.
        names: dict[str, str] = {}
        for name, tensor in trainer["model"].items():
            if isinstance(tensor, TensorName):
                names[str(name)] = str(tensor)
        if slow:
            slow_weights = trainer["optimizer"]["slow"]
            for own, tensor in zip(trainer["parameters"], slow_weights, strict=True):
                names |= dict.fromkeys(map(str, own), _text(tensor))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"The checkpoint in {str(path)!r} is not that of a node: name one that `shoal up` "
            "saved."
        ) from error
    return _Source(path, file, names)


def _text(tensor: Any) -> str:
    if not isinstance(tensor, TensorName):
        raise TypeError(f"no tensor but {tensor!r:.40}")
    return str(tensor)


def _kinds(source: _Source, file: Any) -> dict[str, Kind]:
    """Return dtype and shape of each tensor by its name in the model; fill ``source.names`` if the
    file uses the same names.
    """
    if not source.names:
        source.names.update({name: name for name in file.keys()})  # noqa: SIM118 (no mapping)
    slices = {name: file.get_slice(inner) for name, inner in source.names.items()}
    return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def _check_same(first: Path, mine: dict[str, Kind], other: Path, theirs: dict[str, Kind]) -> None:
    """Raise MergeError, naming the first difference, if there is one."""
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if name not in mine or name not in theirs:
            has, lacks = (first, other) if name in mine else (other, first)
            raise MergeError(
                f"{str(has)!r} has a tensor {name!r} that {str(lacks)!r} lacks: merge checkpoints "
                "of one model."
            )
        if mine[name] != theirs[name]:
            raise MergeError(
                f"The tensor {name!r} is {_shown(mine[name])} in {str(first)!r} and "
                f"{_shown(theirs[name])} in {str(other)!r}: merge checkpoints of one model."
            )


def _shown(kind: Kind) -> str:
    return f"{kind[0]} {list(kind[1])}"


@torch.no_grad()
def _mean(tensors: Iterator[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the mean of one tensor of each checkpoint, read one after another."""
    first = next(tensors)
    if not first.is_floating_point():
        return first
    total = torch.zeros(first.shape, dtype=torch.float64, device="cpu")
    for tensor, share in zip(chain([first], tensors), shares, strict=True):
        if share > 0:  # a tensor of weight 0 may be NaN
            total.add_(tensor.double(), alpha=share)
    return total.to(first.dtype)


def _write(out: Path, kinds: dict[str, Kind], mean: Callable[[str], Tensor]) -> int:
    """Write the file and return its bytes. Raises MergeError."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        try:
            with temporary.open("wb") as file:
                size = write_tensors(file.write, kinds, mean)
            sync(temporary)
            os.replace(temporary, out)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(out.parent)
        return size
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise MergeError(
            f"Cannot write {str(out)!r} ({why}): check the folder and its space."
        ) from error
