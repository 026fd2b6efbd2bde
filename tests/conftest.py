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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Give the timed tests of each kind to one worker, so that they wait beside what computes, and every other file to one."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            path = item.path.relative_to(HERE)
            kinds = (kind for kind, places in TIMED.items() if any(path.is_relative_to(place) for place in places))
            item.add_marker(pytest.mark.xdist_group(next(kinds, path.as_posix())))


def pytest_runtest_teardown():
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("shoal").setLevel(logging.NOTSET)
