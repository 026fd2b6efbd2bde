"""The settings, link and ends of one run, and the network that it is to have.

Loads nothing that trains.

Of Ctrl-C, SIGTERM and the end of the terminal the first asks for an orderly end, a second one ends
the process at once. A closed terminal sends SIGHUP, often twice, and every write to it fails from
then on. So SIGHUP only ever asks, and what would be written there is dropped. Who started the
process with ``nohup`` wants none of that, and SIGHUP stays ignored.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from shoal.node.checkpoint.folder import steps
from shoal.node.config.links import KNOWN_PEERS, LINK, read_link
from shoal.node.config.peers import peer_lists
from shoal.node.config.settings import Settings
from shoal.node.exit_code import ExitCode
from shoal.node.runtime.display import Display
from shoal.node.training.resources import shares
from shoal.swarm.access.link import Link
from shoal.swarm.errors import LinkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership.membership import NetworkOptions

if TYPE_CHECKING:
    from shoal.node.parallel.node_ranks import NodeRanks

# The start of a node that was running a moment ago: its launcher starts it again after one of its
# ranks died.


def again(settings: Settings, link: Link | None) -> tuple[Settings, Link | None]:
    """Return settings and link by which the node goes on in its swarm: from its checkpoint if it
    has saved one.

    A node that created the swarm and has not saved yet joins it by its own link, since a second
    swarm would leave the others alone.
    """
    folder = settings.node.run_folder
    own = Identity.load_or_create(settings.node.identity_path).peer_id
    if steps(folder):
        node = settings.node.model_copy(update={"resume": True, "resume_from": None})
        return settings.model_copy(update={"node": node}), link
    return settings, link or _own_link(folder, own)


def _own_link(folder: Path, own: str) -> Link | None:
    """Return the link in ``folder`` without the address of peer ``own``; None if it names nobody
    else.
    """
    try:
        link = read_link(
            str(json.loads((folder / LINK).read_text(encoding="utf-8"))["link"]), folder
        )
        return Link(
            link.swarm,
            tuple(address for address in link.bootstrap if not address.endswith(f"/{own}")),
            link.invite,
        )
    except (OSError, ValueError, KeyError, TypeError, LinkError):
        return None


def handle_all(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle SIGINT, SIGTERM and SIGHUP by ``handler`` from now on; for the main thread."""
    terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]

    def hung_up(number: int, frame: FrameType | None) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in terminals:
            os.dup2(null, fd)
        os.close(null)
        handler(number, frame)

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hung_up)


class ShutdownSignals:
    """The handler of SIGINT, SIGTERM and SIGHUP; ``requested`` is True once one of them came.

    Until ``orderly`` is called there is nothing to drain, and the first signal raises
    KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested = False
        self._orderly: Callable[[], None] | None = None

    def install(self) -> None:
        """Handle the signals from now on; for the main thread."""
        handle_all(self._handle)

    def orderly(self, on_request: Callable[[], None]) -> None:
        """Call ``on_request`` at the first signal from now on, in the signal handler: it must be
        short.
        """
        self._orderly = on_request

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGHUP:
                return
            # The guard ends the daemon and removes its sockets when this process is gone.
            os._exit(ExitCode.INTERRUPTED)
        self.requested = True
        if self._orderly is None:
            raise KeyboardInterrupt
        self._orderly()


def end_with_parent(parent: int, poll_s: float = 0.5) -> None:
    """End this process at once when ``parent`` is no longer its parent: a demo that was killed
    leaves no nodes.
    """

    def watch() -> None:
        never = threading.Event()
        while os.getppid() == parent:
            never.wait(poll_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="shoal-parent-watch", daemon=True).start()


def network(settings: Settings) -> NetworkOptions:
    """Return the network options of the settings; the node also tries the peers that it met in an
    earlier run.
    """
    node = settings.node
    access = peer_lists(settings.peers.allow, settings.peers.deny)
    return NetworkOptions(
        listen=tuple(node.listen),
        announce=tuple(node.announce),
        bootstrap=tuple(node.bootstrap),
        relay=node.relay,
        known=node.run_folder / KNOWN_PEERS,
        allow=tuple(sorted(access.allow)),
        deny=tuple(sorted(access.deny)),
        upload=node.upload,
        body_store=shares(node.ram)[1],
    )


METRICS = "metrics.jsonl"
LOG = "node.log"


@dataclass
class RunOptions:
    """Settings of a run, and what it reports to. ``link`` None: it creates a swarm."""

    settings: Settings
    link: Link | None
    display: Display
    shutdown: ShutdownSignals
    on_link: Callable[[Link], None] = lambda link: None
    """Called with the join link as soon as others can use it."""
    baseline: bool = False
    """Train the same once more, by the same method and without partners, to compare."""
    keep_rounds: bool = False
    """Keep the slow weights of every round in files."""
    ranks: NodeRanks | None = None
    """Set if this process is rank 0 of several, which do all that is not training."""

    @property
    def folder(self) -> Path:
        return self.settings.node.run_folder
