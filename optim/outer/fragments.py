"""Division of a model into fragments.

    strided(model, 4)           # layers 0, 4, 8, ... are fragment 0
    even(parameters, 4)         # without a model: about equally many values in each
    positions(lists, params)    # of each fragment the positions of its parameters

They are exchanged one after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.partial import Scope, bound, scope_of, sent_whole
from shoal.optim.layers import embeddings_and_outputs
from shoal.optim.parameters import unwrapped

Fragment = nn.Module | Iterable[nn.Module | Tensor]
"""The parameters of one fragment: those of a module, or of a list of modules and parameters."""


def strided(
    model: nn.Module, fragments: int, among: Iterable[Tensor] | None = None
) -> list[list[Tensor]]:
    """Return the model's parameters in ``fragments`` lists: layer l, in the order of ``layers``,
    goes into list l mod fragments.

    ``among``: of these parameters only. A tied parameter belongs to its first name.

    Raises:
        ValueError: there are fewer layers than fragments.
    """
    of_model = layers(model, max(fragments, 1), among)
    if not 1 <= fragments <= len(of_model):
        raise ValueError(
            f"fragments must be between 1 and the number of layers, {len(of_model)}, got "
            f"{fragments}"
        )
    parts: list[list[Tensor]] = [[] for _ in range(fragments)]
    for number, parameters in enumerate(of_model):
        parts[number % fragments] += parameters
    return parts


def even(parameters: Sequence[Tensor], fragments: int) -> list[list[Tensor]]:
    """Return the parameters in ``fragments`` lists of about equally many values.

    The largest comes first, each goes into the list with the fewest values, or else the shortest.
    """
    parts: list[list[Tensor]] = [[] for _ in range(fragments)]
    values = [0] * fragments
    for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
        least = min(range(fragments), key=lambda number: (values[number], len(parts[number])))
        parts[least].append(parameter)
        values[least] += parameter.numel()
    return parts


def possible(fragments: int, model: nn.Module | None, parameters: Sequence[Tensor]) -> int:
    """Return ``fragments``, or as many as can be made of the averaged ``parameters``.

    These are the layers of ``model``, or without a model the parameters themselves.
    """
    if fragments <= 1:
        return 1
    if model is None:
        return min(fragments, len(parameters))
    return min(fragments, len(layers(model, fragments, parameters)))


def layers(
    model: nn.Module, fragments: int = 1, among: Iterable[Tensor] | None = None
) -> list[list[Tensor]]:
    """Return the model's parameters that require a gradient (only those ``among``, if given) by
    layer, in the order of the model.

    A layer is what has the same name up to its first number ("blocks.3"), or without one the same
    first part ("embedding"). One that is more than a fragment's even share, and a container of
    numbered modules itself, counts as those. Modules that only wrap another do not count, so that a
    compiled model, or one in DistributedDataParallel, has the layers of the plain one.
    """
    wanted = None if among is None else set(map(id, among))
    by_layer: dict[tuple[str, ...], list[_Named]] = {}
    for name, parameter in unwrapped(model).named_parameters():
        if not parameter.requires_grad or (wanted is not None and id(parameter) not in wanted):
            continue
        path = name.split(".")
        end = 1
        for index, word in enumerate(path):
            if word.isdigit():
                end = index + 1
                break
        by_layer.setdefault(tuple(path[:end]), []).append(_Named(path, end, parameter))
    most = sum(_values(layer) for layer in by_layer.values()) / fragments
    found: list[list[Tensor]] = []
    for layer in by_layer.values():
        for part in _split(layer, most):
            found.append([named.parameter for named in part])
    return found


@dataclass(frozen=True, eq=False)
class _Named:
    """A parameter with its name, of whose parts the first ``end`` name its layer."""

    path: list[str]
    end: int
    parameter: Tensor

    @property
    def next_is_number(self) -> bool:
        return self.end < len(self.path) and self.path[self.end].isdigit()


def _values(layer: Sequence[_Named]) -> int:
    return sum(named.parameter.numel() for named in layer)


def _split(layer: list[_Named], most: float) -> list[list[_Named]]:
    """Return a layer of more than ``most`` values as the numbered modules in it, again and again.

    A smaller one, and one without numbered modules, is returned as it is.
    """
    if _values(layer) <= most or not any(named.next_is_number for named in layer):
        return [layer]
    by_layer: dict[tuple[str, ...], list[_Named]] = {}
    for named in layer:
        end = named.end + 1 if named.next_is_number else named.end
        inner = by_layer.setdefault(tuple(named.path[:end]), [])
        inner.append(_Named(named.path, end, named.parameter))
    found: list[list[_Named]] = []
    for inner in by_layer.values():
        found += _split(inner, most)
    return found


def positions(fragments: Sequence[Fragment], parameters: Sequence[Tensor]) -> list[list[int]]:
    """Return each fragment as ascending positions in ``parameters``.

    Parameters that are not in ``parameters`` (frozen ones) are left out. One that modules of
    several fragments share (a tied one) belongs to the first.

    Raises:
        ValueError: a parameter is in no fragment or in several, a module is in several, or a
            fragment is empty or of another type.
    """
    place = {id(parameter): position for position, parameter in enumerate(parameters)}
    owner: dict[nn.Module, int] = {}
    taken: set[int] = set()
    """Parameters of the fragments so far: a module of a later one may have them too."""
    parts: list[list[int]] = []
    for number, fragment in enumerate(_listed(fragments, "fragments")):
        own: set[int] = set()
        for item in _items(fragment, number):
            if isinstance(item, Tensor):
                own.add(id(item))
                continue
            _check_modules(item, number, owner)
            own |= {id(parameter) for parameter in item.parameters()} - taken
        taken |= own
        parts.append(sorted(place[key] for key in own if key in place))
    _check_parts(parts, parameters)
    return parts


def _items(fragment: Fragment, number: int) -> list[nn.Module | Tensor]:
    """Return the modules and parameters of a fragment. ValueError for anything else."""
    if isinstance(fragment, nn.Module):
        return [fragment]
    items = _listed(fragment, f"fragments[{number}]")
    for item in items:
        if not isinstance(item, nn.Module | Tensor):
            raise ValueError(
                f"fragments[{number}] must be a module, or a list of modules and parameters, "
                f"got {_kind(item)}"
            )
    return items


def _check_modules(module: nn.Module, number: int, owner: dict[nn.Module, int]) -> None:
    """Note the owner of a module and those in it. ValueError if an earlier fragment has one."""
    for inside in module.modules():
        other = owner.setdefault(inside, number)
        if other != number:
            raise ValueError(
                f"fragments[{number}] has a module of fragments[{other}]: put every module "
                "into exactly one"
            )


def _check_parts(parts: Sequence[Sequence[int]], parameters: Sequence[Tensor]) -> None:
    """Raise ValueError unless each parameter is in exactly one fragment, and none is empty."""
    counts: Counter[int] = Counter()
    for part in parts:
        counts.update(part)
    for position, parameter in enumerate(parameters):
        if counts[position] != 1:
            raise ValueError(
                f"parameter {position} of shape {tuple(parameter.shape)} is in {counts[position]} "
                "fragments: put every parameter into exactly one"
            )
    for number, part in enumerate(parts):
        if not part:
            raise ValueError(f"fragment {number} has no parameter: choose fewer fragments")


def _listed(value: Any, what: str) -> list[Any]:
    if isinstance(value, str | Tensor) or not isinstance(value, Iterable):
        kinds = "a module, or a list of modules and parameters"
        if what == "fragments":
            kinds = "a number, or a list of modules"
        raise ValueError(f"{what} must be {kinds}, got {_kind(value)}")
    return list(value)


def _kind(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float) else type(value).__name__


def codecs_of(
    parts: Sequence[Sequence[int]],
    codec: Codec,
    parameters: Sequence[Tensor],
    model: nn.Module | None,
) -> list[Codec]:
    """Return the codec of each fragment, which knows what of it is sent whole.

    ValueError if that depends on the model's layers and there is no model.
    """
    codecs = [codec] + [codec.fresh() for _ in parts[1:]]
    scope = scope_of(codec)
    if scope is None:
        return codecs
    whole = _sent_whole(scope, parameters, model)
    found: list[Codec] = []
    for one, part in zip(codecs, parts, strict=True):
        found.append(bound(one, [whole[index] for index in part]))
    return found


def _sent_whole(scope: Scope, parameters: Sequence[Tensor], model: nn.Module | None) -> list[bool]:
    """Return for each parameter whether a codec of that scope sends it whole."""
    not_hidden: set[int] = set()
    if scope == "hidden":
        if model is None:
            raise ValueError(
                "a codec with +hidden sends embeddings and output layers whole, and must know "
                "which they are: hand in model=, or choose +matrices"
            )
        found = embeddings_and_outputs(model)
        not_hidden = {index for index, parameter in enumerate(parameters) if parameter in found}
    return sent_whole(scope, [tuple(one.shape) for one in parameters], not_hidden)
