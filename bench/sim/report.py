"""``python -m bench.sim``: simulations of one size, or of several and how their costs grow, as JSON
and as tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from bench.sim.growth import COSTS, growth, hops
from bench.sim.links import parse_net, parse_rate, parse_sizes
from bench.sim.mixing import mixing
from bench.sim.plan import SimPlan
from bench.sim.toy_task import LAYERS
from bench.sim.world import SimResult, World
from shoal.node.config.settings import ConfigError, load
from shoal.optim import codec_named, method_named

BUCKET = (
    64  # of a simulation without settings: without buckets hundreds of peers cost each too much
)
MINUTES, MINUTES_OF_SEVERAL = (
    2.0,
    0.5,
)  # virtual; buckets are drawn anew once in the first half minute
NOT_SIMULATED = (
    "libp2p (dialling, NAT, encryption), the DHT's replicas and routing (modelled as log2 of the "
    "peers), gossip, verification, disks, and the seconds of any computing but inner steps"
)


def run_sim(
    file: Path | None,
    *,
    peers: int | str = 16,
    net: str = "wan",
    churn: str = "0",
    naps: str = "0",
    minutes: float | None = None,
    warm_up: float = 0.0,
    seed: int | None = None,
    parameters: int = 2000,
    step_seconds: float = 0.1,
    uneven: float = 0.2,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the report of ``python -m bench.sim --json``; for the same arguments the same, but for
    ``wall_s`` and ``cpu_s``.

    With several sizes in ``peers``, such as ``16,64,256``, it has the reports of all under
    ``sizes``, and what `growth` and `mixing` say.

    Raises:
        ConfigError: a setting cannot be used.
        OuterError: the method cannot be used for the toy model.
    """
    overrides = {
        **({} if file else {"swarm.bucket": BUCKET}),
        **(overrides or {}),
        "train.seed": seed,
    }
    settings, sizes = load(file, overrides), parse_sizes(str(peers))
    minutes = minutes or (MINUTES if len(sizes) == 1 else MINUTES_OF_SEVERAL)
    bucket = settings.swarm.bucket
    plans = [
        SimPlan(
            size,
            parse_net(net),
            settings.outer.resolved(),
            parse_rate(churn),
            parse_rate(naps),
            minutes,
            settings.train.seed,
            settings.train.steps,
            parameters,
            step_seconds,
            uneven,
            bucket,
            settings.swarm.epoch_s,
            warm_up,
        )
        for size in sizes
    ]
    for plan in plans:
        _check(plan)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more are slower for tensors so small, and the order of sums is fixed
    try:
        reports = [simulate(plan, net) for plan in plans]
        if len(reports) == 1:
            return reports[0]
        return {
            "sizes": reports,
            **growth(reports, bucket),
            "mixing": mixing(bucket) if bucket else None,
        }
    finally:
        torch.set_num_threads(threads)


def _check(plan: SimPlan) -> None:
    if not plan.warm_up < plan.minutes:
        raise ConfigError(
            f"A warm-up of {plan.warm_up:g} minutes leaves none of {plan.minutes:g}: give more "
            "with --minutes."
        )
    if plan.churn * plan.minutes > 100 * plan.peers:
        raise ConfigError(
            f"A churn of {plan.churn:g} kills a minute would kill each peer a hundred times: "
            "choose a smaller one."
        )


def simulate(plan: SimPlan, net: str) -> dict[str, Any]:
    """Run one simulation and return its report.

    OuterError if the method cannot be used for the toy model.
    """
    return report(plan, net, World(plan).run())


