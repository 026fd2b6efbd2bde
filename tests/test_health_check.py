"""The health check of the image (docker/health.sh): a process called p2pd, and what stands at the
end of a node's metrics.
"""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "docker" / "health.sh"
STUCK = {"event": "activity", "doing": "training", "busy_s": 0.01, "alive": False}
HANGS = "nothing has moved in the node for 2 minutes"


@pytest.fixture
def daemon(tmp_path):
    """A process with the daemon's name, of this user."""
    shutil.copy(shutil.which("sleep"), tmp_path / "p2pd")
    with subprocess.Popen([tmp_path / "p2pd", "600"]) as process:
        yield process
        process.kill()


def health(folder):
    """The sentence of the health check of the node of ``folder``; empty if all is well."""
    ended = subprocess.run(
        ["sh", SCRIPT, folder], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode == 0) is (ended.stdout == ""), ended.stderr
    assert ended.stderr == ""
    return ended.stdout


def wrote(folder, *events, age=0.0):
    folder.mkdir(exist_ok=True)
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"time": 0.0} | event) + "\n" for event in events))
    os.utime(path, (time.time() - age,) * 2)


@pytest.mark.parametrize(
    ("events", "age", "said"),
    [
        ([{"event": "round"}] + 12 * [STUCK], 0, HANGS),
        ([{"event": "round"}] + 11 * [STUCK], 0, ""),  # not for two minutes yet
        ([*(12 * [STUCK]), {"event": "round"}], 0, ""),
        ([*(11 * [STUCK]), STUCK | {"alive": True}], 0, ""),  # a long step
        (12 * [STUCK | {"doing": "waiting for peers"}], 0, ""),
        (6 * [STUCK], 0, ""),  # it has just begun
        (12 * [{"event": "round"}], 180, "has written no metrics for 2 minutes"),
    ],
    ids=["hangs", "not yet", "a round", "busy", "waits", "begins", "silent"],
)
def test_a_node_that_hangs_or_is_silent_is_unhealthy(daemon, tmp_path, events, age, said):
    wrote(tmp_path / "runs", *events, age=age)
    assert said in health(tmp_path) if said else health(tmp_path) == ""


def test_each_node_has_a_health_of_its_own(daemon, tmp_path):
    wrote(tmp_path / "first", *(12 * [STUCK]))
    wrote(tmp_path / "second", {"event": "round"})
    assert HANGS in health(tmp_path / "first")
    assert health(tmp_path / "second") == ""
    assert health(tmp_path / "seed") == ""  # writes no metrics
    assert health(tmp_path) == ""  # some node of the container works
