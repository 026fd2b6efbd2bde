"""Whatever holds the tensors of a batch, all that look at it find them: device, tokens, parts,
workers, digests and callbacks.
"""

import logging
import types
from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import pytest
import torch

from shoal.node.batch_contents import elements, leaves, to_device
from shoal.node.config.train_settings import OwnTraining
from shoal.node.task import Shard, Task, tokens_in
from shoal.node.tasks.guarded import Guarded
from shoal.node.training import batch_parts
from shoal.node.training.loader import Loader
from shoal.node.training.trainer import Trainer
from shoal.node.user_code import UserCodeError
from shoal.optim import Alone
from shoal.swarm.settings.training import TrainSettings
from tests.support.blocking import blocking

META, CPU = torch.device("meta"), torch.device("cpu")
Named = namedtuple("Named", "x scale note")


@dataclass
class Data:
    x: torch.Tensor
    scale: torch.Tensor
    note: str = "n"


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    scale: torch.Tensor
    note: str = "n"
    later: list = field(init=False, default_factory=list)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    scale: torch.Tensor
    note: str = "n"


class Moves:
    """Holds its tensors like torch_geometric's Data; changes itself, and returns nothing."""

    def __init__(self, x, scale, note="n"):
        self.x, self.scale, self.note = x, scale, note

    def to(self, device):
        self.x, self.scale = self.x.to(device), self.scale.to(device)


