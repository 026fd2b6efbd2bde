"""What `shoal status`, `shoal doctor` and `Session.status` report of a swarm: `overview` and
`totals` as JSON, which users' scripts read, and the `..._said` as sentences.
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

# Groups of a node's record (`wire.record`) of which a member's message has fields of the same name.
_RECORD_GROUPS: dict[str, type[Group]] = {
    "progress": Progress,
    "exchanges": Exchanges,
    "link": LinkUse,
    "faults": Faults,
}

# Relative standard error above which a range of peers is shown and not a number: 1 / sqrt(16), so
# that of fewer than 16 members in view.
_MAX_SHOWN_ERROR = 0.25


def overview(
    swarm: str,
    manifest: Manifest,
    members: Mapping[str, Member],
    now: float,
    size: int | None = None,
    change: Change | None = None,
    departed: Mapping[str, Member] | None = None,
) -> dict[str, Any]:
    """Return the swarm, its totals, a row for each member, and the health report, ready for JSON.

    Args:
        swarm: its id.
        manifest: its manifest.
        members: peer id -> record, of those in view.
        now: Unix seconds.
        size: estimated number of peers of the whole swarm; None: ``members`` are all.
        change: the creator's newest change of the settings; None: none.
        departed: peer id -> last record of who left lately. Who came to the end of its run has a
            row too, so there may be more rows than peers.
    """
    peers = len(members) if size is None else size
    ended = [member for member in (departed or {}).values() if member.end is not None]
    shown = sorted(members.values(), key=_by_name) + sorted(ended, key=_by_name)
    in_seconds = manifest.outer.rounds_in_seconds
    return {
        "swarm": swarm,
        "name": manifest.name,
        "task": manifest.task,
        "method": manifest.outer.method,
        # A fragment is exchanged every so many steps, and all of them in a round.
        "every": manifest.outer.resolved().every,
        "fragments": manifest.outer.fragments_a_round,
        "optimizer": manifest.train.optimizer,
        "changes": _changes(change, members),
        "peers": peers,
        "totals": totals(members, peers),
        "members": [_row(member, now) for member in shown],
        "findings": health_report(members, now, in_seconds=in_seconds),
    }


def _by_name(member: Member) -> tuple[str, str]:
    return member.name, member.peer


def _row(member: Member, now: float) -> dict[str, Any]:
    return {
        "name": member.name,
        "peer": member.peer,
        "version": member.version,
        **_record_groups(member),
        "shard": f"{member.shard}/{member.shards}",
        "seen_s_ago": round(max(now - member.issued, 0.0), 1),
        "end": None if member.end is None else member.end.model_dump(mode="json"),
    }


def _record_groups(member: Member) -> dict[str, Any]:
    """Return the fields of ``member`` nested by group, as in a node's own record; "rollouts" is
    there only if it shares some.
    """
    groups: dict[str, Any] = {"loss": {"training": member.loss}}
    for name, group in _RECORD_GROUPS.items():
        # Named fields only: others, such as an admission, may be bytes, which JSON cannot hold.
        groups[name] = member.model_dump(mode="json", include=set(group.model_fields))
    if member.unused is not None:
        unused_share, main_reason = member.unused
        groups["rollouts"] = {"unused_share": unused_share, "unused_most": main_reason}
    return groups


def totals(members: Mapping[str, Member], size: int) -> dict[str, Any]:
    """Return figures of the whole swarm of about ``size`` peers, from the ``members`` in view.

    Where these are a sample, sums are divided by the share of the swarm that is in view. ``error``
    is the relative standard error of the size, 1 / sqrt(members), since chance decides which peers
    share a part of the directory; that peers differ in speed comes on top. ``steps_per_s`` is the
    mean of those that train, ``loss`` the median of all that state one.
    """
    size = max(size, len(members))
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
    """Return what `totals` found in one sentence; estimates are called so, and sums left out where
    a few members in view do not bear them.
    """
    said = []
    if found["tokens_per_s"] and found["error"] <= _MAX_SHOWN_ERROR:
        about = "about " if found["sampled"] else ""
        said.append(f"{about}{found['tokens_per_s']:,.0f} tokens a second in all")
    if found["loss"] is not None:
        said.append(f"median loss {found['loss']:.4f}")
    return f"{_peers_said(found)}{': ' if said else ''}{', '.join(said)}."


def _peers_said(found: Mapping[str, Any]) -> str:
    peers = f"{found['peers']:,} peer{'' if found['peers'] == 1 else 's'}"
    if not found["sampled"]:
        return peers
    if found["error"] > _MAX_SHOWN_ERROR:
        # Two standard errors each way, which hold in some 95 of 100 swarms.
        low = max(found["peers"] * (1 - 2 * found["error"]), found["listed"])
        high = found["peers"] * (1 + 2 * found["error"])
        return f"{low:,.0f} to {high:,.0f} peers; the {found['listed']} in view say no more"
    return (
        f"About {peers} (± {100 * found['error']:.0f} %), estimated from the {found['listed']} in "
        "view"
    )


def _changes(change: Change | None, members: Mapping[str, Member]) -> list[dict[str, Any]]:
    """Return what the creator has changed: from which round on, and how many of the ``members`` in
    view have the change.
    """
    if change is None:
        return []
    # A newer change holds all parts of the older ones.
    have = sum(member.change >= change.number for member in members.values())
    return [
        {"round": part.round, **part.settings(), "members": have, "of": len(members)}
        for part in change.parts
    ]


def changes_said(changes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the "changes" of an `overview` in sentences."""
    sentences = []
    for change in changes:
        settings = {name: change[name] for name in CHANGEABLE if name in change}
        sentences.append(
            f"Changed by the creator, from round {change['round']} on: {described(settings)} "
            f"({change['members']} of {change['of']} members in view have the change)."
        )
    return sentences
