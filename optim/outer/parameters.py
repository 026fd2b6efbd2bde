"""The parameters of inner optimizers: all, those that are averaged, and those that stay a peer's own; averaged buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from shoal.optim.exchange.base import Exchange, OrdersParameters

Inner = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""An optimizer, or several of different parameters."""

Exclude = Sequence[str | Tensor]
"""Parameters, their names, names of modules, or patterns of names, in which "*" stands for any characters."""

_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module")
"""Parts of names that come from wrappers of a model: DistributedDataParallel, torch.compile, FSDP."""


def all_parameters(inner: Inner) -> list[Tensor]:
    """Return the parameters of an optimizer, or of several, in the order of their groups: frozen ones too."""
    several = [inner] if isinstance(inner, torch.optim.Optimizer) else inner
    return [parameter for one in several for group in one.param_groups for parameter in group["params"]]


def trained(inner: Inner, exchange: Exchange, but: Iterable[Tensor] = ()) -> list[Tensor]:
    """Return the parameters that require a gradient, ``but`` for some: those that are averaged.

    They are in the order of ``exchange`` if it has one (that of a session's model), else in that of ``all_parameters``, unless the
    optimizer has an ``order`` of its own, as `shoal.muon` makes it.
    """
    every, left_out = all_parameters(inner), set(but)
    if order := getattr(inner, "order", ()):
        known = set(every)
        every = [parameter for parameter in order if parameter in known]
    found = [parameter for parameter in every if parameter.requires_grad and parameter not in left_out]
    return exchange.ordered(found) if isinstance(exchange, OrdersParameters) else found


def excluded(exclude: Exclude, inner: Inner, model: nn.Module | None) -> set[Tensor]:
    """Return the parameters of ``inner`` that ``exclude`` means.

    ValueError if a parameter is not in ``inner``, a name fits none of ``model`` (buffers included), or there is no model.
    """
    if isinstance(exclude, str):
        raise ValueError(f"exclude must be a list of names, patterns or parameters, got {exclude!r}: put it into brackets")
    every, found = set(all_parameters(inner)), set()
    for item in exclude:
        if isinstance(item, Tensor):
            if item not in every:
                raise ValueError(f"a parameter to exclude, of shape {tuple(item.shape)}, is not in the inner optimizer")
            found.add(item)
            continue
        if model is None:
            raise ValueError(f"to exclude {item!r} by name hand in model=, or exclude the parameters themselves")
        named = [tensor for name, tensor in _named(model) if fits(name, item)]
        if not named:
            raise ValueError(f"no parameter of the model fits {item!r}, which was to be excluded")
        found |= every.intersection(named)
    return found


def fits(name: str, pattern: str) -> bool:
    """Return True if a parameter's or buffer's name is the pattern, lies in the module of that name, or matches it."""
    name = ".".join(part for part in name.split(".") if part not in _WRAPPED)
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def float_buffers(model: nn.Module) -> list[Tensor]:
    """Return the model's floating-point buffers that are in its state_dict, each once; so no counters and masks."""
    return AveragedBuffers(model).now()


class AveragedBuffers:
    """The buffers of ``float_buffers`` by name: ``model.to`` and modules that assign to a buffer put another tensor in its place.

    Without a model there are none. Those whose names are in ``exclude`` are left out.
    """

    def __init__(self, model: nn.Module | None, exclude: Exclude = ()) -> None:
        self._model = nn.Module() if model is None else model
        saved = self._model.state_dict(keep_vars=True)
        own = [pattern for pattern in exclude if isinstance(pattern, str)]
        self._shapes = {
            name: buffer.shape
            for name, buffer in self._model.named_buffers()
            if name in saved and buffer.is_floating_point() and not any(fits(name, pattern) for pattern in own)
        }

    def __len__(self) -> int:
        return len(self._shapes)

    def now(self) -> list[Tensor]:
        """Return the model's present tensors. ValueError if one is gone or has another shape than at first."""
        buffers = dict(self._model.named_buffers(remove_duplicate=False)) if self._shapes else {}
        for name, shape in self._shapes.items():
            if name not in buffers or buffers[name].shape != shape:
                raise ValueError(
                    f"the averaged buffer {name!r} is not of shape {tuple(shape)} any more: keep it so, or ignore buffers"
                )
        return [buffers[name] for name in self._shapes]
