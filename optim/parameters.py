"""The averaged parameters of a model, their names, and the order on which peers agree.

    parameters = AveragedParameters.of(model)
    parameters.names                      # ("blocks.0.query.weight", ...)

Positions of fragments, slow weights, snapshots, digests, exports and trials all count in this one
order. It is that of the model's definition, whatever the groups of an inner optimizer.

A name is that within the innermost module that has all parameters of the model, without the parts
that wrappers add to it. So a model has the same names plain, compiled, in DistributedDataParallel
or FSDP, in a LightningModule, or in peft's wrapper.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that come from wrappers of a model: DistributedDataParallel, torch.compile, FSDP,
activation checkpointing.
"""


def plain_name(name: str) -> str:
    """Return a parameter's or buffer's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the innermost module that has all parameters of ``model``."""
    while next(model.parameters(recurse=False), None) is None:
        inside = [child for child in model.children() if next(child.parameters(), None) is not None]
        if len(inside) != 1:
            break
        model = inside[0]
    return model


def trained_names(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each parameter that requires a gradient now, a tied one once.

    They are in the model's order.
    """
    for name, parameter in unwrapped(model).named_parameters():
        if parameter.requires_grad:
            yield plain_name(name), parameter


class AveragedParameters(tuple[Tensor, ...]):
    """Parameters in the order on which peers agree, each with its name, "" without a model.

    Raises:
        ValueError: there are names, and not as many as parameters.
    """

    names: tuple[str, ...]

    def __new__(cls, parameters: Iterable[Tensor], names: Iterable[str] = ()) -> AveragedParameters:
        made = super().__new__(cls, parameters)
        made.names = tuple(names) or ("",) * len(made)
        if len(made.names) != len(made):
            raise ValueError(f"{len(made)} parameters have {len(made.names)} names")
        return made

    @classmethod
    def of(cls, model: nn.Module, among: Collection[Tensor] | None = None) -> AveragedParameters:
        """Return the model's parameters that require a gradient, in its order; only those
        ``among``, if given.

        Those among them that the model does not have follow, without a name.
        """
        wanted = None if among is None else set(among)
        names: list[str] = []
        parameters: list[Tensor] = []
        for name, parameter in trained_names(model):
            if wanted is None or parameter in wanted:
                names.append(name)
                parameters.append(parameter)
        inside = set(parameters)
        outside = [parameter for parameter in among or () if parameter not in inside]
        return cls(parameters + outside, names + [""] * len(outside))

    def name_of(self, index: int) -> str:
        """Return the name of a parameter for people, or what there is in place of one."""
        name = self.names[index]
        return repr(name) if name else f"number {index} of shape {tuple(self[index].shape)}"

    def compared(self, others: Iterable[Tensor]) -> tuple[list[str], list[Tensor]]:
        """Return what ``others`` lack, by name for people, and what they have besides."""
        own = set(self)
        theirs = dict.fromkeys(others)
        lacking: list[str] = []
        for index, parameter in enumerate(self):
            if parameter not in theirs:
                lacking.append(self.name_of(index))
        return lacking, [parameter for parameter in theirs if parameter not in own]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each; of one that is cut into shards that of the whole."""
        return tuple(tuple(parameter.shape) for parameter in self)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(parameter.dtype for parameter in self)
