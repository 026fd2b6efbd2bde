"""Odds against a peer, that its claims are not those of an honest one, as verifiers state them when
they reveal their votes; all who hold the same rulings, ballots and electorates read the same.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict

from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.records import Reveal
from shoal.verification.consensus.reputation import Table
from shoal.verification.consensus.rulings import Electorates, Ruling, operator

ODDS_KEY = "odds"
"""JSON key of the odds in a reveal's evidence, part of the protocol; plain odds there, logarithms
here.
"""
MAX_LOG_ODDS = 69.0
"""Cap on the logarithm of odds that are read or sent, about 1e30 to 1: nobody is more certain."""


def stated_odds(
    table: Table, ledger: Ledger, electorates: Electorates
) -> dict[str, dict[str, float]]:
    """Return the odds stated last, as natural logarithms: by author of the claims, then by the
    verifier's operator.

    Last is that of the claim of the highest round. Only votes that count are read, and only drawn
    verifiers have such, so an operator speaks once, whatever its number of peers. Where the round's
    electorate is no longer known, each verifier counts as its own operator.
    """
    newest: defaultdict[str, dict[str, float]] = defaultdict(dict)
    oldest_first = sorted(
        table.rulings.values(), key=lambda ruling: (ruling.claim.round, ruling.claim.id)
    )
    for ruling in oldest_first:
        electorate = electorates.get(ruling.claim.round)
        for verifier, odds in _odds_in(ruling, ledger):
            speaker = verifier if electorate is None else operator(electorate, verifier)
            newest[ruling.claim.peer][speaker] = odds
    return dict(newest)


def _odds_in(ruling: Ruling, ledger: Ledger) -> list[tuple[str, float]]:
    """Return which verifier stated which odds in votes that count, in the order of trials: who is
    drawn twice has stated the later.
    """
    statements: list[tuple[str, float]] = []
    last = len(ruling.trials) - 1
    for attempt, trial in enumerate(ruling.trials):
        case = ruling.claim.id
        number = attempt
        # The appeal is the last trial; its ballots have the appeal's id and begin at 0.
        if ruling.appeal is not None and attempt == last:
            case = ruling.appeal.id
            number = 0
        for verifier, mark in zip(trial.verifiers, trial.marks, strict=True):
            if mark not in ("valid", "invalid"):
                continue
            reveals = ledger.ballots(Reveal, case, number, verifier)
            # Of several that contradict each other none counts.
            if len(reveals) != 1:
                continue
            odds = decode_odds(reveals[0].evidence)
            if odds is not None:
                statements.append((verifier, odds))
    return statements


def decode_odds(evidence: bytes) -> float | None:
    """Return the logarithm of the odds in a stranger's evidence; None if that is no JSON object
    with a finite number above 0.
    """
    try:
        content = json.loads(evidence)
        stated = content.get(ODDS_KEY) if isinstance(content, dict) else None
        if not isinstance(stated, (int, float)) or isinstance(stated, bool):
            return None
        odds = float(stated)
    except (ValueError, RecursionError, OverflowError):
        # No JSON, nested too deeply, or a whole number beyond float.
        return None
    if not 0 < odds < math.inf:
        return None
    return min(math.log(odds), MAX_LOG_ODDS)
