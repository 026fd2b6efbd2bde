"""One run of bench/quality.py: train as ``Spec`` says, evaluate on held-out text, count the
bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bench._quality_methods import METHODS
from shoal.node.data.sharding import stable_hash
from shoal.node.data.source import Document
from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.optim import FLOAT32, Alone, OuterOptimizer, Simulation, codec_named
from shoal.optim.codecs.two_way import two_way
from shoal.optim.exchange.base import Contribution, Exchange, Handle
from shoal.optim.exchange.simulation import SimulatedExchange
from shoal.optim.outer.inner import as_one

ADAMW_OF_MUON = 0.3  # its rate, as a part of Muon's
WINDOWS = 512  # of each half of the held-out text: 32 kB at 64 bytes a window


class Diverged(Exception):
    """The loss or the weights are not finite."""


@dataclass(frozen=True)
class Spec:
    """One run. Its JSON is its name in the file of results."""

    method: str
    codec: str
    peers: int
    every: int
    steps: int
    """Inner steps per peer of a run with one peer's usual batch; ``ddp-xK`` and ``ddp-updates``
    make fewer and more.
    """
    batch: int
    """Windows per step of all peers together."""
    lr: float
    outer: tuple[tuple[str, float | bool], ...]
    seed: int

    @property
    def key(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "outer": dict(self.outer)}, sort_keys=True)


class QualityText(TextTask):
    """The built-in text task, with its held-out documents cut in two: one half to choose settings
    by, the other to report.
    """

    def _half(self, number: int) -> Tensor:
        documents: list[Document] = [
            d for d in self.held_out() if stable_hash(f"half {d.name}") % 2 == number
        ]
        windows = self._windows(documents, "held-out part")
        places = torch.randint(
            len(windows), (WINDOWS,), generator=torch.Generator().manual_seed(number)
        )
        return windows[places].long()

    @cached_property
    def halves(self) -> dict[str, Tensor]:
        return {"validation": self._half(0), "loss": self._half(1)}

    @torch.no_grad()
    def losses(self, model: nn.Module) -> dict[str, float]:
        """Nats per byte on either half."""
        found = {}
        for name, windows in self.halves.items():
            parts = torch.split(windows, 128)
            found[name] = sum(
                float(self.loss(model, (part[:, :-1], part[:, 1:]))) * len(part) for part in parts
            ) / len(windows)
        return found


@cache
def _shared() -> QualityText:
    """Reads the text once for all runs of this process."""
    task = QualityText()
    _ = task.documents, task.halves
    return task


def task_of(batch: int) -> QualityText:
    """The task with ``batch`` windows a step."""
    task = QualityText(batch=batch)
    task.__dict__.update({name: _shared().__dict__[name] for name in ("documents", "halves")})
    return task


class Meter(Exchange):
    """An exchange that counts what is handed to it: the bytes of the payloads, which a codec knows
    from the shapes.

    The exchange gets the codec itself, for some say how their contributions are averaged
    (``exchange.averaging``).
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.bytes = exchange, 0
        self.back_bytes = 0
        """Of averages, where they come back by a codec of their own."""

    def start(self, contribution: Contribution) -> Handle:
        shapes = [tuple(tensor.shape) for tensor in contribution.tensors]
        self.bytes += contribution.codec.nbytes(shapes)
        codec = two_way(contribution.codec)
        if codec is not None:
            self.back_bytes += codec.back.nbytes(shapes)
        return self.exchange.start(contribution)


def _inner(task: QualityText, model: nn.Module, spec: Spec) -> torch.optim.Optimizer:
    """AdamW; or, where the method's recipe has Muon, that for the matrices of the blocks and AdamW
    for all else.
    """
    muon = METHODS[spec.method].inner == "muon"
    matrices = [
        p
        for name, p in model.named_parameters()
        if muon and p.dim() == 2 and name.startswith("blocks.")
    ]
    ours = set(map(id, matrices))
    adamw = task.inner_optimizer(p for p in model.parameters() if id(p) not in ours)
    for group in adamw.param_groups:
        group["lr"] = spec.lr * ADAMW_OF_MUON if muon else spec.lr
        group["betas"] = (0.9, dict(spec.outer).get("beta2", 0.95 if muon else 0.99))
    return (
        as_one([torch.optim.Muon(matrices, lr=spec.lr, weight_decay=0.0), adamw]) if muon else adamw
    )


def backward(
    task: QualityText, model: nn.Module, batch: tuple[Tensor, Tensor], share: float = 1.0
) -> None:
    loss = task.loss(model, batch)
    if not math.isfinite(value := float(loss.detach())):
        raise Diverged(f"the training loss is {value}")
    torch.autograd.backward([loss * share])


def outer_step(optimizer: OuterOptimizer, model: nn.Module) -> None:
    """One step; Diverged if it fails for weights that are not finite."""
    try:
        optimizer.step()
    except ValueError as error:  # codecs refuse NaN and infinity
        if all(bool(p.isfinite().all()) for p in model.parameters()):
            raise
        raise Diverged(str(error)) from error


def finish(optimizer: OuterOptimizer) -> None:
    """End the run with the slow weights in the model."""
    optimizer.finish()
    take_slow(optimizer)


