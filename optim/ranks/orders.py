"""What rank 0 of a peer has the other ranks do, and the forms that one process would have.

    state = whole_state(opt)                   # called by all ranks; the others get {}
    LeadOptimizer(opt, channel).slow           # called by rank 0: an order, which ``obey`` follows

What a node or a session does between two steps (to answer peers, to take over weights, to save)
only rank 0 can know, and it needs all ranks where it needs whole weights. So rank 0 does it with a
``LeadOptimizer``, whose calls are orders: each rank makes the same call of this module. What rank 0
passes counts; the others pass nothing and get nothing. With an optimizer of one process the calls
do the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.optim.codecs.base import Shape
from shoal.optim.outer.checks import check_given, check_record, groups_of
from shoal.optim.outer.in_flight import Record
from shoal.optim.outer.rule import State
from shoal.optim.outer.saved_state import SavedState
from shoal.optim.ranks.group import RankGroup
from shoal.optim.ranks.lost_rank import RankFailed, RankLost
from shoal.optim.ranks.rank_weights import RankWeights, cut_like

if TYPE_CHECKING:
    from shoal.optim.outer.optimizer import OuterOptimizer

PARTS = ("inner", "slow", "rule", "rounding", "codecs", "in_flight")
"""What in saved state is not the same on all ranks."""
DEALT = ("sent", "fast", "start")
"""Tensors of an exchange in flight that are distributed as the parameters are."""


def whole_slow(opt: SavedState, into: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return copies of the slow weights on rank 0, taken one tensor at a time; [] on the others.

    ``into``: contiguous tensors on the CPU, of ``opt.shapes`` and the dtype of ``opt.slow``, that
    are filled instead of fresh ones.
    """
    weights = opt._weights
    if not isinstance(weights, RankWeights) or weights.first:
        if into is None:
            dtype = weights.slow[0].dtype
            whole = [torch.empty(shape, dtype=dtype, device="cpu") for shape in opt.shapes]
        else:
            whole = list(into)
        for index, target in enumerate(whole):
            if isinstance(weights, RankWeights) and not weights.owns(index):
                weights.group.take(target, weights.owners[index])
            else:
                target.copy_(weights.slow[index])
        return whole
    for index in weights.everything:
        if weights.owns(index):
            weights.group.give(weights.slow[index], 0)
    return []


def whole_slow_of(opt: SavedState, fragment: int) -> list[Tensor]:
    """Return the slow weights of a fragment on rank 0, not copied where they are its own; [] on the
    others.
    """
    return list(opt._weights.whole(opt.positions(fragment), opt.slow_of(fragment)))


def whole_shared(opt: SavedState) -> State:
    """Return copies of the ``shared`` state on rank 0; {} on the others."""
    weights = opt._weights
    shared: State = {}
    for name, tensors in opt.shared.items():
        whole = weights.whole(weights.everything, tensors)
        if weights.first:
            shared[name] = [tensor.clone() for tensor in whole]
    return shared


def adopt(
    opt: SavedState,
    slow: Sequence[Tensor] = (),
    *,
    round: int = 0,
    into_model: bool = False,
    shared: Mapping[str, Sequence[Tensor]] | None = None,
    applied: Sequence[int] | None = None,
    rebase: Collection[int] = (),
) -> list[int]:
    """Adopt what rank 0 gives, as ``OuterState.adopt`` does; return the adopted fragments, on all
    ranks.

    Raises:
        ValueError: it does not fit; all ranks raise it, and nothing has changed in any.
    """
    weights = opt._weights
    if not isinstance(weights, RankWeights):
        return opt.adopt(
            slow, round=round, into_model=into_model, shared=shared, applied=applied, rebase=rebase
        )
    given = dict(shared or {})
    own_shared = {name: _outlines(opt, shapes) for name, shapes in opt.shared_shapes.items()}
    whole = _outlines(opt, opt.shapes)
    weights.group.tried(lambda: check_given(slow, given, applied, whole, own_shared, opt.fragments))
    names, round, into_model, applied, rebase = weights.agreed(
        (list(given), round, into_model, applied, rebase)
    )
    # A resynchronisation notes there, on rank 0, what was counted later.
    opt.applied[:] = weights.agreed(opt.applied)
    own = _cut(weights, slow, weights.slow)
    kept = {name: _cut(weights, given.get(name, ()), opt.shared[name]) for name in names}
    weights.group.barrier()  # all have all of it
    return opt.adopt(
        own, shared=kept, round=round, into_model=into_model, applied=applied, rebase=rebase
    )


