"""Work of ``shoal peers``: compute the reputation of a swarm's members without being one of them.

Standings are computed from the signed records that several members serve. Only members know which
draws counted; so where their logs give different tables, the commonest is shown, and how many give
it.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from shoal.node.console import table as grid
from shoal.swarm.access.link import Link
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.visit import visited
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.stream import short
from shoal.swarm.settings.verification import VerifySettings
from shoal.swarm.topics.attestation import verify_record
from shoal.swarm.topics.verification_log import fetch_log
from shoal.swarm.wire.messages import Member
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.log import (
    MOST_PAIRS,
    Log,
    decode_log,
    is_stale,
    pairs_to_draw,
)
from shoal.verification.consensus.records import Claim
from shoal.verification.consensus.reputation import ScoreRules, Standing, Table, compute_scores
from shoal.verification.consensus.rulings import Rules
from shoal.verification.consensus.sortition import LEAST, SETTLED

ASKED_MEMBERS = 5
"""Whose logs are compared."""
LOG_S = 10.0
"""For the log of one."""


def rules_of(verify: VerifySettings) -> Rules:
    """Return the rules by which all peers of a swarm with these settings compute scores."""
    return Rules(audit=verify.audit_rate)


def table_of(log: Log, swarm: str, rules: Rules, round: int) -> Table:
    """Compute the standings at the end of ``round`` from the records in ``log`` whose signature is
    valid. Raises ValueError if that would take minutes, as no honest log does.
    """
    oldest = round - 2 * rules.kept_rounds
    records = []
    for signed in log.records:
        record = signed.record
        is_of_swarm = getattr(record, "run", swarm) == swarm
        is_forgotten = isinstance(record, Claim) and record.round < oldest
        if not is_of_swarm or is_forgotten:
            continue
        if verify_record(record.peer, record.encoded, signed.signature):
            records.append(record)
    ledger = Ledger(records)
    electorates = {electorate.round: electorate for electorate in log.electorates}
    if is_stale(log.base, round, rules) or pairs_to_draw(log.electorates, ledger) > MOST_PAIRS:
        raise ValueError("A log is too old, or has more voters and claims than a swarm can have.")
    return compute_scores(
        ledger, electorates, rules, ScoreRules(), max(round, log.base.round), log.base
    )


def read_peers(link: Link) -> dict[str, Any]:
    """Return the standing of each member. Raises StartupError, NetworkError or MessageError."""
    tables: dict[str, Table] = {}
    with visited(link) as (host, manifest, members, _):
        if manifest.terms is not None:
            tables = _reputations(host, link.swarm, manifest, members)
    table = Table(-1, {}, {})
    agree = 0
    if tables:
        ((common, agree),) = Counter(each.digest for each in tables.values()).most_common(1)
        table = next(each for each in tables.values() if each.digest == common)
    names = {peer: member.name for peer, member in members.items()}
    for peer in table.standings:
        names.setdefault(peer, "")
    now = time.time()
    peers: list[dict[str, Any]] = []
    for peer, name in sorted(names.items(), key=lambda item: (item[1], item[0])):
        standing = _standing(table, peer, manifest.verify.round_s, now)
        peers.append({"name": name, "peer": peer, "here": peer in members, **standing})
    return {
        "swarm": link.swarm,
        "name": manifest.name,
        "verify": manifest.verify.audit_rate,
        "round": table.round,
        "asked": len(tables),
        "agree": agree,
        "peers": peers,
    }


def _reputations(
    host: Host, swarm: str, manifest: Manifest, members: Mapping[str, Member]
) -> dict[str, Table]:
    """Return the table by peer, of the peers that answered."""
    round = int(time.time() // manifest.verify.round_s) - SETTLED
    rules = rules_of(manifest.verify)
    found: dict[str, Table] = {}
    for peer in secrets.SystemRandom().sample(sorted(members), min(ASKED_MEMBERS, len(members))):
        try:
            log = decode_log(fetch_log(host, peer, members[peer].addresses, swarm, 0, LOG_S))
            found[peer] = table_of(log, swarm, rules, round)
        except (NetworkError, MessageError, ValueError):
            continue
    if members and not found:
        raise NetworkError(
            "No member of the swarm served its log of verification: try again in a minute."
        )
    return found


def _standing(table: Table, peer: str, round_s: float, now: float) -> dict[str, Any]:
    standing = table.standings.get(peer, Standing())
    until = table.banned_until(peer)
    ends = 0.0 if until is None else (until + 1) * round_s
    return {
        "score": standing.score / 1000,
        "claims": standing.claims,
        "votes": standing.votes,
        "disputes": standing.appeals,
        "bans": standing.bans,
        "banned_until": ends if ends > now else None,
        "why": reasons(standing),
        "drawn": not table.is_absent(peer),
    }


def reasons(standing: Standing) -> str:
    """Describe in a few words what cost a peer its reputation; empty if nothing did."""
    counts = {
        "claims found invalid": standing.claims["invalid"],
        "votes against the outcome": standing.votes["against"],
        "planted claims approved": standing.votes["missed"],
        "votes not revealed": standing.votes["withheld"],
        "disputes lost": standing.appeals["lost"],
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def summary(report: Mapping[str, Any]) -> str:
    if not report["verify"]:
        return (
            f"{report['name']}: nothing is verified in this swarm (it was created without --verify)"
        )
    count = len(report["peers"])
    title = (
        f"{report['name']}: {count} peer{'' if count == 1 else 's'}; {report['agree']} of "
        f"{report['asked']} logs agree"
    )
    if count <= LEAST:
        title += f"; a claim is checked by {LEAST} others, so none is with fewer than {LEAST + 1}"
    columns = (
        "name",
        "peer",
        "score",
        "claims valid/invalid/unverified",
        "votes with/against",
        "banned until",
        "because of",
    )
    return grid(
        columns,
        map(_cells, report["peers"]),
        words=("name", "peer", "because of"),
        width=140,
        title=title,
    )


def _cells(one: Mapping[str, Any]) -> list[str]:
    claims = one["claims"]
    votes = one["votes"]
    until = one["banned_until"]
    missed = "" if one["drawn"] else f"not drawn: {votes['absent']} votes not cast"
    return [
        one["name"] or "(away)",
        short(one["peer"]),
        f"{one['score']:.2f}",
        f"{claims['valid'] + claims['planted']}/{claims['invalid']}/{claims['unverified']}",
        f"{votes['agreed']}/{votes['against'] + votes['missed']}",
        "-" if until is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(until)),
        ", ".join(filter(None, (one["why"], missed))) or "-",
    ]
