"""The programs of "Your script in Shoal" (docs/python-api.md): two peers each, which meet and learn
as the plain script does.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.page import PAGE, SCRIPTS, TEXTS, page

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEEDS = {
    "trainer": ["transformers"],
    "grpo": ["trl", "datasets"],
    "lightning_fit": ["lightning"],
    "accelerate_loop": ["accelerate"],
}
IMPORTS = pytest.mark.slow(reason="three processes import the library")
PLAIN = [  # and how much higher the peers' loss may be, of the plain script's
    pytest.param("nanogpt", 0.15),
    pytest.param("lightning_fit", 0.3, marks=IMPORTS),
    pytest.param("accelerate_loop", 0.3, marks=IMPORTS),
    pytest.param("trainer", 0.15, marks=IMPORTS),
    pytest.param("grpo", 0.6, marks=IMPORTS),  # a reward, of few completions
]


class Script:
    """A process that runs one of the scripts in a folder of its own."""

    def __init__(self, folder, *command, seed=0, **env):
        folder.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "SEED": str(seed),
            **env,
        }
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def link(self):
        line = self.process.stdout.readline()
        assert line.startswith("link "), self.process.communicate(timeout=60)[1]
        return line.removeprefix("link ").strip()

    def said(self, seconds=240):
        """What it printed: its loss, and the rounds in which it met somebody of how many."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        finally:
            self.process.kill()
        assert self.process.returncode == 0, err
        met = re.search(r"^met (\d+) of (\d+)$", out, re.M)
        return float(re.search(r"^loss (\S+)$", out, re.M)[1]), met and tuple(
            map(int, met.groups())
        )


def two_peers(tmp_path, name, settings=None, **env):
    script = SCRIPTS / f"{name}_shoal.py"
    first = Script(
        tmp_path / "0", HERE / "peer.py", script, "-", json.dumps(settings or {}), seed=0, **env
    )
    second = Script(tmp_path / "1", HERE / "peer.py", script, first.link(), seed=1, **env)
    return [first.said(), second.said()]


def test_the_page_is_made_from_the_scripts():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/integrations/page.py"
    assert {file.stem.removesuffix("_shoal") for file in SCRIPTS.glob("*.py")} == {*TEXTS}


@pytest.mark.ci
@pytest.mark.parametrize(("name", "more"), PLAIN)
def test_two_peers_learn_as_the_plain_script(tmp_path, name, more):
    """Two peers meet and learn as well as the plain script."""
    for library in NEEDS.get(name, ()):
        pytest.importorskip(library)
    plain = Script(tmp_path / "plain", SCRIPTS / f"{name}.py")
    peers = two_peers(tmp_path, name)
    loss, _ = plain.said()
    for theirs, (met, rounds) in peers:
        assert theirs <= loss + more * abs(loss)
        assert rounds > 0
        assert met >= 0.5 * rounds


@pytest.mark.ci
def test_torchft_loop_meets_by_its_fragments(tmp_path):
    """A loop in torchfts form meets with the fragments that it names."""
    for loss, (met, rounds) in two_peers(tmp_path, "torchft_diloco"):
        assert loss < 0.6  # untrained 0.9 and more
        assert rounds == 2 * 6
        assert met >= rounds / 2


@pytest.mark.slow(reason="six processes, two after two")
def test_nanogpt_resumes_as_if_unstopped(tmp_path):
    """Bit for bit: weights, both optimizers' state and the place in the data; by what the script
    itself saves and loads.
    """
    whole = two_peers(tmp_path / "whole", "nanogpt", {"lag": 0, "codec": "float32"}, STEPS="40")
    two_peers(
        tmp_path / "halves", "nanogpt", {"lag": 0, "codec": "float32"}, STEPS="40", UNTIL="20"
    )
    halves = two_peers(tmp_path / "halves", "nanogpt", {"lag": 0, "codec": "float32"}, STEPS="40")
    assert [loss for loss, _ in halves] == [loss for loss, _ in whole]
    assert [met for _, met in whole] == [(4, 4)] * 2
    assert [met for _, met in halves] == [(2, 2)] * 2
