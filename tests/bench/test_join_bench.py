"""The benchmark of joining prints one JSON object, with times in the order in which things happen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow(reason="starts of real nodes, one after another")
def test_one_join_of_a_tiny_model() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "join.py"), "--layers", "1", "--width", "32", "--joins", "1", "--json"],
        capture_output=True, text=True, timeout=400, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert 0 < report["weights_s"] <= report["round_s"] <= report["contribution_s"]
    assert (report["joins"], len(report["all"])) == (1, 1)
