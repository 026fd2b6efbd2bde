"""A bench in a network of its own, whose loopback carries only its own bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

INSIDE = "SHOAL_BENCH_INSIDE"
"""Set in the environment of a bench that runs there."""


def run_inside(script: str, arguments: Sequence[str]) -> int:
    """Run ``script`` again with ``arguments`` in a network namespace, as root; return its exit
    code.
    """
    inner = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, script, *arguments]
    return subprocess.run(
        ["unshare", "--net", *inner], env={**os.environ, INSIDE: "1"}, check=False
    ).returncode
