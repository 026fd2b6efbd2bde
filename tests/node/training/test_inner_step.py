"""An inner step is that of a plain PyTorch loop: cut by rows, accumulated, clipped, in mixed
precision.
"""

import math
from collections import namedtuple

import pytest
import torch

from shoal.node.checkpoint import store as checkpoint
from shoal.node.tasks.text import TextTask
from shoal.node.training import batch_parts
from shoal.node.training.inner_step import MAX_SKIPPED_STEPS
from shoal.node.training.schedule import factor
from shoal.node.training.training_error import TrainingError
from shoal.swarm.settings.training import TrainSettings
from tests.support.trainer_loops import (
    CPU,
    STEPS,
    Overflows,
    Small,
    float16,
    near,
    plain,
    run,
    same,
    trainer,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulated_gradients_are_those_of_the_whole_batch(parts):
    whole = run()
    assert near(run(accumulate=parts), whole)
    assert not near(whole, run(train=TrainSettings(steps=STEPS - 1, seed=1)), 1e-4), (
        "training moves the weights by more"
    )


def test_accumulation_is_the_plain_loop_over_parts_bit_by_bit():
    def step(task, model, inner, batch, number):
        for part in (slice(0, 4), slice(4, 8)):
            (task.loss(model, batch | {"x": batch["x"][part]}) / 2).backward()
        inner.step()

    assert same(run(accumulate=2), plain(step))


def test_clipping_is_torchs():
    def step(task, model, inner, batch, number):
        task.loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        inner.step()

    clipped = run(train=TrainSettings(steps=STEPS, seed=1, clip=0.5))
    assert same(clipped, plain(step))
    assert not same(clipped, run())


@pytest.mark.parametrize("name", DEVICES)
def test_bfloat16_is_the_plain_autocast_loop_bit_by_bit(name):
    def step(task, model, inner, batch, number):
        with torch.autocast(name, dtype=torch.bfloat16):
            loss = task.loss(model, batch)
        loss.backward()
        inner.step()

    device = torch.device(name)
    found = run(precision="bfloat16", device=device)
    assert same(found, plain(step, device))
    assert not same(found, run(device=device))
    assert all(tensor.dtype == torch.float32 for tensor in found)


def scaled(device, bad=()):
    scaler = torch.amp.GradScaler(device.type)

    def step(task, model, inner, batch, number):
        with torch.autocast(device.type, dtype=torch.float16):
            loss = task.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(inner)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(inner)
        scaler.update()

    return step


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("task", [Small, Overflows])
def test_float16_is_the_plain_loop_with_gradscaler(name, task):
    device = float16(torch.device(name))
    found = run(
        task(), TrainSettings(steps=STEPS, seed=1, clip=0.5), device=device, precision="float16"
    )
    assert same(found, plain(scaled(device), device, task()))


def test_skipped_step_counts_for_the_swarm(recwarn):
    """A step that is left out still counts for the swarm."""
    float16(CPU)
    rounds = []
    made = trainer(
        Overflows(bad=(0, 1, 2)),
        TrainSettings(steps=STEPS, seed=1, schedule="constant", warmup=2),
        method="noloco",
        precision="float16",
    )
    made.opt.on_round = lambda info: rounds.append((info.step, made.round_loss()))
    before = [parameter.clone() for parameter in made.params]
    for _ in range(3):
        made.step()
    assert same(before, made.params), "no step was taken"
    assert rounds == [(3, None)], "the round was, with the others'"
    made.run()
    assert [step for step, _ in rounds] == [3, 6, 9]
    assert all(math.isfinite(loss) for _, loss in rounds[1:])
    assert not [
        str(warning.message) for warning in recwarn if "lr_scheduler" in str(warning.message)
    ]


def test_gradients_that_never_are_finite_end_training():
    float16(CPU)
    made = trainer(Overflows(bad=range(1000)), TrainSettings(seed=1), precision="float16")
    with pytest.raises(
        TrainingError,
        match=r"The gradients of 50 steps in a row were not finite: lower the learning rate, or "
        r"set",
    ):
        made.run()
    assert made.opt.steps == MAX_SKIPPED_STEPS


@pytest.mark.parametrize(
    "own", [{"accumulate": 2}, {"precision": "bfloat16"}, {"precision": "float16", "accumulate": 4}]
)
def test_it_resumes_bit_by_bit(tmp_path, own):
    if own.get("precision") == "float16":
        float16(CPU)
    settings = TrainSettings(
        steps=STEPS, seed=1, optimizer="adamw", lr=0.01, schedule="cosine", warmup=3, clip=1.0
    )
    task = Overflows(bad=(1,) if own.get("precision") == "float16" else ())
    whole = trainer(task, settings, method="noloco", **own)
    for _ in range(4):
        whole.step()
    checkpoint.save(tmp_path, 4, whole.state())
    whole.run()
    again = trainer(task, settings, method="noloco", **own)
    again.resume(checkpoint.load(tmp_path)[1])
    again.run()
    assert same(list(whole.model.state_dict().values()), list(again.model.state_dict().values()))
    assert whole.inner_step.state_dict() == again.inner_step.state_dict()


def test_the_built_in_task_accumulates_in_bfloat16(tmp_path):
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 300)
    task = TextTask(
        data=str(tmp_path / "text"), width=8, heads=2, layers=1, context=8, batch=4, warmup=3
    )
    made = trainer(task, accumulate=2, precision="bfloat16")
    before = made.evaluate()
    made.run()
    assert made.evaluate() < before


