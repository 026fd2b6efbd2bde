"""Codecs on a GPU: the same payload as from a CPU, and the same values on every device."""

import sys

import pytest
import torch

from shoal.optim import codec_named
from shoal.optim.codecs.buffer_tail import BufferTailCodec
from shoal.optim.codecs.device_checks import Checks
from shoal.optim.codecs.floats import FLOAT32

NAMES = [
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "e3m0",
    "sign",
    "topk2",
    "auto:3",
    "topk2+ef:0.95",
    "auto:3+ef",
    "int8+matrices",
    "sign+matrices+ef",
]


def tensors():
    generator = torch.Generator().manual_seed(0)
    # Distinct magnitudes, since equal ones may be ranked differently by different devices.
    return [
        torch.randn(shape, generator=generator) for shape in [(128, 192), (5000,), (3, 5, 7), ()]
    ]


@pytest.mark.gpu
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
        for a, b in zip(
            there.decode(payload, shapes), there.decode(payload.cuda(), shapes), strict=True
        ):
            assert b.is_cuda
            assert torch.equal(a, b.cpu())


@pytest.mark.gpu(standin=True)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tail", [0, 2])
def test_a_payload_is_read_from_the_device_in_one_copy(name, tail):
    there = codec_named(name) if not tail else BufferTailCodec(codec_named(name), tail)
    x = [tensor.cuda() for tensor in tensors()]
    for number in range(3):
        with sys.modules["standin"].waits() as found:
            there.encode(x)
        # auto measures its candidates in the first round, from which there is one number each;
        # tables go there once
        assert len(list(found.elements())) == 1 or number == 0, "\n".join(found)


@pytest.mark.gpu(standin=True)
def test_feedback_on_a_device_equals_the_cpu():
    """Feedback takes back what was refused and goes on from saved state as on the CPU."""
    here, there, x = codec_named("auto:3+ef"), codec_named("auto:3+ef"), tensors()
    for _ in range(2):
        assert torch.equal(here.encode(x), there.encode([tensor.cuda() for tensor in x]))
    here.rejected(x[:1])
    there.rejected([x[0].cuda()])
    here.encode(x)
    there.encode([tensor.cuda() for tensor in x])
    again = codec_named("auto:3+ef")
    again.load_state_dict({**there.state_dict(), "payload": there.payload})
    assert torch.equal(again.encode([tensor.cuda() for tensor in x]), here.payload)
    for one, other in zip(here.sent(), again.sent(), strict=True):
        assert torch.equal(one, other.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("float32", "float16", "bfloat16")]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_devices_refuse_what_cannot_be_sent(name, bad):
    """What cannot be sent is refused on a device too and changes nothing."""
    codec, x = codec_named(name), [tensor.cuda() for tensor in tensors()]
    codec.encode(x)
    before = codec.state_dict()
    broken = [tensor.clone() for tensor in x]
    broken[1][77] = bad
    with pytest.raises(
        ValueError, match=r"a tensor to be sent.*lower the learning rate or clip gradients"
    ):
        codec.encode(broken)
    after = codec.state_dict()
    assert str(before) == str(after)


@pytest.mark.gpu
def test_plain_floats_refuse_overflow():
    """Plain floats send what is not finite and refuse what would become so."""
    x = torch.tensor([1.0, float("nan"), float("inf")])
    for name in ("float32", "float16", "bfloat16"):  # a card writes another NaN than a CPU does
        for payload in (codec_named(name).encode([x.cuda()]), codec_named(name).encode([x])):
            torch.testing.assert_close(
                codec_named(name).decode(payload, [(3,)])[0], x, rtol=0, atol=0, equal_nan=True
            )
        with_buffer = BufferTailCodec(codec_named(name), 1)
        weights, _ = with_buffer.decode(
            with_buffer.encode([x.cuda(), torch.ones(1, device="cuda")]), [(3,), (1,)]
        )
        torch.testing.assert_close(weights, x, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match=r"a value of 70000 is too large for float16"):
        codec_named("float16").encode([torch.tensor([1.0, 70000.0], device="cuda")])


@pytest.mark.gpu
def test_first_failed_condition_is_raised():
    """Conditions are answered with the payload and the first that does not hold is raised."""
    checks, done = Checks(), []
    payload = checks.payload(3, "cuda")
    payload += 7
    checks.require(torch.tensor(True, device="cuda"), "first")
    checks.require(torch.tensor(True, device="cuda"), "second")
    checks.then(lambda: done.append(1))
    assert checks.read(payload).tolist() == [7, 7, 7]
    assert done == [1]
    checks.require(torch.tensor(False, device="cuda"), "second")
    with pytest.raises(ValueError, match="second"):
        checks.read(payload)
    assert done == [1]
    with pytest.raises(ValueError, match="at once"):
        Checks(later=False).require(torch.tensor(False, device="cuda"), "at once")
    assert FLOAT32.encode([torch.ones(2, device="cuda")]).view(torch.float32).tolist() == [1, 1]
