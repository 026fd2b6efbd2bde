"""Two nodes behind slow uplinks with deep buffers keep meeting; in network namespaces, so as root."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "uplink.py"
METHODS = {
    "streaming": ["--method", "streaming", "--rounds", "8"],
    "noloco": ["--method", "noloco", "--rounds", "6"],
    "noloco in fragments": ["--method", "noloco", "--fragments", "2", "--lag", "auto", "--rounds", "8"],
}


def unable():
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    name = f"uplink-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20, check=False)
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], timeout=20, check=True)
    return ""


@pytest.mark.slow(reason="real nodes that exchange for minutes over a slow link")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("method", METHODS)
def test_nodes_behind_slow_uplinks_meet_in_nearly_each_round(method):
    if reason := unable():
        pytest.skip(reason)
    command = [sys.executable, str(BENCH), "--mbit", "1", "--mb", "1", "--busy", "0.8", *METHODS[method]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rounds"] >= 6, done.stderr[-2000:]
    assert found["paired"] >= found["rounds"] - 1, found
