"""Runs seeds of the simulator and says how to see one again."""

import gc
import importlib.util
import logging
from pathlib import Path

import pytest

from shoal.swarm.sim.run import simulate


class Seeds:
    """Simulates seeds; ``failure`` of one is the first thing that did not hold."""

    def failure(self, seed, **options):
        return simulate(seed, **options).failure

    def first(self, seeds):
        """The first of ``seeds`` that fails, and how; (None, None) if all hold."""
        for seed in seeds:
            failure = self.failure(seed)
            if failure is not None:
                return seed, failure
        return None, None

    def check(self, seeds):
        seed, failure = self.first(seeds)
        if failure is not None:
            pytest.fail(f"seed {seed}: {failure!r}\nreplay it, with its trace: python -m shoal.swarm.sim.run {seed}", pytrace=False)


@pytest.fixture
def seeds():
    """What was alive before is no garbage: a collection after a simulation looks at its objects only."""
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)  # it says that an all-reduce failed, as it is meant to here
    gc.collect()
    gc.freeze()
    yield Seeds()
    gc.unfreeze()


def _e2e():
    """The fixtures of tests/e2e for real processes: modules of tests cannot import from each other."""
    spec = importlib.util.spec_from_file_location("e2e_conftest", Path(__file__).parents[1] / "e2e" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_of_e2e = _e2e()
_nursery, nursery, worker_module, eventually = _of_e2e._nursery, _of_e2e.nursery, _of_e2e.worker_module, _of_e2e.eventually
