"""A model on several ranks: the same on each, with gradients averaged by DDP, or in parts, one on
each rank, by FSDP2.

A batch is the peer's: each rank computes with its rows of it, so the step is that of one process
which accumulates as many parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.node.inner_tensors import first_wrapped, load_whole_model
from shoal.node.training.layout import Layout
from shoal.node.training.training_error import TrainingError
from shoal.optim import OuterOptimizer
from shoal.optim.layers import repeated_blocks
from shoal.optim.ranks.orders import Channel, load_whole, whole_state
from shoal.optim.ranks.ranks import Ranks


class Replicated(DistributedDataParallel):
    """A model with averaged gradients that has the model's own attributes too, for a task's
    loss().
    """

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute where the wrapper has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def check_one_form(holder: str, tensors: Iterable[Any]) -> None:
    """Raise TrainingError for a tensor that only one process can keep: ranks hand out and gather
    plain values.
    """
    wrapped = first_wrapped(tensors)
    if wrapped is not None:
        raise TrainingError(
            f"The {holder} keeps tensors of the class {type(wrapped).__name__}, which the ranks of "
            "one node cannot share: leave --gpus out, or use another."
        )


class RanksLayout(Layout):
    """What DDP and FSDP2 have in common. ``channel``: rank 0's orders, which may be long in
    coming.
    """

    group: Ranks

    def __init__(self, group: Ranks, channel: Channel) -> None:
        self.group = group
        self._channel = channel
        self.rank = group.rank
        self.ranks = group.size

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean over the ranks; on a GPU without waiting for it."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / self.ranks

    def whole_outer(self, opt: OuterOptimizer) -> dict[str, Any]:
        return whole_state(opt)

    def load_outer(self, opt: OuterOptimizer, state: dict[str, Any]) -> None:
        load_whole(opt, state if self.rank == 0 else None)

    def agreed(self, value: Any) -> Any:
        return self.group.agreed(value)

    def gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values


class WholeModels(RanksLayout):
    """DDP: each rank has the whole model."""

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the wrapper, which begins with rank 0's weights on all ranks.

        It looks in each step which parameters have a part in the loss: a branch may be left out, on
        one rank or on all.
        """
        check_one_form("model", model.state_dict().values())
        self._wrapped = Replicated(
            model.to(device),
            device_ids=None if device.index is None else [device],
            find_unused_parameters=True,
        )
        warnings.filterwarnings("ignore", message=r"find_unused_parameters=True was specified")
        return self._wrapped

    def backward_of(self, part: int, count: int) -> AbstractContextManager[Any]:
        """Let DDP average during the backward pass, if there is one only: else `backward_done`
        does.

        DDP would average what the last part has a gradient of, and leave out what only an earlier
        part has used.
        """
        return nullcontext() if count == 1 else self._wrapped.no_sync()

    @torch.no_grad()
    def backward_done(self, count: int) -> None:
        """Average the gradients of several parts, of every parameter that any part of any rank has
        used.
        """
        if count == 1:
            return
        parameters = [p for p in self._wrapped.parameters() if p.requires_grad]
        flags = [parameter.grad is not None for parameter in parameters]
        used = torch.tensor(flags, dtype=torch.uint8, device=parameters[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        waiting = []
        for parameter, by_any in zip(parameters, used.tolist(), strict=True):
            if by_any:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.div_(self.ranks)
                waiting.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in waiting:
            work.wait()

    def evaluated(self, work: Callable[[], float]) -> float:
        """Let rank 0, which has the whole model, work as one process does, while the others
        wait.
        """
        if self.rank:
            self._channel.receive()
            return 0.0
        loss = work()
        self._channel.send("evaluated")
        return loss

    def load_model(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Load rank 0's state, one tensor at a time, and what modules keep beside tensors."""
        if self.rank == 0:
            load_whole_model(model, state)
        if not all(isinstance(value, Tensor) for value in model.state_dict().values()):
            others = {name: each for name, each in state.items() if not isinstance(each, Tensor)}
            model.load_state_dict(self.agreed(others), strict=False)
        for tensor in model.state_dict().values():
            if isinstance(tensor, Tensor):
                dist.broadcast(tensor.detach(), 0)


class ShardedModel(RanksLayout):
    """FSDP2: each rank has a part of every tensor of the model.

    All ranks evaluate, each on the same data, with the whole sum.
    """

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Shard the repeated blocks, then the rest, in place: while it computes, a rank holds one
        whole block at a time.
        """
        check_one_form("model", model.state_dict().values())
        mesh = init_device_mesh(device.type, (self.ranks,))
        self._blocks = unshared(model, repeated_blocks(model))
        for block in self._blocks:
            fully_shard(block, mesh=mesh)
        self._sharded = fully_shard(model, mesh=mesh)
        return model

    def gathered_bytes(self, model: nn.Module) -> int:
        """Return those of the weights and gradients outside the blocks, of two blocks' weights and
        of one's gradients.
        """
        blocks = [_nbytes(block) for block in self._blocks]
        outside = _nbytes(model) - sum(blocks)
        return 2 * outside + 3 * max(blocks, default=0)

    @contextmanager
    def backward_of(self, part: int, count: int) -> Iterator[None]:
        """Let each rank keep the gradients of its own rows within the block, but for the last
        part.
        """
        self._sharded.set_requires_gradient_sync(part == count - 1)
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)

    def whole_model(self, model: nn.Module) -> dict[str, Tensor]:
        state = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        return cast(dict[str, Tensor], state)

    def load_model(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        given: dict[str, Any] = dict(state) if self.rank == 0 else {}
        set_model_state_dict(model, given, options=options)


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def unshared(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks of which no parameter is used elsewhere in ``model`` too, as tied weights
    are.
    """
    owners: dict[int, set[int]] = {}
    in_blocks: set[int] = set()
    for number, block in enumerate(blocks):
        in_blocks |= {id(module) for module in block.modules()}
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(number)
    outside: set[int] = set()
    for module in model.modules():
        if id(module) not in in_blocks:
            outside |= {id(parameter) for parameter in module.parameters(recurse=False)}
    found: list[nn.Module] = []
    for block in blocks:
        own = {id(parameter) for parameter in block.parameters()}
        is_alone = all(len(owners[key]) == 1 for key in own)
        if is_alone and not own & outside:
            found.append(block)
    return found


LAYOUTS: dict[str, type[RanksLayout]] = {"ddp": WholeModels, "fsdp": ShardedModel}
