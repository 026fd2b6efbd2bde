"""The start of the daemon, every way in which it fails, and that nothing is ever left behind."""

import asyncio
import errno
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from hivemind.utils.multiaddr import Multiaddr

from shoal.swarm.errors import StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p import connections, daemon, daemon_process
from shoal.swarm.p2p import daemon_guard as guard
from shoal.swarm.p2p.addresses import is_loopback
from shoal.swarm.p2p.daemon import DaemonError
from shoal.swarm.p2p.listening import fixed_ports, obtain_ports
from shoal.swarm.p2p.multiaddr import peer_bytes, to_bytes, to_text, varint
from tests.support.echo_host import start

ANY = "/ip4/127.0.0.1/tcp/0"


@pytest.fixture
def tmp_path():
    """A short one in place of pytest's: a socket's path may have some 100 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="p2p-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _short_temp(monkeypatch, tmp_path):
    """Use a temporary folder of this test, so that other nodes on this machine do not matter."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def base():
    return Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}"


def taken_port(kind=socket.SOCK_STREAM):
    held = socket.socket(socket.AF_INET, kind)
    held.bind(("127.0.0.1", 0))
    if kind == socket.SOCK_STREAM:
        held.listen()
    return held, held.getsockname()[1]


def test_importing_is_quiet_and_leaves_signals_alone():
    code = (
        "import signal; before = [signal.getsignal(n) for n in (2, 15)]\n"
        "import shoal.swarm.p2p.host\n"
        "assert before == [signal.getsignal(n) for n in (2, 15)]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_sockets_are_private_and_go_with_the_daemon():
    """Sockets lie in a private folder that goes with the daemon."""
    host = start()
    (folder,) = base().iterdir()
    assert base().stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700
    assert {"daemon.sock", "key"} <= {path.name for path in folder.iterdir()}
    host.close()
    assert list(base().iterdir()) == []


def test_stale_folders_are_swept_but_not_those_in_use():
    host = start()
    (live,) = base().iterdir()
    stale, young = base() / "1-dead", base() / "2-new"
    for folder in (stale, young):
        folder.mkdir()
    (stale / "lock").touch()
    for folder in (stale, live):
        os.utime(folder, (time.time() - 60, time.time() - 60))
    daemon_process.sweep(base())
    assert set(base().iterdir()) == {live, young}
    host.close()


def test_a_long_temporary_folder_gives_way_to_tmp(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder, lock = daemon_process.run_folder()
    os.close(lock)
    shutil.rmtree(folder)
    assert str(folder).startswith("/tmp/shoal-")


def test_a_temporary_folder_of_someone_else_is_refused(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    base().symlink_to(elsewhere)
    with pytest.raises(StartupError, match="belongs to another user: remove it, or set TMPDIR"):
        start()


def fake_daemon(monkeypatch, tmp_path, content, mode=0o755):
    if content is not None:
        (tmp_path / "p2pd").write_bytes(content)
        (tmp_path / "p2pd").chmod(mode)
    monkeypatch.setattr(daemon, "daemon_path", lambda: tmp_path / "p2pd")


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (None, 0, "the network daemon is missing: there is no .*p2pd; reinstall"),
        (b"", 0o644, "not executable: run `chmod"),
        (b"\x7fELF\x02\x01\x01" + bytes(100), 0o755, "built for another kind of machine than this"),
        (
            f"#!{sys.executable}\nprint('no entropy'); raise SystemExit(3)\n".encode(),
            0o755,
            "stopped at once and said: no entropy",
        ),
    ],
    ids=["missing", "not executable", "another machine", "stops"],
)
def test_a_binary_that_does_not_run(monkeypatch, tmp_path, content, mode, says):
    fake_daemon(monkeypatch, tmp_path, content, mode)
    with pytest.raises(StartupError, match=says):
        start()
    assert not base().exists() or list(base().iterdir()) == []


def test_what_macos_says_of_a_binary_for_another_machine():
    found = daemon_process._failed_start(["cannot run /x/p2pd: [86] Bad CPU type in executable"])
    assert "built for another kind of machine than this" in str(found)


def test_a_daemon_that_never_answers_is_killed(monkeypatch, tmp_path):
    text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    fake_daemon(monkeypatch, tmp_path, f"#!{sys.executable}\n{text}\n".encode())
    with pytest.raises(StartupError, match="did not answer within 1 s"):
        start(timeout=1)
    assert list(base().iterdir()) == []
    assert not [
        p for p in psutil.Process().children(recursive=True) if "p2pd" in " ".join(p.cmdline())
    ]


def test_port_taken_is_named():
    held, port = taken_port()
    with (
        held,
        pytest.raises(
            StartupError, match=f"/ip4/127.0.0.1/tcp/{port}: the port is taken by another program"
        ),
    ):
        start(listen=[ANY, f"/ip4/127.0.0.1/tcp/{port}"])
    held, port = taken_port(socket.SOCK_DGRAM)
    with held, pytest.raises(StartupError, match=f"udp/{port}/quic-v1: the port is taken"):
        start(listen=[f"/ip4/127.0.0.1/udp/{port}/quic-v1"])


def test_port_of_another_daemon_is_not_shared():
    with start() as host, pytest.raises(StartupError, match="the port is taken"):
        start(listen=[host.addresses()[0].partition("/p2p/")[0]])


@pytest.mark.parametrize(("address", "why"), [
    ("/ip4/192.0.2.1/tcp/4001", "no such address"), ("/ip4/127.0.0.1/tcp/70000", "at most 65535"),
    ("127.0.0.1:4001", "write it like"), ("/ip4/300.1.1.1/tcp/1", "another address"),
])  # fmt: skip
def test_bad_listen_addresses(address, why):
    with pytest.raises(StartupError, match=why):
        start(listen=[address])


def test_ports_stay_the_same():
    addresses = ["/ip4/127.0.0.1/tcp/41001/p2p/X", "/ip4/10.0.0.1/udp/41002/quic-v1/p2p/X"]
    listen = [
        "/ip4/0.0.0.0/tcp/0",
        "/ip4/0.0.0.0/udp/0/quic-v1",
        "/ip6/::/tcp/0",
        "/ip4/0.0.0.0/tcp/7",
    ]
    fixed = fixed_ports(listen, addresses)
    assert fixed == (
        "/ip4/0.0.0.0/tcp/41001",
        "/ip4/0.0.0.0/udp/41002/quic-v1",
        "/ip6/::/tcp/0",
        "/ip4/0.0.0.0/tcp/7",
    )
    (chosen,) = obtain_ports(["/ip4/127.0.0.1/tcp/0"])
    assert 0 < int(chosen.rpartition("/")[2]) < 65536


@pytest.mark.ci
def test_each_unreachable_bootstrap_peer_is_named_with_its_reason():
    silent, port = taken_port()
    nobody, other = Identity.ephemeral().peer_id, Identity.ephemeral().peer_id
    with silent, start() as host:
        host_port = host.addresses()[0].split("/")[4]
        reasons = {
            f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}": "refused the connection",
            f"/ip4/127.0.0.1/tcp/{host_port}/p2p/{other}": "answered but is another peer, "
            f"{host.peer_id}",
            f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.ephemeral().peer_id}": "timed out|did not "
            "answer",
            f"/dns4/nowhere.invalid/tcp/4001/p2p/{Identity.ephemeral().peer_id}": "has a name that "
            "cannot be resolved|timed out",
        }
        with pytest.raises(StartupError) as caught:
            start(bootstrap=list(reasons), timeout=8)
    text = str(caught.value)
    assert "\n" not in text
    for address, reason in reasons.items():
        assert any(f"{address} {words}" in text for words in reason.split("|")), (address, text)


