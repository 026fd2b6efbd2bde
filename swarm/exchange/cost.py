"""What an exchange costs, as formulas: bytes, seconds, and how much of its time a node computes.

    work = Work("pair", nbytes=10**9, params=10**9, peers=8, every=50, step_s=1.0)
    forecast(work, Line(rate=12.5e6, round_trip=0.05)).utilisation    # 0 to 1

Bytes are always those that leave a peer, never the payload that it hands to an exchange once. The
formulas, and what they are fitted to: docs/internals.md, "What an exchange costs".
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

# of a group, and of a pair, whose partners are agreed beforehand; both keep their streams
ROUND_TRIPS, PAIR_ROUND_TRIPS = 2.5, 1.0
# bytes that a connection carries in the first round trip after a pause, and twice as many in each
# further one
WINDOW = 350_000
# seconds a byte that is sent: encryption, digests, copies, the mean, and what pacing leaves of a
# fast link
HANDLING = 3e-8
PACED = 0.8  # of a slow link, that bulk takes which is paced
# of a link, that a round of pairs in fragments takes at most: their partners are as busy with
# others
PAIRED = 0.67
# times what the bytes of a fragment take alone, after which the latest of a round, which share the
# link, is there
LATE = 1.35
AT_HAND = 1e-9  # seconds a byte of float32 weights, in the training thread
LOOP = 0.002  # of the computing time: what the loop costs a node without any exchange
WIRE = 1.013  # bytes on the wire for each byte of payload
# members from which a group all-reduces plain floats; fewer move no more bytes by gathering, or
# hardly more
ALL_REDUCED = 4
# members from which averages come back by a codec of their own; two send no less than they gather
AVERAGED = 3
# of a link, that exchanges may take: the rest is for small messages, newcomers, and the user
BUSY = 0.8
GOOD = 0.97  # utilisation that a user need not improve
# of the mean speed: while the slowest member makes more, waiting for it costs less loss than pairs
UNEVEN_SHARE = 0.85
FLOAT32 = 4  # bytes

Group = Literal["pair", "everyone", "nobody"]


@dataclass(frozen=True)
class Line:
    """A node's way to the others: ``rate`` in bytes a second, of its slower direction, and
    ``round_trip`` in seconds.
    """

    rate: float
    round_trip: float


class Costs(NamedTuple):
    """What an implementation takes beside the bytes on the link: by default what shoal's exchanges
    took.
    """

    round_trips: float = ROUND_TRIPS
    window: float = WINDOW
    handling: float = HANDLING
    at_hand: float = AT_HAND
    paced: float = PACED
    all_reduced: int = ALL_REDUCED
    """Members from which floats are all-reduced."""


MEASURED = Costs()


@dataclass(frozen=True)
class Work:
    """What a node is to do in a round."""

    group: Group
    nbytes: int
    """Payload of the whole round, all fragments together."""
    params: int
    peers: int
    every: int
    """Inner steps in a round."""
    step_s: float
    """Seconds of an inner step."""
    fragments: int = 1
    lag: int | Literal["auto"] = 0
    """Inner steps from sending to applying: 0 waits, ``every`` is a whole round."""
    sums: bool = True
    """Whether a group may all-reduce: plain floats, no robust rule."""
    max_group: int = 32
    back: int = 0
    """Encoded averages of all values, in bytes, where each member averages a share and sends them
    back by a codec of their own; 0: it does not.
    """
    costs: Costs = MEASURED

    @property
    def computing_s(self) -> float:
        return self.every * self.step_s


@dataclass(frozen=True)
class Forecast:
    """What to expect of ``Work`` over a ``Line``."""

    utilisation: float
    """Share of its time that a node computes, 0 to 1."""
    round_s: float
    """Seconds of a round, waiting included."""
    exchange_s: float
    """Seconds from sending a fragment to its mean."""
    lag: int
    """Inner steps from sending a fragment to applying its mean."""
    sent: int
    """Bytes that a node sends in a round, headers included."""
    filled: float
    """Share of the link that exchanges take if a node computes all the time; beyond 1 the link does
    not carry them.
    """

    @property
    def carried(self) -> bool:
        """Whether the link moves a round's bytes within the computing time of a round."""
        return self.filled <= 1

    @property
    def sent_a_day(self) -> float:
        """Bytes that a node sends in 24 hours."""
        return self.sent * 86_400 / self.round_s

    def enough(self, utilisation: float) -> bool:
        """Whether a node computes so much of its time, and the link has room for more than
        exchanges.
        """
        return self.utilisation >= utilisation and self.filled <= BUSY


