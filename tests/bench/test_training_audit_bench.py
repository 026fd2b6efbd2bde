"""The benchmark of the audit of training runs, and where both sides compute alike it sees every cheat even with few claims."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import training_audit

ROOT = Path(__file__).resolve().parents[2]


def bench(*options):
    command = [sys.executable, str(ROOT / "bench" / "training_audit.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)


@pytest.mark.slow(reason="trains again for every kind of cheat")
def test_json_has_every_row():
    done = bench("--claims", "2", "--calibrate", "20", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert list(result["pairs"]) == ["float32 -> float32", "bfloat16 -> bfloat16", "bfloat16 -> float32"]
    assert result["material_bytes"] < 1200
    for row in result["pairs"].values():
        assert row["honest_false_positive_rate"] == 0
        assert len(row["detection"]) == 10
        assert row["check_s"] > 0
        assert "20 honest claims cannot show" in row["warning"]
    exact = result["pairs"]["float32 -> float32"]
    assert set(exact["detection"].values()) == {1.0}
    assert exact["honest_largest"]["turned"] < 1e-9


@pytest.mark.parametrize("options", [["--claims", "0"], ["--calibrate", "19"], ["--rate", "0.6"]])
def test_a_wrong_option_is_named(options, refused):
    assert options[0] in refused(training_audit.main, *options)
