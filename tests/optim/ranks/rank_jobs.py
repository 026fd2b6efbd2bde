"""Programs of the processes in the tests of peers of several ranks.

Of three processes 0 and 1 are the ranks of peer "0", and 2 is peer "1", a single process.
"""

import functools
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.optim import Alone, Distributed, method_named
from shoal.optim.ranks.ranks import Ranks
from shoal.optim.ranks.whole import whole_slow, whole_state

STEPS, BATCH = 12, 8
KNOBS = {
    "streaming": {"every": 4, "fragments": 2, "lag": 1},
    "decoupled": {"every": 4, "fragments": 2, "lag": 1},
    "sparta": {"every": 2, "part": 0.2},
}


class Model(nn.Module):
    """Model with matrices of uneven rows, biases and a scalar."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def make_model(dtype="float32"):
    torch.manual_seed(0)
    return Model().to(getattr(torch, dtype))


def batches(peer, steps=STEPS):
    generator = torch.Generator().manual_seed(peer)
    return [torch.randn(BATCH, 7, generator=generator) for _ in range(steps)]


def halves(batch):
    return batch.split(BATCH // 2)


def loss_of(model, part, dtype="float32"):
    return (model(part.to(getattr(torch, dtype))) - 1.0).square().mean()


def backward(model, batch, dtype="float32"):
    """Set the mean of the gradients of the batch's halves, as two ranks have it."""
    for part in halves(batch):
        (loss_of(model, part, dtype) / 2).backward()


@functools.cache
def groups():
    """Return groups of the ranks, for training and for the outer optimizer, and one of the peers; all processes call it."""
    limit, members = timedelta(seconds=20), {"train": [0, 1], "ranks": [0, 1], "peers": [0, 2]}
    return {name: dist.new_group(some, timeout=limit) for name, some in members.items()}


def make(method, model, exchange, **options):
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    knobs = KNOBS.get(method, {"every": 3})
    return method_named(method).make(inner, exchange, model=model, **knobs, **options)


def numbers(tensors):
    return [tensor.detach().double().flatten().tolist() for tensor in tensors]


def full(model):
    """Return the model's weights, whole, on all ranks."""
    return numbers(getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())


def alone(exchange, method, dtype="float32", **options):
    """Train a peer in one process."""
    model, members = make_model(dtype), []
    opt = make(method, model, exchange, on_round=lambda info: members.append(list(info.members)), **options)
    for batch in batches(int(exchange.peer)):
        opt.zero_grad()
        opt.count(BATCH)
        backward(model, batch, dtype)
        opt.step()
    opt.finish()
    return {"fast": full(model), "slow": numbers(opt.slow), "members": members, "state": listed(opt.whole_state())}


def laid_out(kind, dtype="float32"):
    """Return the model of a rank as it is trained."""
    model = make_model(dtype)
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=groups()["train"])
    mesh = DeviceMesh.from_group(groups()["train"], "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def rank(kind, exchange, method, dtype="float32", **options):
    """Train one rank of peer 0."""
    model, members = laid_out(kind, dtype), []
    ranks = Ranks(groups()["ranks"], timeout=20.0)
    note = lambda info: members.append(list(info.members))  # noqa: E731
    opt = make(method, model, exchange if ranks.first else Alone(), on_round=note, ranks=ranks, **options)
    for batch in batches(0):
        opt.zero_grad()
        opt.count(BATCH)
        loss_of(model, halves(batch)[ranks.rank], dtype).backward()
        opt.step()
    opt.finish()
    owned = [index for index, tensor in enumerate(opt.slow) if tensor.numel()]
    found = {"fast": full(model), "members": members, "owned": owned}
    return found | {"slow": numbers(whole_slow(opt)), "state": listed(whole_state(opt))}


def listed(value):
    """Return saved state as JSON can hold it."""
    if isinstance(value, torch.Tensor):
        return [list(value.shape), value.double().flatten().tolist()]
    if isinstance(value, dict):
        return {str(name): listed(one) for name, one in value.items()}
    return [listed(one) for one in value] if isinstance(value, list | tuple) else value


def matrix(kind, methods, dtype="float32"):
    """Train with each method; return what each rank, or the other peer, ends with."""
    groups()
    found = {}
    for method in methods:
        exchange = Alone() if dist.get_rank() == 1 else Distributed(groups()["peers"], wait=20.0)
        if dist.get_rank() == 2:
            found[method] = alone(exchange, method, dtype)
        else:
            found[method] = rank(kind, exchange, method, dtype)
        if not isinstance(exchange, Alone):
            exchange.close()
    return found
