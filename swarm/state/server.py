"""Handing out this node's slow weights to newcomers and to peers that have diverged: as snapshots, made between two steps."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Shape
from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.state.download import SMALL_S, ChunkServer
from shoal.swarm.state.selection import STATE_PROTOCOL, making_s
from shoal.swarm.state.snapshot import Snapshot, SnapshotCache, Spool, State, encode, make, nothing
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.pair import Answer
from shoal.swarm.wire.state import StateHeader, StateRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host
    from shoal.swarm.p2p.stream import Stream

MAX_WAITING = 64  # callers that wait
SOON = 64  # rounds: who wants a later one than this node's next ones would keep a place that others need

DIVERGED = Answer(verdict="refuse", reason="its own have drifted too", round=0)
FAR = Answer(verdict="busy", reason="it is far from that round", round=0)

log = logging.getLogger(__name__)


async def _turn_away(callers: Iterable[asyncio.Future[Snapshot | Answer]], answer: Answer) -> None:
    for future in callers:
        if not future.done():
            future.set_result(answer)


class StateServer:
    """Server of this node's slow weights. The training thread makes the copy, so no half-updated weights are handed out.

    At most two snapshots (`SnapshotCache`), each with 4 bytes for every value of the slow weights and of the state that the rule
    shares, and none two minutes after the last request; large ones are files (`shoal.swarm.state.snapshot`). While both are being
    downloaded, further callers get the later of the
    two rather than a new one.
    """

    def __init__(
        self, host: Host, swarm: str, model: str, shapes: Sequence[Shape], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._host, self._swarm, self._model = host, swarm, model
        self._shapes = tuple(shapes)
        self._wanted: dict[asyncio.Future[Snapshot | Answer], int] = {}
        """Callers that wait, and the earliest round that each accepts."""
        self._diverged_callers: dict[asyncio.Future[Snapshot | Answer], tuple[int, str]] = {}
        """Waiting callers whose own weights have diverged: the round of these weights, and the caller."""
        self._places = StreamPlaces(MAX_WAITING)
        self._making = False
        self._resting: Callable[[], State] | None = None
        self._copying = threading.Lock()
        """Held while the weights are copied in a block of `at_rest`."""
        self._last: tuple[tuple[object, ...], bytes] | None = None
        self._kept = SnapshotCache(clock)
        self.diverged: int | None = None
        """Round of this node's own weights while they have diverged from the group's."""
        ChunkServer(host, swarm, self._kept)
        host.serve(STATE_PROTOCOL, self._answer)

    def keep(self, state: State) -> None:
        """Serve the snapshot that this node has just fetched itself: others may be downloading it."""
        if state.snapshot is not None:
            self._kept.put(state.snapshot)

    @contextmanager
    def at_rest(self, current: Callable[[], State]) -> Iterator[None]:
        """Hand out the weights to whoever asks in this block, in which the training thread does not change them.

        An evaluation may take minutes, for which a newcomer would wait otherwise. A copy in progress delays the end of the block.
        """
        self._resting = current
        try:
            self._offer_at_rest()
            yield
        finally:
            with self._copying:
                self._resting = None

    def _offer_at_rest(self) -> None:
        with self._copying:
            if self._resting is not None:
                self.offer(self._resting)

    def offer(self, current: Callable[[], State]) -> None:
        """Copy the weights if a caller waits for them; the training thread calls this between steps.

        Diverged weights are not handed out: callers wait until they are the group's again. But two peers that asked each other
        before either had diverged must not wait for each other.
        """
        self._kept.expire()
        if drifted := [future for future, asking in list(self._diverged_callers.items()) if self._keeps_its_own(*asking)]:
            self._host.call(_turn_away(drifted, DIVERGED), SMALL_S)
        if not self._wanted or self.diverged is not None or self._making:
            return
        state = current()
        wanted = list(self._wanted.items())
        if far := [future for future, since in wanted if since > state.round + SOON]:
            with suppress(NetworkError):  # the host is closing
                self._host.submit(_turn_away(far, FAR))
        if all(since > state.round for _, since in wanted):
            return
        self._making = True
        try:
            version = state.version()
            if self._last is not None and self._last[0] == version and (same := self._kept.get(self._last[1])) is not None:
                self._host.submit(self._hand_out(same))
            elif self._kept.full():
                self._host.submit(self._hand_out(None))
            else:
                self._host.submit(self._make(state, encode(state), version))  # copied here, for the next step changes them
        except (NetworkError, OSError) as error:  # the host is closing, or a disk has failed
            self._making = False
            log.debug("weights are not served: %s", error)

    async def _make(self, state: State, payload: Tensor | Spool, version: tuple[object, ...]) -> None:
        try:
            snapshot = await asyncio.get_running_loop().run_in_executor(None, make, state, payload)
        except BaseException as error:
            self._making = False
            if isinstance(error, Exception):  # nobody waits for this coroutine
                log.warning("the weights could not be copied for a peer that asked for them (%s): %s", type(error).__name__, error)
                return
            raise
        self._last = version, snapshot.id
        self._kept.put(snapshot)
        await self._hand_out(snapshot)

    async def _hand_out(self, snapshot: Snapshot | None) -> None:
        """Answer all who wait for its round or an earlier one. None: with the latest that is kept."""
        for future, since in list(self._wanted.items()):
            found = self._kept.newest(since) if snapshot is None else snapshot
            if found is not None and found.header.round >= since:
                if not future.done():
                    future.set_result(found)
                self._wanted.pop(future, None)
        self._making = False

    def _keeps_its_own(self, round: int, peer: str) -> bool:
        """Return whether ``peer``, with diverged weights of ``round``, must not wait for this node, which has diverged too.

        Peers that have diverged from each other must neither swap their weights nor wait in a circle. So each waits for those whose
        weights are of a later round, or of the same and whose peer id is lower; a peer that all others refuse keeps its own.
        """
        return self.diverged is not None and (-round, peer) < (-self.diverged, self._host.peer_id)

    async def _answer(self, stream: Stream) -> None:
        request = unpack(await stream.receive(StateRequest.LIMIT, SMALL_S), StateRequest)
        if request.swarm != self._swarm:
            await stream.send(pack(Answer(verdict="refuse", reason="this peer is in another swarm", round=0)), SMALL_S)
            return
        if request.model != self._model:
            # The shapes in the header name the difference, so that the newcomer's user can mend it; no weights follow.
            await stream.send(pack(nothing(self._shapes)), SMALL_S)
            return
        if request.astray and self._keeps_its_own(request.round, stream.peer_id):
            await stream.send(pack(DIVERGED), SMALL_S)
            return
        if not self._places.take(stream):
            await stream.send(pack(Answer(verdict="busy", reason="too many wait for this peer", round=0)), SMALL_S)
            return
        future: asyncio.Future[Snapshot | Answer] = asyncio.get_running_loop().create_future()
        self._wanted[future] = request.since
        if request.astray:
            self._diverged_callers[future] = request.round, stream.peer_id
        seconds = making_s(FLOAT32.nbytes(self._shapes))
        try:
            await stream.send(pack(Answer(verdict="wait", round=0)), SMALL_S)  # shows that this peer is awake
            if self._resting is not None:
                asyncio.get_running_loop().run_in_executor(None, self._offer_at_rest)
            found = await asyncio.wait_for(future, seconds)
            header: StateHeader | Answer = found if isinstance(found, Answer) else found.header
        except asyncio.TimeoutError:
            header = Answer(verdict="busy", reason=f"no step was finished in {seconds:.0f} s", round=0)
        finally:
            self._places.free(stream)
            self._wanted.pop(future, None)
            self._diverged_callers.pop(future, None)
        await stream.send(pack(header), SMALL_S)
