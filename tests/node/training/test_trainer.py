"""The training loop: it resumes bit by bit with the same random numbers, refuses what cannot be
trained, and counts FLOPs.
"""

import math
import random
from collections import OrderedDict
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import flop_counter

from shoal.node.checkpoint import store as checkpoint
from shoal.node.config.train_settings import OwnTraining
from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.node.training.device_peaks import peak_flops, peak_of
from shoal.node.training.flop_count import FlopCount
from shoal.node.training.random_state import random_state, restore_random_state
from shoal.node.training.throughput import Rates, Throughput
from shoal.node.training.trainer import Trainer
from shoal.node.training.training_error import TrainingError
from shoal.optim import Alone, Simulation
from shoal.swarm.exchange.contribution import ContributionError, encode_contribution
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from tests.support.blocking import blocking
from tests.support.trainer_loops import CPU, Small

STEPS = 12


class Noisy(Small):
    """A model with dropout, an optimizer with momentum and a schedule: all that a checkpoint must
    hold.
    """

    def __init__(self, width=6):
        self.width = width

    def model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(4, self.width),
            torch.nn.BatchNorm1d(self.width),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(self.width, 1),
        )

    def inner_optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)

    def lr_scheduler(self, optimizer, steps):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


class Draws(Noisy):
    """Its loss draws from every global generator of the CPU; some keep a number for the next
    draw.
    """

    def loss(self, model, batch):
        drawn = random.random() + random.gauss(0, 1) + np.random.rand() + np.random.randn()
        return super().loss(model, batch) * (1 + 0.01 * drawn)


def trainer(task=None, exchange=None, index=0, *, method="noloco", steps=STEPS, of=2):
    made = Trainer(
        task or Noisy(), blocking(method=method, every=4), TrainSettings(steps=steps, seed=1)
    )
    made.connect(exchange or Alone(), "run", Shard(index, of, 1))
    return made


def bits(made):
    state = made.state()
    return [
        *state["model"].values(),
        *state["optimizer"]["slow"],
        *(t for ts in state["optimizer"]["rule"].values() for t in ts),
    ]


def assert_same_bits(one, other):
    assert len(bits(one)) == len(bits(other))
    assert all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))
    assert (
        one.opt.inner.state_dict()["param_groups"] == other.opt.inner.state_dict()["param_groups"]
    )


@pytest.mark.parametrize("saved_at", range(STEPS + 1))
def test_run_resumes_bit_equal_from_any_step(tmp_path, saved_at):
    """A run resumed from any step ends with the same bits."""
    whole = trainer(Draws())
    for _ in range(saved_at):
        whole.step()
    checkpoint.save(tmp_path, saved_at, whole.state())
    whole.run()

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(99)  # whatever the new process did before
    again = trainer(Draws())
    step, state = checkpoint.load(tmp_path)
    again.resume(state)
    assert again.opt.steps == step == saved_at
    again.run()
    assert_same_bits(again, whole)
    assert again.opt.round == whole.opt.round == STEPS // 4


def test_a_loss_of_few_bits_is_summed_in_float32():
    """In bfloat16 a sum stops growing at 256 times what is added."""

    class Half(Draws):
        def loss(self, model, batch):
            return super().loss(model, batch).to(torch.bfloat16)

    one = trainer(Half())
    one.step()
    assert one.round_loss() is not None
    assert one.inner_step.gradients(one._feed.next(1)).dtype == torch.float32


def test_the_built_in_task_resumes_bit_by_bit_too(tmp_path):
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 300)
    task = TextTask(
        data=str(tmp_path / "text"), width=8, heads=2, layers=1, context=8, batch=2, warmup=3
    )
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
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), made.model.state_dict().values(), strict=True)
    )


def test_none_averages_with_nobody_even_where_somebody_is():
    def peer(exchange):
        made = trainer(exchange=exchange, index=int(exchange.peer), method="none")
        made.run()
        return made.opt.exchange

    assert all(
        isinstance(exchange, Alone) for exchange in Simulation(["0", "1"]).run(peer).values()
    )


