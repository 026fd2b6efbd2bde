"""Serving this node's slow weights as snapshots, made between two steps.

The training thread makes the copy, so no half-updated weights are served.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.optim.codecs.base import Shape
from shoal.optim.codecs.floats import FLOAT32
from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.messages import receive_message, send_message
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.state.chunk_server import MESSAGE_S, ChunkServer
from shoal.swarm.state.snapshot import Snapshot, State, encode, make, nothing
from shoal.swarm.state.snapshot_cache import SnapshotCache
from shoal.swarm.state.spool import Spool
from shoal.swarm.wire.envelope import pack_names
from shoal.swarm.wire.messages import Answer, StateHeader, StateRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

from shoal.swarm.state.offers import STATE_PROTOCOL, making_s

log = logging.getLogger(__name__)


MAX_WAITING = 64  # callers that wait
MAX_WAIT_ROUNDS = 64
"""Who wants a later one than this node's next ones would keep a place that others need."""
COPIES_IN_A_ROW = 2
"""For strangers: who is behind the others by a round is asked again at once."""
REST_PER_COPY = 20
"""Times as long as a copy took, in which strangers are made no more than `COPIES_IN_A_ROW`: their
questions take a tenth of the training thread's time at most.
"""

DIVERGED = Answer(verdict="refuse", reason="its own have drifted too", round=0)
FAR = Answer(verdict="busy", reason="it is far from that round", round=0)


