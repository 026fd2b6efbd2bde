"""``shoal demo --task rl``: run a swarm of nodes on this machine that learn from each other's rollouts."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.node.config.device import resolve_device
from shoal.node.config.settings import ConfigError, Settings, load
from shoal.node.demo.demo import settings_toml, stage
from shoal.node.demo.nodes import LOOK_S, Liveness, Nodes, start_first
from shoal.node.metrics.sinks import check_demo, flags_of_demo
from shoal.node.rl.rollout_sharing import make_task
from shoal.node.rl.tiny import HABITS
from shoal.node.runtime.display import Display
from shoal.node.runtime.resume import RESULT

VERIFIED = {"verify.round_s": 15.0}
"""Settings of verification in a demo, which ends before the usual ones say anything."""


def run_demo(
    *,
    peers: int = 4,
    rounds: int = 40,
    seed: int = 0,
    device: str = "auto",
    keep: Path | None = None,
    verbose: bool = False,
    cheat: int = 0,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Learn with ``peers`` nodes for ``rounds`` rounds; return the `report`.

    ``cheat``: how many of them, the last ones, cheat (`cheating`). ``more``: further settings, with dotted keys, such as
    ``rl.local``. With the policy ``tiny`` every node begins with another wrong habit, unless weights are exchanged too, for which
    all must begin alike, or completions are verified. Verified ones have short rounds of verification.

    Raises:
        ConfigError, and others: a setting, the task or the device cannot be used.
        DemoError: a node failed or made no progress.
    """
    verified = bool((more or {}).get("verify.audit_rate"))
    if (cheat and not verified) or cheat >= peers:
        raise ConfigError("--cheat needs fewer cheats than peers, and --verify 1, which finds them: change either.")
    settings = load(
        None,
        {
            **(VERIFIED if verified else {}),
            "swarm.name": "demo",
            "swarm.start_when": peers,
            "swarm.shards": peers,
            "task.hooks": "rl",
            "train.steps": rounds,
            "train.seed": seed,
            **(more or {}),
        },
    )
    make_task(settings)  # errors are raised here at once, and not by every node
    resolve_device(device)
    began = time.monotonic()
    with stage(keep) as (folder, display):
        check_demo(settings.node, peers, display.message)
        with Nodes(folder) as nodes:
            liveness = Liveness([folder / f"peer-{index}" for index in range(peers)])
            _start(nodes, settings, ["--device", device, *(["--verbose"] if verbose else [])], display, liveness, cheat)
            _watch(nodes, rounds, display, liveness)
            events = liveness.look(peers)
        display.close()
        results = [json.loads((folder / f"peer-{index}" / RESULT).read_text()) for index in range(peers)]
        found = report(results, time.monotonic() - began)
        return {**found, "verify": bans(found["nodes"], events, cheat, settings.verify.round_s)} if verified else found


def policies(settings: Settings) -> list[str]:
    """Return the policy of each node."""
    peers, policy = settings.swarm.start_when, settings.rl.policy
    kind, habit, steps = (*policy.split(":"), "", "")[:3]
    if kind != "tiny" or habit or not settings.outer.alone or settings.verify.audit_rate:
        return [policy] * peers
    return [f"tiny:{list(HABITS)[index % len(HABITS)]}{steps and f':{steps}'}" for index in range(peers)]


def _start(nodes: Nodes, settings: Settings, flags: Sequence[str], display: Display, liveness: Liveness, cheat: int) -> None:
    file = nodes.folder / "swarm.toml"
    file.write_text(settings_toml(settings), encoding="utf-8")
    rl = settings.rl
    # The settings of [rl] are each node's own, so joining nodes do not get them from the swarm.
    given = rl.model_dump(exclude={"policy"}, exclude_defaults=True)
    chosen = [f"--set=rl.{key}={json.dumps(value)}" for key, value in given.items()]
    node = settings.node
    chosen += ["--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1", *flags, *settings.train.flags()]
    own = [["--policy", policy, *chosen, *flags_of_demo(node, index)] for index, policy in enumerate(policies(settings))]
    display.message(f"starting {len(own)} nodes that learn {rl.env!r} on this machine")
    link = start_first(nodes, ["up", str(file), *own[0]], display, liveness)
    for index in range(1, len(own)):
        program = "shoal.node.demo.cheating" if index >= len(own) - cheat else "shoal"
        nodes.start(["join", link, *own[index]], f"peer-{index}", program=(program,))


