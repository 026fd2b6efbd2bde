"""Exporting weights as files: the save_pretrained layout of a transformers model, otherwise one safetensors file.

Everything is written into another folder first and moved to its place at the end, so that no partial file is ever visible.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shoal.node.checkpoint.store import kind, sync, write_tensors
from shoal.node.json_output import finite
from shoal.node.tasks.gpt import GPT
from shoal.swarm.errors import ShoalError, printable

# The model card that stands as README.md beside exported weights.
#
# Names and options in it come from the swarm's creator, a stranger: they are in code spans, and strings of the header are JSON,
# so that none of them becomes markup or a field of its own.

LICENCE = "# license: apache-2.0        # choose one before you publish these weights"
DATASET = re.compile(r"hf:([A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95})(?:/[\w.-]+)?(?::.*)?")


def model_card(about: Mapping[str, Any], how: Sequence[str], abouts_file: str) -> str:
    """Return the card in Markdown, with the header that model hubs read.

    Args:
        about: facts about the weights, as `shoal.node.commands.pull` collects them; what is missing is left out.
        how: lines of Python that load the weights.
        abouts_file: name of the file that holds the same facts as data.
    """
    name = f"the swarm {_code(about['name'])}" if "name" in about else "a Shoal swarm"
    parts = [
        _header(about),
        f"# Weights of {name}",
        "Trained with Shoal, by peers that average their weights over ordinary internet links. These are the swarm's weights "
        f"before round {about['round']}; {abouts_file} has these facts as data.",
        *about["notes"],
        "## How to load them",
        "\n".join(["```python", *how, "```"]),
        *(["`shoal sample .` continues texts with them."] if "model" in about else []),
        "## Training",
        "\n".join(f"* {line}" for line in _facts(about)),
        "The data, steps and losses of a peer are what it says of itself.",
        "## Licence",
        "None is chosen yet. Weights may inherit terms from their data: check those, then name a licence here and in the header.",
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
        lines.append(f"Data: {_code(data) if data else 'not in the settings of the swarm; name it here'}")
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
        lines.append(f"Inner steps of each of these peers: {low:,}" + ("" if low == high else f" to {high:,}"))
        lines.append(f"Training loss: {_loss(about['train_loss'], unit)}, the mean of what these peers report")
        held_out = "not known; `shoal pull --evaluate` computes it"
        if about["held_out_loss"] is not None:
            held_out = f"{_loss(about['held_out_loss'], unit)}, on {_code(about['held_out_on'])}"
        lines.append(f"Held-out loss: {held_out}")
    if "swarm" in about:
        lines.append(f"Swarm: {_code(about['swarm'])}, created on {_date(about['created'])}")
    return lines


def _options(options: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return f", with {_code(shown)}" if shown else ""


def _loss(value: float | None, unit: str) -> str:
    return "not known" if value is None else f"{value:.4f}{unit}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(min(seconds, 2**38)))


def _code(text: object) -> str:
    """Return ``text`` as a code span in one line, in which nothing is markup."""
    plain = printable(str(text)).replace("`", "'").strip()
    return f"`{plain or '?'}`"


WEIGHTS, ABOUT, README = "model.safetensors", "shoal.json", "README.md"


class ExportError(ShoalError):
    """The files cannot be written."""


def export_model(model: nn.Module, about: Mapping[str, Any], out: Path, aside: Path, tokenizer: Any = None) -> list[str]:
    """Write ``model``, under its own names, and ``about`` to ``out``, by way of ``aside``; return the names of the files.

    A model or tokenizer that has save_pretrained, as in transformers, writes itself.

    Raises ExportError: ``out`` is as it was, unless the disk fails while the last files are moved.
    """
    save_own = getattr(model, "save_pretrained", None)
    if callable(save_own):
        kind_of = type(model)
        where = kind_of.__module__.split(".")[0]
        name = kind_of.__name__ if where == "transformers" else "AutoModel"
        how = [f"from transformers import {name}", f'model = {name}.from_pretrained(".")']
        writers = [save_own, *(() if (own := getattr(tokenizer, "save_pretrained", None)) is None else (own,))]
        return _written(lambda: [write(str(aside)) for write in writers], about, how, out, aside)
    state = {name: value.detach() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    whole = len(state) == len(model.state_dict())  # no module keeps what is no tensor (get_extra_state)
    return _written(lambda: _save(state, aside / WEIGHTS), about, _loading(model, about, whole), out, aside)


def export_numbered(tensors: Sequence[Tensor], about: Mapping[str, Any], out: Path, aside: Path) -> list[str]:
    """Write weights of which only the order is known, as ``parameter.0`` and so on; otherwise like `export_model`."""
    state = {f"parameter.{number}": tensor for number, tensor in enumerate(tensors)}
    how = ["from safetensors.torch import load_file", f'weights = load_file("{WEIGHTS}")',
           "for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):",
           '    parameter.data.copy_(weights[f"parameter.{number}"])']  # fmt: skip
    return _written(lambda: _save(state, aside / WEIGHTS), about, how, out, aside)


def _save(state: Mapping[str, Tensor], path: Path) -> None:
    with path.open("wb") as file:
        write_tensors(file, {name: kind(tensor) for name, tensor in state.items()}, state.__getitem__)


def _loading(model: nn.Module, about: Mapping[str, Any], whole: bool) -> list[str]:
    """Return lines of Python that load the file, which has the ``whole`` state of the model or the tensors of it."""
    strict = "" if whole else ", strict=False"
    load = [f'model.load_state_dict(load_file("{WEIGHTS}"){strict})', "model.eval()"]
    if type(model) is GPT:
        size = {name: int(value) for name, value in about["model"].items()}
        made = ", ".join(f"{name}={value}" for name, value in size.items())
        return ["from safetensors.torch import load_file", "from shoal.node.tasks.gpt import GPT", f"model = GPT({made})", *load]
    return ["from safetensors.torch import load_file", "# model: as model() of the swarm's task returns it", *load]


def _written(write: Callable[[], object], about: Mapping[str, Any], how: Sequence[str], out: Path, aside: Path) -> list[str]:
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        write()
        (aside / ABOUT).write_text(json.dumps(finite(about), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        (aside / README).write_text(model_card(about, how, ABOUT), encoding="utf-8")
        # The weights last: a reader that finds them finds the rest.
        names = sorted((path.name for path in aside.iterdir() if path.is_file()), key=lambda name: name.endswith(".safetensors"))
        for name in names:
            sync(aside / name)
        for name in names:
            os.replace(aside / name, out / name)
        sync(out)
        return names
    except (OSError, SafetensorError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ExportError(f"Cannot write to {str(out)!r} ({why}): check the folder and its space.") from error


@torch.no_grad()
def fill(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.copy_(tensor)