def members(work: Work) -> int:
    """Return how many peers average together, this one included."""
    if work.group == "nobody" or work.peers < 2:
        return 1
    if work.group == "pair":
        return 2
    groups = -(-work.peers // work.max_group)
    return -(-work.peers // groups)


def payload_sent(work: Work) -> float:
    """Return the bytes of payload that leave a node in a round, on average."""
    count = members(work)
    if work.group == "pair" and count > 1 and work.peers % 2:
        # One of an odd number has two partners in a round, and sends a payload to each.
        return work.nbytes * (work.peers + 1) / work.peers
    if work.sums and count >= work.costs.all_reduced:
        # The parts go out in the codec's format, and the averages of the own share in float32.
        return (work.nbytes + FLOAT32 * work.params) * (count - 1) / count
    if work.back and count >= AVERAGED:
        return (work.nbytes + work.back) * (count - 1) / count
    return work.nbytes * (count - 1)


def sent(work: Work) -> int:
    """Return the bytes that leave a node in a round, headers included; it receives as many."""
    return math.ceil(WIRE * payload_sent(work))


def per_param_step(work: Work, params: int) -> float:
    """Return the bytes of payload that leave a node for each parameter and inner step.

    ``params``: those of the model, of which ``work`` may send a part, or two tensors.
    """
    return payload_sent(work) / params / work.every


def times_fewer(work: Work, params: int) -> float | None:
    """Return how many times fewer bytes leave a node than if as many peers all-reduced float32
    gradients in a ring at every step; None if none leave it.
    """
    each = per_param_step(work, params)
    if not each:
        return None
    return 2 * FLOAT32 * (work.peers - 1) / work.peers / each


def exchange_s(work: Work, line: Line) -> float:
    """Return the seconds from sending one fragment to its mean."""
    return _moving_s(work, line) + _travelling_s(work, line)


def _moving_s(work: Work, line: Line) -> float:
    """Return the seconds that the bytes of one fragment take of the link and of the processor."""
    each, costs = sent(work) / work.fragments, work.costs
    return max(each / (costs.paced * line.rate), each / line.rate + each * costs.handling)


def _travelling_s(work: Work, line: Line) -> float:
    """Return the seconds that the exchange of one fragment takes on a link of any rate."""
    each, costs = sent(work) / work.fragments, work.costs
    if not each:
        return 0.0
    round_trips = costs.round_trips
    if work.group == "pair":
        round_trips = min(round_trips, PAIR_ROUND_TRIPS)
    in_flight = min(each, line.rate * line.round_trip)  # once the connection has grown
    return (round_trips + math.log2(1 + in_flight / costs.window)) * line.round_trip


def expected_lag(work: Work, line: Line) -> int:
    """Return the lag in inner steps: as set, or the one that fits what an exchange takes, at most a
    whole round.
    """
    if work.lag != "auto":
        return work.lag
    arrival = max(math.ceil(exchange_s(work, line) / work.step_s), 1)
    return min(
        arrival + arrival // 8, work.every
    )  # as `shoal.optim.schedule` does from what it sees


def waiting_s(work: Work, line: Line) -> float:
    """Return the seconds of a round in which training waits for means."""
    lag, several = expected_lag(work, line), work.fragments > 1
    if lag < work.every:
        late = work.fragments * max(exchange_s(work, line) - lag * work.step_s, 0.0)
    else:  # what is waited for one exchange is not waited for the next
        moving = _moving_s(work, line) * (LATE if several else 1.0)
        late = moving + _travelling_s(work, line) - work.computing_s
    share = PAIRED if work.group == "pair" and several else work.costs.paced
    return max(late, sent(work) / (share * line.rate) - work.computing_s, 0.0)


def forecast(work: Work, line: Line) -> Forecast:
    computing, moved = work.computing_s, sent(work)
    busy = computing * (1 + LOOP) + (work.costs.at_hand * FLOAT32 * work.params if moved else 0.0)
    round_s = busy + waiting_s(work, line)
    filled = moved / line.rate / computing
    return Forecast(
        computing / round_s,
        round_s,
        exchange_s(work, line),
        expected_lag(work, line),
        moved,
        filled,
    )


def least_every(work: Work, line: Line, utilisation: float, most: int = 1_000_000) -> int | None:
    """Return the fewest inner steps in a round that are ``enough``; None if ``most`` are too
    few.
    """

    def fits(every: int) -> bool:
        lag = every if work.lag == work.every else work.lag  # a whole round stays one
        return forecast(replace(work, every=every, lag=lag), line).enough(utilisation)

    low = max(
        work.fragments, 1 if work.lag == "auto" else work.lag + 1 if work.lag < work.every else 1
    )
    return low + bisect_left(range(low, most), True, key=fits) if fits(most) else None
