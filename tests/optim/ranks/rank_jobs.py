"""Programs of the processes in the tests of peers of several ranks.

Of three processes 0 and 1 are the ranks of peer "0", and 2 is peer "1", a single process.
"""

import functools
import math
import os
import signal
import warnings
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.optim import Alone, Distributed, Seconds, codec_named, method_named, muon
from shoal.optim.exchange.base import Exchange, Handle
from shoal.optim.ranks.lost_rank import RankLost
from shoal.optim.ranks.orders import (
    adopt,
    load_whole,
    whole_shared,
    whole_slow,
    whole_slow_of,
    whole_state,
)
from shoal.optim.ranks.rank_weights import cut_like
from shoal.optim.ranks.ranks import Ranks

STEPS, BATCH = 12, 8
KNOBS = {
    "noloco": {"every": 3, "lag": 0},
    "local": {"every": 3, "lag": 0},
    "gasloc": {"every": 3, "lag": 0},
    "noloco, overlapped": {"every": 4, "fragments": 2, "lag": 3},
    "noloco, two tensors": {"every": 4, "fragments": 3, "lag": 1, "pull": 0.3},
    "local, overlapped": {"every": 4, "fragments": 2, "lag": 2},
    "gasloc, overlapped": {"every": 4, "fragments": 2, "lag": 3},
    "noloco, auto": {"every": 6, "fragments": 2, "lag": "auto"},
    "streaming": {"every": 4, "fragments": 2, "lag": 1},
    "decoupled": {"every": 4, "fragments": 2, "lag": 1},
    "sparta": {"every": 2, "part": 0.2},
    "diloco, muon": {"every": 3},
    "noloco, mod4": {"every": 3, "lag": 0},
    "gasloc, overlapped, mod4": {"every": 4, "fragments": 2, "lag": 3},
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
    """Return groups of the ranks, for training and for the outer optimizer, and one of the peers;
    all processes call it.
    """
    limit, members = timedelta(seconds=20), {"train": [0, 1], "ranks": [0, 1], "peers": [0, 2]}
    return {name: dist.new_group(some, timeout=limit) for name, some in members.items()}


def make(method, model, exchange, **options):
    inner = (
        muon(model, lr=0.05, weight_decay=0.1)
        if "muon" in method
        else torch.optim.AdamW(model.parameters(), lr=0.05)
    )
    knobs = KNOBS.get(method, {"every": 3}) | (
        {"codec": codec_named("mod4")} if "mod4" in method else {}
    )
    return method_named(method.partition(",")[0]).make(
        inner, exchange, model=model, **knobs, **options
    )


def numbers(tensors):
    return [tensor.detach().double().flatten().tolist() for tensor in tensors]


def full(model):
    """Return the model's weights, whole, on all ranks."""
    return numbers(getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())


def alone(exchange, method, dtype="float32", **options):
    """Train a peer in one process."""
    model, members = make_model(dtype), []
    opt = make(
        method, model, exchange, on_round=lambda info: members.append(list(info.members)), **options
    )
    for batch in batches(int(exchange.peer)):
        opt.zero_grad()
        opt.count(BATCH)
        backward(model, batch, dtype)
        opt.step()
    opt.finish()
    return {
        "fast": full(model),
        "slow": numbers(opt.slow),
        "members": members,
        "state": listed(opt.whole_state()),
    }


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
    opt = make(
        method, model, exchange if ranks.first else Alone(), on_round=note, ranks=ranks, **options
    )
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


class Losing(Exchange):
    """Exchange whose round 1 comes to nothing, though its bytes were sent."""

    def __init__(self, real):
        self.real, self.peer = real, real.peer

    def start(self, contribution):
        handle = self.real.start(contribution)
        return Lost(handle) if contribution.key.round == 1 else handle


class Lost(Handle):
    def __init__(self, handle):
        self.handle = handle

    def done(self):
        return self.handle.done()

    def result(self, deadline=None):
        self.handle.result(deadline)


def refused(kind):
    """Train with error feedback, with one round that fails after its contribution was encoded."""
    exchange = (
        Alone() if dist.get_rank() == 1 else Losing(Distributed(groups()["peers"], wait=20.0))
    )
    if dist.get_rank() == 2:
        return alone(exchange, "sparseloco")
    return rank(kind, exchange, "sparseloco")


def step_of(model, opt, batch, ranks=None):
    opt.zero_grad()
    opt.count(BATCH)
    if ranks is None:
        backward(model, batch)
    else:
        loss_of(model, halves(batch)[ranks.rank]).backward()
    opt.step()


def story(model, opt, ranks=None):
    """Do all that rank 0 may ask for, between steps; return what it sees."""
    first, seen = ranks is None or ranks.first, []
    steps = iter(batches(0))
    for _ in range(4):
        step_of(model, opt, next(steps), ranks)
    with opt.averaged(), torch.no_grad():
        seen.append(model(torch.ones(1, 7)).tolist())
    seen.append(numbers(whole_slow_of(opt, opt.fragments - 1)))
    seen += [
        list(opt.sketch_of(0)),
        numbers(whole_slow(opt)),
        {n: numbers(t) for n, t in whole_shared(opt).items()},
    ]
    swarm = [torch.full(shape, 0.1) for shape in opt.shapes] if first else ()
    momentum = {"momentum": [torch.full(shape, 0.01) for shape in opt.shapes]} if first else None
    seen.append(adopt(opt, swarm, round=7, shared=momentum, rebase={0}))
    for _ in range(2):
        step_of(model, opt, next(steps), ranks)
    seen += [opt.round, full(model)]
    adopt(opt, [tensor * 2 for tensor in swarm], round=9, into_model=True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            step_of(model, opt, next(steps), ranks)
        seen.append(
            [str(one.message) for one in found if "changed outside" in str(one.message)]
        )  # a right step is not said
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)  # as weights that a script loads
        opt.restart_from_model()
        seen += [numbers(whole_slow(opt)), {n: numbers(t) for n, t in whole_shared(opt).items()}]
        for _ in range(3):
            step_of(model, opt, next(steps), ranks)
        seen.append([str(one.message) for one in found if "changed outside" in str(one.message)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        opt.finish(average=True)
    seen.append([str(one.message).partition(",")[0] for one in found])
    return [*seen, opt.round, full(model), listed(whole_state(opt))]


def told(kind):
    """Tell the story in the ranks; the third process has no part in it."""
    groups()
    if dist.get_rank() == 2:
        return None
    model, ranks = laid_out(kind), Ranks(groups()["ranks"], timeout=20.0)
    return story(model, make("diloco", model, Alone(), ranks=ranks), ranks)


def misfits(kind):
    """Return what all ranks raise for what rank 0 gives and does not fit, and whether anything has
    changed.
    """
    groups()
    if dist.get_rank() == 2:
        return None
    model, ranks = laid_out(kind), Ranks(groups()["ranks"], timeout=20.0)
    opt, errors = make("diloco", model, Alone(), ranks=ranks), []
    before = [numbers(opt.slow), full(model)]
    state = whole_state(opt)
    wrong = (
        [
            {**state, "slow": state["slow"][1:]},
            {**state, "inner": {"state": {}, "param_groups": []}},
        ]
        if ranks.first
        else [{}, {}]
    )
    calls = [
        lambda: adopt(opt, [torch.ones(2)] if ranks.first else (), round=3),
        *(lambda s=s: load_whole(opt, s) for s in wrong),
    ]
    for call in calls:
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    return {
        "errors": errors,
        "same": [numbers(opt.slow), full(model)] == before,
        "round": opt.round,
    }


def restore(model, weights):
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            part = cut_like(
                torch.tensor(weight, dtype=parameter.dtype).reshape(parameter.shape), parameter
            )
            getattr(parameter, "to_local", lambda p=parameter: p)().copy_(
                getattr(part, "to_local", lambda p=part: p)()
            )


def relay(dtype, kinds, method="streaming"):
    """Train in one layout after another, each from the checkpoint of the one before; "one" is rank
    0 by itself.
    """
    groups()
    if dist.get_rank() == 2:
        return None
    weights, state, at = full(make_model(dtype)), None, 0
    share = STEPS // len(kinds)
    for kind in kinds:
        ranks = None if kind == "one" else Ranks(groups()["ranks"], timeout=20.0)
        model = make_model(dtype) if ranks is None else laid_out(kind, dtype)
        restore(model, weights)
        opt = make(method, model, Alone(), **({} if ranks is None else {"ranks": ranks}))
        if state or (at and ranks is not None):
            load_whole(opt, state)
        for batch in batches(0)[at : at + share]:
            opt.zero_grad()
            if ranks is None:
                backward(model, batch, dtype)
            else:
                loss_of(model, halves(batch)[ranks.rank], dtype).backward()
            opt.step()
        at, weights, state = at + share, full(model), whole_state(opt)
    return {"fast": weights, "state": listed(state)}


def dies(kind):
    """Let rank 1 die when it is to take its part of the second mean. Return what the others see."""
    from shoal.optim.ranks import rank_weights as module

    exchange = Alone() if dist.get_rank() == 1 else Distributed(groups()["peers"], wait=5.0)
    if dist.get_rank() == 2:
        return {"members": alone(exchange, "diloco")["members"]}
    model, ranks = laid_out(kind), Ranks(groups()["ranks"], timeout=20.0)
    opt = make("diloco", model, exchange, ranks=ranks)
    scatter, before = module.RankWeights.scatter, None
    rounds = []

    def dying(*arguments):
        rounds.append(opt.round)
        if len(rounds) == 2 and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return scatter(*arguments)

    module.RankWeights.scatter = dying
    try:
        for batch in batches(0):
            before = [numbers(opt.slow), list(opt.applied)]
            step_of(model, opt, batch, ranks)
    except RankLost as error:
        return {
            "error": str(error),
            "same": [numbers(opt.slow), list(opt.applied)] == before,
            "rounds": len(rounds),
        }
    finally:
        module.RankWeights.scatter = scatter
        exchange.close()


class Normed(Model):
    """Model whose statistics differ between ranks, which see other rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(7, affine=False)

    def forward(self, x):
        return super().forward(self.norm(x))


def buffers_of(model):
    return numbers([model.norm.running_mean, model.norm.running_var])


def normed():
    """Average buffers with rounds whose length rank 0's clock decides; return them and the
    positions of the schedule.
    """
    peers = Distributed(groups()["peers"], wait=20.0) if dist.get_rank() != 1 else Alone()
    torch.manual_seed(0)
    model, ranks = Normed(), Ranks(groups()["ranks"], timeout=20.0) if dist.get_rank() < 2 else None
    clock = (
        iter(range(100)) if dist.get_rank() != 1 else iter(range(0, 10000, 100))
    )  # rank 1's is not asked
    length = Seconds(3.0, lambda: float(next(clock)))
    more = {} if ranks is None else {"ranks": ranks}
    opt = make("diloco", model, peers, buffers="average", length=length, **more)
    found = []
    for batch in batches(dist.get_rank(), 6):
        before = buffers_of(model)
        opt.zero_grad()
        with torch.no_grad():
            model(batch)
        round = opt.round
        loss_of(model, batch).backward()
        own = buffers_of(model)
        for parameter in model.parameters():
            parameter.grad.zero_()
        opt.step()
        found.append(
            {
                "own": own,
                "now": buffers_of(model),
                "averaged": opt.round > round,
                "position": opt.position,
            }
        )
        assert before != own
    return found


def bounded(kind):
    """Return the most values that rank 0 takes from others between two starts of the real exchange,
    and those of a fragment.
    """
    groups()
    if dist.get_rank() == 2:
        return None
    model, ranks = laid_out(kind), Ranks(groups()["ranks"], timeout=20.0)
    opt = make("streaming", model, Alone(), ranks=ranks)
    taken, live = [0], []
    take = ranks.take

    def counting(into, source):
        live.append(weakref.ref(into))
        held = sum(tensor.numel() for tensor in (one() for one in live) if tensor is not None)
        taken.append(held)
        return take(into, source)

    ranks.take = counting
    for batch in batches(0):
        step_of(model, opt, batch, ranks)
    sizes = [
        sum(math.prod(opt.shapes[index]) for index in opt.positions(fragment))
        for fragment in range(opt.fragments)
    ]
    return {"most": max(taken), "fragment": max(sizes), "all": sum(sizes)}
