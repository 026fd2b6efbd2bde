"""What others confirm of a node's work: the tally that each node keeps of their receipts.

    tally.took([partner], Work(exchanges=1, tokens=4096.0))    # this node took it from the partner
    tally.receipts()                                           # to sign and gossip
    tally.take(receipts, sealed, place)                        # of another
    tally.report()

Of a partner no more counts than this node itself has counted with it, so only who was met confirms
anything, and nobody confirms more than was there to be taken. It is no proof of work: two keys of
one owner can confirm each other, so a tally names its partners and their address ranges.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shoal.swarm.errors import MessageError, ShoalError
from shoal.swarm.file_lock import replace_file
from shoal.swarm.topics.receipts import MAX_PEERS_NAMED, Receipts, Work, confirmed, total
from shoal.swarm.wire.envelope import unseal

log = logging.getLogger(__name__)

NAME = "tally.json"
MAX_PEERS = 1024
"""For which a node counts, and whose receipts it keeps."""
MAX_FILE_BYTES = 16 << 20
MAX_PLACE_CHARS = 64


class TallyError(ShoalError):
    """Failure to read a tally."""


DAMAGED = (TallyError, MessageError, ValueError, TypeError, LookupError, AttributeError)
"""What a file raises that is read though it is no tally."""


class _Kept(NamedTuple):
    """The newest receipts of a signer that name this node."""

    receipts: Receipts
    sealed: bytes
    place: str
    """The signer's address range."""


class _Signed(NamedTuple):
    """What this node signed of a peer last."""

    work: Work
    at: float


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
        self._signed: dict[str, _Signed] = {}
        self._made = [0, 0]  # rollouts and votes of this node
        self._made_before = 0  # rollouts of earlier runs
        self._kept: dict[str, _Kept] = {}
        """Of each signer its newest receipt that names this node; what it signed before it lost its
        counts is gone with them.
        """
        if path is not None and path.exists():
            try:
                self._load(_read(path))
            except DAMAGED as error:
                kind = type(error).__name__
                log.warning("the tally in %s is damaged (%s) and begins anew", path, kind)

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
            before_rollouts, before_votes = self._made
            all_rollouts = self._made_before + rollouts
            self._made = [max(before_rollouts, all_rollouts), max(before_votes, votes)]

    def receipts(self) -> Receipts | None:
        """Return a record for the peers whose sums have changed, or whose last record is the
        oldest; None if there is nobody.
        """
        with self._lock:
            now = self._clock()
            due = sorted(self._took, key=self._due)[:MAX_PEERS_NAMED]
            work = tuple((peer, *self._took[peer]) for peer in due)
            for peer in due:
                self._signed[peer] = _Signed(self._took[peer], now)
        if not work:
            return None
        return Receipts(swarm=self.swarm, peer=self.me, issued=now, work=work)

    def _due(self, peer: str) -> tuple[bool, float]:
        """Return what orders peers by when their sums are to be signed, the first first."""
        signed = self._signed.get(peer)
        if signed is None:
            return False, 0.0
        return signed.work == self._took[peer], signed.at

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
            if len(self._kept) > MAX_PEERS:
                # First goes one that confirms nothing.
                useless = (peer for peer in self._kept if peer not in self._took)
                del self._kept[next(useless, next(iter(self._kept)))]

    def partners(self) -> dict[str, tuple[Work, str]]:
        """Return by peer id what each partner confirms, and its address range."""
        found = {}
        with self._lock:
            for peer, kept in self._kept.items():
                signed = kept.receipts.of(self.me) or Work()
                work = confirmed(signed, self._took.get(peer, Work()), *self._made)
                if any(work):
                    found[peer] = work, kept.place
        return found

    def report(self) -> dict[str, Any]:
        """Return the tally: the sums, the numbers of partners and of their address ranges, and what
        each partner confirms.
        """
        partners = self.partners()
        works = [work for work, _ in partners.values()]
        ranges = {place for _, place in partners.values()}
        each = []
        for peer, (work, place) in sorted(partners.items()):
            each.append({"peer": peer, "range": place, **work._asdict()})
        counts = {"partners": len(partners), "ranges": len(ranges)}
        return {**total(works)._asdict(), **counts, "of": each}

    def save(self) -> None:
        """Write the file, whole or not at all. A failure is logged."""
        if self._path is None:
            return
        with self._saving:
            with self._lock:
                kept = []
                for one in self._kept.values():
                    kept.append([base64.b64encode(one.sealed).decode(), one.place])
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
        self._made_before = rollouts
        for text, place in found["kept"]:
            sealed = base64.b64decode(text)
            self.take(unseal(sealed, Receipts)[1], sealed, str(place)[:MAX_PLACE_CHARS])


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return json.loads(file.read(MAX_FILE_BYTES))
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
    path = folder / NAME
    found = _read(path)
    try:
        return Tally(found["peer"], found["swarm"], path)
    except (TypeError, KeyError):
        raise TallyError(f"The tally {str(path)!r} is damaged: its node writes it anew.") from None
