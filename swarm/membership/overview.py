"""Overview of a swarm from the records of its members, for ``shoal status`` and `shoal.swarm.training.session.Session.status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.swarm.manifest.manifest import Manifest
from shoal.swarm.membership.health_report import health_report
from shoal.swarm.wire.member import Member


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


def reach(member: Member) -> str:
    """Return ``relayed`` if libp2p found that the member cannot be dialled and announces a relay, otherwise ``direct``."""
    return "relayed" if any("/p2p-circuit" in address for address in member.addresses) else "direct"


def overview(swarm: str, manifest: Manifest, members: Mapping[str, Member], now: float) -> dict[str, Any]:
    """Return the swarm, its ``members`` (peer id -> record) at ``now`` (Unix seconds) and the health report, ready for JSON."""
    fragments = int(manifest.outer.overlap().get("fragments", 1))
    return {
        "swarm": swarm,
        "name": manifest.name,
        "task": manifest.task,
        "method": manifest.outer.method,
        "every": manifest.outer.resolved().every,
        "optimizer": manifest.train.optimizer,
        "peers": len(members),
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
                "reach": reach(member),
                "seen_s_ago": round(max(now - member.issued, 0.0), 1),
            }
            for peer, member in sorted(members.items(), key=lambda item: (item[1].name, item[0]))
        ],
        "findings": health_report(members, now),
    }
