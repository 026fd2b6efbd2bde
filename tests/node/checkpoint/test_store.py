"""Checkpoints come back exactly, survive a kill at any moment, are never half loaded, and keep
within the disk budget.
"""

import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
import time
from collections import deque
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.checkpoint import store as checkpoint
from shoal.node.checkpoint.folder import (
    CheckpointError,
    check_writable,
    lock,
    path_of,
    steps,
)
from shoal.node.checkpoint.packing import UnpackableError
from shoal.node.checkpoint.store import STATE, TENSORS, load, outline, save
from shoal.node.checkpoint.writer import GB, SPARE_BYTES, CheckpointWriter, used
from shoal.swarm.file_lock import InUseError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def same(a, b):
    """Equal in type, structure and bits."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(
            a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and all(same(a[k], b[k]) for k in a)
    return a == b


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    value = torch.arange(math.prod(shape)).reshape(shape).mul(draw(st.integers(0, 9))).to(dtype)
    return value.transpose(0, 1) if len(shape) >= 2 and draw(st.booleans()) else value


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | tensors()
)
keys = (
    st.integers()
    | st.text(max_size=4)
    | st.tuples(st.integers(), st.text(max_size=2))
    | st.none()
    | st.booleans()
)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(states, st.integers(0, 10**12))
def test_any_state_comes_back_exactly(state, step):
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), step, state)
        got_step, got = load(Path(folder))
    assert got_step == step
    assert same(state, got)


def test_views_shared_memory_and_parameters(tmp_path):
    big = torch.arange(12.0)
    state = {
        "a": big,
        "b": big,
        "view": big[3:5],
        "column": big.view(3, 4)[:, 1],
        "scalar": torch.tensor(2.5),
    }
    state["parameter"] = torch.nn.Parameter(torch.ones(2))
    save(tmp_path, 1, state)
    got = load(tmp_path)[1]
    assert all(torch.equal(got[k], state[k].detach()) for k in state)
    assert type(got["parameter"]) is torch.Tensor
    got["a"][0] = 9
    assert got["b"][0] == 0


def test_the_newest_are_kept(tmp_path):
    for step in (5, 20, 1000):
        save(tmp_path, step, {"step": step}, keep=2)
    assert steps(tmp_path) == [1000, 20]
    save(tmp_path, 3000, {}, keep=2)
    assert steps(tmp_path) == [3000, 1000]
    save(
        tmp_path, 7, {"step": 7}, keep=2
    )  # a new run in an old folder: `--resume` goes on with this one
    assert steps(tmp_path) == [7, 3000]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".before-step-00003000", "step-00000007"]
    assert load(tmp_path) == (7, {"step": 7})
    save(tmp_path, 8, {}, keep=2)
    assert steps(tmp_path) == [8, 7]
    for step in range(10):
        save(tmp_path / "three", step, {})
    assert steps(tmp_path / "three") == [9, 8, 7]
    save(tmp_path / "three", 10, {}, keep=1)
    assert steps(tmp_path / "three") == [10]


def test_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 5, "old")
    save(tmp_path, 5, "new")
    assert load(tmp_path) == (5, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


def test_rename_follows_fsync(tmp_path, monkeypatch):
    """A machine that loses its power has all of a checkpoint that has its name, and the older one
    until then.
    """
    save(tmp_path, 1, {"step": 1}, keep=1)
    done, fsync, rename, rmtree = [], os.fsync, os.rename, shutil.rmtree

    def noting(what, of, call):
        def noted(first, *others, **options):
            done.append((what, of(first, *others)))
            return call(first, *others, **options)

        return noted

    monkeypatch.setattr(
        os, "fsync", noting("sync", lambda descriptor: os.fstat(descriptor).st_ino, fsync)
    )
    monkeypatch.setattr(
        os, "rename", noting("rename", lambda source, target: os.stat(source).st_ino, rename)
    )
    monkeypatch.setattr(shutil, "rmtree", noting("remove", lambda path: Path(path).name, rmtree))
    final = save(tmp_path, 2, {"step": 2}, keep=1)
    tensors, state, folder, whole = (
        path.stat().st_ino for path in (final / TENSORS, final / STATE, final, tmp_path)
    )
    expected = [
        ("sync", tensors),
        ("sync", state),
        ("sync", folder),
        ("rename", folder),
        ("sync", whole),
    ]
    assert done[:5] == expected
    assert ("remove", path_of(tmp_path, 1).name) in done[5:]


def test_a_save_leaves_anothers_unfinished_one_alone(tmp_path):
    other = tmp_path / ".saving-other"
    other.mkdir()
    save(tmp_path, 1, {})
    assert other.exists()


def test_folder_belongs_to_one_node(tmp_path):
    """A folder is for one node at a time and what a killed one left goes."""
    (tmp_path / ".saving-dead").mkdir()
    with lock(tmp_path):
        assert not list(tmp_path.glob(".saving-*"))
        with pytest.raises(
            InUseError,
            match=r"^The folder .* is in use by this process already: stop that node, or .* "
            r"--folder\.$",
        ):
            lock(tmp_path)
        (tmp_path / ".saving-alive").mkdir()
        with pytest.raises(InUseError):
            lock(tmp_path)
        assert (tmp_path / ".saving-alive").exists()
    lock(tmp_path).release()


def test_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(CheckpointError, match=r"No space left on device\): free some space"):
        save(tmp_path, 1, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [STATE, TENSORS])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_is_named_with_the_way_out(tmp_path, name, harm):
    save(tmp_path, 5, {"x": torch.ones(3)})
    save(tmp_path, 6, {"x": torch.ones(3), "y": 0.25})
    path = tmp_path / "step-00000006" / name
    data = bytearray(path.read_bytes())
    if harm == "remove":
        path.unlink()
    else:
        data[-3] ^= 1
        path.write_bytes(data if harm == "flip" else data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="damaged") as caught:
        load(tmp_path)
    assert name in str(caught.value)
    assert "delete" in str(caught.value)
    assert "\n" not in str(caught.value)
    shutil.rmtree(tmp_path / "step-00000006")
    assert load(tmp_path)[0] == 5
    (tmp_path / "step-00000005" / STATE).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no older one, .* without --resume"):
        load(tmp_path)


def test_none_there(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        assert steps(folder) == []
        with pytest.raises(CheckpointError, match="There is no checkpoint in"):
            load(folder)


def test_other_types_are_refused_before_anything_is_written(tmp_path):
    for value in (object(), {1: [object]}, np.array([None]), {"a": {2: slice(3)}}):
        with pytest.raises(UnpackableError, match=r"a checkpoint cannot hold a .*, at \['x'\]"):
            save(tmp_path, 1, {"x": value})
    assert list(tmp_path.iterdir()) == []


def kept(folder, value):
    save(folder, 1, {"x": value})
    return load(folder)[1]["x"]


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(-3), -3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (torch.Size([2, 3]), (2, 3)),
        (IntEnum("Kind", "ONE TWO").TWO, 2),
        (np.float64("inf"), math.inf),
    ],
)
def test_numbers_of_other_libraries_come_back_as_pythons(tmp_path, value, back):
    assert same(kept(tmp_path, value), back)


@pytest.mark.parametrize(
    "value",
    [
        b"\0\xff",
        1.5 - 2j,
        {3, "a", None},
        frozenset({(1, 2)}),
        deque([1, [2.0]], maxlen=5),
        deque(),
        torch.bfloat16,
        torch.device("cuda:1"),
        {"deep": [{"bytes": b"x"}]},
    ],
)
def test_what_optimizers_and_samplers_keep_comes_back(tmp_path, value):
    got = kept(tmp_path, value)
    assert same(got, value)
    assert getattr(got, "maxlen", None) == getattr(value, "maxlen", None)


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i8", "u4", "?", "c16", ">f4"])
def test_arrays_come_back_in_their_own_type(tmp_path, dtype):
    value = np.arange(6).reshape(3, 2).astype(dtype).T
    got = kept(tmp_path, value)
    assert (got.dtype, got.shape) == (value.dtype, value.shape)
    assert np.array_equal(got, value)
    got[0, 0] = 7  # its own memory
    assert outline(tmp_path)[1]["x"] == "0"  # merge reads no tensors


def test_a_generator_goes_on_with_the_same_numbers(tmp_path):
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    got = kept(tmp_path, generator)
    assert torch.equal(torch.rand(4, generator=got), torch.rand(4, generator=generator))
    outline(tmp_path)


def test_unreadably_large_state_is_not_written(tmp_path, monkeypatch):
    """A state too large to be read again is not written."""
    monkeypatch.setattr(checkpoint, "MAX_STATE_BYTES", 2000)
    save(tmp_path, 1, {"x": "a" * 1000})
    with pytest.raises(ValueError, match="could not be read again"):
        save(tmp_path, 2, {"x": "a" * 2000})
    assert load(tmp_path)[0] == 1
    assert len(list(tmp_path.iterdir())) == 1


def rewritten(path, old, new):
    """Put ``new`` in place of ``old`` in a checkpoint's state, with the digest that fits."""
    text = (path / STATE).read_text(encoding="utf-8").partition("\n")[2].strip().replace(old, new)
    (path / STATE).write_text(
        f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n", encoding="utf-8"
    )


