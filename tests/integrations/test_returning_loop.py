"""Two own loops, of which one is killed and started again: it meets the other at once, and the
other stays where it is.
"""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue

import pytest

SCRIPT = Path(__file__).parent / "returning_loop.py"
ROOT = SCRIPT.parents[2]
WITHIN_ROUNDS = 2  # of every fragment
LINE = re.compile(r"round (\d+) of (\d+) met (\d+)")
TIMES = int(os.environ.get("SHOAL_TEST_RETURNS", "2"))
PATIENCE_S = 120.0


class Loop:
    """A process of the script, whose lines are read as they come."""

    def __init__(self, folder, name, link, steps):
        command = [sys.executable, str(SCRIPT), link, str(folder / f"{name}.pt"), str(steps)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.errors = (folder / f"{name}.err").open("a+")
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self._lines = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def line(self, start):
        """The next line that begins so."""
        while not (line := self._lines.get(timeout=PATIENCE_S)).startswith(start):
            pass
        return line

    def exchange(self):
        """The next exchange that ended: its round, the fragments, and how many peers it had."""
        round, fragments, members = map(int, LINE.fullmatch(self.line("round ")).groups())
        return round, fragments, members

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.errors.seek(0)
        return self.errors.read()


@pytest.mark.slow(reason="three processes, and a round before and after the return, for each time")
@pytest.mark.parametrize("time", range(TIMES))
def test_a_loop_that_was_killed_exchanges_again_within_two_rounds(tmp_path, time):
    """SHOAL_TEST_RETURNS: how often it is tried."""
    survivor = Loop(tmp_path, "survivor", "-", 100_000)
    loops = [survivor]
    try:
        link = survivor.line("link ").removeprefix("link ")
        loops.append(killed := Loop(tmp_path, "killed", link, 100_000))
        met = 0
        while met < 20 + 4 * time:
            met += killed.exchange()[2] == 2
        killed.kill()
        fragments, alone = 0, 0
        while alone < 12:  # it goes on, three rounds and more
            round, fragments, members = survivor.exchange()
            alone += members < 2
        loops.append(again := Loop(tmp_path, "killed", link, 100_000))
        assert int(again.line("resumed ").split()[1]) > 0
        first, tried = None, 0
        while first is None and tried < WITHIN_ROUNDS * fragments:
            at, _, members = again.exchange()
            tried += 1
            first = at if members == 2 else None
    finally:
        said = [loop.kill() for loop in loops]
    assert first is not None, said
    assert first > round
    assert not any("goes back" in text for text in said)
    print(f"time {time}: met after {tried} exchanges of {fragments} fragments, in round {first}")