def test_stops_after_the_step_and_reports_time():
    """It stops after the step in which it is told to and reports the time."""
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


def test_round_loss_is_the_mean_of_its_steps():
    """The loss of a round is the mean over its steps."""

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
        yield next(super().batches(shard))


class Explodes(Noisy):
    def loss(self, model, batch):
        return super().loss(model, batch) * math.nan


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (Ends, "The task's batches ended after 1 steps: batches(shard) must go on without end."),
        (
            Explodes,
            "The training loss became nan by step 4: lower the task's learning rate (`shoal tune` "
            "finds one), or have loss() return 0 for a batch in which every label is masked, whose "
            "mean is nan.",
        ),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_sentence(task, sentence):
    made = Trainer(
        task(),
        blocking(every=4),
        TrainSettings(steps=STEPS, seed=1),
        on_round=lambda info: made.round_loss(),
    )
    made.connect(Alone(), "run", Shard(0, 2, 1))
    with pytest.raises(TrainingError) as caught:
        made.run()
    assert str(caught.value) == sentence


class Encodes(Alone):
    """Nobody is here, but contributions are encoded as for a swarm."""

    def start(self, contribution):
        encode_contribution("run", contribution)
        return super().start(contribution)


class Huge(Noisy):
    """Steps to weights that float16 cannot hold, by a finite loss."""

    def loss(self, model, batch):
        return super().loss(model, batch) * 1e8


@pytest.mark.parametrize(
    ("task", "codec", "kind", "sentence"),
    [
        (Explodes, "mod4", TrainingError, "^The training loss became nan by step 1: lower the"),
        (Huge, "float16", ContributionError, "^Cannot send what was trained: a value of "),
    ],
)
def test_divergence_before_the_first_average_is_explained(task, codec, kind, sentence):
    """Overlapped methods send before a round's loss is looked at."""
    settings = OuterSettings(every=4, fragments=4, codec=codec)
    made = Trainer(task(), settings, TrainSettings(steps=STEPS, seed=1))
    made.connect(Encodes(), "run", Shard(0, 2, 1))
    with pytest.raises(kind, match=sentence):
        made.run()


class OnMeta(Noisy):
    def model(self):
        with torch.device("meta"):
            return super().model()


class Inferred(Noisy):
    def model(self):
        with torch.inference_mode():
            return super().model()


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (
            OnMeta,
            "The task's model() has no values for '0.weight', which is on the device meta: make it "
            "on the CPU, or call "
            'to_empty(device="cpu") and set the values.',
        ),
        (
            Inferred,
            "The task's model() made '0.weight' under torch.inference_mode, so it cannot be "
            "trained: make it outside.",
        ),
    ],
)
def test_a_model_without_values_to_train_is_refused(task, sentence):
    with pytest.raises(TrainingError) as caught:
        trainer(task())
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


@pytest.mark.parametrize(
    "kept", [{"seen": 3, "sum": torch.ones(2)}, OrderedDict(a=[1.5]), None, torch.ones(3), "text"]
)
def test_extra_module_state_is_resumed(tmp_path, kept):
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


def test_missing_module_state_means_another_model():
    """A checkpoint without what a module keeps now is of another model."""
    state = trainer(Noisy()).state()
    with pytest.raises(TrainingError, match=r"its '3\._extra_state' differs"):
        trainer(Extra()).resume(state)


def test_foreign_checkpoint_is_refused():
    """A checkpoint of another shard or model is refused and changes nothing."""
    state = trainer().state()
    other = trainer(index=1)
    before = [tensor.clone() for tensor in bits(other)]
    with pytest.raises(
        TrainingError, match="was trained on shard 0/2, this node has 1/2: pass --shard 0/2"
    ):
        other.resume(state)
    wide = trainer(Noisy(width=7))
    with pytest.raises(
        TrainingError, match=r"The checkpoint is of another model \(its '0.bias' differs\)"
    ):
        wide.resume(state)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(other), strict=True))


OPTIONS = {"layers": 2, "width": 16, "heads": 2, "context": 8, "batch": 4}