@pytest.mark.parametrize(
    "tree",
    [
        {"dtype": "load"},
        {"dtype": "nn"},
        {"array": ["O", [1], "0"]},
        {"array": ["f4", [99], "0"]},
        {"array": ["V8", [1], "0"]},
        {"generator": "0"},
        {"device": "nowhere"},
        {"bytes": "zz"},
        {"deque": [-1, []]},
        {"complex": ["x", 1]},
        {"set": [[]]},
        {"odd": 1},
    ],
)
def test_a_file_from_elsewhere_makes_no_other_values(tmp_path, tree):
    """Fault: a name in a checkpoint of a stranger is looked up, or an array of objects made of its
    bytes.
    """
    path = save(tmp_path, 1, {"x": torch.zeros(8, dtype=torch.uint8), "y": "PLACE"})
    rewritten(path, '"PLACE"', json.dumps(tree))
    with pytest.raises(CheckpointError, match="is damaged"):
        load(tmp_path)


@pytest.mark.parametrize("name", [STATE, TENSORS])
def test_what_has_no_end_is_not_read(tmp_path, name):
    """Such as a pipe; and /dev/zero, of which stat says that it has 0 bytes."""
    path = save(tmp_path, 1, {"a": torch.zeros(1)})
    (path / name).unlink()
    (path / name).symlink_to("/dev/null")
    with pytest.raises(CheckpointError, match="is no file of bytes"):
        load(path)


