"""Rules that average weights with few peers, without a sum over everyone: local SGD, NoLoCo,
GASLoC.

Each may be applied some steps after its contribution was sent (ours: the papers wait for the mean).
The slow weights then follow the same formula, with the contribution as it was sent, and the fast
weights keep what was learnt since:

    fast <- fast + (slow - fast as sent)        which without a lag is        fast <- slow

SPARTA (openreview stFPf3gzq1): averaging of a small random part of the parameters every few steps.

Below the rules are the optimizers made of them, with documented defaults; ``Options`` are the
arguments that all methods share.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, check_sends_weights
from shoal.optim.codecs.mod4 import mixed
from shoal.optim.device import to_device
from shoal.optim.exchange.base import Exchange, OnDemand, RoundKey
from shoal.optim.methods import DEFAULT_LAG, OVERLAPPED
from shoal.optim.outer.fragments import equal
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.optimizer import Fragments, Options, OuterOptimizer, cut
from shoal.optim.outer.rule import (
    RoundContext,
    Rule,
    State,
    assign,
    check_rate_and_momentum,
    move_on,
    zeros,
)
from shoal.optim.rules.diloco import warn_if_unstable
from shoal.optim.schedule import Every, Lag, Streaming

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True)
class NoLoCoRule:
    """NoLoCo's rule (2506.10911v1, Eq. 1-3) in the form of the authors' code, whose sign of the
    second term is the descending one.

    With g = slow - fast, momentum a, outer lr b and pull c, means taken over the group:

        v <- a v + b mean(g) + c (slow - mean(slow));   slow <- slow - v;   fast <- slow

    This is heavy ball, not Nesterov. When c = b (as in the authors' runs; the paper gives no value)
    the two terms collapse to b (slow - mean(fast)): only the fast weights are sent, half the bytes.
    Otherwise g and slow are both sent.

    ``weighted``: peers contribute with different weights. Only mean(g) is weighted then; mean(slow)
    stays a plain mean, so that the pull moves the members by opposite amounts and the mean over all
    peers is conserved (ours: the paper has no weights). That needs both tensors, whatever the pull.
    All peers must agree on it.

    The replicas' consensus distance contracts for 0 < c < 2 (1 - a^2) with pairs (our derivation;
    the paper's Eq. 74 recommends values that diverge for a = 0.9); other values cause a warning.
    """

    lr: float = 1.0
    momentum: float = 0.3
    pull: float | None = None
    """None: equal to ``lr``."""
    weighted: bool = False

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)
        if not self.gamma >= 0:
            raise ValueError(f"pull must not be negative, got {self.gamma}")
        limit = 2 * (1 - self.momentum**2)
        if self.gamma >= limit and self.gamma != 0:
            warnings.warn(
                f"pull {self.gamma:g} with momentum {self.momentum:g} lets the peers drift apart: "
                f"keep pull below {limit:g} "
                "or lower the momentum",
                stacklevel=3,
            )

    @property
    def gamma(self) -> float:
        """The pull towards the group's mean slow weights."""
        return self.lr if self.pull is None else self.pull

    @property
    def sends_weights_only(self) -> bool:
        """True in the one-tensor form."""
        return self.gamma == self.lr and not self.weighted

    def initial(self, slow: Sequence[Tensor]) -> State:
        return {"momentum": zeros(slow)}

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> OnDemand:
        """Return ``fast`` in the one-tensor form, else ``slow``, then the pseudo-gradients."""
        return OnDemand(fast if self.sends_weights_only else [*slow, *zip(slow, fast, strict=True)])

    def even(self, count: int) -> int:
        return 0 if self.sends_weights_only else count // 2

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        velocity = state["momentum"]
        if self.sends_weights_only:
            for v, s, mean_fast in zip(velocity, slow, mean, strict=True):
                v.mul_(self.momentum).add_(s - mean_fast, alpha=self.lr)
                s.sub_(v)
        else:
            count = len(slow)
            for v, s, mean_slow, g in zip(velocity, slow, mean[:count], mean[count:], strict=True):
                v.mul_(self.momentum).add_(g, alpha=self.lr)
                if (
                    context.members > 1 or context.weight == 0
                ):  # without a partner there is no pull, nor must rounding be one
                    v.add_(s - mean_slow, alpha=self.gamma)
                s.sub_(v)
        sent = context.sent
        weights = (
            sent
            if self.sends_weights_only
            else (s - g for s, g in zip(sent[: len(slow)], sent[len(slow) :], strict=True))
        )
        move_on(fast, slow, weights, context.lag)


@dataclass(frozen=True)
class LocalSGDRule:
    """Rule of local SGD / FedAvg: slow weights become the mean of the fast weights.

    With pairs: epidemic averaging.
    """

    def initial(self, slow: Sequence[Tensor]) -> State:
        return {}

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> list[Tensor]:
        return list(fast)

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        assign(slow, mean)
        move_on(fast, slow, context.sent, context.lag)


@dataclass(frozen=True)
class GASLoCRule:
    """GASLoC's rule (2606.11081): gossip on the outer iterate, with momentum on it.

    With h = fast - slow, outer lr b, mix a and momentum c, and a plain mean over the group (never
    weighted, so that the mean over all peers is conserved; peers that made more steps count more by
    their larger h):

        u <- slow + b h;   slow <- u - a (u - mean(u)) + c (u - u of the round before);   fast <-
        slow

    The paper writes a graph Laplacian; for a group of n that averages completely it is n (u -
    mean(u)), so its step size is a/n (a/2 for pairs). The u before the first round is the first
    slow weights, as in Nesterov's own form: for one peer this is DiLoCo's torch form with the same
    lr and momentum. Without momentum and with mix 1 it is NoLoCo with momentum 0 and pull 1.

    The fast weights as sent are kept under a lag: from u they could be had by dividing by lr only,
    which a schedule may bring to 0.
    """

    keeps_fast: ClassVar[bool] = True
    lr: float = 0.7
    momentum: float = 0.5
    mix: float = 1.0

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)
        if not 0 <= self.mix <= 1:
            raise ValueError(
                f"mix must lie in [0, 1], got {self.mix}: 0 never averages, 1 averages completely"
            )

    def initial(self, slow: Sequence[Tensor]) -> State:
        """Return the zero ``offset`` (slow minus the last u)."""
        return {"offset": zeros(slow)}

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> list[Tensor]:
        return [s.lerp(f, self.lr) for s, f in zip(slow, fast, strict=True)]

    def even(self, count: int) -> int:
        return count

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        own = context.sent if context.lag > 0 else self.contribution(slow, fast, state, context)
        for offset, s, u, mean_u in zip(state["offset"], slow, own, mean, strict=True):
            offset.add_(u - s).mul_(
                self.momentum
            )  # u - (u of the round before), times the momentum
            offset.add_(mean_u - u, alpha=self.mix)
            s.copy_(u).add_(offset)
        move_on(fast, slow, context.fast, context.lag)


