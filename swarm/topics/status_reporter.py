"""This node's status for watchers of the swarm: gathered where things happen, and sent by `StatusPublisher`.

Training only notes numbers here; building, signing and sending a status is done on the network's thread.

It is sent after a round, and regularly while one lasts. Nodes do not read each other's statuses. They take part in the topic only
so that their daemons forward others' messages; received ones are dropped unopened, so their cost does not depend on their content.
All nodes together send at most some `PER_SECOND` statuses a second however many they are, which bounds what each has to forward.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.membership.directory import State
from shoal.swarm.membership.membership import SHOAL_VERSION, Membership
from shoal.swarm.topics.status import ADDRESSES, BANNED, PARTNERS, PER_SECOND, PROJECTED, ROUNDS, TAIL, RoundStatus, Status
from shoal.swarm.wire.fields import MAX_BYTES, MAX_REAL, rate, real, share

log = logging.getLogger(__name__)

GAP_S = 0.5  # seconds between two statuses of a node, at least
BEAT_S = 1.0  # seconds after which a node sends its status again, though no round has ended


class StatusPublisher:
    """A publisher of what ``make`` returns, until `close`.

    ``make`` is called on the host's loop, so it must not wait; ``members`` returns the number of nodes in the swarm, as far as
    known.
    """

    def __init__(self, gossip: Gossip, make: Callable[[], Status | None], members: Callable[[], int]) -> None:
        self._make, self._members = make, members
        self.topic = gossip.join(Status, None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._running = gossip.host.submit(self._run())

    def hint(self) -> None:
        """Send a status soon, because something happened. For any thread; never waits."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        self._running.cancel()
        self.topic.close()

    def gaps(self) -> tuple[float, float]:
        """Return the least and the most seconds between two statuses."""
        share = max(self._members(), 1) / PER_SECOND
        return max(GAP_S, share), max(BEAT_S, share)

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
            status = self._make()
            if status is not None:
                self.topic.publish(status)
        except Exception as error:  # else no later one would be sent either, and nobody would know
            log.warning("a status was not sent: %s", error)


HELD_S = 2 * GAP_S  # seconds for which a projection is in the statuses, unless a better one comes


def _usable(projection: tuple[float, ...]) -> bool:
    """Return whether a status can hold it: weights that are no numbers any more have none."""
    return len(projection) == PROJECTED + 1 and all(abs(number) <= MAX_REAL for number in projection)


def _rounded(projection: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
    """Return norm and sums with the digits that a distance of a millionth needs; more would make recordings longer."""
    *sums, norm = (float(f"{number:.7g}") for number in projection)
    return norm, tuple(sums)


class StatusReporter:
    """A reporter of this node's status, from now until `close`. For any thread."""

    def __init__(self, membership: Membership, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._membership, self._name, self._clock = membership, name, clock
        self._projected = 0.0
        self._lock = threading.Lock()
        self._now: dict[str, Any] = {"state": "waiting", "round": 0, "step": 0, "loss": None, "steps_per_s": 0.0}
        self._rounds: deque[RoundStatus] = deque(maxlen=ROUNDS)
        self._faults: Counter[str] = Counter()
        self._more: dict[str, Any] = {}
        directory = membership.directory
        self._publisher = StatusPublisher(membership.gossip, self.status, directory.size)

    def progress(
        self,
        state: State,
        round: int,
        step: int,
        loss: float | None,
        steps_per_s: float,
        tokens_per_s: float = 0.0,
        mfu: float | None = None,
        lag: Mapping[str, Any] | None = None,
    ) -> None:
        """Note the progress of training. ``lag``: fields of `Status` about it (``LagReport.details``)."""
        with self._lock:
            before = self._now["state"]
            self._now = {"state": state, "round": round, "step": step, "loss": real(loss), "steps_per_s": rate(steps_per_s)}
            self._now |= {"tokens_per_s": rate(tokens_per_s), "mfu": share(mfu), **(lag or {})}
        if state != before:
            self._publisher.hint()

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
        projection: tuple[float, ...] = (),
    ) -> None:
        """Note a finished round; ``members``: the peer ids in its mean; bytes and seconds are those of this round alone.

        ``projection``: that of the slow weights after it (`shoal.optim.outer.sketch`), or empty where it is not known.
        ``odd``: without a partner because the number of peers was odd, which is no fault.
        """
        others = [peer[-TAIL:] for peer in members if peer != self._membership.host.peer_id]
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
            self._note_projection(round, projection)
            self._faults["no-partner"] += not others and not odd and self._membership.manifest.outer.method != "none"
            self._faults["refused"] += suspicious
        self._publisher.hint()

    def _note_projection(self, number: int, projection: tuple[float, ...]) -> None:
        """Note the one after exchange ``number``. In rounds shorter than the time between two statuses not all can be sent.

        All peers then prefer the numbers that more powers of two divide, so that a watcher gets those of the same exchanges.
        """
        if not _usable(projection):
            self._more["projection"] = None
            return
        known = self._more.get("projection")
        if known is None or self._clock() >= self._projected + HELD_S or number & -number >= known[0] & -known[0]:
            self._more["projection"], self._projected = (number, *_rounded(projection)), self._clock()

    def event(self, event: str, **fields: Any) -> None:
        """Note an event of the metrics besides rounds: ``rl`` and ``verify`` are of interest here."""
        with self._lock:
            if event == "rl":
                self._more["reward"] = real(fields["reward"])
                for name in ("own", "foreign"):
                    self._more[f"rollouts_{name}"] = self._more.get(f"rollouts_{name}", 0) + fields[name]
            elif event == "verify":
                self._more["banned"] = tuple(fields["banned"][:BANNED])

    def verified(self, report: Mapping[str, int]) -> None:
        """Note the counts of verification so far: claims made, and checks done here."""
        with self._lock:
            self._more |= {"claims": report["claimed"], "checked": report["checked"], "invalid": report["invalid"]}

    def status(self) -> Status:
        """Return this node's current status."""
        host, directory = self._membership.host, self._membership.directory
        in_a_bucket = bool(self._membership.manifest.bucket) and (size := directory.size()) > len(directory.members())
        with self._lock:
            now, more, rounds = dict(self._now), dict(self._more), tuple(self._rounds)
            faults = self._faults + Counter({"daemon-restarts": host.restarts})
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
            **directory.reach(),
            **now,
            **more,
        )

    def close(self) -> None:
        self._publisher.close()