def test_a_dtype_of_a_checkpoint_imports_nothing(tmp_path, monkeypatch):
    """torch imports some of its parts when they are first asked for by name."""
    path = save(tmp_path, 1, torch.float32)
    rewritten(path, '"float32"', '"a_lazy_part"')
    asked = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)
    assert asked == []


def test_check_writable(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/shoal")):
        with pytest.raises(CheckpointError, match="Cannot write to the folder"):
            check_writable(folder)


BUDGET_STATE = {"weights": torch.zeros(100_000)}  # 0.4 MB


def budgeted(folder, nbytes, said=None):
    """A writer of so many bytes; its next checkpoint takes 400 kB."""
    notify = (said if said is not None else []).append
    saver = CheckpointWriter(
        folder,
        keep=3,
        state=lambda: BUDGET_STATE,
        notify=notify,
        gigabytes=nbytes / GB,
        uncounted=("claims",),
    )
    saver._size = 400_000
    return saver


def test_older_checkpoints_give_way_and_nothing_else(tmp_path):
    (tmp_path / "mine.txt").write_text("not a checkpoint")
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "one.safetensors").write_bytes(bytes(5_000_000))
    for step in (1, 2, 3):
        save(tmp_path, step, BUDGET_STATE, keep=9)
        os.utime(path_of(tmp_path, step), (step, step))
    now = used(tmp_path, ("claims",))
    assert now == used(tmp_path) - 5_000_000
    budgeted(tmp_path, now + 400_000 + SPARE_BYTES)._make_room(full=False)
    assert sorted(steps(tmp_path)) == [1, 2, 3]
    budgeted(tmp_path, now + SPARE_BYTES + 1000)._make_room(full=False)
    assert sorted(steps(tmp_path)) == [2, 3]
    with pytest.raises(
        CheckpointError, match=r"does not fit into the .* that node.disk allows for .*: allow more"
    ):
        budgeted(tmp_path, SPARE_BYTES)._make_room(full=False)
    assert sorted(steps(tmp_path)) == [3]
    assert load(tmp_path)[0] == 3
    assert (tmp_path / "mine.txt").exists()
    assert (tmp_path / "step-notes").exists()


def test_without_a_budget_nothing_goes(tmp_path):
    save(tmp_path, 1, BUDGET_STATE)
    assert not budgeted(tmp_path, 0)._make_room(full=False)
    assert not budgeted(tmp_path, 0)._make_room(full=True)  # the newest stays
    assert steps(tmp_path) == [1]


def test_budget_below_two_checkpoints_ends_the_run(tmp_path):
    """Else its end is never saved: a run of 400 steps said so at the last of them."""
    least = 2 * (400_000 + SPARE_BYTES)
    with pytest.raises(
        CheckpointError, match=r"node.disk allows 0\.0029 GB, and two .* take 0\.0029: allow more"
    ):
        budgeted(tmp_path, least - 1).turn(1)
    budgeted(tmp_path, least).turn(1)


def test_exceeded_budget_is_said_once(tmp_path):
    """A run over its budget says so once and goes on."""
    said = []
    saver = budgeted(tmp_path, 2 * (400_000 + SPARE_BYTES), said)
    saver.due = True
    saver.turn(1)
    saver._wait(time.monotonic() + 30.0)
    (tmp_path / "mine.txt").write_text("mine" * 500_000)
    for step in (2, 3):
        saver.due = True
        saver.turn(step)
        saver._wait(time.monotonic() + 30.0)
    saver.turn(4)
    assert steps(tmp_path) == [1]
    assert len(said) == 1
    assert "node.disk allows" in said[0]
    assert "training goes on" in said[0]
