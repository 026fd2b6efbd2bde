"""A peer that holds others up, in tests whose peers are threads of one process, is not given up."""

import pytest

from shoal.swarm.exchange import training_time


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """What holds one of them up holds up all, so a round that is lost to a busy machine would say
    nothing.
    """
    for name in ("LEAST_S", "LATE_S"):
        monkeypatch.setattr(training_time, name, 60.0)
