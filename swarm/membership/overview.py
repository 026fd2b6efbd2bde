"""Overview of a swarm from the records of its members, for ``shoal status`` and `shoal.swarm.training.session.Session.status`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

from shoal.swarm.manifest.manifest import Manifest
from shoal.swarm.membership.health_report import health_report
from shoal.swarm.wire.member import Member

ROUGH = 0.25  # standard error, of fewer than 16 in view, beyond which a number of peers says more than is known


def facts(peer: str, member: Member, fragments: int = 1) -> dict[str, Any]:
    """Return what a member reports of its training, ready for JSON. In a round each of the ``fragments`` is exchanged."""
    return {
        "name": member.name,
        "peer": peer,
        "state": member.state,
        "round": member.round // fragments,
        "step": member.step,
        "loss": member.loss,
        "steps_per_s": member.steps_per_s,
        "tokens_per_s": member.tokens_per_s,
        "mfu": member.mfu,
    }


def totals(members: Mapping[str, Member], size: int) -> dict[str, Any]:
    """Return what the whole swarm of about ``size`` peers does, by its ``members`` in view, ready for JSON.

    Where these are a sample, sums are theirs times the share that they are, and ``error`` is the standard error of the size as a
    part of it, as far as chance makes it: peers are dealt into buckets like balls into boxes. ``loss`` is the median.
    """
    sampled, training = size > len(members), [member for member in members.values() if member.state == "training"]
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
    number = f"{found['peers']:,} peer{'' if found['peers'] == 1 else 's'}"
    if found["sampled"]:
        number = f"About {number} (± {100 * found['error']:.0f} %), estimated from the {found['listed']} in view"
        if found["error"] > ROUGH:
            least, most = (found["peers"] * (1 + 2 * error) for error in (-found["error"], found["error"]))
            number = f"{max(least, found['listed']):,.0f} to {most:,.0f} peers; the {found['listed']} in view say no more"
    said = [f"{found['tokens_per_s']:,.0f} tokens a second in all"] if found["tokens_per_s"] else []
    said += [f"median loss {found['loss']:.4f}"] if found["loss"] is not None else []
    return f"{number}{': ' if said else ''}{', '.join(said)}."


def overview(swarm: str, manifest: Manifest, members: Mapping[str, Member], now: float, size: int | None = None) -> dict[str, Any]:
    """Return the swarm, its ``members`` (peer id -> record) at ``now`` (Unix seconds) and the health report, ready for JSON.

    ``size``: of the whole swarm, if ``members`` are a part of it.
    """
    fragments = int(manifest.outer.overlap().get("fragments", 1))
    return {
        "swarm": swarm,
        "name": manifest.name,
        "task": manifest.task,
        "method": manifest.outer.method,
        "every": manifest.outer.resolved().every,
        "optimizer": manifest.train.optimizer,
        "peers": len(members) if size is None else size,
        "totals": totals(members, len(members) if size is None else size),
        "members": [
            {
                **facts(peer, member, fragments),
                "step_s": 1 / member.steps_per_s if member.steps_per_s else None,
                "exchange_s": member.exchange_s,
                "wait_s": member.wait_s,
                "lag": member.lag,
                "lag_auto": member.lag_auto,
                "late": member.late,
                "exchanges": member.exchanges,
                "failures": dict(member.failures),
                "missing": list(member.missing_names),
                "shard": f"{member.shard}/{member.shards}",
                "version": member.version,
                "reach": member.reach,
                "throughput": member.throughput,
                "seen_s_ago": round(max(now - member.issued, 0.0), 1),
            }
            for peer, member in sorted(members.items(), key=lambda item: (item[1].name, item[0]))
        ],
        "findings": health_report(members, now, in_seconds=manifest.outer.round.startswith("seconds")),
    }
