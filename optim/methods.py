"""Table of the methods by name: optimizer, intended group, what is sent, and knobs.

    method = method_named("streaming")
    opt = method.make(inner, exchange, every=50, lag=5, model=model)      # other arguments: the method's defaults
    method.knobs                                                          # {"every": 100, "fragments": 4, ...}

The command line, the node, the tests and the benchmarks go through this table, so that a new method is one line here.

The known methods: optimizers that combine a rule and a schedule, with documented defaults.

Each takes the inner optimizer, the exchange, its own knobs, and the ``Options`` that all share. The exchange chooses the
group: NoLoCo and GASLoC are meant for pairs, the others for a mean over everyone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from shoal.optim.codecs.base import FLOAT32, Codec, check_sends_weights
from shoal.optim.codecs.error_feedback import ErrorFeedback
from shoal.optim.codecs.mod4 import Mod4Codec, check_no_pair
from shoal.optim.codecs.topk import TopK2Codec
from shoal.optim.exchange.base import Exchange
from shoal.optim.outer.fragments import Fragment, Weight, by_rate, equal, even, positions, possible, strided
from shoal.optim.outer.in_flight import RoundInfo
from shoal.optim.outer.inner import Exclude, Inner, excluded, trained
from shoal.optim.outer.optimizer import OuterOptimizer
from shoal.optim.outer.weights import Processes
from shoal.optim.rules.diloco import CO2Rule, DecoupledRule, DiLoCoRule, EagerRule, warn_if_unstable
from shoal.optim.rules.gossip import GASLoCRule, LocalSGDRule, NoLoCoRule, SpartaRule
from shoal.optim.schedule import Delayed, Every, Lag, RoundLength, Schedule, Streaming

if TYPE_CHECKING:
    from typing_extensions import Unpack

SPARSE, MOD4 = ErrorFeedback(TopK2Codec(), 0.95), Mod4Codec()
"""SparseLoCo's codec, ``topk2+ef:0.95``, and that of pairs in a swarm; templates: each optimizer gets a fresh copy."""


Fragments = int | Sequence[Fragment]
"""A number of fragments, or the modules or parameters of each."""


class Options(TypedDict, total=False):
    """Arguments that every method takes; see ``OuterOptimizer``."""

    codec: Codec
    run: str
    slow_device: torch.device | str | Path
    on_round: Callable[[RoundInfo], None] | None
    weight: float | Weight
    length: RoundLength | None
    buffers: Literal["ignore", "average"]
    model: nn.Module | None
    exclude: Exclude
    ranks: Processes | None


def _weights(options: Options, method: str) -> Options:
    """Return the options. ValueError if the codec is too lossy for a method that sends whole weights."""
    check_sends_weights(options.get("codec", FLOAT32), method)
    return options


def _weighted(options: Options) -> bool:
    return options.get("weight", equal) is not equal


GOSSIP_LAG: Lag = "auto"
"""Lag of a gossip method by default, as that of nodes (`shoal.swarm.manifest.DEFAULT_LAG`): change both at once."""
OVERLAPPED = 4
"""Fragments of a gossip method with a lag, by default."""


def _gossip(
    fragments: Fragments | None, lag: Lag, every: int, inner: Inner, exchange: Exchange, options: Options
) -> tuple[Schedule, Sequence[Fragment] | None]:
    """Return the schedule of a gossip method, and its fragments: by default the exchange's, or one if means are applied at once."""
    if fragments is None:
        fragments = len(exchange.fragments) if exchange.fragments else min(OVERLAPPED, max(every, 1)) if lag else 1
    parts = _cut(fragments, inner, exchange, options)
    return (Streaming(every, len(parts) if parts else 1, lag) if parts or lag else Every(every)), parts


