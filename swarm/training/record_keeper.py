"""Counts what a training node's record states, and makes the record (`shoal.swarm.wire.record`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.optim import OuterOptimizer, RoundInfo
from shoal.swarm.exchange.robust import RejectedUpdate
from shoal.swarm.internal_errors import OWN_ERROR
from shoal.swarm.membership.membership import Membership
from shoal.swarm.training.diagnosis import Diagnosis
from shoal.swarm.training.lag_report import LagReport
from shoal.swarm.training.step_rate import Rates
from shoal.swarm.wire.envelope import MAX_SECONDS, rate, real, share
from shoal.swarm.wire.record import (
    MAX_BANNED,
    MAX_REASONS,
    Checks,
    Exchanges,
    Faults,
    Loss,
    NodeRecord,
    Progress,
    Rollouts,
    State,
)


@dataclass(frozen=True)
class RoundReport:
    """Traffic, waiting time and refused contributions of one round."""

    sent: int
    """Bytes that this node sent since the round before, of any kind."""
    received: int
    wait_s: float
    """Seconds that training stood still for the exchange."""
    rejected: list[RejectedUpdate]
    why: str = ""
    """Why the round had no partner, for people; nothing if it had one."""
    error: str = ""
    """The first line of the error of this node's own code that ended the exchange; then ``why``
    says nothing.
    """


class RecordKeeper:
    """The record of one node; for the thread that trains.

    ``lag_report``: that of ``opt``, which counts the exchanges that came late.
    """

    def __init__(self, membership: Membership, opt: OuterOptimizer, lag_report: LagReport) -> None:
        self._membership = membership
        self._opt = opt
        self._lag_report = lag_report
        self._counts = Counter[str]()
        self._refused = 0
        self._why = ""
        self._wait_s = 0.0
        self.state: State = "waiting"
        self.finished = False
        """True once this node's last step is done, which others see."""
        self.rates = Rates()
        self.loss = Loss()
        self.rollouts: Rollouts | None = None
        self.checks: Checks | None = None

    def lost(self, **losses: float | None) -> None:
        """Note losses, by their names in `Loss`."""
        self.loss = self.loss.model_copy(
            update={name: real(value) for name, value in losses.items()}
        )

    def round(self, info: RoundInfo, report: RoundReport) -> None:
        """Count an exchange that is over."""
        self._why = f"{OWN_ERROR} ({report.error})" if report.error else report.why
        self._wait_s += max(report.wait_s, 0.0)
        self._refused += len(report.rejected)
        self._counts["ended"] += 1
        # The last fragment of a round, or the last average.
        self._counts["rounds"] += info.key.fragment >= self._opt.fragments - 1
        if len(info.members) > 1:
            self._counts["with_partner"] += 1
        elif report.error:
            self._counts["failed"] += 1
        elif not report.rejected and not self._membership.manifest.outer.alone:
            self._counts["without_partner"] += 1

    def learnt(
        self,
        *,
        reward: float | None,
        own: int,
        foreign: int,
        seen: int = 0,
        unused: Mapping[str, int] | None = None,
    ) -> None:
        """Count an update of reinforcement learning, by groups of completions.

        ``seen`` and ``unused`` (by reason) are those of the whole run.
        """
        before = self.rollouts or Rollouts()
        most_first = Counter(unused or {}).most_common(MAX_REASONS)
        self.rollouts = Rollouts(
            reward=real(reward),
            groups_own=before.groups_own + own,
            groups_foreign=before.groups_foreign + foreign,
            groups_seen=seen,
            unused=tuple(most_first),
        )

    def checked(self, *, claims: int, checked: int, invalid: int) -> None:
        """Note the numbers of verification so far."""
        banned = () if self.checks is None else self.checks.banned
        self.checks = Checks(claims=claims, checked=checked, invalid=invalid, banned=banned)

    def bans(self, banned: Sequence[str]) -> None:
        """Note the peers that are banned now."""
        self.checks = (self.checks or Checks()).model_copy(
            update={"banned": tuple(banned[:MAX_BANNED])}
        )

    def record(self, diagnosis: Diagnosis | None = None) -> NodeRecord:
        """Return the record as of now. Never waits: no disk, no network.

        ``diagnosis``: None before it is there.
        """
        return NodeRecord(
            progress=self._progress(),
            exchanges=self._exchanges(diagnosis),
            link=self._membership.directory.own_record.link(),
            loss=self.loss,
            faults=self._faults(diagnosis),
            rollouts=self.rollouts,
            checks=self.checks,
        )

    def _progress(self) -> Progress:
        return Progress(
            state=self.state,
            finished=self.finished,
            round=self._opt.round,
            step=self._opt.steps,
            tokens=self._opt.tokens,
            steps_per_s=rate(self.rates.steps_per_s),
            tokens_per_s=rate(self.rates.tokens_per_s),
            mfu=share(self.rates.mfu),
            members=len(self._membership.directory.members()),
        )

    def _exchanges(self, diagnosis: Diagnosis | None) -> Exchanges:
        recent: dict[str, Any] = {} if diagnosis is None else diagnosis.seconds()
        return Exchanges(
            **self._counts,
            late=self._lag_report.late,
            lag_steps=self._opt.lag,
            lag_auto=self._opt.lag_auto,
            wait_s=min(self._wait_s, MAX_SECONDS),
            why=self._why,
            **recent,
        )

    def _faults(self, diagnosis: Diagnosis | None) -> Faults:
        host = self._membership.host
        found = {} if diagnosis is None else diagnosis.faults()
        return Faults(
            internal_errors=host.internal_errors.total,
            daemon_restarts=host.restarts,
            contributions_refused=self._refused,
            **found,
        )
