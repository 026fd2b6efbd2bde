"""The exchange and the outer optimizer that a swarm's settings ask for, the length of its rounds,
and the losses by which a node tries a partner's weights before they count
(`shoal.swarm.exchange.robust`).
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median_high, median_low
from typing import Any

import torch
from torch import Tensor, nn

from shoal.optim import (
    Exchange,
    OuterOptimizer,
    RoundInfo,
    RoundLength,
    Seconds,
    Steps,
    Tokens,
    by_rate,
    by_tokens,
    codec_named,
    equal,
)
from shoal.optim.device import Beside, current_device
from shoal.optim.outer.inner import Inner, check_inner
from shoal.optim.outer.weights import Processes
from shoal.optim.schedule.agreed_seconds import USEFUL, agreed_seconds, bounded_speeds
from shoal.swarm.errors import OuterError
from shoal.swarm.exchange.context import FEW, QUICKER, ExchangeTimeouts, PeerContext
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.membership.membership import Membership
from shoal.swarm.p2p.addresses import of_ranges
from shoal.swarm.settings.outer import MAX_GROUP, OuterSettings
from shoal.swarm.settings.round_length import parse_round
from shoal.swarm.wire.messages import Member

log = logging.getLogger(__name__)


def still_training(members: Mapping[str, Member]) -> dict[str, Member]:
    """Return those of ``members`` whose last step is not done: rounds of training are among
    them.
    """
    return {peer: member for peer, member in members.items() if not member.ended}


def at_their_end(members: Mapping[str, Member]) -> dict[str, Member]:
    """Return those of ``members`` whose last step is done."""
    return {peer: member for peer, member in members.items() if member.ended}


TRIAL_S = 20.0  # that a partner may take to try a contribution on data


def make_screen(outer: OuterSettings) -> DistanceScreen:
    if outer.robust == "distance":
        return DistanceScreen(sends=outer.row.sends)
    return DistanceScreen(robust=outer.robust, suspect=0.0, sends=outer.row.sends)


def make_exchange(
    membership: Membership,
    outer: OuterSettings,
    screen: DistanceScreen,
    opt: OuterOptimizer,
    *,
    seed: int,
    model: str,
) -> PairExchange | GroupExchange:
    """Return the exchange of the swarm's method for its optimizer."""
    host = membership.host
    identity = membership.identity
    swarm = membership.swarm
    directory = membership.directory

    def members() -> dict[str, Member]:
        return still_training(directory.members())

    def departed() -> dict[str, Member]:
        return {**directory.departed(), **at_their_end(directory.members())}

    context = PeerContext(
        host,
        identity,
        swarm,
        model,
        seed,
        members,
        directory.look,
        directory.is_barred,
        directory.everyone,
    )
    trial = TRIAL_S if outer.check_loss else 0.0
    timeouts = ExchangeTimeouts(outer.wait_s, trial=trial)
    fragments = opt.fragments
    if outer.row.group == "everyone":
        return GroupExchange(
            context,
            timeouts,
            fragments=fragments,
            max_group=MAX_GROUP,
            follow=outer.row.follows,
            screen=screen,
        )
    overlap = opt.lag > 0  # training goes on meanwhile
    return PairExchange(
        context,
        timeouts,
        fragments=fragments,
        overlap=overlap,
        departed=departed,
        screen=screen,
    )


WEIGHTS = {"equal": equal, "tokens": by_tokens, "rate": by_rate}


def make_outer(
    settings: OuterSettings,
    inner: Inner,
    exchange: Exchange,
    *,
    model: torch.nn.Module | None,
    slow_device: torch.device | Path,
    length: RoundLength | None = None,
    on_round: Callable[[RoundInfo], None] | None = None,
    ranks: Processes | None = None,
    fragments: Sequence[Sequence[Tensor]] = (),
) -> OuterOptimizer:
    """Return the outer optimizer of the settings; ``ranks``: of the processes that are one peer
    together.

    ``fragments``: the parameters of each, where the manifest has them.

    OuterError if they cannot be used, as some show only with the model.
    """
    method = settings.row
    options: dict[str, Any] = {"codec": codec_named(settings.codec or method.codec)}
    if settings.weighing != method.weights:
        options["weight"] = WEIGHTS[settings.weighing]
    if fragments:
        options["fragments"] = fragments
    if ranks is not None:
        options["ranks"] = ranks
    try:
        check_inner(inner)
    except ValueError as error:
        raise OuterError(f"This inner optimizer cannot be used: {error}.") from error
    try:
        return method.make(
            inner,
            exchange,
            model=model,
            buffers=settings.buffers,
            slow_device=slow_device,
            length=length,
            on_round=on_round,
            **settings.knobs() | options,
        )
    except ValueError as error:
        raise OuterError(
            f"The outer settings cannot be used for {settings.method!r}: {error}."
        ) from error
    except OSError as error:
        raise OuterError(
            f"The outer optimizer's state cannot be kept in files in {str(slow_device)!r} "
            f"({error.strerror}): free some space, or choose another folder (--offload)."
        ) from error


