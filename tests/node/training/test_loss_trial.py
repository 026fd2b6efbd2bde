"""Losses of a partner's weights, computed with a copy of the model beside training."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.node.runtime import join
from shoal.node.runtime.join import try_partners
from shoal.node.task import Shard, Task
from shoal.optim import Alone, NoLoCo
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.training import loss_trial
from shoal.swarm.training.loss_trial import LossTrial

SHARD = Shard(0, 1, 3)


class Line(Task):
    """y = w x + b, with targets 0, so that the loss is the mean of (w x + b)^2; x is 1 in every
    batch.
    """

    def model(self):
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def batches(self, shard):
        return (torch.ones(2, 1) for _ in count())

    def loss(self, model, batch):
        return model(batch).square().mean()


def trial(model, opt, log=print):
    return LossTrial(Line().loss, Line().batches(SHARD), model, opt, log)


def around(model, /, **options):
    return NoLoCo(torch.optim.SGD(model.parameters(), lr=0.1), Alone(), every=2, lag=0, **options)


def trainer_of(model, task, check_loss=True, ranks=1):
    """What ``try_partners`` needs of a trainer."""
    return SimpleNamespace(
        outer=SimpleNamespace(check_loss=check_loss),
        task=task,
        layout=SimpleNamespace(ranks=ranks),
        model=model,
        whole=around(model),
        shard=SHARD,
        inner_step=SimpleNamespace(autocast=nullcontext, device=torch.device("cpu")),
    )


def weights(weight, bias):
    return [torch.tensor([[float(weight)]]), torch.tensor([float(bias)])]


def test_trial_losses_are_of_own_mean_and_others():
    """The losses of the own weights of the mean and of the others."""
    model = Line().model()
    assert trial(model, around(model))(0, weights(1, 1), weights(3, -1)) == (4.0, 4.0, 4.0)
    assert trial(model, around(model))(0, weights(1, 0), weights(-3, 0)) == (1.0, 1.0, 9.0)
    assert all(
        not parameter.any() for parameter in model.parameters()
    )  # what is trained is not touched


def test_slow_weights_and_pseudo_gradients_stand_for_their_difference():
    model = Line().model()
    own, theirs = (
        [*weights(3, 0), *weights(1, 0)],
        [*weights(5, 1), *weights(1, 1), torch.zeros(7)],
    )  # and a buffer
    assert trial(model, around(model))(0, own, theirs) == (4.0, 9.0, 16.0)


def test_fragment_is_tried_with_slow_weights():
    """A fragment is tried with the slow weights of the others."""
    model = Line().model()
    opt = around(model, fragments=[[model.weight], [model.bias]])
    opt.slow[1].fill_(2.0)
    found = trial(model, opt)
    assert found(0, weights(1, 0)[:1], weights(3, 0)[:1]) == (9.0, 16.0, 25.0)
    opt.slow[0].fill_(1.0)
    assert found(1, weights(0, 1)[1:], weights(0, 3)[1:]) == (4.0, 9.0, 16.0)


class Lines(nn.Module):
    """y = w x + v x + u, of which all parameters have one shape."""

    def __init__(self):
        super().__init__()
        self.w, self.v, self.u = (nn.Parameter(torch.zeros(1)) for _ in range(3))

    def forward(self, x):
        return self.w * x * 3 + self.v * x * 2 + self.u


@pytest.mark.parametrize("named", [True, False])
def test_trial_losses_do_not_depend_on_groups(named):
    """With positions in the order of the groups, and the copy's parameters in the model's, the loss
    was another model's.
    """
    model = Lines()
    groups = [{"params": [model.u]}, {"params": [model.v]}, {"params": [model.w]}]
    opt = NoLoCo(
        torch.optim.SGD(groups, lr=0.1), Alone(), every=2, lag=0, model=model if named else None
    )
    of = {id(model.w): 1.0, id(model.v): 10.0, id(model.u): 100.0}
    own = [torch.tensor([of[id(parameter)]]) for parameter in opt.parameters]
    theirs = [3 * tensor for tensor in own]
    loss = (3 * 1 + 2 * 10 + 100) ** 2
    assert trial(model, opt)(0, own, theirs) == (loss, 4 * loss, 9 * loss)


def test_slow_trials_become_rarer(monkeypatch):
    """Trials that take too long become rarer until one does not."""
    said, model = [], Line().model()
    found = trial(model, around(model), said.append)
    usual = loss_trial.TOO_LONG_S

    def tried(limit, count):
        monkeypatch.setattr(loss_trial, "TOO_LONG_S", limit)
        before = len(said)
        untried = [found(0, weights(1, 0), weights(1, 0)) is None for _ in range(count)]
        return sum(untried), len(said) - before

    assert tried(-1.0, 1 + 1 + 1 + 2 + 1 + 4) == (
        10,
        3,
    )  # broken off are the first, the third and the sixth
    assert tried(usual, 2) == (0, 0)
    assert tried(-1.0, 1 + 1 + 1) == (3, 2)
    assert tried(-1.0, 2 + sum(1 + 2**n for n in range(2, 7)) + 3 * 65) == (2 + 129 + 195, 8)
    assert (
        "took over -1 s: they count untried, as will the next 64 (outer.check_loss): give the task "
        "smaller batches" in said[-1]
    )


def test_a_trial_without_memory_counts_untried_and_training_goes_on(monkeypatch):
    said, model = [], Line().model()
    found = trial(model, around(model), said.append)

    def starve(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(found, "_task_loss", starve)
    assert found(0, weights(1, 0), weights(1, 0)) is None
    assert said[0].startswith(
        "trying a partner's weights found no memory on cpu: they count untried"
    )
    monkeypatch.setattr(found, "_task_loss", lambda model, batch: 1 / 0)
    assert found(0, weights(1, 0), weights(1, 0)) is None
    with pytest.raises(ZeroDivisionError):
        found(0, weights(1, 0), weights(1, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("slow", ["cpu", "cuda"])
def test_a_trial_goes_on_beside_training(slow):
    """On a stream of its own: the stand-in raises where that reads what training may still write,
    or writes what it reads.
    """
    model, streams = Line().model().to("cuda"), []
    opt, training = (
        around(model, fragments=[[model.weight], [model.bias]], slow_device=slow),
        torch.accelerator.current_stream(),
    )

    def loss(model, batch):
        streams.append(torch.accelerator.current_stream().stream_id)
        with training:
            opt.slow[1].fill_(0.0)  # meanwhile
        return model(batch).square().mean()

    found = LossTrial(loss, (torch.ones(2, 1, device="cuda") for _ in count()), model, opt, print)
    with ThreadPoolExecutor(1) as network:
        for number in range(1, 4):
            opt.slow[1].fill_(number)
            opt.slow[0].fill_(-1.0)
            trying = network.submit(found, 0, weights(1, 0)[:1], weights(3, 0)[:1])
            assert trying.result() == tuple(float(weight + number) ** 2 for weight in (1, 2, 3))
    assert len(streams) == 18
    assert training.stream_id not in streams
    assert torch.accelerator.current_stream() == training


def test_frozen_parameters_are_not_copied():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].requires_grad_(False)
    opt = NoLoCo(torch.optim.SGD(model[1].parameters(), lr=0.1), Alone(), every=2)
    found = trial(model, opt)
    assert found._model[0].weight is model[0].weight
    assert found._model[1].weight is not model[1].weight


@pytest.mark.parametrize(
    ("asked", "draws", "ranks", "tries", "said"),
    [
        (True, False, 1, True, 0),
        (False, False, 1, False, 0),
        (True, True, 1, False, 1),
        (True, False, 2, False, 1),
    ],
)
def test_trial_needs_a_request_and_the_means(asked, draws, ranks, tries, said):
    """A node tries if the swarm asks for it and it can."""
    model, lines, screen = Line().model(), [], DistanceScreen()
    task = Line()
    task.draws_with_model = draws
    try_partners(trainer_of(model, task, asked, ranks), screen, lines.append)
    assert (screen.loss_check is not None, len(lines)) == (tries, said)


def test_trials_go_on_after_a_batch_that_found_no_memory(monkeypatch):
    """The fault: a generator ends with its first error, and nothing was tried ever after."""
    model, screen, moves = Line().model(), DistanceScreen(), count()

    def move(batch, device):
        if next(moves) == 0:
            raise torch.OutOfMemoryError("none left")
        return batch

    monkeypatch.setattr(join, "to_device", move)
    try_partners(trainer_of(model, Line()), screen, print)
    found = [screen.loss_check._losses(0, weights(1, 0), weights(3, 0)) for _ in range(3)]
    assert found == [None, None, (1.0, 4.0, 9.0)]


class Normed(nn.Module):
    """One weight behind a batch norm, whose scale and shift have the shapes of its statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.line = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.line(self.norm(x))


