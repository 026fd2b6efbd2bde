"""What a training loop of one's own keeps and shows: checkpoints, metrics.jsonl, Prometheus,
TensorBoard and Weights & Biases.

    # goes on from the newest checkpoint there, if there is one
    run = shoal.Run("runs/anna", model, inner, tensorboard="curves")
    with shoal.create(state=model, every=25) as s:
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
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer

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
from shoal.optim.outer.inner import Inner
from shoal.swarm.errors import ShoalError
from shoal.swarm.training.record_keeper import RoundReport
from shoal.swarm.training.session import Session
from shoal.swarm.wire.envelope import real
from shoal.swarm.wire.record import NodeRecord, Round

log = logging.getLogger(__name__)

FILE = "metrics.jsonl"
PROGRESS_EVERY_S = 0.5
"""Between two events of progress, at least."""


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
        given = {"folder": str(self.folder), "tensorboard": tensorboard, "wandb": wandb}
        if name is not None:
            given["name"] = name
        if metrics is not None:
            given["metrics"] = str(metrics)
        try:
            self._node = NodeSettings.model_validate(given)
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
        self._losses: list[float] = []
        """Since the last round."""
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

        Raises at the first one CheckpointError, if a checkpoint cannot hold what the model, the
        optimizer or ``extra`` keeps, and TrainingError, if no run could go on from it.
        """
        session, opt, metrics = self._begun()
        self.step = self._base + opt.steps
        if loss is not None:
            self._losses.append(loss)
            session.report(loss)
        now = time.monotonic()
        if now - self._shown >= PROGRESS_EVERY_S:
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
