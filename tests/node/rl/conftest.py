"""A tiny policy that is made once."""

import pytest

from shoal.node.rl.environment import Strings
from shoal.node.rl.tiny import Tiny, Warm


@pytest.fixture(scope="session")
def tiny():
    """With hardly a warm start: not clever, but it ends its completions. Not to be trained."""
    return Tiny(Strings(), seed=1, width=32, warm=Warm(steps=30, batch=32))
