"""Tokens a second without waiting, and FLOPs counted as they are in a model, whatever is computed twice."""

import torch
from torch import nn

from shoal.node.config.settings import OwnTraining
from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.node.training.throughput import FlopCount, Rates, Throughput, peak_flops, peak_of
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone
from shoal.swarm.manifest import OuterSettings, TrainSettings

CPU = torch.device("cpu")
OPTIONS = {"layers": 2, "width": 16, "heads": 2, "context": 8, "batch": 4}


def trained(steps=3, peak=None, **own):
    made = Trainer(TextTask(**OPTIONS), OuterSettings(every=2), TrainSettings(steps=steps, seed=1), own=OwnTraining(**own))
    if peak is not None:
        made.throughput = Throughput(CPU, torch.float32, lambda device, dtype: peak)
    made.connect(Alone(), "run", Shard(0, 1, 1))
    made.run()
    return made


def flops_of(model, batch):
    found = FlopCount()
    with found.counting():
        model(batch).square().mean().backward()
    return found.flops


def test_flops_are_those_of_forward_and_backward():
    """A product of (8, 32) and (32, 16) takes 2 * 8 * 32 * 16; backward takes one for the weight, and none for the input."""
    assert flops_of(nn.Linear(32, 16, bias=False), torch.randn(8, 32)) == 2 * (2 * 8 * 32 * 16)


def test_flops_are_counted_once_in_the_first_step_and_scale_with_tokens():
    once, recomputed, parts = (trained(peak=1e9, **own) for own in ({}, {"recompute": True}, {"accumulate": 2}))
    found = once.throughput._flops_per_token
    # Two layers of 12 C^2, and the head. Torch's counter knows the attention of GPUs, and not that of the CPU.
    assert found == 6 * (2 * 12 * 16**2 + 16 * 256)
    assert recomputed.throughput._flops_per_token == found
    assert parts.throughput._flops_per_token == found
    rates = once.throughput.mean()
    assert once.throughput.tokens == 3 * 4 * 8
    assert rates.mfu == found * rates.tokens_per_s / 1e9 > 0


def test_counting_changes_no_bit():
    one, other = trained(peak=1e9), trained()
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert other.throughput.mean().mfu is None


def test_rates_leave_out_what_is_left_out_of_the_seconds():
    made = Throughput(CPU, torch.float32)
    for _ in range(4):
        made.stepped(64)
    assert made.mean() == Rates()
    assert made.report(2.0) == Rates(2.0, 128.0, None)
    made.stepped(32)
    made.report(2.0)
    assert (made.steps, made.tokens, made.busy_s) == (5, 288, 4.0)
    assert made.mean() == Rates(1.25, 72.0, None)


def test_peaks_are_of_the_very_device_and_format():
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", torch.float32) == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", torch.float32, tf32=True) == 156e12
    assert peak_flops("Tesla T4", torch.float32, tf32=True) == 8.1e12  # it has no TF32
    unknown = ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G", "")
    assert [peak_flops(name, torch.bfloat16) for name in unknown] == [None] * len(unknown)
    assert peak_flops("Tesla T4", torch.bfloat16) is None
    assert peak_flops("NVIDIA H200", torch.float64) is None
    assert peak_of(CPU, torch.float32) is None
