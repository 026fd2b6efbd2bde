"""Odds that verifiers state about a peer when they reveal their votes on its claims; the same for all who hold the same records."""

from __future__ import annotations

import json
import math
from collections import defaultdict

from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.records import Reveal
from shoal.verification.consensus.reputation import Table
from shoal.verification.consensus.rulings import Electorates, operator

FIELD = "odds"
"""Name of the odds in a reveal's evidence."""
MOST_LOG = 69.0  # odds of 1e30 say enough


def stated(table: Table, ledger: Ledger, electorates: Electorates) -> dict[str, dict[str, float]]:
    """Return the newest stated odds, as natural logarithms: by author, then by the verifier's operator.

    Only votes that count are read, so nobody speaks who was not drawn, and an operator speaks once, whatever its number of peers.
    """
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for ruling in sorted(table.rulings.values(), key=lambda ruling: (ruling.claim.round, ruling.claim.id)):
        claim, electorate = ruling.claim, electorates.get(ruling.claim.round)
        firsts = len(ruling.trials) - (ruling.appeal is not None)
        for attempt, trial in enumerate(ruling.trials):
            is_first = attempt < firsts or ruling.appeal is None
            case, number = (claim.id, attempt) if is_first or ruling.appeal is None else (ruling.appeal.id, 0)
            for peer, mark in zip(trial.verifiers, trial.marks, strict=True):
                reveals = ledger.ballots(Reveal, case, number, peer) if mark in ("valid", "invalid") else []
                said = _odds(reveals[0].evidence) if len(reveals) == 1 else None
                if said is not None:
                    found[claim.peer][operator(electorate, peer) if electorate else peer] = said
    return dict(found)


def _odds(evidence: bytes) -> float | None:
    """Return the logarithm of the odds in a stranger's evidence; None if it states none."""
    try:
        said = json.loads(evidence)
        odds = said.get(FIELD) if isinstance(said, dict) else None
        number = float(odds) if isinstance(odds, (int, float)) and not isinstance(odds, bool) else math.nan
    except (ValueError, RecursionError, OverflowError):
        return None
    return min(math.log(number), MOST_LOG) if 0 < number < math.inf else None
