"""Large snapshots in files: the same bytes, no memory, nothing left behind, and memory in their place where no disk takes them."""

import errno
from pathlib import Path

import pytest
import torch

from shoal.optim.codecs.base import FLOAT32
from shoal.swarm.state import snapshot
from shoal.swarm.state.snapshot import Spool, State, chunks_in, encode, make, read, spool_for

STATE = State(3, [torch.arange(700_000.0), torch.ones(3)], {"momentum": [torch.zeros(700_000), torch.ones(3)]}, [2])


def test_a_snapshot_in_a_file_is_the_one_in_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    in_memory = make(STATE, encode(STATE))
    monkeypatch.setattr(snapshot, "LARGE", 1)
    content = encode(STATE)
    assert isinstance(content, Spool)
    filed = make(STATE, content)
    assert filed.id == in_memory.id
    assert torch.equal(in_memory.content, FLOAT32.encode([*STATE.slow, *STATE.extra["momentum"]]))
    for number in range(chunks_in(filed.header.nbytes)):
        assert bytes(filed.chunk(number)) == bytes(in_memory.chunk(number))
    for state in (read(one, {"momentum": [(1000, 700), (3,)]}) for one in (filed, in_memory)):
        assert [len(part) for part in (state.slow, state.extra["momentum"])] == [2, 2]
        assert all(torch.equal(one, two) for one, two in zip(state.slow, STATE.slow, strict=True))
        assert torch.equal(state.extra["momentum"][0], torch.zeros(1000, 700))
        assert torch.equal(state.extra["momentum"][-1], STATE.extra["momentum"][1])
    assert list(tmp_path.iterdir()) == []  # it has no name


def test_a_small_snapshot_or_one_for_which_there_is_no_room_is_in_memory(monkeypatch):
    assert spool_for(1000) is None

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert spool_for(1 << 30) is None


def test_changes_of_what_was_read_do_not_reach_the_file():
    spool = Spool(8)
    spool.write(0, memoryview(bytes(range(8))))
    spool.mapped(0, (2,)).fill_(9)
    assert bytes(spool.read(2, 4)) == bytes([2, 3, 4, 5])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list what is mapped")
def test_what_was_read_takes_memory_only_while_it_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(snapshot, "LARGE", 1)
    state, maps = read(make(STATE, encode(STATE)), {"momentum": [(700_000,), (3,)]}), Path("/proc/self/maps")
    assert maps.read_text().count(str(tmp_path)) == 0
    taken = state.slow[1]
    assert maps.read_text().count(str(tmp_path)) == 1
    assert taken.tolist() == [1.0, 1.0, 1.0]  # it begins within a page
    del taken
    assert maps.read_text().count(str(tmp_path)) == 0
