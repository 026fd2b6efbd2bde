"""A node that is forked is the process that its command line would have made, and nothing of it is
left.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.node.demo import nodes as module
from shoal.node.demo.nodes import DemoError, Nodes, read_line

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nodes are forked on Linux only")

WAIT_S = 60.0
SERVER = (
    "from shoal.node.demo import fork_server as f; f.import_all = lambda: "
    "__import__('numpy.random'); f.main()"
)
ABOUT = """
import gc, json, os, signal, stat, sys, threading
numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)
print(json.dumps({
    "argv": sys.argv, "name": [__name__, __package__, __spec__.name], "main": sys.modules["__main__"].__dict__ is globals(),
    "path": sys.path, "cwd": os.getcwd(), "leads": os.getsid(0) == os.getpid(), "mark": os.environ.get("MARK"),
    "signals": [str(signal.getsignal(number)) for number in numbers], "wakes": signal.set_wakeup_fd(-1),
    "mask": [str(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "files": [stat.filemode(os.fstat(fd).st_mode) for fd in range(100) if os.path.exists(f"/proc/self/fd/{fd}")],
    "stdin": sys.stdin.read(), "buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "threads": len(os.listdir("/proc/self/task")), "collects": gc.isenabled(), "main thread": threading.main_thread().name,
}), flush=True)
"""  # noqa: E501

DEMO = """
import os, pathlib, sys, threading
from shoal.node.demo import nodes as module
from shoal.node.demo.nodes import Nodes, read_line
module.PROGRAM = ("-m", "server_under_test")
with Nodes(pathlib.Path(sys.argv[1])) as nodes:
    for name in ("a", "b"):
        assert read_line(nodes.start([], name, program=["waiting"]), 60.0) == "here"
    print("here", flush=True)
    threading.Event().wait()
"""
WAITING = """
import sys, threading
from shoal.node.runtime.run_options import end_with_parent
end_with_parent(int(sys.argv[-1]), 0.01)
print("here", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Nodes of a server that imports little; modules of ``tmp_path`` can be their programs."""
    (tmp_path / "server_under_test.py").write_text(SERVER)
    monkeypatch.setattr(module, "PROGRAM", ("-m", "server_under_test"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]]), "MARK": "1"}
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


def test_fork_starts_as_its_command_would(nodes):
    """A fork is in the state in which its command would have been."""
    command = program(nodes, ABOUT)
    started = nodes.start(["up", "--json"], "a", program=command)
    line = read_line(started, WAIT_S)
    assert started.wait(WAIT_S) == 0
    own = [
        "--name",
        "a",
        "--folder",
        str(nodes.folder / "a"),
        "--identity",
        str(nodes.folder / "a.key"),
    ]
    usual = subprocess.run(
        [
            *module.interpreter(),
            "-m",
            *command,
            "up",
            "--json",
            *own,
            "--with-parent",
            str(nodes._server.pid),
        ],
        env=nodes._env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(nodes.folder / "b.log").open("w"),
        text=True,
        start_new_session=True,
        timeout=WAIT_S,
        check=True,
    )
    assert line == usual.stdout.strip()
    assert '"mark": "1"' in line
    assert '"leads": true' in line


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


def test_running_fork_can_be_ended(nodes):
    """While it runs it has no exit code and can be ended."""
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


def test_forks_draw_random_numbers_of_their_own(nodes):
    draw = program(
        nodes,
        "import random, numpy.random; print(random.random(), numpy.random.random(), flush=True)",
    )
    lines = [read_line(nodes.start([], name, program=draw), WAIT_S).split() for name in "abc"]
    assert all(len(set(numbers)) == 3 for numbers in zip(*lines, strict=True))
    assert len(lines[0]) == 2


def test_killed_server_takes_its_nodes_along(nodes):
    """A server that was killed took its nodes with it and starts no more."""
    started = nodes.start([], "a", program=program(nodes, WAITING))
    assert read_line(started, WAIT_S) == "here"
    os.kill(nodes._server.pid, signal.SIGKILL)
    assert started.wait(WAIT_S) == -signal.SIGKILL
    assert started.stdout.read() == ""  # it has ended: nobody else writes there
    with pytest.raises(DemoError, match="The node b could not be started"):
        nodes.start([], "b", program=["program_under_test"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_no_fork_outlives_a_demo_that_is_killed(tmp_path, number):
    (tmp_path / "waiting.py").write_text(WAITING)
    # The server and its forks hold the end of a pipe, which is read to its end when the last of
    # them is gone.
    os.mkfifo(tmp_path / "held")
    alive = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    holds = f"import os; os.open({str(tmp_path / 'held')!r}, os.O_WRONLY)\n"
    (tmp_path / "server_under_test.py").write_text(holds + SERVER)
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


@pytest.mark.slow(reason="imports torch and all that trains in a process of its own")
def test_preimport_starts_no_thread_or_device():
    """What is imported before the forks starts no thread and looks for no device."""
    look = (
        "import os, sys; from shoal.node.demo import fork_server; fork_server.import_all(); import "
        "torch\n"
        "print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized(), "
        "torch.cuda._is_in_bad_fork())\n"
        "print(os.cpu_count() and 'shoal.node.runtime.training_node' in sys.modules)"
    )
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", look],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.split() == ["1", "False", "False", "True"]


def test_the_server_logs_into_the_folder_of_the_demo(nodes):
    nodes.start([], "a", program=program(nodes, "")).wait(WAIT_S)
    assert (Path(nodes.folder) / module.LOG).read_text() == ""
