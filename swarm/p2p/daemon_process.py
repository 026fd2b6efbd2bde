"""The process of the daemon, p2pd: where its binary is, its private folder, its options, its start
under a guard, its output.

Nothing here imports hivemind, which would import torch: a bootstrap node runs without.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import importlib.util
import logging
import multiprocessing
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from shoal.swarm.errors import ListenError, StartupError
from shoal.swarm.p2p import daemon_guard as guard
from shoal.swarm.p2p.addresses import is_loopback

log = logging.getLogger(__name__)

Relay = Literal["auto", "only", "off"]

MAX_SOCKET_PATH_BYTES = 100
"""The system's own limit for a socket's path is 104 (macOS) or 108."""
CONNECTIONS = (256, 512)
MAX_LINE_BYTES = 1 << 16  # of output that are taken for a line
YOUNG_S = 10.0  # a younger run folder may not be locked yet
MACOS_EBADARCH = 86
_REMEDY = (
    "reinstall it with `pip install --force-reinstall hivemind==1.1.12` on Linux or macOS, "
    "or use WSL or Docker"
)


def daemon_path() -> Path:
    return hivemind_folder() / "hivemind_cli" / "p2pd"


def hivemind_folder() -> Path:
    """Return the folder of the package hivemind, without importing it. Raises StartupError."""
    found = importlib.util.find_spec("hivemind")
    if found is None or found.origin is None:
        raise StartupError(
            f"the package hivemind, which brings the network daemon, is not installed: {_REMEDY}."
        )
    return Path(found.origin).parent


class _Parts(ModuleType):
    """The package hivemind before its ``__init__`` has run, which it does when something of it is
    asked for.
    """

    def __getattr__(self, name: str) -> Any:
        metadata = name.startswith("__") and name != "__version__"
        # A module that is being imported is found there.
        loading = f"{self.__name__}.{name}" in sys.modules
        if metadata or loading or self.__spec__ is None or self.__spec__.loader is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def check_shared_memory() -> None:
    """Raise StartupError if a lock that processes share cannot be made, which takes a small file in
    /dev/shm on Linux.
    """
    try:
        multiprocessing.Lock()
    except OSError as error:
        raise StartupError(
            f"The system has no shared memory for a lock (/dev/shm: {error.strerror}): mount "
            "/dev/shm so that it can be written and has some room (docker run --shm-size 64m)."
        ) from error


@contextlib.contextmanager
def parts_of_hivemind() -> Iterator[None]:
    """Import modules of hivemind in this block without the ``__init__`` of the package, if these
    are the first of it.

    It imports all of hivemind, and with it scipy: a third of a second of a processor, where a node
    needs the DHT only. Who asks for ``hivemind.DHT`` and the like later gets it as ever.

    Raises StartupError: there is no shared memory, in which hivemind makes a lock as it is
    imported.
    """
    check_shared_memory()
    found = importlib.util.find_spec("hivemind") if "hivemind" not in sys.modules else None
    if found is not None:
        module = importlib.util.module_from_spec(found)
        module.__class__ = _Parts
        sys.modules["hivemind"] = module
    yield


def check_binary(binary: Path) -> None:
    """Raise StartupError if ``binary`` is not an executable file."""
    if not binary.is_file():
        raise StartupError(f"the network daemon is missing: there is no {binary}; {_REMEDY}.")
    if not os.access(binary, os.X_OK):
        raise StartupError(f"the network daemon is not executable: run `chmod +x {binary}`.")


def run_folder() -> tuple[Path, int]:
    """Create a private folder for a daemon's sockets; return it and a descriptor that holds its
    lock.

    The guard inherits the descriptor: as long as it lives, nobody takes the folder for a stale one.
    Folders of dead guards are removed as well. Raises StartupError when the parent folder belongs
    to someone else.
    """
    base = Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}"
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    if len(os.fsencode(base / name / "client.sock")) > MAX_SOCKET_PATH_BYTES:
        base = Path("/tmp") / base.name
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
        if base.is_symlink() or status.st_uid != os.getuid():
            raise StartupError(
                f"{base} belongs to another user: remove it, or set TMPDIR to a folder of your own."
            )
        if status.st_mode & 0o077:
            base.chmod(0o700)
        sweep(base)
        folder = base / name
        folder.mkdir(mode=0o700)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StartupError(
            f"cannot create a folder for the daemon's sockets in {base} ({error.strerror}): free "
            "some space there or set TMPDIR to a folder that you can write."
        ) from error
    return folder, lock


def sweep(base: Path) -> None:
    """Remove the run folders in ``base`` whose guard is dead. (Shown by its lock: a process id may
    be another machine's.)
    """
    for folder in base.iterdir():
        with contextlib.suppress(OSError):  # another node may be sweeping too
            if time.time() - folder.lstat().st_mtime < YOUNG_S:
                continue
            if (folder / "lock").exists():
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                finally:
                    os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)


def options(
    *,
    control: str,
    key: Path,
    listen: Sequence[str],
    announce: Sequence[str] = (),
    relays: Sequence[str] = (),
    relay: Relay = "auto",
    public: bool = False,
    light: bool = False,
    idle: str = "30s",
) -> list[str]:
    """Return the options of p2pd.

    ``relays``: full multiaddrs, one of each peer, of peers that may forward connections to a node
    that nobody can reach. ``relay``: when they do: ``auto`` once peers found that out, ``only``
    from the start, ``off`` never; with ``off`` this node does not forward for others either.
    ``public``: this node is known to be reachable, so nobody needs to find out, and its forwarding
    is not cut off. ``light``: take part in libp2p's own peer routing as a client only. ``idle``:
    time after which the daemon ends if no connection stays open; empty: never.
    """
    beyond = not all(is_loopback(address) for address in listen)
    # Relays found in the background (p2pd's -relayDiscovery) are asked for a slot after three
    # minutes only; these at once.
    helpers = relays if beyond and relay != "off" and not public else ()
    chosen = {
        "listen": control,
        "id": key,
        "hostAddrs": ",".join(listen),
        "dhtClient" if light else "dhtServer": 1,
        "autonat": int(beyond),
        # By UPnP or NAT-PMP, five seconds after the start. Not for who names an address to listen
        # on or to announce, nor for QUIC.
        "natPortMap": int(
            not announce and any(address.startswith("/ip4/0.0.0.0/tcp/") for address in listen)
        ),
        "autoRelay": int(bool(helpers)),
        "relayDiscovery": 0,
        "relay": int(relay != "off" or bool(helpers)),
        "connManager": 1,
        # More than connHi connections are cut down to connLo: the least used ones, but none younger
        # than connGrace.
        "connLo": CONNECTIONS[0],
        "connHi": CONNECTIONS[1],
        "connGrace": "20s",
        "tls": 1,
        "b": 0,  # `connections.connect_any` connects, and so learns which address failed and why
    }
    if idle:
        chosen["idleTimeout"] = idle
    if announce:
        chosen["announceAddrs"] = ",".join(announce)
    if helpers:
        chosen["trustedRelays"] = ",".join(helpers)
    if beyond and public:
        chosen["forceReachabilityPublic"] = 1
    elif helpers and relay == "only":
        chosen["forceReachabilityPrivate"] = 1
    return [f"-{name}={value}" for name, value in chosen.items()]


class GuardedProcess:
    """The guard of a daemon as a child process, whose end is noticed whoever has SIGCHLD: torch's
    loaders and Lightning take it.

    Make it on the loop that is to hear of its end, from ``popen``, whose output is a pipe.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        # A daemon thread: those of an executor are joined when Python ends.
        threading.Thread(target=self._wait, name="guard", daemon=True).start()

    def _wait(self) -> None:
        status = self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._ended.set_result, status)

    def follow(self, lines: deque[str], ready: asyncio.Future[None]) -> None:
        """Read its output and its daemon's to the end into ``lines``.

        Set ``ready`` when the daemon is up, or StartupError before.
        By a thread: uvloop and Python would each close the pipe, and by then its number may be
        another file's, of any thread.
        """
        threading.Thread(
            target=self._read, args=(lines, ready), name="p2pd output", daemon=True
        ).start()

    def _read(self, lines: deque[str], ready: asyncio.Future[None]) -> None:
        assert self._popen.stdout is not None
        closed = contextlib.suppress(RuntimeError)  # of the loop
        with self._popen.stdout as output, closed:
            for line in iter(lambda: output.readline(MAX_LINE_BYTES), b""):
                self._loop.call_soon_threadsafe(
                    _heard, line.decode(errors="replace").rstrip(), lines, ready
                )
            self._loop.call_soon_threadsafe(_fell_silent, lines, ready)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Have it end its daemon and itself."""
        self._popen.terminate()

    def kill(self) -> None:
        self._popen.kill()


def start_guarded(run_dir: Path, command: list[str], lock: int) -> GuardedProcess:
    """Start ``command`` under a guard, which holds the lock of ``run_dir``. Raises StartupError."""
    # On all processors its threads spin and wake each other: half of them move the same bytes in 15
    # % less time.
    there = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    )
    half = str(max(there // 2, 1))
    # Dialled from the port that is listened on, two peers that dial each other at once over a link
    # with a delay share one TCP connection on which both speak first: it fails, and neither dials
    # the other again for some seconds.
    defaults = {"GOMAXPROCS": half, "GOLOG_LOG_LEVEL": "error", "LIBP2P_TCP_REUSEPORT": "false"}
    env = {**defaults, **os.environ, "GOLOG_LOG_FMT": "json"}
    me = [sys.executable, "-I", "-S", guard.__file__, str(run_dir), str(os.getpid())]
    try:
        popen = subprocess.Popen(
            [*me, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=(lock,),
            start_new_session=True,
        )
        return GuardedProcess(popen)
    except OSError as error:
        raise StartupError(
            f"cannot start {sys.executable} to guard the daemon ({error.strerror})."
        ) from error


def _heard(text: str, lines: deque[str], ready: asyncio.Future[None]) -> None:
    lines.append(text)
    log.debug("p2pd: %s", text)
    if text.startswith("Peer ID:") and not ready.done():
        ready.set_result(None)


def _fell_silent(lines: Sequence[str], ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_exception(_failed_start(lines))


def _failed_start(lines: Sequence[str]) -> StartupError:
    text = " ".join(lines)
    is_foreign = any(f"[{number}]" in text for number in (errno.ENOEXEC, MACOS_EBADARCH))
    if is_foreign and "cannot run" in text:
        here = f"{platform.machine()} ({platform.system()})"
        return StartupError(
            f"the network daemon is built for another kind of machine than this {here}: {_REMEDY}."
        )
    if "address already in use" in text:
        return ListenError(
            "the listen address is taken by another program: choose another port with --listen."
        )
    last = lines[-1] if lines else "nothing"
    return StartupError(
        f"the network daemon stopped at once and said: {last[:300].rstrip('.')}; check --listen "
        "and --announce."
    )
