"""The protection against updates that are well formed and hostile: those too far away are refused,
the others clipped.

**Rejection** (``outer.robust``: distance; because of newcomers, below, not by default). A
contribution is refused if it lies more than ``suspect`` times as far from the own one as the last 8
did in the median. Refused means that the exchange does not count: a pair goes apart, each with its
own step whole, and a group goes on without that member. An honest peer must not be refused:

* The first rounds. Until 12 distances are known no distance is usual: with gossip and a warm-up
  they grow in 5 rounds to 3 times their median. Until then the bound is the own contribution's
  norm, times 1.5 where weights travel (a peer from the same start is nearer than that; minus the
  weights is at 2) and times 4 for pseudo-gradients (peers may have made different numbers of
  steps).
* A newcomer. Its inner optimizer begins anew, so its first contribution may be many times as far as
  usual; refused, it goes on alone, and is further away in the next round. A swarm that others join
  should rather clip (``outer.robust``) than refuse.
* A bound that grows. A refused contribution counts as 1.5 times the usual distance, so when all
  distances grow for good (a larger learning rate) the bound grows by half in 5 rounds; a minority
  cannot widen it. A warm-up grows slower than the bound.
* A pseudo-gradient within the own one's norm. Its effect is bounded by that, however alike the
  others were so far.
* Distances of 0, among peers that all stand still, say nothing about how far they will be once they
  move: they are not counted.

A peer that trained without partners for long may be refused where weights travel: its weights are
far from everybody's, and nothing distinguishes it from a hostile one. It must take over the swarm's
weights, as a newcomer does.

**Robust rules** (``outer.robust``). ClippedGossip (pairs) and CenteredClip (groups) of
`shoal.optim.exchange.robust_shares` limit the influence of a contribution that passed. Their cost:

* *Pairs*: each side clips by its own radius, ``times`` the median of the distances that it saw, so
  partners no longer hold the same mean, and the mean over all peers is conserved only in exchanges
  that neither clips (or both by the same factor). Where neither clips, both get the bits of the
  plain mean. In a node's first 5 rounds nothing is clipped.
* *Groups*: every member computes the same from the same payloads, so all hold the same bits, as
  before; but the result is not the mean, and payloads are gathered, never all-reduced. Rules that
  ask for their own share in the mean (eager) get an equal one.

**Loss** (``outer.check_loss``). What is not too far away is tried on data (`LossCheck`), where
partners send weights. With clipped-gossip one that makes the loss too high is clipped to nothing:
the exchange counts, and the partner may take this node's weights. A partner whose data is unlike
the others' is not left behind so.

**Newcomers** (clipped-gossip). What a peer counts at most depends on what it has shown to this
node. A key costs nothing, so a hostile peer can come under a new one as often as it likes. A peer
is a newcomer until 3 of its contributions counted here, or it has been in view for 32 exchanges of
this node. Its contribution counts at most half as much as another's, and the more newcomers of one
address range counted in the last 16 exchanges, the less each: 1/2, 1/4, 1/6 ... of it. However many
keys come from a range, in 16 exchanges they have at most the influence of 1.7 contributions of
known peers, and of .5 if they go on.

Nobody is a newcomer to a node that has done fewer than 32 exchanges: to one that has just come all
others are new.

The robust rules count all members alike: a stated weight is an unchecked claim, which the plain
mean bounds (`counted_weights`).

**The loss, in detail** (`LossCheck`). A pair has no majority, and the distance of two sets of
weights says nothing about their direction: learning with the sign reversed, or an old state sent
again, lies no farther away than an honest peer's weights. The loss tells them apart. The idea is
Zeno's (Xie et al., 2019, 1805.10032), which ranks many gradients at a server; here each peer tries
its one partner, on batches that no other peer knows.

A contribution is refused if the mean of both sets of weights has a higher loss than the own
weights, by more than 6 times the median of what the last 16 partners changed, or the partner's own
weights have, by more than 8 times. Until 5 are known the bounds are 5 % and 10 % of the loss, and
they are never below 1 % and 2 %. A refused one counts as 1.5 times the usual, so that a few hostile
partners cannot widen the bounds. A peer whose own weights are bad refuses nobody who is better.

A peer that learns from data unlike the others' finds all of them bad, and would go on alone, ever
further away. So a peer that refused 6 of the last 8 assumes that it is the outlier until it is
fewer. With a quarter of all peers hostile that happens by chance in one exchange of a hundred, and
soon to a peer whose data is unlike. The outlier takes its partners as they are: it refuses those
with whom its loss rises by more than twice the median of the last 8, or beyond twice the least of
its own last 16 losses.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from torch import Tensor

from shoal.optim.exchange.base import Mean, RoundKey
from shoal.optim.exchange.on_demand import held_at_once
from shoal.optim.exchange.robust_shares import (
    GRID,
    centered_clip,
    clipped_gossip,
    norms,
    squared_distances,
)
from shoal.optim.exchange.update_screen import Contributions, UpdateScreen
from shoal.optim.exchange.weighted_mean import combined, weighted_mean
from shoal.swarm.internal_errors import TrialError
from shoal.swarm.p2p.newest import Newest

Losses = Callable[[int, Sequence[Tensor], Sequence[Tensor]], tuple[float, float, float] | None]
"""Called with a fragment, the own contribution to it and another's.

