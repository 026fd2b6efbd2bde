"""Parameters that are cut into shards (FSDP2, tensor parallel): this process's part of each.

A DTensor is recognised by its method ``to_local``: its module takes seconds to import.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def local(param: Tensor) -> Tensor:
    """Return the part of ``param`` in this process, sharing its memory; an unsharded one itself.

    Call it each time: FSDP2 may move the part.
    """
    if not hasattr(param, "to_local"):
        return param
    with torch.no_grad():
        part: Tensor = param.to_local()
        return part


def reshard(model: nn.Module | None) -> None:
    """Make FSDP2 gather the weights again in the next forward pass.

    It may hold whole copies from the last one.
    """
    if model is None:
        return
    for module in model.modules():
        again = getattr(module, "reshard", None)
        if callable(again):
            again()


@torch.no_grad()
def sharded_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return ``tensor`` as this process's part of a DTensor on the mesh of ``parameter``.

    With the shape of the local part it gets the parameter's placements. Another one, such as a
    scalar, is this process's own: its DTensor has the mesh's shape in front, one entry a process.
    The memory is shared, on whatever device. If ``parameter`` is not sharded, it is ``tensor``.
    """
    if not hasattr(parameter, "to_local"):
        return tensor
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    placements = parameter.placements
    shape = parameter.shape
    stride = parameter.stride()
    if tensor.shape != local(parameter).shape:
        shape = torch.Size([*mesh.shape, *tensor.shape])
        stride = torch.empty(shape, device="meta").stride()
        placements = tuple(Shard(dimension) for dimension in range(mesh.ndim))
        tensor = tensor.reshape([1] * mesh.ndim + list(tensor.shape))
    # from_local would move the tensor to the mesh's device; the slow weights are in main memory.
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, tensor.dtype))
    sharded: Tensor = DTensor(tensor, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return sharded
