"""The diffs of CONTRIBUTING.md apply, and what it shows of `optim` is whole: it gives a method, a
codec and a loss that work.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHOWN = re.findall(
    r"^```diff\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.S | re.M
)
DIFFS = [diff for diff in SHOWN if "+++ b/optim/" in diff]
NEEDS_GIT = pytest.mark.skipif(shutil.which("git") is None, reason="git is not there to apply them")
PROGRAM = """
import torch
import shoal
from shoal.node.cli.main import cli
from shoal.node.config.settings import RLSettings
from shoal.node.plan.rows import ModelTensors, work_of
from shoal.optim import Simulation, codec_named, method_named
from shoal.optim.rl.completions import Completions
from shoal.optim.rl.losses import LOSSES
from shoal.swarm.settings.outer import OuterSettings

(option,) = [option for option in cli.commands["up"].params if option.name == "outer.method"]
assert " or elastic (averages with one random partner)" in option.help
settings = OuterSettings(method="elastic", every=2).resolved()
work = work_of(settings, ModelTensors.of_count(1000), peers=2, step_s=1.0)
assert (settings.codec, work.nbytes) == ("float32", 4000)

def train(exchange):
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]) * (1 + int(exchange.peer)))
    opt = method_named("elastic").make(torch.optim.SGD([weight], lr=0.1), exchange, every=2)
    assert type(opt) is shoal.Elastic
    assert opt.rule == shoal.ElasticRule(pull=0.5)
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        opt.step()
    return weight.tolist()

assert Simulation(["0", "1"]).run(train) == {"0": [1.25, -2.5], "1": [1.75, -3.5]}

codec, values = codec_named("ternary"), torch.tensor([4.0, -3.0, 1.9, -0.5, 2.1])
(got,) = codec.decode(codec.encode([values]), [(5,)])
assert got.tolist() == [4.0, -4.0, 0.0, 0.0, 4.0]
assert codec.nbytes([(5,)]) == 8

assert RLSettings(loss="reinforce").loss == "reinforce"
new, mask = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
assert LOSSES["reinforce"](Completions(new, new, mask, torch.tensor([0.5]))).tolist() == [[0.5, 1.0]]
"""  # noqa: E501


def test_they_are_small():
    assert len(DIFFS) == 3
    assert max(diff.count("\n") for diff in DIFFS) <= 90
    assert [len(set(re.findall(r"^\+\+\+ (\S+)$", diff, re.M))) for diff in DIFFS] == [4, 2, 1]


def apply(diff, folder, *options):
    """Apply ``diff`` in ``folder`` by git, which looks for no repository above it."""
    return subprocess.run(
        ["git", "apply", "--unidiff-zero", *options, "-"],
        cwd=folder,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        input=diff,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@NEEDS_GIT
@pytest.mark.parametrize("number", range(len(SHOWN)))
def test_every_shown_diff_applies(number):
    done = apply(SHOWN[number], ROOT, "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow(reason="imports a copy of the product, which is compiled anew")
@NEEDS_GIT
def test_they_work(tmp_path):
    for top in ("shoal", "node", "optim", "swarm", "verification"):
        shutil.copytree(ROOT / top, tmp_path / top, symlinks=True)
    for diff in DIFFS:
        apply(diff, tmp_path).check_returncode()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