def _watch(nodes: Nodes, rounds: int, display: Display, liveness: Liveness) -> None:
    """Show the rounds until all nodes have ended."""
    shown, step = 0, max(rounds // 10, 1)
    tick = threading.Event()
    while not nodes.check():
        tick.wait(LOOK_S)
        found = liveness.look(sum(process.poll() == 0 for process in nodes.processes))
        events = [[event for event in node if event["event"] == "rl"] for node in found]
        done = min(map(len, events), default=0)
        if done > shown and (done == rounds or done - shown >= step):
            rewards = "  ".join(_mean_reward(node[shown:done]) for node in events)
            foreign = sum(event["foreign"] for node in events for event in node[shown:done])
            display.message(f"round {done} of {rounds}: reward {rewards}, {foreign} groups of others learnt from")
            shown = done


def _mean_reward(events: Sequence[Mapping[str, Any]]) -> str:
    known = [event["reward"] for event in events if event["reward"] is not None]
    return f"{statistics.fmean(known):.3f}" if known else "-"


def bans(
    nodes: Sequence[Mapping[str, Any]], events: Sequence[Sequence[Mapping[str, Any]]], cheat: int, round_s: float
) -> dict[str, Any]:
    """Return which ``nodes`` were banned, from their ``events``; the last ``cheat`` cheat.

    Until the first node ended, for one that is gone cannot hand out its evidence. "banned_after": for each that cheats, the rounds
    of verification, of ``round_s`` seconds, from its first completions until all honest ones had banned it; None: they did not.
    """
    peers = [next(event["peer"] for event in node if event["event"] == "start") for node in events]
    end = min(max(event["time"] for event in node if event["event"] == "rl") for node in events)
    seen = [[event for event in node if event["event"] == "verify" and event["time"] <= end] for node in events]
    honest = len(nodes) - cheat

    def after(index: int) -> float | None:
        firsts = [next((one["time"] for one in mine if peers[index] in one["banned"]), None) for mine in seen[:honest]]
        known = [first for first in firsts if first is not None]
        began = next(event["time"] for event in events[index] if event["event"] == "rl")
        return (max(known) - began) / round_s if len(known) == honest else None

    found = {peer for mine in seen[:honest] for one in mine for peer in one["banned"]}
    rewards = {key: statistics.fmean(node[key] for node in nodes[:honest]) for key in ("final_reward", "cumulative_reward")}
    return {
        "round_s": round_s,
        "rounds": max((len(mine) for mine in seen), default=0),
        "banned_after": {nodes[index]["name"]: after(index) for index in range(honest, len(nodes))},
        "honest_banned": sorted(nodes[index]["name"] for index in range(honest) if peers[index] in found),
        **{f"honest_{key}": reward for key, reward in rewards.items()},
    }


NODE_KEYS = (
    "policy", "first_reward", "final_reward", "cumulative_reward", "effective_sample_size", "sent", "received", "used", "rejected",
    "bytes_sent", "bytes_received",
)  # fmt: skip


def report(results: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the report that ``--json`` prints last: each node under "nodes", and means over them, or sums (rollouts, bytes)."""
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
        **{key: mean(key) for key in ("first_reward", "final_reward", "cumulative_reward", "effective_sample_size")},
        **{key: sum(one[key] for one in found) for key in ("sent", "unsent", "received", "used")},
        "rejected": dict(rejected),
        "bytes_sent": sum(result["bytes_sent"] + result["rl"]["bytes_sent"] for result in results),
        "bytes_received": sum(result["bytes_received"] + result["rl"]["bytes_received"] for result in results),
        "params": results[0]["params"],
        "nodes": own,
        "wall_s": statistics.fmean(result["wall_s"] for result in results),
        "seconds": seconds,
    }


def summary(report: Mapping[str, Any]) -> str:
    ended = "  ".join(f"{node['first_reward']:.3f} -> {node['final_reward']:.3f}" for node in report["nodes"])
    refused = ", ".join(f"{count} {reason}" for reason, count in report["rejected"].items() if count) or "none"
    verified = ""
    if "verify" in report:
        said = [
            f"{name} was not banned" if after is None else f"{name} was banned after {after:.1f}"
            for name, after in report["verify"]["banned_after"].items()
        ]
        found = report["verify"]
        verified = (
            f"\n{'; '.join([f'{name} is honest and was banned' for name in found['honest_banned']] + said) or 'nobody was banned'}"
            f" (rounds of verification of {found['round_s']:g} s); the honest ones' reward: {found['honest_final_reward']:.3f}"
        )
    return (
        f"{report['peers']} nodes, {report['params']:,} parameters, {report['rounds']} rounds of {report['env']!r}, "
        f"{report['seconds']:.0f} s\n"
        f"greedy reward on {report['held_out']} held-out questions: {report['first_reward']:.3f} at first, "
        f"{report['final_reward']:.3f} in the end ({ended})\n"
        f"cumulative reward: {report['cumulative_reward']:.1f} of at most {report['rounds']} per node\n"
        f"{report['sent']} rollouts sent, {report['received']} received, {report['used']} learnt from; not used: {refused}\n"
        f"{report['bytes_sent'] / 1e6:.2f} MB sent{verified}"
    )
