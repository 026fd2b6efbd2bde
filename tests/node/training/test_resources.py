"""The memory budget: the sum that is made before training, and the queues that follow from it."""

import gc
from types import SimpleNamespace

import pytest
import torch

from shoal.node.memory import free_memory
from shoal.node.task import Shard, Task
from shoal.node.training import resources as memory
from shoal.node.training.resources import BODIES, GB, POOL, DevicePlan, MemoryBudgetError, check, held, shares
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone
from shoal.optim import device as of_device
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


@pytest.fixture
def card(monkeypatch):
    """Plays a device of 100 MB, of which tensors of this process have the model's 4 MB and 1 MB more."""
    has = SimpleNamespace(free=95_000_000, allocated=5_000_000)
    monkeypatch.setattr(of_device, "free_and_total", lambda device: (has.free, 100_000_000))
    monkeypatch.setattr(of_device, "allocated", lambda device: has.allocated)
    return has


GPU = torch.device("cuda", 0)


def planned(**options):
    return DevicePlan(Wide().model(), GPU, **{"method": "noloco", "slow_there": False, "tries": False, **options})


@pytest.mark.parametrize(
    ("options", "lasting", "passing"),
    [
        ({}, {"model": 4, "inner optimizer": 8}, {"gradients": 4}),
        ({"slow_there": True}, {"model": 4, "inner optimizer": 8, "slow weights": 8}, {"gradients": 4, "exchange": 4}),
        ({"tries": True}, {"model": 4, "inner optimizer": 8, "trial of partners' weights": 4}, {"gradients": 4}),
    ],
)
def test_what_training_takes_of_a_device_is_planned_by_what_it_is_for(card, options, lasting, passing):
    plan = planned(**options)
    assert {name: nbytes / 10**6 for name, nbytes in plan.lasting.items()} == lasting
    assert {name: nbytes / 10**6 for name, nbytes in plan.passing.items()} == passing


def test_narrow_weights_are_cast_where_they_are(card):
    plan = DevicePlan(Wide().model().bfloat16(), GPU, method="noloco", slow_there=False, tries=False)
    assert plan.passing == {"gradients": 2_000_000, "staging": 4_000_000}


def test_a_device_without_room_is_refused_with_what_would_fit(card):
    card.free = 24_000_000  # and the 4 MB that the model has
    planned(slow_there=True)
    card.free -= 1
    words = r"about 0\.03 GB of cuda:0 without activations \(model 0\.00, .*\) and 0\.03 are free there: leave node.slow_on_dev"
    with pytest.raises(MemoryBudgetError, match=words):
        planned(slow_there=True)
    planned()


def test_after_the_first_step_what_is_held_is_compared_with_the_plan(card):
    plan = planned()
    card.allocated = 1_000_000 + int(12_000_000 * 1.2)
    assert plan.compared() is None
    card.allocated += 1
    assert "this node holds 0.01 GB of cuda:0, where 0.01 were planned" in plan.compared()


@pytest.mark.gpu(standin=True)
@pytest.mark.parametrize("slow_there", [False, True])
@pytest.mark.parametrize("method", ["noloco", "diloco", "eager"])
def test_the_plan_is_what_a_node_really_holds_after_its_first_step(slow_there, method):
    gc.collect()  # trainers of other tests
    trainer = Trainer(Wide(), OuterSettings(method=method), TrainSettings(steps=1), device=GPU, slow_on_device=slow_there)
    trainer.connect(Alone(), "run", Shard(0, 1, 0))
    trainer.step()
    held = of_device.allocated(GPU) - trainer.plan._before
    assert 0.8 * held <= sum(trainer.plan.lasting.values()) <= 1.2 * held
    assert trainer.plan.compared() is None
