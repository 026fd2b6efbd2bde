"""Real `shoal` processes in a temporary home, and a way to see whether anything of them is left."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil

from tests.support.forked import ForkServer
from tests.support.waiting import LIMIT_S, until

ROOT = Path(__file__).resolve().parents[2]

TEXT = (
    "a shoal of fish stays together while each swims its own way and no one leads them through "
    "the deep water"
)


class Forks:
    """Forks ``shoal`` commands from one process, which is started when the first is wanted: to
    import torch takes seconds each.
    """

    def __init__(self):
        self._server = None

    def start(self, arguments, env, stderr, cwd):
        if self._server is None:
            self._home = tempfile.TemporaryDirectory()
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            self._server = ForkServer(
                Path(self._home.name), {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            )
        command = ["tests.e2e.as_command", str(cwd), json.dumps(env), *map(str, arguments)]
        return self._server.start(command, stderr, "test")

    def close(self):
        if self._server is not None:
            self._server.close()
            self._home.cleanup()


class Process:
    """One ``shoal`` command; its output is collected while it runs.

    Without a ``program`` it is one of ``forks``.
    """

    def __init__(self, arguments, env, errors, cwd, forks, program=None, before=()):
        self.errors = errors
        self.lines = []
        self._news = threading.Condition()
        self._ended = False
        with errors.open("w") as stderr:
            if program is None:
                self.popen = forks.start(arguments, env, stderr, cwd)
            else:
                self.popen = subprocess.Popen(
                    [*map(str, (*before, *program, *arguments))],
                    env=env,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    start_new_session=True,
                )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.popen.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def line(self, number=0, seconds=LIMIT_S):
        """Line ``number`` of stdout, as soon as it is there."""
        with self._news:
            self._news.wait_for(lambda: len(self.lines) > number or self._ended, seconds)
            assert len(self.lines) > number, f"no line {number} on stdout; stderr: {self.said()}"
            return self.lines[number]

    def said(self):
        """What is on stderr by now."""
        return self.errors.read_text()

    def wait(self, seconds=LIMIT_S):
        """The exit code."""
        code = self.popen.wait(seconds)
        self._reader.join(60)
        return code

    def signal(self, number):
        self.popen.send_signal(number)

    def error(self, code=2):
        """The one sentence with which the command must have ended."""
        assert (self.wait(), self.lines) == (code, []), self.said()
        # Before it may stand what Muon trains and, as a start takes over ten seconds on a busy
        # machine, that the node is alive.
        known = r"^Muon trains |, [\d.]+ (s|min|h) so far( \(idle: [\w ]+\))?$"
        said = [line for line in self.said().splitlines() if not re.search(known, line)]
        assert len(said) == 1, said
        assert said[0].startswith("Error: "), said
        return said[0].removeprefix("Error: ")

    def json(self, seconds=LIMIT_S):
        """The one line of stdout, after the command ended well."""
        assert self.wait(seconds) == 0, self.said()
        (line,) = self.lines
        return json.loads(line)


class Shoal:
    """Starts commands whose homes, temporary files and data are below ``home``."""

    def __init__(self, home, forks):
        self.home, self.forks = home, forks
        self.tmp = home / "tmp"
        self.tmp.mkdir()
        self.env = {
            **os.environ,
            "TMPDIR": str(self.tmp),
            "XDG_CONFIG_HOME": str(home / "config"),
            "OMP_NUM_THREADS": "1",
        }
        self.processes = []
        self.command = None
        self.text = home / "text"
        self.text.mkdir()
        words = TEXT.split()
        for number in range(60):
            shuffled = [words[(number * i * i + i) % len(words)] for i in range(120)]
            (self.text / f"{number}.txt").write_text(" ".join(shuffled))

    def start(self, *arguments, program=None, before=(), folder=None):
        """Start a command in ``folder``, by default ``home``, in a fork; or as a program, with the
        two below or `command`.

        ``program``: arguments of Python, such as ``("-m", "shoal")``; ``before``: what stands in
        front of all.
        """
        if program is not None or before:
            program = (sys.executable, *(program or ("-m", "shoal")))
        errors = self.home / f"errors-{len(self.processes)}"
        process = Process(
            arguments,
            self.env,
            errors,
            folder or self.home,
            self.forks,
            program or self.command,
            before,
        )
        self.processes.append(process)
        return process

    def own(self, name):
        """Flags of a node on loopback with a key and a folder of its own."""
        place = ["--folder", self.home / name, "--identity", self.home / f"{name}.key"]
        return ["--name", name, *place, "--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1"]

    def node(self, verb, what, name, *arguments, **how):
        """Start ``shoal up`` or ``join`` as such a node with a little text of its own."""
        return self.start(verb, what, *self.own(name), "--data", self.text, *arguments, **how)

    def interrupt(self, *nodes):
        """End each by Ctrl-C, one after another."""
        for node in nodes:
            node.signal(signal.SIGINT)
            assert node.wait() == 130, node.said()

    def toml(self, *, options=None, **tables):
        """Write a settings file."""
        tables = {**tables, "task.options": options or {}}
        text = "".join(
            f"[{table}]\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
            for table, values in tables.items()
        )
        path = self.home / "swarm.toml"
        path.write_text(text)
        return path

    def left(self):
        """Processes and sockets of ours that are still there: those started here, and their daemons
        and guards.
        """
        mine = str(self.home)
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            if (
                mine in " ".join(process.info["cmdline"] or ())
                and process.info["status"] != psutil.STATUS_ZOMBIE
            ):
                found.append(" ".join(process.info["cmdline"]))
        found += [
            f"process {process.popen.pid}"
            for process in self.processes
            if process.popen.poll() is None
        ]
        return found + [str(path) for path in self.tmp.glob(f"shoal-{os.getuid()}/*")]

    def metrics(self, name):
        """The events that a node has written; one that it is writing just now is not among them."""
        path = self.home / name / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def rounds(self, name, members=None):
        """The rounds that a node has ended, of so many ``members`` where that is given."""
        return [
            event
            for event in self.metrics(name)
            if event["event"] == "round" and members in (None, event["members"])
        ]

    def result(self, name):
        return json.loads((self.home / name / "result.json").read_text())

    def stop(self):
        """End what still runs."""
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.kill()
            process.popen.wait(60)
            process._reader.join(60)
            process.popen.stdout.close()
        until(lambda: not self.left(), 60, "the end of all daemons and guards")
