"""What an outer optimizer holds, in memory or in files: slow weights, the rule's state, and nothing
else of the model's size.
"""

import errno
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from shoal.optim import CO2, DiLoCo, NoLoCo, StreamingDiLoCo
from shoal.optim.exchange.base import Alone, Exchange, NoPartner
from shoal.optim.exchange.on_demand import OnDemand
from shoal.optim.outer.weights import in_file


class Lender(Exchange):
    """Exchange that notes what it is lent."""

    def __init__(self):
        self.lent = []

    def start(self, contribution):
        assert isinstance(contribution.tensors, OnDemand)
        self.lent.append(
            (contribution.tensors, [tensor.clone() for tensor in contribution.tensors])
        )
        return NoPartner()


def made(
    method, place="cpu", dtype=torch.float32, exchange=None, inner=torch.optim.AdamW, **options
):
    torch.manual_seed(0)
    weights = [
        torch.nn.Parameter(torch.randn(4, 3).to(dtype)),
        torch.nn.Parameter(torch.randn(5).to(dtype)),
    ]
    return method(
        inner(weights, lr=0.1), exchange or Alone(), every=2, slow_device=place, **options
    ), weights


def push(opt, weights, steps):
    for step in range(steps):
        for weight in weights:
            weight.grad = torch.full_like(weight, 1.0 + step)
        opt.step()


def train(method, exchange, steps, **options):
    opt, weights = made(method, exchange=exchange, inner=torch.optim.SGD, **options)
    push(opt, weights, steps)
    return opt, weights


def test_a_float32_parameter_is_its_own_staging():
    opt, weights = train(partial(NoLoCo, lag=0), Lender(), 2)
    assert [fast.data_ptr() for fast in opt._weights.fast] == [
        weight.data_ptr() for weight in weights
    ]
    moved = [weight.data_ptr() for weight in weights]
    assert all(slow.data_ptr() not in moved for slow in opt.slow)


@pytest.mark.parametrize(
    "change", [lambda w: w.bfloat16(), lambda w: w.t().contiguous().t()], ids=["dtype", "strides"]
)
def test_a_parameter_that_is_replaced_gets_staging_of_its_own(change):
    opt, weights = train(partial(NoLoCo, lag=0), Lender(), 1)
    with torch.no_grad():
        weights[0].data = change(weights[0].data)
    weights[0].grad = torch.ones_like(weights[0])
    opt.step()
    assert opt._weights.fast[0].data_ptr() != weights[0].data_ptr()
    assert opt._weights.fast[1].data_ptr() == weights[1].data_ptr()
    assert torch.equal(opt.slow[0].to(weights[0].dtype), weights[0])


@pytest.mark.parametrize("method", [partial(NoLoCo, lag=0), DiLoCo])
def test_what_waits_for_its_mean_is_lent_and_not_copied(method):
    exchange = Lender()
    opt, weights = train(method, exchange, 2)
    ours = {tensor.data_ptr() for tensor in (*opt.slow, *weights)}
    for lent, _ in exchange.lent:
        for item in lent._items:
            assert {
                tensor.data_ptr() for tensor in ([item] if isinstance(item, torch.Tensor) else item)
            } <= ours


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (CO2, {}),
        (StreamingDiLoCo, {"fragments": 1, "lag": 1}),
        (NoLoCo, {"lag": 0}),
        (NoLoCo, {"lag": 1, "fragments": 1}),
    ],
)
def test_lent_tensors_do_not_change_in_flight(method, options):
    """What is lent stays as it is while it is in flight."""

    class Slow(Lender):
        """Its rounds are checked when their outcome is asked for."""

        def start(self, contribution):
            super().start(contribution)
            lent, copies = self.lent[-1]
            handle = NoPartner()
            handle.result = lambda deadline=None: [self.same(lent, copies), None][1]
            return handle

        def same(self, lent, copies):
            assert all(torch.equal(a, b) for a, b in zip(lent, copies, strict=True))

    exchange = Slow()
    opt, _ = train(method, exchange, 8, **options)
    opt.finish()
    assert len(exchange.lent) == 4


def test_averaged_buffers_are_not_lent_while_training_changes_them():
    model, exchange = torch.nn.BatchNorm1d(3), Lender()
    opt = NoLoCo(
        torch.optim.SGD(model.parameters(), lr=0.1),
        exchange,
        every=2,
        fragments=1,
        lag=1,
        model=model,
        buffers="average",
    )
    for step in range(3):
        model(torch.full((2, 3), float(step)) * torch.tensor([[1.0], [2.0]])).sum().backward()
        opt.step()
    ((lent, copies),) = exchange.lent
    assert not torch.equal(lent[-1], model.running_var)
    assert all(torch.equal(a, b) for a, b in zip(lent, copies, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", [NoLoCo, DiLoCo, CO2])
def test_files_change_no_bit(method, dtype, tmp_path):
    """Files change no bit and what was saved with them loads without."""
    folder = tmp_path / "new"
    (here, own), (there, filed) = made(method, dtype=dtype), made(method, folder, dtype)
    for opt, weights in ((here, own), (there, filed)):
        push(opt, weights, 5)
    if method is not CO2:  # of which an exchange is always in flight, and is not saved
        again, resumed = made(method, folder, dtype)
        with torch.no_grad():
            for weight, was in zip(resumed, filed, strict=True):
                weight.copy_(was)
        again.load_state_dict(there.state_dict())
        there, filed = again, resumed
    for opt, weights in ((here, own), (there, filed)):
        push(opt, weights, 4)
    states = [(here.rule_state[name], there.rule_state[name]) for name in here.rule_state]
    for one, other in ((own, filed), (here.slow, there.slow), *states):
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True)
        )
    assert list(folder.iterdir()) == []


def test_all_that_lasts_is_in_files(tmp_path):
    opt, weights = made(DiLoCo, tmp_path, torch.bfloat16)
    push(opt, weights, 2)
    opt.load_state_dict(opt.state_dict())
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux shows which memory is a file's")
    spans = [line.split() for line in maps.read_text().splitlines() if str(tmp_path) in line]
    files = [tuple(int(end, 16) for end in words[0].split("-")) for words in spans]
    for tensor in (*opt.slow, *opt.rule_state["momentum"], *opt._weights.fast):
        assert any(low <= tensor.data_ptr() < high for low, high in files)


def test_file_tensors_are_zero_and_of_any_shape(tmp_path):
    """Tensors in a file are zero apart and of any shape."""
    shapes = [(3,), (), (0, 2), (2, 5)]
    found = in_file(tmp_path, [torch.ones(shape, dtype=torch.float64) for shape in shapes])
    assert [tuple(tensor.shape) for tensor in found] == shapes
    assert all(not tensor.any() for tensor in found)
    found[0].fill_(1)
    assert not found[3].any()


def test_no_room_and_no_right_are_errors_before_training(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            made(NoLoCo, tmp_path, torch.float32)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="exists"):
        made(NoLoCo, tmp_path / "file", torch.float32)


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path):
    code = f"""
import os, signal, torch
from pathlib import Path
from shoal.optim.outer.weights import in_file
in_file(Path({str(tmp_path)!r}), [torch.ones(1000)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == -9
    assert list(tmp_path.iterdir()) == []
