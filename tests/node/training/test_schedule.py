"""A schedule of another length goes on as if it had had that length from the start, and none goes
on beyond its end.
"""

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

from shoal.node.checkpoint import store as checkpoint
from shoal.swarm.settings.training import TrainSettings
from tests.support import trainer_loops as loops
from tests.support.trainer_loops import Small

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FIRST, LENGTH = 10, 20


def hf(name, **options):
    def make(optimizer, steps):
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        return getattr(transformers, name)(
            optimizer, num_warmup_steps=3, num_training_steps=steps, **options
        )

    return make


class Halving:
    """A function with fields of its own, which a scheduler of torch saves and would load again."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, step):
        return 0.5 ** (4 * step / self.steps)


class Own(torch_schedules.LRScheduler):
    """A subclass of a user's."""

    def __init__(self, optimizer, steps):
        self.total = steps
        super().__init__(optimizer)

    def get_lr(self):
        return [base * (1 - self.last_epoch / self.total) for base in self.base_lrs]


def sequential(optimizer, steps):
    rise = torch_schedules.LinearLR(optimizer, 0.1, total_iters=3)
    return torch_schedules.SequentialLR(
        optimizer,
        [rise, torch_schedules.CosineAnnealingLR(optimizer, T_max=steps - 3)],
        milestones=[3],
    )


