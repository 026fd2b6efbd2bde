"""A node's status for watchers: its newest rounds, with whom, how fast, and what went wrong.

Nothing depends on it.

Training only notes numbers here; building, signing and sending a status is done on the network's
thread, after a round, and regularly while one lasts. Nodes do not use each other's statuses: they
take part in the topic to check them and pass them on. All nodes together send at most some
`PER_SECOND` statuses a second however many they are, which bounds what each has to check.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic

from pydantic import Field

from shoal.swarm.errors import MessageError
from shoal.swarm.figures import amount
from shoal.swarm.gossip.gossip import Gossip, Handler
from shoal.swarm.membership.membership import SHOAL_VERSION, Membership
from shoal.swarm.p2p.addresses import range_met
from shoal.swarm.topics.receipts import Receipts, Work
from shoal.swarm.topics.tally import NAME, Tally
from shoal.swarm.wire.envelope import (
    KIB,
    MAX_REAL,
    Address,
    Count,
    Label,
    M,
    Message,
    Moment,
    PeerId,
    Real,
    SwarmId,
    real,
)
from shoal.swarm.wire.record import NodeRecord, Round

# Rounds in one status, so that a watcher who misses some still sees every round.
ROUNDS = 6
ADDRESSES = 4
# Statuses of all nodes together, about: in a larger swarm each sends fewer.
PER_SECOND = 10.0
# Sums in a projection.
PROJECTED = 16

Projection = tuple[
    Count,
    Real,
    Annotated[tuple[Real, ...], Field(min_length=PROJECTED, max_length=PROJECTED)],
]
"""The number of an exchange, and of the slow weights after it the norm and a random projection
(`shoal.optim.outer.weights`)."""


def lag_label(lag_steps: int, auto: bool, late: int) -> str:
    """Return the inner steps that training goes on during an exchange, for people; - where it waits
    for each.
    """
    if not lag_steps:
        return "-"
    chosen = " auto" if auto else ""
    return f"{lag_steps}{chosen}" + (f", {late} late" if late else "")


def tokens_label(tokens_per_s: float, mfu: float | None) -> str:
    """Return tokens a second without waiting, and the share of the GPU's peak where it is known,
    for people.
    """
    if not tokens_per_s:
        return "-"
    return f"{tokens_per_s:,.0f}" + ("" if mfu is None else f" ({100 * mfu:.0f} % MFU)")


def reach_label(reach: str, bytes_per_s: float) -> str:
    """Return how a node is reached, and what its exchanges move, for people."""
    return reach + (f", {amount(bytes_per_s, 'B/s')}" if bytes_per_s else "")


class Status(Message, NodeRecord):
    """A node's record now, and its newest rounds, oldest first; ``issued`` in Unix seconds.

    ``progress.swarm_size`` is said only where the author sees one bucket of the swarm, and
    ``progress.members`` never.
    """

    KIND = "status"
    VERSION = 2
    LIMIT = 8 * KIB
    AUTHOR = "peer"
    swarm: SwarmId
    peer: PeerId
    name: Label
    addresses: Annotated[tuple[Address, ...], Field(max_length=ADDRESSES)]
    version: Label
    issued: Moment
    rounds: Annotated[tuple[Round, ...], Field(max_length=ROUNDS)] = ()
    projection: Projection | None = None


OLD_S = 600.0
"""By which a record may be off the clock of a watcher, or of a node that passes it on: clocks
differ, but last week's swarm must not be shown."""


def check_date(issued: float, what: str, now: float) -> None:
    """Raise MessageError if a record of the kind ``what`` is of another time."""
    if abs(issued - now) > OLD_S:
        raise MessageError(
            f"A {what} was refused: it is ten minutes old, or a clock is wrong.", "old"
        )


GAP_S = 0.5  # seconds between two statuses of a node, at least
BEAT_S = 1.0  # seconds after which a node sends its status again, though no round has ended
RECEIPTS_S = 5.0  # seconds between two records of receipts of a node
SAVE_S = 30.0  # seconds between two writings of the tally
LAST_S = 1.0  # seconds that a node's last receipts have to leave


