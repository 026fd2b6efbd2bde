"""Odds that verifiers state about a peer when they reveal their votes on its claims; the same for
all who hold the same records.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict

from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.records import Reveal
from shoal.verification.consensus.reputation import Table
from shoal.verification.consensus.rulings import Electorates, Ruling, operator

FIELD = "odds"
"""Name of the odds in a reveal's evidence."""
MAX_LOG_ODDS = 69.0
"""Odds of 1e30 say enough."""


def stated_odds(
    table: Table, ledger: Ledger, electorates: Electorates
) -> dict[str, dict[str, float]]:
    """Return the newest stated odds, as natural logarithms: by author, then by the verifier's
    operator.

    Only votes that count are read, so nobody speaks who was not drawn, and an operator speaks once,
    whatever its number of peers.
    """
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    oldest_first = sorted(
        table.rulings.values(), key=lambda ruling: (ruling.claim.round, ruling.claim.id)
    )
    for ruling in oldest_first:
        electorate = electorates.get(ruling.claim.round)
        for peer, odds in _of_ruling(ruling, ledger):
            speaker = operator(electorate, peer) if electorate else peer
            found[ruling.claim.peer][speaker] = odds
    return dict(found)


def _of_ruling(ruling: Ruling, ledger: Ledger) -> list[tuple[str, float]]:
    """Return who stated which odds in votes that count, in the order of trials."""
    said: list[tuple[str, float]] = []
    last = len(ruling.trials) - 1
    for attempt, trial in enumerate(ruling.trials):
        case = ruling.claim.id
        number = attempt
        if ruling.appeal is not None and attempt == last:
            case = ruling.appeal.id
            number = 0
        for peer, mark in zip(trial.verifiers, trial.marks, strict=True):
            if mark not in ("valid", "invalid"):
                continue
            reveals = ledger.ballots(Reveal, case, number, peer)
            if len(reveals) != 1:
                continue
            odds = decode_odds(reveals[0].evidence)
            if odds is not None:
                said.append((peer, odds))
    return said


def decode_odds(evidence: bytes) -> float | None:
    """Return the logarithm of the odds in a stranger's evidence; None if it states none."""
    try:
        said = json.loads(evidence)
        odds = said.get(FIELD) if isinstance(said, dict) else None
        if not isinstance(odds, (int, float)) or isinstance(odds, bool):
            return None
        number = float(odds)
    except (ValueError, RecursionError, OverflowError):
        return None
    if not 0 < number < math.inf:
        return None
    return min(math.log(number), MAX_LOG_ODDS)
