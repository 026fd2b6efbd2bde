"""The bounds of the options of the built-in task ``text``, and the size of its model by them.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BOUNDS = {
    "layers": 2**10,
    "width": 2**16,
    "heads": 2**10,
    "context": 2**17,
    "batch": 2**16,
    "max_bytes": 2**40,
    "shuffle": 2**28,
}
"""The largest value of each option that is a number of things, of which there is at least 1."""
# The size of the model, where no option says so.
LAYERS = 2
WIDTH = 64
HEADS = 4
CONTEXT = 64
BYTES = 256
"""Tokens of the vocabulary, where they are bytes."""


def is_within(name: str, value: object) -> bool:
    """Return whether ``value`` is a whole number within the bounds of the option ``name``."""
    return type(value) is int and 1 <= value <= BOUNDS[name]


def parameters(layers: int, width: int, context: int, vocabulary: int) -> int:
    """Return the number of parameters of a `shoal.node.tasks.gpt.GPT` of this size."""
    return layers * (12 * width * width + 4 * width) + (2 * vocabulary + context + 2) * width


def listed_parameters(options: Mapping[str, Any], said: int) -> int:
    """Return the parameters of the model of a manifest's ``options``, where some member has
    ``said`` a number.

    With a tokenizer the vocabulary is not known here: then it is what was said, or what the rest
    has if that is more.
    """
    layers = options.get("layers", LAYERS)
    width = options.get("width", WIDTH)
    context = options.get("context", CONTEXT)
    for number in (layers, width, context):
        if type(number) is not int or number <= 0:
            return said
    if options.get("tokenizer", "bytes") == "bytes":
        return parameters(layers, width, context, BYTES)
    return max(said, parameters(layers, width, context, 1))
