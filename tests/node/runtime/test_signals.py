"""Ctrl-C before, during and after; in processes of their own, since signals are the whole process's."""

import signal
import subprocess
import sys
import time

import pytest

CHILD = """
import sys, threading
from shoal.node.runtime.signals import ShutdownSignals, end_with_parent
signals = ShutdownSignals()
signals.install()
if sys.argv[1] == "parent":
    end_with_parent(int(sys.argv[2]), 0.05)
if sys.argv[1] == "orderly":
    signals.orderly(lambda: print("asked", flush=True))
try:
    print("ready", flush=True)  # within: the signal may come as soon as this is read
    threading.Event().wait(20)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""


def child(*arguments):
    process = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends_at_once(number):
    process = child("orderly")
    process.send_signal(number)
    assert process.stdout.readline() == "asked\n"
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(5) == 130
    assert time.monotonic() - began < 1
    process.stdout.close()


def test_before_there_is_anything_to_drain_the_first_signal_interrupts():
    process = child("early")
    process.send_signal(signal.SIGTERM)
    assert (process.wait(5), process.stdout.read()) == (7, "interrupted\n")
    process.stdout.close()


def test_a_node_ends_with_the_process_that_started_it():
    script = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}, 'parent', str(os.getpid())])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    lines = {parent.stdout.readline(), parent.stdout.readline()}
    assert "ready\n" in lines
    parent.kill()
    parent.wait(5)
    assert parent.stdout.read() == ""  # ends when nobody holds the pipe any more: the child is gone
    parent.stdout.close()
