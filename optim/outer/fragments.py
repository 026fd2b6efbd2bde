"""Division of a model into fragments that are exchanged one after another.

Weights of contributions in the mean, as functions of the tokens and inner steps since a peer last
sent the fragment.

    opt = DiLoCo(inner, exchange, weight=by_tokens)
    ... opt.count(batch.numel()); opt.step()

By default every peer counts the same, even if tokens were counted: the weighting decides what some
methods send (NoLoCo), so it must not depend on the calls of a training loop. A node of a swarm
weighs by tokens if rounds are seconds. All peers must use the same function. A weight of 0 keeps a
peer out of the mean for that round, as if it were absent: nobody waits for it, and it receives
nothing. ``OuterOptimizer.listen`` takes part without counting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.partial import Scope, bound, scope_of
from shoal.optim.layers import embeddings_and_outputs
from shoal.optim.parameters import unwrapped

Weight = Callable[[int, int], float]
"""(tokens, steps) -> weight, at least 0 and finite."""


def equal(tokens: int, steps: int) -> float:
    """Weigh all peers equally."""
    return 1.0


def by_steps(tokens: int, steps: int) -> float:
    """Weigh a contribution by its inner steps."""
    return float(steps)


def by_tokens(tokens: int, steps: int) -> float:
    """Weigh a contribution by its tokens. ValueError if none were counted."""
    _check_counted(tokens, steps)
    return float(tokens)


def by_rate(tokens: int, steps: int) -> float:
    """Weigh by tokens^2 / steps, so tokens times batch size (Decoupled DiLoCo, 2604.21428).

    ValueError if none were counted.
    """
    _check_counted(tokens, steps)
    return tokens * tokens / steps if steps else 0.0


def _check_counted(tokens: int, steps: int) -> None:
    if steps > 0 and tokens == 0:
        raise ValueError(
            "no tokens were counted: call opt.count(tokens) before each opt.step(), or weigh by "
            "steps"
        )


Fragment = nn.Module | Iterable[nn.Module | Tensor]
"""The parameters of one fragment: those of a module, or of a list of modules and parameters."""
_Named = tuple[list[str], int, Tensor]
"""A parameter: the parts of its name, the number of those that name its layer, and itself."""


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
    by_layer: dict[tuple[str, ...], list[_Named]] = {}
    wanted = None if among is None else set(map(id, among))
    for name, parameter in unwrapped(model).named_parameters():
        if parameter.requires_grad and (wanted is None or id(parameter) in wanted):
            path = name.split(".")
            end = next((index + 1 for index, part in enumerate(path) if part.isdigit()), 1)
            by_layer.setdefault(tuple(path[:end]), []).append((path, end, parameter))
    most = sum(_values(layer) for layer in by_layer.values()) / fragments
    return [
        [parameter for _, _, parameter in part]
        for layer in by_layer.values()
        for part in _split(layer, most)
    ]


def _values(layer: Sequence[_Named]) -> int:
    return sum(parameter.numel() for _, _, parameter in layer)


def _split(layer: list[_Named], most: float) -> list[list[_Named]]:
    """Return a layer of more than ``most`` values as the numbered modules in it, if it consists of
    such, again and again.
    """
    if _values(layer) <= most or not any(
        part.isdigit() for path, end, _ in layer for part in path[end : end + 1]
    ):
        return [layer]
    by_layer: dict[tuple[str, ...], list[_Named]] = {}
    for path, end, parameter in layer:
        deeper = end + 1 if path[end : end + 1] and path[end].isdigit() else end
        by_layer.setdefault(tuple(path[:deeper]), []).append((path, deeper, parameter))
    return [part for inner in by_layer.values() for part in _split(inner, most)]


def strided(
    model: nn.Module, fragments: int, among: Iterable[Tensor] | None = None
) -> list[list[Tensor]]:
    """Return the model's parameters in ``fragments`` lists: layer l, in the order of ``layers``,
    goes into list l mod fragments.

    ``among``: of these parameters only.

    A tied parameter belongs to its first name. ValueError if there are fewer layers than fragments.
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