MADE = {
    "cosine": lambda opt, steps: torch_schedules.CosineAnnealingLR(opt, T_max=steps),
    "linear": lambda opt, steps: torch_schedules.LinearLR(opt, 1.0, 0.1, total_iters=steps),
    "onecycle": lambda opt, steps: torch_schedules.OneCycleLR(opt, max_lr=0.3, total_steps=steps),
    "sequential": sequential,
    "chained": lambda opt, steps: torch_schedules.ChainedScheduler(
        [torch_schedules.ConstantLR(opt, 0.5, steps // 2), torch_schedules.ExponentialLR(opt, 0.9)]
    ),
    "lambda": lambda opt, steps: torch_schedules.LambdaLR(opt, lambda step: 1 - step / steps),
    "lambdas with fields": lambda opt, steps: torch_schedules.LambdaLR(opt, Halving(steps)),
    "multiplied": lambda opt, steps: torch_schedules.MultiplicativeLR(
        opt, lambda step: 1 - 1 / steps
    ),
    "polynomial": lambda opt, steps: torch_schedules.PolynomialLR(
        opt, total_iters=steps, power=2.0
    ),
    "restarts": lambda opt, steps: torch_schedules.CosineAnnealingWarmRestarts(opt, T_0=steps // 4),
    "steps": lambda opt, steps: torch_schedules.MultiStepLR(opt, [steps // 2, steps - 2]),
    "cyclic": lambda opt, steps: torch_schedules.CyclicLR(
        opt, 0.01, 0.1, step_size_up=steps // 4, cycle_momentum=False
    ),
    "of a user": Own,
    "transformers cosine": hf("get_cosine_schedule_with_warmup"),
    "transformers linear": hf("get_linear_schedule_with_warmup"),
    "transformers polynomial": hf("get_polynomial_decay_schedule_with_warmup", power=2.0),
    "none": lambda opt, steps: None,
}


class Scheduled(Small):
    def __init__(self, make):
        self.make = make

    def inner_optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.05)

    def lr_scheduler(self, optimizer, steps):
        return self.make(optimizer, steps)


def trainer(make, steps):
    return loops.trainer(Scheduled(make), TrainSettings(steps=steps, seed=1))


def settings(made):
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in made.opt.param_groups
    ]


def followed(made, count):
    found = [settings(made)]
    for _ in range(count):
        made.schedule.step()
        found.append(settings(made))
    return found


def saved(tmp_path, made):
    checkpoint.save(tmp_path, made.opt.steps, made.state())
    return checkpoint.load(tmp_path)[1]


@pytest.mark.parametrize("name", MADE)
def test_more_steps_have_the_rates_of_a_longer_run(tmp_path, name):
    """Fault: the old length comes back with the checkpoint: the cosine rises again, OneCycle ends
    with an error.
    """
    make = MADE[name]
    short = trainer(make, FIRST)
    for _ in range(FIRST):
        short.step()
    again = trainer(make, LENGTH)
    assert again.resume(saved(tmp_path, short)) is (name == "none")  # whose rate just stays
    assert (again.opt.steps, again.schedule.done) == (FIRST, FIRST)
    whole = trainer(make, LENGTH)
    for _ in range(FIRST):
        whole.schedule.step()
    assert followed(again, LENGTH - FIRST) == followed(whole, LENGTH - FIRST)


@pytest.mark.parametrize("name", MADE)
def test_the_same_schedule_goes_on_as_it_was(tmp_path, name):
    make = MADE[name]
    whole = trainer(make, LENGTH)
    for _ in range(7):
        whole.step()
    again = trainer(make, LENGTH)
    assert again.resume(saved(tmp_path, whole)) is True
    assert followed(again, 13) == followed(whole, 13)


@pytest.mark.parametrize("name", MADE)
def test_going_forward_stays_at_the_end(name):
    """Fault: OneCycle raises beyond its end, a cosine rises again; a late node does more steps than
    are left of a schedule.
    """
    jumped, stepped = trainer(MADE[name], LENGTH), trainer(MADE[name], LENGTH)
    for _ in range(12):
        stepped.schedule.step()
    jumped.schedule_at(12)
    assert settings(jumped) == settings(stepped)
    jumped.schedule_at(5)
    assert (settings(jumped), jumped.schedule.done) == (settings(stepped), 12)
    jumped.schedule_at(2**60)
    at_end = followed(jumped, 3)
    assert jumped.schedule.done == LENGTH
    for _ in range(100):
        stepped.schedule.step()
    assert at_end == [settings(stepped)] * 4


def test_other_settings_of_the_groups_stay_those_of_the_checkpoint(tmp_path):
    short = trainer(MADE["onecycle"], FIRST)
    for _ in range(FIRST):
        short.step()
    short.opt.param_groups[0]["weight_decay"] = 0.25
    again = trainer(MADE["onecycle"], LENGTH)
    again.resume(saved(tmp_path, short))
    assert again.opt.param_groups[0]["weight_decay"] == 0.25
    assert (
        again.opt.param_groups[0]["betas"] != short.opt.param_groups[0]["betas"]
    )  # OneCycle's own


def test_a_long_schedule_of_a_function_is_reached_at_once():
    calls = []
    made = trainer(
        lambda opt, steps: torch_schedules.LambdaLR(
            opt, lambda step: calls.append(step) or 1 / (1 + step)
        ),
        10**9,
    )
    made.schedule_at(10**9 - 1)
    assert made.opt.param_groups[0]["lr"] == pytest.approx(0.05 / 10**9)
    assert len(calls) == 2


def test_a_run_without_an_end_steps_its_schedule_for_ever():
    made = trainer(lambda opt, steps: torch_schedules.ExponentialLR(opt, 0.5), 0)
    followed(made, 30)
    assert made.schedule.done == 30


HALF = TrainSettings(steps=LENGTH, seed=1)


@pytest.mark.parametrize("name", MADE)
def test_a_changed_rate_is_the_schedules_times_a_factor(name):
    """Mutants: the factor is multiplied in at every step; a chainable schedule goes on from the
    scaled rate.
    """
    plain, made = trainer(MADE[name], LENGTH), trainer(MADE[name], LENGTH)
    rates = [[group["lr"] for group in groups] for groups in followed(plain, 12)]
    followed(made, 5)
    made.change(lr=0.0125, steps=LENGTH, length=LENGTH)  # a quarter of the peak, 0.05
    scaled = [[group["lr"] for group in groups] for groups in followed(made, 7)]
    assert scaled == [[rate / 4 for rate in step] for step in rates[5:]]
    made.change(lr=None, steps=LENGTH, length=LENGTH)
    assert [group["lr"] for group in made.opt.param_groups] == rates[12]


@pytest.mark.parametrize("name", MADE)
def test_changed_length_has_the_rates_from_the_start(name):
    """A changed length has the rates of one that was so from the start."""
    made, whole = trainer(MADE[name], FIRST), trainer(MADE[name], LENGTH)
    followed(made, FIRST)
    followed(whole, FIRST)
    made.change(lr=0.025, steps=LENGTH, length=LENGTH)
    whole.change(lr=0.025, steps=LENGTH, length=LENGTH)
    assert followed(made, LENGTH - FIRST) == followed(whole, LENGTH - FIRST)
    assert (made.train.steps, made.schedule.done) == (LENGTH, LENGTH)


@pytest.mark.parametrize("name", MADE)
def test_a_changed_run_is_resumed_with_its_rates(tmp_path, name):
    """Mutants: the factor is lost, or counts twice, in a run that is resumed before or after it
    knows of the change.
    """
    whole = trainer(MADE[name], FIRST)
    for _ in range(4):
        whole.step()
    whole.change(lr=0.0125, steps=LENGTH, length=LENGTH)
    for _ in range(3):
        whole.step()
    state = saved(tmp_path, whole)
    told_before, told_after = trainer(MADE[name], FIRST), trainer(MADE[name], FIRST)
    told_before.change(lr=0.0125, steps=LENGTH, length=LENGTH)
    assert told_before.resume(state) is True
    told_after.resume(state)
    told_after.change(lr=0.0125, steps=LENGTH, length=LENGTH)
    rates = followed(whole, 9)
    assert followed(told_before, 9) == rates
    assert followed(told_after, 9) == rates


def test_groups_keep_their_proportion():
    class Two(Scheduled):
        def inner_optimizer(self, params):
            first, *rest = params
            groups = [{"params": [first], "lr": 0.5}, {"params": rest, "lr": 0.125}]
            return torch.optim.SGD(groups, lr=0.1)

    made = loops.trainer(Two(MADE["none"]), HALF)
    made.change(lr=0.25, steps=LENGTH, length=LENGTH)
    assert [group["lr"] for group in made.opt.param_groups] == [0.25, 0.0625]


def test_a_run_ends_at_the_changed_number_of_steps():
    made = loops.trainer(Scheduled(MADE["none"]), TrainSettings(steps=50, seed=1))
    ended = []

    def shorten():
        if made.opt.steps == 3:
            made.change(lr=None, steps=7, length=7)
        ended.append(made.opt.steps)

    made.run(after_step=shorten)
    assert ended[-1] == made.opt.steps == 7
    assert made.schedule.length == 7
