"""Saving while training goes on: one copy, one writer; what is written is one moment's state; a
full disk stops nothing.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from errno import EFBIG, ENOSPC
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.node.checkpoint import store as checkpoint
from shoal.node.checkpoint import writer as checkpoint_writer
from shoal.node.checkpoint.folder import CheckpointError, lock, steps
from shoal.node.checkpoint.packing import pack
from shoal.node.checkpoint.snapshots import Snapshots
from shoal.node.checkpoint.store import POINTS, load
from shoal.node.checkpoint.tensor_file import write_tensors
from shoal.node.checkpoint.writer import SPARE_BYTES, CheckpointWriter
from shoal.optim.device import give_pinned_back

LONG = 30.0


class Disk:
    """Holds a save at its first block until it is let go."""

    def __init__(self):
        self.reached, self.free = threading.Event(), threading.Event()

    def __call__(self, point):
        if point == "block":
            self.reached.set()
            assert self.free.wait(LONG)


class Training:
    """A state that every step changes as a whole."""

    def __init__(self, folder, **options):
        self.step, self.asked, self.said = 0, 0, []
        self.weights = [torch.zeros(3, 4), torch.zeros(5, dtype=torch.bfloat16)]
        self.saver = CheckpointWriter(
            folder, keep=3, state=self.state, notify=self.said.append, **options
        )

    def state(self):
        self.asked += 1
        return {"step": self.step, "weights": self.weights}

    def train(self, due=False):
        self.step += 1
        for weight in self.weights:
            weight.fill_(self.step)
        self.saver.due |= due
        self.saver.turn(self.step)

    def written(self):
        self.saver._wait(LONG)
        assert not self.saver.busy


def held_up(folder, **options):
    """A disk that holds the save of step 1, and its training."""
    disk = Disk()
    run = Training(folder, at=disk, **options)
    run.train(due=True)
    assert disk.reached.wait(LONG)
    return disk, run


def check(folder):
    """The newest checkpoint is of one moment; returns which."""
    step, state = load(folder)
    assert state["step"] == step
    assert all(bool((weight == step).all()) for weight in state["weights"])
    return step


def test_written_state_is_of_one_step(tmp_path):
    """What is written is the state of one step whatever training does meanwhile."""
    disk, run = held_up(tmp_path)
    for _ in range(5):
        run.train()
    disk.free.set()
    run.written()
    assert check(tmp_path) == 1


def test_save_during_a_write_is_put_off(tmp_path):
    """A save that comes due while one is written is put off and saves the newest state."""
    disk, run = held_up(tmp_path)
    for _ in range(4):
        run.train(due=True)
    assert (run.asked, run.saver.busy) == (1, True)  # no second copy, no second writer
    disk.free.set()
    run.written()
    run.train()
    run.written()
    run.train()
    assert run.asked == 2
    assert steps(tmp_path) == [6, 1]
    assert check(tmp_path) == 6
    assert run.said == []


def test_last_save_waits_for_the_one_before(tmp_path):
    """The last save waits for the one before and for itself."""
    disk, run = held_up(tmp_path)
    run.step = 9
    for weight in run.weights:
        weight.fill_(9)
    timer = threading.Thread(target=disk.free.set)
    timer.start()
    assert run.saver.last(9) is None
    timer.join()
    assert steps(tmp_path) == [9, 1]
    assert check(tmp_path) == 9


def test_the_save_before_has_time_for_its_bytes(tmp_path, monkeypatch):
    """A large one takes longer than the patience that comes on top."""
    disk, run = held_up(tmp_path)
    monkeypatch.setattr(checkpoint_writer, "SLOWEST_BYTES_PER_S", 1.0)
    timer = threading.Timer(0.1, disk.free.set)
    timer.start()
    assert run.saver.last(1, patience_s=0.0) is None
    timer.join()
    assert check(tmp_path) == 1


def test_hanging_disk_does_not_block_the_end(tmp_path):
    """A disk that hangs does not hold up the end for ever."""
    disk = Disk()
    run = Training(tmp_path, at=disk)
    run.train()
    said = run.saver.last(1, patience_s=0.0)
    assert said.endswith(
        "was not saved to " + repr(str(tmp_path)) + " in time: the disk is too "
        "slow or hangs; there is no other."
    )
    disk.free.set()
    run.written()
    assert steps(tmp_path) == []  # the state may have changed since
    disk.free.clear()
    disk.reached.clear()
    run.train(due=True)
    assert disk.reached.wait(LONG)
    assert "the disk is too slow or hangs" in run.saver.last(
        2, patience_s=0.0
    )  # still at the one before
    disk.free.set()
    run.written()


def test_without_copy_memory_training_stands_still(tmp_path):
    """Without memory for a copy training stands still until the tensors are written."""
    order, synced = [], threading.Event()

    def at(point):
        order.append(point)
        if point == "state":  # the rest of the save goes on beside training
            assert synced.wait(LONG)

    run = Training(tmp_path, at=at, copies=lambda nbytes: False)
    run.train(due=True)
    assert "tensors" in order
    assert run.saver.nbytes == 0
    for _ in range(3):
        run.train()
    assert run.saver.busy
    synced.set()
    run.written()
    assert check(tmp_path) == 1


def test_mixed_state_of_a_hanging_disk_is_dropped(tmp_path, monkeypatch):
    """A hanging disk holds up a save without a copy for a while and what is mixed is dropped."""
    monkeypatch.setattr("shoal.node.checkpoint.writer.PATIENCE_S", 0.0)
    disk, run = held_up(tmp_path, copies=lambda nbytes: False)  # returns, though the disk hangs
    run.train()
    disk.free.set()
    run.written()
    run.train()
    assert steps(tmp_path) == []
    assert "the disk is too slow or hangs" in run.said[0]


def test_last_save_makes_no_copy(tmp_path):
    """No copy is made for the last save and memory that is short is given back."""
    wanted, room = [], [True]
    run = Training(tmp_path, copies=lambda nbytes: wanted.append(nbytes) or room[0])
    run.train(due=True)
    run.written()
    assert run.saver.nbytes == 3 * 4 * 4 + 5 * 2
    run.train(due=True)
    run.written()
    assert wanted == [58, 0]  # the copy that is there already takes no more
    room[0] = False
    run.train(due=True)
    run.written()
    assert run.saver.nbytes == 0
    assert run.saver.last(3) is None
    assert len(wanted) == 3
    assert check(tmp_path) == 3


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    run = Training(tmp_path)
    run.train(due=True)
    run.written()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", full)
        for _ in range(3):
            run.train(due=True)
            run.written()
        run.train()
    assert len(run.said) == 1
    assert (
        "step-00000002' (No space left on device): free some space or choose another folder; "
        "training goes on" in run.said[0]
    )
    assert steps(tmp_path) == [1]
    run.train(due=True)
    run.written()
    run.train()
    assert run.said[1:] == ["Checkpoints can be saved again."]
    assert check(tmp_path) == 6
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", full)
        assert "No space left on device" in run.saver.last(7)
    assert run.saver.last(7) is None
    assert len(run.said) == 2  # of what failed before the end only the end is said


def holding(folder, count):
    """`write_tensors` on a disk that holds so many checkpoints."""

    def written(write, kinds, tensor_of):
        if len(steps(folder)) >= count:
            raise OSError(28, "No space left on device")
        write_tensors(write, kinds, tensor_of)

    return written


@pytest.mark.parametrize("copies", [True, False])
def test_full_disk_gives_up_older_checkpoints(tmp_path, monkeypatch, copies):
    """On a disk that is full older checkpoints give way but not the newest."""
    run = Training(tmp_path, copies=lambda nbytes: copies)
    monkeypatch.setattr(checkpoint, "write_tensors", holding(tmp_path, 2))
    for _ in range(4):
        run.train(due=True)
        run.written()
    run.train()
    assert (run.said, steps(tmp_path)) == ([], [4, 3])
    assert check(tmp_path) == 4
    monkeypatch.setattr(checkpoint, "write_tensors", holding(tmp_path, 1))
    assert "No space left on device" in run.saver.last(6)
    assert steps(tmp_path) == [4]
    assert check(tmp_path) == 4


@pytest.mark.parametrize(
    ("copies", "number", "kept"),
    [(True, ENOSPC, [3, 2]), (False, ENOSPC, [2, 1]), (True, EFBIG, [2, 1])],
)
def test_changed_weights_are_not_written_again(tmp_path, monkeypatch, copies, number, kept):
    """Weights that training has changed or no room helps are not written once more."""
    full = []

    def sync(path):
        if full:
            full.pop()
            raise OSError(number, os.strerror(number))

    run = Training(tmp_path, copies=lambda nbytes: copies)
    for _ in range(2):
        run.train(due=True)
        run.written()
    monkeypatch.setattr(checkpoint, "sync", sync)
    full.append(True)
    run.train(due=True)
    run.written()
    assert steps(tmp_path) == kept
    assert check(tmp_path) == kept[0]


def test_too_small_disk_is_said_at_the_first_step(tmp_path, monkeypatch):
    """Fault: it was said when the first checkpoint was written, hours later."""
    run, free = Training(tmp_path), 2 * (58 + SPARE_BYTES)
    (tmp_path / "older").write_bytes(bytes(1000))  # older checkpoints give way
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free - 1001))
    run.train()
    run.train()
    assert run.said == [
        f"The folder {str(tmp_path)!r} has room for 0.0021 GB, and two checkpoints take 0.0021 GB: "
        "free some space or choose another folder, or checkpoints will be missing."
    ]
    roomy = Training(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free - 1000))
    roomy.train()
    assert roomy.said == []


def test_a_state_that_no_file_can_hold_is_told_too(tmp_path):
    run = Training(tmp_path)
    run.train()
    run.weights.append(torch.zeros(2).to_sparse())
    run.saver.due = True
    run.saver.turn(1)
    assert (
        "Cannot save a checkpoint: the state keeps a Tensor that is torch.sparse_coo "
        "(torch.float32 of shape (2,))" in run.said[0]
    )
    assert "at ['weights'][2], and a checkpoint holds numbers, texts, bytes, tensors" in run.said[0]
    assert not run.saver.busy


class Odd:
    """A value that no file holds."""

    def __repr__(self):
        return "<odd>"


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (
            {"trainer": {"optimizer": {"inner": {"state": {0: {"seen": Odd()}}}}}},
            "the optimizer keeps a Odd (<odd>) at "
            "['trainer']['optimizer']['inner']['state'][0]['seen'], and",
        ),
        (
            {"trainer": {"model": {"0._extra_state": Odd()}}},
            "the model keeps a Odd (<odd>) at ['trainer']['model']['0._extra",
        ),
        ({"trainer": {"scheduler": {"odd": Odd()}}}, "the learning-rate scheduler keeps a Odd"),
        (
            {"trainer": {"data": [Odd()]}},
            "the place in the data keeps a Odd (<odd>) at ['trainer']['data'][0]",
        ),
        ({"extra": {"place": Odd()}}, "run.extra keeps a Odd (<odd>) at ['extra']['place']"),
        ({"extra": {Odd(): 1}}, "run.extra keeps a Odd"),
        (
            {"extra": torch.zeros(2).to_sparse()},
            "run.extra keeps a Tensor that is torch.sparse_coo",
        ),
        ({"extra": torch.zeros(2, device="meta")}, "run.extra keeps a Tensor without values"),
    ],
)
def test_unsavable_state_is_an_error_at_the_first_step(tmp_path, state, sentence):
    """Fault: hours of training, exit code 0, and a sentence that --resume goes on, without any
    checkpoint.
    """
    said = []
    saver = CheckpointWriter(tmp_path, keep=3, state=lambda: state, notify=said.append)
    with pytest.raises(CheckpointError) as caught:
        saver.turn(1)
    assert f"Cannot save a checkpoint: {sentence}" in str(caught.value)
    assert str(caught.value) == saver.last(10)
    assert said == []


def test_a_state_that_holds_itself_is_said_too(tmp_path):
    knot = []
    knot.append(knot)
    failure = CheckpointWriter(tmp_path, keep=3, state=lambda: {"extra": knot}, notify=print).last(
        1
    )
    assert "run.extra keeps a list that is nested 200 deep, or holds itself" in failure


@pytest.mark.parametrize(
    "fails",
    [
        RuntimeError("no kernel image"),
        TypeError("odd"),
        RecursionError(),
        OSError(5, "Input/output"),
    ],
)
def test_failed_last_save_reaches_the_caller(tmp_path, monkeypatch, fails):
    """Fault: the thread ends with an error that nobody catches, and the save counts as done."""

    def fail(*_args, **_kwargs):
        raise fails

    run = Training(tmp_path)
    run.train()
    monkeypatch.setattr(checkpoint, "write_tensors", fail)
    failure = run.saver.last(1)
    assert failure is not None
    assert failure.startswith("Cannot save ")
    assert "training goes on" not in "".join(run.said)
    assert steps(tmp_path) == []


def test_missing_copy_memory_is_told(tmp_path, monkeypatch):
    """No memory for the copy is told and other errors are not hidden."""

    def fail(text):
        def empty(*_args, **_kwargs):
            raise RuntimeError(text)

        return empty

    run = Training(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            torch, "empty", fail("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        )
        run.train(due=True)
    assert "There is no memory for the copy" in run.said[0]
    monkeypatch.setattr(torch, "empty", fail("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        run.train(due=True)


def test_device_out_of_memory_costs_one_checkpoint(tmp_path, monkeypatch):
    """A state for which the device has no memory costs its checkpoint only."""
    run = Training(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            run.saver,
            "_state",
            lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
        )
        run.train()  # the first look at whether a checkpoint can hold the state
        run.train(due=True)
        assert "There is no memory for the copy" in run.said[0]
    run.train(due=True)
    run.written()
    assert steps(tmp_path) == [3]


def test_device_failure_in_the_last_save_is_named(tmp_path, monkeypatch):
    """A device that fails while the last state is written is named."""
    run = Training(tmp_path)
    run.train()

    def save(*_args, **_kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("shoal.node.checkpoint.writer.save", save)
    said = run.saver.last(1)
    assert (
        "the device has failed (CUDA error: an illegal memory access was encountered): go on from "
        "the last one" in said
    )


def test_copies_reuse_memory():
    """Copies use the same memory again and what is not needed any more is given back."""
    snapshots = Snapshots()
    state = {"a": torch.ones(4), "b": [torch.ones(4), torch.ones(2, 2).t()], "n": torch.tensor(1)}
    first = snapshots.take(pack(state))
    places = {tensor.data_ptr() for tensor in first.tensors.values()}
    assert len(places) == 4
    assert snapshots.nbytes == 3 * 16 + 8
    state["a"].add_(1)
    assert first.tensors["0"].tolist() == [1.0] * 4
    second = snapshots.take(pack(state))
    assert {tensor.data_ptr() for tensor in second.tensors.values()} == places
    assert second.tensors["0"].tolist() == [2.0] * 4
    snapshots.take(pack({"a": torch.ones(2, 2)}))
    assert snapshots.nbytes == 16


@pytest.mark.gpu
def test_a_gpus_tensors_are_copied_to_pinned_memory():
    snapshots, state = (
        Snapshots(),
        [torch.ones(1000, device="cuda"), torch.ones(3), torch.ones(5, device="cuda")],
    )
    first = snapshots.take(pack(state))
    state[0].zero_()
    assert [tensor.is_pinned() for tensor in first.tensors.values()] == [True, False, True]
    assert all(bool((tensor == 1).all()) for tensor in first.tensors.values())
    places = [tensor.data_ptr() for tensor in first.tensors.values()]
    assert [tensor.data_ptr() for tensor in snapshots.take(pack(state)).tensors.values()] == places


@pytest.mark.gpu(standin=True)
def test_pinned_memory_is_counted_and_returned():
    """Pinned memory is counted as torch takes it and given back."""
    standin = sys.modules["standin"]
    gc.collect()
    give_pinned_back()  # what torch has kept of earlier tests
    snapshots, before = Snapshots(), standin.pinned_bytes()
    first = snapshots.take(
        pack([torch.ones(3 << 18, device="cuda"), torch.ones(1 << 18, device="cuda")])
    )
    assert snapshots.nbytes == standin.pinned_bytes() - before == 4 << 20
    del first
    snapshots.clear()
    assert snapshots.nbytes == 0
    assert standin.pinned_bytes() <= before


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from shoal.node.checkpoint.store import save
from shoal.node.checkpoint.writer import CheckpointWriter

def state(value):
    return {"value": value, "weights": [torch.full((1024, 1024), float(value)) for _ in range(3)]}

for order in sys.argv[2:]:
    point, number, step = order.split(":")
    folder = Path(sys.argv[1]) / order
    child = os.fork()
    if child == 0:
        save(folder, 5, state(5))
        seen = []
        def at(reached):
            seen.append(reached)
            if seen.count(point) == int(number):
                os.kill(os.getpid(), signal.SIGKILL)
        saver = CheckpointWriter(folder, keep=3, state=lambda: state(6), notify=print, at=at)
        saver.due = True
        saver.turn(int(step))
        saver.last(int(step))
        os._exit(0)
    print(order, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.ci
def test_kill_9_leaves_a_whole_checkpoint(tmp_path):
    """Processes that are killed in their writing threads; each point, and the first, a middle and
    the last block.
    """
    orders = [f"{point}:1:6" for point in POINTS if point != "aside"]
    orders += [
        "block:2:6",
        "block:4:6",
        *(f"{point}:1:5" for point in ("synced", "aside", "renamed")),
    ]  # 5: replaces the older one
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), *orders],
        capture_output=True, text=True, timeout=120, check=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"{order} {-signal.SIGKILL}" for order in orders], (
        done.stderr
    )
    for order in orders:
        point, _, step = order.split(":")
        new = point in ("renamed", "pruned")
        got, state = load(tmp_path / order)
        assert got == (int(step) if new else 5), order
        assert state["value"] == (6 if new else 5), order
        assert all(bool((weight == state["value"]).all()) for weight in state["weights"])
        with lock(tmp_path / order):
            checkpoint.save(tmp_path / order, 7, {})
        assert sorted(path.name for path in (tmp_path / order).iterdir())[-1] == "step-00000007"
        assert not list((tmp_path / order).glob(".saving-*"))
