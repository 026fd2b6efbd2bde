"""Node of ``python -m bench.chaos``: ``python -m bench.chaos.actor LOG STEP_S LIE up|join ...``,
the rest as for ``shoal``.

It notes in LOG when each inner step was done, takes at least STEP_S seconds for one (so that many
nodes fit on few cores), and sends LIE in place of its contribution. ``shoal up`` has no such
option, so that harming a swarm takes code of one's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bench.chaos.actor_options import HONEST
from shoal.node.cli import main as cli
from shoal.node.training.trainer import Trainer
from shoal.optim.exchange.base import Contribution, Handle, Mean
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.pair.exchange import PairExchange

_PR_SET_PDEATHSIG = 1  # Linux's prctl: "send me this signal when my parent is gone"

Lie = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
LIES: dict[str, Lie] = {
    "sign-flip": lambda own, first: [-tensor for tensor in own],
    "x1000": lambda own, first: [1000 * tensor for tensor in own],
    "nan": lambda own, first: [torch.full_like(tensor, torch.nan) for tensor in own],
    "stale": lambda own, first: list(first),
}
"""False contributions by name, made from the honest contribution and from that of the first round.
"""


class Deaf(Handle):
    """Handle of a hostile node on an exchange: it completes the exchange, but discards the mean, so
    its own run stays sound.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def done(self) -> bool:
        """Return whether the exchange is done."""
        return self._handle.done()

    def result(self, deadline: float | None = None) -> Mean | None:
        """Wait for the exchange, and forget its outcome."""
        self._handle.result(deadline)
        return None


def lie(how: Lie, kinds: Sequence[type] = (PairExchange, GroupExchange)) -> None:
    """Let every exchange of this process send what ``how`` makes of the contribution."""
    for kind in kinds:
        setattr(kind, "start", _lying(getattr(kind, "start"), how))  # noqa: B009, B010 (mypy allows no assignment)


def _lying(start: Callable[..., Handle], how: Lie) -> Callable[..., Deaf]:
    first: dict[int, list[Tensor]] = {}

    def lying(self: object, contribution: Contribution) -> Deaf:
        own = [tensor.detach().clone() for tensor in contribution.tensors]
        lie = how(own, first.setdefault(contribution.key.fragment, own))
        return Deaf(start(self, replace(contribution, tensors=lie)))

    return lying


def keep_time(log: Path, step_s: float) -> None:
    """Let each inner step take ``step_s`` seconds at least, besides waiting for others, and note it
    in ``log``.
    """
    step = Trainer.step
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    busy = 0.0

    def timed(trainer: Trainer) -> None:
        nonlocal busy
        time.sleep(max(step_s - busy, 0.0))
        began, waited = time.monotonic(), trainer._waited()
        step(trainer)
        busy = time.monotonic() - began - (trainer._waited() - waited)
        os.write(file, f"{time.time():.4f} {trainer.opt.steps}\n".encode())

    setattr(Trainer, "step", timed)  # noqa: B010


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent is gone, even while it is stopped."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Run the node."""
    log, step_s, what = sys.argv[1:4]
    del sys.argv[1:4]
    die_with_parent()
    keep_time(Path(log), float(step_s))
    if what != HONEST:
        lie(LIES[what])
    cli.main()


if __name__ == "__main__":
    main()
