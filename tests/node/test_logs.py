"""The reader of a process's output goes, as `| head` or an ssh session does. The process goes on; its exit code is its own."""

import json
import os
import subprocess
import sys

import pytest

from shoal.node.checkpoint.folder import steps

WRITES = """
import logging, sys, click
from types import SimpleNamespace
from rich.console import Console
from shoal.node.console import drop_lost_output, is_lost, log_to_stderr
from shoal.node.runtime.display import LiveDisplay, make_display
drop_lost_output()
log_to_stderr(False)
displays = [make_display(), LiveDisplay(Console(file=sys.stderr, force_terminal=True))]
for display in displays:
    display.start(3)
for number in range(3):
    print(number)
    print(number, file=sys.stderr)
    click.echo("result")
    click.echo("note", err=True)
    logging.getLogger("shoal.x").warning("warning")
    Console().print("table")
    for display in displays:
        display.message("a message")
        display.update(SimpleNamespace(step=number, loss=1.0, rates=SimpleNamespace(steps_per_s=2.0, tokens_per_s=0.0)))
for display in displays:
    display.close()
open(sys.argv[1], "w").write(f"{is_lost(sys.stdout)} {is_lost(sys.stderr)}")
sys.exit(5)
"""


def without_a_reader(kind):
    """Return a descriptor to write to, of a pipe or a terminal that nobody reads."""
    reader, writer = os.openpty() if kind == "terminal" else os.pipe()
    os.close(reader)
    return writer


def run(arguments, out, err, **how):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=120, **how
    )


@pytest.mark.parametrize(
    ("kind", "unbuffered", "which"), [("pipe", "", "both"), ("terminal", "1", "both"), ("pipe", "1", "stdout")]
)
def test_every_kind_of_writing_goes_on(tmp_path, kind, unbuffered, which):
    lost = without_a_reader(kind)
    err = lost if which == "both" else subprocess.PIPE
    ended = run(["-c", WRITES, tmp_path / "done"], lost, err, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    os.close(lost)
    assert ended.returncode == 5
    assert (tmp_path / "done").read_text() == ("True True" if which == "both" else "True False")
    if which == "stdout":
        assert b"Traceback" not in ended.stderr
        assert ended.stderr.count(b"WARNING shoal.x: warning") == 3


def test_messages_for_a_full_disk_are_dropped_and_results_are_not():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    script = "import sys\nfrom shoal.node.console import drop_lost_output\ndrop_lost_output()\nprint('x', file=sys.{}, flush=True)"
    with open("/dev/full", "w") as full:
        assert run(["-c", script.format("stderr")], subprocess.PIPE, full).returncode == 0
        result = run(["-c", script.format("stdout")], full, subprocess.PIPE)
    assert result.returncode == 1
    assert b"No space left" in result.stderr


def test_a_short_command_is_quiet():
    lost = without_a_reader("pipe")
    for command in (["--help"], ["plan", "--json", "--params", "1e6", "--step", "0.5", "--mbit", "20", "--rtt", "0.1"]):
        ended = run(["-m", "shoal", *command], lost, subprocess.PIPE)
        assert (ended.returncode, ended.stderr) == (0, b"")
    os.close(lost)


@pytest.mark.slow(reason="starts a node and its daemon")
def test_a_node_trains_to_its_end_and_saves(tmp_path):
    lost = without_a_reader("pipe")
    own = ["--name", "n", "--folder", tmp_path / "n", "--identity", tmp_path / "n.key", "--listen", "/ip4/127.0.0.1/tcp/0"]
    few = ["--steps", "6", "--every", "3", "--threads", "1", "--set", "outer.wait_s=1", "--json"]
    ended = run(["-m", "shoal", "up", *own, *few], lost, lost)
    os.close(lost)
    assert ended.returncode == 0
    assert steps(tmp_path / "n") == [6]
    assert json.loads((tmp_path / "n" / "metrics.jsonl").read_text().splitlines()[-1])["event"] == "end"


WATCHES = """
import queue, sys, threading
from shoal.node.console import drop_lost_output
from shoal.node.watch import source
drop_lost_output()
class Endless:
    ended = threading.Event()
source.line_of = str
inbox = queue.Queue()
for number in range(3):
    inbox.put(number)
source.print_lines(inbox, Endless(), None)
sys.exit(inbox.qsize())
"""


def test_a_stream_of_events_ends_with_its_reader():
    lost = without_a_reader("pipe")
    ended = run(["-c", WATCHES], lost, subprocess.PIPE)
    os.close(lost)
    assert (ended.returncode, ended.stderr) == (2, b"")