def whole_state(opt: SavedState) -> dict[str, Any]:
    """Return the ``state_dict`` that one process would have, on rank 0, in tensors of its own; {}
    on the others.
    """
    weights = opt._weights
    state = opt.whole_state()
    if not isinstance(weights, RankWeights):
        return state
    every = weights.everything
    state["inner"] = _whole_inner(weights.group, opt.inner)
    state["slow"] = weights.whole(every, state["slow"])
    state["rule"] = {name: weights.whole(every, tensors) for name, tensors in state["rule"].items()}
    state["rounding"] = _whole_rounding(weights, state["rounding"])
    for record in state["in_flight"]:
        part = opt.positions(record["facts"]["fragment"])
        tensors = record["tensors"]
        for name in DEALT:
            tensors[name] = list(weights.whole(part, tensors[name]))
        size = weights.group.size
        tensors["tail"] = [weights.group.sum(tensor / size) for tensor in tensors["tail"]]
    return state if weights.first else {}


def load_whole(opt: SavedState, state: Mapping[str, Any] | None = None) -> None:
    """Load the ``state_dict`` of one process, or a ``whole_state``, that rank 0 gives (the model's
    weights are up to the caller).

    Raises:
        ValueError: it does not fit; all ranks raise it, and nothing has changed in any.
    """
    weights = opt._weights
    if not isinstance(weights, RankWeights):
        opt.load_state_dict(dict(state or {}))
        return
    whole: dict[str, Any] = {}
    weights.group.tried(lambda: whole.update(_checked(opt, dict(state or {}))))
    rules = whole.get("rule", {})
    roundings = whole.get("rounding", {})
    plan = {name: value for name, value in whole.items() if name not in PARTS}
    names, places, plan = weights.agreed(
        (list(rules), sorted(int(index) for index in roundings), plan)
    )
    initial = opt.rule.initial(weights.slow)
    plan["rank"] = weights.rank
    plan["inner"] = _given_inner(weights.group, opt.inner, whole.get("inner", {}))
    plan["slow"] = _cut(weights, whole.get("slow", ()), weights.slow)
    plan["rule"] = {name: _cut(weights, rules.get(name, ()), initial[name]) for name in names}
    plan["rounding"] = {}
    for index in places:
        given = [roundings[index]] if weights.first else []
        (error,) = _cut(weights, given, [weights.slow[index]], [index])
        if weights.owns(index):
            plan["rounding"][index] = error
    plan["in_flight"] = _given_in_flight(opt, weights, whole.get("in_flight", ()))
    plan["codecs"] = whole.get("codecs", []) if weights.first else []
    weights.group.barrier()  # all have all of it
    opt.load_state_dict(plan)


def _checked(opt: SavedState, state: dict[str, Any]) -> dict[str, Any]:
    """Return the whole state to load. ValueError unless it fits."""
    state = opt.whole_form(state)
    groups_of(state, len(opt.outer.param_groups))
    opt._checked_rule(state, _outlines(opt, opt.shapes))
    opt._loaded_codecs(state)
    for record in state.get("in_flight", ()):
        check_record(
            record, opt.fragments, int(state["steps"]), int(state.get("position", state["steps"]))
        )
        opt._check_record_tensors(record, opt.shapes)
    mine = [len(group["params"]) for group in opt.inner.state_dict()["param_groups"]]
    theirs = [len(group["params"]) for group in state["inner"]["param_groups"]]
    if mine != theirs:
        raise ValueError(
            f"the saved inner optimizer has groups of {theirs} parameters, this one of {mine}"
        )
    rounding = {int(index): error for index, error in state.get("rounding", {}).items()}
    return {**state, "rounding": rounding}


