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
    """Arguments that every method takes besides its own, all by name.

    opt = DiLoCo(inner, exchange, every=50, model=model, exclude=["head"], weight=by_tokens)
    """

    codec: Codec
    """How contributions become bytes; by default that of a swarm's exchange, else float32. One with
    state (error feedback) is copied for each fragment.
    """
    run: str
    """Name of the run; peers of different runs never average."""
    slow_device: torch.device | str | Path
    """Where the slow weights and the rule's state live, by default "cpu": a device, or as a path a
    folder for files that are mapped into memory. They have no name, so that they are gone with the
    process. OSError if it has no room.
    """
    on_round: Callable[[RoundInfo], None] | None
    """Called with a ``RoundInfo`` after each applied exchange."""
    weight: float | Weight
    """Of a contribution: a number, or a function of the tokens (``count``) and inner steps since
    the fragment was last sent (``by_tokens``). 0: stay out of this round's mean, as if absent.
    """
    length: RoundLength | None
    """Of a round: in the schedule's steps, tokens or seconds. Optimizers must not share one."""
    buffers: Literal["ignore", "average"]
    """"average" replaces the model's floating-point buffers (BatchNorm's statistics) by their mean
    whenever fragment 0 is applied; they are sent as float32. The vectors of torch's spectral norms
    stay each peer's own. "ignore", the default, leaves every peer its own. All peers must choose
    the same.
    """
    model: nn.Module | None
    """The module, needed for names, for its buffers, and for sharded parameters (FSDP2), of whose
    state each process has its part.
    """
    exclude: Exclude
    """Parameters that stay this peer's own (a head for its task): parameters, names, names of
    modules, or patterns such as "*.bias". They are trained, but neither kept nor sent, nor are
    buffers of these names. All peers must exclude the same.
    """
    ranks: Processes | None
    """The processes of this peer, if several act as one (``shoal.optim.Ranks``); then the exchange
    is rank 0's.
    """


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
    _check_codec_type(given.get("codec"))


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


def _check_codec_type(codec: Any) -> None:
    if isinstance(codec, str):
        raise TypeError(f"codec must be a codec, got str: hand in shoal.codec_named({codec!r})")


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
