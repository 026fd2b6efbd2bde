"""One p2pd (libp2p's Go daemon, from hivemind's wheel) in a private folder and under a guard.

hivemind's own launcher keeps its sockets in the open temporary folder, leaves them there after a crash, and knows no
GossipSub; so `Daemon` launches the process itself and inherits the rest. All private hooks of hivemind that Shoal uses are in
this file, which is why pyproject.toml pins the release.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import platform
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hivemind.hivemind_cli
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from swarm import guard
from swarm.errors import StartupError
from swarm.identity import Identity

log = logging.getLogger(__name__)

# hivemind prints to stderr on its own account. Its messages go the usual way of logging instead, errors only, for what we
# have to say about its failures we say ourselves.
use_hivemind_log_handler("nowhere")
if "HIVEMIND_LOGLEVEL" not in os.environ:
    logging.getLogger("hivemind").setLevel(logging.ERROR)
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level for the whole program

SOCKET_PATH_LIMIT = 100  # bytes; the system's own limit for a socket's path is 104 (macOS) or 108
YOUNG = 10.0  # seconds: a younger run folder may not be locked yet
_REMEDY = "reinstall it with `pip install --force-reinstall hivemind==1.1.12` on Linux x86-64, or use WSL or Docker"


def daemon_path() -> Path:
    """Where the daemon's binary should be."""
    return Path(str(hivemind.hivemind_cli.__file__)).parent / "p2pd"


def run_folder() -> tuple[Path, int]:
    """A new private folder for a daemon's sockets, and a descriptor that holds its lock.

    The guard inherits the descriptor: as long as it lives, nobody takes the folder for a stale one. Folders of dead guards
    are removed on the way. Raises StartupError when the parent folder belongs to someone else.
    """
    base = Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}"
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    if len(os.fsencode(base / name / "client.sock")) > SOCKET_PATH_LIMIT:
        base = Path("/tmp") / base.name
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
        if base.is_symlink() or status.st_uid != os.getuid():
            raise StartupError(f"{base} belongs to another user: remove it, or set TMPDIR to a folder of your own.")
        if status.st_mode & 0o077:
            base.chmod(0o700)
        sweep(base)
        folder = base / name
        folder.mkdir(mode=0o700)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StartupError(
            f"cannot create a folder for the daemon's sockets in {base} ({error.strerror}): free some space there or set "
            "TMPDIR to a folder that you can write."
        ) from error
    return folder, lock


def sweep(base: Path) -> None:
    """Remove the run folders in ``base`` whose guard is dead. (A lock tells, for a process id may be another machine's.)"""
    for folder in base.iterdir():
        with contextlib.suppress(OSError):  # another node may be sweeping too
            if time.time() - folder.lstat().st_mtime < YOUNG:
                continue
            if (folder / "lock").exists():
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                finally:
                    os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)


def is_loopback(address: str) -> bool:
    """Whether a multiaddr reaches no further than this machine."""
    parts = address.split("/")
    with contextlib.suppress(IndexError, ValueError):
        return parts[2] == "localhost" or ipaddress.ip_address(parts[2]).is_loopback
    return False


