"""The training loop of one node: inner steps on its own shard, outer steps through the exchange it
is given.

It does not use the network: with ``Alone`` it is plain local training, the baseline of every
comparison.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from shoal.node.config.train_settings import OwnTraining
from shoal.node.inner_tensors import (
    copied,
    holds_inner,
    initialise,
    put_together,
)
from shoal.node.task import Shard, Task, tokens_in
from shoal.node.training.batch_feed import BatchFeed
from shoal.node.training.device_plan import DevicePlan
from shoal.node.training.inner_optimizer import make_inner
from shoal.node.training.inner_step import InnerStep
from shoal.node.training.layout import Layout
from shoal.node.training.meter import Meter, Progress
from shoal.node.training.model_form import check_can_resume, check_values, first_difference, forms
from shoal.node.training.random_state import random_state, restore_random_state
from shoal.node.training.recompute import recompute
from shoal.node.training.schedule import Schedule
from shoal.node.training.throughput import Throughput
from shoal.node.training.training_error import TrainingError
from shoal.optim import Alone, Exchange, OuterOptimizer, RoundInfo
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.exchange.contribution import ContributionError
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.training.factories import make_outer
from shoal.swarm.training.last_average import LastAverage
from shoal.swarm.training.round_steps import round_length
from shoal.swarm.training.run_end import RunEnd

log = logging.getLogger(__name__)


class Trainer:
    """The training of one model on one device: ``connect``, then ``run``.

    The same settings, shard and exchange outcomes give the same bits on the same machine (CPU).

    Args:
        task: model, data and loss.
        outer, train: the swarm's settings.
        own: how this node computes; by default in float32, the whole batch at once.
        schedule_steps: of the learning-rate schedule, if not those of this run; 0: without end.
        device: the model's.
        slow_on_device: keep the slow weights there too.
        offload: folder for slow weights and outer state, in place of main memory.
        on_model: called with the parameters to train, before there are optimizers.
        on_round: called after each outer step.
        layout: where the model lies, if not in one process; ``step``, ``evaluate``, ``finish``,
            ``state`` and ``resume`` are then for all ranks, at the same points.
        clock, speeds: Unix seconds, and the members' inner steps a second, for rounds in seconds.
    """

    def __init__(
        self,
        task: Task,
        outer: OuterSettings,
        train: TrainSettings,
        *,
        own: OwnTraining | None = None,
        schedule_steps: int | None = None,
        device: torch.device | None = None,
        slow_on_device: bool = False,
        offload: Path | None = None,
        on_model: Callable[[Sequence[torch.Tensor]], None] = lambda params: None,
        on_round: Callable[[RoundInfo], None] | None = None,
        layout: Layout | None = None,
        clock: Callable[[], float] = time.time,
        speeds: Callable[[], Iterable[float]] = lambda: (),
    ) -> None:
        self.task = task
        self.outer = outer
        self.train = train
        device = device or torch.device("cpu")
        self.layout = layout or Layout()
        torch.manual_seed(train.seed)  # all peers begin with the same weights
        self.model = task.model()
        check_values(self.model)
        if own is not None and own.recompute:
            recompute(self.model)
        wrapped = self.layout.wrap(self.model, device)
        self.params = AveragedParameters.of(self.model)
        self._made = forms(self.model.state_dict())
        """Form of the model's state before its first step, which is what a resumed run loads into.
        """
        on_model(self.params)
        inner = make_inner(task, train, self.model)
        is_one_process = self.layout.ranks == 1
        on_cpu = device.type == "cpu"
        self.plan: DevicePlan | None = None
        """What this process takes of its device, until it has been compared."""
        if not on_cpu:
            self.plan = DevicePlan(
                self.model,
                device,
                inner,
                method=outer.method,
                slow_there=slow_on_device,
                tries=outer.check_loss and not task.draws_with_model and is_one_process,
                ranks=self.layout.ranks,
                gathered=self.layout.gathered_bytes(self.model),
            )
        self.inner_step = InnerStep(
            task,
            wrapped,
            self.params,
            device,
            clip=train.clip,
            own=own or OwnTraining(),
            layout=self.layout,
            outer_in_memory=on_cpu and offload is None and is_one_process,
        )
        place: torch.device | Path = offload or torch.device("cpu")
        if slow_on_device:
            place = device
        self.opt = make_outer(
            outer,
            inner,
            Alone(),
            model=self.model,
            slow_device=place,
            length=round_length(outer.round, clock, speeds),
            on_round=on_round,
            ranks=self.layout.group,
        )
        # Before the outer step: its exchange takes the memory of as many gradients as there are
        # partners.
        self.opt.inner.register_step_post_hook(lambda inner, *_: inner.zero_grad())
        if schedule_steps is None:
            schedule_steps = train.steps
        self.schedule = Schedule(task, train, self.opt, schedule_steps)
        self.meter = Meter(Throughput(device, self.inner_step.dtype))
        self.stepping = False
        """True while the weights are being stepped or averaged, and after that has failed: they are
        those of no whole step then.
        """
        self.end = RunEnd(ranks=self.layout.group)
        self._feed = BatchFeed(task, device, self.inner_step.own.workers)

    @property
    def whole(self) -> OuterOptimizer:
        """The outer optimizer as one process has it, whatever the layout: for rank 0, between two
        steps and in ``on_round``.
        """
        return self.opt

    def end_with(self, last: LastAverage | None) -> None:
        """Have the run end with the last average; None: its exchange is that of rank 0, and this is
        another one.
        """
        self.end.averages = True
        self.end.last = last

    def connect(self, exchange: Exchange, run: str, shard: Shard) -> None:
        """Set the exchange (the method ``none`` uses none), the run's id and the part of the
        data.
        """
        if not self.outer.alone:
            self.opt.exchange = exchange
        self.opt.run = run
        self._feed.open(shard)

    @property
    def shard(self) -> Shard:
        """The part of the data, since `connect`."""
        return self._feed.shard

    def close(self) -> None:
        """End the workers that draw batches, if there are any; a second call does nothing."""
        self._feed.close()

    def _waited(self) -> float:
        return float(getattr(self.opt.exchange, "waited", 0.0))

    def evaluate(self) -> float | None:
        """Return the held-out loss, nats, of the model as it is, or of the slow weights with
        methods of ``Method.slow``.

        None if it is not finite, which is logged: training goes on, and ends by itself if its own
        loss is not finite either.
        """
        return self._held_out_loss()

    def _held_out_loss(self) -> float | None:
        weights = self.opt.averaged() if self.outer.row.slow else nullcontext()
        # A run that goes on evaluates at other steps: training draws the same numbers all the same.
        random = random_state(self.inner_step.device)
        try:
            with weights, self.inner_step.autocast():
                loss = self.layout.evaluated(lambda: float(self.task.evaluate(self.model)))
        finally:
            restore_random_state(random, self.inner_step.device)
        if math.isfinite(loss):
            return loss
        log.warning(
            "The held-out loss is %s at step %d and counts as unknown: check the task's "
            "evaluate().",
            loss,
            self.opt.steps,
        )
        return None

    def run(
        self,
        *,
        stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        after_step: Callable[[], None] = lambda: None,
    ) -> float:
        """Train to the end of the settings, or until ``stop`` is true after a step; return the
        seconds it took.

        Raises TrainingError: the batches ended, or the loss is not a finite scalar any more.
        """
        began = time.monotonic()
        self.meter.restart(self._waited())
        while not stop() and (self.train.steps == 0 or self.opt.steps < self.train.steps):
            self.step()
            if self.meter.is_due():
                on_progress(self.meter.report(self.opt.steps, self._waited()))
                self.meter.restart(self._waited())
            with self.meter.paused():
                after_step()
        self.meter.end(self._waited())
        if not stop():
            self.finish()
        return time.monotonic() - began

    def finish(self) -> None:
        """Take what the exchanges in flight bring, and the mean at the end if the swarm wants
        one.
        """
        self.stepping = True
        checked = self.outer.check_loss and self.layout.ranks == 1
        self.end.run(self.opt, self._loss_at_the_end, checked=checked)
        self.stepping = False

    def _loss_at_the_end(self) -> float | None:
        """Return the held-out loss between two averages, where the weights are whole."""
        self.stepping = False
        loss = self._held_out_loss()
        self.stepping = True
        return loss

    def step(self) -> None:
        """Take one inner step, and the outer step if it is due.

        Raises TrainingError or ContributionError: training has diverged.
        """
        batch = self._feed.next(self.opt.steps)
        with self.meter.throughput.step():
            gradients = self.inner_step.gradients(batch)
        loss = self.layout.mean(gradients)
        tokens = tokens_in(self.task, batch)
        self.opt.count(tokens)
        self.meter.throughput.stepped(tokens)
        self.stepping = True
        try:
            stepped = self.inner_step.step(self.opt, self.opt.inner)
        except ContributionError:
            self.meter.add(loss)
            self.round_loss()  # raises, if the loss shows why nothing can be sent
            raise
        if stepped:
            self.meter.add(loss)
        self.schedule.step()
        self.opt.zero_grad()
        self.stepping = False
        self._feed.done()

    def round_loss(self) -> float | None:
        """Return the mean training loss since the last call, nats; None without a step.

        TrainingError if it is not finite.
        """
        return self.meter.round_loss(self.opt.steps)

    def state(self) -> dict[str, Any]:
        """Return everything that ``resume`` needs to continue bit by bit.

        Training goes on changing its tensors: copy them.
        """
        random, *others = self.layout.gathered(random_state(self.inner_step.device))
        return {
            "model": self.layout.whole_model(self.model),
            "optimizer": self.layout.whole_outer(self.opt),
            "parameters": self._names(),
            "scaler": self.inner_step.state_dict(),
            "scheduler": self.schedule.fields(),
            "schedule": self.schedule.state_dict(),
            **random,
            **({"ranks": others} if others else {}),
            "shard": [self.shard.index, self.shard.of, self.shard.seed],
            "data": self._feed.state_dict(),
        }

    def _names(self) -> list[list[str]]:
        """Return all names in the model's state of each parameter, in the order of the slow
        weights.
        """
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return [names.get(id(parameter), []) for parameter in self.opt.parameters]

    def resume(self, state: dict[str, Any]) -> bool:
        """Continue from ``state``, of any layout; only rank 0's counts.

        Return whether the learning-rate schedule is the same.

        Another one goes on from the same step (`Schedule.resume`).

        TrainingError if it belongs to another model or shard; nothing is changed then.
        """
        if self.layout.rank == 0:
            index, of, seed = state["shard"]
            if Shard(index, of, seed) != self.shard:
                raise TrainingError(
                    f"The checkpoint was trained on shard {index}/{of}, this node has "
                    f"{self.shard}: pass --shard {index}/{of}, or start without --resume."
                )
            self.check_model(state)
            self._feed.find(state.get("data"))
        large = ("model", "optimizer")
        small = {name: value for name, value in state.items() if name not in large}
        small = self.layout.agreed(small)
        try:
            self.layout.load_outer(self.opt, self._with_classes(state.get("optimizer", {})))
            # torch keeps the tensors that it is given, which map a file that may be removed.
            for own in self.opt.inner.state.values():
                for name, value in own.items():
                    if isinstance(value, torch.Tensor):
                        own[name] = copied(value)
            self.layout.load_model(self.model, state.get("model", {}))
        except ValueError as error:
            raise TrainingError(f"The checkpoint does not fit this run: {error}.") from error
        same = self.schedule.resume(small["scheduler"], small["schedule"])
        self.inner_step.load_state_dict(small.get("scaler"))
        self._feed.resume(small.get("data"), self.opt.steps)
        self._restore_random_state(small)
        return same

    def _restore_random_state(self, state: Mapping[str, Any]) -> None:
        """Set this rank's generators. A checkpoint of another layout has none for this rank."""
        rank = self.layout.rank
        others = state.get("ranks", ())
        if rank == 0:
            restore_random_state(state, self.inner_step.device)
        elif len(others) == self.layout.ranks - 1:
            restore_random_state(others[rank - 1], self.inner_step.device)

    def _with_classes(self, outer: dict[str, Any]) -> dict[str, Any]:
        """Return the outer state with tensors of the classes that this run's inner optimizer makes.

        ValueError if it makes others.
        """
        saved = outer.get("inner", {}).get("state", {})
        if not holds_inner(saved):
            return outer
        inner = self.opt.inner
        for one in getattr(inner, "parts", [inner]):
            initialise(one)
        made = put_together(saved, inner.state_dict()["state"])
        return {**outer, "inner": {**outer["inner"], "state": made}}

    def check_can_resume(self) -> None:
        """Raise TrainingError if a run could not go on from the present state: for the end of the
        first step.
        """
        if self.layout.ranks > 1:
            return
        model = self.model.state_dict()
        inner = self.opt.inner.state_dict()["state"]
        check_can_resume(self._made, model, inner, when="the task made it: make it so in model()")

    def schedule_at(self, step: int) -> None:
        """Let the learning-rate schedule go on to ``step`` of it; it never goes back."""
        self.schedule.forward(step)

    def change(self, *, lr: float | None, steps: int, length: int) -> None:
        """Go on with other settings of the swarm, between two steps.

        ``lr``: the highest rate of the inner optimizer's groups from now on, of which the others
        keep their proportion; the schedule goes on. None: as it was made. ``steps``: at which the
        run ends. ``length``: of the schedule, which goes on from the same step.
        """
        if length != self.schedule.length:
            self.schedule = self.schedule.resized(length)
        times = 1.0
        if lr is not None and self.schedule.peak > 0:
            times = lr / self.schedule.peak
        self.schedule.scale(times)
        self.train = self.train.model_copy(update={"steps": steps})

    def check_model(self, state: Mapping[str, Any]) -> None:
        """Raise TrainingError unless ``state`` is of a model with the same tensors, and the same
        modules with `get_extra_state`.
        """
        name = first_difference(forms(self.model.state_dict()), forms(state["model"]))
        if name is not None:
            raise TrainingError(
                f"The checkpoint is of another model (its {name!r} differs): use the same task, or "
                "start without --resume."
            )