def trained(steps=3, peak=None, **own):
    made = Trainer(
        TextTask(**OPTIONS),
        OuterSettings(every=2),
        TrainSettings(steps=steps, seed=1),
        own=OwnTraining(**own),
    )
    if peak is not None:
        made.meter.throughput = Throughput(CPU, torch.float32, lambda device, dtype: peak)
    made.connect(Alone(), "run", Shard(0, 1, 1))
    made.run()
    return made


def flops_of(model, batch):
    found = FlopCount()
    with found.counting():
        model(batch).square().mean().backward()
    return found.flops


def test_flops_are_those_of_forward_and_backward():
    """A product of (8, 32) and (32, 16) takes 2 * 8 * 32 * 16; backward takes one for the weight,
    and none for the input.
    """
    assert flops_of(nn.Linear(32, 16, bias=False), torch.randn(8, 32)) == 2 * (2 * 8 * 32 * 16)


def test_a_product_that_cannot_be_counted_ends_no_training(monkeypatch):
    def fails(*shapes, **others):
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.mm, fails)
    throughput = Throughput(torch.device("cpu"), torch.float32, peak=lambda device, dtype: 1e12)
    model = nn.Linear(32, 16, bias=False)
    for _ in range(2):
        with throughput.step():
            model(torch.randn(8, 32)).sum().backward()
        throughput.stepped(8)
    assert throughput.report(1.0).mfu is None


def test_flops_are_counted_in_the_first_step():
    """Flops are counted once in the first step and scale with tokens."""
    once, recomputed, parts = (
        trained(peak=1e9, **own) for own in ({}, {"recompute": True}, {"accumulate": 2})
    )
    found = once.meter.throughput._flops_per_token
    # Two layers of 12 C^2, and the head. Torch's counter knows the attention of GPUs, and not that
    # of the CPU.
    assert found == 6 * (2 * 12 * 16**2 + 16 * 256)
    assert recomputed.meter.throughput._flops_per_token == found
    assert parts.meter.throughput._flops_per_token == found
    rates = once.meter.throughput.mean()
    assert once.meter.throughput.tokens == 3 * 4 * 8
    assert rates.mfu == found * rates.tokens_per_s / 1e9 > 0


def test_counting_changes_no_bit():
    one, other = trained(peak=1e9), trained()
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )
    assert other.meter.throughput.mean().mfu is None


def test_rates_leave_out_what_is_left_out_of_the_seconds():
    made = Throughput(CPU, torch.float32)
    for _ in range(4):
        made.stepped(64)
    assert made.mean() == Rates()
    assert made.report(2.0) == Rates(2.0, 128.0, None)
    made.stepped(32)
    made.report(2.0)
    assert (made.steps, made.tokens, made.busy_s) == (5, 288, 4.0)
    assert made.mean() == Rates(1.25, 72.0, None)


def test_peaks_are_of_the_very_device_and_format():
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", torch.float32) == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", torch.float32, tf32=True) == 156e12
    assert peak_flops("Tesla T4", torch.float32, tf32=True) == 8.1e12  # it has no TF32
    unknown = (
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A10G",
        "",
    )
    assert [peak_flops(name, torch.bfloat16) for name in unknown] == [None] * len(unknown)
    assert peak_flops("Tesla T4", torch.bfloat16) is None
    assert peak_flops("NVIDIA H200", torch.float64) is None
    assert peak_of(CPU, torch.float32) is None


@pytest.mark.parametrize("kind", ["mps", "cuda"])
def test_the_devices_generator_is_saved_and_set(kind, monkeypatch):
    module, set_to = getattr(torch, kind), []
    monkeypatch.setattr(
        module, "get_rng_state", lambda *device: torch.full((16,), 7, dtype=torch.uint8)
    )
    monkeypatch.setattr(
        module, "set_rng_state", lambda state, *device: set_to.append(state.tolist())
    )
    state = random_state(torch.device(kind))
    restore_random_state(state, torch.device(kind))
    assert set_to == [[7] * 16]
    restore_random_state({**state, "rng_device": None}, torch.device(kind))  # it was saved on a CPU
    restore_random_state(state, torch.device("cpu"))
    assert set_to == [[7] * 16]


