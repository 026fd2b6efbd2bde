"""DiLoCo and the rules built on it: SGD with momentum on the slow weights, along the mean
pseudo-gradient.

Convergence of the outer step: the eigenvalues of the outer recursion on a quadratic, for warnings.

Where the inner steps of a round contract a direction by 1 - c (0 < c <= 1; c near 1 for long
rounds), its pseudo-gradient is c times the slow weight. A mean that is applied L rounds late then
gives, with x = lr c and momentum m, a linear recursion whose roots are those of

    nesterov    z^(L+2) - (1+m) z^(L+1) + m z^L + x ((1+m) z - m) f(z)
    heavy ball  z^(L+2) - (1+m) z^(L+1) + m z^L + x z f(z)

with f(z) = 1, or f(z) = 1 - s + s z^L if a part s of the displacement is applied at once (eager
updates). It is stable while all roots lie inside the unit circle. AdamW's steps are not linear, so
this is a guide, not a proof.

Under ``Delayed`` (CO2-style and eager updates) a mean arrives a whole round late: each round ends
with: wait for the mean of the round before, send the own displacement of this round, then apply.

Below the rules are the optimizers made of them, with documented defaults; ``Options`` are the
arguments that all methods share.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.error_feedback import ErrorFeedback
from shoal.optim.codecs.topk import TopK2Codec
from shoal.optim.exchange.base import Exchange, OnDemand, differences
from shoal.optim.methods import DEFAULT_LAG
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.optimizer import Fragments, Options, OuterOptimizer, cut
from shoal.optim.outer.rule import (
    START,
    RoundContext,
    State,
    assign,
    check_rate_and_momentum,
    pseudo_gradient,
    zeros,
)
from shoal.optim.schedule import Delayed, Every, Lag, Streaming

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True)
class DiLoCoRule:
    """DiLoCo's rule (2311.08105): with momentum m, outer lr b and G = mean(g),

        v <- m v + G;   slow <- slow - b (G + m v)   (nesterov)   or   slow <- slow - b v   (heavy
        ball);   fast <- slow

    The Nesterov form is that of torch.optim.SGD(nesterov=True), which the paper's and most public
    code uses. It equals the form with lr inside the buffer (MuLoCo's code) only while lr is
    constant. The "DiLoCo" of NoLoCo's authors is the heavy ball.

    With one peer it is SNOO (2510.15830), and Lookahead without momentum. Without momentum over
    everyone: SparseLoCo's outer step.

    ``mix`` (Streaming DiLoCo, 2501.18512; torchft and MaxText do the same): fast <- mix fast + (1 -
    mix) slow. 0 discards the progress made while the exchange was in flight, 1 ignores the others.
    "keep" (ours) discards nothing: fast <- fast + (slow - fast when it was sent), so all that was
    learnt meanwhile is in the next pseudo-gradient, once. That is measured from the new slow
    weights, not from the mix. The inner optimizer's state is neither sent nor reset.
    """

    shared: ClassVar[tuple[str, ...]] = ("momentum",)
    lr: float = 0.7
    momentum: float = 0.6
    nesterov: bool = True
    mix: float | Literal["keep"] = 0.0

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)
        if self.mix != "keep" and (isinstance(self.mix, str) or not 0 <= self.mix <= 1):
            raise ValueError(
                f"mix must be keep or lie in [0, 1], got {self.mix}: 0 takes the slow weights, 1 "
                "keeps the fast ones"
            )

    def initial(self, slow: Sequence[Tensor]) -> State:
        """Return momentum 0; no buffer without momentum."""
        return {"momentum": zeros(slow)} if self.momentum else {}

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> OnDemand:
        return differences(slow, fast)

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        keeps = self.mix == "keep" and context.lag > 0
        if keeps:
            for f, s, g in zip(fast, slow, context.sent, strict=True):
                f.sub_(s).add_(g)  # what was learnt since: exactly 0 if nothing was
        outer_step(slow, mean, state, self.lr, self.momentum, self.nesterov)
        for s, f in zip(slow, fast, strict=True):
            if keeps:
                f.add_(s)
            elif self.mix == "keep" or self.mix == 0:
                f.copy_(s)
            elif self.mix < 1:
                f.mul_(self.mix).add_(s, alpha=1 - self.mix)


def outer_step(
    slow: Sequence[Tensor],
    gradients: Sequence[Tensor],
    state: State,
    lr: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Take a step of SGD with momentum in torch's form on ``slow``, in place; ``gradients`` are not
    changed.
    """
    if momentum == 0:
        for s, g in zip(slow, gradients, strict=True):
            s.sub_(g, alpha=lr)
        return
    for v, s, g in zip(state["momentum"], slow, gradients, strict=True):
        v.mul_(momentum).add_(g)
        if nesterov:
            s.sub_(g, alpha=lr).sub_(v, alpha=lr * momentum)
        else:
            s.sub_(v, alpha=lr)


def largest_root(
    rate: float, momentum: float, lag: int, *, nesterov: bool, fresh: float = 0.0
) -> float:
    """Return the largest absolute value of the roots for x = ``rate`` and a delay of ``lag``
    rounds.
    """
    coefficients = torch.zeros(lag + 3, dtype=torch.float64, device="cpu")  # of z^0, z^1, ...
    coefficients[lag : lag + 3] = torch.tensor([momentum, -(1 + momentum), 1.0], device="cpu")
    direct = {0: -momentum, 1: 1 + momentum} if nesterov else {1: 1.0}
    for power, factor in direct.items():
        coefficients[power] += rate * factor * (1 - fresh)
        coefficients[power + lag] += rate * factor * fresh
    degree = lag + 2
    companion = torch.diag(torch.ones(degree - 1, dtype=torch.float64, device="cpu"), -1)
    companion[:, -1] = -coefficients[:degree]
    return float(torch.linalg.eigvals(companion).abs().max())


@functools.lru_cache(maxsize=256)
def limit(momentum: float, lag: int, *, nesterov: bool, fresh: float = 0.0) -> float:
    """Return the largest stable lr for c = 1 (four digits); above it the recursion diverges. 0 if
    momentum is 1.
    """
    if momentum >= 1 and (lag > 0 or nesterov):
        return 0.0
    if lag == 0:
        return 2 * (1 + momentum) / (1 + 2 * momentum) if nesterov else 2 * (1 + momentum)

    def stable(rate: float) -> bool:
        return largest_root(rate, momentum, lag, nesterov=nesterov, fresh=fresh) < 1

    step = 0.01 * (1 - momentum)
    rate = step
    while stable(rate):
        rate += step
    low, high = rate - step, rate
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


def warn_if_unstable(
    lr: float, momentum: float, lag: int, *, nesterov: bool, fresh: float = 0.0, stacklevel: int = 3
) -> None:
    """Warn, naming the knob to change, if ``lr`` is at or above the ``limit`` (lr 0 never is)."""
    largest = limit(momentum, lag, nesterov=nesterov, fresh=fresh)
    if lr >= largest and lr > 0:
        late = "" if lag == 0 else f" and a mean that comes {lag} round{'s' * (lag > 1)} late"
        mend = (
            f"keep lr below {largest:.3g} or lower the momentum"
            if largest > 0
            else "lower the momentum"
        )
        warnings.warn(
            f"outer lr {lr:g} with momentum {momentum:g}{late} may diverge where the inner steps "
            f"have converged: {mend}",
            stacklevel=stacklevel,
        )


DECAY = 0.9
"""Decay of the running mean of the mean pseudo-gradient's length."""


@dataclass(frozen=True)
class CO2Rule:
    """CO2-style rule (2401.16265): heavy ball on the mean of the round before, with a penalty for
    its staleness and a clip.

        g = start - fast is sent;  G = mean(g of the round before)
        m <- clip(momentum m + G / L, +-clip);   slow <- slow - lr m;   fast <- slow

    "CO2-style": only the paper's abstract, reviews and code were available to us. Ours, not
    necessarily the paper's, is the gap-aware penalty L = 1 + ||slow's last move|| / C, C = running
    mean of ||G|| (first G, then 0.9 C + 0.1 ||G||), both over the fragment. A number for
    ``penalty`` is that constant L, as in the official code (whose default 1 is no penalty). Not
    followed: the official code clips a copy (so never), and averages the live parameters while they
    are trained. The paper sends the weights, we send their displacement from where the round
    started, which suits any codec. Where all peers start a round from the same weights, that is the
    same. In the second round they do not: no mean has come, so each goes on from its own weights,
    which hold the first round's displacement, and a mean of weights would count that twice. So the
    two agree in what the first two rounds apply, and not from the third on (with ``keep`` starts
    differ in every round but the first).

    The displacement since the last send is in no mean yet. By default it is discarded from ``fast``
    and comes back with its mean one round later. ``keep=True`` leaves it there: fast moves by
    (slow's move + own g of the round before), so that the own displacement is never applied twice.

    The first round has no mean: fast stays as it is.
    """

    shared: ClassVar[tuple[str, ...]] = ("momentum", "moved", "usual")
    lr: float = 1.0
    momentum: float = 0.2
    penalty: float | None = None
    """None: gap-aware; else a constant of at least 1."""
    clip: float | None = 1.0
    """Largest absolute value in the momentum; None: no limit."""
    keep: bool = False

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)
        if self.penalty is not None and not self.penalty >= 1:
            raise ValueError(f"penalty must be at least 1, got {self.penalty}: 1 is no penalty")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive, got {self.clip}: None is no clip")

    def initial(self, slow: Sequence[Tensor]) -> State:
        """Return momentum 0, start = slow, ``moved`` (squared length of each tensor's last move)
        and ``usual`` (C).
        """
        state = {"momentum": zeros(slow), START: [tensor.clone() for tensor in slow]}
        if self.penalty is None:
            state["moved"] = [tensor.new_zeros(()) for tensor in slow]
            state["usual"] = [tensor.new_zeros(()) for tensor in slow]
        return state

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> list[Tensor]:
        displacement = pseudo_gradient(state[START], fast)
        assign(state[START], fast)
        return displacement

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        if context.members == 0:
            return
        gap = self._gap(mean, state, context)
        for index, (m, start, s, f, g) in enumerate(
            zip(state["momentum"], state[START], slow, fast, mean, strict=True)
        ):
            m.mul_(self.momentum).add_(g / gap)
            if self.clip is not None:
                m.clamp_(-self.clip, self.clip)
            s.sub_(m, alpha=self.lr)
            if self.keep:
                correction = context.sent[index] - self.lr * m
                f.add_(correction)
                start.add_(correction)
            else:
                f.sub_(start).add_(s)  # keeps the displacement since the last send, if any
                start.copy_(s)
        if self.penalty is None:
            moved = [(self.lr * torch.linalg.vector_norm(m)) ** 2 for m in state["momentum"]]
            assign(state["moved"], context.of_owners(moved))

    def _gap(self, mean: Sequence[Tensor], state: State, context: RoundContext) -> float | Tensor:
        """Return the penalty of this mean and advance C."""
        if self.penalty is not None:
            return self.penalty
        length = (
            torch.stack(context.of_owners([torch.linalg.vector_norm(tensor) for tensor in mean]))
            .square()
            .sum()
            .sqrt()
        )
        usual = state["usual"][0]
        usual = torch.where(usual > 0, DECAY * usual + (1 - DECAY) * length, length)
        assign(state["usual"], [usual] * len(mean))
        moved = torch.stack(state["moved"]).sum().sqrt()
        return 1 + torch.where(
            usual > 0, moved / usual.clamp_min(torch.finfo(usual.dtype).tiny), 0.0
        )


