"""A node that fails after it has joined and before it trains ends all that it had started."""

import pytest

from shoal.node.config.settings import load
from shoal.node.metrics.log import Metrics
from shoal.node.runtime import node_run, training_node
from shoal.node.runtime.display import make_display
from shoal.node.runtime.run_options import ShutdownSignals
from shoal.node.user_code import UserCodeError

TASK = """
import torch
from shoal import Task
class Mine(Task):
    def model(self): return torch.nn.Linear(4, 1)
    def batches(self, shard): raise OSError("no such disk")
    def loss(self, model, batch): return model(batch).mean()
    def evaluate(self, model): return 1.0
"""


class Part:
    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


def test_verification_and_metrics_are_closed_if_the_task_has_no_batches(tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text(TASK)
    verification, files = Part(), []
    monkeypatch.setattr(training_node, "start_verification", lambda *args: verification)

    class Watched(Metrics):
        def __init__(self, *args):
            super().__init__(*args)
            files.append(self._file)

    monkeypatch.setattr(node_run, "Metrics", Watched)
    own = {"folder": str(tmp_path / "run"), "identity": str(tmp_path / "key"), "listen": ["/ip4/127.0.0.1/tcp/0"], "name": "n"}
    settings = load(None, {**{f"node.{key}": value for key, value in own.items()}, "task.hooks": f"{tmp_path / 'task.py'}:Mine"})
    run = node_run.NodeRun(settings, None, make_display(), ShutdownSignals())
    with pytest.raises(UserCodeError, match=r"failed in batches\(\): OSError: no such disk \(task\.py, line 6\)"):
        run.run()
    assert verification.closed == 1
    assert [file.closed for file in files] == [True]
