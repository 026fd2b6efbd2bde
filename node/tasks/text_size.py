"""Limits and defaults of the options of the built-in task ``text``, and the number of parameters of
its model.

Imports no torch, so that a list of swarms is shown at once.
"""

from __future__ import annotations

from typing import NamedTuple

MAXIMA = {
    "layers": 2**10,
    "width": 2**16,
    "heads": 2**10,
    "context": 2**17,
    "batch": 2**16,
    "max_bytes": 2**40,
    "shuffle": 2**28,
}
"""The largest value of each option that is a whole number; the smallest is 1."""
BYTE_VOCABULARY = 256
"""Tokens of the tokenizer ``bytes``."""


class TextSize(NamedTuple):
    """Size of a `shoal.node.tasks.gpt.GPT`, without its vocabulary.

    The defaults are those of the task ``text``. A change of one changes the model of every swarm
    whose manifest leaves it out.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 64

    def parameter_count(self, vocabulary: int) -> int:
        """Return the number of parameters of the model; the number of heads does not change it."""
        width = self.width
        # Four matrices of attention and the two of the MLP, and two norms with weight and bias.
        in_block = 12 * width * width + 4 * width
        # Embedding and output, positions, and the last norm.
        around = (2 * vocabulary + self.context + 2) * width
        return self.layers * in_block + around


def is_within(name: str, value: object) -> bool:
    """Return whether ``value`` is a whole number that the option ``name`` of `MAXIMA` may have."""
    return type(value) is int and 1 <= value <= MAXIMA[name]
