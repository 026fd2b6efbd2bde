"""Codecs on a GPU: the same payload as from a CPU, and the same values on every device."""

import pytest
import torch

from shoal.optim import codec_named

pytestmark = pytest.mark.gpu
NAMES = ["float32", "float16", "bfloat16", "int8", "e3m0", "sign", "topk2", "auto:3", "topk2+ef:0.95", "auto:3+ef"]


def tensors():
    generator = torch.Generator().manual_seed(0)
    # Distinct magnitudes, since equal ones may be ranked differently by different devices.
    return [torch.randn(shape, generator=generator) for shape in [(128, 192), (5000,), (3, 5, 7), ()]]


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_sends_and_reads_what_a_cpu_does(name):
    here, there = codec_named(name), codec_named(name)
    x = tensors()
    shapes = [tuple(t.shape) for t in x]
    for _ in range(2):  # the second round adds the errors of the first
        payload = there.encode([t.cuda() for t in x])
        assert payload.device.type == "cpu"
        on_cpu = here.decode(here.encode(x), shapes)
        for a, b, t in zip(on_cpu, there.decode(payload, shapes), x, strict=True):
            # The order of a sum differs between devices, and with it the last bit of a mean.
            torch.testing.assert_close(a, b, rtol=2**-7, atol=float(t.abs().max()) * 1e-6)
        for a, b in zip(there.decode(payload, shapes), there.decode(payload.cuda(), shapes), strict=True):
            assert b.is_cuda
            assert torch.equal(a, b.cpu())