def chosen(key: RoundKey, count: int, part: float) -> Tensor:
    """Return round(part * count) different positions below ``count``, ascending, int64 on the CPU.

    They follow from the key alone, in integer arithmetic, so that every peer computes the same on
    any machine and with any version of torch, and no mask is sent. The positions are cut into as
    many runs as are wanted, of lengths that differ by at most one, and one is drawn in each: so
    their number is fixed, and each position is drawn with probability ``part`` (up to that one).
    """
    wanted = min(round(part * count), count)
    if wanted == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    seed = hashlib.sha256(f"shoal/sparta/1:{key.run}:{key.round}:{key.fragment}".encode()).digest()
    edges = torch.arange(wanted + 1, dtype=torch.int64, device="cpu")
    edges = (
        edges * (count // wanted) + edges * (count % wanted) // wanted
    )  # = edges * count // wanted, without overflow
    low, length = edges[:-1], edges[1:] - edges[:-1]
    draws = torch.arange(wanted, dtype=torch.int64, device="cpu")
    for start in range(0, 16, 4):
        draws = mixed((draws ^ int.from_bytes(seed[start : start + 4], "little")) & 0xFFFFFFFF)
    return low + draws % length


@dataclass(frozen=True)
class SpartaRule:
    """SPARTA's rule: the chosen values of ``fast`` become their mean over the group; all others
    stay the peer's own.

    The mask follows from (run, round, fragment): the public code sends it, which costs more than
    the values. It has a fixed number of values over the whole fragment, so that small tensors are
    reached too. There is no outer optimizer: slow equals fast. With a late mean the values move by
    (mean - contribution), so that the progress since then stays.
    """

    part: float = 0.005
    """Part of all values, in [0, 1]."""

    def __post_init__(self) -> None:
        if not 0 <= self.part <= 1:
            raise ValueError(
                f"part must lie in [0, 1], got {self.part}: it is the part of all values that is "
                "averaged"
            )

    def initial(self, slow: Sequence[Tensor]) -> State:
        return {}

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> list[Tensor]:
        return [
            torch.cat(
                [f.reshape(-1)[at] for f, at in zip(fast, self._places(fast, context), strict=True)]
            )
        ]

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        places = self._places(fast, context)
        sizes = [at.numel() for at in places]
        sent = torch.split(context.sent[0], sizes)
        for f, at, theirs, own in zip(fast, places, torch.split(mean[0], sizes), sent, strict=True):
            flat = f.view(-1)
            flat[at] = theirs if context.lag == 0 else flat[at] + (theirs - own)
        assign(slow, fast)

    def counts(self, sizes: Sequence[int], key: RoundKey) -> list[int]:
        return [high - low for low, high in itertools.pairwise(self._chosen(sizes, key)[1])]

    def _chosen(self, sizes: Sequence[int], key: RoundKey) -> tuple[Tensor, list[int]]:
        """Return the chosen positions in the concatenation of all tensors, and where those of each
        tensor begin among them.
        """
        ends = torch.tensor(sizes, device="cpu").cumsum(0)
        flat = chosen(key, int(ends[-1]), self.part)
        return flat, [0, *torch.searchsorted(flat, ends).tolist()]

    def _places(self, tensors: Sequence[Tensor], context: RoundContext) -> list[Tensor]:
        """Return the chosen positions in each tensor; none in one that another rank owns."""
        sizes = context.sizes or [tensor.numel() for tensor in tensors]
        flat, cuts = self._chosen(sizes, context.key)
        begins = [0, *itertools.accumulate(sizes)]
        parts = zip(cuts, cuts[1:], begins, tensors, strict=False)
        found = [
            flat[first:last] - begin if tensor.numel() else flat[:0]
            for first, last, begin, tensor in parts
        ]
        return to_device(found, tensors[0].device)


class _Gossip(OuterOptimizer):
    """Method that sends whole weights, overlapped or not, to a partner of each round."""

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        rule: Rule,
        every: int,
        fragments: Fragments | None,
        lag: Lag,
        options: Options,
    ) -> None:
        check_sends_weights(options.get("codec", FLOAT32), type(self).__name__)
        if fragments is None:  # as the exchange has them, or one if means are applied at once
            fragments = (
                len(exchange.fragments)
                if exchange.fragments
                else min(OVERLAPPED, max(every, 1))
                if lag
                else 1
            )
        parts = cut(fragments, inner, exchange, options)
        schedule = (
            Streaming(every, len(parts) if parts else 1, lag) if parts or lag else Every(every)
        )
        super().__init__(inner, exchange, rule=rule, schedule=schedule, fragments=parts, **options)


