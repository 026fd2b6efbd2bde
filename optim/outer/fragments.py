"""Division of a model into fragments that are exchanged one after another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def layer_of(name: str) -> str:
    """Return the layer of a parameter's name: the name up to its first number ("blocks.3"), else its first part ("embedding")."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return parts[0]


def layers(model: nn.Module) -> list[list[Tensor]]:
    """Return the model's parameters, frozen ones too, by layer, in the order of the model."""
    found: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(layer_of(name), []).append(parameter)
    return list(found.values())


def strided(model: nn.Module, fragments: int) -> list[list[Tensor]]:
    """Return the model's parameters in ``fragments`` lists: layer l, in the order of the model, goes into list l mod fragments.

    A module without a numbered layer (embedding, head) counts as one layer. A tied parameter belongs to its first name.
    ValueError if there are fewer layers than fragments.
    """
    found = layers(model)
    if not 1 <= fragments <= len(found):
        raise ValueError(f"fragments must be between 1 and the number of layers, {len(found)}, got {fragments}")
    parts: list[list[Tensor]] = [[] for _ in range(fragments)]
    for number, parameters in enumerate(found):
        parts[number % fragments] += parameters
    return parts


def positions(fragments: Sequence[Sequence[Tensor]], parameters: Sequence[Tensor]) -> list[list[int]]:
    """Return each fragment as ascending positions in ``parameters``.

    Parameters that are not in ``parameters`` (frozen ones) are left out.

    Raises:
        ValueError: a parameter is in no fragment or in several, or a fragment is empty.
    """
    place = {id(parameter): position for position, parameter in enumerate(parameters)}
    parts = [sorted({place[id(p)] for p in fragment if id(p) in place}) for fragment in fragments]
    counts = [sum(position in part for part in map(set, parts)) for position in range(len(parameters))]
    for position, count in enumerate(counts):
        if count != 1:
            shape = tuple(parameters[position].shape)
            raise ValueError(f"parameter {position} of shape {shape} is in {count} fragments: put every parameter into exactly one")
    for number, part in enumerate(parts):
        if not part:
            raise ValueError(f"fragment {number} has no parameter: choose fewer fragments")
    return parts
