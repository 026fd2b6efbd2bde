"""A node's status for watchers: its newest rounds, with whom, how fast, and what went wrong.

Nothing depends on it.

Training only notes numbers here; building, signing and sending a status is done on the network's
thread, after a round, and regularly while one lasts. Nodes do not read each other's statuses. They
take part in the topic only so that their daemons forward others' messages; received ones are
dropped unopened, so their cost does not depend on their content. All nodes together send at most
some `PER_SECOND` statuses a second however many they are, which bounds what each has to forward.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.swarm.errors import MessageError
from shoal.swarm.figures import amount
from shoal.swarm.gossip.gossip import Gossip, Handler
from shoal.swarm.membership.membership import SHOAL_VERSION, Membership
from shoal.swarm.p2p.addresses import range_met
from shoal.swarm.topics.receipts import Receipts, Work
from shoal.swarm.topics.tally import NAME, Tally
from shoal.swarm.wire.envelope import (
    KIB,
    MAX_BYTES,
    MAX_REAL,
    Address,
    Bytes,
    Count,
    Label,
    M,
    Message,
    Moment,
    PeerId,
    Rate,
    Reach,
    Real,
    Reason,
    Seconds,
    Share,
    SwarmId,
    Token,
    real,
)

ROUNDS = 6  # in one status, so that a watcher who misses some still sees every round
PARTNERS = 8  # of a round that are named
ADDRESSES = 4
BANNED = 8
FAULTS = 12
PER_SECOND = 10.0  # statuses of all nodes together, about: in a larger swarm each sends fewer
PROJECTED = 16  # sums in a projection
OWN_ERROR = "an error in this node's own code, and not in the network"
TAIL = 8  # characters from the end of a peer id by which a partner is named

Tail = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{8}$")]


def lag_label(lag: int, auto: bool, late: int) -> str:
    """Return the inner steps that training goes on during an exchange, for people; - where it waits
    for each.
    """
    return (
        "-"
        if not lag
        else f"{lag}" + (" auto" if auto else "") + (f", {late} late" if late else "")
    )


def tokens_label(tokens_per_s: float, mfu: float | None) -> str:
    """Return tokens a second without waiting, and the share of the GPU's peak where it is known,
    for people.
    """
    return (
        "-"
        if not tokens_per_s
        else f"{tokens_per_s:,.0f}" + ("" if mfu is None else f" ({100 * mfu:.0f} % MFU)")
    )


def reach_label(reach: str, throughput: float) -> str:
    """Return how a node is reached, and what its exchanges move, for people."""
    return reach + (f", {amount(throughput, 'B/s')}" if throughput else "")


class RoundStatus(BaseModel):
    """One round of a node: ``sent`` and ``received`` bytes, ``loss`` in nats (mean over its inner
    steps), ``wait_s`` seconds.

    ``members`` are in the mean, with the node itself; ``partners`` names the first of the others by
    the end of their peer ids.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    round: Count
    step: Count
    loss: Real | None
    members: Annotated[int, Field(ge=1, le=1_000_000)]
    partners: Annotated[tuple[Tail, ...], Field(max_length=PARTNERS)] = ()
    sent: Bytes
    received: Bytes
    wait_s: Seconds


class Status(Message):
    """One node, now.

    ``issued`` in Unix seconds; ``sent`` and ``received`` are the bytes of its whole run; ``doing``:
    evaluating.

    ``tokens_per_s``, ``mfu``, ``lag``, ``lag_auto``, ``late``, ``reach`` and ``throughput``: see
    `wire.messages.Member`.

    ``rounds``: its newest, oldest first; ``why`` the last of them had no partner, if so.
    ``reward``, ``rollouts_own`` and ``rollouts_foreign`` (groups learnt from, in all) are of
    reinforcement learning, ``claims``, ``checked``, ``invalid`` and ``banned`` of verification;
    None where there is none. ``faults``: kind of fault -> count. ``projection``: the number of a
    recent exchange, and of the slow weights after it the norm and a random projection
    (`shoal.optim.outer.weights`). ``peers``: about how many members the swarm has, where the author
    sees one bucket of it.
    """

    KIND = "status"
    LIMIT = 8 * KIB
    AUTHOR = "peer"
    swarm: SwarmId
    peer: PeerId
    name: Label
    addresses: Annotated[tuple[Address, ...], Field(max_length=ADDRESSES)]
    state: Literal["waiting", "training", "leaving", "done"]
    doing: Label | None = None
    round: Count
    step: Count
    loss: Real | None
    steps_per_s: Rate
    sent: Bytes
    received: Bytes
    rounds: Annotated[tuple[RoundStatus, ...], Field(max_length=ROUNDS)] = ()
    why: Reason = ""
    reward: Real | None = None
    rollouts_own: Count | None = None
    rollouts_foreign: Count | None = None
    claims: Count | None = None
    checked: Count | None = None
    invalid: Count | None = None
    banned: Annotated[tuple[PeerId, ...], Field(max_length=BANNED)] = ()
    faults: Annotated[tuple[tuple[Token, Count], ...], Field(max_length=FAULTS)] = ()
    issued: Moment
    version: Label
    tokens_per_s: Rate = 0.0
    mfu: Share | None = None
    lag: Count = 0
    lag_auto: bool = False
    late: Count = 0
    projection: (
        tuple[
            Count,
            Real,
            Annotated[tuple[Real, ...], Field(min_length=PROJECTED, max_length=PROJECTED)],
        ]
        | None
    ) = None
    peers: Count | None = None
    reach: Reach = "unknown"
    throughput: Rate = 0.0


