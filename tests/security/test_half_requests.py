"""1,100 half requests, and 300 event streams that nobody reads, against pages that may open 1,024
files: others are served.
"""

import contextlib
import json
import resource
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1024
METRICS = """
import time
from shoal.node.listen_address import Address
from shoal.node.metrics.prometheus import Endpoint
made = Endpoint(Address("127.0.0.1", 0))
print(made.address.port, flush=True)
time.sleep(300)  # the server's time limit; its test ends it before
"""
PAGE = """
import ipaddress, queue, threading, types
from shoal.node.watch import web
web.ipaddress = types.SimpleNamespace(ip_address=lambda host: types.SimpleNamespace(is_loopback=False))  # callers are strangers
class Source:
    ended = threading.Event()
said = lambda text: print(text.rstrip("/").rpartition(":")[2], flush=True)
web.serve(web.Page(queue.Queue(), Source(), live=True, shared=True), web.Address(web.HERE, 0), 300, said)
"""  # noqa: E501


@contextlib.contextmanager
def served(code):
    """Run ``code`` with few descriptors; its port, and its process."""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
    )  # fmt: skip
    try:
        yield int(child.stdout.readline()), psutil.Process(child.pid)
    finally:
        child.kill()
        child.wait(30)
        child.stdout.close()


def opened(port, source, data):
    link = socket.create_connection(("127.0.0.1", port), 30, (source, 0))
    with contextlib.suppress(OSError):  # it was hung up on
        link.sendall(data)
    return link


def first_line(port, path, source):
    with opened(port, source, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()) as link:
        return link.makefile("rb").readline()


@pytest.mark.ci
@pytest.mark.parametrize(("code", "path"), [(METRICS, "/metrics"), (PAGE, "/")])
def test_half_requests_of_three_ranges_shut_nobody_else_out(code, path):
    with served(code) as (port, process), contextlib.ExitStack() as held:
        for number in range(1100):
            source = f"127.{1 + number % 3}.0.{1 + number // 3 % 200}"
            held.enter_context(opened(port, source, f"GET {path} HTTP/1.1\r\nHost: 127".encode()))
        assert first_line(port, path, "127.9.0.1").split()[1] == b"200"
        assert process.is_running()
        assert process.num_fds() < LIMIT / 2


def test_event_streams_that_nobody_reads_shut_no_viewer_out():
    """The 257th viewer of a shared page, and the 33rd of another, was refused."""
    with served(PAGE) as (port, process), contextlib.ExitStack() as held:
        for number in range(300):
            source = f"127.{1 + number % 3}.0.{1 + number // 3 % 5}"
            held.enter_context(
                opened(port, source, b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            )
        with opened(
            port, "127.9.0.1", b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        ) as viewer:
            lines = viewer.makefile("rb")
            assert lines.readline().split()[1] == b"200"
            pictures = (line for line in lines if line.startswith(b"data: "))
            assert "peers" in json.loads(next(pictures).removeprefix(b"data: "))
        assert process.num_fds() < LIMIT / 2
