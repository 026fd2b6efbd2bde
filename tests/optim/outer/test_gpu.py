"""An outer optimizer of a model on a GPU; every method is in tests/optim/methods/test_gpu.py."""

import copy

import pytest
import torch

from shoal.optim import Alone, NoLoCo, OuterOptimizer

pytestmark = pytest.mark.gpu


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))


def train(
    model: torch.nn.Module, opt: OuterOptimizer, steps: int, device: str, seed: int = 1
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 32, generator=generator).to(device)
        model(x).float().pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def test_pinned_slow_weights_equal_the_devices() -> None:
    """Slow weights on the CPU are pinned and equal those on the device."""
    results = []
    for place in ("cpu", "cuda"):
        model = small_model().cuda()
        opt = NoLoCo(
            torch.optim.SGD(model.parameters(), lr=0.1), Alone(), every=3, slow_device=place, lag=0
        )
        if place == "cpu":
            assert all(tensor.is_pinned() for tensor in opt._weights.fast)
        train(model, opt, 9, "cuda")
        assert all(slow.device.type == place for slow in opt.slow)
        results.append([slow.cpu() for slow in opt.slow])
    for on_cpu, on_device in zip(*results, strict=True):
        torch.testing.assert_close(on_cpu, on_device, rtol=1e-6, atol=1e-6)


def test_a_bfloat16_model_keeps_float32_slow_weights() -> None:
    model = small_model().cuda().bfloat16()
    opt = NoLoCo(torch.optim.SGD(model.parameters(), lr=0.1), Alone(), every=2, lag=0)
    x = torch.randn(16, 32, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):
        model(x).float().pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    assert all(slow.dtype == torch.float32 and slow.device.type == "cpu" for slow in opt.slow)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def test_averaged_restores_the_fast_weights_bit_by_bit() -> None:
    model = small_model().cuda()
    opt = NoLoCo(torch.optim.SGD(model.parameters(), lr=0.1), Alone(), every=100, lag=0)
    train(model, opt, 5, "cuda")
    before = copy.deepcopy(model.state_dict())
    with opt.averaged():
        assert not torch.equal(model[0].weight, before["0.weight"])
    assert all(torch.equal(after, before[name]) for name, after in model.state_dict().items())
