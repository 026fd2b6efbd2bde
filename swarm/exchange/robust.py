"""The protection against updates that are well formed and hostile: ``DistanceScreen``.

    screen = DistanceScreen(robust="clipped-gossip", suspect=0)
    screen.problem(key, own, peer, theirs)    # why the contribution of ``peer`` is refused, or None
    screen.mean(me, fragment, contributions)  # the robust mean of those that passed

It refuses updates that lie too far from the node's own (``suspect``), or limits the influence of
each (``robust``; the shares are computed in `shoal.optim.exchange.robust_shares`). `LossCheck`
tries a partner's weights on data, and `Newcomers` limits peers that have shown nothing yet. Why,
and what each costs: docs/internals.md, "Robust means".
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
LEAST = 12  # distances that are known before they make the bound
RECENT = 8  # of them that make it: few, so that it follows honest peers
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
        whole = everyone
        if any(weight for _, weight, _ in everyone):
            # A peer of weight 0 does not move the others; it takes over their result, in a pair
            # within its own clip.
            own = me if self.robust != "centered-clip" else None
            whole = [item for item in everyone if item[1] > 0 or item[0] == own]
        shares = self._shares(me, fragment, whole)
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

    def _shares(
        self, me: str, fragment: int, whole: Sequence[tuple[str, float, Sequence[Tensor]]]
    ) -> list[int]:
        """Return the share of each contribution in the mean, in units of 1 / `GRID`."""
        if len(whole) == 1:
            return [GRID]
        if self.robust == "centered-clip":
            return centered_clip(
                squared_distances([tensors for _, _, tensors in whole]), self.times
            )
        other = next(peer for peer, _, _ in whole if peer != me)
        theirs = self.newcomers.take(other, clipped_gossip(*self._radius[fragment, other]))
        return [GRID - theirs if peer == me else theirs for peer, _, _ in whole]

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