# -- optimizer and schedule ------------------------------------------------------------------------


def test_the_swarms_optimizer_and_schedule_are_torchs():
    settings = TrainSettings(
        steps=STEPS,
        seed=1,
        optimizer="adamw",
        lr=0.02,
        weight_decay=0.3,
        schedule="constant",
        warmup=4,
    )
    scheduler = None

    def optimizer(params):
        nonlocal scheduler
        inner = torch.optim.AdamW(params, lr=0.02, betas=(0.9, 0.99), weight_decay=0.3, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: min(1.0, (step + 1) / 4))
        return inner

    def step(task, model, inner, batch, number):
        task.loss(model, batch).backward()
        inner.step()
        scheduler.step()

    assert same(run(train=settings), plain(step, optimizer=optimizer))


def test_schedules():
    assert [factor("constant", 4, 0)(step) for step in (0, 1, 3, 4, 10**9)] == [
        0.25,
        0.5,
        1.0,
        1.0,
        1.0,
    ]
    cosine = factor("cosine", 10, 110)
    assert cosine(10) == 1.0
    assert cosine(60) == pytest.approx(0.55)
    assert cosine(110) == cosine(500) == pytest.approx(0.1)
    stable = factor("wsd", 0, 100)
    assert [stable(step) for step in (0, 80, 90, 99, 100, 101)] == [1.0, 1.0, 0.5, 0.05, 0.0, 0.0]


def test_a_schedule_without_an_end_is_refused():
    with pytest.raises(
        TrainingError, match=r"The schedule cosine leads to an end, and this node's run has none"
    ):
        trainer(train=TrainSettings(steps=5, schedule="cosine").model_copy(update={"steps": 0}))


Pair = namedtuple("Pair", "first second")


def test_nested_batch_is_cut_by_rows():
    """A nested batch is cut by rows and all else repeated."""
    table, mask, rows = torch.arange(12).reshape(4, 3), torch.ones(3, 3), torch.arange(4)
    parts = batch_parts.cut_batch(
        {"a": [table, Pair(rows, mask)], "b": (torch.tensor(5), "text", None)}, 2
    )
    assert len(parts) == 2
    for number, part in enumerate(parts):
        at = slice(2 * number, 2 * number + 2)
        assert torch.equal(part["a"][0], table[at])
        assert isinstance(part["a"][1], Pair)
        assert torch.equal(part["a"][1].first, rows[at])
        assert part["a"][1].second is mask
        assert part["b"] == (torch.tensor(5), "text", None)
    whole = [table, "x"]
    assert batch_parts.cut_batch(whole, 1)[0] is whole


@pytest.mark.parametrize("batch", [None, "text", torch.tensor(3.0), [torch.tensor(1)]])
def test_a_batch_without_rows_is_not_cut(batch):
    assert batch_parts.cut_batch(batch, 1) == [batch]
    with pytest.raises(
        TrainingError,
        match=r"has no tensor with rows to cut into 2 parts: leave train\.accumulate at 1",
    ):
        batch_parts.cut_batch(batch, 2)


def test_a_batch_that_does_not_divide_is_one_sentence():
    with pytest.raises(
        TrainingError,
        match=r"A batch of 8 rows cannot be cut into 3 equal parts: choose train\.accumulate",
    ):
        run(accumulate=3)