@pytest.mark.parametrize(
    ("saved_on", "size", "kind"), [("mps", 44, "cuda"), ("cuda", 16, "mps"), ("xpu", 16, "cuda")]
)
def test_the_state_of_another_kind_of_device_is_left_out(saved_on, size, kind, monkeypatch):
    set_to = []
    for name in ("mps", "cuda", "xpu"):
        monkeypatch.setattr(
            getattr(torch, name), "set_rng_state", lambda state, *device: set_to.append(len(state))
        )
    state = {
        **random_state(torch.device("cpu")),
        "rng_device": torch.zeros(size, dtype=torch.uint8),
        "rng_device_kind": saved_on,
    }
    restore_random_state(state, torch.device(kind))
    assert set_to == []
    restore_random_state(state, torch.device(saved_on))
    assert set_to == [size]


class Decayed(Small):
    """A task with decay and no-decay groups, the latter first; ``part``: it trains only the first
    of its parameters.
    """

    def __init__(self, part=False):
        self.part = part

    def inner_optimizer(self, params):
        params = list(params)
        if self.part:
            return torch.optim.SGD(params[:1], lr=0.05)
        vectors = [parameter for parameter in params if parameter.ndim < 2]
        matrices = [parameter for parameter in params if parameter.ndim == 2]
        return torch.optim.SGD([{"params": vectors}, {"params": matrices}], lr=0.05)


def test_node_averages_in_the_models_order():
    """A public swarm tries partners' weights by position: with those of the groups nothing was ever
    exchanged.
    """
    made = trainer(Decayed())
    assert [id(p) for p in made.opt.parameters] == [id(p) for p in made.model.parameters()]
    assert made.opt.parameters.names == made.params.names != ("",) * len(made.params)


def test_a_task_whose_optimizer_leaves_parameters_out_is_refused():
    with pytest.raises(
        TrainingError,
        match=r"inner_optimizer\(\) trains 1 of the \d+ parameters .* freeze the rest in model",
    ):
        trainer(Decayed(part=True))


class Sampling(Noisy):
    """Draws random numbers in ``evaluate``, as a ``DataLoader`` does."""

    def evaluate(self, model):
        torch.rand(1), np.random.rand(), random.random()
        return 1.0


def test_an_evaluation_leaves_the_random_numbers_of_training(monkeypatch):
    """The fault: a resumed run, which evaluates first, went on with other dropout masks."""
    made = Trainer(Sampling(), OuterSettings(method="none"), TrainSettings(steps=1, seed=1))
    before = random_state(CPU)
    assert made.evaluate() == 1.0
    after = random_state(CPU)
    assert all(
        torch.equal(value, after[name]) if torch.is_tensor(value) else value == after[name]
        for name, value in before.items()
    )


def test_weights_averaged_in_part_are_of_no_whole_step(monkeypatch):
    """The fault: after an end that found no memory a half-applied mean was saved as whole."""
    made = Trainer(Noisy(), OuterSettings(method="none"), TrainSettings(steps=1, seed=1))
    monkeypatch.setattr(made.opt, "finish", Mock(side_effect=torch.OutOfMemoryError("none left")))
    with pytest.raises(torch.OutOfMemoryError):
        made.finish()
    assert made.stepping
    monkeypatch.undo()
    made.finish()
    assert not made.stepping


def test_an_evaluation_at_the_end_finds_whole_weights(monkeypatch):
    """Mutant: an evaluation that finds no memory loses the run that has just ended."""
    made = Trainer(Noisy(), OuterSettings(), TrainSettings(steps=1, seed=1))
    made.connect(Alone(), "run", Shard(0, 1, 0))
    made.step()
    made.end_with(None)
    monkeypatch.setattr(Noisy, "evaluate", Mock(side_effect=torch.OutOfMemoryError("none left")))
    with pytest.raises(torch.OutOfMemoryError):
        made.finish()
    assert not made.stepping
