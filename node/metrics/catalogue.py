"""Catalogue of Prometheus measures, and their readings from the events of a run.

A pure function of events; docs/metrics.md holds the same table, and a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Fields = Mapping[str, Any]
Kind = Literal["counter", "gauge", "histogram"]
How = Literal["set", "add", "observe"]

CONSTANT = ("swarm", "node", "method")
"""Labels that every measure has; the same throughout a run."""

WAITS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Bounds of the histogram of waiting, seconds."""

LIVE = ("progress", "checks")
"""Events for sinks alone: in the file they would be a line twice a second."""


@dataclass(frozen=True)
class Measure:
    """Measure with one name in Prometheus."""

    name: str
    kind: Kind
    text: str
    takes: Mapping[str, str] = field(default_factory=dict)
    """Event -> its field with the value."""
    how: How = "set"
    labels: tuple[str, ...] = ()
    """Labels besides those of all measures."""


class Reading(NamedTuple):
    """Value of a measure; ``labels`` as `Measure.labels`."""

    measure: Measure
    value: float
    labels: tuple[str, ...] = ()


INFO = Measure(
    "shoal_info", "gauge", "Always 1; says who this is.", labels=("peer", "swarm_id", "task", "device", "version")
)  # fmt: skip
ROUNDS = Measure("shoal_rounds_total", "counter", "Exchanges that ended: in a round one for each fragment.", how="add")
ALONE = Measure("shoal_rounds_alone_total", "counter", "Exchanges of those in which nobody answered.", how="add")
LATE = Measure("shoal_rounds_late_total", "counter", "Exchanges of those whose mean came after its lag.", how="add")
REFUSED = Measure(
    "shoal_refused_total", "counter", "Streams, calls and gossiped records of others that were refused, by reason.",
    labels=("reason",),
)  # fmt: skip
MISSING = Measure("shoal_missing_members", "gauge", "Members that are thought to be behind a partition of the network.")
GROUPS = Measure(
    "shoal_rollout_groups_total", "counter", "rl: groups of completions learnt from, by who wrote them: own or foreign.",
    how="add", labels=("source",),
)  # fmt: skip
BANNED = Measure("shoal_banned_peers", "gauge", "verify: peers that are banned now.")

MEASURES: tuple[Measure, ...] = (
    INFO,
    Measure(
        "shoal_inner_steps_total", "counter", "Inner steps done, with those before a resume.",
        {"progress": "step", "round": "step", "end": "steps"},
    ),
    Measure(
        "shoal_inner_steps_per_second", "gauge", "Recently, without what was spent waiting for others.",
        {"progress": "steps_per_s"},
    ),
    Measure(
        "shoal_tokens_total", "counter", "Tokens trained on, with those before a resume.",
        {"progress": "tokens", "round": "tokens"},
    ),
    Measure(
        "shoal_tokens_per_second", "gauge", "Recently, without what was spent waiting for others.",
        {"progress": "tokens_per_s", "end": "tokens_per_s"},
    ),
    Measure(
        "shoal_model_flops_utilisation", "gauge",
        "Recently, without waiting: the share, of 1, of the GPU's published peak; nowhere if that is not known.",
        {"progress": "mfu", "end": "mfu"},
    ),
    Measure("shoal_loss", "gauge", "Training loss of the last half second or step, nats; rl: of the policy.", {"progress": "loss"}),
    Measure(
        "shoal_evaluation_loss", "gauge", "Held-out loss; rl: one less the mean reward.",
        {"start": "loss_first", "evaluation": "loss", "end": "loss_last"},
    ),
    Measure("shoal_members", "gauge", "Members of the swarm in view, with this node.", {"progress": "members"}),
    Measure("shoal_round", "gauge", "Number of the exchange that ended last.", {"round": "round"}),
    ROUNDS,
    ALONE,
    LATE,
    Measure("shoal_lag_steps", "gauge", "Inner steps that training goes on during an exchange; 0: it waits.", {"progress": "lag"}),
    Measure("shoal_round_members", "gauge", "Nodes in the last exchange's mean; 1 when nobody answered.", {"round": "members"}),
    Measure(
        "shoal_round_wait_seconds", "histogram", "For how long training stood still for the network in an exchange.",
        {"round": "wait_s"}, "observe",
    ),
    Measure(
        "shoal_bytes_sent_total", "counter", "Bytes sent to peers since the node started.",
        {"progress": "bytes_sent", "end": "bytes_sent"},
    ),
    Measure(
        "shoal_bytes_received_total", "counter", "Bytes received from peers since the node started.",
        {"progress": "bytes_received", "end": "bytes_received"},
    ),
    Measure(
        "shoal_suspicious_total", "counter", "Contributions refused because they lay too far away.",
        {"round": "suspicious"}, "add",
    ),
    REFUSED,
    MISSING,
    Measure(
        "shoal_daemon_restarts_total", "counter", "How often the network daemon had to be started again.",
        {"progress": "restarts", "end": "restarts"},
    ),
    Measure("shoal_reward", "gauge", "rl: mean reward of the last round's own completions.", {"rl": "reward"}),
    Measure(
        "shoal_effective_sample_size", "gauge", "rl: of the last round, a completion; 1 is as good as own ones.", {"rl": "worth"}
    ),
    GROUPS,
    Measure("shoal_claims_total", "counter", "verify: claims that this node made.", {"checks": "claimed"}),
    Measure("shoal_checks_total", "counter", "verify: claims of others that this node checked.", {"checks": "checked"}),
    Measure("shoal_invalid_claims_total", "counter", "verify: those of them that it found invalid.", {"checks": "invalid"}),
    Measure("shoal_check_seconds_total", "counter", "verify: what checking took.", {"verify": "check_s"}),
    BANNED,
)  # fmt: skip


def number(value: object) -> float | None:
    """Return ``value`` if it is a finite number, or the length of a list; None for all else."""
    if isinstance(value, (list, tuple)):
        return float(len(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def readings(event: str, fields: Fields) -> Iterator[Reading]:
    """Yield the readings of an event. A field that is missing, null or no number gives none."""
    for measure in MEASURES:
        value = number(fields.get(measure.takes.get(event, "")))
        if value is not None:
            yield Reading(measure, value)
    if event == "round":
        yield Reading(ROUNDS, 1.0)
        yield Reading(ALONE, float(fields.get("partner") is None))
        yield Reading(LATE, float(fields.get("late") is True))
    elif event == "refused":
        for reason, count in fields.items():
            yield Reading(REFUSED, float(count), (reason,))
    elif event == "partition":
        yield Reading(MISSING, float(len(fields["missing"])))
    elif event == "verify":
        yield Reading(BANNED, float(len(fields["banned"])))
    elif event == "rl":
        for source in ("own", "foreign"):
            yield Reading(GROUPS, float(fields[source]), (source,))
