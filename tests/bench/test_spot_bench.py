"""The table's default by real nodes behind slow links: it wants a text, and four nodes meet and learn."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bench import spot
from bench._table import text
from tests.bench.test_uplink_bench import unable

SCRIPT = Path(spot.__file__)


def test_without_a_text_it_says_what_makes_one(refused, tmp_path):
    assert f"0 texts in {tmp_path}: run bench/table.py first" in refused(spot.main, "--cache", tmp_path)


@pytest.mark.slow(reason="four real nodes over shaped links")
def test_four_real_nodes_meet_and_learn(tmp_path):
    if reason := unable():
        pytest.skip(reason)
    (tmp_path / "text").mkdir()
    for number in range(64):
        lines = (f"line {number * 512 + line} of some English text, as plain as it can be\n" for line in range(512))
        (tmp_path / "text" / f"{number}.txt").write_text("".join(lines))
    text.corpus(tmp_path / "text", 512, tmp_path / "cache")
    command = [sys.executable, SCRIPT, "--cache", tmp_path / "cache", "--steps", "100", "--delay", "5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loss"] < math.log(512) / 2
    assert all(node["met"] > 0 for node in found["nodes"])
    assert found["sent_mb"] > 0.5  # the model is a million bytes: half of one in four bits, four times
