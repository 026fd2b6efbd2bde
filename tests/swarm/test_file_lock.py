"""A lock file is one process's at a time, names it, and is free the moment that process is gone, whatever it had started."""

import fcntl
import os
import subprocess
import sys

import pytest

from shoal.swarm.file_lock import FileLock, InUseError

HOLDER = """
import os, subprocess, sys
from pathlib import Path
from shoal.swarm.file_lock import FileLock
lock = FileLock(Path(sys.argv[1]), "The key", "stop it")
if sys.argv[2] == "fork" and os.fork() == 0:
    print("ready", os.getpid(), flush=True)
    sys.stdin.readline()
    os._exit(0)
if sys.argv[2] == "program":
    subprocess.Popen([sys.executable, "-c", "import os, sys; print('ready', os.getpid(), flush=True); sys.stdin.readline()"])
if sys.argv[2] == "alone":
    print("ready", os.getpid(), flush=True)
sys.stdin.readline()
"""


def holder(path, kind="alone"):
    """A process that holds the lock, and the id of what it started, or its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, int(process.stdout.readline().split()[1])


def take(path):
    return FileLock(path, "The key", "stop it")


@pytest.mark.parametrize("kind", ["alone", "fork", "program"])
def test_the_holder_is_named_and_its_death_frees_the_lock_though_its_children_live(tmp_path, kind):
    path = tmp_path / "lock"
    process, child = holder(path, kind)
    with pytest.raises(InUseError, match=f"^The key is in use by process {process.pid}: stop it.$"):
        take(path)
    process.kill()
    process.wait()
    if kind != "alone":
        os.kill(child, 0)  # it lives
    take(path).release()
    process.stdin.close()  # which ends the child too
    assert process.stdout.read() == ""
    process.stdout.close()


def test_a_fork_that_ends_leaves_the_lock_to_its_parent(tmp_path):
    path = tmp_path / "lock"
    with take(path):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(InUseError, match="this process already"):
            take(path)
    assert not path.exists()
    take(path).release()


def test_a_lock_taken_between_the_release_of_another_and_its_removal_is_on_the_file_that_all_see(tmp_path, monkeypatch):
    path, real, calls = tmp_path / "lock", fcntl.flock, []
    first = take(path)

    def late(fd, how):
        if not calls:  # the second has opened the file, and only now the first lets go and removes it
            calls.append(fd)
            first.release()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with take(path), pytest.raises(InUseError):
        take(path)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"", "another process"),
        (b"\xff\x00 x", "another process"),
        (b"12 elsewhere\n", "process 12 on elsewhere"),
        (b"12 \x1b[2J", "process 12"),
    ],
)
def test_what_the_file_says_is_not_believed_blindly(tmp_path, content, shown):
    path = tmp_path / "lock"
    with take(path):
        path.write_bytes(content)
        with pytest.raises(InUseError) as caught:
            take(path)
    assert str(caught.value) == f"The key is in use by {shown}: stop it."


def test_where_nothing_can_be_locked_a_warning_says_so(tmp_path, caplog):
    take(tmp_path / "missing" / "lock").release()
    assert "The key cannot be locked (No such file or directory): make sure that no second node" in caplog.text
