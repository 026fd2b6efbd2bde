"""A newcomer's first hour, with the wheel in a clean venv outside the checkout: from `shoal init`
to a sample of pulled weights.

Needs a package index, because pip installs PyTorch and all else anew. SHOAL_NEWCOMER_VENV names a
venv to keep between runs: what is in it stays, and only Shoal itself is installed again.
"""

import json
import os
import shutil
import signal
import subprocess
import time
import venv
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.checkout import ROOT, copied

SIZE = {"layers": 1, "width": 16, "heads": 1, "context": 16}


class Steps:
    """Named steps with a limit each; what waits inside one takes its deadline from ``left``."""

    def __init__(self):
        self.end = 0.0

    @contextmanager
    def __call__(self, name, seconds):
        began = time.monotonic()
        self.end = began + seconds
        yield
        print(f"{name}: {time.monotonic() - began:.1f} s of at most {seconds} s", flush=True)

    def left(self):
        return max(self.end - time.monotonic(), 1.0)


def install(home, step):
    """Build the wheel and install it with its extra `watch`; return the folder of the venv's
    commands.
    """
    kept = os.environ.get("SHOAL_NEWCOMER_VENV")
    folder = Path(kept) if kept else home / "venv"
    # Of the checkout, nothing may be seen; and no compiler is needed.
    env = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "CC": "false",
        "CXX": "false",
    }

    def pip(*arguments):
        command = [
            folder / "bin" / "python",
            "-m",
            "pip",
            "--disable-pip-version-check",
            *arguments,
        ]
        done = subprocess.run(
            command,
            cwd=home,
            env=env,
            capture_output=True,
            text=True,
            timeout=step.left(),
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

    with step("venv", 120):
        if not folder.exists():
            venv.create(folder, with_pip=True)
        pip("uninstall", "--quiet", "--yes", "shoal")
    with step("wheel", 300):
        pip("wheel", "--quiet", "--no-deps", "--wheel-dir", home / "dist", copied(home / "copy"))
        shutil.rmtree(home / "copy")
    with step("pip install", 1500):
        (wheel,) = (home / "dist").iterdir()
        pip(
            "install", "--quiet", "-c", ROOT / "constraints.txt", f"shoal[watch] @ {wheel.as_uri()}"
        )
    return folder / "bin"


@pytest.mark.slow(
    reason="installs PyTorch into a new venv, and runs seven real nodes one after another"
)
@pytest.mark.timeout(3600)
def test_what_a_newcomer_does_first_works_from_the_wheel_alone(shoal, eventually, capsys):
    step = Steps()
    with capsys.disabled():
        print()
        play(shoal, eventually, step, install(shoal.home, step))


def play(shoal, eventually, step, commands):
    shoal.command = (commands / "shoal",)
    shoal.env.pop("PYTHONPATH", None)

    def both(picture):
        return b"bert" in picture and b"carl" in picture

    with step("shoal init", 60):
        made = shoal.start("init", "mine")
        assert made.wait(step.left()) == 0, made.said()
    with step("shoal demo --task task.py:Pretrain", 240):
        few = ["--peers", "2", "--rounds", "4", "--every", "10", "--json"]
        demo = shoal.start(
            "demo", "--task", "task.py:Pretrain", *few, folder=shoal.home / "mine"
        ).json(step.left())
        assert demo["loss_last"] < demo["loss_first"]
    with step("shoal seed", 60):
        seed = shoal.start(
            "seed",
            "--json",
            "--listen",
            "/ip4/127.0.0.1/tcp/0",
            "--identity",
            shoal.home / "seed.key",
        )
        (address,) = json.loads(seed.line(0, step.left()))["addresses"]
    with step("shoal up --public", 120):
        table = shoal.toml(
            swarm={"name": "common"},
            outer={"every": 5, "wait_s": 3.0},
            options=SIZE,
            train={"steps": 0},
        )
        anna = shoal.node("up", table, "anna", "--public", "--bootstrap", address)
        link = anna.line(0, step.left())
        assert link.startswith("shoal://")
    with step("shoal swarms", 120):
        found = eventually(
            lambda: shoal.start("swarms", "--seed", address, "--json").json(step.left())["swarms"],
            step.left(),
            "a list of one swarm",
        )
        assert [swarm["name"] for swarm in found] == ["common"]
    with step("shoal join common, and an exchange", 180):
        bert = shoal.node("join", "common", "bert", "--yes", "--bootstrap", address)
        assert bert.line(0, step.left()).startswith("shoal://")
        eventually(lambda: shoal.rounds("bert", 2), step.left(), "an exchange of anna and bert")
    with step("the creator is killed; shoal join LINK, and an exchange", 240):
        before = len(shoal.rounds("bert", 2))
        anna.signal(signal.SIGKILL)
        anna.wait(step.left())
        carl = shoal.node("join", link, "carl")
        carl.line(0, step.left())
        eventually(
            lambda: shoal.rounds("carl", 2) and len(shoal.rounds("bert", 2)) > before,
            step.left(),
            "an exchange of bert and carl",
        )
    with step("shoal watch --web", 120):
        watcher = shoal.start("watch", link, "--web", "0")
        page = watcher.line(0, step.left())
        for name in ("", "page.js", "style.css"):
            with urlopen(f"{page}{name}", timeout=step.left()) as answer:
                assert answer.status == 200
        # One picture of the stream is enough, as soon as both are on it.
        with urlopen(f"{page}events", timeout=step.left()) as stream:
            eventually(lambda: both(stream.readline()), step.left(), "both on the page")
        watcher.signal(signal.SIGINT)
        assert watcher.wait(step.left()) == 130
    with step("shoal pull", 180):
        out = shoal.home / "weights"
        pulled = shoal.start("pull", link, "--out", out, "--json").json(step.left())
        assert pulled["named"]
        assert sorted(path.name for path in out.iterdir()) == [
            "README.md",
            "model.safetensors",
            "shoal.json",
        ]
    with step("shoal sample", 120):
        drawn = shoal.start("sample", out, "--prompt", "the ", "--tokens", "12", "--json").json(
            step.left()
        )
        assert drawn["texts"][0].startswith("the ")
    with step("Ctrl-C", 120):
        for node in (bert, carl):
            node.signal(signal.SIGINT)
            assert node.wait(step.left()) == 130, node.said()
