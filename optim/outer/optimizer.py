"""The outer optimizer: a real ``torch.optim.Optimizer`` that wraps the user's inner one.

It shares the inner optimizer's ``param_groups`` and ``state``, so learning-rate schedulers and ``GradScaler`` act on it as on
any optimizer. When the schedule says so, it hands a contribution to the exchange, applies the outer rule to the slow weights
(float32, or float64 if a parameter is; on the CPU by default) and copies the fast weights back into the model. If no peer answers,
the rule is applied to the own contribution alone: local progress is never lost.

Comparison of two outer optimizers in everything that peers must have in common.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor, nn

from shoal.optim.codecs.base import FLOAT32, Codec
from shoal.optim.exchange.base import Alone, Contribution, Exchange, Handle, OnDemand, RoundKey
from shoal.optim.outer.fragments import Fragment, Weight, equal, even, positions, possible, strided
from shoal.optim.outer.in_flight import InFlight, RoundInfo
from shoal.optim.outer.inner import (
    AveragedBuffers,
    Exclude,
    Inner,
    OuterGroups,
    accumulates,
    all_parameters,
    as_one,
    excluded,
    initialises,
    step_unless_overflow,
    trained,
)
from shoal.optim.outer.rounds import OuterRounds
from shoal.optim.outer.rule import START, Rule, State, assign
from shoal.optim.outer.weights import ModelWeights, Processes
from shoal.optim.schedule import AutoLag, Delayed, Every, RoundLength, Schedule, Steps, Streaming

if TYPE_CHECKING:
    from typing_extensions import Self


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


class OuterOptimizer(OuterRounds):
    """Outer optimizer around ``inner``, to be used in its place in the training loop.

    The parameters that require a gradient when it is made are averaged (with LoRA the adapters). A frozen one is neither kept nor
    sent; one that is frozen later stays in, because all peers must send the same tensors.

    Args:
        inner: an optimizer, or several of different parameters (``Combined``); their state is local, never exchanged or reset.
        exchange: averages contributions with other peers.
        rule: the outer mathematics.
        schedule: when to send and apply.
        codec: how contributions become bytes; by default that of a swarm's exchange, else float32. One with state (error feedback)
            is copied for each fragment.
        run: name of the run; peers of different runs never average.
        slow_device: where the slow weights and the rule's state live: a device, or as a path a folder for files that are mapped
            into memory and have no name, so that they are gone with the process. OSError if it has no room.
        on_round: called with a ``RoundInfo`` after each applied exchange.
        fragments: of each the module, or a list of modules and parameters; None: one fragment with all parameters.
        weight: of a contribution: a number, or a function of the tokens (``count``) and inner steps since the fragment was last
            sent (`shoal.optim.outer.fragments`). 0: stay out of this round's mean, as if absent.
        length: of a round: in the schedule's steps, tokens or seconds (``RoundLength``). Optimizers must not share one.
        buffers: "average" replaces the model's floating-point buffers (BatchNorm's statistics) by their mean whenever fragment 0
            is applied; they are sent as float32. "ignore" leaves every peer its own. All peers must choose the same.
        model: the module, needed for its buffers and for sharded parameters (FSDP2); each process then has its part of all state.
        exclude: parameters that stay this peer's own (a head for its task): parameters, names, names of modules, or patterns
            such as "*.bias" (names need ``model``). They are trained, but neither kept nor sent, nor are buffers of these names.
            All peers must exclude the same.
        ranks: the processes of this peer, if it is several that act as one (``shoal.optim.Ranks``); ``exchange`` is rank 0's.

    Raises:
        ValueError: no parameter that requires a gradient, not floating point, not in exactly one fragment, buffers or shards
            without a model, an exclusion that fits nothing, an inner optimizer that remembers earlier weights.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the arguments of whichever method is made, before it looks into them. TypeError names the one that is wrong."""
        made = [vars(kind)["__init__"] for kind in cls.__mro__ if "__init__" in vars(kind)]
        known = {name for make in made for name in inspect.signature(make).parameters}
        for name in options.keys() - known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"help({cls.__name__}) lists them"
            raise TypeError(f"{cls.__name__} has no argument {name!r}: {hint}")
        given = dict(zip(("inner", "exchange"), args, strict=False)) | options
        inner, exchange = given.get("inner", ()), given.get("exchange", Alone())
        several = [inner] if isinstance(inner, torch.optim.Optimizer) or not isinstance(inner, Sequence) else inner
        if wrong := [one for one in several if not isinstance(one, torch.optim.Optimizer)]:
            raise TypeError(f"inner must be an optimizer of torch, or a list of them, got {type(wrong[0]).__name__}")
        if not isinstance(exchange, Exchange):
            remedy = "hand in its exchange()" if hasattr(exchange, "exchange") else "such as session.exchange() or shoal.Alone()"
            raise TypeError(f"exchange must be an exchange, got {type(exchange).__name__}: {remedy}")
        return super().__new__(cls)

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        rule: Rule,
        schedule: Schedule,
        codec: Codec | None = None,
        run: str = "run",
        slow_device: torch.device | str | Path = "cpu",
        on_round: Callable[[RoundInfo], None] | None = None,
        fragments: Sequence[Fragment] | None = None,
        weight: float | Weight = equal,
        length: RoundLength | None = None,
        buffers: Literal["ignore", "average"] = "ignore",
        model: nn.Module | None = None,
        exclude: Exclude = (),
        ranks: Processes | None = None,
    ) -> None:
        inner = as_one(inner)
        super().__init__(inner.param_groups, inner.defaults)  # some schedulers read the defaults
        if isinstance(schedule, Streaming) and schedule.lag == "auto" and exchange.shards > 1:
            schedule = replace(schedule, lag=min(1, schedule.every - 1))  # the processes of a peer would apply at different steps
        self.inner, self.exchange, self.rule, self.schedule = inner, exchange, rule, schedule
        self._auto = AutoLag(schedule.every) if getattr(schedule, "lag", 0) == "auto" else None
        codec = codec or exchange.codec or FLOAT32
        self.codec, self.run, self.on_round, self.weight = codec, run, on_round, weight
        self.length = length or Steps()
        every, own = all_parameters(inner), excluded(exclude, inner, model)
        self._params = trained(inner, exchange, own)
        self._frozen = [p for p in every if not p.requires_grad and p not in own]
        self._count = len(every)
        wrong = [p.dtype for p in self._params if not p.is_floating_point()]
        if wrong or not self._params:
            raise ValueError(
                f"the outer optimizer averages floating-point parameters that require a gradient, got {wrong or 'none'}"
            )
        everything = list(range(len(self._params)))
        self._parts = [everything] if fragments is None else positions(fragments, self._params)
        if isinstance(schedule, Every | Streaming | Delayed) and len(self._parts) > getattr(schedule, "fragments", 1):
            raise ValueError(f"this schedule sends one fragment, so of {len(self._parts)} fragments= most would never be averaged")
        if buffers not in ("ignore", "average") or (buffers == "average" and model is None):
            raise ValueError('buffers must be "ignore", or "average" together with model=')
        at = slow_device.absolute() if isinstance(slow_device, Path) else torch.device(slow_device)
        if ranks is None:
            self._weights = ModelWeights(self._params, model, at)
        else:
            self._weights = ranks.weights(self._params, model, at)
            self.exchange, self.length = ranks.exchange(exchange), ranks.length(self.length)
        self.slow = self._weights.slow
        self._buffers = AveragedBuffers(model if buffers == "average" else None, exclude)
        self.rule_state: State = self._weights.housed(rule.initial(self.slow))
        place = {parameter: index for index, parameter in enumerate(self._params)}
        groups = [[place[p] for p in group["params"] if p in place] for group in self.param_groups]
        self.outer = OuterGroups(rule, self.slow, groups)
        """The slow weights as an optimizer, whose groups hold the outer ``lr`` and ``momentum``, for schedulers of torch."""
        self._codecs = [codec] + [codec.fresh() for _ in self._parts[1:]]
        self.steps = 0
        self.position = 0
        """In the schedule: ``steps``, unless rounds are of another ``length``."""
        self.round = 0
        """Number of the next exchange; a peer that fell behind may set it forward to average with the others again."""
        self.tokens = 0
        """Tokens counted in all."""
        self._sent_at = [(0, 0) for _ in self._parts]
        """Steps and tokens when each fragment was sent last."""
        self.applied = [-1] * len(self._parts)
        """The last round that was applied to each fragment; -1: none yet."""
        self._in_flight = InFlight(len(self._parts))
        self._averaged = False
        """True within ``averaged``."""
        self._resumed = False
        """True from the loading of state to the first exchange after it."""
        self._listening: set[int] = set()
        """Fragments whose next contribution does not count."""
        self._note_weights()
        self.exchange.attach(self)
        self._note_weights()

    @property
    def parameters(self) -> list[Tensor]:
        """The averaged parameters, in the order of ``slow``."""
        return list(self._params)

    _step_supports_amp_scaling = True
    """``GradScaler`` calls ``step`` after an overflow too, and leaves it to ``step`` to unscale the gradients."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError once the optimizer is made: the slow weights of the new parameters would be missing."""
        if hasattr(self, "slow"):
            raise ValueError("add parameter groups to the inner optimizer before wrapping it: later ones would never be averaged")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one inner step, then do what the schedule asks for (it may wait for a partner, within the exchange's limits).

        ValueError if a parameter that was frozen when this was made requires a gradient now, or the inner optimizer has more than
        it had; RuntimeError within ``averaged``. No step is taken then. A step by which torch.distributed.checkpoint makes the
        inner optimizer's state counts as none. Called by ``GradScaler.step`` it leaves the inner step out if a gradient is not
        finite, and does the outer part all the same: peers count the same steps.
        """
        scale, overflow = vars(self).get("grad_scale"), vars(self).get("found_inf")  # only while GradScaler calls
        try:
            self._check_not_averaged("step")
            self._check_parameters()
            self._check_weights()
            if closure is None and initialises(self):
                self.inner.step()
                return None
            loss: float | None = None
            if overflow is None:
                loss = self.inner.step(closure) if closure is not None else self.inner.step()
            elif closure is None:
                step_unless_overflow(self.inner, scale, overflow)
            else:
                raise RuntimeError(
                    "GradScaler takes no closure: compute the gradients before, and call scaler.step(optimizer) alone"
                )
            if accumulates(self.inner):
                return loss
            for _ in self.after_inner():
                pass  # the next iteration waits for the exchange
            return loss
        except BaseException:
            self._versions = None  # the inner step may have been taken in part
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)  # GradScaler would leave them to the next step
            raise

    def after_inner(self) -> Iterator[Handle]:
        """Do the outer part of ``step``. Yields each exchange whose outcome is needed next; iterate to the end.

        For callers that cannot block, such as a simulator with one thread for all peers: it lets the exchange end, then goes on.
        """
        self._check_not_averaged("step")
        self.steps += 1
        self._begin_anew()
        for position in self.length.reached(self.position, self.schedule, self.tokens):
            self.position = position
            yield from self._act(self.schedule.at(position))
        self._note_weights()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def count(self, tokens: int) -> None:
        """Count the tokens (or samples) of the coming step, for weights and round lengths that depend on them."""
        self.tokens += tokens

    def listen(self) -> None:
        """Take part in the next round (of every fragment) with weight 0: for a late joiner that has hardly trained yet.

        The mean is then that of the others, and they go on as if this peer were absent. The exchange must accept weights of 0;
        ``Distributed`` does not.
        """
        self._listening = set(range(len(self._parts)))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the slow weights into the model within the block; afterwards the fast ones are restored bit by bit.

        Steps, ``finish`` and ``adopt`` within it raise RuntimeError: what they did to the model would be lost.
        """
        outside = self._averaged
        if not outside:
            self._check_weights()
        known = self._versions is not None
        try:
            with self._weights.showing_slow():
                self._averaged = True
                try:
                    yield
                finally:
                    self._averaged = outside
        finally:
            if known:
                self._note_weights()

    @torch.no_grad()
    def finish(self, *, average: bool = False) -> None:
        """Apply the exchanges in flight (waiting within the exchange's limits). Call it once after the last step.

        ``average``: then send the steps since each fragment's last round in one more, and take the plain mean of the slow weights
        (and the averaged buffers) over the group, as float32, also into the model. Gossip leaves the peers with different weights;
        this makes the group equal. All peers must do it, after the same number of steps.
        """
        self._check_not_averaged("finish")
        self._check_weights()
        self._apply_in_flight()
        self._note_weights()
        if not average:
            return
        for fragment, (steps, _) in enumerate(list(self._sent_at)):
            if steps < self.steps:
                self._send(fragment, at_once=True)
        self._apply_in_flight()
        key = RoundKey(self.run, self.round, len(self._parts))
        self.round += 1
        everything = [*(t.float() for t in self.slow), *self._buffers.now()]
        mean = self.exchange.start(Contribution(key, OnDemand(everything))).result()
        if mean is not None:
            assign([*self.slow, *self._buffers.now()], mean.tensors)
        assign(self._weights.stage(self._weights.everything), self.slow)
        self._weights.restart(self._weights.everything)
        if START in self.rule_state:
            assign(self.rule_state[START], self.slow)
        self._note_weights()
        self._report(key, mean, 0)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise TypeError: a copy would share the exchange, and so this peer's place in the run."""
        raise TypeError(
            "an outer optimizer cannot be copied or pickled: make another around the copied model's inner optimizer, with an "
            "exchange of its own, and load this one's state_dict()"
        )


def config_diff(mine: OuterOptimizer, other: OuterOptimizer) -> str | None:
    """Return the first difference of ``mine`` to ``other`` that matters for averaging ("every is 20 and not 50"), or None.

    Compares rule, present outer rate and momentum of each parameter, schedule but for the lag (each peer may have its own), codec,
    weight, length of a round, number of buffers, and fragments. Tensors are not read, so ``other`` may be on the device "meta".
    """
    for index in range(min(len(mine.slow), len(other.slow))) if type(mine.rule) is type(other.rule) else ():
        present, expected = mine.outer.values(index), other.outer.values(index)
        for name in present.keys() & expected.keys():
            if present[name] != expected[name]:
                return f"{name} is {present[name]} and not {expected[name]}"
    for one, two in ((mine.rule, other.rule), (_sending(mine.schedule), _sending(other.schedule))):
        if type(one) is not type(two):
            return f"it is {_name(one)} and not {_name(two)}"
        for item in fields(one):  # type: ignore[arg-type]
            found = _differ(item.name, getattr(one, item.name), getattr(two, item.name))
            if found is not None and item.name not in mine.outer.defaults.keys() & other.outer.defaults.keys():
                return found
    pairs = {
        "the codec": (mine.codec.name, other.codec.name),
        "the weight": (_shown(mine.weight), _shown(other.weight)),
        "the round": (_length(mine), _length(other)),
        "the number of averaged buffers": (len(mine._buffers), len(other._buffers)),
        "the number of fragments": (mine.fragments, other.fragments),
    }
    differing = (found for what, (one, two) in pairs.items() if (found := _differ(what, one, two)) is not None)
    shapes = [[parameter.shape for parameter in opt.parameters] for opt in (mine, other)]
    cut = None if mine._parts == other._parts and shapes[0] == shapes[1] else "its fragments hold other parameters"
    return next(differing, cut)


def _sending(schedule: Schedule) -> Schedule:
    known = isinstance(schedule, (Every, Streaming))
    return Streaming(schedule.every, getattr(schedule, "fragments", 1)) if known else schedule


def _differ(what: str, one: object, two: object) -> str | None:
    return None if one == two else f"{what} is {one} and not {two}"


def _name(thing: object) -> str:
    return type(thing).__name__.removesuffix("Rule")


def _shown(weight: Any) -> str:
    return getattr(weight, "__name__", str(weight))


def _length(opt: OuterOptimizer) -> str:
    """Return the kind of the length, and its number if it is one; a function of seconds gives all peers the same."""
    public = {name: value for name, value in vars(opt.length).items() if not name.startswith("_")}
    return " ".join([_name(opt.length), *(f"{value:g}" for value in public.values() if not callable(value))])


def averaged_parameters(inner: Inner, exchange: Exchange, options: Options) -> list[Tensor]:
    """Return the parameters that an optimizer with these options averages, in its order."""
    return trained(inner, exchange, excluded(options.get("exclude", ()), inner, options.get("model")))


def cut(fragments: Fragments, inner: Inner, exchange: Exchange, options: Options) -> Sequence[Fragment] | None:
    """Return the parameters of each fragment, None for one: as the exchange has them, if it states that number of them."""
    if not isinstance(fragments, int):
        parameters = averaged_parameters(inner, exchange, options)
        return [[parameters[at] for at in part] for part in positions(fragments, parameters)]
    if fragments == 1:
        return None
    if len(exchange.fragments) == fragments:
        return exchange.fragments
    model, parameters = options.get("model"), averaged_parameters(inner, exchange, options)
    fragments = possible(fragments, model, parameters)
    return even(parameters, fragments) if model is None else strided(model, fragments, parameters)
