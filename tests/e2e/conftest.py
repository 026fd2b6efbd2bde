"""Real `shoal` processes in a temporary home of their own, and a way to see whether anything of
them is left.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from shoal.optim.exchange.pairing import rank
from tests.support.shoal_commands import Forks, Shoal
from tests.support.waiting import LIMIT_S, until


def _make(forks):
    # Short, because the daemon's sockets are below it and a socket's path may have some 100 bytes.
    return Shoal(Path(tempfile.mkdtemp(prefix="e2e-")), forks)


@pytest.fixture(scope="session")
def forks():
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def shoal(forks):
    made = _make(forks)
    yield made
    made.stop()
    shutil.rmtree(made.home)


@pytest.fixture(scope="module")
def shared(forks):
    """The same for all tests of a file."""
    made = _make(forks)
    yield made
    made.stop()
    shutil.rmtree(made.home)


@pytest.fixture(scope="session")
def eventually():
    """The function ``until``: modules of tests cannot import from each other."""
    return until


class Peer:
    """The test's end of a worker (worker.py): orders go out, events come in."""

    def __init__(self, connection):
        self.socket = connection
        self.events = []
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.pid = int.from_bytes(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder
        )

    def _read(self):
        for line in self.socket.makefile():
            with self._news:
                self.events.append(json.loads(line))
                self._news.notify_all()

    def tell(self, do, **fields):
        self.socket.sendall(json.dumps({"do": do, **fields}).encode() + b"\n")

    def signal(self, number):
        os.kill(self.pid, number)

    def wait(self, event, seconds=LIMIT_S, **fields):
        """The first event of that name with these fields, as soon as it is there."""

        def found():
            return [e for e in self.events if e["event"] == event and fields.items() <= e.items()]

        with self._news:
            assert self._news.wait_for(found, seconds), (
                f"no {event} {fields} within {seconds:g} s but {self.events}"
            )
            return found()[0]

    def ask(self, do, event, seconds=LIMIT_S, **fields):
        self.tell(do, **fields)
        return self.wait(event, seconds)


class Nursery:
    """Forks workers; all are ended with the test."""

    def __init__(self):
        self.home = Path(tempfile.mkdtemp(prefix="e2e-"))
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.home / "s"))
        self.listener.listen()
        self.listener.settimeout(120)
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("worker.py")],
            env={**os.environ, "TMPDIR": str(self.home), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"
        self.peers = []

    def worker(self):
        self.process.stdin.write(f"{self.home / 's'}\n")
        self.process.stdin.flush()
        peer = Peer(self.listener.accept()[0])
        self.peers.append(peer)
        return peer

    def _hosts(self, count):
        """Workers, and where each is found."""
        peers = [self.worker() for _ in range(count)]
        for peer in peers:
            peer.tell("host")
        return peers, [
            {key: peer.wait("host")[key] for key in ("peer", "addresses")} for peer in peers
        ]

    def pair(self, *, attack=None, **options):
        """Two workers with hosts that know each other; the second may be an attacker
        (bench/_attacks.py).
        """
        two, places = self._hosts(2)
        for peer, other in zip(two, reversed(places), strict=True):
            lies = {} if attack is None or peer is two[0] else {"attack": attack}
            peer.tell("meet", other=other, **lies, **options)
        for peer in two:
            peer.wait("met")
        return two

    def group(self, count, **timeouts):
        """Workers with hosts that know each other, for group exchanges; in the order in which they
        lead round 0.
        """
        peers, places = self._hosts(count)
        for peer in peers:
            peer.tell("group", places=places, **timeouts)
        for peer in peers:
            peer.wait("met")
        return sorted(peers, key=lambda peer: rank(0, 0, peer.wait("host")["peer"]))

    def left(self, pid):
        """Daemon, guard and socket folder of a worker."""
        mine = str(self.home / f"shoal-{os.getuid()}" / f"{pid}-")
        processes = (" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
        return [command for command in processes if mine in command] + list(
            self.home.glob(f"shoal-*/{pid}-*")
        )

    def end_workers(self):
        for peer in self.peers:
            if psutil.pid_exists(peer.pid):
                os.kill(peer.pid, signal.SIGKILL)
            peer.socket.close()
            until(lambda pid=peer.pid: not self.left(pid), 60, "the end of a worker's daemon")
        self.peers.clear()

    def close(self):
        self.end_workers()
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        self.listener.close()
        shutil.rmtree(self.home)


@pytest.fixture(scope="session")
def _nursery():
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def nursery(_nursery):
    """Workers for one test."""
    yield _nursery
    _nursery.end_workers()


@pytest.fixture(scope="session")
def worker_module():
    """worker.py, for what it computes: modules of tests cannot import from each other."""
    spec = importlib.util.spec_from_file_location(
        "e2e_worker", Path(__file__).with_name("worker.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