class DiLoCo(OuterOptimizer):
    """DiLoCo (2311.08105); ``nesterov=False`` is its heavy-ball form (``DiLoCoRule``).

    The paper's outer momentum is 0.9; the default ended lower in what was measured, in 10 to 300
    rounds (docs/methods.md). For one peer it is SNOO, without momentum Lookahead. The best lr rises
    with the number of peers (2503.09799: 0.4 for 1, 0.6 for 2 to 4, 0.8 for 8); a short ``every``
    requires less momentum.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 500,
        lr: float = 0.7,
        momentum: float = 0.6,
        nesterov: bool = True,
        **options: Unpack[Options],
    ) -> None:
        warn_if_unstable(lr, momentum, 0, nesterov=nesterov)
        super().__init__(
            inner,
            exchange,
            rule=DiLoCoRule(lr, momentum, nesterov),
            schedule=Every(every),
            **options,
        )


class StreamingDiLoCo(OuterOptimizer):
    """Streaming DiLoCo (2501.18512): one fragment at a time, applied ``lag`` inner steps after it
    was sent (``Streaming``).

    ``fragments``: their number, to cut ``model`` strided by layer (the paper: three layers in each;
    at most one fragment a layer), or a list of modules (or of lists of modules and parameters), the
    same on all peers. Without ``model`` (on all peers) that number of lists of about equally many
    values, whatever the layer. Each fragment has its own momentum. Evaluate within ``averaged()``:
    the slow weights are better than any peer's fast ones. ``lag``: by default as found by
    ``AutoLag``, at least 1. ``mix``: "keep" is ours, and all that was learnt while the mean was on
    its way stays, of which 0.5, the paper's, loses half, and 0, that of public code (torchft,
    MaxText), all. The paper's lr is 0.4, its momentum 0.9 and its lag 1 (from memory); the defaults
    here differ by what was measured: docs/methods.md. After a failed exchange the fast weights are
    kept (torchft discards the round).
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 100,
        fragments: Fragments = 4,
        lag: Lag = DEFAULT_LAG,
        mix: float | Literal["keep"] = "keep",
        lr: float = 0.7,
        momentum: float = 0.6,
        **options: Unpack[Options],
    ) -> None:
        parts = cut(fragments, inner, exchange, options)
        warn_if_unstable(lr, momentum, 0, nesterov=True)
        schedule = Streaming(every, len(parts) if parts else 1, lag)
        super().__init__(
            inner,
            exchange,
            rule=DiLoCoRule(lr, momentum, mix=mix),
            schedule=schedule,
            fragments=parts,
            **options,
        )


