"""What a node cannot compute is one sentence: a precision, too little memory, a model that cannot be compiled."""

import shutil

import pytest
import torch

from shoal.node.config.settings import load
from shoal.node.tasks.loader import Guarded
from shoal.node.training.inner_step import DTYPES, check_precision
from shoal.node.training.trainer import TrainingError
from shoal.node.user_code import UserCodeError
from tests.node.training.loops import CPU, Small, float16, near, run, trainer


def test_precisions_that_there_are():
    for name in ("float32", *DTYPES):
        assert load(None, {"train.precision": name}).train.precision == name


def test_a_device_that_cannot(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(torch.nn.functional, "linear", refuse)
    check_precision("float32", CPU)
    for name, other in [("float16", "bfloat16 or float32"), ("bfloat16", "float32")]:
        with pytest.raises(TrainingError, match=f"The device 'cpu' cannot compute in {name}: set train.precision to {other}."):
            check_precision(name, CPU)


def test_a_gpu_without_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    with pytest.raises(TrainingError, match=r"The device 'cuda:0' cannot compute in bfloat16: set train.precision to float16 or"):
        check_precision("bfloat16", torch.device("cuda", 0))


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
            r"on 'cpu' for a step: cut the batch into parts \(--set train.accumulate=2\), .* format \(--precision bfloat16\), ",
        ),
        ({"accumulate": 4}, r"\(--set train.accumulate=8\)"),
        (
            {"accumulate": 8, "precision": "bfloat16"},
            r"for a step: (keep fewer .*, )?keep .*--offload DIR\), make the model",
        ),
    ],
)
def test_memory_that_runs_out_is_one_sentence_with_what_would_fit(own, words):
    with pytest.raises(TrainingError, match=words) as caught:
        run(Starved(), **own)
    assert "\n" not in str(caught.value)


def test_memory_that_runs_out_in_the_users_loss_names_the_place_and_what_would_fit():
    with pytest.raises(
        UserCodeError, match=r"Your task 'Starved' failed in loss\(\): OutOfMemoryError: .*: cut .*\(--set train.accumulate=2\)"
    ) as caught:
        run(Guarded(Starved(), "Starved"))
    assert caught.value.trace


def test_memory_that_runs_out_in_the_optimizer_is_no_matter_of_the_batch(monkeypatch):
    made = trainer()

    def starve(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(made.opt.inner, "step", starve)
    with pytest.raises(TrainingError, match=r"not enough memory on 'cpu' for a step: keep .* \(--offload DIR\), make"):
        made.run()


def test_memory_that_runs_out_does_not_ask_for_files_that_there_are(tmp_path):
    with pytest.raises(TrainingError, match="make the model or its batches smaller") as caught:
        trainer(Starved(), offload=tmp_path).run()
    assert "--offload" not in str(caught.value)


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
