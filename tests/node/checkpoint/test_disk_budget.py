"""The disk budget: older checkpoints go for the next one, the newest and what is not ours stay."""

import os
import time

import pytest
import torch

from shoal.node.checkpoint.folder import CheckpointError, path_of, steps
from shoal.node.checkpoint.store import load, save
from shoal.node.checkpoint.writer import GB, SPARE, CheckpointWriter, room_maker, used

STATE = {"weights": torch.zeros(100_000)}  # 0.4 MB


def budget(nbytes):
    return nbytes / GB


def test_older_checkpoints_give_way_and_nothing_else(tmp_path):
    (tmp_path / "mine.txt").write_text("not a checkpoint")
    (tmp_path / "step-notes").mkdir()
    for step in (1, 2, 3):
        save(tmp_path, step, STATE, keep=9)
        os.utime(path_of(tmp_path, step), (step, step))
    now = used(tmp_path)
    room_maker(tmp_path, budget(now + 400_000 + SPARE))(400_000)
    assert sorted(steps(tmp_path)) == [1, 2, 3]
    room_maker(tmp_path, budget(now + SPARE + 1000))(400_000)
    assert sorted(steps(tmp_path)) == [2, 3]
    with pytest.raises(CheckpointError, match=r"does not fit into the .* that node.disk allows for .*: allow more"):
        room_maker(tmp_path, budget(SPARE))(400_000)
    assert sorted(steps(tmp_path)) == [3]
    assert load(tmp_path)[0] == 3
    assert (tmp_path / "mine.txt").exists()
    assert (tmp_path / "step-notes").exists()


def test_without_a_budget_nothing_goes(tmp_path):
    save(tmp_path, 1, STATE)
    room_maker(tmp_path, 0.0)(10**15)
    assert steps(tmp_path) == [1]


def test_a_run_over_its_budget_says_so_once_and_goes_on(tmp_path):
    said = []
    saver = CheckpointWriter(
        tmp_path, keep=3, state=lambda: STATE, notify=said.append, room=room_maker(tmp_path, budget(SPARE + 600_000))
    )
    saver.due = True
    saver.turn(1)
    saver._wait(time.monotonic() + 30.0)
    for step in (2, 3):
        saver.due = True
        saver.turn(step)
        saver._wait(time.monotonic() + 30.0)
    saver.turn(4)
    assert steps(tmp_path) == [1]
    assert len(said) == 1
    assert "node.disk allows" in said[0]
    assert "training goes on" in said[0]
