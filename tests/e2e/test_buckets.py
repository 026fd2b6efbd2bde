"""Real nodes in a swarm of buckets: eight of which four are the most in one, so that all are
reassigned every half minute.
"""

import itertools
import signal
from collections import defaultdict
from pathlib import Path

import pytest

TASK = f"{Path(__file__).parent / 'uneven_task.py'}:Uneven"
PEERS, EPOCH_S, EPOCHS = 8, 30.0, 4


@pytest.mark.slow(reason="five epochs of half a minute of real time")
def test_bucketed_nodes_meet_in_every_epoch(shoal, eventually):
    """Nodes of a swarm of buckets train and meet others in every epoch."""
    table = shoal.toml(
        swarm={"name": "dealt", "start_when": PEERS, "bucket": 4, "epoch_s": EPOCH_S},
        outer={"round": "seconds:2", "wait_s": 4.0},
        options={"slow_s": 0.1, "quick_s": 0.1},
    )
    names = [f"node{number}" for number in range(PEERS)]
    first = shoal.node("up", table, names[0], "--task", TASK, "--shard", f"0/{PEERS}")
    link = first.line()
    nodes = [first]
    nodes += [
        shoal.node("join", link, name, "--task", TASK, "--shard", f"{i}/{PEERS}")
        for i, name in enumerate(names)
        if i
    ]

    def epochs(name):
        return {int(event["time"] // EPOCH_S) for event in shoal.rounds(name)}

    eventually(
        lambda: min(len(epochs(name)) for name in names) > EPOCHS,
        300,
        f"{EPOCHS} whole epochs of training",
    )
    seen = shoal.start("status", link, "--json").json()
    for node in nodes:
        node.signal(signal.SIGINT)
    assert [node.wait() for node in nodes] == [130] * PEERS, [node.said() for node in nodes]

    # A visitor sees eight buckets, and estimates a multiple of what is in them; here it sees them
    # all, or nearly.
    totals = seen["totals"]
    assert 1 <= totals["listed"] <= PEERS
    assert totals["peers"] % totals["listed"] == 0
    met = {name: shoal.rounds(name) for name in names}
    # A partner that was dealt elsewhere during a round is still called by its name.
    assert {event["partner"] for events in met.values() for event in events} <= {*names, None}
    partners = {
        name: {event["partner"] for event in events} - {None} for name, events in met.items()
    }
    assert min(map(len, partners.values())) >= 3, partners
    joined = {names[0]}
    for _ in names:  # all hear of each other, if through others
        joined |= {other for name in joined for other in partners[name]}
    assert joined == set(names)
    # A bucket has a handful, so in an epoch a node meets few; others in the next.
    by_epoch = {name: defaultdict(set) for name in names}
    for name, events in met.items():
        for event in events:
            if event["partner"] is not None:
                by_epoch[name][int(event["time"] // EPOCH_S)].add(event["partner"])
    changes = [
        before != after
        for found in by_epoch.values()
        for before, after in itertools.pairwise(found[e] for e in sorted(found))
    ]
    assert sum(changes) > len(changes) / 2
    alone = sum(event["partner"] is None for events in met.values() for event in events)
    assert alone < sum(map(len, met.values())) / 2
    assert shoal.left() == []
