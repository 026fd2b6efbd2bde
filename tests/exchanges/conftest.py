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
