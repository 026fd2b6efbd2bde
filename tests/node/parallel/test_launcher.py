"""Ranks are started together, stopped together, and started again only when that can help."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("rank_program.py"))
LAUNCH = """
import sys
from shoal.node.parallel.launcher import Launcher, RanksFailedError
from shoal.node.runtime.run_options import handle_all
launcher = Launcher(2, [sys.argv[1]], int(sys.argv[2]), [sys.argv[3]])
handle_all(launcher.forward)
try:
    sys.exit(int(launcher.run()))
except RanksFailedError as error:
    sys.stderr.write(f"Error: {error}\\n")
    sys.exit(int(error.exit_code))
"""


@pytest.fixture
def launch():
    started = []

    def start(how, restarts=0):
        command = [sys.executable, "-c", LAUNCH, how, str(restarts), PROGRAM]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def starts(said):
    return sorted(line for line in said.splitlines() if line.startswith("rank ") and ", start " in line)


def test_what_the_user_can_mend_is_shown_once_and_never_tried_again(launch):
    process = launch("mend", 3)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert {line.rpartition(", ")[2] for line in starts(said)} == {"start 0"}  # one of them may have been ended before it began
    assert [line for line in said.splitlines() if "rank" not in line] == ["Error: Mend it."]


def test_a_device_that_fails_is_not_tried_again(launch):
    process = launch("device", 3)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 5
    assert {line.rpartition(", ")[2] for line in starts(said)} == {"start 0"}
    assert "Error: An operation on the device failed (CUDA error: an illegal memory access was encountered)" in said


def test_a_rank_that_is_killed_restarts_all_of_whom_only_rank_0_is_heard(launch):
    process = launch("killed-once", 1)
    out, said = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "only rank 0 is heard\n"), said
    assert {"rank 0 of 2, start 1", "rank 1 of 2, start 0", "rank 1 of 2, start 1"} <= set(starts(said))
    assert "rank 1 was ended by SIGKILL: starting all 2 ranks again (1 of 1 times)" in said


def test_restarts_end_with_one_sentence(launch):
    process = launch("killed", 1)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 3
    assert said.splitlines()[-1].startswith("Error: This node ended again after 1 restart, because rank 1 was ended by SIGKILL: ")


def test_a_bug_keeps_its_traceback_and_its_exit_code(launch):
    process = launch("bug")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "RuntimeError: oops" in said


def test_a_signal_goes_to_rank_0_alone_and_its_exit_code_comes_through(launch):
    process = launch("signal", 3)
    assert process.stdout.readline() == "ready\n"
    said = ""
    while len(starts(said)) < 2:  # rank 1 is ended with rank 0, however far it came
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGTERM)
    out, rest = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "asked\n"), said + rest
    assert starts(said + rest) == ["rank 0 of 2, start 0", "rank 1 of 2, start 0"]
