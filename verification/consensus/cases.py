"""Timing of a case: the draws of verifiers for a claim or an appeal, and the state of each.

    |-- commit_s --|-- skew_s --|-- reveal_s --|        the next draw, if this one decided nothing
      commitments                 reveals

A verifier reveals when all have committed, or ``skew_s`` after commitments are no longer taken, so that with clocks that are within
``skew_s`` of each other no vote is seen by anybody who could still commit. Times are seconds of the injected clock.
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
        """Duration of one draw."""
        return self.commit_s + self.skew_s + self.reveal_s

    @classmethod
    def of(cls, round_s: float) -> Times:
        """Divide a round of ``round_s`` seconds: three draws after three skews (see `ViewQuorum`) are 99 % of it."""
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
        """Return whether a commitment that comes now is in time."""
        return now < self.starts + self.times.commit_s

    def takes_reveals(self, now: float) -> bool:
        """Return whether a reveal is in time. An early one is kept and harms only its author, whose vote can be copied."""
        return now < self.starts + self.times.total_s

    def is_revealing(self, now: float) -> bool:
        """Return whether those who committed should reveal."""
        all_in = len(self.commitments) == len(self.verifiers)
        return self.takes_reveals(now) and (all_in or now >= self.starts + self.times.commit_s + self.times.skew_s)

    def is_over(self, now: float) -> bool:
        """Return whether the marks are final: time is up, or all votes are there."""
        return not self.takes_reveals(now) or all(mark in ("valid", "invalid") for mark in self.marks())

    def marks(self) -> tuple[Mark, ...]:
        """Return the mark of each verifier, as seen here so far."""
        return tuple(map(self._mark, self.verifiers))

    def _mark(self, peer: str) -> Mark:
        commitment, reveal = self.commitments.get(peer), self.reveals.get(peer)
        if commitment is None:
            return "absent"
        if reveal is None or peer in self.contradicted or not reveal.fits(commitment):
            return "withheld"
        return reveal.vote


@dataclass
class Case:
    """``key``: the id of what asked for it, the claim or the appeal."""

    key: bytes
    claim: Claim
    appeal: Dispute | Opening | None
    draws: tuple[Draw, ...]
    _last: int | None = None  # the draw that was under way when voting ended

    @classmethod
    def at(
        cls,
        begin: float,
        claim: Claim,
        appeal: Dispute | Opening | None,
        verifiers: tuple[tuple[str, ...], ...],
        times: Times,
        now: float = 0.0,
    ) -> Case:
        """Make the case of ``claim``, or of ``appeal`` against its ruling; ``now`` is when this peer learned of it."""
        starts = [begin + times.total_s * number for number in range(len(verifiers))]
        draws = tuple(Draw(drawn, at, times, watched=now <= at) for drawn, at in zip(verifiers, starts, strict=True))
        return cls((appeal or claim).id, claim, appeal, draws)

    def current(self, now: float) -> int:
        """Return the number of the draw that is under way, or of the last one."""
        if self._last is not None:
            return self._last
        number = 0
        while number + 1 < len(self.draws) and self.draws[number].is_over(now) and decide(self.draws[number].marks()) is None:
            number += 1
        if self.draws[number].is_over(now):  # and it decided something, or is the last
            self._last = number
        return number

    def is_over(self, now: float) -> bool:
        """Return whether voting has ended."""
        self.current(now)
        return self._last is not None
