"""The picture of a swarm that a page shows, as JSON: everything in it is bounded, and rounded to what can be seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal.node.watch import sentences
from shoal.node.watch.curves import chart
from shoal.node.watch.shown_link import ShownLink
from shoal.node.watch.swarm_view import SwarmView
from shoal.swarm.topics.status import TAIL

POINTS = 160  # of a chart
LINES = 48  # peers that have a line of their own in a chart; all are in its mean and band
ROWS = 256  # peers in the table
EDGES = 512  # pairs on the map
STRANGER_S = 10.0  # seconds after which a connected peer that says nothing is taken for a bootstrap node


def picture(view: SwarmView, *, ended: bool, link: ShownLink | None = None) -> dict[str, Any]:
    """Return the data of the page, without addresses, for strangers may see it; ``ended``: no more events come."""
    rows = view.rows()[:ROWS]
    peers = [peer for _, peer in view.rows()]
    edges = sorted(view.meetings.edges().items(), key=lambda item: -item[1].time)[:EDGES]
    numbers = {key: index for index, key in enumerate(view.peers)}
    fragments = 1 if view.title is None else view.title.fragments

    def names(tails: Iterable[str]) -> list[str]:
        return [view.name(tail) for tail in tails]

    rewards = [peer.reward.smooth() for peer in peers]
    return {
        "swarm": view.swarm,
        "title": None if view.title is None else view.title.model_dump(include={"name", "task", "method"}),
        "now": view.now,
        "begun": view.begun,
        "ended": ended,
        "fragments": fragments,
        "link": None if link is None else link.picture(view),
        "totals": view.totals(),
        "refused": dict(view.refused),
        "peers": [
            {
                "id": key,
                "tail": key[-TAIL:],
                "number": numbers[key],
                "here": peer.here,
                "silent": peer.silent,
                "doing": peer.doing,
                "roles": peer.roles,
                "relayed": peer.relayed,
                "age": max(view.now - peer.heard, 0.0),
                "sent_per_s": peer.sent_rate,
                "received_per_s": peer.received_rate,
                "partners": [view.name(tail) for tail in peer.partners],
                "faults_text": ", ".join(sentences.fault_label(kind, count) for kind, count in peer.status.faults),
                **peer.status.model_dump(
                    mode="json", exclude={"doing", "swarm", "peer", "rounds", "addresses", "projection", "banned", "faults"}
                ),
            }
            for key, peer in rows
        ],
        "bootstrap": sorted(
            peer[-TAIL:] for peer, since in view.met.items() if peer not in view.peers and view.now - since > STRANGER_S
        )[:LINES],
        "charts": {
            "loss": chart([peer.loss.smooth() for peer in peers], POINTS, LINES),
            "loss_over_time": chart([peer.loss_over_time.smooth() for peer in peers], POINTS, LINES),
            "reward": chart(rewards, POINTS, LINES) if any(rewards) else None,
            "consensus": chart([view.consensus.smooth(), view.consensus.points], POINTS, 2),
            "steps_per_s": chart([view.rates["steps_per_s"].smooth()], POINTS, 0),
            "tokens_per_s": chart([view.rates["tokens_per_s"].smooth()], POINTS, 0),
            "traffic": chart([view.rates["sent_per_s"].smooth(), view.rates["received_per_s"].smooth()], POINTS, 2),
        },
        "pairs": [[a, b, edge.times, edge.round // fragments, edge.time] for (a, b), edge in edges],
        "meetings": [
            [number // fragments, number % fragments, [names(group) for group in groups], names(alone)]
            for number, groups, alone in view.meetings.newest()
        ],
        "news": [[item.time, item.kind, item.text] for item in view.log],
    }
