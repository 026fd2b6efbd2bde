"""Exporting weights as files, and the weighted mean of several checkpoints (``shoal merge``).

Weights are exported in the save_pretrained layout of a transformers model, otherwise as one
safetensors file. Everything is written into another folder first and moved to its place at the end,
so that no partial file is ever visible.

The mean is as Branch-Train-Merge (2208.03306) merges its experts, computed tensor by tensor in
float64, so that only one tensor of each checkpoint is in memory at a time. Floating-point tensors
are averaged; counters, masks and the like are of the first one.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoal.node.checkpoint import store as checkpoint
from shoal.node.checkpoint.folder import CheckpointError
from shoal.node.checkpoint.packing import TensorName
from shoal.node.checkpoint.store import sync
from shoal.node.checkpoint.tensor_file import Kind, kind, write_tensors
from shoal.node.console import finite
from shoal.node.inner_tensors import InnerTensors, OpaqueError, taken_apart
from shoal.node.tasks.gpt import GPT
from shoal.swarm.errors import ShoalError, printable

# The model card that stands as README.md beside exported weights.
#
# Names and options in it come from the swarm's creator, a stranger: they are in code spans, and
# strings of the header are JSON, so that none of them becomes markup or a field of its own.

LICENCE = "# license: apache-2.0        # choose one before you publish these weights"
DATASET = re.compile(r"hf:([A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95})(?:/[\w.-]+)?(?::.*)?")


def model_card(about: Mapping[str, Any], how: Sequence[str], abouts_file: str) -> str:
    """Return the card in Markdown, with the header that model hubs read.

    Args:
        about: facts about the weights, as `shoal.node.commands.pull` collects them; what is missing
            is left out.
        how: lines of Python that load the weights.
        abouts_file: name of the file that holds the same facts as data.
    """
    name = f"the swarm {_code(about['name'])}" if "name" in about else "a Shoal swarm"
    parts = [
        _header(about),
        f"# Weights of {name}",
        "Trained with Shoal, by peers that average their weights over ordinary internet links. "
        f"These are the swarm's weights before round {about['round']}; {abouts_file} has these "
        "facts as data.",
        *about["notes"],
        "## How to load them",
        "\n".join(["```python", *how, "```"]),
        *(["`shoal sample .` continues texts with them."] if "model" in about else []),
        "## Training",
        "\n".join(f"* {line}" for line in _facts(about)),
        "The data, steps and losses of a peer are what it says of itself.",
        "## Licence",
        "None is chosen yet. Weights may inherit terms from their data: check those, then name a "
        "licence here and in the header.",
    ]
    return "\n\n".join(parts) + "\n"


def _header(about: Mapping[str, Any]) -> str:
    lines = ["---", LICENCE, "tags:", "- shoal", "- decentralized-training"]
    if "model" in about:
        lines.append("pipeline_tag: text-generation")
    data = about.get("task_options", {}).get("data")
    if isinstance(data, str) and (found := DATASET.fullmatch(data)):
        lines += ["datasets:", f"- {json.dumps(found[1])}"]
    return "\n".join([*lines, "---"])


def _facts(about: Mapping[str, Any]) -> list[str]:
    """Return one line for each fact that is known."""
    options = dict(about.get("task_options", {}))
    data = options.pop("data", None)
    lines = []
    if "task" in about:
        lines.append(f"Task: {_code(about['task'])}{_options(options)}")
        lines.append(
            f"Data: {_code(data) if data else 'not in the settings of the swarm; name it here'}"
        )
    if "values" in about:
        lines.append(f"Parameters: {about['values']:,}")
    if "train" in about:
        train = dict(about["train"])
        lines.append(f"Inner optimizer: {_code(train.pop('optimizer'))}{_options(train)}")
    if "outer" in about:
        outer = dict(about["outer"])
        codec = outer.pop("codec")
        lines += [f"Method: {_code(about['method'])}{_options(outer)}", f"Codec: {_code(codec)}"]
    if "peers" in about:
        unit = " nats a token" if about["task"] == "text" else ""
        lines.append(f"Peers: {about['peers']} when the weights were downloaded")
        lines.append(f"Rounds: {about['rounds']:,}")
        low, high = about["steps"]
        lines.append(
            f"Inner steps of each of these peers: {low:,}"
            + ("" if low == high else f" to {high:,}")
        )
        lines.append(
            f"Training loss: {_loss(about['train_loss'], unit)}, the mean of what these peers "
            "report"
        )
        held_out = "not known; `shoal pull --evaluate` computes it"
        if about["held_out_loss"] is not None:
            held_out = f"{_loss(about['held_out_loss'], unit)}, on {_code(about['held_out_on'])}"
        lines.append(f"Held-out loss: {held_out}")
    if "swarm" in about:
        created = time.strftime("%Y-%m-%d", time.gmtime(min(about["created"], 2**38)))
        lines.append(f"Swarm: {_code(about['swarm'])}, created on {created}")
    return lines


def _options(options: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return f", with {_code(shown)}" if shown else ""


def _loss(value: float | None, unit: str) -> str:
    return "not known" if value is None else f"{value:.4f}{unit}"


def _code(text: object) -> str:
    """Return ``text`` as a code span in one line, in which nothing is markup."""
    plain = printable(str(text)).replace("`", "'").strip()
    return f"`{plain or '?'}`"


WEIGHTS = "model.safetensors"
ABOUT = "shoal.json"
README = "README.md"


class ExportError(ShoalError):
    """The files cannot be written."""


def export_model(
    model: nn.Module, about: Mapping[str, Any], out: Path, aside: Path, tokenizer: Any = None
) -> list[str]:
    """Write ``model``, under its own names, and ``about`` to ``out``, by way of ``aside``; return
    the names of the files.

    A model or tokenizer that has save_pretrained, as in transformers, writes itself.

    Raises ExportError: ``out`` is as it was, unless the disk fails while the last files are moved.
    """
    save_own = getattr(model, "save_pretrained", None)
    if callable(save_own):
        kind_of = type(model)
        where = kind_of.__module__.split(".")[0]
        name = kind_of.__name__ if where == "transformers" else "AutoModel"
        how = [f"from transformers import {name}", f'model = {name}.from_pretrained(".")']
        writers = [
            save_own,
            *(() if (own := getattr(tokenizer, "save_pretrained", None)) is None else (own,)),
        ]
        return _written(lambda: [write(str(aside)) for write in writers], about, how, out, aside)
    state = {
        name: value.detach()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }
    whole = len(state) == len(
        model.state_dict()
    )  # no module keeps what is no tensor (get_extra_state)
    return _written(
        lambda: _save(aside / WEIGHTS, state), about, _loading(model, about, whole), out, aside
    )


def export_numbered(
    tensors: Sequence[Tensor], about: Mapping[str, Any], out: Path, aside: Path
) -> list[str]:
    """Write weights of which only the order is known, as ``parameter.0`` and so on; otherwise like
    `export_model`.
    """
    state = {f"parameter.{number}": tensor for number, tensor in enumerate(tensors)}
    how = ["from safetensors.torch import load_file", f'weights = load_file("{WEIGHTS}")',
           "for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):",
           '    parameter.data.copy_(weights[f"parameter.{number}"])']  # fmt: skip
    return _written(lambda: _save(aside / WEIGHTS, state), about, how, out, aside)


def _save(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write tensors. ExportError, naming it, if a file of safetensors cannot hold one."""
    state = {name: _plain(name, tensor) for name, tensor in state.items()}
    with path.open("wb") as file:
        write_tensors(
            file.write, {name: kind(tensor) for name, tensor in state.items()}, state.__getitem__
        )


