"""The programs of "Your script in Shoal" (docs/python-api.md): two peers each, which meet and learn
as the plain script does.
"""

import json
import os
import re
from pathlib import Path

import pytest

from tests.integrations.page import PAGE, SCRIPTS, TEXTS, page
from tests.support.forked import ForkServer

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


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Start scripts, in forks of a process that has imported torch: which takes each seconds."""
    started = []
    server = ForkServer(tmp_path_factory.mktemp("forks"), {**os.environ, **ENVIRONMENT})

    def start(*arguments, **options):
        started.append(Script(server, *arguments, **options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
    server.close()


class Script:
    """A process that runs one of the scripts in a folder of its own."""

    def __init__(self, forks, folder, *command, seed=0, **env):
        folder.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **ENVIRONMENT, "SEED": str(seed), **env}
        self._log = folder / "log"
        program = ["tests.support.as_script", str(folder), json.dumps(env), *map(str, command)]
        with self._log.open("w") as errors:
            self.process = forks.start(program, errors, "script")

    def link(self):
        line = self.process.stdout.readline()
        assert line.startswith("link "), self._log.read_text()
        return line.removeprefix("link ").strip()

    def said(self, seconds=240):
        """What it printed: its loss, and the rounds in which it met somebody of how many."""
        with self.process.stdout as stdout:
            out = stdout.read()
        assert self.process.wait(seconds) == 0, self._log.read_text()
        met = re.search(r"^met (\d+) of (\d+)$", out, re.M)
        return float(re.search(r"^loss (\S+)$", out, re.M)[1]), met and tuple(
            map(int, met.groups())
        )


def two_peers(script, tmp_path, name, settings=None, **env):
    file = SCRIPTS / f"{name}_shoal.py"
    first = script(
        tmp_path / "0", HERE / "peer.py", file, "-", json.dumps(settings or {}), seed=0, **env
    )
    second = script(tmp_path / "1", HERE / "peer.py", file, first.link(), seed=1, **env)
    return [first.said(), second.said()]


def test_the_page_is_made_from_the_scripts():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/integrations/page.py"
    assert {file.stem.removesuffix("_shoal") for file in SCRIPTS.glob("*.py")} == {*TEXTS}


@pytest.mark.ci
@pytest.mark.parametrize(("name", "more"), PLAIN)
def test_two_peers_learn_as_the_plain_script(script, tmp_path, name, more):
    """Two peers meet and learn as well as the plain script."""
    for library in NEEDS.get(name, ()):
        pytest.importorskip(library)
    plain = script(tmp_path / "plain", SCRIPTS / f"{name}.py")
    peers = two_peers(script, tmp_path, name)
    loss, _ = plain.said()
    for theirs, (met, rounds) in peers:
        assert theirs <= loss + more * abs(loss)
        assert rounds > 0
        assert met >= 0.5 * rounds


@pytest.mark.ci
def test_torchft_loop_meets_by_its_fragments(script, tmp_path):
    """A loop in torchfts form meets with the fragments that it names."""
    for loss, (met, rounds) in two_peers(script, tmp_path, "torchft_diloco"):
        assert loss < 0.6  # untrained 0.9 and more
        assert rounds == 2 * 6
        assert met >= rounds / 2


@pytest.mark.slow(reason="six processes, two after two")
def test_nanogpt_resumes_as_if_unstopped(script, tmp_path):
    """Bit for bit: weights, both optimizers' state and the place in the data; by what the script
    itself saves and loads.
    """
    whole = two_peers(
        script, tmp_path / "whole", "nanogpt", {"lag": 0, "codec": "float32"}, STEPS="40"
    )
    two_peers(
        script,
        tmp_path / "halves",
        "nanogpt",
        {"lag": 0, "codec": "float32"},
        STEPS="40",
        UNTIL="20",
    )
    halves = two_peers(
        script, tmp_path / "halves", "nanogpt", {"lag": 0, "codec": "float32"}, STEPS="40"
    )
    assert [loss for loss, _ in halves] == [loss for loss, _ in whole]
    assert [met for _, met in whole] == [(4, 4)] * 2
    assert [met for _, met in halves] == [(2, 2)] * 2