Returns the losses, on the same data, of the model with the own
one, with the mean of both and with the other's alone; None if they cannot be computed."""

FIRST, LAST = 5, 16  # changes or distances known before one is too much, and remembered
WIDER = 1.5  # times the usual: what a refused one counts as
VERDICTS, ODD = 8, 6
TOLERATED = 2.0  # times the median change, and times the least own loss: what the outlier takes


class _Bound:
    """What one kind of change is usually, and how much of it is too much."""

    def __init__(self, times: float, least: float, first: float) -> None:
        self._times, self._least, self._first = times, least, first
        self._seen: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=LAST))

    def passes(self, fragment: int, change: float, loss: float) -> bool:
        seen, loss = self._seen[fragment], abs(loss)  # that of a density may be below 0
        usual = median(seen) if len(seen) >= FIRST else None
        bound = (
            self._first * loss if usual is None else max(self._least * loss, self._times * usual)
        )
        seen.append(min(abs(change), self._first * loss / 3 if usual is None else WIDER * usual))
        return change <= bound

    def forget(self) -> None:
        self._seen.clear()


class LossCheck:
    """Decides by the losses. ``problem`` may be called from several threads at once."""

    def __init__(self, losses: Losses) -> None:
        self._losses, self._lock = losses, threading.Lock()
        self._mean, self._alone = _Bound(6.0, 0.01, 0.05), _Bound(8.0, 0.02, 0.1)
        self._bad: deque[bool] = deque(maxlen=VERDICTS)
        self._changes: deque[float] = deque(maxlen=VERDICTS)
        self._own: deque[float] = deque(maxlen=LAST)

    def problem(self, key: RoundKey, own: Sequence[Tensor], theirs: Sequence[Tensor]) -> str | None:
        """Return in a few words why the contribution must not count, or None.

        Neither tensor is changed.
        """
        try:
            found = self._losses(key.fragment, own, theirs)
        except Exception as error:
            raise TrialError(error) from error
        if found is None or not math.isfinite(found[0]):
            return None  # this node's own weights are broken: then anybody's are welcome
        mine, mean, alone = found
        if not (math.isfinite(mean) and math.isfinite(alone)):
            return (
                f"with it the loss on this node's own batches, {mine:.4g}, is no longer finite, "
                "or cannot be computed"
            )
        with self._lock:
            passed = [
                self._mean.passes(key.fragment, mean - mine, mine),
                self._alone.passes(key.fragment, alone - mine, mine),
            ]
            odd = sum(self._bad) >= ODD and (passed[0] or self._tolerates(mean - mine, mine))
            self._bad.append(not all(passed))
            self._changes.append(mean - mine)
            self._own.append(mine)
        if all(passed) or odd:
            return None
        return (
            f"with it the loss on this node's own batches is {alone:.4g}, averaged with it "
            f"{mean:.4g}, in place of {mine:.4g}"
        )

    def _tolerates(self, change: float, mine: float) -> bool:
        least = min(*self._own, mine)
        return change <= TOLERATED * median(self._changes) and mine + change <= least + (
            TOLERATED - 1
        ) * abs(least)

    def forget(self) -> None:
        """Forget what was usual: this node has taken over others' weights."""
        with self._lock:
            self._mean.forget()
            self._alone.forget()
            for seen in (self._bad, self._changes, self._own):
                seen.clear()


