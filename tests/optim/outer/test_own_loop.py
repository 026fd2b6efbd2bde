import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_loop.py"


@pytest.mark.ci
def test_the_example_runs_as_it_stands_and_averaging_helps_much():
    done = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = re.fullmatch(r"alone:    (\d+\.\d+)\naveraged: (\d+\.\d+)\n", done.stdout)
    assert found is not None, done.stdout
    alone, averaged = (float(number) for number in found.groups())
    assert alone > 1  # eight points cannot show sixteen dimensions
    assert 0.01 < averaged < 0.1 * alone  # the noise alone is 0.01


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 60
