"""The examples run, in small form; those that are not here have tests of their own, which are
named.
"""

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import click
import pytest
import torch

from shoal.node.cli.main import cli
from shoal.node.task import Shard
from shoal.node.tasks.loader import load_task
from shoal.node.training.trainer import Trainer
from shoal.optim import Simulation
from shoal.swarm.settings.training import TrainSettings
from tests.support.blocking import blocking

ROOT = Path(__file__).resolve().parent.parent
HERE = "--listen=/ip4/127.0.0.1/tcp/0"
ELSEWHERE = {
    "add_env.py": "tests/node/rl",
    "custom_model.py": "tests/node/tasks/test_loader.py",
    "py_libp2p.py": "tests/node/watch/test_light_client.py",
    "own_loop.py": "tests/optim/outer/test_own_loop.py",
    "torchrun.py": "tests/exchanges/test_torchrun.py",
}


def start(name, *arguments, folder):
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)],
        cwd=folder,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(process, seconds=120):
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def test_every_example_is_run_by_a_test():
    here = set(re.findall(r'"(\w+\.(?:py|ipynb))"', Path(__file__).read_text())) | {"digits.py"}
    assert {
        file.name for kind in ("*.py", "*.ipynb") for file in (ROOT / "examples").glob(kind)
    } <= here
    for name, tests in ELSEWHERE.items():
        found = ROOT / tests
        files = found.rglob("*.py") if found.is_dir() else [found]
        assert any(name in file.read_text() for file in files), name


def cells():
    """The code cells of the notebook."""
    book = json.loads((ROOT / "examples" / "first_swarm.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["metadata"]["kernelspec"]["name"]) == (4, "python3")
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def test_the_names_that_the_notebook_imports_exist():
    for cell in cells():
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("shoal"):
                module = importlib.import_module(node.module)
                for name in node.names:
                    assert hasattr(module, name.name), f"{node.module} has no {name.name}"


@pytest.mark.slow(reason="two peers in threads train on text while a third host pulls")
def test_the_cells_of_the_notebook_run_in_their_order(tmp_path):
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells())
    script = tmp_path / "cells.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells()))
    said = ended(start(script, folder=tmp_path), 180)
    assert said.startswith("shoal://")
    losses = [float(loss) for loss in re.findall(r"^steps .* anna (\d\.\d{3})", said, re.M)]
    assert losses[-1] < losses[0] - 0.5
    assert float(re.search(r"held-out loss: (\d\.\d{3})", said)[1]) < losses[0]
    assert said.endswith("both have left\n")


@pytest.mark.ci
def test_text_is_pretrained_alone(tmp_path):
    (tmp_path / "text").write_text(
        "a shoal of fish stays together while each swims its own way " * 200
    )
    options = ["--data", tmp_path / "text", "--width", 16, "--steps", 11, "--every", 5]
    out = ended(start("pretrain_text.py", *options, HERE, folder=tmp_path))
    link, *rounds, loss = out.splitlines()
    assert link.startswith("shoal://")
    # Two rounds of 4 fragments, and one fragment at step 11; several may be applied at one step.
    assert sorted(rounds) == sorted(f"round {number}: 1 peers" for number in range(9))
    assert float(re.fullmatch(r"held-out loss: (\d\.\d{4}) nats a byte", loss)[1]) < 5.6


@pytest.mark.slow(reason="two real nodes train on text")
def test_two_peers_pretrain_on_text_and_end_with_one_model(tmp_path):
    (tmp_path / "text").write_text(
        "a shoal of fish stays together while each swims its own way " * 200
    )
    options = ["--data", tmp_path / "text", "--steps", 40, "--width", 16, HERE]
    first = start("pretrain_text.py", *options, "--every", 10, "--peers", 2, folder=tmp_path)
    timer = threading.Timer(120, first.kill)
    timer.start()
    link = first.stdout.readline().strip()
    timer.cancel()
    second = start("pretrain_text.py", *options, "--link", link, folder=tmp_path)
    outs = [ended(process).splitlines() for process in (first, second)]
    assert outs[0][-1] == outs[1][-1]
    assert sorted(outs[0]) == sorted(
        outs[1]
    )  # a round that overlaps with the next may end after it
    assert {f"round {number}: 2 peers" for number in range(4)} <= set(outs[0])


@pytest.mark.slow(reason="two processes train with transformers")
def test_adapters_are_trained_by_transformers_own_trainer(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    out = ended(
        start(
            "lora.py",
            "--steps",
            4,
            "--every",
            2,
            "--out",
            tmp_path / "adapters",
            HERE,
            folder=tmp_path,
        )
    )
    assert out.startswith("shoal://")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").stat().st_size < 100_000


@pytest.mark.ci
def test_digits_are_learnt_better_together():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    torch.set_num_threads(1)

    def train(exchange):
        task = load_task(f"{ROOT}/examples/digits.py:Digits", {"width": 8})
        trainer = Trainer(task, blocking(every=20), TrainSettings(steps=240))
        trainer.connect(exchange, "run", Shard(int(exchange.peer), 16, 0))
        trainer.run()
        return trainer.evaluate()

    together = Simulation(["0", "1", "2", "3"]).run(train)
    alone = [Simulation([peer]).run(train)[peer] for peer in ("0", "1")]
    assert max(together.values()) < min(alone)


def test_the_compose_file_starts_commands_that_exist():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    services = yaml.safe_load((ROOT / "examples" / "compose.yaml").read_text())
    assert set(services["services"]) == set(services["volumes"]) == {"first", "second", "seed"}
    for name, service in services["services"].items():
        assert (
            ROOT / "examples" / service["build"]["context"] / service["build"]["dockerfile"]
        ).is_file()
        assert service["volumes"] == [f"{name}:/data"]
        verb, *rest = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in service["command"]]
        cli.commands[verb].make_context(verb, rest, parent=click.Context(cli))
    assert services["services"]["first"]["ports"] == ["4001:4001"]


def test_the_swarm_of_docker_compose_up_starts_commands_that_exist():
    """`tests/e2e/test_compose.py` runs them."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    swarm = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert list(swarm["services"]) == ["seed", "first", "second", "third", "page"]
    assert set(swarm["volumes"]) == {"swarm"}
    verbs = []
    for service in swarm["services"].values():
        assert (service["entrypoint"], service["volumes"]) == (["sh", "-ec"], ["swarm:/data"])
        assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        (script,) = service["command"]
        asked = re.findall(r"\$\$\(shoal ([^)|]*)", script)
        (run,) = re.findall(
            r"exec shoal (.*)",
            re.sub(r"\$\$\([^)]*\)", "x", script).replace("$$resume", "--resume"),
        )
        for line in (run, *asked):
            command, (verb, *rest) = cli, shlex.split(line)
            while isinstance(command.commands[verb], click.Group):
                command, verb, *rest = command.commands[verb], *rest
            command.commands[verb].make_context(verb, rest, parent=click.Context(cli))
            verbs.append(verb)
    assert verbs == ["seed", "up", "show", "join", "link", "join", "link", "watch", "link"]
