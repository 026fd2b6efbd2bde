"""Loading a task by name, of one file or several: the three forms, and one sentence for each way in
which it can fail.
"""

import sys
from pathlib import Path

import pytest
import torch

from shoal.node.task import Shard, Task
from shoal.node.tasks.loader import load_task
from shoal.node.tasks.text import TextTask
from shoal.node.tasks.user_class import HookError
from shoal.node.training.inner_optimizer import make_inner
from shoal.node.user_code import UserCodeError
from shoal.swarm.settings.training import TrainSettings

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "examples" / "custom_model.py"

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
    assert task.size.layers == 1


def test_task_file_is_loaded_behind_installed_modules(duck, monkeypatch):
    """File is loaded with what lies beside it behind all that is installed."""
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


def test_the_documented_optimizer_groups_parameters_by_name(duck):
    page = (REPOSITORY / "docs" / "own-model.md").read_text()
    method = page.split("### Groups by name")[1].split("```python\n")[1].split("```")[0]
    duck.write_text(f"{DUCK}class Grouped(Duck):\n{method}")
    task = load_task(f"{duck}:Grouped")
    model = task.model()
    decayed, kept = make_inner(task, TrainSettings(), model).param_groups
    assert [id(one) for one in decayed["params"]] == [id(model.weight)]
    assert [id(one) for one in kept["params"]] == [id(model.bias)]
    assert kept["weight_decay"] == 0 < decayed["weight_decay"]


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
        ("nonsense", "'nonsense' is not of the form module:Class"), ("module:", "is not of the form"),  # noqa: E501
        (":Class", "is not of the form"), ("no_such_module_here:Task", "no module 'no_such_module_here'"),  # noqa: E501
        ("no-module:Task", "is no module name"), ("node.no_such:Task", r"no module 'node\.no_such'"),  # noqa: E501
        ("no/such/file.py:Task", "There is no file 'no/such/file.py'"),
        ("shoal.node.tasks.text:TextTusk", "did you mean 'TextTask'"), ("shoal.node.tasks.text:math", "There is no class 'math'"),  # noqa: E501
    ],
)  # fmt: skip
def test_names_that_lead_nowhere(spec, words):
    with pytest.raises(HookError, match=words) as caught:
        load_task(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\nraise RuntimeError('no luck\\nat all')", r"RuntimeError: no luck \(mine.py, line 2\)"), ("def (:", "SyntaxError"),  # noqa: E501
        ("import sys\nsys.exit(3)", "SystemExit: 3"), ("import no_such_neighbour", "install that module"),  # noqa: E501
        ("", "it defines no class at all"),
    ],
)  # fmt: skip
def test_files_that_fail(tmp_path, source, words):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(HookError, match=words):
        load_task(f"{path}:Task")
    if source:
        assert not [
            name
            for name in sys.modules
            if getattr(sys.modules[name], "__file__", None) == str(path)
        ]


def test_module_that_fails_is_named(tmp_path, monkeypatch):
    (tmp_path / "shoal_test_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        HookError, match=r"'shoal_test_broken' fails when it is imported, with ZeroDivisionError"
    ):
        load_task("shoal_test_broken:Task")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Lame", {}, "has no method 'evaluate'"),
        ("Duck", {"sise": 3}, "no option 'sise': its options are size"),
        ("Needy", {}, "needs the option 'size'"),
        (
            "Needy",
            {"size": 3},
            r"fails when it is made, with ValueError: size is odd \(optim.py, line 15\)",
        ),
    ],
)
def test_classes_that_do_not_suit(duck, name, options, words):
    with pytest.raises(HookError, match=words):
        load_task(f"{duck}:{name}", options)


def several(tmp_path, **files):
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return f"{tmp_path / 'task.py'}:Mine"


BODY = "\nfrom shoal import Task\nclass Mine(Task):\n    def model(self): ...\n    def batches(self, shard): ...\n" \
    "    def evaluate(self, model): ...\n    def loss(self, model, batch): ...\n"  # fmt: skip  # noqa: E501


@pytest.fixture
def imports(monkeypatch):
    """The path and the modules as they were."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "shoal_beside" in name or "_shoal_hooks" in name:
            del sys.modules[name]


def test_task_imports_its_neighbours(tmp_path, imports):
    """A task imports modules and packages beside it at once and later."""
    spec = several(
        tmp_path, shoal_beside_one="A = 1", **{"shoal_beside_pack/__init__": "B = 2"}, shoal_beside_late="C = 3",  # noqa: E501
        task="import shoal_beside_one, shoal_beside_pack" + BODY
        + "    def tokens(self, batch):\n        import shoal_beside_late\n"
        "        return shoal_beside_one.A + shoal_beside_pack.B + shoal_beside_late.C\n",
    )  # fmt: skip
    assert load_task(spec).tokens(None) == 6


def test_files_beside_a_task_hide_no_module_of_anybody(tmp_path, imports):
    spec = several(
        tmp_path, optim="1 / 0", swarm="1 / 0", mailbox="1 / 0", numpy="1 / 0", task=BODY
    )
    sys.modules.pop("mailbox", None)
    load_task(spec)
    import mailbox  # of the standard library, imported only now

    from shoal.optim import NoLoCo

    assert str(tmp_path) not in mailbox.__file__
    assert NoLoCo.__module__.startswith("shoal.")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import shoal_beside_none", "install that module, or put its file into"),
        (
            "from . import shoal_beside_one",
            "write `import helper` in place of `from . import helper`",
        ),
        ("import numpy", "imports 'numpy', and would not get the one beside it"),
        ("import json as j", "imports 'json', and would not get the one beside it"),
    ],
)
def test_failed_import_gets_the_right_hint(tmp_path, imports, text, words):
    """An import that fails or would mislead gets the right hint."""
    spec = several(tmp_path, shoal_beside_one="A = 1", numpy="", json="", task=text + BODY)
    with pytest.raises(HookError, match=words):
        load_task(spec)


def test_error_beside_the_task_is_the_users(tmp_path, imports):
    """An error in a module beside the task is the users."""
    spec = several(tmp_path, shoal_beside_bad="def f(): 1 / 0", task="import shoal_beside_bad" + BODY.replace(  # noqa: E501
        "def model(self): ...", "def model(self): shoal_beside_bad.f()"))  # fmt: skip
    with pytest.raises(
        UserCodeError,
        match=r"failed in model\(\): ZeroDivisionError: division by zero \(shoal_beside_bad.py, line 1\)",  # noqa: E501
    ):
        load_task(spec).model()