class NoLoCo(OuterOptimizer):
    """NoLoCo (2506.10911), which averages with one random peer every ``every`` inner steps (``NoLoCoRule``).

    With a ``lag`` nobody waits: the model is sent in ``fragments`` (4 by default), one after another and each to a partner of its
    own, and a mean is applied ``lag`` inner steps after it was sent; the fast weights keep what was learnt since
    (`shoal.optim.rules.gossip`). "auto": as soon as it is there (``AutoLag``), which may differ
    between peers. lag 0: the whole model (unless in ``fragments``), waited for.

    The paper's rate and momentum are 0.7 and 0.5; the defaults ended lower in what was measured (docs/methods.md). ``pull=None``
    means equal to ``lr``: then one tensor per parameter is sent, unless peers have different weights (``weight`` given), which
    takes two: the pseudo-gradients are weighted, the pull is not.
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
        lag: Lag = GOSSIP_LAG,
        **options: Unpack[Options],
    ) -> None:
        rule = NoLoCoRule(lr, momentum, pull, weighted=_weighted(options))
        warn_if_unstable(lr, momentum, 0, nesterov=False)
        schedule, parts = _gossip(fragments, lag, every, inner, exchange, options)
        super().__init__(inner, exchange, rule=rule, schedule=schedule, fragments=parts, **_weights(options, "NoLoCo"))


class LocalSGD(OuterOptimizer):
    """Local SGD / FedAvg, which replaces the weights by their mean over the group every ``every`` inner steps.

    With different weights (``weight`` given) the pseudo-gradients are weighted and the slow weights are not, so that the mean
    over all peers is conserved when they average in pairs. That is NoLoCo with lr 1, pull 1 and no momentum, and takes two
    tensors. If the group is everyone, all start equal, and ``DiLoCo(lr=1, momentum=0)`` is the same with one tensor.
    ``fragments`` and ``lag`` as in ``NoLoCo``.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 50,
        fragments: Fragments | None = None,
        lag: Lag = GOSSIP_LAG,
        **options: Unpack[Options],
    ) -> None:
        weighted = _weighted(options)
        rule = NoLoCoRule(1.0, 0.0, 1.0, weighted=True) if weighted else LocalSGDRule()
        schedule, parts = _gossip(fragments, lag, every, inner, exchange, options)
        super().__init__(inner, exchange, rule=rule, schedule=schedule, fragments=parts, **_weights(options, "LocalSGD"))


class GASLoC(OuterOptimizer):
    """GASLoC (2606.11081): gossip with momentum on the outer iterate (``GASLoCRule``).

    The defaults are those of NoLoCo's paper; its own paper's were not available to us. ``fragments`` and ``lag`` as in ``NoLoCo``.
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
        lag: Lag = GOSSIP_LAG,
        **options: Unpack[Options],
    ) -> None:
        warn_if_unstable(lr, momentum, 0, nesterov=True)
        rule = GASLoCRule(lr, momentum, mix)
        schedule, parts = _gossip(fragments, lag, every, inner, exchange, options)
        super().__init__(inner, exchange, rule=rule, schedule=schedule, fragments=parts, **_weights(options, "GASLoC"))


class DiLoCo(OuterOptimizer):
    """DiLoCo (2311.08105); ``nesterov=False`` is its heavy-ball form (``DiLoCoRule``).

    The paper's outer momentum is 0.9; the default ended lower in what was measured, in 10 to 300 rounds (docs/methods.md). For
    one peer it is SNOO, without momentum Lookahead. The best lr rises with the number of peers (2503.09799: 0.4 for 1, 0.6 for
    2 to 4, 0.8 for 8); a short ``every`` requires less momentum.
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
        super().__init__(inner, exchange, rule=DiLoCoRule(lr, momentum, nesterov), schedule=Every(every), **options)