def possible(fragments: int, model: nn.Module | None, parameters: Sequence[Tensor]) -> int:
    """Return ``fragments``, or as many as there are layers of ``model`` among ``parameters``, or
    parameters without a model.
    """
    if fragments <= 1:
        return 1
    return min(
        fragments, len(parameters) if model is None else len(layers(model, fragments, parameters))
    )


def even(parameters: Sequence[Tensor], fragments: int) -> list[list[Tensor]]:
    """Return the parameters in ``fragments`` lists of about equally many values: the largest first,
    each into the least full.
    """
    parts: list[list[Tensor]] = [[] for _ in range(fragments)]
    for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
        min(parts, key=lambda part: (sum(other.numel() for other in part), len(part))).append(
            parameter
        )
    return parts


def positions(fragments: Sequence[Fragment], parameters: Sequence[Tensor]) -> list[list[int]]:
    """Return each fragment as ascending positions in ``parameters``.

    Parameters that are not in ``parameters`` (frozen ones) are left out. One that modules of
    several fragments share (a tied one) belongs to the first.

    Raises:
        ValueError: a parameter is in no fragment or in several, a module is in several, or a
            fragment is empty or of another type.
    """
    place = {id(parameter): position for position, parameter in enumerate(parameters)}
    parts: list[list[int]] = []
    owner: dict[nn.Module, int] = {}
    shared: set[int] = set()
    for number, fragment in enumerate(_listed(fragments, "fragments")):
        items = (
            [fragment]
            if isinstance(fragment, nn.Module)
            else _listed(fragment, f"fragments[{number}]")
        )
        ids: set[int] = set()
        for item in items:
            if not isinstance(item, nn.Module | Tensor):
                raise ValueError(
                    f"fragments[{number}] must be a module, or a list of modules and parameters, "
                    f"got {_kind(item)}"
                )
            inside = list(item.modules()) if isinstance(item, nn.Module) else []
            if (
                other := next((owner[module] for module in inside if module in owner), number)
            ) != number:
                raise ValueError(
                    f"fragments[{number}] has a module of fragments[{other}]: put every module "
                    "into exactly one"
                )
            owner |= dict.fromkeys(inside, number)
            own = {id(p) for p in (item.parameters() if isinstance(item, nn.Module) else [item])}
            ids |= own - shared if isinstance(item, nn.Module) else own
        shared |= ids
        parts.append(sorted(place[key] for key in ids if key in place))
    counts = [
        sum(position in part for part in map(set, parts)) for position in range(len(parameters))
    ]
    for position, count in enumerate(counts):
        if count != 1:
            shape = tuple(parameters[position].shape)
            raise ValueError(
                f"parameter {position} of shape {shape} is in {count} fragments: put every "
                "parameter into exactly one"
            )
    for number, part in enumerate(parts):
        if not part:
            raise ValueError(f"fragment {number} has no parameter: choose fewer fragments")
    return parts


def _listed(value: Any, what: str) -> list[Any]:
    if isinstance(value, str | Tensor) or not isinstance(value, Iterable):
        kinds = (
            "a number, or a list of modules"
            if what == "fragments"
            else "a module, or a list of modules and parameters"
        )
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
    return [
        bound(one, [whole[index] for index in part])
        for one, part in zip(codecs, parts, strict=True)
    ]


def _sent_whole(scope: Scope, parameters: Sequence[Tensor], model: nn.Module | None) -> list[bool]:
    """Return for each parameter whether a codec of that scope sends it whole."""
    if scope == "matrices":
        return [parameter.ndim < 2 for parameter in parameters]
    if model is None:
        raise ValueError(
            "a codec with +hidden sends embeddings and output layers whole, and must know which "
            "they are: hand in model=, or choose +matrices"
        )
    outer = embeddings_and_outputs(model)
    return [parameter.ndim < 2 or parameter in outer for parameter in parameters]
