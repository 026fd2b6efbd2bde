"""What an outer optimizer holds: how it is saved, how it comes back, and what it takes over from another peer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.optim.codecs.base import Codec, Shape
from shoal.optim.codecs.state import Stateful, codec_state, fresh
from shoal.optim.outer.fsdp import local, reshard
from shoal.optim.outer.in_flight import PendingExchange
from shoal.optim.rules.base import START, Anchored, Rule, State, assign, kind_of, same_memory
from shoal.optim.schedule.round_length import RoundLength
from shoal.optim.schedule.schedule import Schedule


class OuterState(torch.optim.Optimizer):
    """The part of ``OuterOptimizer`` that outlives a step."""

    inner: torch.optim.Optimizer
    rule: Rule
    schedule: Schedule
    codec: Codec
    length: RoundLength
    slow: list[Tensor]
    rule_state: State
    steps: int
    position: int
    round: int
    tokens: int
    applied: list[int]
    _params: list[Tensor]
    _parts: list[list[int]]
    _fast: list[Tensor]
    _rounding: dict[int, Tensor]
    _codecs: list[Codec]
    _sent_at: list[tuple[int, int]]
    _in_flight: dict[int, list[PendingExchange]]
    _model: nn.Module | None

    def _read_fast(self, part: Sequence[int]) -> None:
        """Stage the model's weights, with what it cannot hold of them."""
        raise NotImplementedError

    def _share_with_inner(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _lost(self, index: int) -> Tensor:
        """Lost by rounding when the model was given its present starting point: the slow weights unless noted."""
        slow = self.slow[index]
        return self._rounding[index] if index in self._rounding else slow - slow.to(self._params[index].dtype)

    @torch.no_grad()
    def _restart(self, part: Sequence[int]) -> None:
        """Put the staged fast weights into the model and note what it cannot hold."""
        self._write(part, self._fast)
        for index in part:
            fast, dtype = self._fast[index], self._params[index].dtype
            self._rounding.pop(index, None)
            if dtype.itemsize < fast.dtype.itemsize and not torch.equal(fast, self.slow[index]):
                self._rounding[index] = fast - fast.to(dtype)

    @torch.no_grad()
    def _write(self, part: Sequence[int], weights: Sequence[Tensor]) -> None:
        for index in part:
            param = local(self._params[index])
            param.copy_(weights[index], non_blocking=param.is_cuda)
        self._synchronize()
        reshard(self._model)

    def _synchronize(self) -> None:
        for device in {p.device for p in self._params if p.is_cuda}:
            torch.cuda.synchronize(device)

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Everything needed to go on. Exchanges in flight are not kept: what they carry is sent again with the next contribution.

        Bit-identical at any step at which nothing is in flight (always, when means are applied at once).
        ``copy=False``: slow weights and the rule's state are the optimizer's own tensors, for who copies or writes them at once.
        """
        own = dict.fromkeys(self.rule_state, copy) | ({START: True} if START in self.rule_state else {})
        rule = {name: [_copied(tensor, own[name]) for tensor in tensors] for name, tensors in self.rule_state.items()}
        for fragment, under_way in self._in_flight.items() if START in rule else ():
            for in_flight in under_way:
                for index, motion in zip(self._parts[fragment], in_flight.contribution, strict=True):
                    rule[START][index].add_(motion)
        return {
            "inner": self.inner.state_dict(),
            "slow": [_copied(tensor, copy) for tensor in self.slow],
            "rounding": {index: _copied(tensor, copy) for index, tensor in self._rounding.items()},
            "rule": rule,
            "codecs": [codec_state(codec, self._unsent(fragment)) for fragment, codec in enumerate(self._codecs)],
            "steps": self.steps,
            "position": self.position,
            "length": self.length.state_dict(),
            "round": self.round,
            "tokens": self.tokens,
            "sent_at": [list(pair) for pair in self._sent_at],
            "applied": list(self.applied),
            "kind": kind_of(self.rule),
            "schedule": repr(self.schedule),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned (the model's own weights are the user's to restore).

        Raises:
            ValueError: shapes differ from this model's, or another method saved it (``carry_over`` takes what fits); nothing is
                changed then.
        """
        rule_state = self.rule.initial(self.slow)
        check_shapes("the saved outer state 'slow'", state_dict["slow"], self.slow)
        for name, tensors in state_dict["rule"].items():
            if name not in rule_state:
                raise ValueError(f"the saved outer state has {name!r}, which this method does not use: resume with the same method")
            check_shapes(f"the saved outer state {name!r}", tensors, rule_state[name])
        was, now = state_dict.get("kind"), kind_of(self.rule)
        if state_dict["rule"] and was is not None and not same_memory(was, now):
            raise ValueError(f"the saved outer state is of {was}, not of {now}: resume with the same method")
        sent_at = [(int(steps), int(tokens)) for steps, tokens in state_dict.get("sent_at", self._sent_at)]
        if len(sent_at) != len(self._parts):
            raise ValueError(f"the saved outer state has {len(sent_at)} fragments, this optimizer {len(self._parts)}")
        self.inner.load_state_dict(state_dict["inner"])
        self._share_with_inner()
        for codec, memory in zip(self._codecs, state_dict.get("codecs", ()), strict=False):
            if isinstance(codec, Stateful):
                codec.load_state_dict(memory)
        in_place(self.slow, state_dict["slow"])
        device = self.slow[0].device
        self._rounding = {int(i): t.to(device, torch.float32, copy=True) for i, t in state_dict.get("rounding", {}).items()}
        self.rule_state = rule_state  # what a checkpoint from before the first round lacks is as it was then
        for name, tensors in state_dict["rule"].items():
            in_place(rule_state[name], tensors)
        for fragment in range(len(self._parts)):
            self._drop(fragment)
        self.steps, self.round = int(state_dict["steps"]), int(state_dict["round"])
        self.applied = [int(round) for round in state_dict.get("applied", self.applied)]
        self.tokens, self._sent_at = int(state_dict.get("tokens", 0)), sent_at
        self.position = int(state_dict.get("position", self.steps))
        self.length.load_state_dict(state_dict.get("length", {}), self.tokens)

    @property
    def fragments(self) -> int:
        """How many parts the parameters are sent in, in turn."""
        return len(self._parts)

    def slow_of(self, fragment: int) -> list[Tensor]:
        """The slow weights of a fragment, not copied."""
        return [self.slow[index] for index in self._parts[fragment]]

    def in_flight(self, fragment: int) -> list[int]:
        """The rounds in which a fragment was sent and not applied yet."""
        return [in_flight.context.key.round for in_flight in self._in_flight[fragment]]

    @property
    def anchored(self) -> bool:
        """Whether the slow weights are the same on all peers of a group, so that who misses a round must take them over."""
        return isinstance(self.rule, Anchored)

    @property
    def shared(self) -> State:
        """What the rule keeps beside the slow weights that is the same on all peers of a group, for a newcomer to take over."""
        names = self.rule.shared if isinstance(self.rule, Anchored) else ()
        return {name: self.rule_state[name] for name in names if name in self.rule_state}

    @property
    def shared_shapes(self) -> dict[str, list[Shape]]:
        """The shapes of what is ``shared``."""
        return {name: [tuple(tensor.shape) for tensor in tensors] for name, tensors in self.shared.items()}

    @torch.no_grad()
    def adopt(
        self,
        slow: Sequence[Tensor],
        *,
        round: int,
        into_model: bool = False,
        shared: Mapping[str, Sequence[Tensor]] | None = None,
        applied: Sequence[int] | None = None,
        rebase: Collection[int] = (),
    ) -> list[int]:
        """Take over slow weights, the round, and what is ``shared``, of a running swarm, dropping what is in flight.

        ``into_model`` also starts the fast weights there, as a joiner does. ``applied`` (of the peer who gave the weights): take
        over only those fragments whose last round there is not older than here, and keep what is in flight for later rounds;
        else a round's outcome would be missing in them or be there twice. Returns the fragments that were taken over.

        The fast weights stay where they are, so the next contribution holds all that sets this peer apart from the swarm: right
        after one missed round, whose progress it so brings in late. In the fragments ``rebase`` they move with the slow ones, so
        that the next contribution is what was learnt since the last one and no more: after several rounds apart, for else the swarm
        would be pulled back, and, if all were refused, each outer step taken alone would be taken again and grow.

        Raises:
            ValueError: names or shapes do not fit; nothing is changed then.
        """
        check_shapes("the given list of slow weights", slow, self.slow)
        for name, tensors in (shared or {}).items():
            if name not in self.shared:
                raise ValueError(f"the given shared state has {name!r}, which this method does not share")
            check_shapes(f"the given shared state {name!r}", tensors, self.shared[name])
        if applied is not None and len(applied) != len(self._parts):
            raise ValueError(f"the given weights are in {len(applied)} fragments, this optimizer's in {len(self._parts)}")
        every = range(len(self._parts))
        taken = list(every) if applied is None or into_model else [p for p in every if applied[p] >= self.applied[p]]
        for fragment in taken:
            moves = fragment in rebase and not into_model
            if moves:
                self._read_fast(self._parts[fragment])
            for i in self._parts[fragment]:
                # The model goes on from where it is, so what it could not hold stays what it was.
                if not into_model and not moves and self._params[i].dtype.itemsize < 4:
                    self._rounding[i] = self._lost(i)
                if moves:
                    move = slow[i].to(self.slow[i].device) - self.slow[i]
                    for follows in (self._fast, self.rule_state.get(START, ())):
                        if follows:
                            follows[i].add_(move)
                self.slow[i].copy_(slow[i])
                for name, tensors in (shared or {}).items():
                    self.rule_state[name][i].copy_(tensors[i])
            if moves:
                self._restart(self._parts[fragment])
            self._drop(fragment, math.inf if applied is None else applied[fragment])
            if applied is not None:
                self.applied[fragment] = applied[fragment]
        self.round = round
        if into_model:
            self._codecs = [fresh(codec) for codec in self._codecs]
            self.codec = self._codecs[0]
            assign(self._fast, self.slow)
            self._restart(range(len(self._params)))
            if START in self.rule_state:
                assign(self.rule_state[START], self.slow)
        return taken

    def _unsent(self, fragment: int) -> list[Tensor] | None:
        """The contribution whose exchange is under way."""
        return next((in_flight.contribution for in_flight in self._in_flight[fragment] if not in_flight.finished), None)

    def _drop(self, fragment: int, until: float = math.inf) -> None:
        """Forget what is in flight of a fragment from rounds up to ``until``."""
        under_way = self._in_flight[fragment]
        for in_flight in [in_flight for in_flight in under_way if in_flight.context.key.round <= until]:
            in_flight.cancel(self._codecs[fragment])
            under_way.remove(in_flight)


def _copied(tensor: Tensor, copy: bool) -> Tensor:
    return tensor.clone() if copy else tensor


def check_shapes(what: str, theirs: Sequence[Tensor], mine: Sequence[Tensor]) -> None:
    """ValueError, naming the first difference."""
    if len(theirs) != len(mine):
        raise ValueError(f"{what} has {len(theirs)} tensors, this model has {len(mine)}")
    for index, (their, own) in enumerate(zip(theirs, mine, strict=True)):
        if their.shape != own.shape:
            raise ValueError(f"{what} has shape {tuple(their.shape)} at tensor {index}, this model has {tuple(own.shape)}")


@torch.no_grad()
def in_place(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Copy their values into mine, wherever they live."""
    for own, their in zip(mine, theirs, strict=True):
        own.copy_(their)
