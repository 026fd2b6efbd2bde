"""Runs seeds of the simulator and says how to see one again."""

import gc

import pytest

from tests.sim.bucket_swarm import BucketSwarm
from tests.sim.run import simulate


class Seeds:
    """Simulates seeds; ``failure`` of one is the first thing that did not hold."""

    def failure(self, seed, **options):
        return simulate(seed, **options).failure

    def first(self, seeds, **options):
        """The first of ``seeds`` that fails, and how; (None, None) if all hold."""
        for seed in seeds:
            failure = self.failure(seed, **options)
            if failure is not None:
                return seed, failure
        return None, None

    def check(self, seeds, hostile=False):
        seed, failure = self.first(seeds, hostile=hostile)
        if failure is not None:
            replay = f"python -m tests.sim.run {'hostile ' * hostile}{seed}"
            pytest.fail(
                f"seed {seed}: {failure!r}\nreplay it, with its trace: {replay}", pytrace=False
            )


@pytest.fixture
def seeds():
    """What was alive before is no garbage: a collection after a simulation looks at its objects
    only.
    """
    gc.collect()
    gc.freeze()  # and stays so: to look at it all again takes most of a second in each test
    return Seeds()


@pytest.fixture
def make():
    """Make directories of a swarm, which end with the test."""
    made = []

    def swarm(*arguments, **options):
        made.append(BucketSwarm(*arguments, **options))
        return made[-1]

    yield swarm
    for each in made:
        each.end()
