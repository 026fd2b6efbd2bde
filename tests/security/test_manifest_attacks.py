"""A stranger's manifest against real commands: what `join`, `pull` and `up --resume-from` make of
it, and what that costs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shoal.node.checkpoint import store
from shoal.node.config.settings import load
from shoal.node.runtime.join import new_manifest
from shoal.node.runtime.run_options import network
from shoal.node.task import Shard
from shoal.node.tasks.gpt import sized
from shoal.node.tasks.text import TextTask
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest, open_manifest, swarm_id
from shoal.swarm.membership.membership import create
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.wire.envelope import seal

ROOT = Path(__file__).resolve().parents[2]
HUGE = {"layers": 64, "width": 16_384}
COUNT = 206_172_094_464
MOST = 700 * 2**20  # bytes, of which Python with torch and hivemind takes half
ONLY = """
import json, resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_DATA, (4 * 2**30, 4 * 2**30))  # if the check fails, this machine stays usable
code = subprocess.run(sys.argv[1:], timeout=150, stdin=subprocess.DEVNULL).returncode
print(json.dumps([code, 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""  # noqa: E501
"""A small process that starts the command: the peak of a child counts from its parent's size on."""


class Home:
    """A place in which commands run with a home of their own."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {
            **os.environ,
            "XDG_CONFIG_HOME": str(folder),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }

    def refused(self, *arguments):
        """Run ``shoal``; return the one sentence with which it must refuse, and its peak memory in
        bytes.
        """
        command = [sys.executable, "-c", ONLY, sys.executable, "-m", "shoal", *map(str, arguments)]
        done = subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=180
        )
        code, peak = json.loads(done.stdout.splitlines()[-1])
        said = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
        assert (code, len(said), "Traceback" in done.stderr) == (2, 1, False), done.stderr
        return said[0], peak


@pytest.fixture
def home():
    with tempfile.TemporaryDirectory(prefix="sec-") as folder:  # short, for the daemon's sockets
        yield Home(Path(folder))


def signed(identity, **fields):
    """A manifest as the stranger likes it, but for what every node checks as it opens it."""
    plain = open_manifest(new_manifest(load(), identity, "0" * 64))
    return seal(
        Manifest.model_validate(
            {**{name: getattr(plain, name) for name in Manifest.model_fields}, **fields}
        ),
        identity,
    )


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    """The link of a real node whose swarm trains 200 thousand million parameters, with the digest
    that these have.
    """
    identity, folder = Identity.ephemeral(), tmp_path_factory.mktemp("node")
    settings = load(None, {"node.folder": folder, "node.listen": ["/ip4/127.0.0.1/tcp/0"]})
    digest = model_digest(AveragedParameters.of(sized(**HUGE, heads=4, context=64)))
    membership = create(
        identity, signed(identity, task_options=HUGE, model=digest), network(settings)
    )
    yield str(membership.link())
    membership.close()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("verb", "more", "sentence"), [
    ("join", (), "and this node may have "),
    ("pull", ("--out", "out"), "and this node may have "),
])  # fmt: skip
def test_impossible_model_is_refused_before_it_is_made(huge, home, verb, more, sentence):
    """The fault: layers and width of a manifest became tensors before anything was compared; 6 GB
    in 12 s.
    """
    said, peak = home.refused(verb, huge, *more)
    assert (
        f"The swarm's model has {COUNT:,} parameters or more, which take 824.69 GB of memory, "
        f"{sentence}" in said
    )
    assert peak < MOST, f"{peak / 2**20:.0f} MB"


EVIL = """
from pathlib import Path
Path({mark!r}).write_text("ran")
class Env:
    version = "1"
class Task:
    pass
"""


def checkpoint(folder, identity, **fields):
    """A checkpoint such as a stranger puts beside weights: everything right, but for the
    manifest.
    """
    task = TextTask(layers=1, width=8, heads=2, context=8, batch=1)
    trainer = Trainer(task, OuterSettings(method="none"), TrainSettings())
    trainer.connect(Alone(), "x", Shard(0, 2, 0))
    sealed = signed(identity, **fields)
    store.save(
        folder, 1, {"swarm": swarm_id(sealed), "manifest": sealed.hex(), "trainer": trainer.state()}
    )


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("task", "options", "sentence"), [
    ("rl", {"env": "evil:Env"}, "and a checkpoint carries no code: get its files"),
    ("evil.py:Task", {}, "and a checkpoint carries no code: get its files"),
    ("text", {"data": "secret"}, "The swarm names 'secret', a path on somebody's machine"),
    ("text", {"tokenizer": "./secret"}, "The swarm names './secret', a path on somebody's machine"),
    ("text", HUGE, "The swarm's model has 206,"),
])  # fmt: skip
def test_a_strangers_checkpoint_names_neither_code_nor_paths(home, task, options, sentence):
    """The fault: `--resume-from` took environment, data and sizes from the manifest in the folder,
    and ran what they named.
    """
    weights, mark = home.folder / "dl" / "weights", home.folder / "ran"
    weights.mkdir(parents=True)
    for place in (weights, home.folder):
        (place / "evil.py").write_text(EVIL.format(mark=str(mark)))
    (home.folder / "secret").mkdir()
    (home.folder / "secret" / "diary.txt").write_text("dear diary " * 1000)
    checkpoint(weights, Identity.ephemeral(), task=task, task_options=options)
    said, peak = home.refused(
        "up",
        "--resume-from",
        weights,
        "--folder",
        "run",
        "--steps",
        "1",
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
        "--device",
        "cpu",
    )
    assert sentence in said
    assert peak < MOST
    assert not mark.exists()
    assert not (home.folder / "run" / "result.json").exists()
