"""Tensors of a class of their own are saved as their plain ones, and made again by the class that
the present run has.
"""

import json

import pytest
import torch
from torch import nn

from shoal.node.checkpoint.export import ExportError, export_model
from shoal.node.checkpoint.folder import CheckpointError
from shoal.node.checkpoint.merge import MergeError, merge
from shoal.node.checkpoint.packing import pack
from shoal.node.checkpoint.snapshots import Snapshots
from shoal.node.checkpoint.store import STATE, load, save
from shoal.node.checkpoint.writer import CheckpointWriter
from shoal.node.inner_tensors import InnerTensors, put_together
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.node.training.training_error import TrainingError
from shoal.optim import Alone
from shoal.swarm.settings.training import TrainSettings
from tests.support.blocking import blocking
from tests.support.coded_tensor import Coded
from tests.support.trainer_loops import Small


class Opaque(Coded):
    """The same, of a class that does not say what it consists of."""

    @property
    def __tensor_flatten__(self):
        raise AttributeError


class Momentum(torch.optim.Optimizer):
    """SGD whose momentum is kept in 8 bits."""

    kind = Coded

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                before = self.state[p].get("momentum")
                now = p.grad if before is None else 0.9 * before.values() + p.grad
                self.state[p]["momentum"] = self.kind.of(now)
                p.sub_(now, alpha=group["lr"])


