"""The memory budget: the sum that is made before training, and the queues that follow from it."""

import pytest
import torch

from shoal.node.task import Task
from shoal.node.training import resources as memory
from shoal.node.training.resources import BODIES, GB, POOL, MemoryBudgetError, check, held, shares
from shoal.node.training.trainer import Trainer
from shoal.swarm.manifest.outer import OuterSettings, TrainSettings


class Wide(Task):
    """A million parameters."""

    def model(self):
        return torch.nn.Linear(1000, 1000, bias=False)

    def batches(self, shard):
        yield torch.zeros(1, 1000)

    def loss(self, model, batch):
        return model(batch).sum()

    def evaluate(self, model):
        return 0.0

    def inner_optimizer(self, params):
        return torch.optim.AdamW(params)


@pytest.fixture
def trainer():
    return Trainer(Wide(), OuterSettings(), TrainSettings(), device=torch.device("cpu"))


def test_a_model_that_does_not_fit_is_refused_with_the_sum(trainer, monkeypatch):
    monkeypatch.setattr(memory, "held", lambda: 100_000_000)
    outer = 4_000_000 * (1 + len(trainer.opt.rule_state))
    training = 4_000_000 * (1 + 2 + 3 + 3) + outer
    gigabytes = 0.2
    need = 100_000_000 + training + sum(shares(gigabytes))
    assert need < gigabytes * GB
    check(gigabytes, trainer)
    monkeypatch.setattr(memory, "held", lambda: 100_000_000 + int(gigabytes * GB) - need + 1)
    with pytest.raises(MemoryBudgetError, match=r"need about 0\.20 GB .* inner optimizer 0\.01, .* --ram allows 0\.2: allow"):
        check(gigabytes, trainer)
    check(0.0, trainer)


def test_queues_follow_from_the_budget():
    assert shares(0.0) == (POOL, BODIES)
    assert shares(0.64) == (20_000_000, 10_000_000)
    assert shares(1000.0) == (POOL, BODIES)


def test_what_a_process_holds_is_found():
    assert 10_000_000 < held() < 1 << 40