def take_slow(optimizer: OuterOptimizer) -> None:
    """Put the slow weights into the model."""
    for parameter, slow in zip(optimizer.parameters, optimizer.slow, strict=True):
        parameter.detach().copy_(slow)


def data_parallel(spec: Spec) -> tuple[list[nn.Module], int, int]:
    """The model, the bytes that each peer sends, its tokens: the mean of the peers' gradients at
    each step, exactly.

    All peers would hold the same weights, so there is one model. ``tests/bench`` compares it with
    torch's own over gloo.
    """
    peers, batch, steps = spec.peers, spec.batch // spec.peers, spec.steps
    if spec.method == "ddp-xK":
        batch, steps = batch * peers, steps // peers
    elif spec.method == "ddp-updates":
        peers, steps = 1, steps * peers
    task = task_of(batch)
    torch.manual_seed(spec.seed)
    model = task.model()
    inner = _inner(task, model, spec)
    scheduler = task.lr_scheduler(inner, steps)
    shards = [task.batches(Shard(index, peers, spec.seed)) for index in range(peers)]
    sent = 0
    for _ in range(steps):
        for shard in shards:
            backward(task, model, next(shard), 1 / peers)
        if peers > 1:
            sent += FLOAT32.encode(
                [p.grad for p in model.parameters() if p.grad is not None]
            ).numel()
        inner.step()
        scheduler.step()
        inner.zero_grad()
    return [model], sent, steps * batch * task.size.context


def outer(
    spec: Spec, size: int | None = None, redrawn: int = 1
) -> tuple[list[nn.Module], int, int]:
    """One model with the slow weights of each peer, the bytes that a peer sends, its tokens.

    ``size``, ``redrawn``: of groups.
    """
    recipe = METHODS[spec.method]
    assert recipe.make is not None
    make, batch = recipe.make, spec.batch // spec.peers
    task = task_of(batch)
    names = [f"peer{index}" for index in range(spec.peers)]
    knobs = {name: value for name, value in spec.outer if name != "beta2"}

    def peer(exchange: SimulatedExchange) -> tuple[nn.Module, int]:
        torch.manual_seed(spec.seed)
        model, meter = task.model(), Meter(Alone() if recipe.group == "nobody" else exchange)
        codec = codec_named(spec.codec)
        more = {**knobs, **recipe.arguments(spec.every)}
        optimizer = make(
            _inner(task, model, spec), meter, every=spec.every, model=model, codec=codec, **more
        )
        scheduler = task.lr_scheduler(optimizer, spec.steps)
        for data in islice(
            task.batches(Shard(names.index(exchange.peer), spec.peers, spec.seed)), spec.steps
        ):
            backward(task, model, data)
            optimizer.count(data[0].numel())
            outer_step(optimizer, model)
            scheduler.step()
            optimizer.zero_grad()
        finish(optimizer)
        return model, meter.bytes

    size = size or (2 if recipe.group == "pair" else spec.peers)
    found = list(
        Simulation[tuple[nn.Module, int]](names, seed=spec.seed, size=size, redrawn=redrawn)
        .run(peer)
        .values()
    )
    sent = max(count for _, count in found) if spec.peers > 1 else 0
    return [model for model, _ in found], sent, spec.steps * batch * task.size.context


@torch.no_grad()
def take_mean(model: nn.Module, peers: Iterable[Iterable[Tensor]]) -> None:
    """Put the mean of all peers' parameters into ``model``, which may be one of theirs."""
    for parameter, *theirs in zip(model.parameters(), *peers, strict=True):
        parameter.copy_(torch.stack(theirs).mean(0))


def _mean(models: Sequence[nn.Module]) -> nn.Module:
    mean = task_of(1).model()
    take_mean(mean, [model.parameters() for model in models])
    return mean


@torch.no_grad()
def _equal(models: Sequence[nn.Module]) -> bool:
    first, *others = (list(model.parameters()) for model in models)
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def run(spec: Spec) -> dict[str, Any]:
    """The result of a run as it stands in the file; ``loss`` is None if it diverged."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    result: dict[str, Any] = {**dataclasses.asdict(spec), "outer": dict(spec.outer)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the outer step's stability: here it is tried
            models, sent, tokens = (data_parallel if METHODS[spec.method].make is None else outer)(
                spec
            )
    except Diverged as error:
        return {
            **result,
            "loss": None,
            "validation": None,
            "loss_averaged": None,
            "bytes_per_token": None,
            "diverged": str(error),
        }
    trained = time.perf_counter() - began
    task = task_of(1)
    kept = models[:1] if _equal(models) else models
    each = [task.losses(model) for model in kept]
    result.update(
        {name: sum(one[name] for one in each) / len(each) for name in ("loss", "validation")}
    )
    result["loss_averaged"] = task.losses(_mean(kept))["loss"] if len(kept) > 1 else result["loss"]
    result.update(bytes_per_token=sent / tokens, tokens=tokens, seconds=round(trained, 1))
    if not math.isfinite(result["loss"]):
        result.update(
            loss=None,
            validation=None,
            loss_averaged=None,
            diverged="the held-out loss is not finite",
        )
    return result
