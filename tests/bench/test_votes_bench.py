"""The benchmark of votes prints a row for each number of seats and share of colluders, near the closed form."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "votes.py"


def test_json_rows() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--claims", "20000", "--json"], capture_output=True, text=True, timeout=120, check=True
    )
    rows = json.loads(done.stdout)["vote"]
    assert {(row["n"], row["collude"]) for row in rows} == {(n, f / 10) for n in (3, 5, 7) for f in range(5)}
    assert all(abs(row["errors"]) < 4 for row in rows)