class Daemon(P2P):  # type: ignore[misc]
    """A running p2pd; make it with `launch`."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = os.getpid()
        self._daemon_listen_maddr = self._client_listen_maddr = None
        self._run_dir: Path | None = None
        self._said: deque[str] = deque(maxlen=20)  # the last lines of its output

    @classmethod
    async def launch(
        cls,
        identity: Identity,
        *,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        relays: Sequence[str] = (),
        light: bool = False,
        timeout: float = 30.0,
    ) -> Daemon:
        """Start a daemon with ``identity``'s peer id; it answers when this returns.

        ``relays``: peers that may forward connections to us when we sit behind a NAT. ``light``: take part in libp2p's own
        peer routing as a client only. Raises StartupError, after removing everything again, within ``timeout`` seconds.
        """
        binary = daemon_path()
        if not binary.is_file():
            raise StartupError(f"the network daemon is missing: there is no {binary}; {_REMEDY}.")
        if not os.access(binary, os.X_OK):
            raise StartupError(f"the network daemon is not executable: run `chmod +x {binary}`.")
        self = cls()
        self._run_dir, lock = run_folder()
        started = False
        try:
            key = identity.path
            if key is None:
                key = self._run_dir / "key"
                identity.write_to(key)
            self._daemon_listen_maddr = Multiaddr(f"/unix{self._run_dir}/daemon.sock")
            self._client_listen_maddr = Multiaddr(f"/unix{self._run_dir}/client.sock")
            command = [str(binary), *_options(self._daemon_listen_maddr, key, listen, announce, relays, light)]
            await asyncio.wait_for(self._start(command, lock), timeout)
            started = True
        except asyncio.TimeoutError:
            raise StartupError(
                f"the network daemon did not answer within {timeout:g} s: the machine may be overloaded; try again."
            ) from None
        except (P2PDaemonError, OSError, EOFError) as error:
            raise StartupError(f"the network daemon started but cannot be talked to ({error}): try again.") from error
        finally:
            os.close(lock)  # the guard has it
            if not started:
                await self.shutdown()
        if str(self.peer_id) != identity.peer_id:
            await self.shutdown()
            raise StartupError(
                f"the network daemon came up as {self.peer_id} and not as {identity.peer_id}: the key file {key} was "
                "changed meanwhile; start again."
            )
        return self

    async def _start(self, command: list[str], lock: int) -> None:
        # On all processors its threads spin and wake each other: half of them move the same bytes in 15 % less time.
        half = str(max((os.cpu_count() or 2) // 2, 1))
        defaults = {"GOMAXPROCS": half, "GOLOG_LOG_LEVEL": "error"}
        env = {**defaults, **os.environ, "GOLOG_LOG_FMT": "json"}
        me = [sys.executable, "-I", "-S", guard.__file__, str(self._run_dir), str(os.getpid())]
        try:
            self._child: Any = await asyncio.create_subprocess_exec(
                *me,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=env,
                pass_fds=(lock,),
                start_new_session=True,
            )
        except OSError as error:
            raise StartupError(f"cannot start {sys.executable} to guard the daemon ({error.strerror}).") from error
        self._alive = True
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader_task = asyncio.create_task(self._read_outputs(ready))
        await ready
        self._client = await p2pclient.Client.create(
            control_maddr=self._daemon_listen_maddr, listen_maddr=self._client_listen_maddr
        )
        await self._ping_daemon()

    async def _read_outputs(self, ready: asyncio.Future[None]) -> None:
        """Replaces hivemind's, which forgets all but the last line."""
        output: asyncio.StreamReader = self._child.stdout
        while line := await output.readline():
            text = line.decode(errors="replace").rstrip()
            self._said.append(text)
            log.debug("p2pd: %s", text)
            if text.startswith("Peer ID:") and not ready.done():
                ready.set_result(None)
        if not ready.done():
            ready.set_exception(_why_not(self._said))

    async def ended(self) -> int:
        """Wait until the process is gone; its exit status. (`is_alive` does not know.)"""
        return int(await self._child.wait())

    async def shutdown(self) -> None:
        """End the process and remove its folder; takes at most about `guard.GRACE` seconds."""
        self._terminate()
        if self._child is not None:
            await self._child.wait()
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)  # if the guard was killed

    def end_by_force(self) -> None:
        """Have the guard end the process, without the help of the loop; for any thread."""
        if self._owner == os.getpid() and self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGTERM)

    def _terminate(self) -> None:
        if self._owner == os.getpid():  # a forked copy of this object owns nothing
            super()._terminate()

    async def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs under which peers may reach us, those beyond this machine first."""
        found = [str(a) for a in await self.get_visible_maddrs(latest=True)]
        return tuple(sorted(found, key=is_loopback))

    async def connect(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Connect to a peer (nothing happens if we are).

        Raises ValueError if none of the addresses is one (a peer may tell us anything), or hivemind's P2PDaemonError.
        """
        bare, wrong = [], ""
        for address in addresses:
            try:
                bare.append(Multiaddr(_without_peer(address)))
            except ValueError as error:
                wrong = str(error)
        if not bare:
            raise ValueError(wrong or "no address")
        await self._client.connect(PeerID.from_base58(peer_id), bare)

    async def request(self, request: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
        """Send a `p2pd_pb2.Request` over a connection of its own, which is then the caller's; and its answer.

        Raises hivemind's P2PDaemonError or OSError; unlike hivemind's, closes the socket when it fails.
        """
        reader, writer = await self._client.control.daemon_connector.open_connection()
        try:
            await write_pbmsg(writer, request)
            answer = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, answer)
            raise_if_failed(answer)
        except BaseException:
            writer.close()
            raise
        return reader, writer, answer

    async def open(self, peer_id: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream. Raises as ``request`` does."""
        ask = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer_id).to_bytes(), proto=[protocol])
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=ask)
        reader, writer, _ = await self.request(request)
        return reader, writer

    async def peers(self) -> dict[str, tuple[str, ...]]:
        """Whom we are connected to: peer id -> full multiaddrs."""
        found: dict[str, tuple[str, ...]] = {}
        for peer in await self.list_peers():
            name = peer.peer_id.to_base58()
            found[name] = tuple(f"{address}/p2p/{name}" for address in peer.addrs)
        return found


async def join_dht(daemon: Daemon, peers: Sequence[str], validator: Any, light: bool) -> DHTNode:
    """A DHT node on ``daemon``, met with ``peers`` (peer ids we are connected to). Takes some seconds if none answers.

    Whether any of them takes part in the DHT is to be seen from `met`.
    """
    node = await DHTNode.create(
        p2p=daemon,
        node_id=DHTID.generate(source=str(daemon.peer_id)),  # the same after a restart
        initial_peers=[f"/p2p/{peer}" for peer in peers],
        record_validator=validator,
        client_mode=light,
        ensure_bootstrap_success=False,
        strict=False,
        cache_locally=False,  # we always ask for the newest
        cache_refresh_before_expiry=0,
    )
    for peer in peers[:1]:
        try:
            await node.protocol.call_ping(PeerID.from_base58(peer), validate=True, strict=True)
        except ValidationError as error:
            if "time" in str(error):
                log.warning("this machine's clock differs from peer %s's: set it by NTP (%s)", peer, error)
            else:
                log.warning(
                    "peer %s cannot connect back to this node: open the port given by --listen in the firewall, or others "
                    "may be unable to start an exchange with it",
                    peer,
                )
    return node


def met(node: DHTNode) -> int:
    """How many other DHT nodes this one knows."""
    return len(node.protocol.routing_table.uid_to_peer_id)


def _without_peer(address: str) -> str:
    """The address without the last ``/p2p/ID``, the form in which the daemon wants it."""
    head, found, _ = address.rpartition("/p2p/")
    return head if found else address


def _options(
    control: Multiaddr, key: Path, listen: Sequence[str], announce: Sequence[str], relays: Sequence[str], light: bool
) -> list[str]:
    beyond = not all(is_loopback(address) for address in listen)
    options = {
        "listen": control,
        "id": key,
        "hostAddrs": ",".join(listen),
        "dhtClient" if light else "dhtServer": 1,
        "pubsub": 1,
        "pubsubRouter": "gossipsub",
        "autonat": int(beyond),
        "natPortMap": int(beyond),
        "autoRelay": int(beyond and bool(relays)),
        "relay": 1,
        "connManager": 1,
        "tls": 1,
        "b": 0,  # bootstrap.py connects, and so learns which address failed and why
        "idleTimeout": "30s",
    }
    if announce:
        options["announceAddrs"] = ",".join(announce)
    if relays and beyond:
        options["trustedRelays"] = ",".join(relays)
    return [f"-{name}={value}" for name, value in options.items()]


def _why_not(said: Sequence[str]) -> StartupError:
    text = " ".join(said)
    if f"[{errno.ENOEXEC}]" in text and "cannot run" in text:
        return StartupError(
            f"the network daemon is built for another kind of machine than this {platform.machine()} "
            f"({platform.system()}): {_REMEDY}."
        )
    if "address already in use" in text:
        return StartupError("the listen address is taken by another program: choose another port with --listen.")
    last = said[-1] if said else "nothing"
    return StartupError(f"the network daemon stopped at once and said: {last[:300]}")
