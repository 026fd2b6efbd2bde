"""Doing steps again needs all that they depended on: dropout's random numbers, momentum, buffers, what a schedule says."""

import pytest
import torch

from shoal.node.task import Shard, Task
from shoal.node.verify.audit.errors import VerifyError
from shoal.node.verify.training.audit import prove
from shoal.node.verify.training.calibrate import stretches
from shoal.node.verify.training.checker import TrainingChecker
from shoal.node.verify.training.material import TrainingTerms
from shoal.node.verify.training.replica import NotAsClaimed, Replica, before, moving, numbers_of
from shoal.swarm.manifest.outer import TrainSettings
from shoal.verification.calibration.calibration import Calibration

SHARD = Shard(1, 2, 3)
TERMS = TrainingTerms("noisy", TrainSettings(steps=40, seed=1), steps=4)


class Noisy(Task):
    """Dropout, BatchNorm, a frozen layer, tied weights, momentum, and a schedule without a closed form."""

    def __init__(self, momentum=0.9, end=None):
        self.momentum, self.end = momentum, end

    def model(self):
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)
        )
        model[3].weight = model[0].weight
        model[4].requires_grad_(False)
        return model

    def batches(self, shard):
        generator = torch.Generator().manual_seed(shard.index + 10 * shard.seed)
        for _ in range(self.end or 10**9):
            yield {"x": torch.randn(8, 6, generator=generator)}

    def loss(self, model, batch):
        return (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()

    def evaluate(self, model):
        return 0.0

    def inner_optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05, momentum=self.momentum)

    def lr_scheduler(self, optimizer, steps):
        return torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9)


AGREED = TrainSettings(steps=40, seed=1, optimizer="adamw", lr=0.05, schedule="cosine", warmup=3, clip=0.1)


@pytest.mark.parametrize(("momentum", "train"), [(0.0, TERMS.train), (0.9, TERMS.train), (0.9, AGREED)])
def test_steps_with_dropout_and_buffers_are_done_again_to_the_bit(momentum, train):
    terms = TrainingTerms("noisy", train, steps=4)
    replica = Replica(Noisy(momentum), train)
    assert replica.random
    checker = TrainingChecker(replica, terms, Calibration(), label="noisy")
    made = [prove(kept, terms, run="r", round=1, peer="p", slot=0) for kept in stretches(Noisy(momentum), terms, SHARD)]
    assert len(made) == 10
    torch.manual_seed(8)
    known = torch.get_rng_state()
    for one in reversed(made):  # in any order
        found = checker.check(one.claim, one.material, one.snapshot, SHARD)
        assert found.accepted, found.reason
        assert found.statistics["turned"] == 0
    assert torch.equal(torch.get_rng_state(), known)  # the node's own random numbers are where they were


def test_only_what_moves_is_in_the_state():
    model = Noisy().model()
    names = set(moving(model))
    assert names == {
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked", "3.bias",
    }  # fmt: skip
    state = before(model, Noisy().inner_optimizer(model.parameters()))
    assert set(state) == {*(f"model.{name}" for name in names), "random"}
    assert not any(value.requires_grad for value in state.values())


def test_a_shard_that_ends_is_the_provers_fault():
    kept = next(stretches(Noisy(), TERMS, SHARD))
    with pytest.raises(NotAsClaimed, match="no batch for step 2"):
        Replica(Noisy(end=2), TERMS.train).replay(kept.state, SHARD, 0, 4)


def test_a_replica_can_be_used_again_after_nonsense():
    kept = next(stretches(Noisy(), TERMS, SHARD))
    replica = Replica(Noisy(), TERMS.train)
    state = {**kept.state, "model.0.bias": torch.full((6,), 3e38)}
    with pytest.raises(NotAsClaimed, match="not finite"):
        replica.replay(state, SHARD, 0, 4)
    again = replica.replay(kept.state, SHARD, 0, 4)
    assert all(torch.equal(one, two) for one, two in zip(again, kept.after, strict=True))


class Odd(torch.optim.SGD):
    """Keeps numbers that are no tensors, and perhaps something else."""

    extra: object = 0.5

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            known = self.state[parameter]
            known["count"] = known.get("count", 0) + 1
            known["rate"] = 0.5 * known.get("rate", 1.0)
            known["none"], known["extra"] = None, self.extra
            parameter.data.mul_(1 - 0.01 * known["rate"] * known["count"])


class WithOdd(Noisy):
    def inner_optimizer(self, params):
        return Odd([p for p in params if p.requires_grad], lr=0.05, momentum=0.9)


def test_numbers_that_are_no_tensors_come_back_as_they_were():
    replica = Replica(WithOdd(), TERMS.train)
    kept = list(stretches(WithOdd(), TERMS, SHARD))[5]
    assert kept.state["optimizer.0.count"].item() == 20
    snapshot = prove(kept, TERMS, run="r", round=1, peer="p", slot=0).snapshot
    state, after = replica.open(snapshot, kept.stretch.first)
    again = replica.replay(state, SHARD, kept.stretch.first, 4)
    assert all(torch.equal(one, two) for one, two in zip(again, after, strict=True))


def test_what_is_not_a_number_is_said(monkeypatch):
    monkeypatch.setattr(Odd, "extra", "text")
    with pytest.raises(VerifyError, match="keeps a str, 'extra': its training cannot be audited"):
        Replica(WithOdd(), TERMS.train)
    assert numbers_of(Noisy().inner_optimizer(Noisy().model().parameters())) == {}
