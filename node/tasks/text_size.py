"""The bounds of the options of the built-in task ``text``, and the size of its model by them.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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
BYTES = 256
"""Tokens of the vocabulary, where they are bytes."""


class TextSize(NamedTuple):
    """The size of a `shoal.node.tasks.gpt.GPT`, but for its vocabulary; by default that of the task
    ``text`` where no option says so.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 64

    def parameters(self, vocabulary: int) -> int:
        """Return the number of parameters of the model."""
        width = self.width
        in_blocks = self.layers * (12 * width * width + 4 * width)
        return in_blocks + (2 * vocabulary + self.context + 2) * width


DEFAULT_SIZE = TextSize()


def is_within(name: str, value: object) -> bool:
    """Return whether ``value`` is a whole number within the bounds of the option ``name``."""
    return type(value) is int and 1 <= value <= BOUNDS[name]


def listed_parameters(options: Mapping[str, Any], said: int) -> int:
    """Return the parameters of the model of a manifest's ``options``, where some member has
    ``said`` a number.

    With a tokenizer the vocabulary is not known here: then it is what was said, or what the rest
    has if that is more.
    """
    size = DEFAULT_SIZE._replace(
        **{name: options[name] for name in TextSize._fields if name in options}
    )
    for number in (size.layers, size.width, size.context):
        if type(number) is not int or number <= 0:
            return said
    if options.get("tokenizer", "bytes") == "bytes":
        return size.parameters(BYTES)
    return max(said, size.parameters(1))