def test_one_bootstrap_peer_that_answers_is_enough(caplog):
    caplog.set_level("INFO")
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral().peer_id}"
    with start() as host, start(bootstrap=[dead, *host.addresses()]):
        assert any(
            dead in record.getMessage() and "refused" in record.getMessage()
            for record in caplog.records
        )


NODE = """
import sys, time, tempfile
tempfile.tempdir = sys.argv[1]
from shoal.swarm.p2p.host import Host
from shoal.swarm.identity import Identity
host = Host.start(Identity.ephemeral())
print("up", flush=True)
time.sleep(60)
"""


def node_process(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", NODE, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "up\n"
    family = psutil.Process(child.pid).children(recursive=True)
    assert sorted("p2pd" in process.name() for process in family) == [
        False,
        True,
    ]  # the guard and the daemon
    return child, family


def nothing_left(family, seconds=60.0):
    """Return the processes that still run.

    A zombie has ended: it waits for its parent, which in a container may never look.
    """
    end = time.monotonic() + seconds
    while (left := [p for p in family if _runs(p)]) and time.monotonic() < end:
        psutil.wait_procs(left, timeout=0.05)
    return left


def _runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.thinned(2)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_end_of_the_node_leaves_anything_behind(how, tmp_path):
    child, family = node_process(tmp_path)
    child.send_signal(how)
    child.wait(60)
    child.stdout.close()
    assert nothing_left(family) == []
    assert list(base().iterdir()) == []


def test_daemon_dies_with_node_and_guard(tmp_path):
    """The daemon dies even if node and guard are killed together."""
    child, family = node_process(tmp_path)
    for process in (child, *[p for p in family if "p2pd" not in p.name()]):
        os.kill(process.pid, signal.SIGKILL)
    child.wait(60)
    child.stdout.close()
    assert nothing_left(family) == []
    (left,) = base().iterdir()  # nobody was there to remove it, so the next start does
    os.utime(left, (time.time() - 60, time.time() - 60))
    start().close()
    assert list(base().iterdir()) == []


def test_ctrl_c_in_the_terminal_does_not_reach_the_daemon():
    with start() as host:
        family = psutil.Process().children(recursive=True)
        (p2pd,) = [p for p in family if p.name() == "p2pd"]
        assert os.getsid(p2pd.pid) != os.getsid(0)
        assert host.alive


def test_the_guard_passes_on_the_status_of_its_command(tmp_path):
    run_dir = tmp_path / "run"
    for code, expected in (
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 256 - 9),
    ):
        run_dir.mkdir()
        command = [
            sys.executable,
            "-I",
            "-S",
            guard.__file__,
            str(run_dir),
            str(os.getpid()),
            sys.executable,
            "-c",
            code,
        ]
        assert subprocess.run(command, timeout=10, check=False).returncode == expected
        assert not run_dir.exists()


