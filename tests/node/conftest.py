"""What tests of the node share."""

import pytest

from shoal.node import user_code


@pytest.fixture
def users_code():
    """A task in a module of the tests is the user's code for one test only: else an error of
    another test would be a user's.
    """
    yield
    user_code._modules.discard("tests")
