"""One run of bench/table.py: train as ``Spec`` says, take the held-out loss on the way and at the
end, count the bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shoal
from bench._quality_train import Diverged, Meter, backward, outer_step, take_mean, take_slow
from bench._table.links import marks
from bench._table.methods import TORCHFT, lag, recipe
from bench._table.text import TableText, read
from shoal.node.task import Shard
from shoal.optim import Alone, OuterOptimizer, Simulation, by_tokens, codec_named
from shoal.optim.exchange.simulation import SimulatedExchange

BETA1 = {"adamw": 0.8, "muon": 0.9}
"""AdamW's, alone and beside Muon.

Alone, data parallel training (mini, 800 steps, rate 0.012) ends at 2.836 with 0.8, 2.873 with
0.9 and 2.968 with 0.95."""
ADAMW = "adamw"
"""Beside Muon, AdamW's rate over Muon's."""
INNER_SETTINGS = ("beta2", ADAMW)
"""Settings of a row that are the inner optimizer's."""
ON_THE_WAY = 128  # windows of the reported half for the points of the curve
WINDOWS_AT_ONCE = 128


class Size(NamedTuple):
    """A model, its batches and the length of its runs."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    batch: int
    """Windows per step of all peers together."""
    steps: int
    tune: int
    """Steps of the runs that choose settings."""
    unlike: bool = False
    """Each peer trains on a text of its own."""
    speeds: tuple[int, ...] = (1,)
    """Inner steps of the peers in the same time, in turn: rounds last equal times."""

    def pace(self, index: int) -> float:
        """The steps of one peer over the mean of all."""
        speeds = self.speeds
        return speeds[index % len(speeds)] * len(speeds) / sum(speeds)


SIZES = {
    "micro": Size(2, 48, 4, 64, 1024, 32, 600, 300),
    "tiny": Size(2, 64, 4, 64, 1024, 32, 6000, 1000),
    "mini": Size(4, 64, 4, 64, 512, 64, 3200, 800),
    "mini-128": Size(4, 64, 4, 64, 512, 128, 3200, 800),
    "small": Size(4, 96, 4, 64, 1024, 32, 4000, 1000),
    "1m": Size(4, 128, 4, 128, 2048, 32, 5000, 1000),
}
"""0.16, 0.23, 0.27 (twice), 0.65 and 1.3 million parameters; 1.2, 12.3, 13.1, 26.2, 8.2 and 20
million tokens. Of tiny's parameters 42 % are hidden matrices, which Muon trains, and of mini's
74 %, as in models of useful size; "mini" is cut into larger batches, "mini-128" into twice as large
ones."""

UNLIKE, UNEVEN = "unlike", "uneven"
for _name in ("micro", "mini", "1m"):  # bench/default.py
    SIZES[f"{_name}-{UNLIKE}"] = SIZES[_name]._replace(unlike=True)
    SIZES[f"{_name}-{UNEVEN}"] = SIZES[_name]._replace(speeds=(1, 1, 2, 4))


@dataclass(frozen=True)
class Spec:
    """One run. Its JSON is its name in the file of results."""

    text: str
    """Digest of text and vocabulary."""
    model: str
    method: str
    inner: str
    codec: str
    peers: int
    every: int
    steps: int
    lr: float
    outer: tuple[tuple[str, float | bool], ...]
    seed: int

    @property
    def key(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "outer": dict(self.outer)}, sort_keys=True)


@cache
def _shared(path: Path, size: Size) -> TableText:
    task = TableText(
        read(path),
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        context=size.context,
        batch=size.batch,
    )
    _ = task.halves
    return task


class Place(NamedTuple):
    """Where runs find the text, and compute."""

    cache: Path
    device: str = "cpu"

    def task(self, spec: Spec, share: int = 1) -> TableText:
        """The task with the batch of one of ``share`` peers."""
        size = SIZES[spec.model]
        shared = _shared(self.cache / f"{spec.text}.safetensors", size)
        task = TableText(
            shared.corpus,
            layers=size.layers,
            width=size.width,
            heads=size.heads,
            context=size.context,
            batch=size.batch // share,
            unlike=size.unlike,
        )
        task.__dict__["halves"] = shared.halves
        return task

    def model(self, spec: Spec) -> nn.Module:
        """The same fresh one for every peer."""
        torch.manual_seed(spec.seed)
        return self.task(spec).model().to(self.device)

    def batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0].to(self.device), batch[1].to(self.device)


def inner_optimizer(task: TableText, model: nn.Module, spec: Spec) -> torch.optim.Optimizer:
    """AdamW, or shoal's Muon, with AdamW at its rate for all that is no hidden matrix."""
    setting = dict(spec.outer)
    if spec.inner == "muon":
        made = shoal.muon(model, lr=spec.lr, adamw_lr=setting.get(ADAMW, 1.0) * spec.lr)
        adamw, beta2 = made.param_groups[1:], 0.95
    else:
        made = task.inner_optimizer(model.parameters())
        adamw, beta2 = made.param_groups, 0.99
        adamw[0]["lr"] = spec.lr
    for group in adamw:
        group["betas"] = (BETA1[spec.inner], setting.get("beta2", beta2))
    return made


