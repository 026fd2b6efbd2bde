"""The repeated blocks of a model, such as the layers of a transformer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost blocks that ``model`` repeats, such as a transformer's layers, in the order of its modules.

    They are modules of one class, themselves of several modules with parameters, that stand together in a ModuleList, ModuleDict or
    Sequential.
    """
    return list(_blocks(model))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    kinds = Counter(type(child) for child in module.children() if _is_block(child))
    listed = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for child in module.children():
        if listed and kinds[type(child)] > 1:
            yield child
        else:
            yield from _blocks(child)


def _is_block(module: nn.Module) -> bool:
    parts = sum(any(True for _ in child.parameters()) for child in module.children())
    return parts > 1 and not isinstance(module, nn.ModuleList | nn.ModuleDict)  # they are never called