class CO2(OuterOptimizer):
    """The CO2-style method (2401.16265): an exchange takes a whole round; heavy ball with staleness
    penalty (``CO2Rule``).

    Defaults from the official code: 48 steps and lr 1 (fairscale), momentum 0.2 and clip 1 (its
    language-model script; fairscale has 0.5 and none). Its penalty is 1; ours is gap-aware.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 48,
        lr: float = 1.0,
        momentum: float = 0.2,
        penalty: float | None = None,
        clip: float | None = 1.0,
        keep: bool = False,
        **options: Unpack[Options],
    ) -> None:
        # In the steady state of the gap-aware penalty L = 1 + lr / (L (1 - momentum)): its least
        # damping of a lasting motion.
        damping = (
            penalty
            if penalty is not None
            else (1 + (1 + 4 * lr / max(1 - momentum, 1e-9)) ** 0.5) / 2
        )
        rule = CO2Rule(lr, momentum, penalty, clip, keep)
        warn_if_unstable(lr / damping, momentum, 1, nesterov=False)
        super().__init__(inner, exchange, rule=rule, schedule=Delayed(every), **options)


class SparseLoCo(DiLoCo):
    """SparseLoCo (2508.15706): SGD on the mean of sparse pseudo-gradients; ``codec`` selects,
    quantises and feeds back errors.

    There is no outer momentum: the residual plays its role. (The file of that name by NoLoCo's
    authors has both.) ``codec=None`` is the paper's top-k in chunks with 2 bits a value, whose
    residual fades by 0.95 a round. Its mean divides by the number of peers; that of the authors'
    production code, ``codec_named("topk2-senders+ef:0.95")``, by those that sent an index. That
    code also sends tensors of one dimension whole; here top-k cuts them too.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        codec: Codec | None = None,
        every: int = 30,
        lr: float = 1.0,
        **options: Any,
    ) -> None:
        options["codec"] = codec or ErrorFeedback(TopK2Codec(), 0.95)
        super().__init__(inner, exchange, every=every, lr=lr, momentum=0.0, **options)