@torch.no_grad()
def held_out(task: TableText, model: nn.Module, half: str, most: int | None = None) -> float:
    """Nats a token on one half."""
    device, windows = next(model.parameters()).device, task.halves[half][:most]
    total = 0.0
    for part in torch.split(windows, WINDOWS_AT_ONCE):
        part = part.to(device)
        total += float(task.loss(model, (part[:, :-1], part[:, 1:]))) * len(part)
    return total / len(windows)


class Trained(NamedTuple):
    """What a run leaves."""

    models: Sequence[nn.Module]
    sent: int
    """Bytes that a peer handed to the exchange."""
    curve: list[tuple[int, float]]
    """Of the first peer, on a sample."""
    back: int = 0
    """Bytes of averages, where they come back by a codec of their own."""
    ends: Sequence[Sequence[Tensor]] = ()
    """Each peer's parameters as training left them: the last average makes one model of them."""


def data_parallel(spec: Spec, place: Place) -> Trained:
    """The mean of the peers' gradients at each step: that of one batch of all their windows, in one
    model.
    """
    task, model = place.task(spec, spec.peers), place.model(spec)
    inner = inner_optimizer(task, model, spec)
    scheduler = task.lr_scheduler(inner, spec.steps)
    shards = [task.batches(Shard(index, spec.peers, spec.seed)) for index in range(spec.peers)]
    at, curve = set(marks(spec.steps, 1)), list[tuple[int, float]]()
    for step in range(1, spec.steps + 1):
        for shard in shards:  # one by one: less memory than the batch of all, and as fast or faster
            backward(task, model, place.batch(next(shard)), 1 / spec.peers)
        inner.step()
        scheduler.step()
        inner.zero_grad()
        if step in at:
            curve.append((step, held_out(task, model, "loss", ON_THE_WAY)))
    sent = 4 * sum(p.numel() for p in model.parameters()) * spec.steps if spec.peers > 1 else 0
    return Trained([model], sent, curve)


Steer = Callable[[OuterOptimizer, int], None]
"""Called before each step, with its number from 1 on."""


class _Peer(NamedTuple):
    """What one peer leaves; bytes as in `Trained`."""

    model: nn.Module
    sent: int
    back: int
    trained: Sequence[Tensor]
    """Its parameters as training left them."""


