"""Two and four nodes behind slow uplinks keep meeting and learn; in network namespaces, so as
root.
"""

import json
import math
import os
import shutil
import subprocess

import pytest

from bench import spot
from bench._table import text

METHODS = {
    "streaming": ["--method", "streaming", "--rounds", "8"],
    "noloco": ["--method", "noloco", "--rounds", "6"],
    "noloco in fragments": [
        "--method",
        "noloco",
        "--fragments",
        "2",
        "--lag",
        "auto",
        "--rounds",
        "8",
    ],
}


def unable():
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    name = f"uplink-try-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, text=True, timeout=20, check=False
    )
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], timeout=20, check=True)
    return ""


@pytest.mark.slow(reason="real nodes that exchange for minutes over a slow link")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("method", METHODS)
def test_nodes_behind_slow_uplinks_meet_in_nearly_each_round(method, program):
    if reason := unable():
        pytest.skip(reason)
    done = program(
        "uplink.py", "--mbit", "1", "--mb", "1", "--busy", "0.8", *METHODS[method], timeout=1400
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rounds"] >= 6, done.stderr[-2000:]
    assert found["paired"] >= found["rounds"] - 1, found


def test_without_a_text_it_says_what_makes_one(refused, tmp_path):
    assert f"0 texts in {tmp_path}: run bench/table.py first" in refused(
        spot.main, "--cache", tmp_path
    )


@pytest.mark.slow(reason="four real nodes over shaped links")
def test_four_real_nodes_meet_and_learn(tmp_path, program):
    if reason := unable():
        pytest.skip(reason)
    (tmp_path / "text").mkdir()
    for number in range(64):
        lines = (
            f"line {number * 512 + line} of some English text, as plain as it can be\n"
            for line in range(512)
        )
        (tmp_path / "text" / f"{number}.txt").write_text("".join(lines))
    text.corpus(tmp_path / "text", 512, tmp_path / "cache")
    done = program(
        "spot.py",
        "--cache",
        tmp_path / "cache",
        "--steps",
        "100",
        "--delay",
        "5",
        "--json",
        timeout=300,
    )
    found = json.loads(done.stdout)
    assert found["loss"] < math.log(512) / 2
    assert all(node["met"] > 0 for node in found["nodes"])
    assert (
        found["sent_mb"] > 0.5
    )  # the model is a million bytes: half of one in four bits, four times
