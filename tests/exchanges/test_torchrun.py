import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun.py"


@pytest.mark.ci
def test_the_example_learns_under_torchrun():
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        EXAMPLE,
        "--steps",
        "80",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(
        r"loss over the whole text: ([\d.]+) before, ([\d.]+) after 80 steps, .*\n", done.stdout
    )
    assert found is not None, done.stdout
    assert float(found[2]) < 2.2 < 3.0 < float(found[1])
