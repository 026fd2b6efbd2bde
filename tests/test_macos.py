"""What Linux alone has is used on Linux alone: each use of it, as on macOS, on which nothing was
run by us.
"""

import ctypes
import os
import platform
import resource
import sys
import time

import pytest

from shoal.node.doctor import machine_checks
from shoal.node.doctor.check import Note
from shoal.node.free_memory import free_memory
from shoal.node.runtime.compute_last import compute_last
from shoal.node.runtime.display import processor_time
from shoal.node.training import resources
from shoal.node.training.loader import _begin_worker
from shoal.swarm.p2p import daemon_guard
from shoal.swarm.state.spool import SPOOLED_BYTES, spool_for


@pytest.fixture(autouse=True)
def macos(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    for module, name in ((os, "posix_fallocate"), (time, "pthread_getcpuclockid")):
        monkeypatch.delattr(module, name, raising=False)


@pytest.fixture
def never(monkeypatch):
    def called(*arguments, **options):
        raise AssertionError("Linux alone has it")

    return lambda owner, name: monkeypatch.setattr(owner, name, called)


def test_no_process_is_tied_to_its_parent(never, monkeypatch):
    """Nothing asks the kernel to end a process with its parent."""
    never(ctypes, "CDLL")
    daemon_guard._die_with_parent()
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("signal.set_wakeup_fd", lambda *_: -1)
    _begin_worker(os.getpid(), True, 0)


def test_niceness_of_the_process_stays(never):
    never(os, "setpriority")  # there a thread's number would be taken for that of a process
    compute_last()


def test_a_large_snapshot_stays_in_memory():
    assert spool_for(SPOOLED_BYTES) is None


def test_the_clock_is_that_of_the_whole_process():
    assert processor_time() is time.process_time


def test_memory_held_is_what_macos_counts_in_bytes(monkeypatch):
    monkeypatch.setattr(
        "builtins.open", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError("/proc"))
    )
    assert resources.held() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_memory_free_is_all_of_it(tmp_path):
    all_of_it = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free_memory(tmp_path / "none", tmp_path / "none") == (all_of_it, all_of_it)


@pytest.mark.parametrize(
    ("system", "machine", "says"),
    [
        ("Linux", "x86_64", None), ("Linux", "aarch64", None), ("Darwin", "arm64", "not run by us"),
        ("Darwin", "x86_64", "no wheel for it"), ("Linux", "riscv64", "no wheel for it"),
    ],
)  # fmt: skip
def test_the_doctor_knows_the_platforms(monkeypatch, system, machine, says):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    if says is None:
        assert f"on {system} {machine}" in machine_checks.python(None, print)
    else:
        with pytest.raises(Note, match=says):
            machine_checks.python(None, print)
