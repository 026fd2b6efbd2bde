"""Access to sharded parameters (FSDP2, tensor parallel): the outer optimizer works on the local part only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def local(param: Tensor) -> Tensor:
    """Return the part of ``param`` in this process, sharing its memory; ``param`` itself if it is not sharded.

    Call it each time: FSDP2 may move the part. (A DTensor is recognised by its method: its module takes seconds to import.)
    """
    if not hasattr(param, "to_local"):
        return param
    with torch.no_grad():
        part: Tensor = param.to_local()
        return part


def check_whole(params: Iterable[Tensor], model: nn.Module | None) -> None:
    """Raise ValueError if there are shards and no ``model`` to call ``reshard`` with."""
    if model is None and any(hasattr(param, "to_local") for param in params):
        raise ValueError("the parameters are cut into shards: hand in model=, or FSDP2 goes on with copies of weights that changed")


def reshard(model: nn.Module | None) -> None:
    """Make FSDP2 gather the weights again in the next forward pass; it may hold whole copies from the last one."""
    for module in model.modules() if model is not None else ():
        again = getattr(module, "reshard", None)
        if callable(again):
            again()


@torch.no_grad()
def sharded_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return this process's ``tensor`` as a part of a DTensor on the mesh of ``parameter``; ``tensor`` itself if that is whole.

    With the shape of the local part of ``parameter`` it has its placements. Another one, such as a scalar, is this process's own:
    then the DTensor has the mesh's shape in front, one entry a process. The memory is shared, on whatever device.
    """
    if not hasattr(parameter, "to_local"):
        return tensor
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    assert isinstance(parameter, DTensor)
    mesh, placements, shape, stride = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    if tensor.shape != local(parameter).shape:
        shape = torch.Size([*mesh.shape, *tensor.shape])
        stride = torch.empty(shape, device="meta").stride()
        placements = tuple(Shard(dimension) for dimension in range(mesh.ndim))
        tensor = tensor.reshape([1] * mesh.ndim + list(tensor.shape))
    # Not by from_local, which moves the tensor to the mesh's device: the slow weights are in main memory.
    meta = TensorMeta(shape, stride, tensor.dtype)
    made: Tensor = DTensor(tensor, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)  # type: ignore[no-untyped-call]
    return made
