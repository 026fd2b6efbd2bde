"""Large snapshots in files: the same bytes, no memory, nothing left behind, and memory in their place where no disk takes them."""

import errno

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
    assert torch.equal(filed.payload, FLOAT32.encode([*STATE.slow, *STATE.extra["momentum"]]))
    for number in range(chunks_in(filed.header.nbytes)):
        assert bytes(filed.chunk(number)) == bytes(in_memory.chunk(number))
    state = read(filed, {"momentum": [(700_000,), (3,)]})
    assert torch.equal(state.slow[0], STATE.slow[0])
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
    spool.mapped().fill_(9)
    assert bytes(spool.read(2, 4)) == bytes([2, 3, 4, 5])