class Frozen(nn.Module):
    """A layer with a quantised weight, and a buffer that is a conjugated view."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(Coded.of(torch.randn(4, 4)), requires_grad=False)
        self.register_buffer("phases", torch.tensor([1 + 2j, 3 - 1j]).conj())

    def forward(self, x):
        return x @ self.weight.values()


class Quantised(Small):
    def model(self):
        return nn.Sequential(Frozen(), nn.Linear(4, 1))

    def inner_optimizer(self, params):
        return Momentum(params)


def trainer(task, steps=12):
    made = Trainer(task, blocking(method="noloco", every=4), TrainSettings(steps=steps, seed=1))
    made.connect(Alone(), "run", Shard(0, 2, 1))
    return made


def writer(folder, made):
    return CheckpointWriter(
        folder, keep=3, state=made.state, notify=print, check=made.check_can_resume
    )


def weights(made):
    return [p.detach().clone() for p in made.model[1].parameters()]


def test_quantised_run_resumes_bit_equal(tmp_path):
    """Fault: it trained to its end, every save failed, and no checkpoint was there."""
    straight = trainer(Quantised())
    straight.run()
    first = trainer(Quantised())
    saver = writer(tmp_path, first)
    for _ in range(6):
        first.step()
        saver.turn(first.opt.steps)
    assert saver.last(6) is None
    again = trainer(Quantised())
    step, state = load(tmp_path)
    assert step == 6
    with torch.no_grad():  # the file's values count, not those that the task made
        again.model[0].phases.zero_()
    again.resume(state)
    assert again.model[0].phases.tolist() == first.model[0].phases.tolist()
    again.run()
    assert all(map(torch.equal, weights(again), weights(straight)))


def test_copy_for_writing_holds_plain_tensors():
    """The copy that is written while training goes on is of plain tensors."""
    tensor = Coded.of(torch.tensor([1.0, -2.0]))
    packed = Snapshots().take(pack({"state": tensor}))
    tensor.codes.zero_()
    assert [(t.dtype, t.tolist()) for t in packed.tensors.values()] == [
        (torch.int8, [64, -127]),
        (torch.float32, pytest.approx(2 / 127)),
    ]


def test_undescribed_class_ends_the_run_at_once(tmp_path):
    """A class that does not say what it consists of ends the run at its first step."""
    task = Quantised()
    task.inner_optimizer = lambda params: type("Odd", (Momentum,), {"kind": Opaque})(params)
    made = trainer(task)
    saver = writer(tmp_path, made)
    made.step()
    with pytest.raises(CheckpointError) as caught:
        saver.turn(1)
    assert str(caught.value) == (
        "Cannot save a checkpoint: the optimizer keeps a Opaque, a class that does not say what it "
        "consists of (__tensor_flatten__) (torch.float32 of shape (1, 4)) at "
        "['optimizer']['inner']['state'][0]['momentum'], and a checkpoint holds numbers, texts, "
        "bytes, tensors, arrays of numbers, and dicts, lists, tuples, sets and deques of these: "
        "keep one of them in its place."
    )


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "NestedTensor that is nested"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "Tensor of torch.quint8"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_buffer_without_values_ends_the_run_at_once(tmp_path, buffer, said):
    """Fault: a nested tensor was "a bug in shoal"."""

    class Odd(Small):
        def model(self):
            made = super().model()
            made.register_buffer("odd", buffer)
            return made

    made = trainer(Odd())
    made.step()
    said = said.replace("NestedTensor", type(buffer).__name__)
    with pytest.raises(CheckpointError) as caught:
        writer(tmp_path, made).turn(1)
    assert str(caught.value).startswith(f"Cannot save a checkpoint: the model keeps a {said} (")
    assert "at ['model']['odd']" in str(caught.value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j], dtype=torch.complex128),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor([3, 4], dtype=torch.uint16),
        torch.tensor(2.0).to(torch.float8_e8m0fnu),
        torch.ones(0, 3, dtype=torch.complex128),
    ],
)
def test_every_type_and_view_of_numbers_comes_back(tmp_path, tensor):
    save(tmp_path, 1, {"value": tensor})
    (value,) = load(tmp_path)[1].values()
    assert (value.dtype, value.shape) == (tensor.dtype, tensor.shape)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    assert value.to(wide).tolist() == tensor.to(wide).tolist()


def test_the_file_names_no_class_that_is_made(tmp_path):
    """A file that says another class gets none of it: the present tensor's class is compared with
    it.
    """
    save(tmp_path, 1, {"value": Coded.of(torch.ones(2))})
    saved = load(tmp_path)[1]
    assert isinstance(saved["value"], InnerTensors)
    assert torch.equal(
        put_together(saved, {"value": Coded.of(torch.zeros(2))})["value"].values(), torch.ones(2)
    )
    for present, why in (
        (torch.ones(2), "it holds a Coded where this run has a Tensor"),
        (None, "it holds a Coded where this run has a NoneType"),
        (
            Coded.of(torch.ones(3)),
            "its Coded does not consist of the tensors that Coded has in this run",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{why}$"):
            put_together(saved, {"value": present})
    evil = InnerTensors("Module", saved["value"].tensors)
    with pytest.raises(ValueError, match=r"^its Module does not consist"):
        put_together(evil, Coded.of(torch.ones(2)))


def test_only_such_a_checkpoint_has_the_new_format(tmp_path):
    for number, value in enumerate([torch.ones(2), Coded.of(torch.ones(2))], 1):
        path = save(tmp_path, number, {"value": value})
        assert json.loads((path / STATE).read_text().splitlines()[1])["format"] == number


class Showy(nn.Linear):
    """A frozen layer that shows more in its state than it loads, as bitsandbytes' Linear4bit
    does.
    """

    blob = torch.tensor([7, 7])

    def __init__(self):
        super().__init__(4, 4)
        self.requires_grad_(False)
        self.scale = torch.ones(3)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.scale
        destination[f"{prefix}weight.quant_state"] = self.blob.clone()


class ShowyTask(Small):
    def model(self):
        return nn.Sequential(Showy(), nn.Linear(4, 1))


def test_what_a_layer_shows_and_does_not_load_is_restored(tmp_path):
    """Fault: the checkpoint was written, and resuming it was "a bug in shoal"."""
    made = trainer(ShowyTask())
    made.model[0].scale.fill_(3.0)
    made.step()
    saver = writer(tmp_path, made)
    saver.turn(1)
    assert saver.last(1) is None
    again = trainer(ShowyTask())
    again.resume(load(tmp_path)[1])
    assert again.model[0].scale.tolist() == [3.0] * 3
    other = trainer(ShowyTask())
    other.model[0].blob = torch.tensor([7, 8])
    with pytest.raises(TrainingError) as caught:
        other.resume(load(tmp_path)[1])
    assert str(caught.value) == (
        "The checkpoint does not fit this run: the model shows '0.weight.quant_state' in its "
        "state, but does not load it."
    )


def test_changing_model_form_ends_the_run(tmp_path):
    """Fault: such a checkpoint was "of another model" when it was to be resumed."""

    class Packs(Small):
        def loss(self, model, batch):
            if model[0].weight.dtype != torch.uint8:
                model[0].packed = model[0].weight.detach()
                model[0].weight = nn.Parameter(
                    torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False
                )
            return (
                model[2](model[1](nn.functional.linear(batch["x"], model[0].packed)))
                .square()
                .mean()
            )

        def model(self):
            made = super().model()
            made[0].requires_grad_(False)
            return made

    made = trainer(Packs())
    made.step()
    with pytest.raises(TrainingError) as caught:
        writer(tmp_path, made).turn(1)
    assert str(caught.value) == (
        "No run could go on from a checkpoint: the model's '0.weight' is of another form after the "
        "first step than when the task made it: make it so in model()."
    )


def test_class_without_rebuild_ends_the_run_at_once(tmp_path):
    """A class that cannot be made again ends the run at its first step."""

    class Once(Coded):
        @classmethod
        def __tensor_unflatten__(cls, inner, context, size=None, stride=None):
            raise RuntimeError("not again")

    task = Quantised()
    task.inner_optimizer = lambda params: type("Odd", (Momentum,), {"kind": Once})(params)
    made = trainer(task)
    made.step()
    with pytest.raises(TrainingError) as caught:
        writer(tmp_path, made).turn(1)
    assert str(caught.value).startswith("No run could go on from a checkpoint: the optimizer's ")
    assert (
        "at [0]['momentum'] cannot be made again from its parts (RuntimeError: not again)"
        in str(caught.value)
    )


def test_an_export_names_the_tensor_that_safetensors_cannot_hold(tmp_path):
    """Fault: "check the folder and its space"."""
    with pytest.raises(ExportError) as caught:
        export_model(nn.Sequential(Frozen()), {}, tmp_path, tmp_path / "aside")
    assert str(caught.value) == (
        "Cannot write the weights: '0.weight' is what a file of safetensors cannot hold (Parameter "
        "of 2 tensors): give the model save_pretrained()."
    ).replace("Parameter", type(Frozen().weight).__name__)


def test_merging_names_the_weight_that_has_no_mean(tmp_path):
    """Fault: the weight was missing in the merged file without a word."""
    made = trainer(Quantised())
    made.step()
    path = save(tmp_path, 1, {"trainer": made.state()})
    with pytest.raises(
        MergeError,
        match=r"holds '0\.weight' as Coded, which has no mean: merge models without it\.$",
    ):
        merge([path], tmp_path / "out.safetensors")