async def test_reasons_are_read_from_the_daemons_words():
    error = DaemonError(
        "all dials failed\n * [/ip4/1.2.3.4/tcp/5] i/o timeout\n * [/ip4/9.9.9.9/tcp/1] odd"
    )
    assert connections.why(error, "/ip4/1.2.3.4/tcp/5/p2p/X").startswith("timed out")
    assert (
        connections.why(DaemonError("what\nnow"), "/ip4/7/p2p/X")
        == "could not be connected to (now)"
    )
    assert connections.why(ValueError("bad"), "x") == "is not a valid address (bad)"

    class Refuses:
        async def connect(self, peer, addresses):
            raise ValueError(f"{addresses} is no multiaddr")

    reached, failed = await connections.connect_any(Refuses(), ["nonsense"], 1.0)
    assert reached == []
    assert "is not a valid address" in failed["nonsense"]


def test_loopback_addresses_are_known():
    assert is_loopback("/ip4/127.0.0.1/tcp/1")
    assert is_loopback("/ip6/::1/tcp/1")
    assert not is_loopback("/ip4/10.0.0.1/tcp/1")
    assert is_loopback("/dns4/localhost/tcp/1")
    assert not is_loopback("/dns4/example.org/tcp/1")
    assert not is_loopback("junk")
    assert Path(daemon.daemon_path()).name == "p2pd"


