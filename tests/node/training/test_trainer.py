"""The training loop: it resumes bit by bit from any step, and names in one sentence what cannot be trained."""

import math
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from shoal.node.checkpoint import store as checkpoint
from shoal.node.task import Shard, Task
from shoal.node.tasks.text import TextTask
from shoal.node.training import trainer as trainer_module
from shoal.node.training.trainer import Trainer, TrainingError
from shoal.optim import Alone, Simulation
from shoal.swarm.manifest import TrainSettings
from tests.blocking import blocking

STEPS = 12


class Noisy(Task):
    """A model with dropout, an optimizer with momentum and a schedule: all that a checkpoint must hold."""

    def __init__(self, width=6):
        self.width = width

    def model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(4, self.width), torch.nn.BatchNorm1d(self.width), torch.nn.Dropout(0.5), torch.nn.Linear(self.width, 1)
        )

    def batches(self, shard):
        generator = torch.Generator().manual_seed(shard.index + 10 * shard.seed)
        while True:
            yield {"x": torch.randn(8, 4, generator=generator)}

    def loss(self, model, batch):
        return (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()

    @torch.no_grad()
    def evaluate(self, model):
        return float(sum(p.square().sum() for p in model.parameters()))

    def inner_optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)

    def lr_scheduler(self, optimizer, steps):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def trainer(task=None, exchange=None, index=0, *, method="noloco", steps=STEPS, of=2):
    made = Trainer(task or Noisy(), blocking(method=method, every=4), TrainSettings(steps=steps, seed=1))
    made.connect(exchange or Alone(), "run", Shard(index, of, 1))
    return made


def bits(made):
    state = made.state()
    return [*state["model"].values(), *state["optimizer"]["slow"], *(t for ts in state["optimizer"]["rule"].values() for t in ts)]


def assert_same_bits(one, other):
    assert len(bits(one)) == len(bits(other))
    assert all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))
    assert one.opt.inner.state_dict()["param_groups"] == other.opt.inner.state_dict()["param_groups"]


@pytest.mark.parametrize("saved_at", range(STEPS + 1))
def test_a_run_resumed_from_any_step_ends_with_the_same_bits(tmp_path, saved_at):
    whole = trainer()
    for _ in range(saved_at):
        whole.step()
    checkpoint.save(tmp_path, saved_at, whole.state())
    whole.run()

    torch.manual_seed(99)  # whatever the new process did before
    again = trainer()
    step, state = checkpoint.load(tmp_path)
    again.resume(state)
    assert again.opt.steps == step == saved_at
    again.run()
    assert_same_bits(again, whole)
    assert again.opt.round == whole.opt.round == STEPS // 4


def test_the_built_in_task_resumes_bit_by_bit_too(tmp_path):
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 300)
    task = TextTask(data=str(tmp_path / "text"), width=8, heads=2, layers=1, context=8, batch=2, warmup=3)
    whole = trainer(task)
    for _ in range(6):
        whole.step()
    checkpoint.save(tmp_path / "run", 6, whole.state())
    whole.run()
    again = trainer(task)
    again.resume(checkpoint.load(tmp_path / "run")[1])
    again.run()
    assert_same_bits(again, whole)


def test_without_a_method_it_is_the_plain_inner_optimizer():
    made = trainer(method="none")
    torch.manual_seed(1)
    task = Noisy()
    model = task.model()
    inner = task.inner_optimizer(model.parameters())
    scheduler = task.lr_scheduler(inner, STEPS)
    batches = task.batches(Shard(0, 2, 1))
    for _ in range(STEPS):
        loss = task.loss(model, next(batches))
        loss.backward()
        inner.step()
        scheduler.step()
        inner.zero_grad()
    torch.manual_seed(1)
    task.model()  # the random numbers that making the model takes
    made.run()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), made.model.state_dict().values(), strict=True))


def test_none_averages_with_nobody_even_where_somebody_is():
    def peer(exchange):
        made = trainer(exchange=exchange, index=int(exchange.peer), method="none")
        made.run()
        return made.opt.exchange

    assert all(isinstance(exchange, Alone) for exchange in Simulation(["0", "1"]).run(peer).values())


