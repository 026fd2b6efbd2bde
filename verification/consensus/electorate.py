"""Electorate of a round: who can be drawn, and for which claims. It follows from records; peers agree on it by `ViewQuorum`.

Voters are the peers that entered within the last `Rules.life` rounds, are not banned, and have shown by valid claims that they work
(`Rules.proven`): fresh keys cost nothing. As long as no more peers than sit in a draw have shown it, all who entered vote.
Absent peers (`Table.is_absent`) do not, unless no more than sit in a draw are left.
"""

from __future__ import annotations

import hashlib

import msgpack

from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.reputation import Table
from shoal.verification.consensus.rulings import Electorates, Rules, anchored, is_single, salts
from shoal.verification.consensus.sortition import OPENS, Electorate, beacon, is_audited, rank


def electorate(run: str, round: int, ledger: Ledger, electorates: Electorates, rules: Rules, table: Table) -> Electorate:
    """Compute the electorate of ``round``. Verifiers are drawn for claims of voters, and by lot for `Rules.strangers` of others,
    if the audit picks them, unless their author used the slot twice, had not entered in time, or is banned.
    """
    begins = round + OPENS
    entered = {}
    for peer in sorted({entry.peer for entry in ledger.entries()}):
        entry = ledger.entry(peer, round + 1, rules.life)
        if entry is not None and not table.is_banned(peer, begins):
            entered[peer] = entry.operator
    there = {peer: operator for peer, operator in entered.items() if not table.is_absent(peer)}
    entered = there if len(there) > rules.verifiers else entered
    proven = {peer: operator for peer, operator in entered.items() if table.valid(peer) >= rules.proven}
    voters = proven if len(proven) > rules.verifiers else entered
    seed = beacon(run, round, salts(round - 1, ledger, electorates, rules))
    claims = [
        claim
        for claim in ledger.claims()
        if claim.round == round
        and is_single(claim, ledger)
        and anchored(ledger, claim.peer, round, rules) is not None
        and not table.is_banned(claim.peer, begins)
        and is_audited(seed, claim.id, rules.audit)
    ]
    admitted = {claim.id for claim in claims if claim.peer in voters}
    strange = sorted((claim.id for claim in claims if claim.peer not in voters), key=lambda case: rank(seed, case, ""))
    return Electorate(round, seed, voters, frozenset(admitted.union(strange[: rules.strangers])))


def void(run: str, round: int) -> Electorate:
    """Return the electorate of a round on which peers did not agree: nobody is drawn, so its claims stay unverified."""
    return Electorate(round, beacon(run, round, ()), {}, frozenset())


def root(electorate: Electorate) -> bytes:
    """Return the SHA-256 of the encoding of ``electorate``."""
    claims = None if electorate.claims is None else sorted(electorate.claims)
    parts = [electorate.round, electorate.beacon, sorted(electorate.operators.items()), claims]
    return hashlib.sha256(b"shoal/verification/1/electorate\x00" + bytes(msgpack.packb(parts))).digest()
