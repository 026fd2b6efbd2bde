"""Imports ahead of their need: there at the end, whatever happens meanwhile, and no error if there is no such module."""

import subprocess
import sys

import pytest

from node.ahead import OPTIMIZERS, importing

MODULE = "colorsys"  # of the standard library, and used by nobody here


def test_it_is_there_at_the_end_also_after_an_error():
    for error in (None, KeyError):
        sys.modules.pop(MODULE, None)
        with pytest.raises(error) if error else importing("json"), importing(MODULE):
            if error:
                raise error
        assert MODULE in sys.modules


def test_what_cannot_be_imported_is_left_to_whoever_needs_it():
    with importing("no_such_module_anywhere"):
        pass


def test_the_first_optimizer_needs_it():
    made = "import sys, torch; torch.optim.AdamW([torch.zeros(1, requires_grad=True)]); print(sys.argv[1] in sys.modules)"
    done = subprocess.run([sys.executable, "-c", made, OPTIMIZERS], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
