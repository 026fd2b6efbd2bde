"""A resumed run draws the numbers that it would have drawn, whichever generator the task uses."""

import random

import numpy as np
import pytest
import torch

from shoal.node.checkpoint import store
from shoal.node.task import Shard, Task
from shoal.node.training.trainer import Trainer, random_state, restore_random_state
from shoal.optim import Alone
from shoal.swarm.manifest import OuterSettings, TrainSettings


class Draws(Task):
    """Task whose loss draws from every global generator of the CPU."""

    def __init__(self):
        self.drawn = []

    def model(self):
        return torch.nn.Linear(2, 1)

    def batches(self, shard):
        while True:
            yield torch.ones(1, 2)

    def loss(self, model, batch):
        self.drawn.append((random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()))
        return model(batch).square().mean()

    def evaluate(self, model):
        return 0.0


def trainer():
    made = Trainer(Draws(), OuterSettings(method="noloco", every=2), TrainSettings(steps=9, seed=1))
    made.connect(Alone(), "run", Shard(0, 1, 1))
    return made


def test_all_global_generators_go_on_where_they_were(tmp_path):
    straight = trainer()
    for _ in range(3):
        straight.step()
    store.save(tmp_path, 3, straight.state())
    for _ in range(3):
        straight.step()
    random.seed(5)
    np.random.seed(5)
    again = trainer()
    again.resume(store.load(tmp_path)[1])
    for _ in range(3):
        again.step()
    assert again.task.drawn == straight.task.drawn[3:]


@pytest.mark.parametrize("kind", ["mps", "cuda"])
def test_the_devices_generator_is_saved_and_set(kind, monkeypatch):
    module, set_to = getattr(torch, kind), []
    monkeypatch.setattr(module, "get_rng_state", lambda *device: torch.full((16,), 7, dtype=torch.uint8))
    monkeypatch.setattr(module, "set_rng_state", lambda state, *device: set_to.append(state.tolist()))
    state = random_state(torch.device(kind))
    restore_random_state(state, torch.device(kind))
    assert set_to == [[7] * 16]
    restore_random_state({**state, "rng_device": None}, torch.device(kind))  # it was saved on a CPU
    restore_random_state(state, torch.device("cpu"))
    assert set_to == [[7] * 16]


@pytest.mark.parametrize(("saved_on", "size", "kind"), [("mps", 44, "cuda"), ("cuda", 16, "mps"), ("xpu", 16, "cuda")])
def test_the_state_of_another_kind_of_device_is_left_out(saved_on, size, kind, monkeypatch):
    set_to = []
    for name in ("mps", "cuda", "xpu"):
        monkeypatch.setattr(getattr(torch, name), "set_rng_state", lambda state, *device: set_to.append(len(state)))
    state = {
        **random_state(torch.device("cpu")),
        "rng_device": torch.zeros(size, dtype=torch.uint8),
        "rng_device_kind": saved_on,
    }
    restore_random_state(state, torch.device(kind))
    assert set_to == []
    restore_random_state(state, torch.device(saved_on))
    assert set_to == [size]