@dataclass(frozen=True)
class Rates:
    """Speed of training, without the time spent waiting for others."""

    steps_per_s: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float | None = None
    """Share of the device's peak, of 1; None where the peak is not known."""


WINDOW = 20  # reports over which the speed is measured


class StepRate:
    """The usual number of inner steps, or of tokens, a second: the median of the last reports.

    The first report, which includes compilation, and one in which the machine slept count little.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=WINDOW)

    def add(self, amount: int, seconds: float) -> float:
        """Add a report of ``amount`` inner steps or tokens in ``seconds``, without waiting for
        others, and return the speed.
        """
        if seconds > 0:
            self._rates.append(amount / seconds)
        return median_high(self._rates) if self._rates else 0.0


def round_length(
    setting: str, clock: Callable[[], float], speeds: Callable[[], Iterable[float]]
) -> RoundLength:
    """Return the length of a round that ``outer.round`` asks for.

    ``clock``: Unix seconds, the same for all peers. ``speeds``: `announced_speeds`, for
    seconds:auto.
    """
    unit, amount = parse_round(setting)
    if unit == "steps":
        return Steps()
    if unit == "tokens":
        assert amount is not None  # parse_round checks it
        return Tokens(int(amount))
    return Seconds(amount if amount is not None else lambda: agreed_seconds(speeds()), clock)


def announced_speeds(membership: Membership) -> list[float]:
    """Return the inner steps a second of all members, as they announce them.

    All peers compute one length of a round from them, so none is weighed; but keys are free, and
    most may be made up. So they move this node's length at most 8 times beyond what its own speed
    and those of members with which it has exchanged make it, once it has three; before that 256
    times beyond what its own does.
    """
    members = membership.directory.members()
    partner = membership.host.resource_manager.partner
    own = [
        member.steps_per_s
        for peer, member in members.items()
        if peer == membership.identity.peer_id
    ]
    partners = [member.steps_per_s for peer, member in members.items() if partner(peer)]
    known, most = ([*partners, *own], 1 / USEFUL) if len(partners) >= FEW else (own, QUICKER)
    return bounded_speeds([member.steps_per_s for member in members.values()], known, most)


def steps_of_rounds(
    settings: OuterSettings, rounds: int, members: Iterable[Member], met: Mapping[str, str]
) -> int | None:
    """Return the inner steps of a node in so many ``rounds``; None if that depends on speeds, and
    no member says its own.

    Rounds of tokens and of seconds are measured by the lower median of what ``members`` say, with
    one vote for each address range at which they were ``met``, so that neither a liar nor many keys
    of one move it far.
    """
    unit, amount = parse_round(settings.round)
    if unit == "steps":
        return rounds * (settings.resolved().every or 1)
    known = [member for member in members if member.steps_per_s > 0]
    if unit == "tokens":
        per_step = of_ranges(
            (
                (one.peer, one.tokens_per_s / one.steps_per_s)
                for one in known
                if one.tokens_per_s > 0
            ),
            met,
        )
        return int(rounds * (amount or 0) / median_low(per_step)) if per_step else None
    speeds = of_ranges(((one.peer, one.steps_per_s) for one in known), met)
    return int(rounds * (amount or agreed_seconds(speeds)) * median_low(speeds)) if speeds else None


BATCHES = 2
TOO_LONG_S = 10.0
"""A trial that takes longer is broken off: a partner waits ``ExchangeTimeouts.trial`` seconds for
it.
"""
MOST_UNTRIED = 64
"""Contributions at most that count untried before the next trial.