def report(plan: SimPlan, net: str, result: SimResult) -> dict[str, Any]:
    """Return the report of a simulation. Seconds are virtual but for ``wall_s`` and ``cpu_s``.

    Costs and ``exchanges``, of all peers, are those after the warm-up; ``rounds``: of the median
    peer, since the start. ``alone``: share of the exchanges without a partner.
    ``bytes_per_peer_round``: sent by a peer for each round, weights taken over by newcomers
    included; ``control_...``: of them messages (offers, confirms and so on). ``directory_...``: of
    records read and stored; ``_calls_``: keys, ``_requests_``: those of the DHT for them, as
    modelled. ``wait_...``: seconds that training stood still for an exchange, or for all of a
    round; ``waiting``: share of the peers' time; ``kept``: inner steps, of those for which peers
    had time while they trained and were not stopped. ``loss_first``, ``loss_last``: of the mean of
    all slow weights; ``loss_own``: the mean of each one's. ``spread``: root-mean-square distance
    between the peers' slow weights and their mean, over their root-mean-square norm. ``failures``:
    by kind, among the last 64 exchanges of each peer that is left.
    """
    counts, outer = result.counts, plan.outer
    last, exchanges = result.samples[-1], len(counts.waits)
    method = method_named(outer.method)
    rounds = max(exchanges / _fragments(plan), 1)
    counted_s = max(
        result.virtual_s - 60 * plan.warm_up, 1e-9
    )  # peers that train a number of steps may end before
    calls = counts.directory_calls / plan.peers / counted_s * 60
    waits = sorted(counts.waits)
    return {
        "peers": plan.peers,
        "net": net,
        "churn_per_minute": plan.churn,
        "naps_per_minute": plan.naps,
        "seed": plan.seed,
        "method": outer.method,
        "group": method.group,
        "codec": codec_named(outer.codec or method.codec).name,
        "every": outer.every,
        "round": outer.round,
        "bucket": plan.bucket,
        "epoch_s": plan.epoch_s if plan.bucket else None,
        "parameters": plan.parameters,
        "step_seconds": plan.step_seconds,
        "uneven": plan.uneven,
        "warm_up_s": 60 * plan.warm_up,
        "rounds": last.rounds,
        "exchanges": exchanges,
        "alone": counts.alone / max(exchanges, 1),
        "bytes_per_peer_round": (counts.payload_bytes + counts.message_bytes) / rounds,
        "control_bytes_per_peer_round": counts.message_bytes / rounds,
        "messages_per_peer_round": counts.messages / rounds,
        "directory_bytes_per_peer_second": counts.directory_bytes / plan.peers / counted_s,
        "directory_calls_per_peer_minute": calls,
        "directory_requests_per_peer_minute": calls * hops(plan.peers),
        "wait_s_per_peer_round": sum(waits) / rounds,
        "wait_mean_s": fmean(waits) if waits else 0.0,
        "wait_median_s": _quantile(waits, 0.5),
        "wait_p95_s": _quantile(waits, 0.95),
        "wait_max_s": _quantile(waits, 1.0),
        "kept": result.kept,
        "waiting": sum(waits) / (plan.peers * counted_s),
        "loss_first": result.samples[0].loss,
        "loss_last": last.loss,
        "loss_own": last.own,
        "spread_max": max(sample.spread for sample in result.samples),
        "spread": last.spread,
        "curve": [[sample.at, sample.loss, sample.spread] for sample in result.samples],
        "napped": counts.napped,
        "killed": counts.killed,
        "newcomers": result.newcomers,
        "failures": dict(sorted(counts.failures.items())),
        "events": result.events,
        "trace": result.trace,
        "virtual_s": result.virtual_s,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
    }


def _fragments(plan: SimPlan) -> int:
    return min(plan.outer.fragments or 1, LAYERS)


def _quantile(ordered: Sequence[float], part: float) -> float:
    """Return the smallest value that at least ``part`` of all do not exceed; 0 of none."""
    return ordered[max(math.ceil(part * len(ordered)) - 1, 0)] if ordered else 0.0


def summary(found: Mapping[str, Any]) -> Group:
    """Return tables for people: a column for each size, then the growth of costs."""
    sizes: Sequence[Mapping[str, Any]] = found.get("sizes", [found])
    first = sizes[0]
    table = Table(
        title=f"{first['method']}, {first['codec']}, net {first['net']}, "
        f"{first['churn_per_minute']:g} kills a minute, "
        + (f"buckets of {first['bucket']}" if first["bucket"] else "no buckets"),
        caption=f"Not simulated: {NOT_SIMULATED}.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("peers")
    for size in sizes:
        table.add_column(str(size["peers"]), justify="right")
    for label, form in ROWS.items():
        table.add_row(label, *(form.format(**size) for size in sizes))
    return Group(table, *([_growth_table(found)] if "growth" in found else []))


def _growth_table(found: Mapping[str, Any]) -> Table:
    mixed, routed = found["mixing"], found["routing"]["growth"]
    note = (
        f"Requests to the DHT, not in these, are modelled as log2(peers) a key: b = {_b(routed)}."
    )
    if mixed is not None:
        note += (
            f" In buckets of {mixed['members']:g} members, drawn anew every "
            f"{mixed['rounds_per_epoch']} rounds, the variance between {mixed['peers']} peers is "
            f"{mixed['variance']:.3f} times that of pairs drawn among all."
        )
    table = Table(
        title="cost of each peer ~ peers^b",
        caption=note,
        title_justify="left",
        caption_justify="left",
    )
    for label in ("cost", "b, all sizes", "b, sizes beyond a bucket"):
        table.add_column(label, justify="left" if label == "cost" else "right")
    for name, (_, label) in COSTS.items():
        table.add_row(label, _b(found["growth"][name]), _b(found["growth_from_bucket"][name]))
    return table


def _b(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


ROWS = {
    "virtual seconds": "{virtual_s:.0f}",
    "rounds": "{rounds:g}",
    "alone": "{alone:.1%}",
    "bytes sent, a peer and round": "{bytes_per_peer_round:,.0f}",
    "of them messages": "{control_bytes_per_peer_round:,.0f}",
    "messages, a peer and round": "{messages_per_peer_round:.1f}",
    "bytes of the directory, a peer and second": "{directory_bytes_per_peer_second:,.0f}",
    "waiting, s: a peer and round": "{wait_s_per_peer_round:.2f}",
    "for an exchange: median": "{wait_median_s:.2f}",
    "95 %": "{wait_p95_s:.2f}",
    "most": "{wait_max_s:.2f}",
    "share of the time spent waiting": "{waiting:.1%}",
    "inner steps, of those for which there was time": "{kept:.1%}",
    "loss of the mean model, first": "{loss_first:.5f}",
    "last": "{loss_last:.5f}",
    "mean loss of the peers' own, last": "{loss_own:.5f}",
    "consensus distance of the slow weights, last": "{spread:.4f}",
    "stopped for seconds": "{napped}",
    "killed, and newcomers that took part": "{killed}, {newcomers}",
    "real seconds, of a processor": "{wall_s:.1f}, {cpu_s:.1f}",
}
"""The rows of the table, in order."""
