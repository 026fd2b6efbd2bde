"""A model on several ranks: the same on each, with gradients averaged by DDP, or in parts, one on each rank, by FSDP2.

A batch is the peer's: each rank computes with its rows of it, so the step is that of one process which accumulates as many parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.node.training.layout import Layout
from shoal.optim import OuterOptimizer
from shoal.optim.inner.blocks import repeated_blocks
from shoal.optim.ranks.orders import Channel
from shoal.optim.ranks.ranks import Ranks
from shoal.optim.ranks.whole import load_whole, whole_state


class Replicated(DistributedDataParallel):
    """A model with averaged gradients that has the model's own attributes too, for a task's loss()."""

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute where the wrapper has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class RanksLayout(Layout):
    """What DDP and FSDP2 have in common.

    Args:
        group: the ranks.
        channel: rank 0's orders, which may be long in coming.
    """

    def __init__(self, group: Ranks, channel: Channel) -> None:
        self.group, self._channel = group, channel
        self.rank, self.ranks = group.rank, group.size

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean over the ranks; on a GPU without waiting for it."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / self.ranks

    def outer_options(self) -> dict[str, Any]:
        """Return the ranks, to which the outer optimizer's state is dealt."""
        return {"ranks": self.group}

    def whole_outer(self, opt: OuterOptimizer) -> dict[str, Any]:
        """Return the state in the form of one process, on rank 0; {} on the others."""
        return whole_state(opt)

    def load_outer(self, opt: OuterOptimizer, state: dict[str, Any]) -> None:
        """Load what rank 0 gives."""
        load_whole(opt, state if self.rank == 0 else None)

    def agreed(self, value: Any) -> Any:
        """Return rank 0's value."""
        return self.group.agreed(value)

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on all of them."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values


class WholeModels(RanksLayout):
    """DDP: each rank has the whole model."""

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the wrapper, which begins with rank 0's weights on all ranks."""
        self._wrapped = Replicated(model.to(device), device_ids=None if device.index is None else [device])
        return self._wrapped

    def unsynchronised(self) -> AbstractContextManager[Any]:
        """Return DDP's context without all-reduce."""
        return self._wrapped.no_sync()

    def evaluated(self, work: Callable[[], float]) -> float:
        """Let rank 0, which has the whole model, work as one process does, while the others wait."""
        if self.rank:
            self._channel.receive()
            return 0.0
        loss = work()
        self._channel.send("evaluated")
        return loss

    def load_model(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Load rank 0's state, one tensor at a time, and what modules keep beside tensors."""
        if self.rank == 0:
            model.load_state_dict(state)
        if any(not isinstance(value, Tensor) for value in model.state_dict().values()):
            others = self.agreed({name: value for name, value in state.items() if not isinstance(value, Tensor)})
            model.load_state_dict(others, strict=False)
        for tensor in model.state_dict().values():
            if isinstance(tensor, Tensor):
                dist.broadcast(tensor.detach(), 0)


class ShardedModel(RanksLayout):
    """FSDP2: each rank has a part of every tensor of the model. All ranks evaluate, each on the same data, with the whole sum."""

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Shard the repeated blocks, then the rest, in place: while it computes, a rank holds one whole block at a time."""
        mesh = init_device_mesh(device.type, (self.ranks,))
        for block in unshared(model, repeated_blocks(model)):
            fully_shard(block, mesh=mesh)
        self._sharded = fully_shard(model, mesh=mesh)
        return model

    @contextmanager
    def unsynchronised(self) -> Iterator[None]:
        """Let each rank keep the gradients of its own rows within the block."""
        self._sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)

    def whole_model(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole state in main memory, on rank 0; {} on the others."""
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return cast(dict[str, Tensor], state)

    def load_model(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Load rank 0's state."""
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        given: dict[str, Any] = dict(state) if self.rank == 0 else {}
        set_model_state_dict(model, given, options=options)


def unshared(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks of which no parameter is used elsewhere in ``model`` too, as tied weights are."""
    owners: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(number)
    within = {id(module) for block in blocks for module in block.modules()}
    others = [module for module in model.modules() if id(module) not in within]
    outside = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    alone = {name for name, numbers in owners.items() if len(numbers) == 1 and name not in outside}
    return [block for block in blocks if all(id(parameter) in alone for parameter in block.parameters())]


LAYOUTS: dict[str, type[RanksLayout]] = {"ddp": WholeModels, "fsdp": ShardedModel}
