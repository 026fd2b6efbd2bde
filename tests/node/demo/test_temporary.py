"""A killed demo's folder is removed by the next one; nobody else's is."""

import subprocess
import sys
import tempfile

import pytest

from shoal.node.demo.demo import stage

CHILD = """
import sys
from shoal.node.demo.demo import stage
with stage(None) as (folder, _):
    (folder / "peer-0").mkdir()
    print(folder, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_what_a_killed_demo_left_is_removed_and_what_lives_or_is_anothers_is_not(base):
    living, killed = (
        subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    of_living, of_killed = (process.stdout.readline().strip() for process in (living, killed))
    (base / "shoal-demo-begun").mkdir()
    (base / "shoal-demo-begun" / ".lock").touch()  # made, and not locked yet
    (base / "shoal-demo-none").mkdir()
    killed.kill()
    killed.wait()
    with stage(None) as (mine, _):
        there = {str(path) for path in base.iterdir()}
        assert there == {of_living, str(mine), str(base / "shoal-demo-begun"), str(base / "shoal-demo-none")}
        assert of_killed not in there
    assert not mine.exists()
    living.communicate("\n", timeout=60)
    assert living.returncode == 0
    assert of_living not in {str(path) for path in base.iterdir()}
    killed.stdin.close()
    killed.stdout.close()