class NoLoCo(_Gossip):
    """NoLoCo (2506.10911), which averages with one random peer every ``every`` inner steps
    (``NoLoCoRule``).

    With a ``lag`` nobody waits: the model is sent in ``fragments`` (4 by default), one after
    another and each to a partner of its own, and a mean is applied ``lag`` inner steps after it was
    sent; the fast weights keep what was learnt since. "auto": as soon as it is there (``AutoLag``),
    which may differ between peers. lag 0: the whole model (unless in ``fragments``), waited for.

    The paper's rate and momentum are 0.7 and 0.5; the defaults ended lower in what was measured
    (docs/methods.md). ``pull=None`` means equal to ``lr``: then one tensor per parameter is sent,
    unless peers have different weights (``weight`` given), which takes two: the pseudo-gradients
    are weighted, the pull is not.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 50,
        lr: float = 1.0,
        momentum: float = 0.3,
        pull: float | None = None,
        fragments: Fragments | None = None,
        lag: Lag = DEFAULT_LAG,
        **options: Unpack[Options],
    ) -> None:
        rule = NoLoCoRule(lr, momentum, pull, weighted=options.get("weight", equal) is not equal)
        warn_if_unstable(lr, momentum, 0, nesterov=False)
        super().__init__(inner, exchange, rule, every, fragments, lag, options)


class LocalSGD(_Gossip):
    """Local SGD / FedAvg, which replaces the weights by their mean over the group every ``every``
    inner steps.

    With different weights (``weight`` given) the pseudo-gradients are weighted and the slow weights
    are not, so that the mean over all peers is conserved when they average in pairs. That is NoLoCo
    with lr 1, pull 1 and no momentum, and takes two tensors. If the group is everyone, all start
    equal, and ``DiLoCo(lr=1, momentum=0)`` is the same with one tensor. ``fragments`` and ``lag``
    as in ``NoLoCo``.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 50,
        fragments: Fragments | None = None,
        lag: Lag = DEFAULT_LAG,
        **options: Unpack[Options],
    ) -> None:
        weighted = options.get("weight", equal) is not equal
        rule = NoLoCoRule(1.0, 0.0, 1.0, weighted=True) if weighted else LocalSGDRule()
        super().__init__(inner, exchange, rule, every, fragments, lag, options)


class GASLoC(_Gossip):
    """GASLoC (2606.11081): gossip with momentum on the outer iterate (``GASLoCRule``).

    The defaults are those of NoLoCo's paper; its own paper's were not available to us.
    ``fragments`` and ``lag`` as in ``NoLoCo``.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 50,
        lr: float = 0.7,
        momentum: float = 0.5,
        mix: float = 1.0,
        fragments: Fragments | None = None,
        lag: Lag = DEFAULT_LAG,
        **options: Unpack[Options],
    ) -> None:
        warn_if_unstable(lr, momentum, 0, nesterov=True)
        rule = GASLoCRule(lr, momentum, mix)
        super().__init__(inner, exchange, rule, every, fragments, lag, options)


class SPARTA(OuterOptimizer):
    """SPARTA, which averages a random ``part`` of the parameters every ``every`` inner steps
    (``SpartaRule``).
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 1,
        part: float = 0.005,
        **options: Unpack[Options],
    ) -> None:
        check_sends_weights(options.get("codec", FLOAT32), "SPARTA")
        super().__init__(inner, exchange, rule=SpartaRule(part), schedule=Every(every), **options)