def _plain(name: str, tensor: Tensor) -> Tensor:
    try:
        plain = taken_apart(tensor)
        if isinstance(plain, InnerTensors):
            raise OpaqueError(f" of {len(plain.tensors)} tensors")
        if plain.is_nested or plain.is_quantized or plain.layout != torch.strided:
            raise OpaqueError(" that is nested, quantized or sparse")
        kind(plain)
        return plain
    except TypeError as error:
        what = f"{type(tensor).__name__}{error}" if isinstance(error, OpaqueError) else str(error)
        raise ExportError(
            f"Cannot write the weights: {name!r} is what a file of safetensors cannot hold "
            f"({what}): give the model save_pretrained()."
        ) from error


def _loading(model: nn.Module, about: Mapping[str, Any], whole: bool) -> list[str]:
    """Return lines of Python that load the file, which has the ``whole`` state of the model or the
    tensors of it.
    """
    strict = "" if whole else ", strict=False"
    load = [f'model.load_state_dict(load_file("{WEIGHTS}"){strict})', "model.eval()"]
    if type(model) is GPT:
        size = {name: int(value) for name, value in about["model"].items()}
        made = ", ".join(f"{name}={value}" for name, value in size.items())
        return [
            "from safetensors.torch import load_file",
            "from shoal.node.tasks.text import GPT",
            f"model = GPT({made})",
            *load,
        ]
    return [
        "from safetensors.torch import load_file",
        "# model: as model() of the swarm's task returns it",
        *load,
    ]


def _written(
    write: Callable[[], object],
    about: Mapping[str, Any],
    how: Sequence[str],
    out: Path,
    aside: Path,
) -> list[str]:
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        write()
        (aside / ABOUT).write_text(
            json.dumps(finite(about), indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
        (aside / README).write_text(model_card(about, how, ABOUT), encoding="utf-8")
        # The weights last: a reader that finds them finds the rest.
        names = sorted(
            (path.name for path in aside.iterdir() if path.is_file()),
            key=lambda name: name.endswith(".safetensors"),
        )
        for name in names:
            sync(aside / name)
        for name in names:
            os.replace(aside / name, out / name)
        sync(out)
        return names
    except (OSError, SafetensorError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ExportError(
            f"Cannot write to {str(out)!r} ({why}): check the folder and its space."
        ) from error


@torch.no_grad()
def fill(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.copy_(tensor)


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
            tensors = (
                file.get_tensor(source.names[name])
                for source, file in zip(sources, files, strict=True)
            )
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
        names = {
            str(name): _text(tensor)
            for name, tensor in trainer["model"].items()
            if isinstance(tensor, TensorName)
        }
        if slow:
            for own, tensor in zip(
                trainer["parameters"], trainer["optimizer"]["slow"], strict=True
            ):
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
