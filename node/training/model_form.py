"""The form of a model's and an optimizer's state: what a checkpoint must have in common with a run.

A run is checked at the end of its first step, so that it does not train for hours and then leave
checkpoints that nothing can go on from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from shoal.node.inner_tensors import InnerTensors, form_of, taken_apart
from shoal.node.training.training_error import TrainingError

EXTRA_STATE = "_extra_state"
"""The name that torch gives to what a module's ``get_extra_state`` returned."""


def check_values(model: nn.Module) -> None:
    """Raise TrainingError unless every parameter and buffer has values that training can change."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise TrainingError(
                f"The task's model() has no values for {name!r}, which is on the device meta: make "
                'it on the CPU, or call to_empty(device="cpu") and set the values.'
            )
        if tensor.is_inference():
            raise TrainingError(
                f"The task's model() made {name!r} under torch.inference_mode, so it cannot be "
                "trained: make it outside."
            )


def forms(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of each tensor in a model's state.

    None for what a module's ``get_extra_state`` returned, which may be of any type.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        is_tensor = isinstance(value, torch.Tensor | InnerTensors)
        found[name] = form_of(value) if is_tensor and not name.endswith(EXTRA_STATE) else None
    return found


def first_difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first name, in alphabetical order, whose `forms` differ; None if all are alike."""
    for name in sorted(own.keys() | other.keys()):
        if own.get(name, "none") != other.get(name, "none"):
            return name
    return None


def check_can_resume(
    made: Mapping[str, Any], model: Mapping[str, Any], inner: Mapping[Any, Any], *, when: str
) -> None:
    """Raise TrainingError if a run could not go on from the present state, without a copy of it.

    What a run would load is tried as far as it costs no memory: the model's form, and the making of
    an optimizer's tensors of a class of their own.

    Args:
        made: the `forms` of the model's state as it was made.
        model: its present state.
        inner: the "state" of the inner optimizer's.
        when: it was made, and the remedy, such as "the task made it: make it so in model()".
    """
    name = first_difference(forms(model), made)
    if name is not None:
        raise TrainingError(
            f"No run could go on from a checkpoint: the model's {name!r} is of another form after "
            f"the first step than when {when}."
        )
    check_can_be_made(inner)


def check_can_be_made(state: Mapping[Any, Any]) -> None:
    """Raise TrainingError unless an optimizer's tensors of classes of their own can be made again
    from the plain ones that a checkpoint holds.
    """
    for name, value in _tensors_in(state):
        apart = taken_apart(value)
        if isinstance(apart, InnerTensors):
            _check_made(name, value, apart)


def _tensors_in(state: Mapping[Any, Any], place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested dicts, with the keys that lead to them."""
    for key, value in state.items():
        where = f"{place}[{key!r}]"
        if isinstance(value, torch.Tensor):
            yield where, value
        elif isinstance(value, Mapping):
            yield from _tensors_in(value, where)


def _check_made(name: str, value: torch.Tensor, apart: InnerTensors) -> None:
    kind: Any = type(value)
    inner_names, context = kind.__tensor_flatten__(value)
    try:
        inner = {key: getattr(value, key) for key in inner_names}
        made = kind.__tensor_unflatten__(inner, context, value.shape, value.stride())
        same = form_of(made) == form_of(value)
    except Exception as error:  # whatever a class of another library raises
        raise TrainingError(
            f"No run could go on from a checkpoint: the optimizer's {apart.kind} at {name} cannot "
            f"be made again from its parts ({type(error).__name__}: {error!s:.100}): use another "
            "optimizer."
        ) from error
    if not same:
        raise TrainingError(
            f"No run could go on from a checkpoint: the optimizer's {apart.kind} at {name} becomes "
            "another one when it is made again from its parts: use another optimizer."
        )