SHOWN, PATIENCE, TAKEN = 3, 32, 16
KNOWN = 4096  # peers remembered, those seen last


class Newcomers:
    """The partners that a node has seen, for both its threads.

    ``where``: returns the address range of a peer.
    """

    def __init__(self, where: Callable[[str], str] = lambda peer: "") -> None:
        self.where = where
        self._lock = threading.Lock()
        self._exchanges = 0
        self._known = Newest[str, list[int]](KNOWN)
        """Of each peer the number of exchanges before it was seen, and of its contributions that
        counted.
        """
        self._recent: deque[str | None] = deque(maxlen=TAKEN)

    def see(self, peers: Iterable[str]) -> None:
        """Note that ``peers`` are in view."""
        with self._lock:
            for peer in peers:
                self._entry(peer)

    def take(self, peer: str, share: int) -> int:
        """Return at most ``share``, of ``GRID``, for the contribution of ``peer`` to an exchange,
        and note that it counted.
        """
        with self._lock:
            since, counted = entry = self._entry(peer)
            new = (
                self._exchanges >= PATIENCE
                and counted < SHOWN
                and self._exchanges - since < PATIENCE
            )
            where = self.where(peer) if new and share else None
            if where is not None:
                share = min(share, GRID // (4 * (1 + self._recent.count(where))))
            self._recent.append(where)
            self._exchanges += 1
            entry[1] += share > 0
        return share

    def _entry(self, peer: str) -> list[int]:
        entry = self._known[peer] = self._known.get(peer, [self._exchanges, 0])
        return entry


Robust = Literal["none", "clipped-gossip", "centered-clip"]
LEAST, RECENT = (
    12,
    8,
)  # known before they make the bound, and used for it: few, so that it follows honest peers
COLD = {"weights": 1.5, "displacement": 4.0}
STILL = 1e-9  # of the own norm: peers that are nearer than this have not moved
REMEMBERED = 1024  # radii and refusals


@dataclass(frozen=True)
class RejectedUpdate:
    """A contribution that was refused, or does not count, for its distance or its loss."""

    key: RoundKey
    peer: str
    reason: str
    unless: str
    """The setting with which it would have counted."""

    def __str__(self) -> str:
        return f"it is suspicious: {self.reason}"


class DistanceScreen(UpdateScreen):
    """An `UpdateScreen` that refuses updates by their distance, or by the loss with them, and
    averages or clips the rest.

    Args:
        robust: the rule in place of the mean.
        suspect: how many times the usual distance is refused; 0: none is.
        times: radius of the robust rule, in median distances. The less, the less can hostile peers
            do, and the less do honest ones count that differ.
        sends: what contributions are (``optim.Method.sends``).
    """

    def __init__(
        self,
        *,
        robust: Robust = "none",
        suspect: float = 3.0,
        times: float = 1.0,
        sends: Literal["weights", "displacement"] = "weights",
    ) -> None:
        if (suspect and not suspect > 1) or not times > 0:
            raise ValueError(
                f"suspect must be above 1, or 0, and times positive: got {suspect}, {times}"
            )
        self.robust, self.suspect, self.times, self._sends = robust, suspect, times, sends
        self.gathers = (
            robust == "centered-clip" or suspect > 0
        )  # an all-reduce shows sums, never one contribution
        self._measures = suspect > 0 or robust == "clipped-gossip"
        self._seen: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=LAST))
        """Distances by fragment."""
        self._radius = Newest[tuple[int, str], tuple[float, float]](REMEMBERED)
        self._rejected = Newest[tuple[RoundKey, str], RejectedUpdate](REMEMBERED)
        self._lock = threading.Lock()
        self.loss_check: LossCheck | None = None
        """Tries what is not too far away on data, if the node that has this screen has a model and
        data.
        """
        self.newcomers = Newcomers()

    def problem(
        self,
        key: RoundKey,
        own: Callable[[], Sequence[Tensor]],
        peer: str,
        theirs: Sequence[Tensor],
    ) -> str | None:
        """Return why a contribution that lies too far away, or that makes the loss too high, is
        refused, or None.

        None too where `mean` gives it no share.
        """
        mine = own() if self._measures or self.loss_check is not None else []
        if self._measures:
            distance, norm = norms(mine, theirs)
            if not math.isfinite(distance):
                return "it holds NaN or infinity"
            with self._lock:
                too_far = self._judge(key, peer, distance, norm)
            if too_far is not None:
                return self._refused(key, peer, too_far, "outer.robust=none")
        if (
            self.loss_check is not None
            and (worse := self.loss_check.problem(key, mine, theirs)) is not None
        ):
            refused = self._refused(key, peer, worse, "outer.check_loss=false")
            if self.robust != "clipped-gossip":
                return refused
            with self._lock:
                self._radius[key.fragment, peer] = 1.0, 0.0
        return None

    def _refused(self, key: RoundKey, peer: str, reason: str, unless: str) -> str:
        rejected = RejectedUpdate(key, peer, reason, unless)
        with self._lock:
            self._rejected[key, peer] = rejected
        return str(rejected)

    def _judge(self, key: RoundKey, peer: str, distance: float, norm: float) -> str | None:
        seen = self._seen[key.fragment]
        usual = median(list(seen)[-RECENT:]) if len(seen) >= LEAST else math.inf
        bound = self._bound(usual, norm)
        self._radius[key.fragment, peer] = (
            distance,
            self.times * (median(seen) if len(seen) >= FIRST else math.inf),
        )
        if STILL * norm < distance <= bound:
            seen.append(distance)
        elif distance > bound and (math.isfinite(usual) or self._sends == "displacement"):
            seen.append(WIDER * usual if math.isfinite(usual) else norm)
        if not self.suspect or distance <= bound:
            return None
        return f"{distance / bound:.3g} times as far from this node's as may be"

    def _bound(self, usual: float, norm: float) -> float:
        """Return the distance beyond which a contribution is refused."""
        if norm == 0:
            return math.inf
        if math.isinf(usual):
            return COLD[self._sends] * norm
        return max((self.suspect or 3.0) * usual, norm if self._sends == "displacement" else 0.0)

    def mean(
        self, me: str, fragment: int, contributions: Contributions, unweighted_count: int = 0
    ) -> Mean:
        """Return the weighted mean, or the robust rule's replacement for it."""
        if self.robust == "none":
            return weighted_mean(contributions, unweighted_count)
        held = ((peer, weight, held_at_once(tensors)) for peer, weight, tensors in contributions)
        everyone = sorted(held, key=lambda item: item[0])
        # A peer of weight 0 does not move the others; it takes over their result, in a pair within
        # its own clip.
        whole = [
            item
            for item in everyone
            if item[1] > 0 or (self.robust != "centered-clip" and item[0] == me)
        ]
        whole = whole if any(weight for _, weight, _ in everyone) else everyone
        if len(whole) == 1:
            shares = [GRID]
        elif self.robust == "centered-clip":
            shares = centered_clip(
                squared_distances([tensors for _, _, tensors in whole]), self.times
            )
        else:
            other = next(peer for peer, _, _ in whole if peer != me)
            theirs = self.newcomers.take(other, clipped_gossip(*self._radius[fragment, other]))
            shares = [GRID - theirs if peer == me else theirs for peer, _, _ in whole]
        counted = [
            (peer, float(share), tensors)
            for share, (peer, _, tensors) in zip(shares, whole, strict=True)
            if share
        ]
        # The limit makes the own share in the mean, for rules that ask for it, an equal one.
        limit = min((weight for _, weight, _ in whole if weight), default=1.0)
        return Mean(
            combined(counted),
            len(whole) * limit,
            tuple(peer for peer, _, _ in everyone),
            len(whole),
            limit=limit,
        )

    def forget(self) -> None:
        """Forget the distances seen: this node has taken over others' weights, so they no longer
        tell anything.
        """
        with self._lock:
            self._seen.clear()
        if self.loss_check is not None:
            self.loss_check.forget()

    def rejections(self) -> list[RejectedUpdate]:
        """Return the updates rejected since the last call."""
        with self._lock:
            found = list(self._rejected.values())
            self._rejected.clear()
        return found
