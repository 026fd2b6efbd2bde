"""The outer optimizer: a real ``torch.optim.Optimizer`` that wraps the user's inner one.

It shares the inner optimizer's ``param_groups`` and ``state``, so learning-rate schedulers and ``GradScaler`` act on it as on
any optimizer. Every ``schedule`` point it hands a contribution to the exchange, applies the outer rule to the slow weights
(float32, on the CPU unless told otherwise) and puts the fast weights back into the model. If nobody answers, the rule is applied
to the own contribution alone: local progress is never thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from optim.codec import FLOAT32, Codec, check_sends_weights
from optim.exchange import Exchange, Handle, RoundKey
from optim.rules import LocalSGDRule, NoLoCoRule, Rule, State
from optim.schedule import Every, Schedule, Send


@dataclass(frozen=True)
class RoundInfo:
    """What happened in one exchange; handed to ``on_round``."""

    key: RoundKey
    members: tuple[str, ...]
    """Peer ids in the mean; empty when nobody answered."""
    step: int
    """Inner steps finished when the mean was applied."""
    lag: int
    """Inner steps between sending and applying."""


@dataclass
class _InFlight:
    handle: Handle
    key: RoundKey
    contribution: list[Tensor]
    step: int


class OuterOptimizer(torch.optim.Optimizer):
    """Wraps ``inner``; use it in place of ``inner`` in the training loop.

    Args:
        inner: any optimizer; its state is local, never exchanged or reset.
        exchange: where contributions go.
        rule: the outer mathematics (optim/rules.py).
        schedule: when to send and apply (optim/schedule.py).
        codec: how contributions become bytes.
        run: names the run; peers of different runs never meet.
        slow_device: where the slow weights and the rule's state live, in float32.
        on_round: called with a ``RoundInfo`` after each applied exchange.

    Raises:
        ValueError: no parameter, or parameters that are not floating point.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        exchange: Exchange,
        *,
        rule: Rule,
        schedule: Schedule,
        codec: Codec = FLOAT32,
        run: str = "run",
        slow_device: torch.device | str = "cpu",
        on_round: Callable[[RoundInfo], None] | None = None,
    ) -> None:
        super().__init__(inner.param_groups, inner.defaults)  # some schedulers look into the defaults
        self.inner, self.exchange, self.rule, self.schedule = inner, exchange, rule, schedule
        self.codec, self.run, self.on_round = codec, run, on_round
        self._share_with_inner()
        self._params: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        wrong = [p.dtype for p in self._params if not p.is_floating_point()]
        if wrong or not self._params:
            raise ValueError(f"the outer optimizer averages floating-point parameters, got {wrong or 'none'}")
        device = torch.device(slow_device)
        # Pinned staging lets the GPU copy asynchronously; it is reused each round, so a round allocates nothing of model size.
        pin = device.type == "cpu" and any(p.is_cuda for p in self._params)
        self._fast = [torch.empty(p.shape, dtype=torch.float32, device=device, pin_memory=pin) for p in self._params]
        self.slow = [torch.empty(p.shape, dtype=torch.float32, device=device).copy_(p.detach()) for p in self._params]
        self.rule_state: State = {}
        self.steps = 0
        self.round = 0
        """Label of the next exchange; a peer that fell behind may set it forward to meet the others again."""
        self._in_flight: dict[int, _InFlight] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: the slow weights of the new parameters would be missing. ValueError."""
        if hasattr(self, "slow"):
            raise ValueError("add parameter groups to the inner optimizer before wrapping it: later ones would never be averaged")
        super().add_param_group(param_group)

    def _share_with_inner(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One inner step, then whatever the schedule asks for (which may wait for a partner, within the exchange's limits)."""
        loss: float | None = self.inner.step(closure) if closure is not None else self.inner.step()
        self.steps += 1
        for action in self.schedule.at(self.steps):
            if isinstance(action, Send):
                self._send(action.fragment)
            elif action.fragment in self._in_flight:
                self._apply(action.fragment)
        for flight in self._in_flight.values():
            if flight.step == self.steps:  # the staging buffers are overwritten before this one is applied
                flight.contribution = [tensor.clone() for tensor in flight.contribution]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def _read_fast(self) -> None:
        for fast, param in zip(self._fast, self._params, strict=True):
            fast.copy_(param, non_blocking=param.is_cuda)  # elsewhere nothing tells when a copy has ended
        self._synchronize()
        # A bfloat16 model cannot hold the slow weights that it restarted from. Without what the rounding took away, the slow
        # weights would creep back to the model's coarse grid even when nothing is learnt.
        for fast, slow, param in zip(self._fast, self.slow, self._params, strict=True):
            if param.dtype.itemsize < fast.dtype.itemsize:
                fast.add_(slow - slow.to(param.dtype))

    @torch.no_grad()
    def _write(self, weights: list[Tensor]) -> None:
        for param, weight in zip(self._params, weights, strict=True):
            param.copy_(weight, non_blocking=param.is_cuda)
        self._synchronize()

    def _synchronize(self) -> None:
        for device in {p.device for p in self._params if p.is_cuda}:
            torch.cuda.synchronize(device)

    @torch.no_grad()
    def _send(self, fragment: int) -> None:
        self._read_fast()
        key = RoundKey(self.run, self.round, fragment)
        contribution = self.rule.contribution(self.slow, self._fast)
        handle = self.exchange.start(key, contribution, 1.0, self.codec)
        self._in_flight[fragment] = _InFlight(handle, key, contribution, self.steps)
        self.round += 1

    @torch.no_grad()
    def _apply(self, fragment: int) -> None:
        flight = self._in_flight[fragment]
        mean = flight.handle.result()
        lag = self.steps - flight.step
        if lag > 0:
            self._read_fast()
        tensors = flight.contribution if mean is None else [t.to(self.slow[0].device) for t in mean.tensors]
        self.rule.apply(self.slow, self._fast, tensors, self.rule_state, lag)
        self._write(self._fast)
        # Only now: had anything above raised, a second call would find the exchange still there.
        del self._in_flight[fragment]
        if self.on_round is not None:
            self.on_round(RoundInfo(flight.key, () if mean is None else mean.members, self.steps, lag))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block the model holds the slow weights; afterwards the fast ones are back, bit by bit."""
        with torch.no_grad():
            kept = [param.detach().clone() for param in self._params]
        self._write(self.slow)
        try:
            yield
        finally:
            self._write(kept)

    def finish(self) -> None:
        """Apply what is still in flight (waiting within the exchange's limits). Call it once after the last step."""
        for fragment in sorted(self._in_flight):
            self._apply(fragment)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit-identically. Exchanges in flight are not kept: they are dropped and sent again."""
        return {
            "inner": self.inner.state_dict(),
            "slow": [tensor.clone() for tensor in self.slow],
            "rule": {name: [tensor.clone() for tensor in tensors] for name, tensors in self.rule_state.items()},
            "steps": self.steps,
            "round": self.round,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned (the model's own weights are the user's to restore).

        Raises:
            ValueError: shapes differ from this model's; nothing is changed then.
        """
        for name, tensors in {"slow": state_dict["slow"], **state_dict["rule"]}.items():
            self._check_shapes(f"the saved outer state {name!r}", tensors)
        self.inner.load_state_dict(state_dict["inner"])
        self._share_with_inner()
        self.adopt(state_dict["slow"], round=int(state_dict["round"]))
        device = self.slow[0].device
        self.rule_state = {
            name: [tensor.to(device, torch.float32, copy=True) for tensor in tensors]
            for name, tensors in state_dict["rule"].items()
        }
        self.steps = int(state_dict["steps"])

    def _check_shapes(self, what: str, tensors: list[Tensor]) -> None:
        if len(tensors) != len(self.slow):
            raise ValueError(f"{what} has {len(tensors)} tensors, this model has {len(self.slow)}")
        for index, (theirs, mine) in enumerate(zip(tensors, self.slow, strict=True)):
            if theirs.shape != mine.shape:
                raise ValueError(f"{what} has shape {tuple(theirs.shape)} at tensor {index}, this model has {tuple(mine.shape)}")

    @torch.no_grad()
    def adopt(self, slow: list[Tensor], *, round: int, into_model: bool = False) -> None:
        """Take over slow weights and the round of a running swarm, dropping what is in flight.

        ``into_model`` also starts the fast weights there, as a joiner does. ValueError if shapes differ (nothing is changed).
        """
        self._check_shapes("the given list of slow weights", slow)
        for mine, given in zip(self.slow, slow, strict=True):
            mine.copy_(given)
        self.round = round
        self._in_flight.clear()
        if into_model:
            self._write(self.slow)


def NoLoCo(
    inner: torch.optim.Optimizer,
    exchange: Exchange,
    *,
    every: int = 50,
    lr: float = 0.7,
    momentum: float = 0.5,
    pull: float | None = None,
    codec: Codec = FLOAT32,
    run: str = "run",
    slow_device: torch.device | str = "cpu",
    on_round: Callable[[RoundInfo], None] | None = None,
) -> OuterOptimizer:
    """NoLoCo (2506.10911): every ``every`` inner steps average with one random peer. See ``NoLoCoRule`` for the mathematics.

    Defaults are the paper's. ``pull=None`` means equal to ``lr``: then only one tensor per parameter is sent. Both forms send
    whole weights, so codecs for displacements (e3m0, topk2, sign, auto, any with error feedback) raise ValueError.
    """
    check_sends_weights(codec, "NoLoCo")
    return OuterOptimizer(
        inner,
        exchange,
        rule=NoLoCoRule(lr, momentum, pull),
        schedule=Every(every),
        codec=codec,
        run=run,
        slow_device=slow_device,
        on_round=on_round,
    )


def LocalSGD(
    inner: torch.optim.Optimizer,
    exchange: Exchange,
    *,
    every: int = 50,
    codec: Codec = FLOAT32,
    run: str = "run",
    slow_device: torch.device | str = "cpu",
    on_round: Callable[[RoundInfo], None] | None = None,
) -> OuterOptimizer:
    """Local SGD: every ``every`` inner steps replace the weights by their mean over the group.

    ValueError for a codec that is for displacements only, since whole weights are sent.
    """
    check_sends_weights(codec, "LocalSGD")
    return OuterOptimizer(
        inner,
        exchange,
        rule=LocalSGDRule(),
        schedule=Every(every),
        codec=codec,
        run=run,
        slow_device=slow_device,
        on_round=on_round,
    )
