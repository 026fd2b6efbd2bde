"""The arguments that all outer optimizers take, and what follows from them before one is made."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from shoal.optim.codecs.base import Codec
from shoal.optim.exchange.base import Alone, Exchange
from shoal.optim.outer.averaged import Exclude, excluded, trained
from shoal.optim.outer.contribution_weight import Weight
from shoal.optim.outer.fragments import Fragment, even, positions, possible, strided
from shoal.optim.outer.in_flight import RoundInfo
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.weights import Processes
from shoal.optim.parameters import AveragedParameters
from shoal.optim.schedule.round_length import RoundLength

Fragments = int | Sequence[Fragment]
"""A number of fragments, or the modules or parameters of each."""


class Options(TypedDict, total=False):
    """Arguments that every method takes; see ``OuterOptimizer``."""

    codec: Codec
    run: str
    slow_device: torch.device | str | Path
    on_round: Callable[[RoundInfo], None] | None
    weight: float | Weight
    length: RoundLength | None
    buffers: Literal["ignore", "average"]
    model: nn.Module | None
    exclude: Exclude
    ranks: Processes | None


def check_arguments(kind: type, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError for an argument that an optimizer of this ``kind`` does not take."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" in vars(base):
            names.update(inspect.signature(vars(base)["__init__"]).parameters)
    for name in options.keys() - names:
        near = difflib.get_close_matches(name, names, 1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"help({kind.__name__}) lists them"
        raise TypeError(f"{kind.__name__} has no argument {name!r}: {hint}")
    given = dict(zip(("inner", "exchange"), args, strict=False)) | dict(options)
    _check_inner_type(given.get("inner", ()))
    _check_exchange_type(given.get("exchange", Alone()))


def _check_inner_type(inner: Any) -> None:
    several = [inner]
    if isinstance(inner, Sequence) and not isinstance(inner, torch.optim.Optimizer):
        several = list(inner)
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(
                f"inner must be an optimizer of torch, or a list of them, got {type(one).__name__}"
            )


def _check_exchange_type(exchange: Any) -> None:
    if isinstance(exchange, Exchange):
        return
    remedy = "such as session.exchange() or shoal.Alone()"
    if hasattr(exchange, "exchange"):
        remedy = "hand in its exchange()"
    raise TypeError(f"exchange must be an exchange, got {type(exchange).__name__}: {remedy}")


def averaged_parameters(inner: Inner, exchange: Exchange, options: Options) -> AveragedParameters:
    """Return the parameters that an optimizer with these options averages, in its order."""
    model = options.get("model")
    own = excluded(options.get("exclude", ()), inner, model)
    return trained(inner, exchange, own, model)


def cut(
    fragments: Fragments, inner: Inner, exchange: Exchange, options: Options
) -> Sequence[Fragment] | None:
    """Return the parameters of each fragment, None for one.

    They are as the exchange has them, if it states that number of them.
    """
    if not isinstance(fragments, int):
        parameters = averaged_parameters(inner, exchange, options)
        parts = positions(fragments, parameters)
        return [[parameters[index] for index in part] for part in parts]
    if fragments == 1:
        return None
    if len(exchange.fragments) == fragments:
        return exchange.fragments
    model = options.get("model")
    parameters = averaged_parameters(inner, exchange, options)
    fragments = possible(fragments, model, parameters)
    if model is None:
        return even(parameters, fragments)
    return strided(model, fragments, parameters)
