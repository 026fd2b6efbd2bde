"""What every test wants: one thread, so that tests do not fight for the cores and sums are added in
one order; loggers as they were, for commands that run in the test's own process choose how much is
said; a place among the workers of pytest-xdist; and a garbage collector that does not look at torch
and at thousands of tests again and again.
"""

import functools
import gc
import importlib
import logging
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
TIMED = {
    "commands": ("e2e",),
    "ranks": ("exchanges", "test_readme.py", "test_examples.py"),
    "hosts": ("swarm/membership", "swarm/p2p", "swarm/security"),
    "exchanges": ("swarm/exchange", "swarm/training", "node/runtime"),
}
"""Tests that mostly wait, for real processes or for deadlines on the real clock."""
LONG = (
    "swarm/seed",
    "swarm/gossip",
    "node/verify",
    "node/training",
    "bench",
    "optim/ranks",
    "verification/fingerprints",
    "node/parallel",
    "sim",
    "node/rl",
    "verification/consensus",
    "optim/rules",
    "optim/outer",
)
"""What computes for longest, file by file: it begins before the rest, so that no worker is left
alone with it at the end.
"""

gc.disable()  # until all is collected: importing makes much, and all of it stays
torch.set_num_threads(1)
settings.register_profile(
    "shoal",
    deadline=None,  # how long an example takes says more of the machine than of the code
    suppress_health_check=[HealthCheck.too_slow],  # so does how long it takes to make one
    derandomize=True,  # the same examples in every run
)
settings.load_profile("shoal")


@functools.cache
def share(place):
    """Return which tests share a worker with that at ``place``: the timed ones of its kind, else
    those of its file.
    """
    kinds = (
        kind
        for kind, places in TIMED.items()
        if any(place.is_relative_to(HERE / part) for part in places)
    )
    return next(kinds, place.as_posix())


def pytest_configure(config):
    """Let each worker of pytest-xdist begin to collect elsewhere.

    After a change all the asserts of a file are compiled anew, which takes longer than to import
    it: so once, not in each worker.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    files = sorted(map(str, HERE.rglob("test_*.py")))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    config.args = files[first:] + files[:first]


@functools.cache
def turn(place):
    """Return when the tests of the file ``place`` begin: what is timed waits beside what computes,
    and both before the rest.
    """
    kinds, named = [*TIMED], share(place)
    if named in kinds:
        return kinds.index(named), named
    return len(kinds) + next(
        (n for n, part in enumerate(LONG) if place.is_relative_to(HERE / part)), len(LONG)
    ), named


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not choose
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: (turn(item.path), item.path))
    seen = Counter()
    for item in items:
        if (mark := item.get_closest_marker("thinned")) is not None:
            case = item.path, item.originalname
            if seen[case] % mark.args[0]:
                item.add_marker("ci")
            seen[case] += 1


def pytest_collection_finish():
    """Keep what was imported and collected out of every later collection, which would take most of
    a second otherwise.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give what shares a worker to one, in the order above.

    Not by the mark of pytest-xdist: with pytest 9.2 its --dist=loadgroup groups nothing, and does
    so without a word.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Shares(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return share(config.rootpath / nodeid.split("::")[0])

    config.option.loadscopereorder = False
    return Shares(config, log)


def pytest_runtest_setup(item):
    for mark in item.iter_markers("gpu"):
        devices = mark.kwargs.get("devices", 1)
        if mark.kwargs.get("standin", False) and "standin" not in sys.modules:
            pytest.skip("needs the stand-in for a GPU: make gpu-test")
        if torch.cuda.device_count() < devices:
            pytest.skip(
                f"needs {'a GPU' if devices == 1 else f'{devices} GPUs'}, or the stand-in: make "
                "gpu-test"
            )


@pytest.fixture
def same_adam(monkeypatch):
    """Have Adam compute by the same formula everywhere: by default each kind of device has its own
    order of operations.
    """
    module = importlib.import_module("torch.optim.adam")
    adam = module.adam
    monkeypatch.setattr(
        module,
        "adam",
        lambda *given, **options: adam(*given, **(options | {"foreach": False, "fused": False})),
    )


def pytest_runtest_teardown():
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("shoal").setLevel(logging.NOTSET)
