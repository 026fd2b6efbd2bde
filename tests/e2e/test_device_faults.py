"""Nodes whose device fails, or has no memory left: one sentence, the documented exit code, and the
last whole step saved.
"""

import pytest

from shoal.node.exit_code import ExitCode

AS_PROGRAM = ("-m", "shoal")  # which loads the stand-in anew, with its environment

TASK = """
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import torch
from shoal.node.task import Task
from shoal.optim.outer import optimizer

class Fit(Task):
    def __init__(self):
        self.fails, at = Path(__file__).with_name("fails").read_text().split(",")
        self.at, self.calls = int(at), {"loss": 0, "evaluate": 0}
        if self.fails == "exchange":  # in none of this file's lines
            made = [DEFAULT] * (self.at - 1) + [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")]
            optimizer.contribution_of = Mock(wraps=optimizer.contribution_of, side_effect=made)

    def model(self):
        return torch.nn.Linear(4, 1)

    def batches(self, shard):
        generator = torch.Generator().manual_seed(shard.index)
        while True:
            yield torch.randn(8, 4, generator=generator)

    def starve(self, where):
        self.calls[where] += 1
        if self.fails == where and self.calls[where] == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def loss(self, model, batch):
        self.starve("loss")
        return (model(batch).squeeze(1) - batch.sum(1)).square().mean()

    @torch.no_grad()
    def evaluate(self, model):
        self.starve("evaluate")
        device = next(model.parameters()).device
        return float((model(torch.ones(4, 4, device=device)) - 4).square().mean())
"""  # noqa: E501


def up(shoal, *arguments, fails="", at=7, program=None):
    path = shoal.home / "fit.py"
    path.write_text(TASK)
    path.with_name("fails").write_text(f"{fails},{at}")
    return shoal.start(
        "up",
        "--name",
        "anna",
        "--folder",
        shoal.home / "anna",
        "--identity",
        shoal.home / "anna.key",
        "--task",
        f"{path}:Fit",
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
        "--threads",
        "1",
        "--json",
        "--every",
        "5",
        "--set",
        "outer.wait_s=1.0",
        "--set",
        "node.checkpoint_every_rounds=0",
        *arguments,
        program=program,
    )


def steps(shoal):
    return sorted(
        int(path.name.removeprefix("step-")) for path in (shoal.home / "anna").glob("step-*")
    )


@pytest.mark.ci
@pytest.mark.parametrize(("fails", "at", "whole"), [("loss", 7, 6), ("evaluate", 3, 8)])
def test_out_of_memory_between_steps_saves_the_last(shoal, fails, at, whole):
    """Where memory runs out between two steps the last one is saved and gone on from."""
    node = up(shoal, "--steps", "20", "--set", "train.eval_every=4", fails=fails, at=at)
    assert node.wait() == ExitCode.BAD_INPUT, node.said()
    *_, last = node.said().splitlines()
    assert last.startswith(f"Error: Your task 'Fit' failed in {fails}(): OutOfMemoryError"), (
        node.said()
    )
    assert f"step {whole} was whole and is saved" in node.said()
    assert steps(shoal) == [whole]
    again = up(shoal, "--steps", "20", "--resume").json()
    assert again["progress"]["step"] == 20


def test_out_of_memory_in_an_exchange_resumes(shoal):
    """Where memory runs out in an exchange the last checkpoint is gone on from."""
    every_round = ("--set", "node.checkpoint_every_rounds=1", "--set", "outer.method=diloco")
    node = up(shoal, "--steps", "40", *every_round, fails="exchange", at=4)
    assert node.wait() == ExitCode.BAD_INPUT, node.said()
    *_, last = node.said().splitlines()
    assert last.startswith(
        "Error: There is not enough memory on 'cpu' for a step: keep the outer optimizer in files"
    ), node.said()
    assert (
        "was whole and is saved" not in node.said()
    )  # of that step the inner part alone was taken
    before = steps(shoal)[-1]
    assert (
        0 < before < 20
    )  # a round whose checkpoint would have to wait for the one before has none
    again = up(shoal, "--steps", str(before + 10), *every_round, "--resume").json()
    assert again["progress"]["step"] == before + 10


@pytest.mark.gpu(standin=True)
@pytest.mark.parametrize("breaks", [400, 450])
def test_failed_device_keeps_the_last_checkpoint(shoal, breaks):
    """A device that fails for good ends with a sentence and keeps the last checkpoint."""
    shoal.env["STANDIN_BREAKS"] = str(breaks)
    every_round = ("--device", "cuda", "--set", "node.checkpoint_every_rounds=1")
    node = up(shoal, "--steps", "200", *every_round, program=AS_PROGRAM)
    assert node.wait() == ExitCode.DEVICE_FAILED, node.said()
    *_, last = node.said().splitlines()
    assert last.startswith(
        "Error: An operation on the device failed (CUDA error: device-side assert triggered"
    ), node.said()
    assert "CUDA_LAUNCH_BLOCKING=1 shows which" in last
    assert "bug in shoal" not in node.said()
    del shoal.env["STANDIN_BREAKS"]
    before = steps(shoal)[-1]
    again = up(
        shoal, "--steps", str(before + 5), *every_round, "--resume", program=AS_PROGRAM
    ).json()
    assert again["progress"]["step"] == before + 5
