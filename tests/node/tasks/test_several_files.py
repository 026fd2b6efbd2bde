"""A task of several files: it imports what lies beside it, and no file of it hides a module that anybody else imports."""

import sys

import pytest

from shoal.node.tasks.loader import HookError, load_task
from shoal.node.user_code import UserCodeError


def several(tmp_path, **files):
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return f"{tmp_path / 'task.py'}:Mine"


BODY = "\nfrom shoal import Task\nclass Mine(Task):\n    def model(self): ...\n    def batches(self, shard): ...\n" \
    "    def evaluate(self, model): ...\n    def loss(self, model, batch): ...\n"  # fmt: skip


@pytest.fixture
def imports(monkeypatch):
    """The path and the modules as they were."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "shoal_beside" in name or "_shoal_hooks" in name:
            del sys.modules[name]


def test_a_task_imports_modules_and_packages_beside_it_at_once_and_later(tmp_path, imports):
    spec = several(
        tmp_path, shoal_beside_one="A = 1", **{"shoal_beside_pack/__init__": "B = 2"}, shoal_beside_late="C = 3",
        task="import shoal_beside_one, shoal_beside_pack" + BODY
        + "    def tokens(self, batch):\n        import shoal_beside_late\n"
        "        return shoal_beside_one.A + shoal_beside_pack.B + shoal_beside_late.C\n",
    )  # fmt: skip
    assert load_task(spec).tokens(None) == 6


def test_files_beside_a_task_hide_no_module_of_anybody(tmp_path, imports):
    spec = several(tmp_path, optim="1 / 0", swarm="1 / 0", mailbox="1 / 0", numpy="1 / 0", task=BODY)
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
        ("from . import shoal_beside_one", "write `import helper` in place of `from . import helper`"),
        ("import numpy", "imports 'numpy', and would not get the one beside it"),
        ("import json as j", "imports 'json', and would not get the one beside it"),
    ],
)
def test_an_import_that_fails_or_would_mislead_gets_the_right_hint(tmp_path, imports, text, words):
    spec = several(tmp_path, shoal_beside_one="A = 1", numpy="", json="", task=text + BODY)
    with pytest.raises(HookError, match=words):
        load_task(spec)


def test_an_error_in_a_module_beside_the_task_is_the_users(tmp_path, imports):
    spec = several(tmp_path, shoal_beside_bad="def f(): 1 / 0", task="import shoal_beside_bad" + BODY.replace(
        "def model(self): ...", "def model(self): shoal_beside_bad.f()"))  # fmt: skip
    with pytest.raises(
        UserCodeError, match=r"failed in model\(\): ZeroDivisionError: division by zero \(shoal_beside_bad.py, line 1\)"
    ):
        load_task(spec).model()
