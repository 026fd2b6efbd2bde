"""A look at a swarm as the records of its members show it: what `shoal status` tells, and a session of somebody's own loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.swarm.manifest.manifest import Manifest
from shoal.swarm.membership.health_report import health_report
from shoal.swarm.wire.member import Member


def facts(peer: str, member: Member) -> dict[str, Any]:
    """What a member says of its training, as JSON has it."""
    return {
        "name": member.name,
        "peer": peer,
        "state": member.state,
        "round": member.round,
        "step": member.step,
        "loss": member.loss,
        "steps_per_s": member.steps_per_s,
    }


def reach(member: Member) -> str:
    """How others get to a member: relayed if libp2p found that nobody can dial it and so announces a relay; else direct."""
    return "relayed" if any("/p2p-circuit" in address for address in member.addresses) else "direct"


def overview(swarm: str, manifest: Manifest, members: Mapping[str, Member], now: float) -> dict[str, Any]:
    """The swarm, its ``members`` (peer id -> record) at ``now`` (Unix seconds), and what is wrong, in sentences; as JSON has it."""
    return {
        "swarm": swarm,
        "name": manifest.name,
        "task": manifest.task,
        "method": manifest.outer.method,
        "every": manifest.outer.resolved().every,
        "peers": len(members),
        "members": [
            {
                **facts(peer, member),
                "step_s": 1 / member.steps_per_s if member.steps_per_s else None,
                "exchange_s": member.exchange_s,
                "wait_s": member.wait_s,
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
        "health_report": health_report(members, now),
    }
