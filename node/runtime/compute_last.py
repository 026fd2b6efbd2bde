"""Training gives way to the node's other threads, where votes have deadlines."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

COMPUTING_NICENESS = 10
"""Niceness of a thread that computes: the others of its session have ten times its share where they
want the same processor.
"""


def compute_last() -> None:
    """Let this thread compute after the other threads of its process, where the system can tell
    them apart (Linux).

    A step has no deadline, while a vote on a claim has seconds. On a machine with more to compute
    than processors a node that verifies would miss votes, lose reputation, and in the end be
    banned. Threads and processes that this one starts come last too.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            niceness = max(os.getpriority(os.PRIO_PROCESS, thread), COMPUTING_NICENESS)
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