def test_a_trial_has_the_running_statistics_of_the_model():
    """The fault: they were those before the first step, and zeroed weights looked better."""
    model = Normed()
    opt = around(model, model=model, buffers="average", fragments=[model])
    found = LossTrial(
        lambda m, batch: m(batch).square().mean(), Line().batches(SHARD), model, opt, print
    )
    model.norm.running_mean.fill_(3.0)  # of a batch of ones: (1 - 3) / sqrt(4)
    model.norm.running_var.fill_(4.0 - model.norm.eps)
    own = [torch.ones(1), torch.zeros(1), torch.ones(1, 1)]
    theirs = [torch.ones(1), torch.zeros(1), torch.zeros(1, 1)]
    assert found(0, own, theirs) == pytest.approx((1.0, 0.25, 0.0))


def test_averaged_buffers_are_no_pseudo_gradients():
    """A fragment of a batch norm alone sends weight and bias, and then as many buffers."""
    model = Normed()
    opt = around(model, model=model, buffers="average", fragments=[model.norm, model.line])
    assert opt.buffer_count == 2
    found = LossTrial(
        lambda m, batch: m.norm.bias.square(), Line().batches(SHARD), model, opt, print
    )
    own = [torch.ones(1), torch.full((1,), 2.0), torch.zeros(1), torch.ones(1)]
    theirs = [torch.ones(1), torch.full((1,), 4.0), torch.zeros(1), torch.ones(1)]
    assert found(0, own, theirs) == (4.0, 9.0, 16.0)


def test_without_batches_nothing_is_tried_which_is_said_once():
    model, said = Line().model(), []
    tried = LossTrial(Line().loss, iter([]), model, around(model), said.append)
    assert [tried(0, weights(1, 0), weights(1, 0)) for _ in range(3)] == [None] * 3
    (sentence,) = said
    assert "they count untried from now on (outer.check_loss)" in sentence


class Choosy(Line):
    """Raises at weights beyond 2, as a task may that checks its numbers."""

    def loss(self, model, batch):
        if model.weight.abs().max() > 2:
            raise ValueError("too large")
        return super().loss(model, batch)


def test_raising_weights_are_the_partners_fault():
    """Mutants: a partner makes this node report an error of its own; an error of its own is put
    down to the partner.
    """
    model = Line().model()
    tried = LossTrial(Choosy().loss, Line().batches(SHARD), model, around(model), print)
    own, _, theirs = tried(0, weights(1, 0), weights(3, 0))
    assert own == 1.0
    assert math.isnan(theirs)
    with pytest.raises(ValueError, match="too large"):
        tried(0, weights(3, 0), weights(1, 0))
