import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "exchanges")]
import worlds  # noqa: E402


@pytest.fixture(scope="session")
def nursery():
    """Start the process from which ranks are forked."""
    process = worlds.start_nursery()
    yield process
    process.stdin.close()
    process.wait(20)


@pytest.fixture(scope="module")
def trios():
    made = []
    yield made
    for ranks in made:
        ranks.close()


@pytest.fixture
def trio(nursery, trios):
    """Three processes: the two ranks of one peer, and another peer.

    New ones, if those of the last test did not answer.
    """
    if not trios or not trios[-1].whole:
        trios.append(worlds.Ranks(nursery, 3))
    return trios[-1]
