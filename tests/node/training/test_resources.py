"""The memory budget: the sum that is made before training, and the queues that follow from it."""

import gc
from types import SimpleNamespace

import pytest
import torch

from shoal.node.console import free_memory
from shoal.node.task import Shard, Task
from shoal.node.training import resources as memory
from shoal.node.training.resources import BODIES, GB, POOL, DevicePlan, MemoryBudgetError, check, held, most_held, shares
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone
from shoal.optim import device as of_device
from shoal.swarm.errors import OuterError
from shoal.swarm.manifest import OuterSettings, TrainSettings


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


class Busy(Wide):
    """Of which a step has 80 MB as its batch and 80 MB as what the model returns."""

    def hidden_matrices(self, model):
        return ["weight"]

    def batches(self, shard):
        while True:
            yield torch.zeros(20_000, 1000)


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
    monkeypatch.setattr(memory, "held", lambda: 0)  # between two exchanges
    monkeypatch.setattr(memory, "most_held", lambda: GB)
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
    assert 10_000_000 < most_held() < 1 << 40


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
    monkeypatch.setattr(of_device, "peak", lambda device: has.peak)
    monkeypatch.setattr(of_device, "forget_peak", lambda device: None)
    return has


GPU = torch.device("cuda", 0)


def planned(model=None, inner=torch.optim.AdamW, **options):
    model = model or Wide().model()
    return DevicePlan(model, GPU, inner(model.parameters()), **{"method": "noloco", "slow_there": False, "tries": False, **options})


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, {"model": 4, "inner optimizer": 8, "gradients": 4}),
        ({"slow_there": True}, {"model": 4, "inner optimizer": 8, "slow weights": 8, "gradients": 4, "exchange": 4}),
        ({"tries": True}, {"model": 4, "inner optimizer": 8, "trial of partners' weights": 4, "gradients": 4}),
        ({"ranks": 4, "slow_there": True}, {"model": 4, "inner optimizer": 8, "slow weights": 2, "gradients": 4, "exchange": 1}),
        (
            {"ranks": 4, "gathered": 6_000_000, "slow_there": True},
            {"model": 4, "inner optimizer": 8, "slow weights": 2, "gradients": 4, "others' parts": 6},
        ),
        ({"inner": torch.optim.SGD}, {"model": 4, "gradients": 4}),
        ({"inner": lambda params: torch.optim.SGD(params, momentum=0.9)}, {"model": 4, "inner optimizer": 4, "gradients": 4}),
        ({"inner": lambda params: torch.optim.AdamW(params, amsgrad=True)}, {"model": 4, "inner optimizer": 12, "gradients": 4}),
    ],
)
def test_what_training_takes_of_a_device_is_planned_by_what_it_is_for(card, options, parts):
    found = {name: nbytes / 10**6 for name, nbytes in planned(**options)._parts().items() if nbytes}
    assert found == parts


def test_narrow_weights_are_cast_where_they_are(card):
    parts = planned(Wide().model().bfloat16())._parts()
    assert (parts["gradients"], parts["staging"]) == (2_000_000, 4_000_000)


def test_a_device_without_room_is_refused_with_what_would_fit(card):
    card.free = 24_000_000  # and the 4 MB that the model has
    planned(slow_there=True)
    card.free -= 1
    words = r"about 0\.03 GB of cuda:0 without activations \(model 0\.00, .*\) and 0\.03 are free there: leave --offload device out"
    with pytest.raises(MemoryBudgetError, match=words + ".* train a model of fewer than 999,999 parameters"):
        planned(slow_there=True)
    planned()
    planned(slow_there=True, ranks=2)


@pytest.mark.parametrize(
    ("held", "said"),
    [(1.2, None), (1.21, "less is left for activations"), (1 / 1.2, None), (1 / 1.21, "a larger model or batch than the plan")],
)
def test_after_the_first_step_what_is_held_is_compared_with_the_plan(card, held, said):
    plan = planned()
    card.allocated, card.peak = 1_000_000 + round(12_000_000 * held), 41_000_000
    found = plan.compared()
    begins = f"after its first step this node holds {0.012 * held:.2f} GB of cuda:0, where 0.01 were planned; with activations, "
    assert found.startswith(begins + "gradients and exchange the next ones will take up to 0.05")  # and Adam's 8 MB
    assert (": " in found, said is None or said in found) == (said is not None, True)


def test_memory_that_the_second_step_will_not_have_is_told_after_the_first(card):
    plan = planned()
    card.allocated, card.peak = 13_000_000, 1_000_000 + 99_000_000 - 8_000_000
    assert "accumulate" not in plan.compared()
    card.peak += 1
    assert (
        "take up to 0.10, more than the 0.10 that are there, so raise train.accumulate, or set train.recompute" in plan.compared()
    )


@pytest.mark.gpu(standin=True)
@pytest.mark.parametrize("slow_there", [False, True])
@pytest.mark.parametrize(("method", "optimizer"), [("noloco", "adamw"), ("diloco", "adamw"), ("eager", "muon")])
def test_the_plan_is_what_a_node_really_holds_after_its_first_step(slow_there, method, optimizer):
    gc.collect()  # trainers of other tests
    train = TrainSettings(steps=1, optimizer=optimizer)
    trainer = Trainer(Busy(), OuterSettings(method=method), train, device=GPU, slow_on_device=slow_there)
    trainer.connect(Alone(), "run", Shard(0, 1, 0))
    trainer.step()
    held = of_device.allocated(GPU) - trainer.plan._before
    assert 0.95 * held <= sum(trainer.plan.lasting.values()) <= 1.05 * held
    said = trainer.plan.compared()
    assert ": " not in said
    trainer.step()
    assert float(said.split("up to ")[1]) == pytest.approx((of_device.peak(GPU) - trainer.plan._before) / 10**9, rel=0.1)
