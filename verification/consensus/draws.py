"""The draws of a case and their timing: who was drawn, and what came in time.

    |-- commit_s --|-- skew_s --|-- reveal_s --|        the next draw, if this one decided nothing
      commitments                 reveals

A verifier reveals when all have committed, or ``skew_s`` after commitments are no longer taken, so
that with clocks that are within ``skew_s`` of each other no vote is seen by anybody who could still
commit. Times are seconds of the injected clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.verification.consensus.records import Claim, Commitment, Dispute, Mark, Opening, Reveal
from shoal.verification.consensus.rulings import decide


@dataclass(frozen=True)
class Times:
    """Durations of the phases of a draw, in seconds."""

    commit_s: float = 60.0
    """Time to fetch the output, check it, and commit to a vote."""
    skew_s: float = 5.0
    """Delay of gossip plus difference of clocks."""
    reveal_s: float = 15.0

    @property
    def total_s(self) -> float:
        return self.commit_s + self.skew_s + self.reveal_s

    @classmethod
    def of(cls, round_s: float) -> Times:
        """Divide a round of ``round_s`` seconds: three draws after three skews (see `ViewQuorum`)
        are 99 % of it.
        """
        return cls(commit_s=0.19 * round_s, skew_s=0.04 * round_s, reveal_s=0.06 * round_s)


@dataclass
class Draw:
    """Verifiers of one attempt and the records that came from them in time."""

    verifiers: tuple[str, ...]
    starts: float
    times: Times
    commitments: dict[str, Commitment] = field(default_factory=dict)
    reveals: dict[str, Reveal] = field(default_factory=dict)
    contradicted: set[str] = field(default_factory=set)
    watched: bool = True
    """False if this peer joined after the draw began: then it cannot say who was absent."""

    def takes_commitments(self, now: float) -> bool:
        return now < self.starts + self.times.commit_s

    def takes_reveals(self, now: float) -> bool:
        """Return whether a reveal is in time.

        An early one is kept and harms only its author, whose vote can be copied.
        """
        return now < self.starts + self.times.total_s

    def shows_votes(self, now: float) -> bool:
        """Return whether votes are revealed even if a verifier has not committed."""
        return now >= self.starts + self.times.commit_s + self.times.skew_s

    def is_revealing(self, now: float) -> bool:
        all_in = len(self.commitments) == len(self.verifiers)
        return self.takes_reveals(now) and (all_in or self.shows_votes(now))

    def is_over(self, now: float) -> bool:
        """Return whether the marks are final: time is up, or all votes are there."""
        if not self.takes_reveals(now):
            return True
        return all(mark in ("valid", "invalid") for mark in self.marks())

    def marks(self) -> tuple[Mark, ...]:
        return tuple(map(self._mark, self.verifiers))

    def _mark(self, peer: str) -> Mark:
        commitment = self.commitments.get(peer)
        reveal = self.reveals.get(peer)
        if commitment is None:
            return "absent"
        if reveal is None or peer in self.contradicted or not reveal.fits(commitment):
            return "withheld"
        return reveal.vote


@dataclass
class Case:
    """The draws for ``claim``, or for ``appeal`` against its ruling."""

    claim: Claim
    appeal: Dispute | Opening | None
    draws: tuple[Draw, ...]
    _last: int | None = None
    """The draw that was under way when voting ended."""

    def current(self, now: float) -> int:
        """Return the number of the draw that is under way, or of the last one."""
        if self._last is not None:
            return self._last
        for number, draw in enumerate(self.draws):
            if not draw.is_over(now):
                return number
            is_last = number + 1 == len(self.draws)
            if is_last or decide(draw.marks()) is not None:
                self._last = number
                return number
        raise AssertionError("a case has a draw")

    def is_over(self, now: float) -> bool:
        self.current(now)
        return self._last is not None
