"""What the ranks of test_sharded_muon.py do: steps of Muon of a model that is cut in some way, with
gradients that all know.
"""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shoal.optim import muon
from shoal.optim.ranks.rank_weights import cut_like

STEPS = 3
UNEVEN = [(7, 5), (5, 4), (4, 1), (1, 3), (3, 6), (6, 2)]
"""Of the layers, (in, out): rows that ranks share unevenly, fewer rows than ranks, and both
orientations.
"""
EVEN = [(8, 4), (4, 12), (12, 8)]
"""What torch itself can gather where both are cut, tensor parallel and FSDP: its ``full_tensor`` of
uneven rows hangs.
"""


def make_model(kind):
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Linear(into, out) for into, out in (EVEN if kind == "tp and fsdp" else UNEVEN)
    )


def gradients(model):
    """Yield for each step the whole gradients by name."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield {
            name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()
        }


@cache
def meshes():
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return {"fsdp": flat, "hsdp": square, "tp": flat, "tp and fsdp": square}


def laid_out(kind):
    model, mesh = make_model(kind), meshes()[kind]
    if kind.startswith("tp"):
        plan = {
            str(at): ColwiseParallel() if at % 2 == 0 else RowwiseParallel()
            for at in range(len(model))
        }
        parallelize_module(model, mesh["model"] if kind == "tp and fsdp" else mesh, plan)
    if kind != "tp":
        for layer in model:
            fully_shard(layer, mesh=mesh["data"] if kind == "tp and fsdp" else mesh)
    return model


def stepped(kind):
    """Return weights and momenta, whole, as lists, after the steps."""
    model = laid_out(kind)
    named = dict(model.named_parameters())
    matrices = [name for name in named if name.endswith("weight")]
    inner = muon(model, lr=0.1, weight_decay=0.2, matrices=matrices)
    for whole in gradients(make_model(kind)):
        for name, p in named.items():
            p.grad = cut_like(whole[name], p)
        inner.step()
    found = [[named[name], inner.state[named[name]]["momentum_buffer"]] for name in matrices]
    empty = sum(p.to_local().numel() == 0 for p in named.values() if hasattr(p, "to_local"))
    dist.barrier()
    return {"found": [[t.full_tensor().tolist() for t in pair] for pair in found], "empty": empty}