log = logging.getLogger(__name__)

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
        self._now: dict[str, Any] = {
            "state": "waiting",
            "round": 0,
            "step": 0,
            "loss": None,
            "steps_per_s": 0.0,
        }
        self._rounds: deque[RoundStatus] = deque(maxlen=ROUNDS)
        self._faults: Counter[str] = Counter()
        self._more: dict[str, Any] = {}
        directory = membership.directory
        self._publisher = RecordPublisher(membership.gossip, Status, self.status, directory.size)
        receipts = self.tally.receipts
        self._receipts = RecordPublisher(
            membership.gossip, Receipts, receipts, directory.size, self._confirmed, RECEIPTS_S
        )

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

    def progress(self, now: Mapping[str, Any]) -> None:
        """Note the progress of training: the fields of `Status` about it."""
        with self._lock:
            before = self._now
            self._now = dict(now)
        if now["state"] != before["state"]:
            self._publisher.hint()
        if self._clock() - self._saved >= SAVE_S and not self._saver.is_alive():
            self._saved = self._clock()
            self._saver = threading.Thread(
                target=self.tally.save, name="shoal-tally", daemon=True
            )  # a disk may hang
            self._saver.start()

    def doing(self, what: str) -> None:
        """Note what the node does besides its inner steps; shown in place of its state."""
        with self._lock:
            self._more["doing"] = what
        self._publisher.hint()

    def round(
        self,
        members: Sequence[str],
        *,
        round: int,
        step: int,
        loss: float | None,
        sent: int,
        received: int,
        wait_s: float,
        suspicious: int = 0,
        odd: bool = False,
        why: str = "",
        error: str = "",
        projection: tuple[float, ...] = (),
        tokens: int = 0,
    ) -> None:
        """Note a finished round; ``members``: the peer ids in its mean; bytes, seconds and
        ``tokens`` (trained here) are its own.

        ``projection``: that of the slow weights after it (`shoal.optim.outer.weights`), or empty
        where it is not known. ``odd``: without a partner because the number of peers was odd, which
        is no fault. ``why``: without one, in words. ``error``: the first line of the error of this
        node's own code that ended it.
        """
        partners = [peer for peer in members if peer != self._membership.host.peer_id]
        others = [peer[-TAIL:] for peer in partners]
        self.tally.took(
            partners, Work(1, 1 / max(len(partners), 1), tokens / max(len(partners), 1))
        )
        done = RoundStatus(
            round=round,
            step=step,
            loss=real(loss),
            members=max(len(members), 1),
            partners=tuple(others[:PARTNERS]),
            sent=min(sent, MAX_BYTES),
            received=min(received, MAX_BYTES),
            wait_s=max(wait_s, 0.0),
        )
        with self._lock:
            self._rounds.append(done)
            self._more["why"] = f"{OWN_ERROR} ({error})" if error else why
            self._note_projection(round, projection)
            alone = self._membership.manifest.outer.alone
            self._faults["no-partner"] += not (others or odd or error or alone)
            self._faults["refused"] += suspicious
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
            self._more["projection"] = None
            return
        known = self._more.get("projection")
        if (
            known is None
            or self._clock() >= self._projected + HELD_S
            or number & -number >= known[0] & -known[0]
        ):
            # The digits that a distance of a millionth needs: more would make recordings longer.
            *sums, norm = (float(f"{part:.7g}") for part in projection)
            self._more["projection"], self._projected = (number, norm, tuple(sums)), self._clock()

    def event(self, event: str, **fields: Any) -> None:
        """Note an event of the metrics besides rounds: ``rl`` and ``verify`` are of interest
        here.
        """
        with self._lock:
            if event == "rl":
                self._more["reward"] = real(fields["reward"])
                for name in ("own", "foreign"):
                    self._more[f"rollouts_{name}"] = (
                        self._more.get(f"rollouts_{name}", 0) + fields[name]
                    )
                for peer, reward in fields["used"]:
                    self.tally.took([peer], Work(rollouts=1, reward=real(reward) or 0.0))
                self.tally.made(rollouts=fields["shared"])
            elif event == "verify":
                self._more["banned"] = tuple(fields["banned"][:BANNED])
                for peer, count in fields["votes"].items():
                    self.tally.took([peer], Work(votes=count))
                self.tally.made(votes=fields["voted"])

    def verified(self, report: Mapping[str, int]) -> None:
        with self._lock:
            self._more |= {
                "claims": report["claimed"],
                "checked": report["checked"],
                "invalid": report["invalid"],
            }

    def status(self) -> Status:
        host = self._membership.host
        directory = self._membership.directory
        in_a_bucket = bool(self._membership.manifest.bucket) and (size := directory.size()) > len(
            directory.members()
        )
        with self._lock:
            now = dict(self._now)
            more = dict(self._more)
            rounds = tuple(self._rounds)
            counted = {"daemon-restarts": host.restarts, "internal": host.internal_errors.total}
            faults = self._faults + Counter(counted)
        return Status(
            swarm=self._membership.swarm,
            peer=host.peer_id,
            name=self._name,
            addresses=host.addresses()[:ADDRESSES],
            sent=min(host.traffic.sent, MAX_BYTES),
            received=min(host.traffic.received, MAX_BYTES),
            rounds=rounds,
            faults=tuple(sorted(faults.items())),
            issued=time.time(),
            version=SHOAL_VERSION,
            peers=size if in_a_bucket else None,
            **directory.own_record.reach(),
            **now,
            **more,
        )

    def close(self) -> None:
        """Send the last receipts, and save the tally."""
        if (last := self.tally.receipts()) is not None:
            self._receipts.topic.publish(last)
            self._receipts.topic.flush(LAST_S)
        self._receipts.close()
        self._publisher.close()
        self.tally.save()
