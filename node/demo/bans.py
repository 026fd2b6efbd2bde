"""Who was banned in a demo with cheats, and when."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.node.demo.run_nodes import Events


def rl_rounds(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the events of rounds of reinforcement learning."""
    return [event for event in events if event["event"] == "rl"]


def bans(
    nodes: Sequence[Mapping[str, Any]], events: Events, cheat: int, round_s: float
) -> dict[str, Any]:
    """Return which ``nodes`` were banned, from their ``events``; the last ``cheat`` cheat.

    Until the first node ended, for one that is gone cannot hand out its evidence. "banned_after":
    for each that cheats, the rounds of verification, of ``round_s`` seconds, from its first
    completions until all honest ones had banned it; None: they did not.
    """
    honest = len(nodes) - cheat
    end = min(max(event["time"] for event in rl_rounds(node)) for node in events)
    verified = [_verified(node, end) for node in events]
    banned_at = [_banned_at(mine) for mine in verified[:honest]]
    found: set[str] = set().union(*banned_at)
    banned_after: dict[str, float | None] = {}
    honest_banned: list[str] = []
    for index, node in enumerate(nodes):
        peer = _peer_id(events[index])
        if index >= honest:
            began = rl_rounds(events[index])[0]["time"]
            last = _banned_by_all(peer, banned_at)
            banned_after[node["name"]] = None if last is None else (last - began) / round_s
        elif peer in found:
            honest_banned.append(node["name"])
    return {
        "round_s": round_s,
        "rounds": max((len(mine) for mine in verified), default=0),
        "banned_after": banned_after,
        "honest_banned": sorted(honest_banned),
        "honest_final_reward": statistics.fmean(node["final_reward"] for node in nodes[:honest]),
        "honest_cumulative_reward": statistics.fmean(
            node["cumulative_reward"] for node in nodes[:honest]
        ),
    }


def _peer_id(events: Sequence[Mapping[str, Any]]) -> str:
    return next(str(event["peer"]) for event in events if event["event"] == "start")


def _verified(events: Sequence[Mapping[str, Any]], end: float) -> list[Mapping[str, Any]]:
    """Return the rounds of verification of a node up to ``end``."""
    return [event for event in events if event["event"] == "verify" and event["time"] <= end]


def _banned_at(verified: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return when a node first had each peer banned."""
    first: dict[str, float] = {}
    for event in verified:
        for peer in event["banned"]:
            first.setdefault(peer, event["time"])
    return first


def _banned_by_all(peer: str, banned_at: Sequence[Mapping[str, float]]) -> float | None:
    """Return when the last of the nodes had banned ``peer``; None if one did not."""
    if any(peer not in of_node for of_node in banned_at):
        return None
    return max(of_node[peer] for of_node in banned_at)
