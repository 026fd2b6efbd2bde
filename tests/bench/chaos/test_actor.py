"""What a node of a chaos run does besides training."""

import os
import subprocess
import sys
import time
from typing import ClassVar

import pytest
import torch

from bench.chaos import actor, processes
from bench.chaos.actor_options import LIES
from bench.chaos.run import first_accepted, read_events
from shoal.node.training.trainer import Trainer
from shoal.optim.exchange.base import Contribution, Mean, RoundKey


def heard_by_others(how):
    """What each of two rounds sends, and what the liar gets back."""

    class Exchange:
        sent: ClassVar = []

        def start(self, contribution):
            self.sent.append([tensor.tolist() for tensor in contribution.tensors])
            return Answer()

    class Answer:
        def done(self):
            return True

        def result(self, deadline):
            return Mean([torch.zeros(2)], 2.0, ("a", "b"))

    actor.lie(actor.LIES[how], [Exchange])
    for number in range(2):
        handle = Exchange().start(Contribution(RoundKey("run", number), [torch.tensor([1.0, 2.0 + number])]))
        assert handle.done()
        assert handle.result() is None
    return Exchange.sent


def test_the_command_offers_what_the_actor_can_tell():
    assert tuple(actor.LIES) == LIES


@pytest.mark.parametrize(("how", "second"), [("sign-flip", [-1.0, -3.0]), ("x1000", [1000.0, 3000.0]), ("stale", [1.0, 2.0])])
def test_a_liar_sends_something_else_and_learns_nothing(how, second):
    assert heard_by_others(how)[1] == [second]


def test_nan():
    assert all(value != value for value in heard_by_others("nan")[0][0])


def test_each_step_is_noted_and_takes_its_time(tmp_path, monkeypatch):
    class Fake:
        steps, done = 0, []

        @property
        def opt(self):
            return self

        def _waited(self):
            return 0.0

    def step(self):
        Fake.steps += 1

    slept = []
    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(time, "sleep", slept.append)
    actor.keep_time(tmp_path / "log", 0.5)
    for _ in range(3):
        Trainer.step(Fake())
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [int(step) for _, step in lines] == [1, 2, 3]
    assert [float(at) for at, _ in lines] == sorted(float(at) for at, _ in lines)
    assert slept[0] == 0.5
    assert all(0.4 < seconds <= 0.5 for seconds in slept)


def test_what_the_kernel_knows_of_this_process(monkeypatch):
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "SHOAL_TEST": "mark"},
    )  # fmt: skip
    try:
        child.stdout.readline()
        if not processes.PROC.exists():
            pytest.skip("this system has no /proc")
        assert processes.resident_mb(child.pid) > 1
        assert processes.descriptors(child.pid) >= 3
        assert child.pid in processes.descendants(os.getpid())
        assert processes.marked("SHOAL_TEST=mark") == [child.pid]
    finally:
        child.communicate(b"\n")
    assert processes.resident_mb(child.pid) is None
    assert processes.descriptors(child.pid) is None
    assert processes.marked("SHOAL_TEST=mark") == []


def test_a_line_of_metrics_that_a_kill_cut_off_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_events(path) == []
    line = '{"event": "round", "partner": "b", "time": 5}'
    lines = [line.replace("5", "1").replace('"b"', "null"), line[:9], line, ""]
    path.write_text("\n".join(lines))
    events = read_events(path)
    assert len(events) == 2
    assert first_accepted(events, 0, 9) == 5
    assert first_accepted(events, 6, 9) is None
    assert first_accepted(events, 0, 5) is None
