"""Sources of events: the swarm itself, or a recording.

Each runs in a thread of its own until it is stopped.

The light client of a swarm, on libp2p's daemon, listens to the gossip of the nodes to which it is
connected: statuses and receipts; it publishes nothing. Like a bootstrap node it needs neither torch
nor hivemind's Python, only the daemon in hivemind's wheel. It dials the link's addresses first,
asks a bootstrap node among them for members, and keeps connections to a few nodes, whose addresses
it learns from their statuses; so it continues when the first peers are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import queue
import random
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from io import FileIO
from itertools import accumulate, islice
from pathlib import Path
from typing import Generic, TypeVar, cast

from shoal.node.lost_output import is_lost
from shoal.node.watch.events import (
    MAX_LINE,
    BootstrapNode,
    Changed,
    Connected,
    Described,
    Disconnected,
    Event,
    Heard,
    MessageRefused,
    Signed,
    Unreachable,
    WatchError,
    Watching,
    event_of,
    line_of,
)
from shoal.node.watch.swarm_view import SwarmView
from shoal.swarm.access.address import address_problem
from shoal.swarm.access.link import Link
from shoal.swarm.changes import CHANGE_PROTOCOL, ChangeReply, ChangeRequest, open_change, rank_of
from shoal.swarm.errors import MessageError, NetworkError, ShoalError, write_remedy
from shoal.swarm.gossip import envelope
from shoal.swarm.gossip.frames import GossipTopics, greet, receive_frame, split_frame, topic_of
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import MANIFEST_PROTOCOL, creator_of, title_of
from shoal.swarm.membership.manifest_exchange import ASK_AGAIN_S, ManifestSearch
from shoal.swarm.p2p import connections
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon, DaemonError, PutOffError
from shoal.swarm.p2p.dial_backoff import DialBackoff
from shoal.swarm.p2p.messages import ask
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.p2p.seed_request import ask_seed
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.topics.receipts import Receipts
from shoal.swarm.topics.status import Status, check_date
from shoal.swarm.wire.messages import GOSSIP_PROTOCOL, SEED_PROTOCOL
from shoal.swarm.wire.record import GONE

# seconds (libp2p itself puts a dial off for 5) before the same peer is dialled again, doubled with
# each failure
AGAIN_S = 6.0
AGAIN_MAX_S = 60.0
MOST_FAILURES = 30  # failures that are counted
MAX_KNOWN = 1024  # peers whose addresses are kept


class PeerAddresses:
    """Addresses by peer, bounded, and when each peer may be dialled again."""

    def __init__(self) -> None:
        self._known = Newest[str, tuple[str, ...]](MAX_KNOWN)
        self._tried = Newest[str, tuple[int, float]](
            MAX_KNOWN
        )  # failures since it was reached, and when it may be dialled again

    def learn(self, peer: str, addresses: Iterable[str]) -> None:
        usable = tuple(
            a for a in addresses if address_problem(a) is None and a.endswith(f"/p2p/{peer}")
        )
        if usable:
            self._known[peer] = usable

    def addresses(self, peer: str) -> tuple[str, ...]:
        return self._known.get(peer, ())

    def tried(self, peer: str, now: float, *, reached: bool) -> None:
        failures = 0 if reached else min(self._tried.get(peer, (0, 0.0))[0] + 1, MOST_FAILURES)
        self._tried[peer] = failures, now + min(AGAIN_S * 2.0 ** (failures - 1), AGAIN_MAX_S)

    def due(self, now: float, but: Iterable[str]) -> list[str]:
        """Return the peers that may be dialled now, those that failed least first."""
        tried = {peer: self._tried.get(peer, (0, 0.0)) for peer in self._known.keys() - set(but)}
        found = [peer for peer, (_, after) in tried.items() if after <= now]
        random.shuffle(found)
        return sorted(found, key=lambda peer: tried[peer][0])


# Filter of a watcher: statuses (and receipts) of its swarm, signed by their authors, newer than the
# last, and not too many.

QUOTA = RateLimit(
    messages=300, nbytes=4 << 20, senders=4096
)  # a minute for each author; nodes send 120 at most
OF_NODE = RateLimit(messages=6000, nbytes=64 << 20)  # a minute for each node that is listened to
REPEATED = 8192  # messages that are recognised when another node sends them too
MAX_PEERS = 4096  # peers whose last status is known

R = TypeVar("R", Status, Receipts)


class RecordFilter(Generic[R]):
    """Filter of the topic of ``kind`` of ``swarm``. Not for several threads at once."""

    def __init__(self, kind: type[R], swarm: str, clock: Callable[[], float] = time.time) -> None:
        self._kind: type[R] = kind
        self._swarm = swarm
        self._clock = clock
        self._quotas = TokenBuckets(QUOTA, clock)
        self._issued = Newest[str, float](MAX_PEERS)
        self._room = envelope.room_for(kind)

    def open(self, data: bytes) -> R:
        """Return the record in ``data``. Raises MessageError, with the reason in one word."""
        sent = envelope.open_envelope(data, self._swarm, self._room)
        record = envelope.open_body(sent.encoding, sent.size, sent.body, self._kind).message
        assert isinstance(record, Status | Receipts)
        what = record.KIND
        if record.swarm != self._swarm:
            raise MessageError(f"A {what} of another swarm was refused.", "foreign-swarm")
        check_date(record.issued, what, self._clock())
        if record.issued <= self._issued.get(record.peer, 0.0):
            raise MessageError(f"A {what} was refused: a newer one was there before.", "replayed")
        if not self._quotas.take(record.peer, 1, len(data)):
            raise MessageError(
                "A message was refused: its author sent too many, or too large ones.", "quota"
            )
        self._issued[record.peer] = record.issued
        return cast(R, record)


log = logging.getLogger(__name__)

LISTEN = ("/ip4/127.0.0.1/tcp/0",)  # nobody calls a watcher
WANTED = 4  # connections to keep
DIAL_S = 5.0  # seconds for one attempt to connect
ASK_S = 5.0  # seconds for one question and its answer
LOOK_S = 0.25  # seconds between two looks at the connections
CHANGE_S = 10.0  # seconds between two questions for changes of the settings
# seconds before a stream of gossip that ended is opened again, doubled with each failure
LISTEN_AGAIN_S = 1.0
LISTEN_AGAIN_MAX_S = 30.0
DESCRIBED_S = 2.0  # seconds to learn what the swarm is like before statuses are taken
RESTART_S = 1.0  # seconds before a daemon that ended is started again


class LightClient:
    """Watcher of the swarm of ``link``, which passes every event to ``send``, on the loop that runs
    `run`.
    """

    def __init__(self, link: Link, send: Callable[[Event], None]) -> None:
        self._link = link
        self._send = send
        self._gate = RecordFilter(Status, link.swarm)
        self._receipts = RecordFilter(Receipts, link.swarm)
        self._takers: dict[str, Callable[[bytes], None]] = {
            topic_of(Status): self._take,
            topic_of(Receipts): self._confirm,
        }
        self._heard = Newest[bytes, None](REPEATED)
        self._of_node = TokenBuckets(OF_NODE)
        self._book = PeerAddresses()
        for address in link.bootstrap:
            peer = address.rpartition("/p2p/")[2]
            self._book.learn(peer, (*self._book.addresses(peer), address))
        self._traffic = TrafficMeter()
        self._connected: set[str] = set()
        self._listened_to: set[str] = set()
        self._dialling: set[str] = set()
        # Of the swarm, once it is described.
        self._described = asyncio.Event()
        self._creator: str | None = None
        self._bootstrap = {address.rpartition("/p2p/")[2] for address in link.bootstrap}
        self._change_rank = rank_of(None, b"")

    async def run(self) -> None:
        """Watch until cancelled; a daemon that ends is started again. Raises StartupError."""
        self._send(Watching(time=time.time(), swarm=self._link.swarm))
        while True:
            daemon = await Daemon.launch(
                Identity.ephemeral(), listen=LISTEN, light=True, idle=""
            )  # no connection to it stays open
            daemon.backoff = DialBackoff(self._link.bootstrap)
            try:
                async with asyncio.TaskGroup() as self._tasks:  # the first that fails ends all
                    self._tasks.create_task(self._keep_connected(daemon))
                    self._tasks.create_task(self._follow_settings(daemon))
            except* (TimeoutError, *DAEMON_GONE, NetworkError) as errors:
                log.warning("the network daemon stopped (%r); restarting it", errors.exceptions[0])
            finally:
                await daemon.shutdown()
            self._note_connections(daemon, set())
            await asyncio.sleep(RESTART_S)

    async def _listen(self, daemon: Daemon, peer: str) -> None:
        """Hear what a node passes on, for as long as it is connected, by whichever connection.

        One that has just started has no gossip yet; a bootstrap node never has any.
        """
        if peer in self._listened_to:
            return
        self._listened_to.add(peer)
        pause = LISTEN_AGAIN_S
        try:
            with contextlib.suppress(TimeoutError):  # how many exchanges make a round of a status
                async with asyncio.timeout(DESCRIBED_S):
                    await self._described.wait()
            while peer in self._connected:
                try:
                    stream = await self._open(daemon, peer, GOSSIP_PROTOCOL)
                    with contextlib.closing(stream):
                        pause = LISTEN_AGAIN_S
                        await self._hear(peer, stream)
                except (TimeoutError, *DAEMON_GONE, NetworkError, MessageError) as error:
                    log.debug("listening to %s ended: %r", peer, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LISTEN_AGAIN_MAX_S)
        finally:
            self._listened_to.discard(peer)

    async def _hear(self, peer: str, stream: Stream) -> None:
        """Raise NetworkError when the stream ends, or MessageError."""
        told = GossipTopics(swarm=self._link.swarm, topics=tuple(self._takers))
        told = await greet(stream, told)
        while True:
            told, topic, data = split_frame(await receive_frame(stream), told)
            taker = self._takers.get(topic)
            digest = hashlib.sha256(data).digest()
            if taker is None or digest in self._heard:
                continue
            self._heard[digest] = None
            try:
                if not self._of_node.take(peer, 1, len(data)):
                    raise MessageError("A message was refused: its node sent too many.", "quota")
                taker(data)
            except MessageError as error:
                log.debug("%s", error)
                self._send(MessageRefused(time=time.time(), reason=error.reason))

    def _confirm(self, data: bytes) -> None:
        receipts = self._receipts.open(data)
        self._send(Signed(time=time.time(), peer=receipts.peer, receipts=receipts))

    def _take(self, data: bytes) -> None:
        status = self._gate.open(data)
        if status.progress.state not in GONE:
            self._book.learn(status.peer, status.addresses)
        self._send(Heard(time=time.time(), peer=status.peer, status=status))

    async def _keep_connected(self, daemon: Daemon) -> None:
        now = asyncio.get_running_loop().time
        while True:
            # Not `wait_for`, which swallows that it is cancelled where an answer has just come
            # (Python 3.11): the loop would go on for ever.
            async with asyncio.timeout(ASK_S):
                here = set(await daemon.peers())
            self._note_connections(daemon, here)
            busy = here | self._dialling
            for peer in self._book.due(now(), busy)[: max(WANTED - len(busy), 0)]:
                self._dialling.add(peer)
                self._tasks.create_task(self._dial(daemon, peer))
            await asyncio.sleep(LOOK_S)

    def _note_connections(self, daemon: Daemon, here: set[str]) -> None:
        for peer in self._connected - here:
            self._send(Disconnected(time=time.time(), peer=peer))
        new = here - self._connected
        for peer in new:
            self._send(Connected(time=time.time(), peer=peer))
        self._connected = here
        for peer in new:
            if peer in self._bootstrap:
                self._tasks.create_task(self._ask_seed(daemon, peer))
            self._tasks.create_task(self._listen(daemon, peer))

    async def _dial(self, daemon: Daemon, peer: str) -> None:
        addresses = self._book.addresses(peer)
        reached = False
        why = ""
        try:
            async with asyncio.timeout(DIAL_S):
                await daemon.connect(peer, addresses)
            reached = True
        except PutOffError:
            log.debug("%s is not dialled: its host failed under other names", peer)
        except (DaemonError, ValueError) as error:
            why = connections.why(error, addresses[0])
        except TimeoutError:
            why = f"did not answer within {DIAL_S:g} s"
        except (OSError, EOFError) as error:  # the daemon is gone, which `_listen` sees too
            log.debug("dialling %s ended: %r", peer, error)
        finally:
            self._dialling.discard(peer)
        self._book.tried(peer, asyncio.get_running_loop().time(), reached=reached)
        if why:
            self._send(Unreachable(time=time.time(), peer=peer, reason=why))

    async def _ask_seed(self, daemon: Daemon, peer: str) -> None:
        """Ask a peer of the link for members, if it is a bootstrap node: again and again until
        the swarm is described.
        """
        pause = ASK_AGAIN_S
        while peer in self._connected:
            try:
                with contextlib.closing(await self._open(daemon, peer, SEED_PROTOCOL)) as stream:
                    members = await ask_seed(stream, self._link.swarm)
            except (TimeoutError, *DAEMON_GONE, NetworkError, MessageError) as error:
                log.debug("asking %s for members failed: %r", peer, error)
            else:
                self._send(BootstrapNode(time=time.time(), peer=peer))
                for member in members:
                    self._book.learn(member.peer, member.addresses)
                return
            if self._creator is not None:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, CHANGE_S)

    async def _open(self, daemon: Daemon, peer: str, protocol: str) -> Stream:
        async with asyncio.timeout(ASK_S):
            ends = await daemon.open(peer, protocol)
        return Stream(peer, *ends, self._traffic)

    async def _follow_settings(self, daemon: Daemon) -> None:
        """Have the swarm described, then ask one of the connected peers now and then for changes,
        of which all members hold the newest.
        """
        creator = self._creator or await self._describe(daemon)
        self._creator = creator
        self._described.set()
        while True:
            await asyncio.sleep(CHANGE_S)
            if not self._connected:
                continue
            peer = random.choice(sorted(self._connected))
            try:
                await self._ask_for_change(daemon, peer, creator)
            except (TimeoutError, *DAEMON_GONE, NetworkError, MessageError) as error:
                log.debug("asking %s for changes failed: %r", peer, error)

    async def _describe(self, daemon: Daemon) -> str:
        """Ask the connected peers for the manifest until one serves it, and send what it says of
        the swarm; return the swarm's creator.
        """
        while True:
            search = ManifestSearch(
                self._link.swarm,
                lambda: self._connected,
                lambda peer: self._open(daemon, peer, MANIFEST_PROTOCOL),
            )
            try:
                sealed = await search.run()
                creator = creator_of(sealed)
                title = title_of(sealed)
            except MessageError as error:  # others may connect that belong to this swarm
                log.debug("no manifest yet: %s", error)
                await asyncio.sleep(CHANGE_S)
                continue
            self._send(Described(time=time.time(), **title._asdict()))
            return creator

    async def _ask_for_change(self, daemon: Daemon, peer: str, creator: str) -> None:
        with contextlib.closing(await self._open(daemon, peer, CHANGE_PROTOCOL)) as stream:
            reply = await ask(stream, ChangeRequest(swarm=self._link.swarm), ChangeReply, ASK_S)
        if not reply.change:
            return
        change = open_change(reply.change, self._link.swarm, creator)
        rank = rank_of(change, reply.change)
        if rank > self._change_rank:
            self._change_rank = rank
            self._send(Changed(time=time.time(), parts=change.parts))


PAUSE_MAX = 10.0  # longest pause of a replay, in seconds


class Recorder:
    """Writer of events to a new file; each line has left the process when `take` returns.

    Raises WatchError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: FileIO = path.open("xb", buffering=0)
        except FileExistsError:
            raise WatchError(
                f"{str(path)!r} exists already: name a new file, or move it away."
            ) from None
        except OSError as error:
            raise self._error(error) from None

    def take(self, event: Event) -> None:
        data = memoryview(line_of(event).encode() + b"\n")
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            raise self._error(error) from None

    def close(self) -> None:
        self._file.close()

    def _error(self, error: OSError) -> WatchError:
        return WatchError(
            f"Cannot record to {str(self._path)!r} ({error.strerror}): "
            f"{write_remedy(error)} or name another file."
        )


