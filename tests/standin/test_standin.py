"""The stand-in GPU is as unkind as it says: each of its traps, set off once."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu(standin=True)


@pytest.fixture
def standin():
    import standin

    yield standin
    torch.cuda.synchronize()


def test_tensors_of_two_devices_do_not_mix(standin):
    x = torch.ones(3, device="cuda")
    for mixed in (
        lambda: x + torch.ones(3),
        lambda: torch.ones(3) + x,
        lambda: torch.cat([x, torch.ones(3)]),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert (x + torch.tensor(1.0)).sum().item() == 6  # a single number may be anywhere
    with pytest.raises(TypeError, match="cuda"):
        x.numpy()


def test_what_has_not_arrived_is_nan(standin):
    assert torch.empty(5, device="cuda").isnan().all()
    pinned, x = torch.zeros(5, pin_memory=True), torch.arange(5.0, device="cuda")
    pinned.copy_(x, non_blocking=True)
    assert pinned.isnan().all()
    torch.cuda.synchronize()
    assert torch.equal(pinned, torch.arange(5.0))


def test_pinned_memory_must_not_change_while_it_is_read(standin):
    pinned = torch.ones(5, pin_memory=True)
    x = pinned.to("cuda", non_blocking=True)
    pinned.fill_(2)
    with pytest.raises(RuntimeError, match="pinned memory was changed"):
        torch.cuda.synchronize()
    assert x.eq(1).all()


def test_stream_waits_for_what_it_touches(standin):
    """A stream has to wait for what it reads and overwrites."""
    side, x = torch.cuda.Stream(), torch.ones(1000, device="cuda")
    x.add_(1)
    with (
        torch.cuda.stream(side),
        pytest.raises(RuntimeError, match=r"reads memory that stream 0 .* may still be writing"),
    ):
        x.sum()
    side.wait_stream(torch.cuda.current_stream())
    pinned = torch.empty(1000, pin_memory=True)
    with torch.cuda.stream(side):
        pinned.copy_(x, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    with pytest.raises(
        RuntimeError, match=r"writes memory that stream \d+ of device 0 may still be reading"
    ):
        x.add_(1)
    torch.ones((), device="cuda").item()  # to wait for one stream lands nothing of another
    assert pinned.isnan().all()
    torch.cuda.current_stream().wait_event(copied)
    x.add_(1)
    assert not copied.query()  # once: who polls gets on
    assert copied.query()
    assert pinned.eq(2).all()


def test_shared_memory_is_recorded_before_freeing(standin):
    """Memory that another stream uses is recorded before it is freed."""
    side = torch.cuda.Stream()
    for record in (True, False):
        x = torch.ones(1000, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        if record:
            x.record_stream(side)
        del x
        if record:
            torch.cuda.synchronize()
        else:
            with pytest.raises(RuntimeError, match=r"Tensor.record_stream"):
                torch.cuda.synchronize()


def test_every_wait_of_the_host_is_counted_with_its_reason(standin):
    x, pinned = torch.ones(4, 4, device="cuda"), torch.ones(4, 4, pin_memory=True)
    rows = torch.tensor([0, 1], device="cuda")
    with standin.waits() as quiet:
        (x @ x).add_(1)
        x.copy_(pinned, non_blocking=True)
        x[rows]
    assert not quiet
    with standin.waits() as found:
        x.sum().item()
        x.nonzero()
        x.cpu()
        x.copy_(pinned.t(), non_blocking=True)  # not in one piece
        torch.ones(3).to("cuda", non_blocking=True)  # not pinned
        x[x > 0]
        x[x > 0] = 2
        torch.cuda.synchronize()
    reasons = [what.split(" | ")[1] for what in found.elements()]
    unpinned = "copy to the device from memory that is not pinned"
    expected = ["copy from the device", "item", "synchronize", unpinned, unpinned]
    assert sorted(reasons) == sorted(
        [*expected, "aten::_index_put_impl_ by a mask", "aten::nonzero", "aten::nonzero"]
    )


def test_memory_is_counted(standin):
    before = torch.cuda.memory_allocated()
    x = torch.ones(1000, 100, device="cuda")
    y = x @ x.t()
    assert torch.accelerator.memory_allocated() - before == 4 * (100_000 + 1_000_000)
    del y
    assert torch.cuda.memory_allocated() - before == 400_000
    assert torch.cuda.max_memory_allocated() - before >= 4_400_000


def test_pinned_memory_is_rounded_up_and_kept(standin):
    """Pinned memory is rounded up and kept until it is given back."""
    torch.accelerator.empty_host_cache()
    before = standin.pinned_bytes()
    pinned = torch.empty(1000, pin_memory=True)
    assert standin.pinned_bytes() - before == 4096
    del pinned
    assert standin.pinned_bytes() - before == 4096
    torch.accelerator.empty_host_cache()
    assert standin.pinned_bytes() == before


def test_the_devices_have_random_numbers_of_their_own(standin):
    torch.manual_seed(1)
    here = torch.get_rng_state()
    first = torch.rand(3, device="cuda")
    assert torch.equal(torch.get_rng_state(), here)
    state = torch.cuda.get_rng_state()
    dropped = F.dropout(torch.ones(64, device="cuda"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(dropped, F.dropout(torch.ones(64, device="cuda")))
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(3, device="cuda"))


def test_a_fork_of_a_process_that_used_it_cannot(standin):
    torch.ones(1, device="cuda")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            torch.ones(1, device="cuda")
            os.write(writer, b"no error")
        except RuntimeError as error:
            os.write(writer, str(error).encode()[:100])
        os._exit(0)
    os.waitpid(child, 0)
    assert b"Cannot re-initialize CUDA in forked subprocess" in os.read(reader, 100)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("settings", "program", "error"),
    [
        (
            {"STANDIN_MEMORY": "1000"},
            "torch.ones(251, device='cuda')",
            "CUDA out of memory. Tried to allocate 1004 bytes",
        ),
        (
            {"STANDIN_NO_FLOAT64": "1"},
            "torch.ones(1, device='cuda').double()",
            "Cannot convert a MPS Tensor to float64",
        ),
        (
            {"STANDIN_BREAKS": "1"},
            "x = torch.ones(1, device='cuda')\nwith "
            "__import__('contextlib').suppress(RuntimeError): x.item()\nx + 1",
            "torch.AcceleratorError: CUDA error: device-side assert triggered",
        ),
        (
            {"STANDIN_DEVICES": "2"},
            "torch.ones(1, device='cuda:2')",
            "CUDA error: invalid device ordinal",
        ),
    ],
    ids=["memory", "float64", "an error that sticks", "devices"],
)
def test_it_plays_a_device_of_that_kind(standin, settings, program, error):
    command = [sys.executable, "-c", f"import torch\n{program}"]
    ended = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert error in ended.stderr
