"""Overview of a swarm from the records of its members, for ``shoal status`` and
`shoal.swarm.training.session.Session.status`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import Any

from shoal.swarm.changes import CHANGEABLE, Change, described
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.health_report import health_report
from shoal.swarm.wire.messages import Member
from shoal.swarm.wire.record import Exchanges, Faults, Group, LinkUse, Progress

GROUPS: dict[str, type[Group]] = {
    "progress": Progress,
    "exchanges": Exchanges,
    "link": LinkUse,
    "faults": Faults,
}
"""The groups of which a member states all or a part."""


def grouped(member: Member) -> dict[str, Any]:
    """Return what ``member`` states of its record, in the groups of it (`wire.record`)."""
    found: dict[str, Any] = {"loss": {"training": member.loss}}
    for name, group in GROUPS.items():
        # Only these: what else is in a record, such as an admission, may be bytes.
        found[name] = member.model_dump(mode="json", include=set(group.model_fields))
    if member.unused is not None:
        unused_share, reason = member.unused
        found["rollouts"] = {"unused_share": unused_share, "unused_most": reason}
    return found


# Standard error, that of fewer than 16 in view, beyond which a number of peers says more than is
# known.
MAX_SHOWN_ERROR = 0.25


def totals(members: Mapping[str, Member], size: int) -> dict[str, Any]:
    """Return what the whole swarm of about ``size`` peers does, by its ``members`` in view, ready
    for JSON.

    Where these are a sample, sums are theirs times the share that they are, and ``error`` is the
    standard error of the size as a part of it, as far as chance makes it: peers fall into buckets
    like balls into boxes. ``loss`` is the median.
    """
    sampled = size > len(members)
    training = [member for member in members.values() if member.state == "training"]
    losses = [member.loss for member in members.values() if member.loss is not None]
    scale = size / max(len(members), 1)
    return {
        "peers": size,
        "listed": len(members),
        "sampled": sampled,
        "error": round(math.sqrt(1 / max(len(members), 1)), 3) if sampled else 0.0,
        "training": round(len(training) * scale),
        "tokens_per_s": sum(member.tokens_per_s for member in training) * scale,
        "steps_per_s": fmean(member.steps_per_s for member in training) if training else None,
        "loss": median(losses) if losses else None,
    }


def totals_said(found: Mapping[str, Any]) -> str:
    """Return `totals` in one sentence, which says so where they are estimates."""
    said = []
    if found["tokens_per_s"]:
        said.append(f"{found['tokens_per_s']:,.0f} tokens a second in all")
    if found["loss"] is not None:
        said.append(f"median loss {found['loss']:.4f}")
    return f"{_peers_said(found)}{': ' if said else ''}{', '.join(said)}."


def _peers_said(found: Mapping[str, Any]) -> str:
    if not found["sampled"]:
        return f"{found['peers']:,} peer{'' if found['peers'] == 1 else 's'}"
    if found["error"] > MAX_SHOWN_ERROR:
        least = max(found["peers"] * (1 - 2 * found["error"]), found["listed"])
        most = found["peers"] * (1 + 2 * found["error"])
        return f"{least:,.0f} to {most:,.0f} peers; the {found['listed']} in view say no more"
    number = f"{found['peers']:,} peer{'' if found['peers'] == 1 else 's'}"
    return (
        f"About {number} (± {100 * found['error']:.0f} %), estimated from the {found['listed']} in "
        "view"
    )


def changes_shown(change: Change | None, members: Mapping[str, Member]) -> list[dict[str, Any]]:
    """Return what the creator has changed, ready for JSON: from which round on, and how many
    ``members`` have the change.
    """
    if change is None:
        return []
    have = sum(member.change >= change.number for member in members.values())
    return [
        {"round": part.round, **part.settings(), "members": have, "of": len(members)}
        for part in change.parts
    ]


def changes_said(changes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return `changes_shown` in sentences."""
    found = []
    for one in changes:
        settings = {name: one[name] for name in CHANGEABLE if name in one}
        found.append(
            f"Changed by the creator, from round {one['round']} on: {described(settings)} "
            f"({one['members']} of {one['of']} members have the change)."
        )
    return found


def _by_name(member: Member) -> tuple[str, str]:
    return member.name, member.peer


def overview(
    swarm: str,
    manifest: Manifest,
    members: Mapping[str, Member],
    now: float,
    size: int | None = None,
    change: Change | None = None,
    departed: Mapping[str, Member] | None = None,
) -> dict[str, Any]:
    """Return the swarm, its ``members`` (peer id -> record) at ``now`` (Unix seconds) and the
    health report, ready for JSON.

    ``size``: of the whole swarm, if ``members`` are a part of it. In a round each fragment is
    exchanged. ``change``: the newest of its settings. ``departed``: who left lately; of these the
    ones that came to their end are shown too.
    """
    ended = [member for member in (departed or {}).values() if member.end is not None]
    shown = sorted(members.values(), key=_by_name) + sorted(ended, key=_by_name)
    return {
        "swarm": swarm,
        "name": manifest.name,
        "task": manifest.task,
        "method": manifest.outer.method,
        "every": manifest.outer.resolved().every,
        "optimizer": manifest.train.optimizer,
        "fragments": int(manifest.outer.overlap().get("fragments", 1)),
        "changes": changes_shown(change, members),
        "peers": len(members) if size is None else size,
        "totals": totals(members, len(members) if size is None else size),
        "members": [
            {
                "name": member.name,
                "peer": member.peer,
                "version": member.version,
                **grouped(member),
                "shard": f"{member.shard}/{member.shards}",
                "seen_s_ago": round(max(now - member.issued, 0.0), 1),
                "end": None if member.end is None else member.end.model_dump(mode="json"),
            }
            for member in shown
        ],
        "findings": health_report(
            members, now, in_seconds=manifest.outer.round.startswith("seconds")
        ),
    }
