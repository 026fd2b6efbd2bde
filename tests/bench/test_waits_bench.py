"""bench/waits.py, on a small model: a node's inner step has the host wait no more often than plain PyTorch does."""

import sys
from collections import Counter

import pytest
import torch

from bench import waits
from shoal.node.training import trainer

CUDA = torch.device("cuda", 0)


@pytest.mark.gpu(standin=True)
def test_an_inner_step_waits_no_more_than_plain_pytorch(tmp_path):
    found = waits.measure(waits.task_of(20_000, tmp_path), CUDA, slow_on_device=False)
    assert found["inner"] == found["plain"] == Counter()
    assert sum(found["exchange"].values()) <= 3


@pytest.mark.gpu(standin=True)
def test_a_wait_in_a_step_would_be_counted_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer._MeanLoss, "add", lambda self, loss: setattr(self, "_sum", float(loss)))
    found = waits.measure(waits.task_of(20_000, tmp_path), CUDA, slow_on_device=False)
    assert sum(found["inner"].values()) == 2
    assert all("| item | " in what and "training/trainer.py:" in what for what in found["inner"])


def test_without_the_stand_in_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["waits.py"])
    monkeypatch.setattr(waits, "WAITS", "no_standin")
    with pytest.raises(SystemExit, match="only the stand-in for a GPU counts waits"):
        waits.main()