class Attributes(dict):
    """Keys are attributes, as in many a recipe."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Opaque:
    def __init__(self, *held):
        self.held = held


def encoding(x, scale, note="n"):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.BatchEncoding({"x": x, "scale": scale, "note": note})


def output(x, scale, note="n"):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.modeling_outputs.MaskedLMOutput(logits=x, hidden_states=(scale,))


KINDS = {
    "dict": lambda x, scale: {"x": x, "scale": scale, "note": "n"},
    "ordered": lambda x, scale: OrderedDict(x=x, scale=scale, note="n"),
    "UserDict": lambda x, scale: UserDict(x=x, scale=scale, note="n"),
    "attributes": lambda x, scale: Attributes(x=x, scale=scale, note="n"),
    "proxy": lambda x, scale: MappingProxyType({"x": x, "scale": scale}),
    "BatchEncoding": encoding,
    "ModelOutput": output,
    "namedtuple": lambda x, scale: Named(x, scale, "n"),
    "list": lambda x, scale: [x, (scale, "n")],
    "UserList": lambda x, scale: UserList([x, scale, "n"]),
    "deque": lambda x, scale: deque([x, scale, "n"]),
    "dataclass": Data,
    "frozen": Frozen,
    "slots": Slotted,
    "to": Moves,
    "deep": lambda x, scale: {"in": [UserDict(b=Frozen(x, scale))]},
}


def tensors(batch):
    return [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]


def made(kind):
    batch = KINDS[kind](torch.arange(12.0).reshape(4, 3), torch.tensor(2.0))
    assert [tensor.shape for tensor in tensors(batch)][:2] == [(4, 3), ()]
    return batch


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_its_tensors_come_to_the_device_in_the_same_container(kind):
    batch = made(kind)
    moved = to_device(batch, META)
    assert type(moved) is (dict if kind == "proxy" else type(batch))
    assert all(tensor.device == META for tensor in tensors(moved))
    assert len(tensors(moved)) == len(tensors(batch))
    assert all(tensor.device == CPU for tensor in tensors(batch)), (
        "the data set's own batch was moved"
    )
    assert to_device(batch, CPU) is batch


def test_an_attribute_is_moved_with_its_key():
    for kind in ("attributes", "ModelOutput"):
        moved = to_device(made(kind), META)
        assert (moved.x if kind == "attributes" else moved.logits).device == META


def test_its_tokens_are_the_elements_of_its_first_tensor(kind):
    assert elements(made(kind)) == tokens_in(Task(), made(kind)) == 12
    assert elements([Slotted(np.zeros((3, 5)), 2.0)]) == 15


def test_it_is_cut_by_rows(kind):
    batch = made(kind)
    cut = batch_parts.cut_batch(batch, 2)
    for number, part in enumerate(cut):
        assert type(part) is (dict if kind == "proxy" else type(batch))
        first, scale, *_ = tensors(part)
        assert torch.equal(first, torch.arange(12.0).reshape(4, 3)[2 * number : 2 * number + 2])
        assert scale == 2.0
    assert batch_parts.batch_rows(batch) == 4


def test_an_array_is_cut_with_the_tensors_beside_it():
    first, second = batch_parts.cut_batch({"x": torch.zeros(4), "y": np.arange(4)}, 2)
    assert (first["y"].tolist(), second["y"].tolist()) == ([0, 1], [2, 3])


class Drawing(Task):
    """Draws each batch into the same memory, as a ring buffer would."""

    def __init__(self, kind, first=0.0):
        self.kind, self.first = kind, first

    def model(self):
        return torch.nn.Linear(3, 1)

    def batches(self, shard):
        x = torch.zeros(4, 3)
        while True:
            x += 1.0
            yield KINDS[self.kind](x, torch.tensor(self.first))

    def loss(self, model, batch):
        return model(tensors(batch)[0]).square().mean()


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"proxy"}))  # which Python cannot pickle
def test_a_worker_sends_copies_of_its_tensors(kind):
    task = Drawing(kind)
    loader = Loader(task, task.batches(Shard(0, 1, 0)), workers=1)
    found = [float(tensors(next(loader))[0][0, 0]) for _ in range(4)]
    loader.close()
    assert found == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_counts_and_learns_as_from_a_dict(kind, accumulate):
    weights = []
    for name in ("dict", kind):
        task = Guarded(Drawing(name), "Drawing")
        trainer = Trainer(
            task,
            blocking(method="none"),
            TrainSettings(steps=3, seed=1),
            own=OwnTraining(accumulate=accumulate),
        )
        trainer.connect(Alone(), "run", Shard(0, 1, 0))
        trainer.run()
        trainer.close()
        assert trainer.opt.tokens == 3 * 12
        weights.append(trainer.model.weight.detach())
    assert torch.equal(*weights)


def test_an_object_that_cannot_be_looked_into_is_named_once(caplog):
    batch = {"x": Opaque(torch.zeros(4, 3))}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert elements(batch) == 1
            assert to_device(batch, META)["x"] is batch["x"]
    assert [record.getMessage() for record in caplog.records] == [
        "A batch holds an object of type Opaque, which Shoal cannot look into: its tensors are "
        "neither counted nor moved, so yield a dict, a list or a dataclass of tensors, or give it "
        "a to(device) and the task a tokens(batch)."
    ]
    assert elements(["text", b"", 3, None, 2.5]) == 1
    assert len(caplog.records) == 1


def test_unmovable_batch_is_one_sentence():
    """An object that fails to move and one that cannot be copied are one sentence."""

    class Stuck:
        def to(self, device):
            raise ValueError("no")

    class Fixed(dict):
        def __setitem__(self, key, value):
            raise TypeError("read only")

    with pytest.raises(
        UserCodeError,
        match=r"The object of type Stuck in a batch failed in to\(device\): ValueError: no",
    ):
        to_device([Stuck()], META)
    with pytest.raises(
        UserCodeError,
        match=r"object of type Fixed, which cannot be copied .*TypeError: read only.*: yield dicts",
    ):
        to_device(Fixed(x=torch.zeros(2)), META)


@pytest.mark.parametrize("kind", ["BatchEncoding", "dataclass", "to"])
def test_lightnings_callback_counts_them(kind):
    pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from shoal.node.integrations.lightning import SwarmCallback

    class Steps:
        steps, counted = 1, None

        def count(self, tokens):
            self.counted = tokens

        def step(self):
            pass

    callback = SwarmCallback(types.SimpleNamespace(over=False))
    callback.opt = Steps()
    trainer = types.SimpleNamespace(
        global_step=1,
        is_last_batch=False,
        current_epoch=0,
        min_epochs=1,
        max_epochs=1,
        min_steps=0,
        max_steps=-1,
        should_stop=False,
    )
    callback.on_train_batch_end(trainer, None, None, made(kind), 0)
    assert callback.opt.counted == 12


class Graphs:
    """As PyTorch Geometric has them: an object whose tensors have a row for each vertex, edge or
    graph.
    """

    def __init__(self):
        self.x = torch.zeros(8, 3)
        self.edge_index = torch.zeros(2, 20)
        self.y = torch.zeros(4)

    def to(self, device):
        return self


def test_graphs_of_a_library_are_not_cut_between_their_vertices():
    """Mutants: vertices are cut and edges are not; a dict's shared mask is refused too."""
    with pytest.raises(batch_parts.TrainingError) as error:
        batch_parts.cut_batch((Graphs(), 1), 2)
    assert str(error.value) == (
        "The batch holds an object of type Graphs with tensors of other lengths than 8, such as a "
        "graph's edges, and cannot be cut into 2 parts: leave train.accumulate at 1, on one "
        "device, or yield dicts of tensors with a row for each example."
    )
    halves = batch_parts.cut_batch({"x": torch.zeros(8, 3), "mask": torch.ones(3)}, 2)
    assert [(half["x"].shape[0], half["mask"].shape[0]) for half in halves] == [(4, 3), (4, 3)]
