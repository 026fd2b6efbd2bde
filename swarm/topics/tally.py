"""What others confirm of a node's work: receipts that partners sign, and the tally that each node
keeps of them.

A node counts for each peer what it took from it: exchanges that committed, rollouts that it learnt
from, votes on its claims. It signs the sums and gossips them (`Receipts`); they only grow, so the
newest receipt of a partner holds all earlier ones, and one that comes again adds nothing. The tally
of a node is what others signed for it. Of a partner no more counts than this node itself has
counted with it (`confirmed`), so only who was met confirms anything, and nobody confirms more than
was there to be taken.

It is no proof of work: two keys of one owner can confirm each other. So a tally names its partners
and their address ranges.
"""

from __future__ import annotations

import base64
import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, model_validator

from shoal.swarm.errors import MessageError, ShoalError
from shoal.swarm.file_lock import replace_file
from shoal.swarm.wire.envelope import (
    KIB,
    MAX_COUNT,
    Count,
    Message,
    Moment,
    PeerId,
    SwarmId,
    unseal,
)

log = logging.getLogger(__name__)

NAME = "tally.json"
NAMED = 12  # peers in one record
MAX_PEERS = 1024  # for which a node counts, and whose receipts it keeps
MAX_FILE = 16 << 20  # bytes
# times this node's own tokens that a partner's count: weights in a mean differ by no more
# (`shoal.optim.exchange.base`)
MOST = 4.0

Amount = Annotated[float, Field(ge=0, le=MAX_COUNT)]
Reward = Annotated[float, Field(ge=-MAX_COUNT, le=MAX_COUNT)]


class Work(NamedTuple):
    """Work that one peer took from another, in all.

    ``exchanges``: committed with both in them. ``rounds``: the same, of a group each of n - 1
    others counts as one part of n - 1. ``tokens``: those parts of the tokens that the signer itself
    trained for the round. ``rollouts``: groups that it learnt from; ``reward``: the sum of their
    mean rewards, as it judged them. ``votes``: on its claims.
    """

    exchanges: int = 0
    rounds: float = 0.0
    tokens: float = 0.0
    rollouts: int = 0
    reward: float = 0.0
    votes: int = 0

    def plus(self, other: Work) -> Work:
        """Return the sum, each number within what a message can hold."""
        sums = [
            min(max(one + two, -MAX_COUNT), MAX_COUNT) for one, two in zip(self, other, strict=True)
        ]
        return Work(*sums)  # type: ignore[arg-type]


def total(works: Iterable[Work]) -> Work:
    return functools.reduce(Work.plus, works, Work())


def confirmed(signed: Work, own: Work, rollouts: float = math.inf, votes: float = math.inf) -> Work:
    """Return what counts of the work that a partner ``signed``.

    ``own``: what the other side took from that partner; both sides count the same exchanges, and
    their tokens differ by no more than weights in a mean may. ``rollouts``, ``votes``: those that
    the other side ever made; each is of use to a partner once.
    """
    groups = int(min(signed.rollouts, rollouts))
    return Work(
        min(signed.exchanges, own.exchanges),
        min(signed.rounds, own.rounds),
        min(signed.tokens, MOST * own.tokens),
        groups,
        signed.reward * groups / max(signed.rollouts, 1),
        int(min(signed.votes, votes)),
    )


class Receipts(Message):
    """What ``peer`` took from others in all, by ``issued`` (Unix seconds): (peer id, the numbers of
    `Work`).
    """

    KIND = "receipts"
    LIMIT = 2 * KIB
    AUTHOR = "peer"
    swarm: SwarmId
    peer: PeerId
    issued: Moment
    work: Annotated[
        tuple[tuple[PeerId, Count, Amount, Amount, Count, Reward, Count], ...],
        Field(min_length=1, max_length=NAMED),
    ]

    @model_validator(mode="after")
    def _of_others(self) -> Receipts:
        if self.of(self.peer) is not None:
            raise ValueError("names its signer")
        return self

    def of(self, peer: str) -> Work | None:
        """Return what the signer took from ``peer``, by the first place that names it; None if none
        does.
        """
        return next((Work(*numbers) for named, *numbers in self.work if named == peer), None)  # type: ignore[arg-type]


class TallyError(ShoalError):
    """Failure to read a tally."""


class _Kept(NamedTuple):
    receipts: Receipts
    sealed: bytes
    place: str