class RecordPublisher(Generic[M]):
    """A publisher of the records of ``kind`` that ``make`` returns, until `close`.

    ``make`` is called on the host's loop, so it must not wait; ``members`` returns the number of
    nodes in the swarm, as far as known. ``handler``: as of `Gossip.join`. ``beat``: seconds between
    two records where nothing happens.
    """

    def __init__(
        self,
        gossip: Gossip,
        kind: type[M],
        make: Callable[[], M | None],
        members: Callable[[], int],
        handler: Handler[M] | None = None,
        beat: float = BEAT_S,
    ) -> None:
        self._make = make
        self._members = members
        self._beat = beat
        self.topic = gossip.join(kind, handler)
        self._errors = gossip.host.internal_errors
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._running = gossip.host.submit(self._run())

    def hint(self) -> None:
        """Send a record soon, because something happened. For any thread; never waits."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        self._running.cancel()
        self.topic.close()

    def gaps(self) -> tuple[float, float]:
        share = max(self._members(), 1) / PER_SECOND
        return max(GAP_S, share), max(self._beat, share)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        while True:
            least, most = self.gaps()
            await asyncio.sleep(least)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), most - least)
            self._changed.clear()
            self._publish()

    def _publish(self) -> None:
        try:
            record = self._make()
            if record is not None:
                self.topic.publish(record)
        except Exception as error:  # else no later one would be sent either, and nobody would know
            self._errors.caught("status", error)


HELD_S = 2 * GAP_S  # seconds for which a projection is in the statuses, unless a better one comes


class StatusReporter:
    """A reporter of this node's status, and of what it took from others, from now until `close`.

    For any thread.

    ``folder``: where the tally of what others confirm is kept; None: nowhere.
    """

    def __init__(
        self,
        membership: Membership,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        folder: Path | None = None,
    ) -> None:
        self._membership = membership
        self._name = name
        self._clock = clock
        self.tally = Tally(
            membership.host.peer_id, membership.swarm, None if folder is None else folder / NAME
        )
        self._saved = clock()
        self._saver = threading.Thread()
        self._projected = 0.0
        self._lock = threading.Lock()
        self._record = NodeRecord()
        self._doing: str | None = None
        self._rounds: deque[Round] = deque(maxlen=ROUNDS)
        self._projection: Projection | None = None
        directory = membership.directory
        self._publisher = RecordPublisher(
            membership.gossip, Status, self.status, directory.size, self._check
        )
        receipts = self.tally.receipts
        self._receipts = RecordPublisher(
            membership.gossip, Receipts, receipts, directory.size, self._confirmed, RECEIPTS_S
        )

    def _check(self, author: str, status: Status) -> None:
        """Refuse a status that no watcher would take, so that it is not passed on."""
        check_date(status.issued, Status.KIND, time.time())

    def _confirmed(self, author: str, receipts: Receipts) -> None:
        directory = self._membership.directory
        member = {**directory.departed(), **directory.everyone()}.get(
            author
        )  # the last receipts come after the leave
        if member is None:
            raise MessageError(
                "A receipt was refused: its author is no member that is known here.", "stranger"
            )
        place = range_met(author, member.addresses, self._membership.host.met)
        self.tally.take(receipts, self._receipts.topic.sealed, place)

    def progress(self, record: NodeRecord) -> None:
        """Note this node's record as of now."""
        with self._lock:
            before = self._record
            self._record = record
        if record.progress.state != before.progress.state:
            self._publisher.hint()
        if self._clock() - self._saved >= SAVE_S and not self._saver.is_alive():
            self._saved = self._clock()
            # A disk may hang.
            self._saver = threading.Thread(target=self.tally.save, name="shoal-tally", daemon=True)
            self._saver.start()

    def doing(self, what: str) -> None:
        """Note what the node does besides its inner steps; shown in place of its state."""
        with self._lock:
            self._doing = what
        self._publisher.hint()

    def round(
        self,
        done: Round,
        record: NodeRecord,
        partners: Sequence[str],
        tokens: int = 0,
        projection: tuple[float, ...] = (),
    ) -> None:
        """Note a finished round, and the record after it.

        ``partners``: peer ids of the others in its mean; ``tokens``: trained here in it.
        ``projection``: that of the slow weights after it, or empty where it is not known.
        """
        others = max(len(partners), 1)
        self.tally.took(partners, Work(1, 1 / others, tokens / others))
        with self._lock:
            self._record = record
            self._rounds.append(done)
            self._note_projection(done.round, projection)
        self._publisher.hint()

    def _note_projection(self, number: int, projection: tuple[float, ...]) -> None:
        """Note the one after exchange ``number``.

        In rounds shorter than the time between two statuses not all can be sent.

        All peers then prefer the numbers that more powers of two divide, so that a watcher gets
        those of the same exchanges.
        """
        if len(projection) != PROJECTED + 1 or not all(
            abs(part) <= MAX_REAL for part in projection
        ):  # of weights gone wrong
            self._projection = None
            return
        known = self._projection
        if (
            known is None
            or self._clock() >= self._projected + HELD_S
            or number & -number >= known[0] & -known[0]
        ):
            # The digits that a distance of a millionth needs: more would make recordings longer.
            *sums, norm = (float(f"{part:.7g}") for part in projection)
            self._projection = (number, norm, tuple(sums))
            self._projected = self._clock()

    def event(self, event: str, **fields: Any) -> None:
        """Note in the tally whose rollouts and votes an event of the metrics tells of."""
        with self._lock:
            if event == "rl":
                for peer, reward in fields["used"]:
                    self.tally.took([peer], Work(rollouts=1, reward=real(reward) or 0.0))
                self.tally.made(rollouts=fields["shared"])
            elif event == "verify":
                for peer, count in fields["votes"].items():
                    self.tally.took([peer], Work(votes=count))
                self.tally.made(votes=fields["voted"])

    def status(self) -> Status:
        """Return the status as of now: traffic and faults go on while training stands still."""
        host = self._membership.host
        directory = self._membership.directory
        size = directory.size()
        is_part = bool(self._membership.manifest.bucket) and size > len(directory.members())
        with self._lock:
            record = self._record
            doing = self._doing
            rounds = tuple(self._rounds)
            projection = self._projection
        progress = {"doing": doing, "members": None, "swarm_size": size if is_part else None}
        faults = {
            "daemon_restarts": host.restarts,
            "internal_errors": host.internal_errors.total,
        }
        # What is newer than the record of the last round takes its place.
        groups = {name: getattr(record, name) for name in NodeRecord.model_fields}
        groups["progress"] = record.progress.model_copy(update=progress)
        groups["link"] = directory.own_record.link()
        groups["faults"] = record.faults.model_copy(update=faults)
        return Status(
            swarm=self._membership.swarm,
            peer=host.peer_id,
            name=self._name,
            addresses=host.addresses()[:ADDRESSES],
            version=SHOAL_VERSION,
            issued=time.time(),
            **groups,
            rounds=rounds,
            projection=projection,
        )

    def close(self) -> None:
        """Send the last receipts, and save the tally."""
        if (last := self.tally.receipts()) is not None:
            self._receipts.topic.publish(last)
            self._receipts.topic.flush(LAST_S)
        self._receipts.close()
        self._publisher.close()
        self.tally.save()
