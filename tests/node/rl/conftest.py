"""Policies that are made once: tiny ones, one of transformers that was never trained, and where to
find a real one.
"""

import pytest

from shoal.node.rl.strings import Strings
from shoal.node.rl.tiny import Tiny, Warm
from tests.support.transformers_models import saved_model


@pytest.fixture(scope="session")
def tiny():
    """With hardly a warm start: not clever, but it ends its completions. Not to be trained."""
    return Tiny(Strings(), seed=1, width=32, warm=Warm(steps=30, batch=32))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model that was never trained, saved as transformers does."""
    return saved_model(tmp_path_factory.mktemp("model"), hidden_size=32, intermediate_size=64)