def outer(spec: Spec, place: Place, steer: Steer | None = None) -> Trained:
    """Each peer's model with its slow weights; ``steer`` may change every peer's outer settings on
    the way.
    """
    made = recipe(spec.method, spec.inner)
    assert made.make is not None
    make = made.make
    names = [f"peer{index}" for index in range(spec.peers)]
    size = SIZES[spec.model]
    fixed: dict[str, Any] = {
        name: value for name, value in spec.outer if name not in INNER_SETTINGS
    }
    if len(size.speeds) > 1:
        fixed["weight"] = by_tokens
    usual_lag = lag(spec.method, spec.every, spec.codec)
    at, curve = set(marks(spec.steps, spec.every)), list[tuple[int, float]]()

    def peer(exchange: SimulatedExchange) -> _Peer:
        task, model = place.task(spec, spec.peers), place.model(spec)
        index = names.index(exchange.peer)
        pace = size.pace(index)
        every, steps = round(spec.every * pace), round(spec.steps * pace)
        arguments = fixed | made.arguments(every)
        if made.overlap:
            arguments["lag"] = max(1, round(usual_lag * pace))
        meter = Meter(exchange if spec.peers > 1 else Alone())
        codec = codec_named(spec.codec)
        optimizer = make(
            inner_optimizer(task, model, spec),
            meter,
            every=every,
            model=model,
            codec=codec,
            **arguments,
        )
        scheduler = task.lr_scheduler(optimizer, steps)
        shard = task.batches(Shard(index, spec.peers, spec.seed))
        first = index == 0
        for step, data in enumerate(islice(shard, steps), 1):
            backward(task, model, place.batch(data))
            optimizer.count(data[0].numel())
            if steer is not None:
                steer(optimizer, step)
            outer_step(optimizer, model)
            scheduler.step()
            optimizer.zero_grad()
            if first and step in at:
                with optimizer.averaged():
                    curve.append((step, held_out(task, model, "loss", ON_THE_WAY)))
        optimizer.finish()
        trained = [parameter.detach().clone() for parameter in model.parameters()]
        take_slow(optimizer)
        return _Peer(model, meter.bytes, meter.back_bytes, trained)

    members = 2 if made.group == "pair" else spec.peers
    simulation = Simulation[_Peer](names, seed=spec.seed, size=members)
    found = list(simulation.run(peer).values())
    models = [one.model for one in found]
    if spec.peers == 1:
        return Trained(models, 0, curve)
    sent = max(one.sent for one in found)
    back = max(one.back for one in found)
    return Trained(models, sent, curve, back, [one.trained for one in found])


def _trainer(spec: Spec) -> Callable[[Spec, Place], Trained]:
    if spec.method in TORCHFT:
        from bench._table.torchft import torchft

        return torchft
    return data_parallel if spec.method == "ddp" else outer


def corrected(
    curve: Sequence[tuple[int, float]], sample: float, loss: float, steps: int
) -> list[tuple[int, float]]:
    """The curve of a sample moved so that it ends where the loss on everything does."""
    return [(step, round(value + loss - sample, 5)) for step, value in curve] + [
        (steps, round(loss, 5))
    ]


def run(spec: Spec, place: Place, steer: Steer | None = None) -> dict[str, Any]:
    """The result of a run as it stands in the file; ``loss`` is None if it diverged."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    result: dict[str, Any] = {**dataclasses.asdict(spec), "outer": dict(spec.outer)}
    nothing = dict.fromkeys(("loss", "validation"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the outer step's stability: here it is tried
            trained = _trainer(spec)(spec, place) if steer is None else outer(spec, place, steer)
    except Diverged as error:
        return {
            **result,
            **nothing,
            "diverged": str(error),
            "seconds": round(time.perf_counter() - began, 1),
        }
    seconds = time.perf_counter() - began
    task, size = place.task(spec), SIZES[spec.model]
    each = {
        half: [held_out(task, model, half) for model in trained.models]
        for half in ("loss", "validation")
    }
    result.update({half: sum(values) / len(values) for half, values in each.items()})
    if not math.isfinite(result["loss"]):
        return {
            **result,
            **nothing,
            "diverged": "the held-out loss is not finite",
            "seconds": round(seconds, 1),
        }
    sample = held_out(task, trained.models[0], "loss", ON_THE_WAY)
    if trained.ends:
        take_mean(trained.models[0], trained.ends)
        result["averaged"] = held_out(task, trained.models[0], "loss")
    params = sum(p.numel() for p in trained.models[0].parameters())
    tokens = spec.steps * size.batch // spec.peers * size.context
    rounds = spec.steps / spec.every
    back = {"back_per_param": trained.back / rounds / params} if trained.back else {}
    return {
        **result,
        "bytes_per_param": trained.sent / rounds / params,
        **back,
        "params": params,
        "tokens": tokens,
        "curve": corrected(trained.curve, sample, result["loss"], spec.steps),
        "seconds": round(seconds, 1),
    }
