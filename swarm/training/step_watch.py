"""What a loop of one's own is told between its steps: that its session is over, or that its
learning rate is not the swarm's.

Also the learning-rate schedule of a node that joins late, put where the swarm is.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

from torch.optim.lr_scheduler import LRScheduler

from shoal.swarm.training.session_setup import SessionError

INITIAL_RATE = "initial_lr"
"""What a scheduler of torch puts into the groups of its optimizer."""

_awaited: WeakSet[threading.Thread] = WeakSet()

log = logging.getLogger(__name__)


class StepWatch:
    """Watch over one session's steps.

    ``late``: the inner steps that the swarm had behind it when this node joined.
    """

    def __init__(self) -> None:
        self.late = 0
        self._told_over = False

    def stepped(self, groups: Sequence[Mapping[str, Any]], *, over: bool) -> None:
        """Note a step of the optimizer with the parameter ``groups``; ``over``: the session was
        closed.
        """
        if over and not self._told_over:
            self._told_over = True
            log.warning(
                "this session is over, so this step and those that follow are averaged with "
                "nobody: train within its `with` block"
            )
        late, self.late = self.late, 0
        if late and any(INITIAL_RATE in group for group in groups):
            log.warning(
                "this node joined a swarm that has some %d steps behind it, and its learning-rate "
                "schedule begins at 0: call session.follow(schedule, steps) before the first step",
                late,
            )


def goes_by_steps(schedule: object) -> bool:
    """Return whether ``schedule`` has a place that can be reached by stepping it; one that goes by
    a loss has none.
    """
    return isinstance(schedule, LRScheduler) and not hasattr(schedule, "mode_worse")


def follow(schedule: LRScheduler, progress: int, steps: int) -> int:
    """Step ``schedule`` on to ``progress``, at most to ``steps``; return how many steps it has
    behind it.

    SessionError if it is one that steps by a loss.
    """
    if not goes_by_steps(schedule):
        raise SessionError(
            "A schedule that follows the swarm is one by steps, such as LambdaLR, and not "
            f"{type(schedule).__name__}: choose another, or set its rate yourself."
        )
    goal = min(progress, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects a step of the optimizer before each
        while schedule.last_epoch < goal:
            schedule.step()
    return int(schedule.last_epoch)


def outlive_main() -> None:
    """Let the main thread's end wait for this thread, which trains.

    SessionError if the main thread has ended already.

    Python waits for it in any case, unless it is a daemon, but ends the thread pools before, which
    the network needs.
    """
    thread = threading.current_thread()
    if thread in _awaited or thread is threading.main_thread():
        return
    if not threading.main_thread().is_alive():
        raise SessionError(
            "The main thread has ended, and with it the thread pools that a session needs: let it "
            "wait for this thread, by thread.join()."
        )
    _awaited.add(thread)
    register = getattr(threading, "_register_atexit", None)  # what the thread pools themselves use
    if register is not None and not thread.daemon:
        register(thread.join)
