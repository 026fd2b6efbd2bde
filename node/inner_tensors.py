"""Tensors of a class of their own, as the plain tensors that they are made of.

A file holds plain tensors only. A quantised weight, or the 8-bit state of an optimizer, is of a
subclass of torch.Tensor that says by ``__tensor_flatten__`` which plain tensors it consists of
(torch's protocol for such classes). `taken_apart` asks for them, and a checkpoint holds them with
the names that the class gives them. `put_together` makes the tensor again.

The class is never the file's to choose: a tensor is made by the class of the tensor that the
present model or optimizer has in that place, and only from plain tensors of the same names, types
and shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MAX_DEPTH = 8
"""Levels of tensors inside tensors."""


@dataclass(frozen=True)
class InnerTensors:
    """What a checkpoint holds of a tensor of a class of its own.

    ``kind``: the class's name, which is compared and never looked up.
    ``tensors``: by the class's names for them; what is inside may be of such a class too.
    """

    kind: str
    tensors: dict[str, Any]


class OpaqueError(TypeError):
    """A tensor whose values cannot be had as plain tensors; the text says why, after the tensor's
    class.
    """


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor's class is torch's own, whose values lie in memory as its type
    says.
    """
    return type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def first_wrapped(tensors: Iterable[Any]) -> Tensor | None:
    """Return the first tensor whose values lie in tensors inside it, but for those that are cut
    among ranks; None without one.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or is_plain(tensor) or hasattr(tensor, "to_local"):
            continue
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return tensor
    return None


def taken_apart(tensor: Tensor, depth: int = 0) -> Tensor | InnerTensors:
    """Return the tensor as a plain one that shares its memory, or the plain tensors that it
    consists of.

    Raises OpaqueError if neither can be had.
    """
    if is_plain(tensor):
        return tensor.detach()
    if hasattr(tensor, "__tensor_flatten__"):
        if depth > MAX_DEPTH:
            raise OpaqueError(f" of tensors that are nested {MAX_DEPTH} deep")
        names, _ = tensor.__tensor_flatten__()
        inner = {}
        with torch.no_grad():
            for name in names:
                part = getattr(tensor, name)
                # The mesh of a distributed tensor is none.
                if not isinstance(part, Tensor):
                    raise OpaqueError(f", a class with parts that are no tensors ({name})")
                inner[str(name)] = taken_apart(part, depth + 1)
        return InnerTensors(_kind(tensor), inner)
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise OpaqueError(", a class that does not say what it consists of (__tensor_flatten__)")
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def put_together(saved: Any, like: Any) -> Any:
    """Return nested state in which the tensors of `InnerTensors` are made again, by the classes of
    those in ``like``.

    ``like`` is the present state of the same form; what it lacks stays as it is if it is plain. The
    tensors are new ones.

    Raises ValueError: a tensor is of another class, or of other plain tensors, than that in its
    place.
    """
    if isinstance(saved, InnerTensors):
        return _made(saved, like)
    if isinstance(saved, dict):
        named: Mapping[Any, Any] = like if isinstance(like, Mapping) else {}
        return {name: put_together(value, named.get(name)) for name, value in saved.items()}
    if type(saved) in (list, tuple):
        same = isinstance(like, list | tuple) and len(like) == len(saved)
        others = like if same else [None] * len(saved)
        return type(saved)(put_together(*pair) for pair in zip(saved, others, strict=True))
    return saved


def holds_inner(saved: Any) -> bool:
    """Return whether nested state has tensors that must be put together."""
    if isinstance(saved, Mapping):
        return any(map(holds_inner, saved.values()))
    if isinstance(saved, list | tuple):
        return any(map(holds_inner, saved))
    return isinstance(saved, InnerTensors)


def form_of(value: Any) -> Any:
    """Return what must be the same of a saved tensor and the present one: the shape; of inner
    tensors types and names too.

    A tensor that is cut among ranks counts as the whole one, which is what a checkpoint holds.
    """
    if isinstance(value, Tensor) and not hasattr(value, "to_local"):
        try:
            value = taken_apart(value)
        except OpaqueError:
            return type(value).__qualname__
        if isinstance(value, Tensor) and value.is_nested:
            return "nested"
    if isinstance(value, InnerTensors):
        inside = {name: _exact_form(tensor) for name, tensor in value.tensors.items()}
        return value.kind, inside
    return tuple(value.shape)


def _exact_form(value: Tensor | InnerTensors) -> Any:
    if isinstance(value, InnerTensors):
        return form_of(value)
    return value.dtype, tuple(value.shape)


@torch.no_grad()
def copy_inner(saved: InnerTensors, into: Any) -> None:
    """Copy the values into the inner tensors of a tensor of the same form.

    ValueError if it has another, and nothing is copied.
    """
    _check_same(saved, into)
    names, _ = into.__tensor_flatten__()
    for name in names:
        value = saved.tensors[name]
        present = getattr(into, name)
        if isinstance(value, InnerTensors):
            copy_inner(value, present)
        else:
            present.copy_(value)


def _check_same(saved: InnerTensors, like: Any) -> None:
    if not isinstance(like, Tensor) or is_plain(like) or not hasattr(like, "__tensor_flatten__"):
        here = type(like).__name__
        raise ValueError(f"it holds a {saved.kind} where this run has a {here}")
    if form_of(saved) != form_of(like):
        raise ValueError(
            f"its {saved.kind} does not consist of the tensors that {_kind(like)} has in this run"
        )


def _made(saved: InnerTensors, like: Any) -> Tensor:
    _check_same(saved, like)
    names, context = like.__tensor_flatten__()
    inner: dict[str, Tensor] = {}
    for name in names:
        value = saved.tensors[name]
        present = getattr(like, name)
        if isinstance(value, InnerTensors):
            inner[name] = _made(value, present)
        else:
            inner[name] = value.detach().to(device=present.device, copy=True)
    made = type(like).__tensor_unflatten__(inner, context, like.shape, like.stride())
    assert isinstance(made, Tensor)
    return made


def copied(tensor: Tensor) -> Tensor:
    """Return a copy in memory of its own, of the same class."""
    try:
        apart = taken_apart(tensor)
    # Such as a distributed one, which copies itself.
    except OpaqueError:
        return tensor.detach().clone()
    if isinstance(apart, InnerTensors):
        return _made(apart, tensor)
    return apart.clone()


def initialise(optimizer: Optimizer) -> None:
    """Have a new optimizer make its state, by a step with gradients and learning rates of 0.

    torch.distributed.checkpoint does the same before it loads a state. Some optimizers move the
    weights all the same, so load the weights afterwards.
    """
    if optimizer.state:
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    gradients: dict[Tensor, Tensor | None] = {}
    try:
        for group in optimizer.param_groups:
            if "lr" in group:
                rate = group["lr"]
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
            for parameter in group["params"]:
                if parameter.requires_grad:
                    gradients[parameter] = parameter.grad
                    parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def load_whole_model(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state of the same names and forms as the model's own.

    The inner tensors of a tensor with a class of its own are copied into those of the model's. Some
    modules show more in their state than they load: a quantised layer of bitsandbytes shows the
    scales of its frozen weights. Such entries are copied into the tensors that the model shows,
    unless it holds the same already.

    Raises ValueError, naming the entry, if the model shows another value afterwards.
    """
    own = model.state_dict()
    inner = {name: value for name, value in state.items() if isinstance(value, InnerTensors)}
    for name, value in inner.items():
        copy_inner(value, own.get(name))
    plain = {name: value for name, value in state.items() if name not in inner}
    result = model.load_state_dict(plain, strict=False)
    for name in result.missing_keys:
        if name not in inner:
            raise ValueError(f"the model needs {name!r}, which is not in its state")
    unloaded = [name for name in result.unexpected_keys if name in own]
    for name in unloaded:
        if isinstance(own[name], Tensor) and not same_values(own[name], state[name]):
            with torch.no_grad():
                own[name].copy_(state[name])
    if unloaded or inner:
        _check_shown(model, [*unloaded, *inner], state)


def _check_shown(model: torch.nn.Module, names: Iterable[str], state: Mapping[str, Any]) -> None:
    shown = model.state_dict()
    for name in names:
        if not same_values(shown[name], state[name]):
            raise ValueError(f"the model shows {name!r} in its state, but does not load it")


def same_values(one: Any, other: Any) -> bool:
    """Return whether two entries of states are equal, wherever their tensors lie."""
    if isinstance(one, Tensor) and not is_plain(one):
        one = taken_apart(one)
    if isinstance(one, InnerTensors) and isinstance(other, InnerTensors):
        return _same_items(one.tensors, other.tensors)
    if isinstance(one, dict) and isinstance(other, dict):
        return _same_items(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_values, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.detach(), other.detach().to(one.device))
    # A tensor compares with a number element by element.
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return bool(one == other)


def _same_items(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(same_values(value, other[name]) for name, value in one.items())


def _kind(tensor: Tensor) -> str:
    return type(tensor).__qualname__
