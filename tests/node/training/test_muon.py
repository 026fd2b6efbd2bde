"""The optimizer muon in a node's training: the pair of optimizers, its schedule, and a run
that goes on bit by bit.
"""

import shutil

import pytest
import torch

from shoal.node.checkpoint import store as checkpoint
from shoal.node.config.settings import load
from shoal.node.runtime.join import make_trainer
from shoal.node.runtime.task_setup import make_task
from shoal.node.task import Shard
from shoal.node.training.schedule import factor
from shoal.node.training.training_error import TrainingError
from shoal.optim.inner import Float32Muon
from shoal.swarm.settings.training import TrainSettings
from tests.support.trainer_loops import CPU, STEPS, Small, float16, near, run, same, trainer


class Deep(Small):
    """A model with one hidden layer between two others."""

    def model(self):
        layers = [
            torch.nn.Linear(4, 16),
            torch.nn.GELU(),
            torch.nn.Linear(16, 16),
            torch.nn.GELU(),
            torch.nn.Linear(16, 1),
        ]
        return torch.nn.Sequential(*layers)


class Chosen(Deep):
    """One that leaves the first layer to AdamW."""

    def hidden_matrices(self, model):
        return ["2.weight"]


MUON = TrainSettings(
    steps=STEPS, seed=1, optimizer="muon", lr=0.03, weight_decay=0.3, schedule="cosine", warmup=3,
    clip=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("task", "names"), [(Deep, ["0.weight", "2.weight"]), (Chosen, ["2.weight"])]
)
def test_muon_trains_the_named_matrices(task, names):
    """Muon trains the matrices that the task names and AdamW the rest."""
    schedulers = []

    def optimizers(model):
        ours = [p for name, p in model.named_parameters() if name in names]
        others = [p for name, p in model.named_parameters() if name not in names]
        pair = (
            Float32Muon(ours, lr=0.03, momentum=0.9, weight_decay=0.3),
            torch.optim.AdamW(others, lr=0.03, betas=(0.9, 0.95), weight_decay=0.3, fused=True),
        )
        schedulers.extend(
            torch.optim.lr_scheduler.LambdaLR(inner, factor("cosine", 3, STEPS)) for inner in pair
        )
        return pair

    torch.manual_seed(1)
    made = task()
    model = made.model()
    pair = optimizers(model)
    batches = made.batches(Shard(0, 2, 1))
    for _ in range(STEPS):
        model.zero_grad()
        made.loss(model, next(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for step in (*pair, *schedulers):
            step.step()
    assert same(run(made, MUON), list(model.state_dict().values()))


@pytest.mark.parametrize(
    "own", [{"accumulate": 2}, {"precision": "bfloat16"}, {"precision": "float16", "accumulate": 4}]
)
def test_muon_resumes_bit_by_bit(tmp_path, own):
    if own.get("precision") == "float16":
        float16(CPU)
    options = (
        {"method": "noloco", "offload": tmp_path / "slow"}
        if own == {"accumulate": 2}
        else {"method": "diloco"}
    )
    whole = trainer(Deep(), MUON, **options, **own)
    for _ in range(4):
        whole.step()
    checkpoint.save(tmp_path, 4, whole.state())
    whole.run()
    again = trainer(
        Deep(),
        MUON,
        **(options | ({"offload": tmp_path / "other"} if "offload" in options else {})),
        **own,
    )
    again.resume(checkpoint.load(tmp_path)[1])
    again.run()
    assert same(list(whole.model.state_dict().values()), list(again.model.state_dict().values()))
    assert whole.inner_step.state_dict() == again.inner_step.state_dict()


@pytest.mark.slow(reason="compiles a model")
def test_compiled_model_takes_the_same_steps():
    """A compiled model takes the same steps and its matrices are muons."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("needs a C++ compiler")
    made = trainer(Deep(), MUON, compile=True)
    first = [tensor.clone() for tensor in made.model.state_dict().values()]
    made.run()
    groups = [[tuple(p.shape) for p in group["params"]] for group in made.opt.inner.param_groups]
    assert groups == [[(16, 4), (16, 16)], [(16,), (16,), (1, 16), (1,)]]
    compiled = list(made.model.state_dict().values())
    assert near(compiled, run(Deep(), MUON), 5e-3)
    assert not near(compiled, first, 5e-2)


def test_muon_says_what_it_cannot_train():
    class Vectors(Small):
        def model(self):
            return torch.nn.Linear(4, 1)

    class Wrong(Deep):
        def hidden_matrices(self, model):
            return ["0.bias"]

    with pytest.raises(
        TrainingError,
        match=r"The optimizer muon cannot train this model: the model has no matrix for Muon .*\.$",
    ):
        trainer(Vectors(), MUON)
    with pytest.raises(
        TrainingError,
        match=r"the parameter '0.bias', which Muon is to train, is not a matrix \(16\): leave it",
    ):
        trainer(Wrong(), MUON)


def test_the_first_lines_of_a_run_say_what_each_trains():
    said = []
    options = {
        "task.options.layers": 2,
        "task.options.width": 8,
        "task.options.heads": 2,
        "task.options.context": 8,
    }
    for optimizer in ("muon", "adamw"):
        settings = load(None, {**options, "train.optimizer": optimizer})
        make_trainer(
            settings, make_task(settings), CPU, None, said.append, lambda info: None, lambda: ()
        ).close()
    assert said == [
        "Muon trains 1,536 parameters (8 matrices), AdamW 4,240 parameters (13 tensors)."
    ]
