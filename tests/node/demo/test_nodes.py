"""The processes of a demo: their ends and last words arrive, and none outlives the demo."""

import os
import select
import signal
import subprocess
import sys

import pytest

from shoal.node.demo.nodes import Nodes, read_line

WAIT_S = 60.0
DEMO = """
import pathlib, sys, threading
from shoal.node.demo.nodes import Nodes, read_line
with Nodes(pathlib.Path(sys.argv[1])) as nodes:
    for name in ("a", "b"):
        assert read_line(nodes.start([], name, program=["waiting"]), 60.0) == "here"
    print("here", flush=True)
    threading.Event().wait()
"""
WAITING = """
import os, sys, threading
from shoal.node.runtime.run_options import end_with_parent
os.open({held!r}, os.O_WRONLY)
end_with_parent(int(sys.argv[-1]), 0.01)
print("here", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def nodes(tmp_path):
    """Nodes whose programs can be modules of ``tmp_path``."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
    # Without the handlers of signals that `Nodes.__enter__` sets.
    made = Nodes(tmp_path, env)
    yield made
    made.__exit__()


def program(nodes, text):
    """The command of a module with this text."""
    (nodes.folder / "program_under_test.py").write_text(text)
    return ["program_under_test"]


def log_of(nodes, name="a"):
    return (nodes.folder / f"{name}.log").read_text()


def test_node_has_a_key_a_folder_and_a_parent(nodes):
    show = program(nodes, "import os, sys; print(*sys.argv[1:], os.getsid(0) == os.getpid())")
    line = read_line(nodes.start(["up"], "a", program=show), WAIT_S)
    own = ["--name", "a", "--folder", nodes.folder / "a", "--identity", nodes.folder / "a.key"]
    assert line == " ".join(map(str, ["up", *own, "--with-parent", os.getpid(), True]))


@pytest.mark.parametrize(
    ("text", "code", "logged"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('no luck')", 1, "no luck"),
        (
            "import atexit, sys; atexit.register(lambda: print('at the end', file=sys.stderr))",
            0,
            "at the end",
        ),
        ("raise ValueError('no luck')", 1, "ValueError: no luck"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_its_exit_code_and_its_last_words_arrive(nodes, text, code, logged):
    started = nodes.start([], "a", program=program(nodes, text))
    assert started.wait(WAIT_S) == code
    assert (started.poll(), started.wait(0.0)) == (code, code)
    assert log_of(nodes).strip().endswith(logged)


def test_running_node_has_no_exit_code_and_can_end(nodes):
    forever = program(
        nodes, "import threading; print('here', flush=True); threading.Event().wait()"
    )
    one, other = (nodes.start([], name, program=forever) for name in "ab")
    assert [read_line(one, WAIT_S), read_line(other, WAIT_S)] == ["here", "here"]
    assert one.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.01)
    one.terminate()
    assert one.wait(WAIT_S) == -signal.SIGTERM
    one.kill()  # nothing happens: the number may be another process's by now
    assert other.poll() is None
    other.kill()
    assert other.wait(WAIT_S) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_no_node_outlives_a_demo_that_is_killed(tmp_path, number):
    # The nodes hold the end of a pipe, which is read to its end when the last of them is gone.
    held = tmp_path / "held"
    os.mkfifo(held)
    alive = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "waiting.py").write_text(WAITING.format(held=str(held)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
    demo = subprocess.Popen(
        [sys.executable, "-c", DEMO, str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True
    )
    assert demo.stdout.readline() == "here\n"
    demo.send_signal(number)
    demo.wait(WAIT_S)
    demo.stdout.close()
    assert select.select([alive], [], [], WAIT_S)[0]
    assert os.read(alive, 1) == b""
    os.close(alive)
