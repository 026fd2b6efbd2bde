"""What of a model is averaged: which parameters, and which buffers.

    own = excluded(["head", "*.bias"], inner, model)      # parameters, names, modules, patterns
    params = trained(inner, exchange, own, model)         # all others that require a gradient
    buffers = AveragedBuffers(model, exclude=["head"])    # floating-point ones, by name

What is excluded stays a peer's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from shoal.optim.exchange.base import Exchange
from shoal.optim.outer.inner import Inner, all_parameters
from shoal.optim.parameters import AveragedParameters, plain_name

Exclude = Sequence[str | Tensor]
"""Parameters, their names, names of modules, or patterns of names with "*" and "?"."""


def trained(
    inner: Inner, exchange: Exchange, but: Iterable[Tensor] = (), model: nn.Module | None = None
) -> AveragedParameters:
    """Return the parameters that are averaged: those that require a gradient, ``but`` for some.

    They are in the order of ``model``, without one in that of ``all_parameters``. An exchange may
    have an order of its own: that of its session's model.

    Raises:
        ValueError: a parameter cannot be trained and averaged.
    """
    left_out = set(but)
    averaged: list[Tensor] = []
    for number, parameter in enumerate(all_parameters(inner)):
        if not parameter.requires_grad:
            continue
        fault = fault_of(parameter)
        if fault:
            raise ValueError(f"parameter {number} of the inner optimizer {fault}")
        if parameter not in left_out:
            averaged.append(parameter)
    if model is None:
        return exchange.ordered(AveragedParameters(averaged))
    return exchange.ordered(AveragedParameters.of(model, averaged))


def fault_of(parameter: Tensor) -> str:
    """Return why a parameter cannot be trained and averaged, with the remedy; "" if it can.

    The text follows the parameter's name in a message.
    """
    if nn.parameter.is_lazy(parameter):
        return "has no shape yet (a lazy layer): call the model once with an example before"
    if parameter.is_complex():
        return (
            "is complex, and real numbers are averaged: keep torch.view_as_real of it as the "
            "parameter"
        )
    if not parameter.is_floating_point():
        return f"is of {parameter.dtype}, which is not averaged: freeze it (requires_grad = False)"
    if parameter.is_meta:
        return (
            "is on the meta device, without values: make the model on a real one, or fill it "
            "(to_empty) before"
        )
    if parameter.is_inference():
        return (
            "was made under torch.inference_mode(), where nothing can be trained: make the "
            "model outside it"
        )
    return ""


def excluded(exclude: Exclude, inner: Inner, model: nn.Module | None) -> set[Tensor]:
    """Return the parameters of ``inner`` that ``exclude`` means.

    Raises:
        ValueError: a parameter is not in ``inner``, a name fits nothing in ``model`` (its buffers
            included), or there is no model to look names up in.
    """
    if isinstance(exclude, str):
        raise ValueError(
            f"exclude must be a list of names, patterns or parameters, got {exclude!r}: put it "
            "into brackets"
        )
    every = set(all_parameters(inner))
    meant: set[Tensor] = set()
    for item in exclude:
        if isinstance(item, Tensor):
            if item not in every:
                raise ValueError(
                    f"a parameter to exclude, of shape {tuple(item.shape)}, is not in the inner "
                    "optimizer"
                )
            meant.add(item)
            continue
        if model is None:
            raise ValueError(
                f"to exclude {item!r} by name hand in model=, or exclude the parameters themselves"
            )
        named = _named(model, item)
        if not named:
            raise ValueError(f"no parameter of the model fits {item!r}, which was to be excluded")
        meant |= every.intersection(named)
    return meant


def _named(model: nn.Module, pattern: str) -> list[Tensor]:
    """Return the parameters and buffers of a model whose name fits, tied ones by any name."""
    found: list[Tensor] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if fits(name, pattern):
            found.append(parameter)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if fits(name, pattern):
            found.append(buffer)
    return found


def fits(name: str, pattern: str) -> bool:
    """Return True if a name is the pattern, matches it, or lies in the module of that name."""
    name = plain_name(name)
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


class AveragedBuffers:
    """The floating-point buffers of a model that are in its ``state_dict``: no counters, no masks.

    They are kept by name, for ``model.to`` and modules that assign to a buffer put another tensor
    in its place. Without a model there are none.

    Args:
        model: its buffers are averaged.
        exclude: names and patterns of buffers that stay a peer's own; those of
            ``power_iteration_buffers`` do so anyway.
    """

    def __init__(self, model: nn.Module | None, exclude: Exclude = ()) -> None:
        self._model = nn.Module() if model is None else model
        saved = self._model.state_dict(keep_vars=True)
        vectors = power_iteration_buffers(self._model)
        patterns = [pattern for pattern in exclude if isinstance(pattern, str)]
        self._shapes = {}
        for name, buffer in self._model.named_buffers():
            if name not in saved or name in vectors or not buffer.is_floating_point():
                continue
            if not any(fits(name, pattern) for pattern in patterns):
                self._shapes[name] = buffer.shape

    def __len__(self) -> int:
        return len(self._shapes)

    def now(self) -> list[Tensor]:
        """Return the model's present tensors.

        Raises:
            ValueError: one is gone, or has another shape than at first.
        """
        if not self._shapes:
            return []
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        for name, shape in self._shapes.items():
            if name not in buffers or buffers[name].shape != shape:
                raise ValueError(
                    f"the averaged buffer {name!r} is not of shape {tuple(shape)} any more: keep "
                    "it so, or ignore buffers"
                )
        return [buffers[name] for name in self._shapes]


def float_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers of a model that ``buffers="average"`` averages."""
    return AveragedBuffers(model).now()


def power_iteration_buffers(model: nn.Module) -> set[str]:
    """Return the names of buffers that hold the singular vectors of torch's spectral norms.

    They are never averaged: the vectors of two peers may point in opposite directions, and the norm
    of their mean then comes out near 0. Each peer finds those of the averaged weight by its own
    iteration.
    """
    found: set[str] = set()
    for place, module in model.named_modules():
        prefix = f"{place}." if place else ""
        if isinstance(module, _SpectralNorm):  # of a parametrization
            found |= {f"{prefix}_u", f"{prefix}_v"}
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                found |= {f"{prefix}{hook.name}_u", f"{prefix}{hook.name}_v"}
    return found
