"""How the costs of a peer grow with the swarm: exponents b of cost ~ peers^b over several simulated
sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import linear_regression
from typing import Any

COSTS = {
    "bytes": ("bytes_per_peer_round", "bytes sent in exchanges, a peer and round"),
    "messages": ("messages_per_peer_round", "messages, a peer and round"),
    "directory": ("directory_bytes_per_peer_second", "bytes of the directory, a peer and second"),
    "waiting": ("wait_s_per_peer_round", "waiting, a peer and round"),
}
"""Key in ``growth``: the key of the cost in a report, and what it is."""
ROUTING = "DHT routing is not simulated: a key is modelled as log2(peers) requests"


def hops(peers: int) -> float:
    """Return the requests that the DHT is modelled to need for one key: each halves the distance to
    it, as Kademlia's do.
    """
    return math.log2(peers)


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the b in cost ~ peers^b of points (peers, cost), by least squares on logarithms.

    None for fewer than two sizes, and if a cost is 0.
    """
    if len({peers for peers, _ in points}) < 2 or any(cost <= 0 for _, cost in points):
        return None
    return linear_regression(
        [math.log(peers) for peers, _ in points], [math.log(cost) for _, cost in points]
    ).slope


def exponents(sizes: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the exponent of each of `COSTS` over the reports of several sizes."""
    return {
        name: exponent([(size["peers"], size[key]) for size in sizes])
        for name, (key, _) in COSTS.items()
    }


def growth(sizes: Sequence[Mapping[str, Any]], bucket: int) -> dict[str, Any]:
    """Return what ``python -m bench.sim --json`` says of several sizes besides their reports.

    ``growth``: over all sizes. ``growth_from_bucket``: over those that do not fit into one bucket;
    a peer of a smaller swarm reads fewer records, because there are no more. ``routing``: the
    modelled requests to the DHT, and their exponent over all sizes.
    """
    beyond = [size for size in sizes if size["peers"] > bucket] if bucket else []
    asked = [(size["peers"], size["directory_requests_per_peer_minute"]) for size in sizes]
    return {
        "growth": exponents(sizes),
        "growth_from_bucket": exponents(beyond),
        "routing": {"model": ROUTING, "growth": exponent(asked)},
    }
