"""Programs of the ranks in the tests of peers that are several processes."""

import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.optim import DiLoCo, Distributed, NoLoCo, RoundKey
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.gloo_groups import GlooGroups

EVERY, STEPS, BATCH = 3, 15, 8
METHODS = {"DiLoCo": DiLoCo, "NoLoCo": partial(NoLoCo, lag=0)}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    )  # 5 and 3 rows: the shards are uneven


def batches(peer):
    """Return a peer's inputs, (BATCH, 7) a step."""
    generator = torch.Generator().manual_seed(peer)
    return [torch.randn(BATCH, 7, generator=generator) for _ in range(STEPS)]


def train(peer, model, exchange, method, part=slice(None), evaluate=None):
    """Train on the rows ``part`` of the peer's batches; return the optimizer and the members of
    each round.
    """
    warnings.filterwarnings(
        "error", message=".*changed outside"
    )  # what FSDP2 does between steps changes no weight
    members = []
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    note = lambda info: members.append(list(info.members))  # noqa: E731
    opt = METHODS[method](inner, exchange, every=EVERY, model=model, on_round=note)
    for batch in batches(peer):
        opt.zero_grad()
        (model(batch[part]) - 1.0).square().mean().backward()
        opt.step()
        if evaluate is not None:
            evaluate(opt)
    return opt, members


def whole(model):
    return [
        getattr(p, "full_tensor", lambda p=p: p)().detach().flatten().tolist()
        for p in model.parameters()
    ]


def reference(exchange, method="DiLoCo"):
    """Train the same in one process a peer."""
    model = make_model()
    opt, members = train(int(exchange.peer), model, exchange, method)
    fast = whole(model)
    with opt.averaged():
        return {"slow": whole(model), "fast": fast, "members": members}


def sharded(kind, method="DiLoCo", fails_in=None, evaluates=False):
    """Train 2 peers of 2 processes each.

    ``fails_in``: the round whose exchange fails in one of the four.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("peer", "shard"))
    model = trained = make_model()
    if kind == "fsdp":
        for layer in (
            () if evaluates else (model[0], model[2])
        ):  # FSDP2 keeps the root's own parameters whole after a forward
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    else:
        trained = DistributedDataParallel(model, process_group=mesh.get_group("shard"))
    exchange = Distributed.for_shards(mesh, wait=20.0)
    if fails_in is not None and dist.get_rank() == 1:
        fail(exchange._gloo, fails_in)
    peer, shard = divmod(dist.get_rank(), 2)

    def evaluate(opt):
        with opt.averaged(), torch.no_grad():
            model(torch.ones(1, 7))

    half = BATCH // 2
    part = slice(shard * half, (shard + 1) * half)
    opt, members = train(peer, trained, exchange, method, part, evaluate if evaluates else None)
    exchange.close()
    shapes = [list(tensor.shape) for tensor in opt.slow]
    fast = whole(model)
    with opt.averaged():
        return {"slow": whole(model), "fast": fast, "members": members, "shapes": shapes}


def fail(gloo, round):
    mean = gloo.mean

    def failing(ticket, *arguments):
        found = mean(ticket, *arguments)
        return "it was to fail" if ticket.name.startswith(f"round {round},") else found

    gloo.mean = failing
    assert isinstance(gloo, GlooGroups)


def pairs(shards, rounds):
    """Return the members of each process's rounds, and its means."""
    exchange, found = Distributed(size=2, seed=3, shards=shards), []
    rank = dist.get_rank()
    for round in range(rounds):
        mean = exchange.start(
            Contribution(RoundKey("run", round), [torch.tensor([float(rank)])])
        ).result()
        found.append(None if mean is None else [list(mean.members), mean.tensors[0].item()])
    exchange.close()
    return found


def wrong_mesh():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        Distributed.for_shards(mesh)
    except ValueError as error:
        return str(error)


def without_model():
    model = make_model()
    fully_shard(model)
    try:
        DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), Distributed())
    except ValueError as error:
        return str(error)
