"""Programs of the ranks in the tests of ``Distributed``; each runs in all ranks of a job and
returns something for JSON.
"""

import hashlib
import logging
import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from shoal import optim
from shoal.optim import DiLoCo, Distributed, NoLoCo, RoundKey, codec_named
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.gloo_groups import GlooGroups


class Warnings(logging.Handler):
    """Handler that collects the package's warnings in a list."""

    def __init__(self):
        super().__init__()
        self.sentences = []
        logging.getLogger("shoal.optim").addHandler(self)

    def emit(self, record):
        self.sentences.append(record.getMessage())


def train(peer, exchange, method, every=3, steps=12, codec="float32"):
    """Return the slow weights after each round."""
    generator = torch.Generator().manual_seed(peer)
    model, members = linear(), []
    make = {"NoLoCo": partial(NoLoCo, lag=0), "DiLoCo": DiLoCo}[method]
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    note = lambda info: members.append(list(info.members))  # noqa: E731
    opt = make(inner, exchange, every=every, codec=codec_named(codec), on_round=note)
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randn(5, 7, generator=generator)).square().mean().backward()
        opt.step()
    return {"slow": [tensor.tolist() for tensor in opt.slow], "members": members}


def training(method, size, codec="float32"):
    exchange = Distributed(size=size, seed=5)
    found = train(dist.get_rank(), exchange, method, codec=codec)
    exchange.close()
    return found


def exchange_random_tensors(exchange, codec, rounds=3):
    """Return the digest of each mean, and of what this peer owes of the averages in the end."""
    codec = codec_named(codec)
    found = []
    for round in range(rounds):
        generator = torch.Generator().manual_seed(100 * round + int(exchange.peer))
        tensors = [torch.randn(shape, generator=generator) for shape in ((1200, 2), (3000,), (5,))]
        weight = 1.0 + int(exchange.peer)
        key = RoundKey("run", round)
        handle = exchange.start(Contribution(key, tensors, weight, codec, unweighted_count=1))
        mean = handle.result()
        codec.accepted()
        found.append([list(mean.members), mean.weight, *map(digest, mean.tensors)])
    return [*found, [digest(tensor) for tensor in codec.owed or ()]]


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def random_tensors(codec):
    exchange = Distributed()
    found = exchange_random_tensors(exchange, codec)
    exchange.close()
    return found


def read_by_own_weights(shards=1, fails_in=None):
    """Exchange 3 rounds in pairs; the first block of peer 0 is far from all others.

    Members and gains, and who learnt from it.
    """
    rank = dist.get_rank()
    exchange, codec, found = Distributed(size=2, seed=3, shards=shards), codec_named("mod4"), []
    means, base = (
        exchange._gloo.mean,
        torch.randn(300, generator=torch.Generator().manual_seed(rank % shards)),
    )

    def failing(ticket, *arguments):
        mean = means(ticket, *arguments)
        return (
            "it was to fail" if rank == 1 and ticket.name.startswith(f"round {fails_in},") else mean
        )

    exchange._gloo.mean = failing
    for round in range(3):
        moved = 0.01 * torch.randn(300, generator=torch.Generator().manual_seed(10 * rank + round))
        own = base + moved + torch.where(torch.arange(300) < 64, 5.0 * (rank < shards), 0.0)
        codec.expect(f"run:{round}:0", [moved])
        handle = exchange.start(Contribution(RoundKey("run", round), [own], 1.0, codec))
        while not handle.done():
            time.sleep(0.001)
        before = (
            codec.state_dict()
        )  # as a checkpoint would have it now: the outcome has not been asked for
        mean = handle.result()
        found.append(
            {"learnt": codec.state_dict()["measured"] != before["measured"], "rho": before["rho"]}
        )
        if mean is None:
            codec.rejected()
        else:
            codec.accepted()
            found[-1] |= {"members": mean.members, "gain": (mean.tensors[0] - own).tolist()}
    exchange.close()
    return found