class StateServer:
    """Server of this node's slow weights.

    The training thread makes the copy, so no half-updated weights are handed out.

    It holds at most two snapshots (`SnapshotCache`), each with 4 bytes for every value of the slow
    weights and of the state that the rule shares. While both are being downloaded
    (`SnapshotCache.full`), and for strangers a while after two copies, further callers get the
    later of the two rather than a new one.
    """

    def __init__(
        self,
        host: Host,
        swarm: str,
        model: str,
        shapes: Sequence[Shape],
        clock: Callable[[], float] = time.monotonic,
        names: Sequence[str] = (),
    ) -> None:
        self._host = host
        self._swarm = swarm
        self._model = model
        self._shapes = tuple(shapes)
        self._names = pack_names(names)
        self._wanted: dict[asyncio.Future[Snapshot | Answer], tuple[StateRequest, Stream]] = {}
        """Callers that wait: what each asked for, and its stream."""
        self._places = StreamPlaces(MAX_WAITING)
        self._making = False
        self._clock = clock
        # When the rest after each of the last copies is over.
        self._rests = deque([-math.inf] * COPIES_IN_A_ROW, COPIES_IN_A_ROW)
        self._resting: Callable[[], State] | None = None
        # Held while the weights are copied in a block of `at_rest`.
        self._copying = threading.Lock()
        # One thread: callers that wait for a copy would hold those that exchanges need.
        self._copier = ThreadPoolExecutor(1, "weights")
        self._last: tuple[tuple[object, ...], bytes] | None = None
        self._kept = SnapshotCache(clock)
        self.diverged: int | None = (
            None  # round of this node's own weights while they have diverged from the group's
        )
        ChunkServer(host, swarm, self._kept)
        host.serve(STATE_PROTOCOL, self._answer)

    def keep(self, state: State) -> None:
        """Serve the snapshot that this node has just fetched itself: others may be downloading
        it.
        """
        if state.snapshot is not None:
            self._kept.put(state.snapshot)

    @contextmanager
    def at_rest(self, current: Callable[[], State]) -> Iterator[None]:
        """Hand out the weights to whoever asks in this block, in which the training thread does not
        change them.

        An evaluation may take minutes, for which a newcomer would wait otherwise. A copy in
        progress delays the end of the block.
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
        """Copy the weights if a caller waits for them; the training thread calls this between
        steps.

        Diverged weights are not handed out: callers wait until they are the group's again. But two
        peers that asked each other before either had diverged must not wait for each other.
        """
        self._kept.expire()
        if self.diverged is not None:
            self._refuse_diverged()
            return
        wanted = list(self._wanted.values())
        if not wanted or self._making:
            return
        began = self._clock()
        is_for_partner = any(stream.partner for _, stream in wanted)
        if began < self._rests[0] and not is_for_partner:
            with suppress(NetworkError):  # the host is closing
                self._begin(self._hand_out(None))
            return
        state = current()
        self._turn_away_far(state.round)
        if any(request.since <= state.round for request, _ in wanted):
            self._serve(state, began)

    def _refuse_diverged(self) -> None:
        """Tell callers that must not wait for this node's weights to keep their own."""
        refused = [
            future
            for future, (request, stream) in list(self._wanted.items())
            if self._keeps_its_own(request, stream.peer_id)
        ]
        if refused:
            with suppress(NetworkError):  # the host is closing
                self._host.call(self._turn_away(refused, DIVERGED), MESSAGE_S)

    def _turn_away_far(self, round: int) -> None:
        """Tell callers that want a round far beyond ``round`` not to wait for it."""
        latest = round + MAX_WAIT_ROUNDS
        far = [
            future for future, (request, _) in list(self._wanted.items()) if request.since > latest
        ]
        if far:
            with suppress(NetworkError):  # the host is closing
                self._host.submit(self._turn_away(far, FAR))

    def _serve(self, state: State, began: float) -> None:
        """Serve ``state``; while both kept snapshots are being downloaded, the later of the two.

        ``began``: when this node began to gather it.
        """
        try:
            version = state.version()
            snapshot = self._made_of(version)
            if snapshot is not None or self._kept.full():
                self._begin(self._hand_out(snapshot))
                return
            # Copied here, for the next step changes them.
            payload = encode(state)
            if state.version() != version:
                # By who loads others within a block of `at_rest`: callers wait for the next step,
                # or caller.
                return
            now = self._clock()
            self._rests.append(now + REST_PER_COPY * (now - began))
            self._begin(self._make(state, payload, version))
        except (NetworkError, OSError) as error:  # the host is closing, or a disk has failed
            log.debug("weights are not served: %s", error)
        except Exception as error:  # training goes on, and the next caller is served again
            self._host.internal_errors.caught("weights", error)

    def _made_of(self, version: tuple[object, ...]) -> Snapshot | None:
        """Return the last snapshot if it was made of weights of ``version`` and is still kept."""
        if self._last is None or self._last[0] != version:
            return None
        return self._kept.get(self._last[1])

    def _begin(self, answering: Coroutine[Any, Any, None]) -> None:
        """Begin to answer the callers; no other copy is made before that has ended."""
        self._making = True
        try:
            self._host.submit(answering)
        except BaseException:
            self._making = False
            raise

    async def _turn_away(
        self, callers: Iterable[asyncio.Future[Snapshot | Answer]], answer: Answer
    ) -> None:
        for future in callers:
            if not future.done():
                future.set_result(answer)

    async def _make(
        self, state: State, payload: Tensor | Spool, version: tuple[object, ...]
    ) -> None:
        try:
            snapshot = await asyncio.get_running_loop().run_in_executor(
                None, make, state, payload, self._names
            )
            self._last = version, snapshot.id
            self._kept.put(snapshot)
            await self._hand_out(snapshot)
        except OSError as error:  # a full disk
            log.warning("the weights could not be copied for a peer that asked for them: %s", error)
        except Exception as error:  # nobody waits for this coroutine
            self._host.internal_errors.caught("weights", error)
        finally:
            self._making = False

    async def _hand_out(self, snapshot: Snapshot | None) -> None:
        """Answer all who wait for its round or an earlier one. None: with the latest that is
        kept.
        """
        for future, (request, _) in list(self._wanted.items()):
            found = self._kept.newest(request.since) if snapshot is None else snapshot
            if found is not None and found.header.round >= request.since:
                if not future.done():
                    future.set_result(found)
                self._wanted.pop(future, None)
        self._making = False

    def _keeps_its_own(self, request: StateRequest, peer: str) -> bool:
        """Return whether ``peer``, whose weights have diverged, must not wait for this node,
        because its own have diverged too.

        Peers that have diverged from each other must neither swap their weights nor wait in a
        circle. So each waits for those whose weights are of a later round, or of the same and whose
        peer id is lower; a peer that all others refuse keeps its own.
        """
        if not request.astray or (own := self.diverged) is None:  # which the training thread sets
            return False
        return (-request.round, peer) < (-own, self._host.peer_id)

    async def _answer(self, stream: Stream) -> None:
        request = await receive_message(stream, StateRequest, MESSAGE_S)
        await send_message(stream, await self._reply(stream, request), MESSAGE_S)

    async def _reply(self, stream: Stream, request: StateRequest) -> StateHeader | Answer:
        if request.swarm != self._swarm:
            return Answer(verdict="refuse", reason="this peer is in another swarm", round=0)
        if request.model != self._model:
            # Names and shapes in the header tell the difference, so that the newcomer's user can
            # mend it; no weights follow.
            return nothing(self._shapes, self._names)
        if self._keeps_its_own(request, stream.peer_id):
            return DIVERGED
        if not self._places.take(stream):
            return Answer(verdict="busy", reason="too many wait for this peer", round=0)
        future: asyncio.Future[Snapshot | Answer] = asyncio.get_running_loop().create_future()
        self._wanted[future] = request, stream
        seconds = making_s(FLOAT32.nbytes(self._shapes))
        try:
            # Shows that this peer is awake.
            await send_message(stream, Answer(verdict="wait", round=0), MESSAGE_S)
            if self._resting is not None:
                asyncio.get_running_loop().run_in_executor(self._copier, self._offer_at_rest)
            found = await asyncio.wait_for(future, seconds)
            return found if isinstance(found, Answer) else found.header
        except TimeoutError:
            return Answer(
                verdict="busy", reason=f"no step was finished in {seconds:.0f} s", round=0
            )
        finally:
            self._places.free(stream)
            self._wanted.pop(future, None)
