"""The memory budget: the sum that is made before training, and the queues that follow from it."""

import pytest
import torch

from shoal.node.memory import free_memory
from shoal.node.task import Task
from shoal.node.training import resources as memory
from shoal.node.training.resources import BODIES, GB, POOL, MemoryBudgetError, check, held, shares
from shoal.node.training.trainer import Trainer
from shoal.swarm.errors import OuterError
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


PARAMETERS = list(Wide().model().parameters())


def test_a_model_that_does_not_fit_is_refused_with_the_sum(monkeypatch):
    monkeypatch.setattr(memory, "held", lambda: 100_000_000)
    outer = 4_000_000 * 2
    training = 4_000_000 * (1 + 2 + 1) + outer
    gigabytes = 0.2
    need = 100_000_000 + training + sum(shares(gigabytes))
    assert need < gigabytes * GB
    check(gigabytes, PARAMETERS)
    monkeypatch.setattr(memory, "held", lambda: 100_000_000 + int(gigabytes * GB) - need + 1)
    with pytest.raises(MemoryBudgetError, match=r"need about 0\.20 GB .* inner optimizer 0\.01, .* --ram allows 0\.2: allow"):
        check(gigabytes, PARAMETERS)
    check(gigabytes, PARAMETERS, slow_here=False)
    check(gigabytes, PARAMETERS, method="none")


def test_the_estimate_is_what_the_optimizers_really_take():
    made = Trainer(Wide(), OuterSettings(), TrainSettings(), device=torch.device("cpu"))
    outer = [*made.opt.slow, *(t for tensors in made.opt.rule_state.values() for t in tensors)]
    assert sum(tensor.nbytes for tensor in outer) == 4_000_000 * 2


def test_without_a_bound_the_user_is_warned_before_the_optimizers_are_made(monkeypatch):
    monkeypatch.setattr(memory, "held", lambda: 100_000_000)
    need = 4_000_000 * (1 + 2 + 2 + 1) + sum(shares(0.0))
    logged, made = [], []

    def trainer(free):
        monkeypatch.setattr(memory, "free_memory", lambda: (free, 1e12))

        class Watched(Wide):
            def inner_optimizer(self, params):
                made.append(len(logged))
                return super().inner_optimizer(params)

        Trainer(Watched(), OuterSettings(), TrainSettings(), on_model=lambda params: check(0.0, params, logged.append))

    trainer(need)
    assert logged == []
    trainer(need - 1)
    (said,) = logged
    assert said.startswith(f"This node will need about {(need + 100_000_000) / GB:.2f} GB of memory (it holds 0.10, ")
    assert "so the system may end it without a word: end other programs" in said
    assert made == [0, 1]


def test_a_containers_limit_counts(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       8000 kB\nMemFree: 1 kB\nMemAvailable:   4000 kB\nHugePages_Total: 0\n")
    assert free_memory(tmp_path, tmp_path / "none") == (4_096_000, 8_192_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path, tmp_path) == (4_096_000, 8_192_000)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 200000\n")
    assert free_memory(tmp_path, tmp_path) == (500_000, 1_000_000)
    assert free_memory(tmp_path / "none", tmp_path)[0] == 500_000


def test_a_checkpoint_is_copied_only_where_that_leaves_memory(monkeypatch):
    monkeypatch.setattr(memory, "held", lambda: GB)
    monkeypatch.setattr(memory, "free_memory", lambda: (GB, 9 * GB))
    bounded, free = memory.room_for_copy(1.5), memory.room_for_copy(0.0)
    assert (bounded(GB // 2), bounded(GB // 2 + 1)) == (True, False)
    assert (free(GB // 2), free(GB // 2 + 1)) == (True, False)


def test_queues_follow_from_the_budget():
    assert shares(0.0) == (POOL, BODIES)
    assert shares(0.64) == (20_000_000, 10_000_000)
    assert shares(1000.0) == (POOL, BODIES)


def test_what_a_process_holds_is_found():
    assert 10_000_000 < held() < 1 << 40


def test_a_folder_that_cannot_hold_the_outer_state_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OuterError, match=r"cannot be kept in files in '.*file' \(.*\): free some space, or choose another folder"):
        Trainer(Wide(), OuterSettings(), TrainSettings(), offload=tmp_path / "file")
    made = Trainer(Wide(), OuterSettings(), TrainSettings(), offload=tmp_path / "there")
    assert [tensor.shape for tensor in made.opt.slow] == [(1000, 1000)]
