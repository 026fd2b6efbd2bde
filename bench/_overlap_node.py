"""One node of bench/overlap.py, a process of its own: `python -m bench._overlap_node SETUP`, where
SETUP is JSON.

Told what to do by JSON lines on stdin, it answers with JSON lines on stdout, and ends, with all
that it forked, at the end of stdin (within seconds even if it is then in the middle of an exchange)
or when its time is up.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

import torch

from bench._end import answering, overdue, reap
from bench._overlap_methods import KINDS, Method, Setup
from bench._pace import Pace, PacedModel

LEAVE_S = 12.0


class Run:
    """The training loop, the same for every method."""

    def __init__(self, method: Method, setup: Setup) -> None:
        self.method, self.setup = method, setup
        self.pace = Pace(setup.step_s)
        model = PacedModel(setup.layers, setup.width, self.pace, gradients=method.sends_gradients)
        inner = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)
        inner.register_step_post_hook(lambda *_: self.pace.until(1.0))
        self.model, self.opt = method.wrap(model, inner)

    def step(self) -> None:
        self.pace.begin()
        self.opt.zero_grad()
        loss = self.model(torch.ones(1, requires_grad=True))
        loss.backward()
        self.opt.step()

    def window(self, steps: int) -> dict[str, Any]:
        """``steps`` inner steps and what they took."""
        rounds, waited = self.method.rounds(), self.method.waited() or 0.0
        alone = self.method.alone() or 0
        began = time.monotonic()
        for _ in range(steps):
            self.step()
        wall = time.monotonic() - began
        after, alone_after = self.method.waited(), self.method.alone()
        return {
            "wall_s": wall,
            "busy_s": steps * self.setup.step_s,
            "waited_s": None if after is None else after - waited,
            "rounds": self.method.rounds() - rounds,
            "alone": None if alone_after is None else alone_after - alone,
            "lag": getattr(self.opt, "lag", None),
        }


def listen(orders: queue.Queue[str]) -> None:
    """Hand on stdin's lines; after its end this process has some seconds to leave by itself.

    By a file of its own: what hivemind forks closes ``sys.stdin``, and would wait for ever for the
    lock that a reader of it holds.
    """
    with os.fdopen(os.dup(0)) as lines:
        for line in lines:
            orders.put(line)
    orders.put("")
    time.sleep(LEAVE_S)
    overdue()


def main(setup: Setup, limit: float) -> None:
    say = answering(limit)
    torch.set_num_threads(1)
    try:
        method = KINDS[setup.method](setup)
        say(address=method.address())
        run: Run | None = None
        orders: queue.Queue[str] = queue.Queue()
        threading.Thread(target=listen, args=(orders,), daemon=True).start()
        while line := orders.get():
            order = json.loads(line)
            if order["do"] == "meet":
                method.meet(order["all"])
                run = Run(method, setup)
                say(met=True)
            elif order["do"] == "run" and run is not None:
                say(**run.window(order["steps"]))
        method.close()
    finally:
        reap()


if __name__ == "__main__":
    main(Setup(**json.loads(sys.argv[1])), float(sys.argv[2]))
