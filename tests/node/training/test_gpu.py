"""A node's training on a GPU leaves the weights that it leaves on the CPU, however it computes, and
resumes on either.
"""

import pytest
import torch

from shoal.node.checkpoint import store as checkpoint
from shoal.node.tasks.gpt import GPT
from shoal.swarm.settings.training import TrainSettings
from tests.support.gpu import assert_same
from tests.support.trainer_loops import Overflows, Small, trainer

pytestmark = pytest.mark.gpu

STEPS, CPU, CUDA = 9, torch.device("cpu"), torch.device("cuda", 0)
SETTINGS = TrainSettings(
    steps=STEPS, seed=1, optimizer="adamw", lr=0.01, schedule="cosine", warmup=3, clip=1.0
)


class Adapted(Small):
    """A frozen layer with an adapter of low rank, as LoRA has it."""

    def model(self):
        base, down, up = (
            torch.nn.Linear(4, 16),
            torch.nn.Linear(4, 2, bias=False),
            torch.nn.Linear(2, 16, bias=False),
        )
        base.requires_grad_(False)

        class Lora(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.base, self.down, self.up, self.head = base, down, up, torch.nn.Linear(16, 1)

            def forward(self, x):
                return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))

        return Lora()


class Text(Small):
    """The built-in model on random tokens."""

    def model(self):
        return GPT(layers=2, width=16, heads=2, context=8, vocabulary=32)

    def batches(self, shard):
        generator = torch.Generator().manual_seed(shard.index)
        while True:
            yield torch.randint(32, (4, 9), generator=generator)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(
            model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten()
        )


def made(task, device, *, method="noloco", **how):
    return trainer(task(), SETTINGS, method=method, device=device, **how)


def weights(trainer):
    return [*trainer.model.state_dict().values(), *trainer.opt.slow]


@pytest.mark.parametrize(
    ("task", "how"),
    [
        (Small, {}),
        (Small, {"slow_on_device": True}),
        (Small, {"accumulate": 4}),
        (Small, {"workers": 1}),
        (Adapted, {}),
        (Text, {"recompute": True}),
        (Text, {"method": "streaming", "slow_on_device": True}),
    ],
)
def test_it_trains_as_on_the_cpu(task, how, same_adam):
    found = []
    for device in (CPU, CUDA):
        one = made(task, device, **how)
        # Also for the activations that the backward pass computes again.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            one.run()
        one.close()
        found.append(weights(one))
    assert_same(found[1], found[0])


def test_so_it_does_with_slow_weights_in_files(tmp_path, same_adam):
    found = []
    for device in (CPU, CUDA):
        (tmp_path / device.type).mkdir()
        one = made(Small, device, offload=tmp_path / device.type)
        one.run()
        found.append(weights(one))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("way", [(CPU, CUDA), (CUDA, CPU), (CUDA, CUDA)], ids=str)
def test_it_goes_on_on_another_kind_of_device(tmp_path, way, same_adam):
    whole = made(Small, CPU)
    whole.run()
    half, again = made(Small, way[0]), made(Small, way[1])
    for _ in range(4):
        half.step()
    checkpoint.save(tmp_path, 4, half.state())
    again.resume(checkpoint.load(tmp_path)[1])
    again.run()
    assert_same(weights(again), weights(whole))


@pytest.mark.parametrize(
    ("task", "precision"), [(Small, "bfloat16"), (Small, "float16"), (Overflows, "float16")]
)
def test_mixed_precision_resumes_near_the_cpu(tmp_path, task, precision):
    """In mixed precision it resumes with the scale of the loss and stays near the CPU."""
    whole, half, again = (
        trainer(task(), SETTINGS, method="noloco", device=CUDA, precision=precision)
        for _ in range(3)
    )
    whole.run()
    for _ in range(4):
        half.step()
    checkpoint.save(tmp_path, 4, half.state())
    again.resume(checkpoint.load(tmp_path)[1])
    again.run()
    assert_same(weights(again), weights(whole))
    assert again.inner_step.state_dict() == whole.inner_step.state_dict()
    here = trainer(task(), SETTINGS, method="noloco", precision=precision)
    here.run()
    for one, other in zip(
        weights(whole), weights(here), strict=True
    ):  # the devices do other operations in the narrow format
        torch.testing.assert_close(one.cpu(), other, rtol=0.0, atol=5e-3)
