"""What a loop of one's own is told between its steps, and the schedule of a node that joins
late.
"""

import subprocess
import sys
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

import shoal
from shoal.optim import NoLoCo
from shoal.swarm.training.session_setup import SessionError
from shoal.swarm.training.step_watch import StepWatch, follow
from tests.support.session_loops import EVERY, HERE, beside, loop, model, sgd

IN_A_THREAD = """
import threading
import torch
import shoal
from tests.support.session_loops import HERE, loop, model, sgd

def train():
    module = model(0)
    with shoal.create(module, every=5, network=HERE, wait_s=0.2) as session:
        opt = session.optimizer(sgd(module))
        begun.set()
        for _ in range(4):
            loop(opt, module, 1, steps=20)
    print("steps", opt.steps)

begun = threading.Event()
thread = threading.Thread(target=train)
"""
LATE = """
thread.start()
begun.wait()
"""
TOO_LATE = """
original = train
def train():
    threading.main_thread().join()
    original()
threading.Thread(target=train).start()
"""


def run(script):
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    return done.stdout, done.stderr


@pytest.mark.ci
def test_thread_trains_on_after_main():
    """A thread that trains on after main has ended trains to its end."""
    out, err = run(IN_A_THREAD + LATE)
    assert "cannot schedule" not in err
    assert out == "steps 80\n"


@pytest.mark.ci
def test_a_session_begun_after_the_end_of_main_is_refused():
    out, err = run(IN_A_THREAD + TOO_LATE)
    assert out == ""
    assert (
        "The main thread has ended, and with it the thread pools that a session needs: let it wait "
        "for this thread, by thread.join()." in err
    )


def test_inner_step_is_reported_once():
    """Who steps the inner optimizer is told at once and once."""
    module = model(0)
    inner = sgd(module)
    opt = NoLoCo(inner, shoal.Alone(), every=EVERY, lag=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop(opt, module, 1, steps=3)
        inner.step()
        assert not said  # a caller of after_inner() steps it so
        for _ in range(4):
            inner.step()
        opt.finish()
    assert [str(one.message) for one in said] == [
        "the inner optimizer is stepped and not the outer one, so nothing is averaged: call step() "
        "of the outer optimizer (of what session.optimizer returned), which steps the inner one"
    ]


def test_later_outer_optimizer_watches_alone():
    """An inner optimizer of a later outer one is watched by that alone."""
    module = model(0)
    inner = sgd(module)
    earlier = NoLoCo(inner, shoal.Alone(), every=EVERY, lag=0)
    earlier.finish()
    later = NoLoCo(inner, shoal.Alone(), every=EVERY, lag=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(later, module, 1, steps=2 * EVERY)


def test_step_after_the_session_is_said_once(caplog):
    """A step after the session says once that it is averaged with nobody."""
    module = model(0)
    with shoal.create(module, every=EVERY, network=HERE, wait_s=0.2) as session:
        opt = session.optimizer(sgd(module))
        loop(opt, module, 1, steps=2)
    loop(opt, module, 1, steps=3)
    told = [message for message in caplog.messages if message.startswith("this session is over")]
    assert told == [
        "this session is over, so this step and those that follow are averaged with nobody: train "
        "within its `with` block"
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda opt: LambdaLR(opt, lambda step: 1 / (1 + step)),
        lambda opt: CosineAnnealingLR(opt, 100),
        lambda opt: OneCycleLR(opt, 0.1, total_steps=100, cycle_momentum=False),
    ],
)
@pytest.mark.parametrize(("progress", "expected"), [(37, 37), (2**40, 100), (0, 0)])
def test_a_schedule_follows_the_swarm_but_not_beyond_its_end(make, progress, expected):
    schedule, by_hand = (make(sgd(model(0))) for _ in range(2))
    assert follow(schedule, progress, 100) == expected
    for _ in range(expected):
        by_hand.optimizer.step()
        by_hand.step()
    assert schedule.get_last_lr() == by_hand.get_last_lr()
    assert follow(schedule, progress, 100) == expected  # it is there


def test_a_schedule_by_the_loss_cannot_follow():
    with pytest.raises(SessionError) as raised:
        follow(ReduceLROnPlateau(sgd(model(0))), 5, 100)
    assert str(raised.value) == (
        "A schedule that follows the swarm is one by steps, such as LambdaLR, and not "
        "ReduceLROnPlateau: choose another, or set its rate yourself."
    )


def test_late_schedule_is_reported(caplog):
    """A late node is told of a schedule that begins anew."""
    opt = sgd(model(0))
    watch = StepWatch()
    watch.late = 40
    watch.stepped(opt.param_groups, over=False)
    assert not caplog.messages  # it has none
    LambdaLR(opt, lambda step: 1.0)
    watch.late = 40
    for _ in range(2):
        watch.stepped(opt.param_groups, over=False)
    assert caplog.messages == [
        "this node joined a swarm that has some 40 steps behind it, and its learning-rate schedule "
        "begins at 0: call session.follow(schedule, steps) before the first step"
    ]


def test_advanced_schedule_is_not_reported(caplog):
    """A session steps a late schedule on and says nothing more."""
    begin = model(0)
    first = shoal.create(begin, every=EVERY, network=HERE, wait_s=0.2, lag=0)
    opt = first.optimizer(sgd(begin))
    loop(opt, begin, 1, steps=4 * EVERY)

    def bert(end):
        other = model(1)
        with shoal.join(first.link, other, network=HERE) as late:
            mine = late.optimizer(sgd(other))
            schedule = LambdaLR(mine, lambda step: 1 / (1 + step))
            at = late.follow(schedule, 10_000_000)
            loop(mine, other, 2, steps=1)
            end()
            return at, schedule.last_epoch

    at, epoch = beside(first, lambda: loop(opt, begin, 1, steps=1), bert)
    assert at == epoch >= 4 * EVERY
    assert not any("schedule begins" in message for message in caplog.messages)


@pytest.mark.ci
def test_a_compiled_step_is_averaged_as_a_plain_one():
    module = model(0)
    with shoal.create(module, every=EVERY, network=HERE, wait_s=0.2, lag=0) as session:
        opt = session.optimizer(sgd(module))
        step = torch.compile(lambda: opt.step(), backend="eager")
        for _ in range(2 * EVERY):
            module(torch.randn(3, 4)).sum().backward()
            step()
            opt.zero_grad()
        assert (opt.steps, opt.round) == (2 * EVERY, 2)
