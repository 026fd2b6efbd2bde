"""Ranks of a torch.distributed job, each a process that a test can kill.

As a program it is a nursery: it imports everything once, and forks a rank for each line on stdin,
which connects to a socket and takes orders there, one JSON object a line: {"steps": [...],
"options": {...}} for a ``script``, or {"file": PATH, "function": NAME, "arguments": {...}} for
anything else. The store lives in the test's process.
"""

import json
import os
import signal
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer of a process does, for seconds: here once for all ranks
import torch.distributed as dist

# this and those below: what the jobs import, here once for all ranks
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

sys.path.insert(0, str(Path(__file__).parent))
import script

from shoal.optim import Distributed


def serve(connection, order):
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", order["port"], is_master=False, timeout=timedelta(seconds=240)
    )
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("job", store), rank=order["rank"], world_size=order["world"]
    )
    with connection.makefile("rw") as stream:
        for line in stream:
            try:
                answer = {"value": answer_to(json.loads(line), store)}
            except Exception:
                answer = {"error": traceback.format_exc()}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


def answer_to(order, store):
    if "file" in order:
        sys.path.insert(0, str(Path(order["file"]).parent))
        return getattr(__import__(Path(order["file"]).stem), order["function"])(
            **order["arguments"]
        )
    exchange = Distributed(**order["options"])
    marks = dist.PrefixStore(order["marks"], store)

    def mark(what):
        marks.set(what, "-")

    def after(what):
        marks.wait([what], timedelta(seconds=240))

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        return script.play(exchange, "run", order["steps"], mark, after, die)
    finally:
        exchange.close()


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork() == 0:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(order["socket"])
            try:
                serve(connection, order)
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
