"""Keys and peer ids; locks on files; and errors."""

import fcntl
import os
import stat
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.errors import IdentityError, MessageError, printable
from shoal.swarm.file_lock import FileLock, InUseError
from shoal.swarm.identity import (
    ID_HEADER,
    KEY_HEADER,
    Identity,
    b58decode,
    b58encode,
    is_peer_id,
    public_key_of,
    verify,
)

# RFC 8032, section 7.1, test 1: seed and public key.
SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")


def write(path, blob, mode=0o600):
    path.write_bytes(blob)
    path.chmod(mode)
    return path


def test_key_file_is_libp2ps_format(tmp_path):
    """File is libp2p's record and peer id is the public key."""
    path = write(tmp_path / "key", KEY_HEADER + SEED + PUBLIC)
    identity = Identity.load(path)
    assert identity.public_key == PUBLIC
    assert b58decode(identity.peer_id) == ID_HEADER + PUBLIC
    assert identity.peer_id.startswith("12D3KooW")
    assert len(identity.peer_id) == 52
    assert identity.path == path
    copy = identity.write_to(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    assert copy.peer_id == identity.peer_id


@given(st.binary(max_size=64))
def test_base58_round_trip(data):
    assert b58decode(b58encode(data)) == data


def test_base58_known_values():
    assert b58encode(b"Hello World!") == "2NEpo7TZRRrLZSi2U"
    assert b58encode(bytes.fromhex("0000287fb4cd")) == "11233QC4"


def test_created_file_is_private_and_loads_again(tmp_path):
    path = tmp_path / "a" / "b" / "key"
    before = os.umask(0)
    try:
        made = Identity.create(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["key"]
    assert path.stat().st_nlink == 1
    assert Identity.load(path).peer_id == made.peer_id == Identity.load_or_create(path).peer_id


def test_without_hard_links_the_file_is_written_in_place(tmp_path, monkeypatch):
    def no_links(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    made = Identity.create(tmp_path / "key")
    assert os.listdir(tmp_path) == ["key"]
    assert Identity.load(tmp_path / "key").peer_id == made.peer_id
    with pytest.raises(IdentityError, match="exists already"):
        Identity.create(tmp_path / "key")


def test_never_overwrites_and_never_follows_a_link(tmp_path):
    path = write(tmp_path / "key", b"precious")
    with pytest.raises(IdentityError, match="exists already"):
        Identity.create(path)
    assert path.read_bytes() == b"precious"
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IdentityError, match="exists already"):
        Identity.create(tmp_path / "dangling")
    assert not (tmp_path / "elsewhere").exists()
    assert sorted(os.listdir(tmp_path)) == ["dangling", "key"]


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda fd, blob: 3)
    with pytest.raises(IdentityError, match="No space left"):
        Identity.create(tmp_path / "key")
    assert os.listdir(tmp_path) == []


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(IdentityError, match=r"file/key \(.*choose a writable path"):
        Identity.load_or_create(tmp_path / "file" / "key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601, 0o644])
def test_file_readable_by_others_is_refused(tmp_path, mode):
    path = write(tmp_path / "key", KEY_HEADER + SEED + PUBLIC, mode)
    with pytest.raises(IdentityError, match=f"chmod 600 {path}"):
        Identity.load(path)


@pytest.mark.parametrize("blob", [
    b"", KEY_HEADER, (KEY_HEADER + SEED + PUBLIC)[:-1], KEY_HEADER + SEED + PUBLIC + b"\n",
    b"\x08\x00" + (KEY_HEADER + SEED + PUBLIC)[2:], KEY_HEADER + SEED + SEED, bytes(1_000_000),
])  # fmt: skip
def test_damaged_file_is_named_with_a_remedy(tmp_path, blob):
    path = write(tmp_path / "key", blob)
    with pytest.raises(IdentityError, match=f"{path} is damaged.*shoal id new"):
        Identity.load(path)
    with pytest.raises(IdentityError, match="damaged"):
        Identity.load_or_create(path)
    assert path.read_bytes() == blob


def test_missing_folder_and_fifo_are_told_apart(tmp_path):
    with pytest.raises(IdentityError, match="There is no key file"):
        Identity.load(tmp_path / "none")
    with pytest.raises(IdentityError, match="not a regular file"):
        Identity.load(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(IdentityError, match="not a regular file"):
        Identity.load(tmp_path / "fifo")


def test_nodes_started_together_agree_on_one_key(tmp_path):
    start, found = threading.Barrier(8), []

    def node():
        start.wait(60)
        found.append(Identity.load_or_create(tmp_path / "key").peer_id)

    threads = [threading.Thread(target=node) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert os.listdir(tmp_path) == ["key"]


def test_signature_binds_signer_context_and_data():
    mine, other = Identity.ephemeral(), Identity.ephemeral()
    signature = mine.sign("shoal/member/1", b"data")
    assert len(signature) == 64
    assert verify(mine.peer_id, "shoal/member/1", b"data", signature)
    assert not verify(other.peer_id, "shoal/member/1", b"data", signature)
    assert not verify(mine.peer_id, "shoal/member/2", b"data", signature)
    assert not verify(mine.peer_id, "shoal/member/1", b"Data", signature)
    assert not verify(mine.peer_id, "shoal/member/", b"1data", signature)
    assert not verify(mine.peer_id, "shoal/member/1", b"data", signature[:-1])
    assert mine.path is None
    assert mine.peer_id in repr(mine)


@given(st.one_of(st.text(max_size=80), st.none(), st.binary(max_size=60)), st.binary(max_size=80))
def test_verify_never_raises(peer_id, signature):
    assert verify(peer_id, "context", b"data", signature) is False


def test_peer_ids():
    good = b58encode(ID_HEADER + PUBLIC)
    assert is_peer_id(good)
    assert public_key_of(good) == PUBLIC
    rsa = b58encode(b"\x12\x20" + PUBLIC)
    shapes = (
        "",
        good[:-1],
        good + "1",
        "1" + good[:-1],
        good.replace("K", "0"),
        "1" * 52,
        "z" * 52,
    )
    for bad in (*shapes, rsa, None, 7, good.encode()):
        assert not is_peer_id(bad)
    # Any 32 bytes form an id, but a key that is no point on the curve signs nothing.
    assert verify(b58encode(ID_HEADER + b"\xff" * 32), "c", b"", bytes(64)) is False


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
"""  # noqa: E501


def holder(path, kind="alone"):
    """A process that holds the lock, and the id of what it started, or its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, int(process.stdout.readline().split()[1])


def take(path):
    return FileLock(path, "The key", "stop it")


@pytest.mark.parametrize("kind", ["alone", "fork", "program"])
def test_lock_names_its_holder_and_frees_on_death(tmp_path, kind):
    """The holder is named and its death frees the lock though its children live."""
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


def test_contested_lock_is_on_the_visible_file(tmp_path, monkeypatch):
    """A lock taken between the release of another and its removal is on the file that all see."""
    path, real, calls = tmp_path / "lock", fcntl.flock, []
    first = take(path)

    def late(fd, how):
        if (
            not calls
        ):  # the second has opened the file, and only now the first lets go and removes it
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
    assert (
        "The key cannot be locked (No such file or directory): make sure that no second node"
        in caplog.text
    )


def test_no_sentence_drives_the_terminal():
    assert str(MessageError("It says \x1b[2J\u202e:\nno.")) == "It says ?[2J?:\nno."
    assert printable("a\nb\tc\x00", kept="\t", other=" ") == "a b\tc "
