"""Programs of the ranks in the tests of checkpoints of sharded peers."""

import copy
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shoal.optim import Alone, Distributed, Mean, codec_named, method_named
from shoal.optim.codecs.slices import Share, slices
from shoal.optim.codecs.two_way import two_way
from shoal.optim.exchange.base import Handle

EVERY = 4
METHODS = {
    "diloco": {}, "noloco": {"lag": 0}, "co2": {}, "sparseloco": {"codec": "topk2+ef:0.95"},
    "decoupled": {"codec": "topk2+ef:0.95", "fragments": 2, "lag": 1},
    "diloco, two ways": {"codec": "sign+ef,back=sign+ef"},
}  # fmt: skip


class Echo(Alone):
    """Exchange whose mean is the own contribution as the codec sends it, and sends it back."""

    def start(self, mine):
        shapes = [tuple(tensor.shape) for tensor in mine.tensors]
        tensors = mine.codec.decode(mine.codec.encode(mine.tensors), shapes)
        codec = two_way(mine.codec)
        if codec is not None:
            share = Share.of(slices(shapes))
            average = codec.average(share, share.take(tensors))
            codec.keep(average)
            share.put(tensors, codec.decode_averages(average.payload, share))
        mean = Mean(tensors, 1.0, ("a",))
        return type(
            "Ready",
            (Handle,),
            {"done": lambda self: True, "result": lambda self, deadline=None: mean},
        )()


def make(layout, method, seed, dtype=torch.float32):
    """Return a model in that layout and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5)).to(
        dtype
    )  # shards of 6 / 2 and of 5 rows are uneven
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif layout == "hsdp":
        fully_shard(
            model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        )
    elif layout == "tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
    options = dict(METHODS[method])
    if "codec" in options:
        options["codec"] = codec_named(options["codec"])
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    made = method_named(method.partition(",")[0])
    return model, made.make(inner, Echo(), every=EVERY, model=model, **options)


def learn(model, opt, steps, first=0):
    for step in range(first, first + steps):
        opt.zero_grad()
        rows = torch.randn(8, 7, generator=torch.Generator().manual_seed(step)).to(
            next(model.parameters()).dtype
        )
        (model(rows) - 1.0).square().mean().backward()
        opt.count(8)
        opt.step()


def flat(value):
    """Return all leaves by path; of DTensors the local part."""
    if isinstance(value, dict):
        return {
            f"{key}/{path}": leaf
            for key, part in value.items()
            for path, leaf in flat(part).items()
        }
    if isinstance(value, list | tuple):
        return flat(dict(enumerate(value)))
    return {"": value.to_local() if hasattr(value, "to_local") else value}


def equal(first, second):
    one, two = flat(first), flat(second)
    return one.keys() == two.keys() and all(
        torch.equal(one[path], two[path])
        if isinstance(one[path], torch.Tensor)
        else one[path] == two[path]
        for path in one
    )


def whole_of(opt):
    """Return the slow weights and the momentum in one piece."""
    outer = [entry["outer"] for _, entry in sorted(opt.state_dict()["state"].items())]
    return [
        [getattr(entry[name], "full_tensor", lambda t=entry[name]: t)().tolist() for entry in outer]
        for name in ("slow", "momentum")
    ]


def saved_and_loaded(folder, layout, method, dtype="float32", full=False):
    """Save, load into a new optimizer of another seed, train both on; return whether they are equal
    at both times.
    """
    warnings.simplefilter("ignore")
    kind, options = getattr(torch, dtype), StateDictOptions(full_state_dict=full)
    model, opt = make(layout, method, 0, kind)
    learn(model, opt, 9)
    opt.finish()
    weights, state = get_state_dict(model, opt, options=options)
    placed = [entry["outer"]["slow"] for entry in state["state"].values()]
    sharded = all(hasattr(slow, "placements") for slow in placed)
    alike = sharded and all(
        slow.placements == parameter.placements and slow.shape == parameter.shape
        for slow, parameter in zip(placed, model.parameters(), strict=True)
    )
    other, fresh = make(layout, method, 5, kind)
    if not full:
        dcp.save({"model": weights, "opt": state}, checkpoint_id=folder)
        weights, state = get_state_dict(other, fresh)
        dcp.load({"model": weights, "opt": state}, checkpoint_id=folder)
    set_state_dict(
        other,
        fresh,
        model_state_dict=weights,
        optim_state_dict=copy.deepcopy(state),
        options=options,
    )
    found = [equal(fresh.whole_state(), opt.whole_state())]
    for one, its in ((model, opt), (other, fresh)):
        learn(one, its, 7, first=9)
    found.append(
        equal(fresh.whole_state(), opt.whole_state())
        and equal(model.state_dict(), other.state_dict())
    )
    return {"equal": found, "alike": alike, "fresh": fresh.steps}


def save(folder, layout, method="diloco"):
    """Train 9 steps and save; return slow weights and momentum."""
    model, opt = make(layout, method, 0)
    learn(model, opt, 9)
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "opt": state}, checkpoint_id=folder)
    return whole_of(opt)


def load(folder, layout, method="diloco"):
    """Load into another layout; return slow weights and momentum."""
    model, opt = make(layout, method, 5)
    weights, state = get_state_dict(model, opt)
    dcp.load({"model": weights, "opt": state}, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    return whole_of(opt), opt.steps


def peers(folder):
    """Two peers of two shards each, with slow weights of their own: each saves and loads in its
    folder, over its shards' group.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("peer", "shard"))
    group, peer = mesh.get_group("shard"), mesh.get_local_rank("peer")

    def one(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 6))
        fully_shard(model, mesh=mesh["shard"])
        exchange = Distributed.for_shards(mesh, wait=20.0)
        inner = torch.optim.AdamW(model.parameters(), lr=0.05)
        opt = method_named("noloco").make(
            inner, exchange, every=EVERY, momentum=0.3, pull=0.2, lag=0, model=model
        )
        return model, opt, exchange

    model, opt, exchange = one(peer)
    for step in range(9):
        opt.zero_grad()
        (model(torch.ones(2, 7)) - peer - step).square().mean().backward()
        opt.step()
    weights, state = get_state_dict(model, opt)
    where = Path(folder) / f"peer{peer}"
    dcp.save({"model": weights, "opt": state}, checkpoint_id=where, process_group=group)
    dist.barrier()
    other, fresh, again = one(5)
    weights, state = get_state_dict(other, fresh)
    dcp.load({"model": weights, "opt": state}, checkpoint_id=where, process_group=group)
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
    found = equal(fresh.whole_state(), opt.whole_state()), whole_of(opt)
    dist.barrier()
    exchange.close()
    again.close()
    return found