class StreamingDiLoCo(OuterOptimizer):
    """Streaming DiLoCo (2501.18512): one fragment at a time, applied ``lag`` inner steps after it was sent (``Streaming``).

    ``fragments``: their number, to cut ``model`` strided by layer (the paper: three layers in each; at most one fragment a layer),
    or a list of modules (or of lists of modules and parameters), the same on all peers. Without ``model`` (on all peers) that
    number of lists of about equally many values, whatever the layer. Each fragment has its own momentum.
    Evaluate within ``averaged()``: the slow weights are better than any peer's fast ones.
    ``lag``: by default as found by ``AutoLag``, at least 1. ``mix``: "keep" is ours, and all that was learnt while the mean was on
    its way stays, of which 0.5, the paper's, loses half, and 0, that of public code (torchft, MaxText), all. The paper's lr is 0.4,
    its momentum 0.9 and its lag 1 (from memory); the defaults here differ by what was measured: docs/methods.md.
    After a failed exchange the fast weights are kept (torchft discards the round).
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 100,
        fragments: Fragments = 4,
        lag: Lag = "auto",
        mix: float | Literal["keep"] = "keep",
        lr: float = 0.7,
        momentum: float = 0.6,
        **options: Unpack[Options],
    ) -> None:
        parts = _cut(fragments, inner, exchange, options)
        warn_if_unstable(lr, momentum, 0, nesterov=True)
        schedule = Streaming(every, len(parts) if parts else 1, lag)
        super().__init__(inner, exchange, rule=DiLoCoRule(lr, momentum, mix=mix), schedule=schedule, fragments=parts, **options)


class DecoupledDiLoCo(OuterOptimizer):
    """Decoupled DiLoCo (2604.21428): fragments, the RDA merge, weights tokens^2 / steps (``DecoupledRule``).

    Call ``count(tokens)`` each step. Quorum and grace window belong to the exchange. ``plain``: parameters merged by a plain mean
    (embeddings). lr is that of reimplementations, whose momentum is 0.9 (docs/methods.md has what was measured);
    the paper's outer lr was not available to us.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 24,
        fragments: Fragments = 24,
        lag: Lag = "auto",
        lr: float = 0.7,
        momentum: float = 0.6,
        plain: Sequence[Tensor] = (),
        **options: Unpack[Options],
    ) -> None:
        parts = _cut(fragments, inner, exchange, options)
        parameters = _averaged(inner, exchange, options)
        marked = {id(parameter) for parameter in plain}
        places = frozenset(
            (number, position)
            for number, part in enumerate(positions(parts or [parameters], parameters))
            for position, index in enumerate(part)
            if id(parameters[index]) in marked
        )
        warn_if_unstable(lr, momentum, 0, nesterov=True)
        schedule = Streaming(every, len(parts) if parts else 1, lag)
        options.setdefault("weight", by_rate)
        super().__init__(inner, exchange, rule=DecoupledRule(lr, momentum, places), schedule=schedule, fragments=parts, **options)


class Eager(OuterOptimizer):
    """Eager updates (2502.12996): the exchange takes a whole round; the own displacement is applied at once (``EagerRule``).

    The paper's outer settings were not available to us. These are stable for any number of peers; momentum 0.9 is not.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 30,
        lr: float = 0.4,
        momentum: float = 0.6,
        nesterov: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(inner, exchange, rule=EagerRule(lr, momentum, nesterov), schedule=Delayed(every), **options)


class CO2(OuterOptimizer):
    """The CO2-style method (2401.16265): an exchange takes a whole round; heavy ball with staleness penalty (``CO2Rule``).

    Defaults from the official code: 48 steps and lr 1 (fairscale), momentum 0.2 and clip 1 (its language-model script; fairscale
    has 0.5 and none). Its penalty is 1; ours is gap-aware.
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
        # In the steady state of the gap-aware penalty L = 1 + lr / (L (1 - momentum)): its least damping of a lasting motion.
        damping = penalty if penalty is not None else (1 + (1 + 4 * lr / max(1 - momentum, 1e-9)) ** 0.5) / 2
        rule = CO2Rule(lr, momentum, penalty, clip, keep)
        warn_if_unstable(lr / damping, momentum, 1, nesterov=False)
        super().__init__(inner, exchange, rule=rule, schedule=Delayed(every), **options)


