"""What the ``state_dict`` of an outer optimizer holds and how it comes back, and what it takes over from another peer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optim.rule import START, assign
from optim.saved import Stateful, check_shapes, codec_state, fresh, in_place

if TYPE_CHECKING:
    from optim.outer import OuterOptimizer


def saved(opt: OuterOptimizer) -> dict[str, Any]:
    """See ``OuterOptimizer.state_dict``."""
    rule = {name: [tensor.clone() for tensor in tensors] for name, tensors in opt.rule_state.items()}
    for fragment, flights in opt._in_flight.items() if START in rule else ():
        for flight in flights:
            for index, motion in zip(opt._parts[fragment], flight.contribution, strict=True):
                rule[START][index].add_(motion)
    return {
        "inner": opt.inner.state_dict(),
        "slow": [tensor.clone() for tensor in opt.slow],
        "rounding": {index: tensor.clone() for index, tensor in opt._rounding.items()},
        "rule": rule,
        "codecs": [codec_state(codec, _unsent(opt, fragment)) for fragment, codec in enumerate(opt._codecs)],
        "steps": opt.steps,
        "position": opt.position,
        "length": opt.length.state_dict(),
        "round": opt.round,
        "tokens": opt.tokens,
        "sent_at": [list(pair) for pair in opt._sent_at],
        "applied": list(opt.applied),
    }


def restore(opt: OuterOptimizer, state: dict[str, Any]) -> None:
    """See ``OuterOptimizer.load_state_dict``."""
    rule_state = opt.rule.initial(opt.slow)
    check_shapes("the saved outer state 'slow'", state["slow"], opt.slow)
    for name, tensors in state["rule"].items():
        if name not in rule_state:
            raise ValueError(f"the saved outer state has {name!r}, which this method does not use: resume with the same method")
        check_shapes(f"the saved outer state {name!r}", tensors, rule_state[name])
    sent_at = [(int(steps), int(tokens)) for steps, tokens in state.get("sent_at", opt._sent_at)]
    if len(sent_at) != len(opt._parts):
        raise ValueError(f"the saved outer state has {len(sent_at)} fragments, this optimizer {len(opt._parts)}")
    opt.inner.load_state_dict(state["inner"])
    opt._share_with_inner()
    for codec, memory in zip(opt._codecs, state.get("codecs", ()), strict=False):
        if isinstance(codec, Stateful):
            codec.load_state_dict(memory)
    in_place(opt.slow, state["slow"])
    device = opt.slow[0].device
    opt._rounding = {int(i): t.to(device, torch.float32, copy=True) for i, t in state.get("rounding", {}).items()}
    opt.rule_state = rule_state  # what a checkpoint from before the first round lacks is as it was then
    for name, tensors in state["rule"].items():
        in_place(rule_state[name], tensors)
    for fragment in range(len(opt._parts)):
        opt._drop(fragment)
    opt.steps, opt.round = int(state["steps"]), int(state["round"])
    opt.applied = [int(round) for round in state.get("applied", opt.applied)]
    opt.tokens, opt._sent_at = int(state.get("tokens", 0)), sent_at
    opt.position = int(state.get("position", opt.steps))
    opt.length.load_state_dict(state.get("length", {}), opt.tokens)


@torch.no_grad()
def adopt(
    opt: OuterOptimizer,
    slow: Sequence[Tensor],
    round: int,
    into_model: bool,
    shared: Mapping[str, Sequence[Tensor]],
    applied: Sequence[int] | None,
) -> list[int]:
    """See ``OuterOptimizer.adopt``."""
    check_shapes("the given list of slow weights", slow, opt.slow)
    for name, tensors in shared.items():
        if name not in opt.shared:
            raise ValueError(f"the given shared state has {name!r}, which this method does not share")
        check_shapes(f"the given shared state {name!r}", tensors, opt.shared[name])
    if applied is not None and len(applied) != len(opt._parts):
        raise ValueError(f"the given weights are in {len(applied)} fragments, this optimizer's in {len(opt._parts)}")
    every = range(len(opt._parts))
    taken = list(every) if applied is None or into_model else [p for p in every if applied[p] >= opt.applied[p]]
    for fragment in taken:
        for i in opt._parts[fragment]:
            if not into_model and opt._params[i].dtype.itemsize < 4:
                opt._rounding[i] = opt._lost(i)  # the model goes on from where it is, so what it could not hold stays what it was
            opt.slow[i].copy_(slow[i])
            for name, tensors in shared.items():
                opt.rule_state[name][i].copy_(tensors[i])
        opt._drop(fragment, math.inf if applied is None else applied[fragment])
        if applied is not None:
            opt.applied[fragment] = applied[fragment]
    opt.round = round
    if into_model:
        opt._codecs = [fresh(codec) for codec in opt._codecs]
        opt.codec = opt._codecs[0]
        assign(opt._fast, opt.slow)
        opt._restart(range(len(opt._params)))
        if START in opt.rule_state:
            assign(opt.rule_state[START], opt.slow)
    return taken


def _unsent(opt: OuterOptimizer, fragment: int) -> list[Tensor] | None:
    """The contribution whose exchange is under way."""
    return next((flight.contribution for flight in opt._in_flight[fragment] if not flight.landed), None)
