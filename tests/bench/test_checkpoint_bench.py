"""The benchmark of checkpoints measures what a save costs with and without waiting for the disk."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "checkpoint.py"


def test_json_rows(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--sizes", "tiny", "--saves", "1", "--steps", "2", "--folder", str(tmp_path), "--json"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    (row,) = json.loads(done.stdout)["rows"]
    assert row["size"] == "tiny"
    assert row["checkpoint_mb"] > row["copy_mb"] > 0
    assert all(row[name] > 0 for name in ("step_s", "before_stall_s", "after_stall_s"))
    assert list(tmp_path.iterdir()) == []
