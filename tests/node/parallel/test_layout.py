"""A model on two ranks takes the steps that one process takes with the same batches in as many parts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

PROGRAM = str(Path(__file__).with_name("layout_program.py"))


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """The tensors of each layout and number of parts."""
    folder = tmp_path_factory.mktemp("layouts")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, *launch, PROGRAM, str(folder)], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return {file.name: load_file(file) for file in folder.iterdir()}


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("parts", [1, 2])
def test_two_ranks_take_the_steps_of_one_process_and_load_its_weights(taken, how, parts):
    one, two = taken[f"one-{parts}"], taken[f"{how}-{parts}"]
    assert one.keys() == two.keys()
    exact = how == "ddp" and parts == 1  # more parts are added up in another order
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=0 if exact else 1e-6, msg=lambda m, n=name: f"{n}: {m}")
