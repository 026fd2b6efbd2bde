"""Peers that are threads of one process."""

import pytest

from tests.support.unhurried import unhurried

__all__ = ["unhurried"]


@pytest.fixture
def accelerate_of_each_thread(monkeypatch):
    """accelerate's state is one per process, and a trainer that is made empties it: one per thread,
    as accelerate does on TPUs.
    """
    from accelerate import state

    for kind in (state.PartialState, state.AcceleratorState, state.GradientState):
        monkeypatch.setattr(kind, "_shared_state", state.ThreadLocalSharedDict())
