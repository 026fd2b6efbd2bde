"""Slow weights and outer state in files: the same bits, nothing left in the folder, one error where there is no room."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.optim import CO2, DiLoCo, NoLoCo
from shoal.optim.exchange.base import Alone
from shoal.optim.outer.weights import in_file

CPU = torch.device("cpu")


def made(method, place, dtype):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 3).to(dtype)), torch.nn.Parameter(torch.randn(5).to(dtype))]
    return method(torch.optim.AdamW(weights, lr=0.1), Alone(), every=2, slow_device=place), weights


def train(opt, weights, steps):
    for step in range(steps):
        for weight in weights:
            weight.grad = torch.full_like(weight, 1.0 + step)
        opt.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", [NoLoCo, DiLoCo, CO2])
def test_files_change_no_bit_and_what_was_saved_with_them_loads_without(method, dtype, tmp_path):
    folder = tmp_path / "new"
    (here, own), (there, filed) = made(method, CPU, dtype), made(method, folder, dtype)
    for opt, weights in ((here, own), (there, filed)):
        train(opt, weights, 5)
    if method is not CO2:  # of which an exchange is always in flight, and is not saved
        again, resumed = made(method, folder, dtype)
        with torch.no_grad():
            for weight, was in zip(resumed, filed, strict=True):
                weight.copy_(was)
        again.load_state_dict(there.state_dict())
        there, filed = again, resumed
    for opt, weights in ((here, own), (there, filed)):
        train(opt, weights, 4)
    states = [(here.rule_state[name], there.rule_state[name]) for name in here.rule_state]
    for one, other in ((own, filed), (here.slow, there.slow), *states):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))
    assert list(folder.iterdir()) == []


def test_all_that_lasts_is_in_files(tmp_path):
    opt, weights = made(DiLoCo, tmp_path, torch.bfloat16)
    train(opt, weights, 2)
    opt.load_state_dict(opt.state_dict())
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux shows which memory is a file's")
    spans = [line.split() for line in maps.read_text().splitlines() if str(tmp_path) in line]
    files = [tuple(int(end, 16) for end in words[0].split("-")) for words in spans]
    for tensor in (*opt.slow, *opt.rule_state["momentum"], *opt._weights.fast):
        assert any(low <= tensor.data_ptr() < high for low, high in files)


def test_tensors_in_a_file_are_zero_apart_and_of_any_shape(tmp_path):
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