A trial that is broken off doubles them.
"""


class LossTrial:
    """Computes losses with a copy of the model, beside training: on a device with streams, on one
    of its own.

    It may be called from several threads at once. A trial that takes too long, or finds no memory,
    is broken off; then the contribution counts untried, as do some of those that follow, so that
    such trials cost a bounded part of the time.

    Args:
        loss: returns the loss of a model on a batch.
        batches: none of them is known to another peer.
        model: what is trained, with all parameters of ``opt``; frozen parameters are shared with
            the copy.
        opt: the outer optimizer, whose slow weights stand for those that a contribution leaves out.
        autocast: makes the context of computing in this node's precision.
        log: told of each trial that is broken off.
    """

    def __init__(
        self,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: Iterator[Any],
        model: nn.Module,
        opt: OuterOptimizer,
        log: Callable[[str], None],
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        copies: dict[int, Any] = {
            id(parameter): parameter
            for parameter in model.parameters()
            if not parameter.requires_grad
        }
        self._model = copy.deepcopy(model, copies).eval()
        self._params = [copies[id(parameter)] for parameter in opt.parameters]
        """The copy's parameters, in the order of the slow weights."""
        self._task_loss = loss
        self._batches = batches
        self._opt = opt
        self._autocast = autocast
        self._log = log
        self._device = next((parameter.device for parameter in self._params), torch.device("cpu"))
        self._lock = threading.Lock()
        self._begin = current_device()
        self._stream = Beside(self._device)
        self._left = self._untried = 0
        """Contributions that count untried from now on, and how many they were after the last
        trial.
        """

    @torch.no_grad()
    def __call__(
        self, fragment: int, own: Sequence[Tensor], theirs: Sequence[Tensor]
    ) -> tuple[float, float, float] | None:
        """Return the losses of this node's weights, of the mean with the other's, and of the
        other's, on the same fresh batches.

        None without batches, and where the contribution counts untried.
        """
        with self._lock:
            if self._left:
                self._left -= 1
                return None
            self._begin()
            try:
                return self._losses(fragment, own, theirs)
            except Exception as error:  # a task's own has what went wrong as its cause
                if not any(
                    isinstance(one, torch.OutOfMemoryError) for one in (error, error.__cause__)
                ):
                    raise
                self._break_off(f"found no memory on {self._device}")
                return None

    def _losses(
        self, fragment: int, own: Sequence[Tensor], theirs: Sequence[Tensor]
    ) -> tuple[float, float, float] | None:
        until = time.monotonic() + TOO_LONG_S
        places = self._opt.positions(fragment)
        others = {*range(len(self._params))}.difference(places)
        with self._stream.before():  # which changes the slow weights, where they are on the device
            self._copy(
                {
                    place: self._opt.slow[place]
                    for place in others
                    if self._opt.slow[place].device == self._device
                }
            )
        with self._stream.after():
            self._copy(
                {
                    place: self._opt.slow[place]
                    for place in others
                    if self._opt.slow[place].device != self._device
                }
            )
            mine, other = self._weights(places, own), self._weights(places, theirs)
            batches = list(islice(self._batches, BATCHES))
            if not batches:
                return None
            mean = [(a + b) / 2 for a, b in zip(mine, other, strict=True)]
            losses = []
            for weights in (mine, mean, other):
                self._copy(dict(zip(places, weights, strict=True)))
                losses.append(self._loss(batches) if weights is mine else self._loss_with(batches))
                if time.monotonic() > until:
                    self._break_off(f"took over {TOO_LONG_S:g} s")
                    return None
        self._untried = 0
        first, second, third = losses
        return first, second, third

    def _break_off(self, why: str) -> None:
        self._left = self._untried = min(2 * self._untried or 1, MOST_UNTRIED)
        self._log(
            f"trying a partner's weights {why}: they count untried, as will the next {self._left} "
            "(outer.check_loss): give the task smaller batches, or make the swarm without "
            "check_loss"
        )

    def _copy(self, weights: Mapping[int, Tensor]) -> None:
        for place, tensor in weights.items():
            self._params[place].copy_(tensor)

    def _weights(self, places: Sequence[int], contribution: Sequence[Tensor]) -> list[Tensor]:
        """Return the fast weights of a contribution: it is those, or slow weights and
        pseudo-gradients, then buffers.
        """
        count = len(places)
        first = contribution[:count]
        second = contribution[count : 2 * count]
        if [tensor.shape for tensor in first] == [tensor.shape for tensor in second]:
            return [slow - step for slow, step in zip(first, second, strict=True)]
        return list(first)

    def _loss_with(self, batches: Sequence[object]) -> float:
        """Return the loss with a partner's weights: NaN where it cannot be computed, as it could
        with the own ones.

        A task may check its numbers and raise; then the partner's weights are the cause, and no
        code of this node.
        """
        try:
            return self._loss(batches)
        except Exception as error:
            if isinstance(error.__cause__ or error, torch.OutOfMemoryError):
                raise
            log.info("a partner's weights give no loss: %r", error)
            return math.nan

    def _loss(self, batches: Sequence[object]) -> float:
        with self._autocast():
            return sum(float(self._task_loss(self._model, batch)) for batch in batches) / len(
                batches
            )
