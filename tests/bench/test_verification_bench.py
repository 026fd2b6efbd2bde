"""The benchmark of verification runs, says what it promises, and sees the coarse cheats even with few claims."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bench(*options):
    command = [sys.executable, str(ROOT / "bench" / "verification.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)


def test_json_has_every_row():
    done = bench("--claims", "2", "--calibrate", "20", "--tokens", "32", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result["proof_bytes_per_token"] == 258 / 32
    assert result["proof_cost"] > 0
    assert result["verify_cost"] > 0
    assert list(result["pairs"]) == ["fp32 -> fp32", "bf16 -> bf16", "bf16 -> fp32", "fp32 -> bf16", "fp16 -> fp32"]
    for row in result["pairs"].values():
        assert row["honest_false_positive_rate"] == 0
        assert row["interval"][1] > 0.5  # of two claims
        assert "20 honest claims cannot show" in row["warning"]
        assert len(row["detection"]) == 8
        assert all(row["detection"][name] == 1 for name in ("int4 weights", "a layer dropped", "another prompt", "another model"))


@pytest.mark.parametrize("options", [["--claims", "0"], ["--calibrate", "19"], ["--tokens", "241"], ["--rate", "0.6"]])
def test_a_wrong_option_is_named(options):
    done = bench(*options)
    assert done.returncode == 2
    assert options[0] in done.stderr
    assert done.stdout == ""
