"""Ctrl-C before, during and after; in processes of their own, since signals are the whole process's."""

import os
import signal
import subprocess
import sys

import pytest

CHILD = """
import sys, threading
from shoal.node.runtime.run_options import ShutdownSignals, end_with_parent
signals = ShutdownSignals()
signals.install()
if sys.argv[1] == "parent":
    end_with_parent(int(sys.argv[2]), 0.05)
asked = threading.Event()
if sys.argv[1] in ("orderly", "terminal"):
    signals.orderly(lambda: (print("asked", flush=True), asked.set()))
try:
    print("ready", flush=True)  # within: the signal may come as soon as this is read
    if sys.argv[1] == "terminal":
        asked.wait(60)
        print("the end", file=sys.stderr, flush=True)
        print("written", flush=True)
    threading.Event().wait(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""


def child(*arguments, hang_up=signal.SIG_DFL, **how):
    usual = lambda: signal.signal(signal.SIGHUP, hang_up)  # noqa: E731 (a test run under nohup ignores it)
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True, preexec_fn=usual, **how
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends_at_once(number):
    process = child("orderly")
    process.send_signal(number)
    assert process.stdout.readline() == "asked\n"
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(60) == 130  # by the signal: the child's own end is 0
    process.stdout.close()


def test_a_hang_up_asks_once_however_often_it_comes_and_spares_who_ignores_it():
    process = child("orderly")
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130  # by the second signal that is none of the terminal's: -1 if one of those had ended it
    assert process.stdout.read() == ""
    process.stdout.close()

    spared = child("orderly", hang_up=signal.SIG_IGN)
    spared.send_signal(signal.SIGHUP)
    spared.send_signal(signal.SIGTERM)
    assert spared.stdout.readline() == "asked\n"
    spared.send_signal(signal.SIGTERM)
    assert spared.wait(60) == 130
    spared.stdout.close()


def test_after_a_hang_up_nothing_is_written_to_the_terminal():
    master, slave = os.openpty()
    process = child("terminal", stderr=slave)
    os.close(slave)
    os.close(master)
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == "asked\n"
    assert process.stdout.readline() == "written\n"  # to a terminal that is gone: OSError
    process.kill()
    process.wait()
    process.stdout.close()


def test_before_there_is_anything_to_drain_the_first_signal_interrupts():
    process = child("early")
    process.send_signal(signal.SIGTERM)
    assert (process.wait(60), process.stdout.read()) == (7, "interrupted\n")
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
    parent.wait(60)
    assert parent.stdout.read() == ""  # ends when nobody holds the pipe any more: the child is gone
    parent.stdout.close()