def test_addresses_are_written_and_read_as_libp2p_does():
    relay, peer = Identity.ephemeral().peer_id, Identity.ephemeral().peer_id
    plain = to_bytes("/ip4/1.2.3.4/tcp/1")
    assert plain == bytes.fromhex("0401020304060001")
    relayed = f"/ip4/1.2.3.4/tcp/1/p2p/{relay}/p2p-circuit"
    assert to_bytes(relayed) == plain + bytes.fromhex("a50326") + peer_bytes(relay) + bytes.fromhex(
        "a202"
    )
    addresses = (
        relayed,
        f"{relayed}/p2p/{peer}",
        "/ip6/2001:db8::1/udp/65535/quic-v1",
        "/ip6/::1/tcp/80/ws",
        "/dns4/node_1.example.org/tcp/443/tls/ws",
        "/ip4/10.0.0.1/udp/4001/quic",
    )
    assert [to_text(to_bytes(address)) for address in addresses] == list(addresses)
    for address in addresses[
        2:
    ]:  # hivemind writes a peer id as a CID, which libp2p's Go code does not read
        if "_" not in address:
            assert Multiaddr(address).to_bytes() == to_bytes(address)


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            "junk",
            "",
            "/",
            "ip4/1.2.3.4/tcp/1",
            "/ip4",
            "/ip4/1.2.3/tcp/1",
            "/ip6/1.2.3.4/tcp/1",
            "/ip4/1.2.3.4/tcp",
        ),
        *(
            "/ip4/1.2.3.4/tcp/65536",
            "/ip4/1.2.3.4/tcp/-1",
            "/dns/",
            "/unknown/1",
            "/ip4/1.2.3.4/tcp/1/p2p",
        ),
        *(f"/ip4/1.2.3.4/tcp/1/p2p/{peer}" for peer in ("0OIl/p2p-circuit", "1" * 65, "")),
    ],
)
def test_what_is_no_address_is_refused(wrong):
    with pytest.raises(ValueError):
        to_bytes(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        "0401020304060001"[:-2],
        "04010203",
        "a503",
        "a50326aa",
        "ff",
        "d1030401020304",
        "ffffffffff01",
    ],
)
def test_what_is_no_binary_address_is_refused(wrong):
    with pytest.raises(ValueError):
        to_text(bytes.fromhex(wrong))


async def test_an_announced_length_that_is_too_large_is_not_allocated():
    async def read(data):
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await daemon.read_message(reader, daemon.messages().Response())

    with pytest.raises(OSError):
        await read(varint(daemon.MAX_FRAME_BYTES + 1))
    with pytest.raises(EOFError):
        await read(varint(100) + bytes(99))


def test_taken_former_port_is_named(tmp_path, caplog):
    """Fault: another port was taken in silence, and links with the old one led nowhere."""
    known = tmp_path / "peers.json"
    with start(known=known, swarm="a" * 52) as host:
        before = host.addresses()[0].partition("/p2p/")[0]
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", int(before.rpartition("/")[2])))
    held.listen()
    with held, start(known=known, swarm="a" * 52) as host:
        assert host.addresses()[0].partition("/p2p/")[0] != before
    assert [line for line in caplog.messages if "as before" in line] == [
        f"this node cannot listen on {before} as before (another program may have the port), so "
        "links and invitations with that address lead to it no more: give out a new link (shoal "
        "link), or free the address and start it again"
    ]


def test_without_shared_memory_a_sentence_says_so(monkeypatch):
    """Fault: a container with /dev/shm read-only, full or missing met "a bug in shoal"."""

    def no_lock():
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(multiprocessing, "Lock", no_lock)
    with pytest.raises(StartupError) as caught, daemon_process.parts_of_hivemind():
        raise AssertionError
    assert str(caught.value) == (
        "The system has no shared memory for a lock (/dev/shm: Read-only file system): mount "
        "/dev/shm so that it can be written and has some room (docker run --shm-size 64m)."
    )