def recorded(path: Path) -> Iterator[Event]:
    """Yield the events in a recording, in order, without a last line that was cut short (by a
    kill). Raises WatchError.
    """
    try:
        with path.open("r", encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 2), ""), 1):
                if not line.endswith("\n") and len(line) <= MAX_LINE:
                    return
                yield event_of(line.rstrip("\n"), f"line {number} of {str(path)!r}")
    except OSError as error:
        raise WatchError(
            f"Cannot replay {str(path)!r} ({error.strerror}): give a file that --record wrote."
        ) from None


def replay(
    path: Path, send: Callable[[Event], None], wait: Callable[[float], bool], speed: float = 1.0
) -> None:
    """Send the events of a recording with their pauses, ``speed`` times as fast (0: without
    pauses).

    ``wait(seconds)`` returns True if the replay is to end. Raises WatchError.
    """
    before: float | None = None
    for event in recorded(path):
        pause = min(max(event.time - before, 0.0), PAUSE_MAX) if before is not None else 0.0
        if speed > 0 and pause > 0 and wait(pause / speed):
            return
        before = event.time
        send(event)


# A recording as a whole, of which the view at any time can be asked for.

MAX_EVENTS = 500_000  # a longer recording has its slider over the first ones
KEPT_EACH = 5_000  # events after which a copy of the view is kept, so that going back is quick too


