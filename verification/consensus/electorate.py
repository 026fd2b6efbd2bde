"""The electorate of a round: who can be drawn, and for which claims. It follows from records.

    own = electorate(run, round, ledger, electorates, rules, table)
    root(own)                                          # the digest on which peers agree

Voters are the peers that entered within the last `Rules.life` rounds, are not banned, and have
shown by valid claims that they work (`Rules.proven`): fresh keys cost nothing. As long as no more
peers than sit in a draw have shown it, all who entered vote. Absent peers (`Table.is_absent`) do
not, unless no more than sit in a draw are left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import msgpack

from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.records import Claim
from shoal.verification.consensus.reputation import Table
from shoal.verification.consensus.rulings import Electorates, Rules, anchored, is_single, salts
from shoal.verification.consensus.sortition import OPENS, Electorate, beacon, is_audited, rank


def electorate(
    run: str,
    round: int,
    ledger: Ledger,
    electorates: Electorates,
    rules: Rules,
    table: Table,
    late: Collection[bytes] = (),
) -> Electorate:
    """Compute the electorate of ``round``; ``late``: commitments whose salts do not count.

    Verifiers are drawn for claims of voters, and at random for `Rules.strangers` of others, if the
    audit picks them, unless their author used the slot twice, had not entered in time, or is
    banned. If the audit picks none it is one by lot, for votes on it make the next beacon.
    """
    begins = round + OPENS
    voters = _voters(round, ledger, rules, table)
    seed = beacon(run, round, salts(round - 1, ledger, electorates, rules, late))
    sound: list[Claim] = []
    for claim in ledger.claims():
        if (
            claim.round == round
            and is_single(claim, ledger)
            and anchored(ledger, claim.peer, round, rules) is not None
            and not table.is_banned(claim.peer, begins)
        ):
            sound.append(claim)
    sound.sort(key=lambda claim: (claim.peer not in voters, rank(seed, claim.id, "")))
    audited = [claim for claim in sound if is_audited(seed, claim.id, rules.audit)] or sound[:1]
    strange = [claim.id for claim in audited if claim.peer not in voters]
    admitted = {claim.id for claim in audited if claim.peer in voters}
    admitted.update(strange[: rules.strangers])
    return Electorate(round, seed, voters, frozenset(admitted))


def _voters(round: int, ledger: Ledger, rules: Rules, table: Table) -> dict[str, str]:
    """Return the peers that can be drawn, with their operators."""
    entered = {}
    for peer in sorted(ledger.peers()):
        entry = ledger.entry(peer, round + 1, rules.life)
        if entry is not None and not table.is_banned(peer, round + OPENS):
            entered[peer] = entry.operator
    present = {peer: operator for peer, operator in entered.items() if not table.is_absent(peer)}
    if len(present) > rules.verifiers:
        entered = present
    proven = {}
    for peer, operator in entered.items():
        if table.valid(peer) >= rules.proven:
            proven[peer] = operator
    return proven if len(proven) > rules.verifiers else entered


def void(run: str, round: int) -> Electorate:
    """Return the electorate of a round on which peers did not agree: nobody is drawn, so its claims
    stay unverified.
    """
    return Electorate(round, beacon(run, round, ()), {}, frozenset())


def root(electorate: Electorate) -> bytes:
    """Return the SHA-256 of the encoding of ``electorate``."""
    claims = None if electorate.claims is None else sorted(electorate.claims)
    parts = [electorate.round, electorate.beacon, sorted(electorate.operators.items()), claims]
    return hashlib.sha256(
        b"shoal/verification/1/electorate\x00" + bytes(msgpack.packb(parts))
    ).digest()