def test_it_stops_after_the_step_in_which_it_is_told_to_and_reports_the_time():
    made = trainer(steps=0)
    seconds = made.run(stop=lambda: made.opt.steps == 5)
    assert made.opt.steps == 5
    assert seconds > 0


def test_an_exchange_begins_when_the_gradients_are_gone():
    held = []

    class Looks(Alone):
        def start(self, *args, **options):
            held.extend(parameter.grad for parameter in made.params)
            return super().start(*args, **options)

    made = trainer(exchange=Looks())
    made.run()
    assert held == [None] * len(made.params) * (STEPS // 4)


def test_the_rate_of_steps_leaves_out_what_is_done_between_them(monkeypatch):
    """A step takes a second, and saving after it nine: peers plan by one step a second."""
    now, seen = [0.0], []

    class Timed(Noisy):
        def loss(self, model, batch):
            now[0] += 1.0
            return super().loss(model, batch)

    def save():
        now[0] += 9.0

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    made = trainer(Timed())
    assert made.run(on_progress=seen.append, after_step=save) == 10.0 * STEPS
    assert [progress.rates.steps_per_s for progress in seen] == [1.0] * STEPS


def test_the_loss_of_a_round_is_the_mean_over_its_steps():
    class Counting(Noisy):
        def batches(self, shard):
            yield from (torch.full((), float(step)) for step in range(100))

        def loss(self, model, batch):
            return batch + 0 * sum(p.sum() for p in model.parameters())

    made = trainer(Counting())
    for _ in range(4):
        made.step()
    assert made.round_loss() == 1.5
    made.step()
    assert made.round_loss() == 4.0


class Ends(Noisy):
    def batches(self, shard):
        yield {"x": torch.randn(8, 4)}


class Explodes(Noisy):
    def loss(self, model, batch):
        return super().loss(model, batch) * math.nan


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (Ends, "The task's batches ended after 1 steps: batches(shard) must go on without end."),
        (Explodes, "The training loss became nan by step 4: lower the task's learning rate."),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_sentence(task, sentence):
    made = Trainer(task(), blocking(every=4), TrainSettings(steps=STEPS, seed=1), on_round=lambda info: made.round_loss())
    made.connect(Alone(), "run", Shard(0, 2, 1))
    with pytest.raises(TrainingError) as caught:
        made.run()
    assert str(caught.value) == sentence


class Counting(torch.nn.Linear):
    """A layer that keeps more than tensors."""

    kept = None

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


class Extra(Noisy):
    def model(self):
        made = super().model()
        made[3] = Counting(self.width, 1)
        return made


@pytest.mark.parametrize("kept", [{"seen": 3, "sum": torch.ones(2)}, OrderedDict(a=[1.5]), None, torch.ones(3), "text"])
def test_a_module_that_keeps_more_than_tensors_is_saved_and_resumed(tmp_path, kept):
    """Fault: the shape of a dict is asked for; `--resume` ends with "bug in shoal"."""
    whole = trainer(Extra())
    whole.model[3].kept = kept
    for _ in range(5):
        whole.step()
    checkpoint.save(tmp_path, 5, whole.state())
    whole.run()
    again = trainer(Extra())
    again.model[3].kept = torch.ones(7)  # of another shape than the saved one, as of a fresh module
    again.resume(checkpoint.load(tmp_path)[1])
    assert str(again.model[3].kept) == str(dict(kept) if isinstance(kept, dict) else kept)
    again.run()
    assert all(torch.equal(a, b) for a, b in zip(whole.params, again.params, strict=True))


def test_a_checkpoint_without_what_a_module_keeps_now_is_of_another_model():
    state = trainer(Noisy()).state()
    with pytest.raises(TrainingError, match=r"its '3\._extra_state' differs"):
        trainer(Extra()).resume(state)


def test_a_checkpoint_of_another_shard_or_model_is_refused_and_changes_nothing():
    state = trainer().state()
    other = trainer(index=1)
    before = [tensor.clone() for tensor in bits(other)]
    with pytest.raises(TrainingError, match="was trained on shard 0/2, this node has 1/2: pass --shard 0/2"):
        other.resume(state)
    wide = trainer(Noisy(width=7))
    with pytest.raises(TrainingError, match=r"The checkpoint is of another model \(its '0.bias' differs\)"):
        wide.resume(state)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(other), strict=True))
