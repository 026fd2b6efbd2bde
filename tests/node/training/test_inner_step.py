"""An inner step is that of a plain PyTorch loop: accumulated, clipped, in mixed precision, with a schedule of torch's."""

import math
import shutil
from collections import namedtuple

import pytest
import torch

from shoal.node.checkpoint import store as checkpoint
from shoal.node.config.settings import load
from shoal.node.config.train import OwnTraining
from shoal.node.task import Shard, Task
from shoal.node.tasks.guarded import Guarded
from shoal.node.tasks.text import TextTask
from shoal.node.training import micro_batches
from shoal.node.training.inner_step import SKIPS
from shoal.node.training.precision import DTYPES, check
from shoal.node.training.schedule import factor
from shoal.node.training.trainer import Trainer, TrainingError
from shoal.node.user_code import UserCodeError
from shoal.optim import Alone
from shoal.swarm.manifest.outer import OuterSettings, TrainSettings

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
STEPS, CPU = 9, torch.device("cpu")
Pair = namedtuple("Pair", "first second")


class Small(Task):
    """A model of two layers on batches of 8 rows."""

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))

    def batches(self, shard):
        generator = torch.Generator().manual_seed(shard.index)
        while True:
            yield {"x": torch.randn(8, 4, generator=generator), "scale": torch.tensor(2.0)}

    def loss(self, model, batch):
        return (model(batch["x"]) - batch["scale"] * batch["x"].sum(1, keepdim=True)).square().mean()

    @torch.no_grad()
    def evaluate(self, model):
        return float(self.loss(model, next(self.batches(Shard(7, 8, 0)))))


class Overflows(Small):
    """Some batches' gradients are not finite."""

    def __init__(self, bad=(2, 3)):
        self.bad = bad

    def batches(self, shard):
        for step, batch in enumerate(super().batches(shard)):
            yield batch | {"scale": torch.tensor(math.inf if step in self.bad else 2.0)}


def trainer(task=None, train=None, *, method="none", exchange=None, device=CPU, **own):
    settings = train or TrainSettings(steps=STEPS, seed=1)
    made = Trainer(task or Small(), OuterSettings(method=method, every=3), settings, own=OwnTraining(**own), device=device)
    made.connect(exchange or Alone(), "run", Shard(0, 2, 1))
    return made


def run(*args, **kwargs):
    made = trainer(*args, **kwargs)
    made.run()
    return list(made.model.state_dict().values())