class Timeline:
    """The events in ``path``, read now. Not for several threads at once. Raises WatchError."""

    def __init__(self, path: Path) -> None:
        self._events = list(islice(recorded(path), MAX_EVENTS))
        self._times = list(accumulate((event.time for event in self._events), max))
        self._kept: dict[int, SwarmView] = {0: SwarmView()}
        self._at = 0
        self._view = SwarmView()
        self.span = (self._times[0], self._times[-1]) if self._times else (0.0, 0.0)
        """Unix times of the first and the last event; two zeros if there is none."""

    def view_at(self, time: float) -> tuple[SwarmView, bool]:
        """Return the view of all events up to ``time``, valid until the next call, and whether
        these are all.
        """
        wanted = bisect_right(self._times, time)
        near = max(number for number in self._kept if number <= wanted)
        if not near <= self._at <= wanted:
            self._at = near
            self._view = deepcopy(self._kept[near])
        while self._at < wanted:
            self._view.take(self._events[self._at])
            self._at += 1
            if self._at % KEPT_EACH == 0 and self._at not in self._kept:
                self._kept[self._at] = deepcopy(self._view)
        return self._view, wanted == len(self._events)


END_S = 2.0  # seconds

Send = Callable[[Event], None]


class EventSource(threading.Thread):
    """Source of events: a thread that does ``work``, which returns soon after its argument is
    set.
    """

    def __init__(self, work: Callable[[threading.Event], None]) -> None:
        super().__init__(name="watch", daemon=True)
        self.ended = threading.Event()
        """Set when there will be no more."""
        self._work = work
        self._stopped = threading.Event()
        self._error: BaseException | None = None

    def stop(self) -> None:
        """End, and wait `END_S` at most for the network daemon, which ends with this process in any
        case.
        """
        self._stopped.set()
        if self.is_alive():
            self.join(END_S)

    def check(self) -> None:
        """Raise the error with which it ended, if it ended with one."""
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        try:
            self._work(self._stopped)
        except BaseExceptionGroup as errors:  # of several tasks, such as one that could not record
            said = errors.subgroup(ShoalError)
            self._error = errors if said is None else said.exceptions[0]
        except BaseException as error:
            self._error = error
        finally:
            self.ended.set()


