"""A peer that holds others up, in tests whose peers are threads of one process, is not given up."""

import pytest

from shoal.swarm.exchange import training_time
from shoal.swarm.exchange.group import deadline


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """What holds one of them up holds up all, so a round that is lost to a busy machine would say
    nothing.
    """
    monkeypatch.setattr(training_time, "LEAST_S", 60.0)
    for name in ("LEAST_S", "FORMING_S"):
        monkeypatch.setattr(deadline, name, 60.0)
