"""Loading a task by name: the three forms, and one sentence for each way in which it can fail."""

import sys
from pathlib import Path

import pytest
import torch

from shoal.node.task import Shard, Task
from shoal.node.tasks.loader import HookError, load_task
from shoal.node.tasks.text import TextTask

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_model.py"

DUCK = """
import torch
class Duck:
    def __init__(self, size=3): self.size = size
    def model(self): return torch.nn.Linear(self.size, 1)
    def batches(self, shard):
        while True: yield torch.ones(2, self.size)
    def loss(self, model, batch): return model(batch).pow(2).mean()
    def evaluate(self, model): return float(self.loss(model, torch.ones(2, self.size)))
class Lame:
    def model(self): ...
    def batches(self, shard): ...
    def loss(self, model, batch): ...
class Needy(Duck):
    def __init__(self, size): raise ValueError("size is odd")
"""


@pytest.fixture
def duck(tmp_path):
    path = tmp_path / "optim.py"  # a name that must not hide our own package
    path.write_text(DUCK)
    return path


def test_text_is_built_in():
    task = load_task("text", {"layers": 1, "width": 16, "heads": 2})
    assert isinstance(task, TextTask)
    assert task.layers == 1


def test_file_is_loaded_with_what_lies_beside_it_behind_all_that_is_installed(duck, monkeypatch):
    monkeypatch.setattr(sys, "path", before := list(sys.path))
    before = list(before)
    task = load_task(f"{duck}:Duck", {"size": 5})
    assert sys.path == [*before, str(duck.parent)]
    assert task.model().in_features == 5


def test_class_without_base_gets_the_defaults(duck):
    task = load_task(f"{duck}:Duck")
    assert isinstance(task, Task)
    optimizer = task.inner_optimizer(task.model().parameters())
    assert optimizer.defaults["lr"] == 3e-4
    assert optimizer.defaults["betas"] == (0.9, 0.99)
    assert task.lr_scheduler(optimizer, 10) is None


def test_module_form():
    assert isinstance(load_task("shoal.node.tasks.text:TextTask"), TextTask)


def test_example_learns():
    task = load_task(f"{EXAMPLE}:Teacher")
    torch.manual_seed(0)
    model = task.model()
    first = task.evaluate(model)
    optimizer = task.inner_optimizer(model.parameters())
    batches = task.batches(Shard(0, 4, 0))
    for _ in range(150):
        task.loss(model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.evaluate(model) < 0.75 * first
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nonsense", "'nonsense' is not of the form module:Class"),
        ("module:", "is not of the form"),
        (":Class", "is not of the form"),
        ("no_such_module_here:Task", "no module 'no_such_module_here'"),
        ("no-module:Task", "is no module name"),
        ("node.no_such:Task", r"no module 'node\.no_such'"),
        ("no/such/file.py:Task", "There is no file 'no/such/file.py'"),
        ("shoal.node.tasks.text:TextTusk", "did you mean 'TextTask'"),
        ("shoal.node.tasks.text:math", "There is no class 'math'"),
    ],
)
def test_names_that_lead_nowhere(spec, words):
    with pytest.raises(HookError, match=words) as caught:
        load_task(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\nraise RuntimeError('no luck\\nat all')", r"RuntimeError: no luck \(mine.py, line 2\)"),
        ("def (:", "SyntaxError"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("import no_such_neighbour", "install that module"),
        ("", "it defines no class at all"),
    ],
)
def test_files_that_fail(tmp_path, source, words):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(HookError, match=words):
        load_task(f"{path}:Task")
    if source:
        assert not [name for name in sys.modules if getattr(sys.modules[name], "__file__", None) == str(path)]


def test_module_that_fails_is_named(tmp_path, monkeypatch):
    (tmp_path / "shoal_test_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(HookError, match=r"'shoal_test_broken' fails when it is imported, with ZeroDivisionError"):
        load_task("shoal_test_broken:Task")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Lame", {}, "has no method 'evaluate'"),
        ("Duck", {"sise": 3}, "no option 'sise': its options are size"),
        ("Needy", {}, "needs the option 'size'"),
        ("Needy", {"size": 3}, r"fails when it is made, with ValueError: size is odd \(optim.py, line 15\)"),
    ],
)
def test_classes_that_do_not_suit(duck, name, options, words):
    with pytest.raises(HookError, match=words):
        load_task(f"{duck}:{name}", options)