def replayed(path: Path, speed: float, send: Send) -> EventSource:
    """Return the source that replays the recording in ``path``, ``speed`` times as fast (0: at
    once).
    """
    return EventSource(lambda stopped: replay(path, send, stopped.wait, speed))


def live(link: Link, send: Send) -> EventSource:
    """Return the source of what happens in the swarm of ``link``."""

    async def until(stopped: threading.Event) -> None:
        watching = asyncio.ensure_future(LightClient(link, send).run())
        while not stopped.is_set() and not watching.done():
            await asyncio.sleep(0.05)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    return EventSource(lambda stopped: asyncio.run(until(stopped)))


READ_S = 0.1


def event_sink(
    inbox: queue.Queue[Event], recorder: Recorder | None, *, drop: bool
) -> Callable[[Event], None]:
    """Return the function that records and queues a source's events.

    If the queue is full the oldest event goes, or with ``drop``
    False (a replay) the source waits.
    """

    def send(event: Event) -> None:
        if recorder is not None:
            recorder.take(event)
        if not drop:
            inbox.put(event)
            return
        while True:
            try:
                inbox.put_nowait(event)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    inbox.get_nowait()

    return send


def print_lines(inbox: queue.Queue[Event], source: EventSource, seconds: float | None) -> None:
    """Print events until the source ends and all are printed, time is up, or nobody reads them."""
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        ended = source.ended.is_set()
        try:
            event = inbox.get(timeout=READ_S)
        except queue.Empty:
            if ended:
                return
            continue
        sys.stdout.write(line_of(event) + "\n")
        sys.stdout.flush()
        if is_lost(sys.stdout):
            return
