"""One run of bench/calls.py: the product's optimizer, rule and codec, told by a `World` when to
send and when to apply.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from bench._calls_protocol import (
    AGREED,
    DESIGNED,
    Calls,
    Rounds,
    Setting,
    Training,
    World,
    peer_name,
    turn_of_equal_bytes,
)
from bench._quality_train import Diverged, backward, finish, outer_step, take_mean
from bench._table.methods import recipe
from bench._table.train import Place, Spec, held_out, inner_optimizer
from shoal.node.task import Shard
from shoal.optim import OuterOptimizer, codec_named
from shoal.optim.codecs.mod4 import for_pairs
from shoal.optim.codecs.pair_message import PairMessage
from shoal.optim.exchange.averaging import pair_mean
from shoal.optim.exchange.base import Contribution, Exchange, Handle, Mean
from shoal.optim.exchange.update_screen import TRUSTING
from shoal.optim.schedule.schedules import Apply, Send

RULES = {"calls": DESIGNED, "agreed": AGREED}
HOW = ("rounds", *RULES)
LOSSES = ("loss", "validation", "averaged")


@dataclass(frozen=True)
class Case(Spec):
    """One run. Its JSON is its name in the file of results."""

    how: str = "rounds"
    """Of ``HOW``."""
    busy: float = 0.3
    """Part of the time that a peer's link is needed for exchanges."""
    speeds: tuple[float, ...] = (1.0,)
    """Of the peers in turn, relative to each other."""

    @property
    def setting(self) -> Setting:
        return Setting(
            peers=self.peers,
            busy=self.busy,
            steps=self.steps,
            speeds=self.speeds,
            every=self.every,
            seed=self.seed,
        )


class Script:
    """A schedule that does what it is told before each step."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.actions: list[Send | Apply] = []

    def at(self, step: int) -> list[Send | Apply]:
        return self.actions


class Outcome(Handle):
    """What becomes of a staged fragment: the world decides, and training never waits for it."""

    def __init__(self, contribution: Contribution, message: PairMessage) -> None:
        self.contribution = contribution
        self.message = message
        self.mean: Mean | None = None
        self.is_over = False

    def done(self) -> bool:
        return self.is_over

    def result(self, deadline: float | None = None) -> Mean | None:
        assert self.is_over, "training would wait for an exchange"
        return self.mean


class StagedFragments(Exchange):
    """A peer's exchange: holds what was staged until the world has its outcome."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.outcomes: dict[int, Outcome] = {}

    def start(self, contribution: Contribution) -> Handle:
        pairs = for_pairs(contribution.codec)
        assert pairs is not None
        codec, tail = pairs
        message = codec.post([tensor.clone() for tensor in contribution.tensors], tail)
        outcome = Outcome(contribution, message)
        self.outcomes[contribution.key.fragment] = outcome
        return outcome


class Models:
    """The peers' models, which train as a `World` says."""

    def __init__(self, case: Case, place: Place) -> None:
        made = recipe(case.method, case.inner)
        assert made.make is not None
        self.place = place
        self.task = place.task(case, case.peers)
        self.models: list[nn.Module] = []
        self.optimizers: list[OuterOptimizer] = []
        self.staged: list[StagedFragments] = []
        self._scripts: list[Script] = []
        self._schedulers: list[torch.optim.lr_scheduler.LRScheduler] = []
        self._batches = []
        arguments = {**dict(case.outer), **made.arguments(case.every), "lag": 1}
        for number, speed in enumerate(case.setting.speed_of_each()):
            model = place.model(case)
            exchange = StagedFragments(peer_name(number))
            optimizer = made.make(
                inner_optimizer(self.task, model, case),
                exchange,
                every=case.every,
                model=model,
                codec=codec_named(case.codec),
                **arguments,
            )
            script = Script(case.every)
            optimizer.schedule = script
            self.models.append(model)
            self.staged.append(exchange)
            self.optimizers.append(optimizer)
            self._scripts.append(script)
            steps = round(case.steps * speed)
            self._schedulers.append(self.task.lr_scheduler(optimizer, steps))
            self._batches.append(self.task.batches(Shard(number, case.peers, case.seed)))

    def step(self, peer: int, applied: Sequence[tuple[int, int]], staged: Sequence[int]) -> None:
        actions: list[Send | Apply] = [Apply(fragment, lag) for fragment, lag in applied]
        actions += [Send(fragment) for fragment in staged]
        self._scripts[peer].actions = actions
        model = self.models[peer]
        optimizer = self.optimizers[peer]
        batch = next(self._batches[peer])
        backward(self.task, model, self.place.batch(batch))
        optimizer.count(batch[0].numel())
        outer_step(optimizer, model)
        self._schedulers[peer].step()
        optimizer.zero_grad()

    def exchange(self, fragment: int, one: int, other: int) -> None:
        first = self.staged[one].outcomes.pop(fragment)
        second = self.staged[other].outcomes.pop(fragment)
        by_first = first.message.read(second.message.payload)
        by_second = second.message.read(first.message.payload)
        refused = (by_first.bits, by_second.bits)
        sides = (
            (first, second, by_first, refused[1], one, other),
            (second, first, by_second, refused[0], other, one),
        )
        for own, theirs, read, refused_there, me, them in sides:
            pairs = for_pairs(own.contribution.codec)
            assert pairs is not None
            pairs[0].learn(own.message, read)
            own.mean = pair_mean(
                TRUSTING,
                fragment,
                (peer_name(me), own.contribution.weight, own.message),
                (peer_name(them), theirs.contribution.weight, read),
                refused_there,
                own.contribution.unweighted_count,
            )
            own.is_over = True

    def alone(self, fragment: int, peer: int) -> None:
        self.staged[peer].outcomes.pop(fragment).is_over = True

    def finish(self) -> None:
        for optimizer in self.optimizers:
            finish(optimizer)

    def losses(self) -> dict[str, float | None]:
        """Return the mean of the peers' losses on both halves, and the loss of the mean of their
        weights; afterwards the first model has that.
        """
        found: dict[str, float | None] = {}
        for half in ("loss", "validation"):
            each = [held_out(self.task, model, half) for model in self.models]
            found[half] = sum(each) / len(each)
        take_mean(self.models[0], [model.parameters() for model in self.models])
        found["averaged"] = held_out(self.task, self.models[0], "loss")
        if not all(math.isfinite(loss or 0.0) for loss in found.values()):
            raise Diverged("the held-out loss is not finite")
        return found


def world_of(how: str, setting: Setting, training: Training) -> World:
    """Return a world; by calls it has at most as many exchanges as by rounds."""
    if how == "rounds":
        return Rounds(setting, training)
    rules = RULES[how]
    return Calls(replace(setting, turn=turn_of_equal_bytes(setting, rules)), training, rules)


def run(case: Case, place: Place) -> dict[str, Any]:
    """The result of a run as it stands in the file; ``loss`` is None if it diverged."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    result: dict[str, Any] = {**asdict(case), "outer": dict(case.outer)}
    models = Models(case, place)
    world = world_of(case.how, case.setting, models)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the outer step's stability
            world.run()
            models.finish()
        losses = models.losses()
    except Diverged as error:
        result["diverged"] = str(error)
        losses = dict.fromkeys(LOSSES)
    result.update(losses, **world.counts.row())
    result["seconds"] = round(time.perf_counter() - began, 1)
    return result
