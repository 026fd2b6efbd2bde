"""How long a node keeps the snapshots that it hands out."""

import pytest
import torch

from shoal.swarm.pacing.progress import SLOWEST_BYTES_PER_S
from shoal.swarm.state.snapshot import State, make
from shoal.swarm.state.snapshot_cache import UNUSED_S, SnapshotCache
from tests.support.clock import Clock

VALUES = 1_000_000
SLOWEST_S = 4 * VALUES / SLOWEST_BYTES_PER_S
"""That the slowest link that counts takes for all of it."""


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cache(clock):
    return SnapshotCache(clock)


@pytest.fixture
def snapshot(cache):
    weights = torch.zeros(VALUES)
    made = make(State(3, [weights]), weights.view(torch.uint8))
    cache.put(made)
    return made


def is_held(cache):
    cache.expire()
    return cache.newest(0) is not None


def test_a_snapshot_that_nobody_asks_for_is_dropped(cache, snapshot, clock):
    clock.now = UNUSED_S
    assert is_held(cache)
    cache.get(snapshot.id)
    clock.now = 2 * UNUSED_S
    assert is_held(cache)
    clock.now += 1.0
    assert not is_held(cache)


def test_a_slow_reader_keeps_its_snapshot(cache, snapshot, clock):
    """The fault: a chunk takes 131 s on the slowest link, and the next one was not held."""
    with cache.read(snapshot.id):
        clock.now = SLOWEST_S
        assert is_held(cache)
    clock.now += UNUSED_S
    assert is_held(cache), "its stream may have broken, and it comes again"
    clock.now += 1.0
    assert not is_held(cache)


def test_a_slow_reader_may_come_late(cache, snapshot, clock):
    """The fault: a snapshot that had been asked for longer than the slowest link needs for it was
    dropped at once.
    """
    while clock.now < 2 * SLOWEST_S:
        clock.now += UNUSED_S
        cache.get(snapshot.id)
    with cache.read(snapshot.id):
        clock.now += SLOWEST_S
        assert is_held(cache)


def test_who_trickles_keeps_no_snapshot_for_ever(cache, snapshot, clock):
    with cache.read(snapshot.id):
        clock.now = SLOWEST_S + UNUSED_S + 1.0
        assert not is_held(cache)