def _given_in_flight(
    opt: SavedState, weights: RankWeights, records: Sequence[Record]
) -> list[Record]:
    """Return this rank's part of the exchanges in flight that rank 0 gives; a codec's memory stays
    with rank 0.
    """
    plan = []
    for record in records:
        shapes = {}
        for name, tensors in record["tensors"].items():
            shapes[name] = [tuple(tensor.shape) for tensor in tensors]
        plan.append((record["facts"], shapes))
    parts: list[Record] = []
    for number, (facts, shapes) in enumerate(weights.agreed(plan)):
        part = opt.positions(facts["fragment"])
        given = records[number]["tensors"] if weights.first else dict.fromkeys(shapes, ())
        mine: dict[str, list[Tensor]] = {}
        for name in DEALT:
            own = []
            for at, shape in enumerate(shapes[name]):
                scalar = torch.empty((), device="cpu")
                own.append(scalar if shape == () else weights.slow[part[at % len(part)]])
            mine[name] = _cut(weights, given[name], own, part)
        tail = given["tail"]
        if not weights.first:
            tail = [torch.empty(shape, device="cpu") for shape in shapes["tail"]]
        mine["tail"] = [weights.group.spread(tensor, 0) for tensor in tail]
        for name in ("error", "payload"):
            mine[name] = list(given[name])
        parts.append({"facts": facts, "tensors": mine})
    return parts


def _outlines(opt: SavedState, shapes: Sequence[Shape]) -> list[Tensor]:
    return [torch.empty(shape, dtype=opt.slow[0].dtype, device="meta") for shape in shapes]


def _cut(
    weights: RankWeights,
    whole: Sequence[Tensor],
    own: Sequence[Tensor],
    part: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return this rank's part of what rank 0 gives, shaped as ``own``, of the parameters ``part``
    (None: all).
    """
    if part is None:
        part = weights.everything
    shapes = weights.shapes_of(part, own)
    mine = [tuple(tensor.shape) for tensor in own]
    return weights.scatter(part, whole, shapes, mine, weights.slow[0].dtype)


def _whole_rounding(weights: RankWeights, own: Mapping[int, Tensor]) -> dict[int, Tensor]:
    own_noted = [float(index in own) for index in weights.everything]
    noted = weights.group.sum(torch.tensor(own_noted, device="cpu"))
    errors: dict[int, Tensor] = {}
    for index in noted.nonzero().flatten().tolist():
        error = weights.whole([index], [own.get(index, weights.slow[index].new_empty(0))])
        errors.update(zip([index], error, strict=False))
    return errors


@torch.no_grad()
def _whole_inner(group: RankGroup, inner: torch.optim.Optimizer) -> dict[str, Any]:
    """Return ``inner.state_dict()`` of one process, on the CPU, on rank 0; the others take part and
    get {}.

    Sharded tensors are gathered one at a time; of those that all ranks have, rank 0's count. No
    tensor is the optimizer's own.
    """
    own = inner.state_dict()
    state: dict[Any, Any] = {}
    for index, facts in own["state"].items():
        for name, value in facts.items():
            if isinstance(value, Tensor):
                whole = getattr(value, "full_tensor", value.clone)()
                value = whole.detach().cpu() if group.first else None
            state.setdefault(index, {})[name] = value
    return {**own, "state": state} if group.first else {}


@torch.no_grad()
def _given_inner(
    group: RankGroup, inner: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return, to be loaded into each rank's inner optimizer, what rank 0 gives as ``_whole_inner``
    returned it.

    Each tensor of a parameter's shape is cut as the parameter is. ``state`` of the other ranks is
    not used.
    """
    params: list[Any] = []
    for part in inner.param_groups:
        params += part["params"]
    given = state["state"] if group.first else {}
    plan: dict[Any, dict[str, Any]] = {}
    for index, facts in given.items():
        plan[index] = {}
        for name, value in facts.items():
            plan[index][name] = value.to("meta") if isinstance(value, Tensor) else value
    rest = {name: value for name, value in state.items() if name != "state"}
    plan, rest = group.agreed((plan, rest))
    own: dict[Any, dict[str, Any]] = {}
    for index, facts in plan.items():
        for name, outline in facts.items():
            if isinstance(outline, Tensor):
                if group.first:
                    tensor = given[index][name]
                else:
                    tensor = torch.empty_like(outline, device="cpu")
                outline = _like(group.spread(tensor, 0), params[index])
            own.setdefault(index, {})[name] = outline
    return {**rest, "state": own}


def _like(whole: Tensor, param: Any) -> Tensor:
    if whole.shape == param.shape:
        return cut_like(whole, param)
    return whole.clone()  # rank 0's may be the caller's


FRAME = 256
"""Bytes of a message that need no second one."""
IDLE_S = 2 * 86400.0
"""Seconds that a rank waits for an order: two days."""
LAST = "return"
"""Order to go back to training."""
FAILED = "failed"
"""Message that rank 0 has failed."""


class Channel(RankGroup):
    """Messages from rank 0 to all others, in order.

    Every rank of ``group`` makes it at the same point.

    A rank that waits here is idle: it has nothing to do while rank 0 waits for peers, downloads
    weights or evaluates. So a wait may be as long as ``IDLE_S``, but not for a rank that died: its
    connections close, and the wait ends with RankLost.
    """

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group.joined(IDLE_S), timeout=IDLE_S)

    def send(self, name: str, **fields: Any) -> None:
        """Send a command with JSON fields; for rank 0."""
        body = json.dumps([name, fields]).encode()
        frame = torch.zeros(FRAME, dtype=torch.uint8, device="cpu")
        head = len(body).to_bytes(8, "big") + body[: FRAME - 8]
        frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self.spread(frame, 0)
        if len(body) > FRAME - 8:
            self.spread(torch.frombuffer(bytearray(body[FRAME - 8 :]), dtype=torch.uint8), 0)

    def receive(self) -> tuple[str, dict[str, Any]]:
        """Return the next command; for the other ranks. RankFailed if it is that rank 0 has
        failed.
        """
        frame = torch.zeros(FRAME, dtype=torch.uint8, device="cpu")
        data = self.spread(frame, 0).numpy().tobytes()
        length = int.from_bytes(data[:8], "big")
        body = data[8 : 8 + length]
        if length > len(body):
            rest = torch.zeros(length - len(body), dtype=torch.uint8, device="cpu")
            body += self.spread(rest, 0).numpy().tobytes()
        name, fields = json.loads(body)
        if name == FAILED:
            raise RankFailed(0, fields["said"])
        return name, fields

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Release the others, which ``follow``, at the end of the block, or tell them what it
        raised; for rank 0.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankLost):
                with suppress(RankLost):
                    self.send(FAILED, said=str(error) or type(error).__name__)
            raise
        self.send(LAST)

    def follow(self, obey: Callable[[str, dict[str, Any]], None], last: str = LAST) -> None:
        """Obey rank 0's commands up to ``last``; for the other ranks."""
        while True:
            name, fields = self.receive()
            if name == last:
                return
            obey(name, fields)


