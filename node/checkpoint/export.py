"""Exporting weights as files: in the save_pretrained layout of a transformers model, otherwise as
one safetensors file.

Everything is written into another folder first and moved to its place at the end, so that no
partial file is ever visible.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shoal.node.checkpoint.model_card import model_card
from shoal.node.checkpoint.store import sync
from shoal.node.checkpoint.tensor_file import kind, write_tensors
from shoal.node.console import finite
from shoal.node.inner_tensors import InnerTensors, OpaqueError, taken_apart
from shoal.node.tasks.gpt import GPT
from shoal.swarm.errors import ShoalError

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
        writers = [save_own]
        if hasattr(tokenizer, "save_pretrained"):
            writers.append(tokenizer.save_pretrained)
        return _written(lambda: [write(str(aside)) for write in writers], about, how, out, aside)
    own = model.state_dict()
    state = {name: value.detach() for name, value in own.items() if isinstance(value, Tensor)}
    # Some modules keep what is no tensor (get_extra_state).
    how = _loading(model, about, whole=len(state) == len(own))
    return _written(lambda: _save(aside / WEIGHTS, state), about, how, out, aside)


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
    kinds = {name: kind(tensor) for name, tensor in state.items()}
    with path.open("wb") as file:
        write_tensors(file.write, kinds, state.__getitem__)


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
        facts = json.dumps(finite(about), indent=2, allow_nan=False)
        (aside / ABOUT).write_text(facts + "\n", encoding="utf-8")
        (aside / README).write_text(model_card(about, how, ABOUT), encoding="utf-8")
        # The weights last: a reader that finds them finds the rest.
        names = [path.name for path in aside.iterdir() if path.is_file()]
        names.sort(key=lambda name: name.endswith(".safetensors"))
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
