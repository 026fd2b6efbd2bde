"""What the callbacks of trainers share: one outer optimizer from the begin of training to its end, and the weights to evaluate."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from shoal.optim import OuterOptimizer
from shoal.swarm.errors import ShoalError
from shoal.swarm.training.session import Session


class TakingPart:
    """Base of a callback that takes part in the swarm of ``session`` while a trainer trains, once.

    Args:
        session: of this peer; its state is the model that is trained.
        evaluate: "fast" evaluates the weights that this peer trains, "slow" the averaged ones.
        options: as for `Session.optimizer`.
    """

    def __init__(self, session: Session, *, evaluate: str = "fast", **options: Any) -> None:
        if evaluate not in ("fast", "slow"):
            raise ShoalError(f'The weights to evaluate are "fast" or "slow", not {evaluate!r}: choose one of the two.')
        self.session, self.options = session, options
        self.opt: OuterOptimizer | None = None
        """The outer optimizer, from the begin of training on."""
        self._slow, self._over, self._shown = evaluate == "slow", False, ExitStack()
        self._showing = False  # the slow weights

    def _begin(self, saved: dict[str, Any] | None) -> None:
        """Make the optimizer, from the state of an earlier one if it was ``saved``; a trainer that begins again keeps its own."""
        if self.opt is None or self._over:
            self.opt = self.session.optimizer(resume=saved, **self.options)

    def _begun(self) -> OuterOptimizer:
        assert self.opt is not None  # the trainer begins before it steps
        return self.opt

    def _show_slow(self) -> None:
        """Evaluate on the slow weights from now on, if the callback is to."""
        if self._slow and self.opt is not None and not self._over and not self._showing:
            self._shown.enter_context(self.opt.averaged())
            self._showing = True

    def _show_fast(self) -> None:
        """Give the model the weights back that are trained, as before training goes on or they are saved."""
        self._showing = False
        self._shown.close()

    def _finish(self) -> None:
        """Wait for pending exchanges, and average once more if the swarm does, once."""
        if not self._over:
            self._show_fast()
            self._over = True
            self.session.finish()
