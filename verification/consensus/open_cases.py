"""The cases under way.

    cases = OpenCases(most=16_384)
    cases.add(claim.id, Case(claim, None, draws))
    cases.duties("a", ledger, now)               # [Duty("check", ...)]

They say what drawn verifiers have to do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from shoal.verification.consensus.draws import Case
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.records import Claim, Mark, Verdict


@dataclass(frozen=True)
class Duty:
    """Duty of a verifier: ``check`` (fetch, verify, commit), ``reveal`` the vote, or ``state`` the
    ``marks`` as a verdict.
    """

    what: Literal["check", "reveal", "state"]
    case: bytes
    attempt: int
    claim: Claim
    marks: tuple[Mark, ...] = ()
    until: float = math.inf
    """Time at which a commitment comes too late."""


class OpenCases:
    """Cases by the id of their claim or appeal; the oldest of more than ``most`` makes room."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._cases: dict[bytes, Case] = {}
        self._drawn: defaultdict[str, dict[bytes, tuple[Case, int]]] = defaultdict(dict)
        """By verifier, the draws in which it has something to do."""

    def __contains__(self, key: object) -> bool:
        return key in self._cases

    def get(self, key: bytes) -> Case | None:
        return self._cases.get(key)

    @property
    def verifiers(self) -> set[str]:
        """Peers that may have something to do."""
        return set(self._drawn)

    def add(self, key: bytes, case: Case) -> None:
        # Of the oldest no vote is taken any more; the ledger keeps the earlier ones.
        while len(self._cases) >= self._most:
            del self._cases[next(iter(self._cases))]
        self._cases[key] = case
        for attempt, draw in enumerate(case.draws):
            if draw.watched:
                for peer in draw.verifiers:
                    self._drawn[peer][key] = case, attempt

    def forget(self, before: int, now: float) -> None:
        """Drop cases of earlier rounds that are over."""
        for key, case in list(self._cases.items()):
            item = case.appeal or case.claim
            if item.round < before and case.is_over(now):
                del self._cases[key]
        self._drop_duties()

    def keep(self, ledger: Ledger) -> None:
        """Drop cases that are not in ``ledger``."""
        self._cases = {key: case for key, case in self._cases.items() if key in ledger}
        self._drop_duties()

    def is_appealed(self, claim: Claim, now: float) -> bool:
        """Return whether an appeal against the ruling on ``claim`` is voted on."""
        for case in self._cases.values():
            if case.appeal and case.claim.id == claim.id and not case.draws[0].is_over(now):
                return True
        return False

    def duties(self, peer: str, ledger: Ledger, now: float) -> list[Duty]:
        """Return what ``peer`` has to do now, by case; ``ledger`` says what it has stated."""
        found = []
        for key, (case, attempt) in list(self._drawn[peer].items()):
            draw = case.draws[attempt]
            current = case.current(now)
            stated = bool(ledger.ballots(Verdict, key, attempt, peer))
            if stated or key not in self._cases or (attempt > current and case.is_over(now)):
                del self._drawn[peer][key]
                continue
            if attempt > current:
                continue
            committed = peer in draw.commitments
            if not committed and now >= draw.starts and draw.takes_commitments(now):
                until = draw.starts + draw.times.commit_s
                found.append(Duty("check", key, attempt, case.claim, until=until))
            elif committed and peer not in draw.reveals and draw.is_revealing(now):
                found.append(Duty("reveal", key, attempt, case.claim))
            elif draw.is_over(now):
                found.append(Duty("state", key, attempt, case.claim, draw.marks()))
        return found

    def _drop_duties(self) -> None:
        """Drop those of cases that are gone: only a peer's own are asked for, and dropped by
        `duties`.
        """
        drawn = self._drawn
        self._drawn = defaultdict(dict)
        for peer, cases in drawn.items():
            left = {key: due for key, due in cases.items() if key in self._cases}
            if left:
                self._drawn[peer] = left
