"""Odds of a vote of drawn verifiers: a million simulated claims for each row, beside the closed
form.

    python bench/votes.py --claims 1000000 --json

``collude`` is the share of the population that votes against the truth each time; all others err on
1 % of claims. A row holds both probabilities, since with equal errors they are equal, and by how
many standard errors the simulation differs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch

# run as a file: its folder comes first on the path, where bench/verification.py hides the package
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from shoal.verification.consensus.odds import vote

SEATS = (3, 5, 7)
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4)
ERROR = 0.01


def simulate(claims: int, n: int, collude: float, random: torch.Generator) -> float:
    """The share of ``claims`` decided against the truth."""
    against = torch.zeros(claims, dtype=torch.int32)
    for _ in range(n):
        hostile = torch.rand(claims, generator=random) < collude
        slips = torch.rand(claims, generator=random) < ERROR
        against += hostile | slips
    return float((against > n // 2).double().mean())


def rows(claims: int, seed: int = 0) -> list[dict[str, float]]:
    """One for each number of seats and share of colluders."""
    random, found = torch.Generator().manual_seed(seed), []
    for n in SEATS:
        for collude in SHARES:
            closed = vote(n, collude, miss=ERROR, alarm=ERROR).wrong_accepted
            simulated = simulate(claims, n, collude, random)
            error = math.sqrt(closed * (1 - closed) / claims)
            row = {
                "n": n,
                "collude": collude,
                "closed": closed,
                "simulated": simulated,
                "errors": (simulated - closed) / error,
            }
            found.append(row)
    return found


def main() -> None:
    """Print a table, or one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--claims", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.claims < 1:
        parser.error("--claims must be at least 1")
    found = rows(options.claims)
    if options.json:
        print(json.dumps({"claims": options.claims, "vote": found}))
        return
    print("  n  colluders  closed form  simulated  standard errors")
    for row in found:
        print(
            f"{row['n']:3}  {row['collude']:9.0%}  {row['closed']:11.5f}  {row['simulated']:9.5f}  "
            f"{row['errors']:+15.2f}"
        )


if __name__ == "__main__":
    main()
