"""What is loaded up to the first step of a node, and that its optimizers compute what torch's
do.
"""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim.optimizer import _use_grad_for_differentiable

from shoal.node.runtime import join
from shoal.node.runtime.join import KEPT_OUT, without_compiler

ROOT = Path(__file__).resolve().parents[3]
STEPS = """
import gc, json, sys
from shoal.node.config.settings import load
from shoal.node.runtime.display import make_display
from shoal.node.runtime.node_run import NodeRun
from shoal.node.runtime.run_options import ShutdownSignals

collections = []
gc.callbacks.append(lambda phase, info: collections.append("torch" in sys.modules))
NodeRun(load(None, {}), None, make_display(), ShutdownSignals())._prepare()
gc.callbacks.clear()
import torch
from shoal.node.runtime.task_setup import check_size, make_task
from shoal.node.runtime.join import make_trainer
from shoal.node.task import Shard
from shoal.optim import Alone

settings = load(None, {"task.options": {"layers": 1, "width": 8, "batch": 1}, "outer.every": 2, "train.optimizer": "muon"})
task = make_task(settings)
check_size(task, settings, "cpu", print)
trainer = make_trainer(settings, task, torch.device("cpu"), None, print, lambda info: None, lambda: ())
trainer.connect(Alone(), "alone", Shard(0, 1, 0))
for _ in range(3):
    trainer.step()
trainer.close()
import shoal.swarm.p2p.hivemind_adapter
loaded = sorted(sys.modules)
import hivemind
print(json.dumps({"loaded": loaded, "steps": trainer.opt.steps, "whole": hivemind.DHT.__name__, "version": hivemind.__version__,
    "collected": sum(collections), "collects": gc.isenabled(), "kept": gc.get_freeze_count()}))
"""  # noqa: E501


def top(names: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.ci
def test_node_loads_no_compiler_and_only_the_dht() -> None:
    """A node loads no compiler and of hivemind only the dht."""
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["steps"] == 3
    assert (report["collected"], report["collects"]) == (0, True)
    assert report["kept"] > 100_000, "what was imported is looked through at every collection"
    assert not top(report["loaded"]) & {
        "sympy",
        "scipy",
        "sklearn",
        "transformers",
        "prometheus_client",
        "tensorboard",
        "libp2p",
    }
    unused = (
        "torch._dynamo",
        "hivemind.averaging",
        "shoal.node.rl.task",
        "shoal.node.verify.service",
        "shoal.verification",
    )
    assert not [name for name in report["loaded"] if name.startswith(unused)]
    assert (report["whole"], report["version"]) == ("DHT", "1.1.12"), (
        "who asks for more of hivemind gets all of it"
    )


BEGIN = """
import json, sys
from shoal.node.cli import main
from shoal.node.config.links import read_link
from shoal.node.config.settings import load
from shoal.node.parallel import launcher, rank_process
from shoal.node.runtime import display, node_run

display.make_display()
load(None, {"task.options": {"layers": 1}, "node.name": "n"})
print(json.dumps(sorted(sys.modules)))
"""


def test_network_can_start_before_torch() -> None:
    """A node that joins can start its network before torch is imported."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    loaded = json.loads(done.stdout)
    assert "shoal.swarm.p2p.host" in loaded
    assert not top(loaded) & {"torch", "hivemind", "numpy", "safetensors"}


OPTIMIZERS = [
    (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
]


def steps_of(kind: type[torch.optim.Optimizer], options: dict[str, float]) -> list[float]:
    parameter = torch.linspace(-1, 1, 5).requires_grad_()
    optimizer = kind([parameter], **options)
    for _ in range(3):
        optimizer.zero_grad()
        (parameter.square().sum() + parameter[0]).backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert parameter.grad is not None
    assert not parameter.grad.requires_grad
    return parameter.tolist()


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_without_the_compiler_optimizers_take_the_same_steps(kind, options, monkeypatch) -> None:
    for one in {
        torch.optim.Adam,
        torch.optim.SGD,
        kind,
    }:  # as torch has it: a node may have run in this process before
        monkeypatch.setattr(one, "step", _use_grad_for_differentiable(inspect.unwrap(one.step)))
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        plain = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        monkeypatch.setattr(plain, KEPT_OUT, None, raising=False)
    expected = steps_of(kind, options)  # imports the compiler
    # Not deleted from ``sys.modules``: another import would leave torch with half a module.
    monkeypatch.setattr(join, "sys", SimpleNamespace(modules={}))
    before = kind.step
    without_compiler()
    assert (torch.optim.Adam if kind is torch.optim.AdamW else kind).step is not before
    assert steps_of(kind, options) == expected
