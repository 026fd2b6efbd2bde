"""What kinds of devices can do, and how tensors come from them."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.device import copies_beside, device_setter, pieces, to_host, widest_float
from shoal.optim.outer.sketch import projection, sketch, sketches

CPU = torch.device("cpu")


@pytest.fixture
def forgotten():
    widest_float.cache_clear()
    yield
    widest_float.cache_clear()


@pytest.mark.parametrize(
    "error",
    [
        TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
            "float64."
        ),
        RuntimeError("Required aspect fp64 is not supported on the device"),
    ],
    ids=["mps", "xpu"],
)
def test_a_device_without_float64_is_known_by_a_trial(error, forgotten, monkeypatch):
    monkeypatch.setattr(torch, "ones", Mock(side_effect=error))
    assert widest_float(torch.device("mps")) == torch.float32
    monkeypatch.undo()
    assert widest_float(CPU) == torch.float64


def test_another_failure_is_not_taken_for_a_lack_of_float64(forgotten, monkeypatch):
    monkeypatch.setattr(
        torch,
        "ones",
        Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered")),
    )
    with pytest.raises(RuntimeError, match="illegal memory"):
        widest_float(torch.device("cuda", 0))


def test_kinds_whose_copies_can_be_awaited():
    assert [
        kind for kind in ("cpu", "cuda", "xpu", "mps", "meta") if copies_beside(torch.device(kind))
    ] == ["cuda", "xpu"]


def test_tensors_on_the_cpu_are_returned_as_they_are():
    tensors = [torch.ones(3), torch.ones(2, 2, dtype=torch.int64)]
    assert all(one is other for one, other in zip(to_host(tensors), tensors, strict=True))


@given(st.lists(st.integers(0, 1 << 28), min_size=1, max_size=60))
def test_pieces_of_pinned_memory_hold_each_tensor_once(sizes):
    assert sorted(place for piece in pieces(sizes) for place in piece) == list(range(len(sizes)))


def test_pinned_rounding_is_small():
    """A model of many layers loses little to the rounding of pinned memory."""
    sizes = [4 * 768 * 50_000, *([4 * 768 * 768] * 48 + [4 * 768 * 3072] * 24 + [4 * 768] * 100)]
    one_by_one, found = (
        sum(1 << (size - 1).bit_length() for size in each)
        for each in (sizes, [sum(sizes[place] for place in piece) for piece in pieces(sizes)])
    )
    assert found < 1.03 * sum(sizes)
    assert one_by_one > 1.7 * sum(sizes)


SIZES = [0, 1, 3, 1023, 1024, 1025, 65_536, 70_001, (1 << 20) + 1027]


def by_definition(tensor):
    """The sketch by its definition: sums over every fourth value."""
    flat = tensor.double().reshape(-1)
    return [float(flat[place::4].sum()) for place in range(4)]


def test_sketches_are_the_sums_of_every_fourth_value():
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in SIZES]
    for tensor, row in zip(tensors, sketches(tensors), strict=True):
        torch.testing.assert_close(row.tolist(), by_definition(tensor), rtol=1e-4, atol=1e-3)
    wanted = torch.tensor([by_definition(tensor) for tensor in tensors], dtype=torch.float64).sum(0)
    torch.testing.assert_close(
        torch.tensor(sketch(tensors), dtype=torch.float64), wanted, rtol=1e-4, atol=1e-3
    )


@pytest.mark.gpu
def test_several_tensors_of_a_device_come_in_one_copy():
    tensors = [
        torch.arange(6.0, device="cuda").view(2, 3),
        torch.ones(3),
        torch.tensor(2.0, device="cuda"),
    ]
    found = to_host(tensors)
    assert found[1] is tensors[1]
    assert [tensor.tolist() for tensor in found] == [[[0, 1, 2], [3, 4, 5]], [1, 1, 1], 2]


@pytest.mark.gpu(standin=True)
@pytest.mark.parametrize("of", [sketch, projection])
def test_a_sketch_waits_for_the_device_once_whatever_the_size(of):
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in SIZES]
    there = [tensor.cuda() for tensor in tensors]
    of(there[:1])  # signs are taken to the device once
    with sys.modules["standin"].waits() as waits:
        found = of(there)
    assert len(list(waits.elements())) == 1
    assert found == of(tensors)


WITHOUT_FLOAT64 = """
import torch
from shoal.optim import Simulation, codec_named
from shoal.optim.methods import METHODS

try:
    torch.ones(1, dtype=torch.float64, device="cuda")
    raise SystemExit("this device has float64")
except TypeError:
    pass

def peer(device, method, codec):
    def run(exchange):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)).to(device)
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
        knobs = dict(every=10 if method == "decoupled" else 4) if "every" in METHODS[method].knobs else {}
        if codec:
            knobs["codec"] = codec_named(codec)
        opt = METHODS[method].make(inner, exchange, model=model, slow_device=device, run="r", **knobs)
        generator = torch.Generator().manual_seed(int(exchange.peer))
        for _ in range(12):
            model(torch.randn(4, 8, generator=generator).to(device)).square().mean().backward()
            opt.count(4)
            opt.step()
            opt.zero_grad()
            opt._weights.projection([0, 1])
            opt._weights.sketch([0, 1])
        opt.finish(average=True)
        return [p.detach().cpu() for p in model.parameters()]
    return run

for method in METHODS:
    for codec in (None, "int8") if METHODS[method].sends == "weights" else (None, "auto:2+ef"):
        size = {"pair": 2, "everyone": 2, "nobody": 1}[METHODS[method].group]
        there, here = (Simulation(["0", "1"], seed=1, size=size).run(peer(device, method, codec)) for device in ("cuda", "cpu"))
        for name in here:
            for one, other in zip(there[name], here[name], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
"""  # noqa: E501


@pytest.mark.gpu(standin=True)
def test_every_method_runs_without_float64(monkeypatch):
    """Every method runs with slow weights on a device without float64."""
    monkeypatch.setenv("STANDIN_NO_FLOAT64", "1")
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_FLOAT64], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


OTHER_THREADS = """
import threading
import torch
from shoal.node.config.device import make_current, resolve_device
from shoal.optim.device import device_setter

make_current(resolve_device("cuda:1"))
assert torch.ones(1).cuda().device.index == 1
found = []
begin = device_setter()

def work(first):
    first()
    found.append(torch.ones(1, device="cuda").device.index)

for first in (begin, lambda: None):
    thread = threading.Thread(target=work, args=(first,))
    thread.start()
    thread.join()
assert found == [1, 0], found
"""


@pytest.mark.gpu(standin=True)
def test_chosen_device_is_current_in_threads(monkeypatch):
    """The chosen device is the current one and other threads can be given it."""
    monkeypatch.setenv("STANDIN_DEVICES", "2")
    ended = subprocess.run(
        [sys.executable, "-c", OTHER_THREADS], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_without_an_accelerator_there_is_nothing_to_make_current():
    if not torch.accelerator.is_available():
        assert device_setter()() is None
    source = Path(__file__).resolve().parents[2]
    kinds = [
        file.name
        for file in (source / "optim").rglob("*.py")
        if '"mps"' in file.read_text(encoding="utf-8")
    ]
    assert kinds == [] or kinds == ["device.py"], (
        "what a kind of device cannot is known in one place"
    )
