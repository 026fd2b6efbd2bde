import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import worlds


@pytest.fixture(scope="session")
def nursery():
    """Start the process from which ranks are forked, once, on first use."""
    made = []

    def get():
        if not made:
            made.append(worlds.start_nursery())
        return made[0]

    yield get
    for process in made:
        process.stdin.close()
        process.wait(20)


@pytest.fixture(scope="module", params=list(worlds.WORLDS))
def world(request, nursery):
    """Return one of the exchanges."""
    made = worlds.WORLDS[request.param](nursery)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ranks(nursery):
    """Return a function that starts processes of one job: ``ranks(4)``."""
    made = []

    def get(count):
        made.append(worlds.Ranks(nursery(), count))
        return made[-1]

    yield get
    for found in made:
        found.close()


@pytest.fixture
def four(ranks, fours):
    """Four ranks that serve all tests of a module: what torch prepares once in a process for a
    layout of shards takes longer than the tests. New ones, if those of the last test did not
    answer.
    """
    if not fours or not fours[-1].whole:
        fours.append(ranks(4))
    return fours[-1]


@pytest.fixture(scope="module")
def fours():
    return []
