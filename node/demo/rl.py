"""``shoal demo --task rl``: run a swarm of nodes on this machine that learn from each other's
rollouts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.node.config.device import resolve_device
from shoal.node.config.settings import ConfigError, Settings
from shoal.node.demo.demo import (
    Events,
    Given,
    demo_settings,
    erring,
    internal_errors,
    run_nodes,
)
from shoal.node.rl.loading import make_task
from shoal.node.rl.tiny import HABITS
from shoal.swarm.figures import amount, duration
from shoal.swarm.refusals import listed

VERIFIED = {"verify.round_s": 15.0}
"""Settings of verification in a demo, which ends before the usual ones say anything."""


def run_demo(
    *,
    peers: int,
    rounds: int,
    seed: int,
    device: str,
    keep: Path | None,
    verbose: bool,
    cheat: int,
    more: Given,
) -> dict[str, Any]:
    """Learn with ``peers`` nodes for ``rounds`` rounds; return the `report`.

    ``cheat``: how many of them, the last ones, cheat (`cheating`). ``more``: further settings, with
    dotted keys, such as ``rl.local``. With the policy ``tiny`` every node begins with another wrong
    habit, unless weights are exchanged too, for which all must begin alike, or completions are
    verified. Verified ones have short rounds of verification.

    Raises:
        ConfigError, and others: a setting, the task or the device cannot be used.
        DemoError: a node failed or made no progress.
    """
    verified = bool(more.get("verify.audit_rate"))
    if (cheat and not verified) or cheat >= peers:
        raise ConfigError(
            "--cheat needs fewer cheats than peers, and --verify 1, which finds them: change "
            "either."
        )
    given = {**(VERIFIED if verified else {}), "task.hooks": "rl", "train.steps": rounds}
    settings = demo_settings(peers, seed, {**given, **more})
    make_task(settings)  # errors are raised here at once, and not by every node
    resolve_device(device)
    began = time.monotonic()
    # The settings of [rl] are each node's own, so joining nodes do not get them from the swarm.
    chosen = settings.rl.model_dump(exclude={"policy"}, exclude_defaults=True)
    common = [
        *(f"--set=rl.{key}={json.dumps(value)}" for key, value in chosen.items()),
        "--device",
        device,
    ]
    common += ["--verbose"] if verbose else []

    def done(events: Events) -> int:
        return min((len(_rounds(node)) for node in events), default=0)

    def said(events: Events, shown: int, now: int) -> Iterator[str]:
        fresh = [_rounds(node)[shown:now] for node in events]
        rewards = "  ".join(map(_mean_reward, fresh))
        foreign = sum(event["foreign"] for node in fresh for event in node)
        yield f"round {now} of {rounds}: reward {rewards}, {foreign} groups of others learnt from"

    what = f"that learn {settings.rl.env!r}"
    flags = [["--policy", policy, *common] for policy in policies(settings)]
    with run_nodes(settings, keep, what, flags, done, said, rounds, cheat) as (_, results, events):
        foreign = settings.rl.external > 0 and settings.rl.only is None
        found = report(results, time.monotonic() - began, foreign=foreign)
        return (
            {**found, "verify": bans(found["nodes"], events, cheat, settings.verify.round_s)}
            if verified
            else found
        )


def policies(settings: Settings) -> list[str]:
    """Return the policy of each node."""
    peers = settings.swarm.start_when
    policy = settings.rl.policy
    kind, habit, steps = (*policy.split(":"), "", "")[:3]
    if kind != "tiny" or habit or not settings.outer.alone or settings.verify.audit_rate:
        return [policy] * peers
    return [
        f"tiny:{list(HABITS)[index % len(HABITS)]}{steps and f':{steps}'}" for index in range(peers)
    ]


def _rounds(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event["event"] == "rl"]


def _mean_reward(events: Sequence[Mapping[str, Any]]) -> str:
    known = [event["reward"] for event in events if event["reward"] is not None]
    return f"{statistics.fmean(known):.3f}" if known else "-"


def bans(
    nodes: Sequence[Mapping[str, Any]], events: Events, cheat: int, round_s: float
) -> dict[str, Any]:
    """Return which ``nodes`` were banned, from their ``events``; the last ``cheat`` cheat.

    Until the first node ended, for one that is gone cannot hand out its evidence. "banned_after":
    for each that cheats, the rounds of verification, of ``round_s`` seconds, from its first
    completions until all honest ones had banned it; None: they did not.
    """
    peers = [next(event["peer"] for event in node if event["event"] == "start") for node in events]
    end = min(max(event["time"] for event in _rounds(node)) for node in events)
    seen = [
        [event for event in node if event["event"] == "verify" and event["time"] <= end]
        for node in events
    ]
    honest = len(nodes) - cheat

    def after(index: int) -> float | None:
        firsts = [
            next((one["time"] for one in mine if peers[index] in one["banned"]), None)
            for mine in seen[:honest]
        ]
        known = [first for first in firsts if first is not None]
        return (
            (max(known) - _rounds(events[index])[0]["time"]) / round_s
            if len(known) == honest
            else None
        )

    found = {peer for mine in seen[:honest] for one in mine for peer in one["banned"]}
    rewards = {
        key: statistics.fmean(node[key] for node in nodes[:honest])
        for key in ("final_reward", "cumulative_reward")
    }
    return {
        "round_s": round_s,
        "rounds": max((len(mine) for mine in seen), default=0),
        "banned_after": {nodes[index]["name"]: after(index) for index in range(honest, len(nodes))},
        "honest_banned": sorted(
            nodes[index]["name"] for index in range(honest) if peers[index] in found
        ),
        **{f"honest_{key}": reward for key, reward in rewards.items()},
    }


NODE_KEYS = (
    "policy",
    "first_reward",
    "final_reward",
    "cumulative_reward",
    "effective_sample_size",
    "sent",
    "received",
    "used",
    "waiting",
    "rejected",
    "bytes_sent",
    "bytes_received",
)


def alone(results: Sequence[Mapping[str, Any]], *, foreign: bool) -> list[str]:
    """Return a sentence for each node that got nothing from others: no weights where they are
    exchanged, or no rollouts where it was to learn from others' (``foreign``).
    """
    found = [result["trained_alone"] for result in results if result["trained_alone"]]
    if foreign and len(results) > 1:
        found += [
            f"{result['name']} learnt alone: no rollout of another node reached it"
            for result in results
            if not result["rl"]["received"]
        ]
    return found


def report(
    results: Sequence[Mapping[str, Any]], seconds: float, *, foreign: bool
) -> dict[str, Any]:
    """Return the report that ``--json`` prints last: each node under "nodes", and means over them,
    or sums (rollouts, bytes).

    ``foreign``: the nodes were to learn from each other's rollouts.
    """
    found = [result["rl"] for result in results]

    def mean(key: str) -> float | None:
        known = [one[key] for one in found if one[key] is not None]
        return statistics.fmean(known) if known else None

    rejected: Counter[str] = Counter()
    for one in found:
        rejected.update(one["rejected"])
    own = [{"name": r["name"], **{key: r["rl"][key] for key in NODE_KEYS}} for r in results]
    return {
        "peers": len(results),
        "env": found[0]["env"],
        "method": results[0]["method"],
        "rounds": max(one["rounds"] for one in found),
        "held_out": found[0]["held_out"],
        **{
            key: mean(key)
            for key in (
                "first_reward",
                "final_reward",
                "cumulative_reward",
                "effective_sample_size",
            )
        },
        **{key: sum(one[key] for one in found) for key in ("sent", "unsent", "received", "used")},
        "rejected": dict(rejected),
        "bytes_sent": sum(result["bytes_sent"] + result["rl"]["bytes_sent"] for result in results),
        "bytes_received": sum(
            result["bytes_received"] + result["rl"]["bytes_received"] for result in results
        ),
        "failed": sum(result["failed"] for result in results),
        "internal_errors": internal_errors(results),
        "trained_alone": alone(results, foreign=foreign),
        "params": results[0]["params"],
        "nodes": own,
        "wall_s": statistics.fmean(result["wall_s"] for result in results),
        "seconds": seconds,
    }


def summary(report: Mapping[str, Any]) -> str:
    ended = "  ".join(
        f"{node['first_reward']:.3f} -> {node['final_reward']:.3f}" for node in report["nodes"]
    )
    left_out = {reason: count for reason, count in report["rejected"].items() if count}
    refused = listed(left_out) or "none"
    verified = ""
    if "verify" in report:
        said = [
            f"{name} was not banned" if after is None else f"{name} was banned after {after:.1f}"
            for name, after in report["verify"]["banned_after"].items()
        ]
        found = report["verify"]
        wrongly = [f"{name} is honest and was banned" for name in found["honest_banned"]]
        verified = (
            f"\n{'; '.join(wrongly + said) or 'nobody was banned'}"
            f" (rounds of verification of {found['round_s']:g} s); the honest ones' reward: "
            f"{found['honest_final_reward']:.3f}"
        )
    lonely = "".join(f"\n{sentence}" for sentence in report["trained_alone"])
    return (
        f"{report['peers']} nodes, {report['params']:,} parameters, {report['rounds']} rounds of "
        f"{report['env']!r}, {duration(round(report['seconds']))}\n"
        f"greedy reward on {report['held_out']} held-out questions: {report['first_reward']:.3f} "
        f"at first, {report['final_reward']:.3f} in the end ({ended})\n"
        f"cumulative reward: {report['cumulative_reward']:.1f} of at most {report['rounds']} per "
        "node\n"
        f"{report['sent']} rollouts sent, {report['received']} received, {report['used']} learnt "
        f"from; not used: {refused}\n"
        f"{amount(report['bytes_sent'])} sent{verified}{lonely}{erring(report)}"
    )
