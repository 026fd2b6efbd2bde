"""``shoal demo --task rl``: nodes on this machine that learn from each other's rollouts."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.node.config.device import resolve_device
from shoal.node.config.settings import ConfigError, Settings
from shoal.node.demo.bans import bans, rl_rounds
from shoal.node.demo.internal_errors import internal_errors, internal_errors_line
from shoal.node.demo.run_nodes import Events, Given, demo_settings, run_nodes
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
    given: dict[str, Any] = {"task.hooks": "rl", "train.steps": rounds}
    if verified:
        given |= VERIFIED
    settings = demo_settings(peers, seed, {**given, **more})
    # Errors are raised here at once, and not by every node.
    make_task(settings)
    resolve_device(device)
    began = time.monotonic()
    common = ["--device", device]
    # The settings of [rl] are each node's own, so joining nodes do not get them from the swarm.
    chosen = settings.rl.model_dump(exclude={"policy"}, exclude_defaults=True)
    for key, value in chosen.items():
        common.append(f"--set=rl.{key}={json.dumps(value)}")
    if verbose:
        common.append("--verbose")
    flags = [["--policy", policy, *common] for policy in policies(settings)]
    what = f"that learn {settings.rl.env!r}"
    progress = LearningProgress(rounds)
    with run_nodes(settings, keep, what, flags, progress, cheat) as (_, results, events):
        foreign = settings.rl.external > 0 and settings.rl.only is None
        found = report(results, time.monotonic() - began, foreign=foreign)
        if verified:
            found["verify"] = bans(found["nodes"], events, cheat, settings.verify.round_s)
        return found


@dataclass(frozen=True)
class LearningProgress:
    """How far nodes are that learn from each other's rollouts."""

    rounds: int

    def done(self, events: Events) -> int:
        """Return the rounds that all nodes have done."""
        return min((len(rl_rounds(node)) for node in events), default=0)

    def lines(self, events: Events, shown: int, now: int) -> Iterator[str]:
        """Yield the rewards of the rounds since the last line."""
        rewards: list[str] = []
        foreign = 0
        for node in events:
            fresh = rl_rounds(node)[shown:now]
            rewards.append(_mean_reward(fresh))
            foreign += sum(event["foreign"] for event in fresh)
        yield (
            f"round {now} of {self.rounds}: reward {'  '.join(rewards)}, {foreign} groups of "
            "others learnt from"
        )


def policies(settings: Settings) -> list[str]:
    """Return the policy of each node."""
    peers = settings.swarm.start_when
    policy = settings.rl.policy
    kind, habit, steps = (*policy.split(":"), "", "")[:3]
    if kind != "tiny" or habit or not settings.outer.alone or settings.verify.audit_rate:
        return [policy] * peers
    habits = list(HABITS)
    ending = f":{steps}" if steps else ""
    return [f"tiny:{habits[index % len(habits)]}{ending}" for index in range(peers)]


def _mean_reward(events: Sequence[Mapping[str, Any]]) -> str:
    known = [event["reward"] for event in events if event["reward"] is not None]
    return f"{statistics.fmean(known):.3f}" if known else "-"


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
    if not foreign or len(results) < 2:
        return found
    for result in results:
        if not result["rl"]["received"]:
            found.append(f"{result['name']} learnt alone: no rollout of another node reached it")
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

    def total(key: str) -> int:
        return sum(one[key] for one in found)

    rejected: Counter[str] = Counter()
    own: list[dict[str, Any]] = []
    for result in results:
        of_node = result["rl"]
        rejected.update(of_node["rejected"])
        own.append({"name": result["name"], **{key: of_node[key] for key in NODE_KEYS}})
    return {
        "peers": len(results),
        "env": found[0]["env"],
        "method": results[0]["setup"]["method"],
        "rounds": max(one["rounds"] for one in found),
        "held_out": found[0]["held_out"],
        "first_reward": mean("first_reward"),
        "final_reward": mean("final_reward"),
        "cumulative_reward": mean("cumulative_reward"),
        "effective_sample_size": mean("effective_sample_size"),
        "sent": total("sent"),
        "unsent": total("unsent"),
        "received": total("received"),
        "used": total("used"),
        "rejected": dict(rejected),
        "bytes_sent": sum(result["link"]["bytes_sent"] for result in results),
        "bytes_received": sum(result["link"]["bytes_received"] for result in results),
        "failed": sum(result["exchanges"]["failed"] for result in results),
        "internal_errors": internal_errors(results),
        "trained_alone": alone(results, foreign=foreign),
        "params": results[0]["setup"]["params"],
        "nodes": own,
        "wall_s": statistics.fmean(result["wall_s"] for result in results),
        "seconds": seconds,
    }


def summary(report: Mapping[str, Any]) -> str:
    """Return what the demo came to, for people."""
    ended = "  ".join(
        f"{node['first_reward']:.3f} -> {node['final_reward']:.3f}" for node in report["nodes"]
    )
    left_out = {reason: count for reason, count in report["rejected"].items() if count}
    refused = listed(left_out) or "none"
    verified = f"\n{_bans_said(report['verify'])}" if "verify" in report else ""
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
        f"{amount(report['bytes_sent'])} sent{verified}{lonely}{internal_errors_line(report)}"
    )


def _bans_said(found: Mapping[str, Any]) -> str:
    """Return who was banned, and what the honest nodes reached."""
    said = [f"{name} is honest and was banned" for name in found["honest_banned"]]
    for name, after in found["banned_after"].items():
        if after is None:
            said.append(f"{name} was not banned")
        else:
            said.append(f"{name} was banned after {after:.1f}")
    return (
        f"{'; '.join(said) or 'nobody was banned'} (rounds of verification of "
        f"{found['round_s']:g} s); the honest ones' reward: {found['honest_final_reward']:.3f}"
    )
