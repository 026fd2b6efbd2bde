"""Values in a settings file are changed, and nothing else."""

import tomllib

import pytest

from shoal.node.config.edit_file import edit
from shoal.node.config.settings import ConfigError

FILE = """# mine
[swarm]
name = "a # b"   # kept

[train]          # of all
# tune: of last time
lr = 0.1         # the rate
steps = 20

[task.options]
width = 64
"""


def test_a_value_is_replaced_with_all_else_kept():
    """Mutants: the comment of the line is lost; old notes stay; a note is put elsewhere."""
    assert edit(FILE, {"train.lr": 0.02}, ["tune: of today"], "tune: ") == FILE.replace(
        "of last time", "of today"
    ).replace("lr = 0.1  ", "lr = 0.02  ")


def test_a_new_value_goes_into_its_table():
    """Mutants: it is written at the end, into another table; a second table is made."""
    found = edit(FILE, {"train.optimizer": "muon", "task.options.batch": 4})
    assert tomllib.loads(found)["train"]["optimizer"] == "muon"
    assert found.count("[train]") == found.count("[task.options]") == 1
    assert found.endswith("[task.options]\nbatch = 4\nwidth = 64\n")


def test_an_empty_file_gets_its_tables():
    found = edit("", {"task.hooks": "a.py:B", "task.options.lr": 1e-05}, ["tune: so"])
    assert found == '[task]\nhooks = "a.py:B"\n\n[task.options]\n# tune: so\nlr = 1e-05\n'


@pytest.mark.parametrize("text", ["[task]\noptions = {lr = 1}\n", "task.options.lr = 1\n"])
def test_tables_in_one_line_are_refused(text):
    """Mutant: what the edited file means is not compared, and a key stands there twice."""
    with pytest.raises(ConfigError, match=r"yourself: task\.options\.lr = 0\.5\.$"):
        edit(text, {"task.options.lr": 0.5})


def test_a_text_is_written_as_toml_has_it():
    """Mutant: JSON, which leaves DEL as it is; TOML forbids it."""
    found = edit("", {"task.hooks": "a\x7fé.py:B"})
    assert tomllib.loads(found) == {"task": {"hooks": "a\x7fé.py:B"}}