def plain(step, device=CPU, task=None, optimizer=None):
    """Return the weights after STEPS steps of a loop in which ``step(task, model, inner, batch)`` is written out."""
    torch.manual_seed(1)
    task = task or Small()
    model = task.model().to(device)
    inner = optimizer(model.parameters()) if optimizer else task.inner_optimizer(model.parameters())
    batches = task.batches(Shard(0, 2, 1))
    for number in range(STEPS):
        batch = {name: value.to(device) for name, value in next(batches).items()}
        step(task, model, inner, batch, number)
        inner.zero_grad()
    return list(model.state_dict().values())


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def near(one, other, by=1e-6):
    return all(torch.allclose(a, b, rtol=0.0, atol=by) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulated_gradients_are_those_of_the_whole_batch(parts):
    whole = run()
    assert near(run(accumulate=parts), whole)
    assert not near(whole, run(train=TrainSettings(steps=STEPS - 1, seed=1)), 1e-4), "training moves the weights by more"


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


def float16(device):
    try:
        check("float16", device)
    except TrainingError as error:
        pytest.skip(str(error))
    return device


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("task", [Small, Overflows])
def test_float16_is_the_plain_loop_with_gradscaler(name, task):
    device = float16(torch.device(name))
    found = run(task(), TrainSettings(steps=STEPS, seed=1, clip=0.5), device=device, precision="float16")
    assert same(found, plain(scaled(device), device, task()))


def test_a_step_that_is_left_out_still_counts_for_the_swarm(recwarn):
    float16(CPU)
    rounds = []
    made = trainer(Overflows(bad=(0, 1, 2)), TrainSettings(steps=STEPS, seed=1, schedule="constant", warmup=2), method="noloco",
                   precision="float16")  # fmt: skip
    made.opt.on_round = lambda info: rounds.append((info.step, made.round_loss()))
    before = [parameter.clone() for parameter in made.params]
    for _ in range(3):
        made.step()
    assert same(before, made.params), "no step was taken"
    assert rounds == [(3, None)], "the round was, with the others'"
    made.run()
    assert [step for step, _ in rounds] == [3, 6, 9]
    assert all(math.isfinite(loss) for _, loss in rounds[1:])
    assert not [str(warning.message) for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_gradients_that_never_are_finite_end_training():
    float16(CPU)
    made = trainer(Overflows(bad=range(1000)), TrainSettings(seed=1), precision="float16")
    with pytest.raises(TrainingError, match=r"The gradients of 50 steps in a row were not finite: lower the learning rate, or set"):
        made.run()
    assert made.opt.steps == SKIPS


@pytest.mark.parametrize("own", [{"accumulate": 2}, {"precision": "bfloat16"}, {"precision": "float16", "accumulate": 4}])
def test_it_resumes_bit_by_bit(tmp_path, own):
    if own.get("precision") == "float16":
        float16(CPU)
    settings = TrainSettings(steps=STEPS, seed=1, optimizer="adamw", lr=0.01, schedule="cosine", warmup=3, clip=1.0)
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
    task = TextTask(data=str(tmp_path / "text"), width=8, heads=2, layers=1, context=8, batch=4, warmup=3)
    made = trainer(task, accumulate=2, precision="bfloat16")
    before = made.evaluate()
    made.run()
    assert made.evaluate() < before


# -- optimizer and schedule -------------------------------------------------------------------------------------------------


def test_the_swarms_optimizer_and_schedule_are_torchs():
    settings = TrainSettings(steps=STEPS, seed=1, optimizer="adamw", lr=0.02, weight_decay=0.3, schedule="constant", warmup=4)
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
    assert [factor("constant", 4, 0)(step) for step in (0, 1, 3, 4, 10**9)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    cosine = factor("cosine", 10, 110)
    assert cosine(10) == 1.0
    assert cosine(60) == pytest.approx(0.55)
    assert cosine(110) == cosine(500) == pytest.approx(0.1)
    stable = factor("wsd", 0, 100)
    assert [stable(step) for step in (0, 80, 90, 99, 100, 101)] == [1.0, 1.0, 0.5, 0.05, 0.0, 0.0]


def test_a_schedule_without_an_end_is_refused():
    with pytest.raises(TrainingError, match=r"The schedule cosine leads to an end, and this node's run has none"):
        trainer(train=TrainSettings(steps=5, schedule="cosine").model_copy(update={"steps": 0}))


# -- batches ------------------------------------------------------------------------------------------------------------------


def test_a_nested_batch_is_cut_by_rows_and_all_else_repeated():
    table, mask, rows = torch.arange(12).reshape(4, 3), torch.ones(3, 3), torch.arange(4)
    parts = micro_batches.cut({"a": [table, Pair(rows, mask)], "b": (torch.tensor(5), "text", None)}, 2)
    assert len(parts) == 2
    for number, part in enumerate(parts):
        at = slice(2 * number, 2 * number + 2)
        assert torch.equal(part["a"][0], table[at])
        assert isinstance(part["a"][1], Pair)
        assert torch.equal(part["a"][1].first, rows[at])
        assert part["a"][1].second is mask
        assert part["b"] == (torch.tensor(5), "text", None)
    whole = [table, "x"]
    assert micro_batches.cut(whole, 1)[0] is whole


@pytest.mark.parametrize("batch", [None, "text", torch.tensor(3.0), [torch.tensor(1)]])
def test_a_batch_without_rows_is_not_cut(batch):
    assert micro_batches.cut(batch, 1) == [batch]
    with pytest.raises(TrainingError, match=r"has no tensor with rows to cut into 2 parts: leave train\.accumulate at 1"):
        micro_batches.cut(batch, 2)


def test_a_batch_that_does_not_divide_is_one_sentence():
    with pytest.raises(TrainingError, match=r"A batch of 8 rows cannot be cut into 3 equal parts: choose train\.accumulate"):
        run(accumulate=3)


# -- bad input ------------------------------------------------------------------------------------------------------------------


def test_precisions_that_there_are():
    for name in ("float32", *DTYPES):
        assert load(None, {"train.precision": name}).train.precision == name


def test_a_device_that_cannot(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(torch.nn.functional, "linear", refuse)
    check("float32", CPU)
    for name, other in [("float16", "bfloat16 or float32"), ("bfloat16", "float32")]:
        with pytest.raises(TrainingError, match=f"The device 'cpu' cannot compute in {name}: set train.precision to {other}."):
            check(name, CPU)


def test_a_gpu_without_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    with pytest.raises(TrainingError, match=r"The device 'cuda:0' cannot compute in bfloat16: set train.precision to float16 or"):
        check("bfloat16", torch.device("cuda", 0))


def test_weights_of_float16_are_refused_with_float16():
    class Half(Small):
        def model(self):
            return super().model().half()

    float16(CPU)
    with pytest.raises(TrainingError, match=r"The model has weights of float16, whose gradients cannot be scaled back"):
        trainer(Half(), precision="float16")


class Starved(Small):
    def loss(self, model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            {},
            r"on 'cpu' for a step: cut the batch into parts \(--accumulate 2\), .* format \(--precision bfloat16\), ",
        ),
        ({"accumulate": 4}, r"\(--accumulate 8\)"),
        ({"accumulate": 8, "precision": "bfloat16"}, r"for a step: (keep fewer .*, )?make the model or its batches smaller"),
    ],
)
def test_memory_that_runs_out_is_one_sentence_with_what_would_fit(own, words):
    with pytest.raises(TrainingError, match=words) as caught:
        run(Starved(), **own)
    assert "\n" not in str(caught.value)


def test_memory_that_runs_out_in_the_users_loss_names_the_place_and_what_would_fit():
    with pytest.raises(
        UserCodeError, match=r"Your task 'Starved' failed in loss\(\): OutOfMemoryError: .*: cut .*\(--accumulate 2\)"
    ) as caught:
        run(Guarded(Starved(), "Starved"))
    assert caught.value.trace


def test_memory_that_runs_out_in_the_optimizer_is_no_matter_of_the_batch(monkeypatch):
    made = trainer()

    def starve(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(made.opt.inner, "step", starve)
    with pytest.raises(TrainingError, match="not enough memory on 'cpu' for a step: make the model or its batches smaller"):
        made.run()


# -- compiling ------------------------------------------------------------------------------------------------------------------


def test_compiling_changes_no_name_and_evaluates_the_model_itself(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: torch.nn.Sequential(model))
    plain_one, compiled = trainer(method="streaming"), trainer(method="streaming", compile=True)
    assert list(compiled.state()["model"]) == list(plain_one.state()["model"])
    assert compiled.state()["parameters"] == plain_one.state()["parameters"]
    assert compiled.opt.fragments == plain_one.opt.fragments
    seen = []
    compiled.task.evaluate = lambda model: seen.append(model) or 1.0
    compiled.evaluate()
    assert seen == [compiled.model]
    assert compiled.inner_step.model is not compiled.model


@pytest.mark.slow(reason="compiles a model")
def test_a_compiled_model_takes_the_same_steps():
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("needs a C++ compiler")
    assert near(run(compile=True), run(), 1e-5)
    assert near(run(compile=True, precision="bfloat16", accumulate=2), run(precision="bfloat16", accumulate=2), 1e-2)


def test_a_model_that_cannot_be_compiled_is_one_sentence(monkeypatch):
    from torch._inductor.exc import InvalidCxxCompiler

    class Uncompilable(torch.nn.Module):
        def forward(self, x):
            raise InvalidCxxCompiler

    monkeypatch.setattr(torch, "compile", lambda model: Uncompilable())
    with pytest.raises(TrainingError, match=r"Cannot compile the model \(InvalidCxx.*: No working C\+\+.*leave --compile") as found:
        run(compile=True)
    assert "\n" not in str(found.value)

    def refuse(model):
        raise RuntimeError("torch.compile is not supported on Python 3.99+")

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.raises(TrainingError, match=r"Cannot compile the model \(RuntimeError: torch.compile is not supported on Python"):
        trainer(compile=True)
