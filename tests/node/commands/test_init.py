"""``shoal init``: what it makes, what it refuses, and that each template trains as its README
says.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.commands.scaffold import FILES, TEMPLATES, ScaffoldError, scaffold
from shoal.node.config.settings import load
from shoal.node.rl.loading import make_task
from shoal.node.task import Shard
from shoal.node.tasks.loader import load_task
from shoal.node.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder made from a template, which is the present one then."""

    def make(template):
        folder = tmp_path / "own"
        assert scaffold(folder, template) == list(FILES)
        monkeypatch.chdir(folder)
        return folder

    return make


def commands(folder):
    """The shoal commands in the README's blocks."""
    blocks = re.findall(
        r"^```sh\n(.*?)^```", (folder / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_settings_load_and_the_commands_of_the_readme_exist(made, template):
    if template == "finetune":
        pytest.importorskip("transformers", reason="transformers is not installed")
    folder = made(template)
    settings = load(folder / "swarm.toml")
    assert settings.swarm.name == template
    tried, *others = commands(folder)
    assert tried == shlex.split(TEMPLATES[template])[1:]
    for words in (tried, *others):
        cli.commands[words[0]].make_context(words[0], list(words[1:]))
    assert {words[0] for words in others} - {"demo"} == {"up", "join"}


def put_into_the_template(file):
    """The model of docs/own-model.md in the place of the template's."""
    (model,) = re.findall(
        r"^```python\n(class Model.*?)^```",
        (ROOT / "docs" / "own-model.md").read_text(encoding="utf-8"),
        re.M | re.S,
    )
    text = file.read_text(encoding="utf-8")
    start, end = text.index("class Model("), text.index("class Pretrain(")
    assert "nn.GRU" in model
    file.write_text(f"{text[:start]}{model}\n\n{text[end:]}", encoding="utf-8")


@pytest.mark.parametrize("model", ["the template's", "the guide's"])
def test_pretraining_lowers_the_loss(made, model):
    folder = made("pretrain")
    if model == "the guide's":  # which says that nothing else has to change
        put_into_the_template(folder / "task.py")
    settings = load(
        folder / "swarm.toml", {"train.steps": 30, "outer.every": 10, "task.options.width": 16}
    )
    (Path("text") / "deep").mkdir(parents=True)
    Path("text/deep/a.txt").write_text("all work and no play makes jack a dull boy. " * 1000)
    task = load_task(settings.task.hooks, {**settings.task.options, "data": "text", "lr": 1e-2})
    trainer = Trainer(task, settings.outer, settings.train)
    trainer.connect(trainer.opt.exchange, "run", Shard(0, 2, 0))
    before = trainer.evaluate()
    trainer.run()
    assert trainer.evaluate() < before - 0.5
    assert abs(before - 5.55) < 0.5  # nats of a byte that may be any
    other, same = next(task.batches(Shard(1, 2, 0))), next(task.batches(Shard(1, 2, 0)))
    assert torch.equal(other, same)
    assert not torch.equal(other, next(task.batches(Shard(0, 2, 0))))


def test_the_environment_judges_by_what_it_asked(made):
    settings = load(made("rl") / "swarm.toml", {"rl.policy": "tiny:copy:0", "rl.held_out": 4})
    env = make_task(settings).env.made
    question = env.question(1, 2)
    assert question == env.question(1, 2) != env.question(1, 3)
    assert question.prompt.endswith(question.answer[::-1])
    assert [
        env.reward(question, text)
        for text in (question.answer, "", "abcd", question.answer[:2] + "?")
    ] == [1, 0, 0, 2 / 3]


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    shown = CliRunner().invoke(cli, ["init", str(tmp_path)], standalone_mode=False)
    assert isinstance(shown.exception, ScaffoldError)
    assert "is not empty: name a new one" in str(shown.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ScaffoldError, match=r"Cannot write the folder .* \(Not a directory\): choose another place"
    ):
        scaffold(tmp_path / "file" / "own", "rl")


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, monkeypatch):
    whole = Path.open

    def full(path, mode="r", *arguments, **options):
        if (path.name, mode) == ("task.py", "xb"):
            raise OSError(28, "No space left on device")
        return whole(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ScaffoldError, match="No space left on device"):
        scaffold(tmp_path / "own", "pretrain")
    assert list((tmp_path / "own").iterdir()) == []


def test_finetuning_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ScaffoldError, match=r"needs the package transformers, .* pip install 'shoal\[hf\]'"
    ):
        scaffold(tmp_path / "own", "finetune")
    assert not (tmp_path / "own").exists()


def test_the_command_says_what_to_try(tmp_path):
    shown = CliRunner().invoke(
        cli, ["init", str(tmp_path / "a"), "--template", "rl"], standalone_mode=False
    )
    assert shown.output.splitlines() == [
        f"{tmp_path / 'a'}: README.md, swarm.toml, task.py",
        f"try it: cd {tmp_path / 'a'}, then {TEMPLATES['rl']}",
    ]
    shown = CliRunner().invoke(cli, ["init", str(tmp_path / "b"), "--json"], standalone_mode=False)
    assert json.loads(shown.output) == {
        "folder": str(tmp_path / "b"),
        "template": "pretrain",
        "files": list(FILES),
    }


@pytest.mark.slow(reason="each template trains in a demo of real nodes")
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_demo_of_the_readme_runs(made, template):
    if template == "finetune":
        pytest.importorskip("transformers")
    folder = made(template)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *commands(folder)[0], "--json"],
        env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["peers"] == 2
    if template == "rl":
        assert report["rounds"] == 20
        assert report["used"] > 0
    else:
        assert report["exchanges"] > 0
        assert report["loss_last"] < report["loss_first"]


@pytest.mark.slow(reason="two real nodes train an adapter")
def test_an_adapter_is_all_that_travels(made):
    pytest.importorskip("peft")
    made("finetune")
    task = load_task("task.py:Finetune", {"lora": 4})
    torch.manual_seed(0)
    model = task.model()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 0 < trained < 0.25 * sum(p.numel() for p in model.parameters())
    batch = next(task.batches(Shard(0, 2, 0)))
    assert torch.isfinite(task.loss(model, batch))


def test_next_command_can_be_copied(tmp_path, monkeypatch):
    """The command to go on with can be copied whatever the folder is called."""
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(cli, ["init", "my task"], standalone_mode=False).output
    assert "try it: cd 'my task', then shoal demo " in shown
