"""The newest change of the swarm's settings that a node knows: it serves it, and finds a newer one
by the directory.

Each member's record in the directory has the number of the newest change that it holds. A node that
sees a higher number than its own asks that member for the change; those that it has met come first.
So newcomers, members that were away and the two sides of a partition all get it by the reading of
the directory that they do anyway. Whoever signs a change hands it to some members, and needs to be
no member.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.swarm.changes import (
    CHANGE_PROTOCOL,
    Change,
    ChangeReply,
    ChangeRequest,
    open_change,
    rank_of,
    settings_at,
)
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.change_exchange import MESSAGE_S, asking_order, swap_change
from shoal.swarm.p2p.counters import Counters
from shoal.swarm.p2p.messages import receive_message, send_message
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.swarm.membership.directory import Directory
    from shoal.swarm.p2p.host import Host

LOOK_S = 2.0  # between two looks at the members' numbers, which use no network
# for which a member is not asked again, first and at most: while it does not serve what it states,
# the pause doubles
PAUSE_S = 60.0
MAX_PAUSE_S = 3600.0
ASKED_AT_ONCE = 3  # members asked at a time
MAX_ASKED = 1024

log = logging.getLogger(__name__)


class ChangeKeeper:
    """The newest change of ``swarm`` that this node holds.

    All but the serving and looking is for any thread.

    ``clock``: seconds; a simulation has its own.
    """

    def __init__(
        self,
        host: Host,
        directory: Directory,
        swarm: str,
        manifest: Manifest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._directory = directory
        self._swarm = swarm
        self._manifest = manifest
        self._clock = clock
        self._lock = threading.Lock()
        self._change: Change | None = None
        self._sealed = b""
        self._due = Newest[str, tuple[float, float]](MAX_ASKED)
        """Peer -> when it may be asked again, and the pause until then."""
        self.counters = Counters()
        """Changes that were refused, by reason."""
        directory.own_record.change = lambda: self.number
        host.serve(CHANGE_PROTOCOL, self._answer)
        self._running = host.submit(self._run())

    @property
    def number(self) -> int:
        """Number of the newest change; 0: nothing was changed."""
        with self._lock:
            return 0 if self._change is None else self._change.number

    @property
    def newest(self) -> Change | None:
        with self._lock:
            return self._change

    @property
    def sealed(self) -> bytes:
        """The newest change as its creator signed it, for a checkpoint; empty: nothing was
        changed.
        """
        with self._lock:
            return self._sealed

    def settings_at(self, round: int) -> TrainSettings:
        """Return the swarm's settings of training in ``round``; those of the manifest itself if
        nothing was changed.
        """
        return settings_at(self.newest, self._manifest.train, round)

    def take(self, sealed: bytes) -> bool:
        """Keep a change if it is newer than the one that this node has; return whether it is.

        MessageError: it is not valid.
        """
        change = open_change(sealed, self._swarm, self._manifest.creator)
        with self._lock:
            if rank_of(change, sealed) <= rank_of(self._change, self._sealed):
                return False
            self._change = change
            self._sealed = sealed
        self._directory.renew()  # its number, by which others find it
        return True

    def fetch(self, timeout: float) -> None:
        """Ask the members that hold a newer change, if any are known, for at most ``timeout``
        seconds.
        """
        with contextlib.suppress(NetworkError):
            self._host.call(self._look(), timeout)

    def close(self) -> None:
        self._running.cancel()

    # -- on the host's loop ------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except Exception as error:  # a bug must not keep this node from later changes
                self._host.internal_errors.caught("directory", error)

    async def _look(self) -> None:
        """Ask some of the members whose number is higher than this node's."""
        now = self._clock()
        own = self.number
        ahead = []
        for member in self._directory.members().values():
            due, _ = self._due.get(member.peer, (now, 0.0))
            if member.change > own and now >= due:
                ahead.append(member)
        asked = asking_order(ahead, self._host.met)[:ASKED_AT_ONCE]
        for member in asked:
            _, last_pause = self._due.get(member.peer, (now, 0.0))
            pause = min(max(2 * last_pause, PAUSE_S), MAX_PAUSE_S)
            self._due[member.peer] = now + pause, pause
        await asyncio.gather(*(self._ask(member) for member in asked))

    async def _ask(self, member: Member) -> None:
        try:
            reply = await swap_change(self._host, member.peer, member.addresses, self._swarm, b"")
            if reply.change:
                self.take(reply.change)
        except (NetworkError, MessageError) as error:
            if isinstance(error, MessageError):
                self.counters.reject(error.reason)
            log.info("peer %s served no change of the settings: %s", short(member.peer), error)
        if self.number >= member.change:
            self._due.pop(member.peer, None)

    async def _answer(self, stream: Stream) -> None:
        request = await receive_message(stream, ChangeRequest, MESSAGE_S)
        reason = ""
        if request.swarm != self._swarm:
            refusal = ChangeReply(reason=f"this peer belongs to swarm {self._swarm}")
            await send_message(stream, refusal, MESSAGE_S)
            return
        if request.change:
            try:
                if not self.take(request.change) and request.change != self.sealed:
                    reason = "this peer has a newer change of the settings"
            except MessageError as error:
                self.counters.reject(error.reason)
                reason = str(error)
        await send_message(stream, ChangeReply(change=self.sealed, reason=reason), MESSAGE_S)
