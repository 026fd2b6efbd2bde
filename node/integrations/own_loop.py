"""What a training loop of one's own keeps and shows: checkpoints, metrics.jsonl, Prometheus,
TensorBoard and Weights & Biases.

    # goes on from the newest checkpoint there, if there is one
    run = shoal.Run("runs/anna", model, inner, tensorboard="curves")
    with shoal.create(state=model, every=50) as s:
        opt = s.optimizer(inner)
        with run.recording(s, opt):
            while run.step < 1000:
                loss = ...
                opt.step()
                opt.zero_grad()
                run.stepped(loss.item())

A checkpoint holds the model, the inner optimizer and ``run.extra``. The outer optimizer begins
anew: from that model where the swarm begins, and from the swarm's weights where it is under way.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.node.checkpoint.folder import CheckpointError, listed
from shoal.node.checkpoint.store import load
from shoal.node.checkpoint.writer import CheckpointWriter
from shoal.node.config.node_settings import NodeSettings
from shoal.node.home import expanded
from shoal.node.inner_tensors import holds_inner, initialise, load_whole_model, put_together
from shoal.node.metrics.log import Metrics, RoundRecord
from shoal.node.metrics.sinks import about, open_sinks
from shoal.node.training.model_form import check_can_resume, forms
from shoal.optim import OuterOptimizer, RoundInfo
from shoal.optim.outer.inner import Inner, Stepped, all_parameters
from shoal.swarm.errors import ShoalError
from shoal.swarm.training.record_keeper import RoundReport
from shoal.swarm.training.session import Session
from shoal.swarm.training.step_watch import goes_by_steps
from shoal.swarm.wire.envelope import real
from shoal.swarm.wire.record import NodeRecord, Round

# What the callbacks of trainers share: one outer optimizer from the begin of training to its end,
# and the weights to evaluate.


class TakingPart:
    """Base of a callback that takes part in the swarm of ``session`` while a trainer trains, once.

    Args:
        session: of this peer; its state is the model that is trained.
        evaluate: "fast" evaluates the weights that this peer trains, "slow" the averaged ones.
        options: as for `Session.optimizer`.
    """

    def __init__(self, session: Session, *, evaluate: str = "fast", **options: Any) -> None:
        if evaluate not in ("fast", "slow"):
            raise ShoalError(
                f'The weights to evaluate are "fast" or "slow", not {evaluate!r}: choose one of '
                "the two."
            )
        self.session = session
        self.options = options
        self.opt: OuterOptimizer | None = None
        """The outer optimizer, from the begin of training on."""
        self._slow = evaluate == "slow"
        self._over = False
        self._shown = ExitStack()
        self._showing = False  # the slow weights
        self._schedules: list[LRScheduler] = []
        self._schedule_steps = 0
        self._held: dict[LRScheduler, list[float]] = {}

    def _begin(self, saved: dict[str, Any] | None, inner: Optimizer, model: nn.Module) -> None:
        """Make the optimizer, from the state of an earlier one if it was ``saved``; a trainer that
        begins again keeps its own.

        ``inner``: the trainer's optimizer, which has to be one that an own loop could have, and
        train the session's ``model``.
        """
        if self.opt is not None and not self._over:
            return
        weights = [p.detach().clone() for p in self.session.parameters] if saved is not None else []
        trained = all_parameters(inner)
        known = set(trained)
        # One that is unfrozen later must be seen.
        frozen = [p for p in model.parameters() if not p.requires_grad and p not in known]
        stand_in = Stepped([*trained, *frozen], stands_for=inner)
        self.opt = self.session.optimizer(stand_in, **self.options)
        if saved is None:
            return
        with torch.no_grad():
            for parameter, own in zip(self.session.parameters, weights, strict=True):
                parameter.copy_(own)
        self.opt.load_state_dict(saved)

    def _begun(self) -> OuterOptimizer:
        assert self.opt is not None  # the trainer begins before it steps
        return self.opt

    def _follow(self, schedules: Iterable[Any], steps: int) -> None:
        """Step the trainer's ``schedules`` of ``steps`` on to where the swarm is, as `follow` of an
        own loop's session does.
        """
        for schedule in schedules:
            if not goes_by_steps(schedule):
                log.warning(
                    "the trainer's %s cannot follow the swarm: it does not go by steps",
                    type(schedule).__name__,
                )
                continue
            before = schedule.last_epoch
            done = self.session.follow(schedule, steps)
            if done > before:
                log.info(
                    "the learning-rate schedule begins at step %d of %d, where the swarm is",
                    done,
                    steps,
                )
                self._schedules.append(schedule)
        self._schedule_steps = steps
        self._hold_ended()

    def _hold_ended(self) -> None:
        """Keep a schedule that followed the swarm at its end: beyond it some rise again, and
        others raise an error.
        """
        for schedule in self._schedules:
            if schedule.last_epoch < self._schedule_steps:
                continue
            groups = schedule.optimizer.param_groups
            rates = self._held.setdefault(schedule, [group["lr"] for group in groups])
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            schedule.last_epoch = self._schedule_steps - 1  # the trainer steps it once more

    def _show_slow(self) -> None:
        """Evaluate on the slow weights from now on, if the callback is to."""
        if self._slow and self.opt is not None and not self._over and not self._showing:
            self._shown.enter_context(self.opt.averaged())
            self._showing = True

    def _show_fast(self) -> None:
        """Give the model the weights back that are trained, as before training goes on or they are
        saved.
        """
        self._showing = False
        self._shown.close()

    def _finish(self) -> None:
        """Wait for pending exchanges, and average once more if the swarm does, once."""
        if not self._over:
            self._show_fast()
            self._over = True
            self.session.finish()


PROGRESS_S = 0.5  # least seconds between two events of progress
FILE = "metrics.jsonl"

log = logging.getLogger(__name__)


class RunError(ShoalError):
    """A run cannot go on from its checkpoint, or an argument is not one of its kind."""


class Run:
    """Folder of one peer's run in a loop of its own, and where else its curves go.

    All calls are for the thread that trains.

    Args:
        folder: of checkpoints and metrics.jsonl; created if it does not exist.
        model: what is trained; gets the newest checkpoint's state: make the run before the outer
            optimizer, which begins with it.
        inner: the inner optimizer, which gets its state too.
        name: of this node, for people; by default the machine's and the folder's.
        checkpoint_every: inner steps between two checkpoints; 0: at the end only.
        keep: checkpoints to keep, the newest.
        resume: False begins anew, beside the checkpoints that are there.
        metrics: port, or "HOST:PORT", at which Prometheus finds metrics. tensorboard: folder.
            wandb: project, or team/project.

    Raises:
        CheckpointError, RunError: the newest checkpoint is damaged, or of another model or
            optimizer.
        MetricsError: a package is missing, or a folder cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        inner: Inner,
        *,
        name: str | None = None,
        checkpoint_every: int = 500,
        keep: int = 3,
        resume: bool = True,
        metrics: int | str | None = None,
        tensorboard: str | None = None,
        wandb: str | None = None,
    ) -> None:
        self.folder = Path(expanded(folder)).absolute()
        self._model = model
        self._every = checkpoint_every
        self._inner = [inner] if isinstance(inner, Optimizer) else [*inner]
        self._made = forms(model.state_dict())
        self.step = 0
        """Inner steps done, with those before a resume."""
        self.extra: dict[str, Any] = {}
        """Values of your own in the checkpoints, such as the place in the data: as
        `shoal.node.checkpoint.store.save` takes.
        """
        if resume and listed(self.folder):
            self._restore()
        given = {
            "metrics": None if metrics is None else str(metrics),
            "tensorboard": tensorboard,
            "wandb": wandb,
        }
        named = {} if name is None else {"name": name}
        try:
            self._node = NodeSettings.model_validate({"folder": str(self.folder), **named, **given})
        except ValidationError as error:
            first = error.errors()[0]
            raise RunError(
                f"Cannot use {first['input']!r} as {first['loc'][-1]} ({first['msg']}): write it "
                "as for shoal up."
            ) from error
        self._sinks = open_sinks(self._node, log.warning)
        self._saver = CheckpointWriter(
            self.folder,
            keep=keep,
            state=self._state,
            notify=log.warning,
            check=self._check_can_resume,
        )
        self._recording: tuple[Session, OuterOptimizer, Metrics] | None = None
        self._base = 0
        self._shown = -math.inf
        self._losses: list[float] = []  # since the last round
        self._own_errors: dict[str, int] = {}

    def _state(self) -> dict[str, Any]:
        return {
            "model": dict(self._model.state_dict()),
            "inner": [one.state_dict() for one in self._inner],
            "extra": self.extra,
        }

    def _check_can_resume(self) -> None:
        """Raise TrainingError if no `Run` could go on from the present state.

        That of a model which is cut among ranks is gathered by the loop's own means.
        """
        model = self._model.state_dict()
        if any(hasattr(value, "to_local") for value in model.values()):
            return
        when = "the Run was: give the model its form before"
        for one in self._inner:
            check_can_resume(self._made, model, one.state_dict()["state"], when=when)

    def _restore(self) -> None:
        self.step, state = load(self.folder)
        try:
            for one, kept in zip(self._inner, state["inner"], strict=True):
                if holds_inner(kept):
                    initialise(one)
                    kept = {**kept, "state": put_together(kept["state"], one.state_dict()["state"])}
                one.load_state_dict(kept)
            load_whole_model(self._model, state["model"])
            self.extra = state["extra"]
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"The newest checkpoint in {str(self.folder)!r} is of another model or optimizer: "
                "choose another folder, or resume=False."
            ) from error

    @contextmanager
    def recording(self, session: Session, opt: OuterOptimizer) -> Iterator[Run]:
        """Record the training of ``opt`` in ``session`` while the block runs, once.

        The end waits for pending exchanges (`Session.finish`) and saves a last checkpoint. After an
        exception nothing is saved: it may have come in the middle of a step.

        Raises:
            RunError: the run was recorded before. MetricsError: metrics cannot be written where
                they were asked for.
            CheckpointError: the last checkpoint was not saved; the model and the metrics are
                complete all the same.
        """
        if self._recording is not None:
            raise RunError("A run is recorded once: make another Run for the next session.")
        self._base = self.step - opt.steps
        self._sinks.begin(about(self._node.name, session.membership, opt.parameters[0].device))
        with (
            closing(self._sinks),
            closing(Metrics(self.folder / FILE, log.warning, self._sinks)) as metrics,
        ):
            self._recording = session, opt, metrics
            metrics.write(
                "start",
                peer=session.membership.identity.peer_id,
                name=self._node.name,
                **self._record(session).model_dump(mode="json"),
            )
            session.on_report = self._after_round
            failure: str | None = None
            try:
                yield self
                session.finish()
                failure = self._saver.last(self.step)
            finally:
                session.on_report = None
                metrics.write(
                    "end",
                    **self._record(session).model_dump(mode="json"),
                    internal_errors=session.membership.host.internal_errors.report(),
                    trained_alone=session.trained_alone(),
                )
        if failure is not None:
            raise CheckpointError(failure)

    def stepped(self, loss: float | None = None) -> None:
        """Say that a step is over: after ``opt.step()``, with its training loss, nats, which others
        see too (`Session.report`).

        At the first one CheckpointError, if a checkpoint cannot hold what the model, the optimizer
        or ``extra`` keeps, and TrainingError, if no run could go on from it.
        """
        session, opt, metrics = self._begun()
        self.step = self._base + opt.steps
        if loss is not None:
            self._losses.append(loss)
            session.report(loss)
        now = time.monotonic()
        if now - self._shown >= PROGRESS_S:
            self._shown = now
            metrics.progress(self._record(session))
        self._saver.due |= self._every > 0 and self.step % self._every == 0
        self._saver.turn(self.step)

    def evaluated(self, loss: float) -> None:
        """Say what the held-out loss is after this step, nats."""
        session, _, metrics = self._begun()
        session.evaluated(loss)
        metrics.write("evaluation", step=self.step, held_out=loss)
        metrics.progress(self._record(session))

    def _record(self, session: Session) -> NodeRecord:
        """Return the session's record, whose steps are those of this folder."""
        record = session.record()
        progress = record.progress.model_copy(update={"step": self.step})
        return record.model_copy(update={"progress": progress})

    def _begun(self) -> tuple[Session, OuterOptimizer, Metrics]:
        if self._recording is None:
            raise RunError(
                "Nothing is recorded yet: put the loop into `with run.recording(session, opt):`."
            )
        return self._recording

    def _after_round(self, info: RoundInfo, report: RoundReport, done: Round) -> None:
        session, opt, metrics = self._begun()
        me = session.membership.identity.peer_id
        partner = next((peer for peer in info.members if peer != me), None)
        own = session.membership.host.internal_errors.counts()
        if own != self._own_errors:
            self._own_errors = own
            metrics.write("internal_errors", **own)
        loss = real(sum(self._losses) / len(self._losses)) if self._losses else None
        self._losses = []
        done = done.model_copy(update={"step": self._base + done.step, "loss": loss})
        progress = self._record(session).progress
        metrics.round(RoundRecord.of(done, info, report, progress, opt.fragments, partner=partner))
