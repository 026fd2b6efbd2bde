"""The model card that stands as README.md beside exported weights.

Names and options in it come from the swarm's creator, a stranger: they are in code spans, and
strings of the header are JSON, so that none of them becomes markup or a field of its own.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.swarm.errors import printable

LICENCE = "# license: apache-2.0        # choose one before you publish these weights"
"""A line of the header, for the publisher to finish."""


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
        f"{abouts_file} has the facts below as data.",
        *about["notes"],
        "## How to load them",
        "\n".join(["```python", *how, "```"]),
    ]
    if "model" in about:
        parts.append("`shoal sample .` continues texts with them.")
    parts += [
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
    found = DATASET.fullmatch(data) if isinstance(data, str) else None
    if found is not None:
        lines += ["datasets:", f"- {json.dumps(found[1])}"]
    return "\n".join([*lines, "---"])


def _facts(about: Mapping[str, Any]) -> list[str]:
    """Return one line for each fact that is known."""
    options = dict(about.get("task_options", {}))
    data = options.pop("data", None)
    lines = []
    if "task" in about:
        lines.append(f"Task: {_code(about['task'])}{_options(options)}")
        named = _code(data) if data else "not in the settings of the swarm; name it here"
        lines.append(f"Data: {named}")
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
        steps = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        lines.append(f"Inner steps of each of these peers: {steps}")
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
