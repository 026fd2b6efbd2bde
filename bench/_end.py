"""One end of an exchange for bench/exchange.py, a process of its own:
`python -m bench._end KIND NUMBER LIMIT [IP]`.

It is told what to do by JSON lines on stdin and answers with JSON lines on stdout. It ends, with
every process that it or a library forked, at the end of stdin or after LIMIT seconds, so that
nothing is left behind when the benchmark is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from bench._contenders import peer_of


def rss() -> tuple[int, int]:
    """Resident bytes of this process: now, and at most since the last call."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    now, most = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


def reap() -> None:
    """End whatever was forked from this process and is still there."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)


def overdue() -> None:
    reap()
    os._exit(1)


def answering(limit: float) -> Callable[..., None]:
    """What prints its keyword arguments as a line of JSON on stdout, alone there; this process ends
    after ``limit`` seconds.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    watchdog = threading.Timer(limit, overdue)
    watchdog.daemon = True
    watchdog.start()

    def say(**what: Any) -> None:
        print(json.dumps(what), file=out, flush=True)

    return say


def main(kind: str, number: int, limit: float, ip: str = "127.0.0.1") -> None:
    say = answering(limit)
    torch.set_num_threads(max((os.cpu_count() or 2) // 2, 1))  # as a node does
    try:
        peer = peer_of(kind, number, ip)
        say(address=peer.address())
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "meet":
                peer.meet(*order["others"])
                say(met=True)
            elif order["do"] == "prepare":
                peer.prepare(order["mb"])
                say(before=rss()[0])
            elif order["do"] == "go":
                before = peer.sent()
                began = time.perf_counter()
                peer.exchange()
                seconds = time.perf_counter() - began
                say(seconds=seconds, peak=rss()[1], sent=peer.sent() - before)
            elif order["do"] == "check":
                say(right=peer.right())
        peer.close()
    finally:
        reap()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
