"""A thread that computes comes after the others of its process."""

import os
import sys
import threading

import pytest

from shoal.node.runtime.training_node import LAST, compute_last

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the niceness of a single thread is Linux's")


def niceness(*calls):
    """Return the niceness of a thread, before and after it made ``calls``."""
    found = []

    def run():
        thread = threading.get_native_id()
        for call in (lambda: None, *calls):
            call()
            found.append(os.getpriority(os.PRIO_PROCESS, thread))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


def test_only_the_thread_that_asks_comes_last():
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert niceness(compute_last) == [mine, max(mine, LAST)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_a_lower_priority_is_kept():
    def lower():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LAST + 5)

    assert niceness(lower, compute_last)[1:] == [LAST + 5, LAST + 5]


def test_where_it_is_forbidden_training_goes_on(monkeypatch):
    def forbidden(*_):
        raise PermissionError("no")

    monkeypatch.setattr(os, "setpriority", forbidden)
    assert len(set(niceness(compute_last))) == 1
