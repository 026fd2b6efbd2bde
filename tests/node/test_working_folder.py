"""What was given as a relative path stays where it was when the process changes its folder, as hydra, ray and %cd do."""

import logging
from pathlib import Path

import pytest
import torch

from shoal.node.checkpoint.store import load
from shoal.node.checkpoint.writer import CheckpointWriter
from shoal.node.config.settings import NodeSettings, RLSettings, Settings
from shoal.node.data.reader import BYTES
from shoal.node.integrations.own_loop import Run
from shoal.node.runtime.door import task_label
from shoal.node.tasks.loader import load_task
from shoal.node.tasks.text import TextTask
from shoal.node.verify.history import EvidenceFile
from shoal.optim import Alone, NoLoCo
from shoal.swarm.file_lock import FileLock
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.addresses import Peerstore

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.fixture
def move(tmp_path, monkeypatch):
    """Begin in one folder; the call goes to another, which must stay empty."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    monkeypatch.chdir(before)
    yield lambda: monkeypatch.chdir(after)
    assert not list(after.iterdir())


def here(tmp_path):
    return {path.relative_to(tmp_path / "before").as_posix() for path in (tmp_path / "before").rglob("*") if path.is_file()}


def test_a_key_is_locked_where_it_is(tmp_path, move):
    made, loaded = Identity.create("own.key"), Identity.load("own.key")
    move()
    for identity in (made, loaded):
        with identity.lock():
            assert "own.key.lock" in here(tmp_path)


def test_a_daemon_reads_its_key_again(move):
    """The supervisor starts a new daemon from the same identity when one died."""
    identity = Identity.create("own.key")
    move()
    assert Identity.load(identity.path).peer_id == identity.peer_id


def test_locks_known_peers_and_evidence_are_written_where_they_were(tmp_path, move):
    lock, known, history = FileLock(Path("a.lock"), "It", "stop it"), Peerstore("", Path("peers.json")), EvidenceFile(Path("h.db"))
    move()
    with lock:
        assert here(tmp_path) == {"a.lock"}
    known.remember([f"/ip4/203.0.113.4/tcp/4001/p2p/{PEER}"])
    known.save()
    assert here(tmp_path) == {"peers.json"}
    assert history.path == tmp_path / "before" / "h.db"


def test_checkpoints_are_written_where_they_were(tmp_path, move):
    writer = CheckpointWriter(Path("run"), keep=2, state=lambda: {"x": torch.ones(2)}, notify=logging.warning)
    move()
    assert writer.last(3) is None
    assert load(tmp_path / "before" / "run")[0] == 3


def test_a_run_of_ones_own_loop_saves_where_it_was(tmp_path, move):
    model = torch.nn.Linear(2, 1)
    run = Run("runs/anna", model, torch.optim.SGD(model.parameters(), lr=0.1), tensorboard="curves")
    move()
    assert run.folder == tmp_path / "before" / "runs" / "anna"
    assert run._saver.last(1) is None
    run._sinks.close()
    assert load(run.folder)[0] == 1


def test_slow_weights_on_disk_stay_in_their_folder(tmp_path, move):
    Path("slow").mkdir()
    model = torch.nn.Linear(2, 1)
    opt = NoLoCo(torch.optim.SGD(model.parameters(), lr=0.1), Alone(), every=1, lag=0, slow_device=Path("slow"))
    move()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
    opt.load_state_dict(opt.state_dict())
    assert opt.round == 2


def test_paths_of_settings_are_whole(tmp_path, move):
    names = ("folder", "offload", "tensorboard", "identity", "resume_from")
    given = NodeSettings.model_validate({name: f"x/{name}" for name in names})
    default = NodeSettings.model_validate({"name": "anna"})
    move()
    assert [getattr(given, name) for name in names] == [tmp_path / "before" / "x" / name for name in names]
    assert (given.run_folder, default.run_folder) == (tmp_path / "before/x/folder", tmp_path / "before/runs/anna")


def test_the_folder_of_a_policy_is_whole_and_a_name_stays_one(tmp_path, move):
    (tmp_path / "before" / "smol").mkdir(parents=True, exist_ok=True)
    given = [RLSettings(policy=spec).policy for spec in ("hf:smol", "hf:owner/name", "tiny", "tiny:habit")]
    move()
    assert given == [f"hf:{tmp_path / 'before' / 'smol'}", "hf:owner/name", "tiny", "tiny:habit"]


TASK = """
import os
from shoal.node.tasks.text import TextTask
os.chdir(os.environ["ELSEWHERE"])
class Mine(TextTask):
    pass
"""


def test_a_task_file_that_changes_the_folder_is_loaded_again(tmp_path, move, monkeypatch):
    """A node loads it once more to verify, or for its baseline."""
    monkeypatch.setenv("ELSEWHERE", str(tmp_path / "after"))
    (tmp_path / "before" / "task.py").write_text(TASK)
    settings = Settings.model_validate({"task": {"hooks": "task.py:Mine"}, "rl": {"env": "task.py:Mine"}})
    move()
    assert [type(load_task(settings.task.hooks)._task).__name__ for _ in range(2)] == ["Mine", "Mine"]
    assert task_label(settings.task.hooks) == "task.py:Mine"
    assert settings.rl.env == settings.task.hooks


@pytest.mark.parametrize("data", ["text.txt", "texts", "text.txt,texts", "records.jsonl"])
def test_text_is_read_from_where_it_was(tmp_path, move, data):
    before = tmp_path / "before"
    (before / "texts").mkdir()
    (before / "text.txt").write_text("a text " * 200)
    (before / "texts" / "b.txt").write_text("b text " * 200)
    (before / "records.jsonl").write_text('{"text": "a text"}\n' * 200)
    task = TextTask(data=data, context=8, batch=2)
    move()
    assert task.tokenizer_name == BYTES
    assert task.stream is not None or task.documents


def test_a_tokenizer_is_read_from_where_it_was(tmp_path, move):
    task = TextTask(tokenizer="./none")
    move()
    with pytest.raises(Exception, match=str(tmp_path / "before" / "none")):
        task.tokenizer  # noqa: B018