class SparseLoCo(DiLoCo):
    """SparseLoCo (2508.15706): SGD on the mean of sparse pseudo-gradients; ``codec`` selects, quantises and feeds back errors.

    There is no outer momentum: the residual plays its role. (The file of that name by NoLoCo's authors has both.)
    ``codec=None`` is the paper's top-k in chunks with 2 bits a value, whose residual fades by 0.95 a round. Its mean divides by the
    number of peers; that of the authors' production code, ``codec_named("topk2-senders+ef:0.95")``, by those that sent an index.
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
        options["codec"] = SPARSE.fresh() if codec is None else codec
        super().__init__(inner, exchange, every=every, lr=lr, momentum=0.0, **options)


class SPARTA(OuterOptimizer):
    """SPARTA, which averages a random ``part`` of the parameters every ``every`` inner steps (``SpartaRule``)."""

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 1,
        part: float = 0.005,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(inner, exchange, rule=SpartaRule(part), schedule=Every(every), **_weights(options, "SPARTA"))


def _cut(fragments: Fragments, inner: Inner, exchange: Exchange, options: Options) -> Sequence[Fragment] | None:
    """Return the parameters of each fragment, None for one: as the exchange has them, if it states that number of them."""
    if not isinstance(fragments, int):
        parameters = _averaged(inner, exchange, options)
        return [[parameters[at] for at in part] for part in positions(fragments, parameters)]
    if fragments == 1:
        return None
    if len(exchange.fragments) == fragments:
        return exchange.fragments
    model, parameters = options.get("model"), _averaged(inner, exchange, options)
    fragments = possible(fragments, model, parameters)
    return even(parameters, fragments) if model is None else strided(model, fragments, parameters)


def _averaged(inner: Inner, exchange: Exchange, options: Options) -> list[Tensor]:
    return trained(inner, exchange, excluded(options.get("exclude", ()), inner, options.get("model")))


NO_KNOBS = ("codec", "plain")
"""Arguments of optimizers that are objects, not settings."""


@dataclass(frozen=True)
class Method:
    """Method of outer optimization, as a row of the table."""

    name: str
    optimizer: Callable[..., OuterOptimizer]
    group: Literal["pair", "everyone", "nobody"]
    """Peers that the mean is meant to be over."""
    sends: Literal["weights", "displacement"]
    """Whole weights, or pseudo-gradients, for which codecs below 8 bits are precise enough."""
    when: str
    """The method's purpose, in a few words."""
    slow: bool = False
    """True: evaluate with the slow weights (``OuterOptimizer.averaged``); with a delay the fast ones differ from the group's."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the optimizer that define this method and are no knobs."""
    weights: Literal["equal", "tokens", "rate"] = "equal"
    """Default weighting of contributions (`shoal.optim.outer.fragments`)."""
    codec: Codec = FLOAT32
    """The default codec of a swarm. The classes of methods for pairs have float32 elsewhere: any exchange can carry it."""

    @property
    def knobs(self) -> dict[str, Any]:
        """The method's own keyword arguments and their defaults; besides them it takes all ``Options``."""
        parameters = inspect.signature(self.optimizer).parameters.values()
        skip = (*NO_KNOBS, *self.fixed)
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in skip}

    def make(self, inner: Inner, exchange: Exchange, **arguments: Any) -> OuterOptimizer:
        """Return the optimizer; ``arguments`` are knobs and ``Options``. ValueError for values that method or codec cannot use."""
        return self.optimizer(inner, exchange, **self.fixed, **arguments)

    def check_codec(self, codec: Codec) -> None:
        """Raise ValueError if ``codec`` is too lossy for what this method sends, or for pairs where this averages over everyone."""
        if self.group == "everyone":
            check_no_pair(codec)
        if self.sends == "weights":
            check_sends_weights(codec, self.name)


_ALL = (
    Method(
        "noloco", NoLoCo, "pair", "weights", "the default: no barrier, a late or dead peer holds up one other at most", codec=MOD4
    ),
    Method("local", LocalSGD, "pair", "weights", "the simplest: plain averaging with a partner, nothing to tune", codec=MOD4),
    Method("gasloc", GASLoC, "pair", "weights", "gossip like noloco, with Nesterov's momentum on the outer iterate", codec=MOD4),
    Method("none", LocalSGD, "nobody", "weights", "training alone, to compare with", fixed={"fragments": 1, "lag": 0}),
    Method("diloco", DiLoCo, "everyone", "displacement", "few, equal, reliable peers: all hold the same weights after a round"),
    Method("diloco-hb", DiLoCo, "everyone", "displacement", "diloco with heavy-ball momentum", fixed={"nesterov": False}),
    Method("streaming", StreamingDiLoCo, "everyone", "displacement", "a thin link: fragments, sent while training", slow=True),
    Method(
        "decoupled",
        DecoupledDiLoCo,
        "everyone",
        "displacement",
        "uneven peers: fragments, merged by direction",
        slow=True,
        weights="rate",
    ),
    Method("eager", Eager, "everyone", "displacement", "a slow link: the exchange has a whole round of time", slow=True),
    Method("co2", CO2, "everyone", "displacement", "the same, with a penalty on stale means and a clip", slow=True),
    Method("sparseloco", SparseLoCo, "everyone", "displacement", "the fewest bytes: the largest values in 2 bits", codec=SPARSE),
    Method("sparta", SPARTA, "everyone", "weights", "a trickle: at each step a random 0.5 % of the weights is averaged"),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
"""All methods by name, in the order of display."""


def method_named(name: str) -> Method:
    """Return the method of that name. ValueError for an unknown name lists the known ones."""
    method = METHODS.get(name)
    if method is None:
        raise ValueError(f"unknown method {name[:64]!r}: choose one of {', '.join(METHODS)}")
    return method


def methods_with(knob: str) -> list[str]:
    return [method.name for method in METHODS.values() if knob in method.knobs]
