"""What every test wants: one thread, so that tests do not fight for the cores and sums are added in one order; loggers as they
were, for commands that run in the test's own process choose how much is said; and a place among the workers of pytest-xdist.
"""

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
TIMED = {
    "processes": ("e2e", "exchanges", "test_readme.py", "test_examples.py"),
    "network": ("swarm/exchange", "swarm/membership", "swarm/p2p", "swarm/security", "swarm/training", "node/runtime"),
}
"""Tests that mostly wait, for real processes or for deadlines on the real clock."""

torch.set_num_threads(1)
settings.register_profile(
    "shoal",
    deadline=None,  # how long an example takes says more of the machine than of the code
    suppress_health_check=[HealthCheck.too_slow],  # so does how long it takes to make one
    derandomize=True,  # the same examples in every run
)
settings.load_profile("shoal")


def share(place):
    """Return which tests share a worker with that at ``place``: the timed ones of its kind, else those of its file."""
    kinds = (kind for kind, places in TIMED.items() if any(place.is_relative_to(HERE / part) for part in places))
    return next(kinds, place.as_posix())


def pytest_collection_modifyitems(config, items):
    """Begin with the timed tests: they wait beside what computes."""
    kinds = [*TIMED]
    items.sort(key=lambda item: kinds.index(kind) if (kind := share(item.path)) in kinds else len(kinds))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give what shares a worker to one, in the order above.

    Not by the mark of pytest-xdist: with pytest 9.2 its --dist=loadgroup groups nothing, and does so without a word.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Shares(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return share(config.rootpath / nodeid.split("::")[0])

    config.option.loadscopereorder = False
    return Shares(config, log)


def pytest_runtest_teardown():
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("shoal").setLevel(logging.NOTSET)