def stalling(method, rounds=8):
    """Train; the last rank comes to round 2 when the others are through it, and they go on when it
    has come.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange, members = Distributed(wait=1.0), []
    marks = dist.PrefixStore(
        f"stalling/{method}", dist.distributed_c10d._get_default_store()
    )  # not the exchange's connection
    generator, model = torch.Generator().manual_seed(rank), linear()
    options = (
        {"fragments": [[model.weight], [model.bias]], "lag": 1}
        if method == "StreamingDiLoCo"
        else {}
    )
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)

    def note(info):
        members.append(list(info.members))
        if info.key.round == 2:  # a round that everybody is through, but with another outcome
            marks.set(f"through/{rank}", "-")
            others = [f"through/{other}" for other in range(world)] if rank < world - 1 else []
            marks.wait(others, timedelta(seconds=60))

    opt = getattr(optim, method)(inner, exchange, every=2, on_round=note, **options)
    start = exchange.start

    def late(contribution):
        if contribution.key.round == 2 and rank == world - 1:
            marks.wait([f"through/{other}" for other in range(world - 1)], timedelta(seconds=60))
        return start(contribution)

    exchange.start = late
    while len(members) < rounds:
        opt.zero_grad()
        model(torch.randn(5, 7, generator=generator)).square().mean().backward()
        opt.step()
    exchange.close()
    held = [opt.slow, *opt.shared.values()]
    return {
        "held": [[tensor.tolist() for tensor in tensors] for tensors in held],
        "members": members,
    }


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(7, 3)


def one_round(values, codecs=None, weights=None, wait=30.0, exchange_timeout=20.0, spoil=None):
    """Exchange ``values[rank]`` once; return the mean or None and the warnings, or the
    ValueError.
    """
    rank, logged = dist.get_rank(), Warnings()
    exchange = Distributed(wait=wait, exchange_timeout=exchange_timeout)
    if spoil is not None:
        SPOILERS[spoil](rank, exchange)
    try:
        codec = codec_named(codecs[rank] if codecs else "float32")
        handle = exchange.start(
            Contribution(
                RoundKey("run", 0),
                [torch.tensor(values[rank])],
                weights[rank] if weights else 1.0,
                codec,
            )
        )
        mean = handle.result()
        found = None if mean is None else [mean.tensors[0].tolist(), list(mean.members)]
        more = exchange.start(Contribution(RoundKey("run", 1), [torch.ones(1)])).result()
    except ValueError as error:
        return {"error": str(error)}
    finally:
        exchange.close()
    return {
        "mean": found,
        "logged": logged.sentences,
        "next": None if more is None else list(more.members),
    }


def chain_without(absent):
    """Exchange once in pairs while a rank takes no part; return the mean and its members."""
    exchange = Distributed(size=2, wait=30.0, exchange_timeout=20.0)
    key = RoundKey("run", 0)
    try:
        if dist.get_rank() == absent:
            exchange.absent(key)
            return None
        values = torch.tensor([float(dist.get_rank())])
        mean = exchange.start(Contribution(key, [values])).result()
        return None if mean is None else [mean.tensors[0].tolist(), list(mean.members)]
    finally:
        exchange.close()


def dies_in_transfer(rank, exchange):
    if rank == 2:
        GlooGroups._sum = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)


def dies_before_its_vote(rank, exchange):
    if rank == 2:
        exchange._consensus.agree = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)


def stalls_in_transfer(rank, exchange):
    """Stall the bytes of one rank in round 0: it is in the group but begins no operation."""
    gather = GlooGroups._gather
    if rank == 2:
        stuck = []

        def stalling(gloo, group, payload, count, over):
            if stuck:
                return gather(gloo, group, payload, count, over)
            stuck.append(True)
            while not over():
                time.sleep(0.01)
            return []

        GlooGroups._gather = stalling


def leaves_before(rank, exchange):
    if rank == 2:
        exchange.close()


def loses_its_store(rank, exchange):
    class Gone:
        def __getattr__(self, name):
            raise dist.DistNetworkError("connection reset\nby the other side")

    exchange._consensus.store = Gone()


SPOILERS = {
    "dies in transfer": dies_in_transfer,
    "dies before its vote": dies_before_its_vote,
    "stalls in transfer": stalls_in_transfer,
    "leaves before": leaves_before,
    "store": loses_its_store,
}


def weightless(rounds=3):
    """Train with weight 0 for rank r in round r."""
    rank, round, members = dist.get_rank(), iter(range(rounds)), []
    weight = torch.nn.Parameter(torch.tensor([float(rank)]))
    exchange = Distributed()
    opt = DiLoCo(
        torch.optim.SGD([weight], lr=0.1),
        exchange,
        every=1,
        weight=lambda tokens, steps: float(next(round) != rank),
        on_round=lambda info: members.append(list(info.members)),
    )
    began = time.monotonic()
    for _ in range(rounds):
        weight.grad = torch.ones(1)
        opt.step()
    exchange.close()
    return {"members": members, "seconds": time.monotonic() - began}


def same_key_again():
    """Use a key again, as after a resume, soon and long after the last use of the store's
    entries.
    """
    exchange, rank, found = Distributed(), dist.get_rank(), []
    for round in [0, 1, 0, 1, *range(2, 200), 0]:
        value = torch.tensor([float(rank + len(found))])
        mean = exchange.start(Contribution(RoundKey("run", round), [value])).result()
        found.append(mean.tensors[0].item())
    left = sum(
        exchange._consensus.store.check([f"{ticket.name}/0/0"]) for _, ticket in exchange._kept._old
    )
    exchange.close()
    return {
        "found": found,
        "left": left,
        "old": len(exchange._kept._old),
        "uses": len(exchange._kept._uses),
    }


def threads_at_the_end():
    exchange = Distributed()
    exchange.start(Contribution(RoundKey("run", 0), [torch.ones(1)]))
    exchange.close()
    names = [thread.name for thread in threading.enumerate()]
    return [
        names.count("shoal-distributed"),
        exchange.start(Contribution(RoundKey("run", 1), [torch.ones(1)])).result(),
    ]


def wrong_shards():
    try:
        Distributed(shards=3)
    except ValueError as error:
        return str(error)