class LeadOptimizer:
    """Rank 0's ``opt`` as the swarm and checkpoints see it, with whole weights; what is not here is
    that optimizer's own.
    """

    def __init__(self, opt: OuterOptimizer, channel: Channel) -> None:
        self._opt = opt
        self._channel = channel
        self.gathers = 0
        """How often whole weights were gathered: those of one time are other tensors than those of
        another.
        """

    def __getattr__(self, name: str) -> Any:
        """Return what all ranks have in common: numbers, shapes, rule and schedule."""
        return getattr(self._opt, name)

    @property
    def round(self) -> int:
        """Number of the next exchange, which the other ranks take from here with each one."""
        return self._opt.round

    @round.setter
    def round(self, round: int) -> None:
        self._opt.round = round

    @property
    def slow(self) -> list[Tensor]:
        """The whole slow weights, gathered now, on the CPU."""
        self._channel.send("whole_slow")
        self.gathers += 1
        return whole_slow(self._opt)

    @property
    def shared(self) -> dict[str, list[Tensor]]:
        """The whole shared state, gathered now, on the CPU."""
        self._channel.send("whole_shared")
        return whole_shared(self._opt)

    def slow_of(self, fragment: int) -> list[Tensor]:
        """Return the whole slow weights of a fragment, gathered now."""
        self._channel.send("whole_slow_of", fragment=fragment)
        return whole_slow_of(self._opt, fragment)

    def sketch_of(self, fragment: int) -> tuple[float, ...]:
        self._channel.send("sketch_of", fragment=fragment)
        return self._opt.sketch_of(fragment)

    def adopt(self, slow: Sequence[Tensor], **how: Any) -> list[int]:
        """Adopt whole weights of the swarm on all ranks, as ``OuterOptimizer.adopt`` does."""
        self._channel.send("adopt")
        return adopt(self._opt, slow, **how)


ORDERS: dict[str, Callable[..., object]] = {
    "whole_slow": whole_slow,
    "whole_slow_of": whole_slow_of,
    "whole_shared": whole_shared,
    "sketch_of": SavedState.sketch_of,
    "adopt": adopt,
}


def obey(opt: OuterOptimizer, name: str, fields: Mapping[str, Any]) -> None:
    """Make the call that rank 0 makes. ValueError if there is no such order."""
    if name not in ORDERS:
        raise ValueError(f"rank 0 has sent an unknown order {name!r}")
    ORDERS[name](opt, **fields)