class Tally:
    """The tally of the node ``me`` in ``swarm``, kept in ``path`` if there is one. For any thread.

    A file that is damaged, or of another node or swarm, is replaced.
    """

    def __init__(
        self, me: str, swarm: str, path: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.me = me
        self.swarm = swarm
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._took: dict[str, Work] = {}
        self._said: dict[
            str, tuple[Work, float]
        ] = {}  # of each peer what was signed last, and when
        # rollouts and votes of this node; rollouts of earlier runs
        self._made = [0, 0]
        self._before = 0
        self._kept: dict[str, _Kept] = {}
        """Of each signer its newest receipt that names this node; what it signed before it lost its
        counts is gone with them.
        """
        if path is not None and path.exists():
            try:
                self._load(_read(path))
            except (
                TallyError,
                MessageError,
                ValueError,
                TypeError,
                LookupError,
                AttributeError,
            ) as error:
                log.warning(
                    "the tally in %s is damaged (%s) and begins anew", path, type(error).__name__
                )

    def took(self, peers: Iterable[str], work: Work) -> None:
        with self._lock:
            for peer in peers:
                if peer != self.me and (peer in self._took or len(self._took) < MAX_PEERS):
                    self._took[peer] = self._took.get(peer, Work()).plus(work)

    def made(self, rollouts: int = 0, votes: int = 0) -> None:
        """Note how many rollouts this node has sent in this run, and how many votes of its own
        count.
        """
        with self._lock:
            self._made = [max(self._made[0], self._before + rollouts), max(self._made[1], votes)]

    def receipts(self) -> Receipts | None:
        """Return a record for the peers whose sums have changed, or whose last record is the
        oldest; None if there is nobody.
        """
        with self._lock:
            now = self._clock()
            said = self._said
            order = sorted(
                self._took,
                key=lambda peer: (
                    said.get(peer, (None,))[0] == self._took[peer],
                    said.get(peer, (0, 0.0))[1],
                ),
            )
            work = tuple((peer, *self._took[peer]) for peer in order[:NAMED])
            said.update((peer, (self._took[peer], now)) for peer in order[:NAMED])
        return Receipts(swarm=self.swarm, peer=self.me, issued=now, work=work) if work else None

    def take(self, receipts: Receipts, sealed: bytes, place: str) -> None:
        """Keep a member's receipt if it names this node.

        ``sealed``: as its author signed it; ``place``: its address range.

        Raises MessageError: it is of another swarm, or no newer than one that is kept.
        """
        if receipts.swarm != self.swarm:
            raise MessageError("A receipt of another swarm was refused.", "foreign-swarm")
        if receipts.of(self.me) is None:
            return
        with self._lock:
            before = self._kept.get(receipts.peer)
            if before is not None and receipts.issued <= before.receipts.issued:
                raise MessageError(
                    "A receipt was refused: a newer one was there before.", "replayed"
                )
            self._kept[receipts.peer] = _Kept(receipts, sealed, place)
            if len(self._kept) > MAX_PEERS:  # first who confirms nothing
                del self._kept[
                    next(
                        (peer for peer in self._kept if peer not in self._took),
                        next(iter(self._kept)),
                    )
                ]

    def partners(self) -> dict[str, tuple[Work, str]]:
        """Return by peer id what each partner confirms, and its address range."""
        with self._lock:
            found = {
                peer: (
                    confirmed(
                        kept.receipts.of(self.me) or Work(),
                        self._took.get(peer, Work()),
                        *self._made,
                    ),
                    kept.place,
                )
                for peer, kept in self._kept.items()
            }
            return {peer: (work, place) for peer, (work, place) in found.items() if any(work)}

    def report(self) -> dict[str, Any]:
        """Return the tally: the sums, the numbers of partners and of their address ranges, and what
        each partner confirms.
        """
        partners = self.partners()
        return {
            **total(work for work, _ in partners.values())._asdict(),
            "partners": len(partners),
            "ranges": len({place for _, place in partners.values()}),
            "of": [
                {"peer": peer, "range": place, **work._asdict()}
                for peer, (work, place) in sorted(partners.items())
            ],
        }

    def save(self) -> None:
        """Write the file, whole or not at all. A failure is logged."""
        if self._path is None:
            return
        with self._saving:
            with self._lock:
                kept = [
                    [base64.b64encode(one.sealed).decode(), one.place]
                    for one in self._kept.values()
                ]
                content = {
                    "peer": self.me,
                    "swarm": self.swarm,
                    "made": self._made,
                    "took": dict(self._took),
                    "kept": kept,
                }
            try:
                replace_file(self._path, json.dumps(content))
            except OSError as error:
                log.warning("the tally was not saved in %s (%s)", self._path, error.strerror)

    def _load(self, found: Mapping[str, Any]) -> None:
        """Take over a saved tally of this node.

        Raises as it may where it is damaged; each signature is checked.
        """
        if (found["peer"], found["swarm"]) != (self.me, self.swarm):
            return
        for peer, work in found["took"].items():
            signed = Receipts(swarm=self.swarm, peer=self.me, issued=0.0, work=((peer, *work),))
            self._took[peer] = signed.of(peer) or Work()
        rollouts, votes = map(int, found["made"])
        self._made = [rollouts, votes]
        self._before = rollouts
        for text, place in found["kept"]:
            sealed = base64.b64decode(text)
            self.take(unseal(sealed, Receipts)[1], sealed, str(place)[:64])


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return json.loads(file.read(MAX_FILE))
    except FileNotFoundError:
        raise TallyError(
            f"There is no tally in {str(path.parent)!r}: its node writes one once others have "
            "exchanged with it."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise TallyError(
            f"The tally {str(path)!r} cannot be read ({type(error).__name__}): its node writes it "
            "anew."
        ) from None


def saved_tally(folder: Path) -> Tally:
    """Return the tally in the folder of a node, with all signatures checked. Raises TallyError."""
    found = _read(path := folder / NAME)
    try:
        return Tally(found["peer"], found["swarm"], path)
    except (TypeError, KeyError):
        raise TallyError(f"The tally {str(path)!r} is damaged: its node writes it anew.") from None
