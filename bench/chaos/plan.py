"""Plan of the faults of a run: drawn from a seed before the run begins, so that it can be
repeated.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "sleep"]

HEAD_S, TAIL_S = (
    8.0,
    20.0,
)  # no kill before a checkpoint is saved, or too late for the node to return; in long runs
REST_S = (1.0, 6.0)  # seconds from a kill to the restart; at most less in short runs
STOP_S = (1.0, 8.0)
RETURN_S = 8.0  # seconds that a node may need after its restart to be of use; in long runs
KEEPS = 0.75  # share of the killed nodes that return with their checkpoints


@dataclass(frozen=True)
class Hit:
    """Fault of one node."""

    at_s: float
    """Seconds after all nodes had begun to train."""
    peer: int
    """Number of the node, from 0; node 0 created the swarm."""
    kind: Kind
    """kill: SIGKILL, and a restart; stop: SIGSTOP of the node's process; sleep: of its daemon too,
    as of a closed laptop.
    """
    seconds: float
    """Seconds until it is started again, or continues."""
    keeps: bool = True
    """A killed node returns with its checkpoints; else it has its key and the addresses of known
    peers only.
    """


def draw_plan(
    *, peers: int, seconds: float, kills_per_minute: float, stops_per_minute: float, seed: int
) -> list[Hit]:
    """Draw the hits of a run of ``seconds``, in order of time.

    There is one kill in each of equally long slots, at a random moment; stops likewise. Every node
    has a turn before any has its second, and the creator's is among the first. Never more than half
    of the nodes are down at once: a hit that would exceed that comes later, or not at all if the
    run is nearly over then.

    Raises ValueError: fewer than two peers, or a negative number.
    """
    if peers < 2 or seconds <= 0 or kills_per_minute < 0 or stops_per_minute < 0:
        raise ValueError("a plan needs two peers, some seconds, and no negative rates")
    rng = random.Random(seed)
    head, tail, back = (
        min(HEAD_S, 0.2 * seconds),
        min(TAIL_S, 0.25 * seconds),
        min(RETURN_S, 0.1 * seconds),
    )
    moments: list[tuple[float, bool]] = []
    for rate, kill in ((kills_per_minute, True), (stops_per_minute, False)):
        count = round(rate * seconds / 60)
        slot = (seconds - head - tail) / max(count, 1)
        moments += [(head + (number + rng.random()) * slot, kill) for number in range(count)]
    killed = sum(kill for _, kill in moments)
    turns_of: dict[bool, list[int]] = {True: [], False: []}
    busy, most = (
        [0.0] * peers,
        max(peers // 2, 1),
    )  # until when each is down, and how many may be at once
    plan: list[Hit] = []
    for at, kill in sorted(moments):
        turns = turns_of[kill]
        if len(turns) < peers:
            more = rng.sample(range(peers), peers)
            if kill and not turns and killed < peers:  # else its turn might not come
                more.remove(0)
                more.insert(
                    rng.randrange(max(killed - 1, 1)), 0
                )  # not the last: it may be stopped when its turn comes
            turns += more
        at = max(at, plan[-1].at_s if plan else 0.0)
        down = sorted(until for until in busy if until > at)
        if len(down) >= most:
            at = down[-most]
        if at > seconds - tail / 2:
            break
        peer = next(peer for peer in turns if busy[peer] <= at)
        turns.remove(peer)
        shortest, longest = REST_S if kill else STOP_S
        pause = rng.uniform(shortest, max(min(longest, 0.15 * seconds), shortest))
        kind: Kind = "kill" if kill else rng.choice(("stop", "sleep"))
        plan.append(Hit(at, peer, kind, pause, not kill or rng.random() < KEEPS))
        busy[peer] = at + pause + (back if kill else 0.0)
    return plan
