"""The state of an outer optimizer in the form of torch's optimizers, which
torch.distributed.checkpoint knows.

    {"state": {i: {"exp_avg": ..., "outer": {"slow": ..., "momentum": ..., ...}}, ...},
     "param_groups": [{"lr": ..., "params": [...], "outer": {"lr": ..., "momentum": ..., "progress":
     "..."}}, ...]}

i is the parameter's number among all of the inner optimizer; its slow weights, the rule's tensors,
its rounding error and a codec's residuals are in "outer", which frozen and excluded parameters
lack. "progress" is a text (JSON) with all that is no tensor, the same in each group, because torch
keeps nothing beside "state" and "param_groups". Every entry is there from the start, so that a new
optimizer's state is a template into which a checkpoint can be loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shoal.optim.outer.in_flight import Record
from shoal.optim.outer.weights import local, sharded_like

OUTER, PROGRESS = "outer", "progress"
TORCH_CHECKPOINT = "torch.distributed.checkpoint.state_dict"
FLATTEN = "flatten_optimizer_state_dict"
_PLAIN = (
    "steps",
    "position",
    "length",
    "round",
    "tokens",
    "sent_at",
    "applied",
    "arrivals",
    "kind",
    "settings",
    "schedule",
    "order",
    "names",
)


class TorchForm:
    """Conversion of one optimizer's whole state (``OuterOptimizer.whole_state``) into torch's form,
    and back.

    Args:
        every: all parameters of the inner optimizer.
        params: those that are averaged.
        parts: positions in ``params``, for each fragment.
        coarse: tells by position whether rounding errors are kept.
        sent: returns the shapes of a fragment's contribution.
    """

    def __init__(
        self,
        every: Sequence[Tensor],
        params: Sequence[Tensor],
        parts: Sequence[Sequence[int]],
        coarse: Callable[[int], bool],
        sent: Callable[[int], list[torch.Size]],
    ) -> None:
        self._every, self._params, self._parts, self._coarse, self._sent = (
            every,
            params,
            parts,
            coarse,
            sent,
        )
        self._place = {parameter: index for index, parameter in enumerate(params)}
        self.order = [
            number
            for _, number in sorted(
                (self._place[p], n) for n, p in enumerate(every) if p in self._place
            )
        ]
        """The number among all parameters of each averaged one; a session has them in the order of
        its model.
        """

    def pack(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state in torch's form.

        Tensors of sharded parameters are DTensors with the parameter's placements.

        ValueError if torch asks for it to flatten it: a flattened state is read back without the
        outer part.
        """
        if _is_flattened():
            raise ValueError(
                "a state of flatten_optimizer_state_dict=True loses the slow weights, outer "
                "momentum and round when it is loaded: "
                "leave that option out, here and where it is loaded"
            )
        state = dict(whole["inner"]["state"])
        outer = self._tensors(whole)
        for number, parameter in enumerate(self._every):
            if parameter in self._place:
                own = outer[self._place[parameter]]
                spread = {name: sharded_like(parameter, tensor) for name, tensor in own.items()}
                state[number] = {**state.get(number, {}), OUTER: spread}
        sharded = any(hasattr(parameter, "to_local") for parameter in self._params)
        begun = (
            [] if sharded else [self._pack_record(record, state) for record in whole["in_flight"]]
        )
        progress = {name: whole[name] for name in _PLAIN}
        progress |= {
            "rounded": sorted(whole["rounding"]),
            "rule": sorted(whole["rule"]),
            "parts": [list(part) for part in self._parts],
            # Of residuals the number stands in their place.
            "codecs": [
                {
                    name: len(value) if name == "error" and value is not None else value
                    for name, value in memory.items()
                }
                for memory in whole["codecs"]
            ],
            "in_flight": begun,
        }
        text = json.dumps(progress)
        pairs = zip(whole["inner"]["param_groups"], whole["groups"], strict=True)
        return {
            "state": state,
            "param_groups": [
                {**group, OUTER: {**settings, PROGRESS: text}} for group, settings in pairs
            ],
        }

    def _holder(self, fragment: int) -> int:
        """Return the number of the parameter with which the tensors of a fragment's exchange in
        flight are kept.
        """
        return next(
            at
            for at, parameter in enumerate(self._every)
            if parameter is self._params[self._parts[fragment][0]]
        )

    def _pack_record(self, record: Record, state: dict[Any, Any]) -> Record:
        """Put the tensors of an exchange in flight into ``state``; return the record with their
        numbers in their place.
        """
        fragment = record["facts"]["fragment"]
        own = state[self._holder(fragment)][OUTER]
        for name, tensors in record["tensors"].items():
            own |= {_place(fragment, name, number): tensor for number, tensor in enumerate(tensors)}
        return {
            "facts": record["facts"],
            "tensors": {name: len(tensors) for name, tensors in record["tensors"].items()},
        }

    def _unpack_record(self, record: Record, entries: Sequence[Mapping[str, Any]]) -> Record | None:
        """Return the record with its tensors; None if they are not all there."""
        fragment = int(record["facts"]["fragment"])
        if not 0 <= fragment < len(self._parts):
            return None
        own = entries[self._holder(fragment)].get(OUTER, {})
        names = {
            name: [_place(fragment, name, number) for number in range(count)]
            for name, count in record["tensors"].items()
        }
        if any(place not in own for places in names.values() for place in places):
            return None
        return {
            "facts": record["facts"],
            "tensors": {name: [own[place] for place in places] for name, places in names.items()},
        }

    def _tensors(self, whole: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Return the outer tensors of each averaged parameter by name."""
        outer: list[dict[str, Tensor]] = [{"slow": slow} for slow in whole["slow"]]
        for index, tensors in enumerate(outer):
            tensors |= {name: values[index] for name, values in whole["rule"].items()}
            if self._coarse(index):
                error = whole["rounding"].get(index)
                tensors["rounding"] = (
                    torch.zeros_like(whole["slow"][index]) if error is None else error
                )
        for fragment, memory in enumerate(whole["codecs"]):
            if "error" not in memory:
                continue
            residual = memory["error"]
            if residual is None:
                residual = [torch.zeros(shape, device="cpu") for shape in self._sent(fragment)]
            for (index, name), tensor in zip(
                _residuals(self._parts[fragment], len(residual)), residual, strict=True
            ):
                outer[index][name] = tensor
        return outer

    def unpack(
        self, state: Mapping[str, Any], rule: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, Any]:
        """Return the whole state of ``pack``'s, in which parameters may have names for numbers.

        ``rule``: the rule's present state, for its shapes. ValueError if groups or parameters are
        others, or the outer part is missing.
        """
        groups = state["param_groups"]
        keys = [key for group in groups for key in group["params"]]
        text = next((group[OUTER][PROGRESS] for group in groups if OUTER in group), None)
        if text is None:
            raise ValueError(
                "the saved state has no outer part, so it is not an outer optimizer's (load it "
                "into the inner one), or it was read "
                "with flatten_optimizer_state_dict, which does not keep it"
            )
        if len(keys) != len(self._every):
            raise ValueError(
                f"the saved parameter groups have {len(keys)} parameters, this optimizer "
                f"{len(self._every)}"
            )
        progress = json.loads(text)
        was = progress.get("order", self.order)
        if was != self.order and sorted(was) == sorted(self.order):
            to = [self.order.index(at) for at in was]
            progress["parts"] = [sorted(to[index] for index in part) for part in progress["parts"]]
            progress["rounded"] = [to[index] for index in progress["rounded"]]
            names = progress.get("names", [""] * len(was))
            progress |= {
                "in_flight": [],
                "order": self.order,
                "names": [names[was.index(at)] for at in self.order],
            }  # what was sent is in the old order: it is taken back
        number = {parameter: at for at, parameter in enumerate(self._every)}
        entries = [dict(state["state"].get(key, {})) for key in keys]
        outer = [entries[number[parameter]].get(OUTER, {}) for parameter in self._params]

        def row(name: str, shapes: Sequence[torch.Size]) -> list[Tensor]:
            return [self._one(outer, index, name, shape) for index, shape in enumerate(shapes)]

        own = [local(parameter).shape for parameter in self._params]
        kept = {
            name: [tensor.shape for tensor in rule[name]] if name in rule else own
            for name in progress["rule"]
        }
        codecs = [
            self._codec(outer, number, part, memory)
            for number, (part, memory) in enumerate(
                zip(progress["parts"], progress["codecs"], strict=True)
            )
        ]
        begun = [self._unpack_record(record, entries) for record in progress.get("in_flight", ())]
        inner = [
            {name: value for name, value in entry.items() if name != OUTER} for entry in entries
        ]
        sizes = [len(group["params"]) for group in groups]
        firsts = [sum(sizes[:at]) for at in range(len(sizes))]
        return {name: progress[name] for name in _PLAIN if name in progress} | {
            "inner": {
                "state": {at: entry for at, entry in enumerate(inner) if entry},
                "param_groups": [
                    {name: value for name, value in group.items() if name != OUTER}
                    | {"params": [*range(first, first + size)]}
                    for group, first, size in zip(groups, firsts, sizes, strict=True)
                ],
            },
            "slow": row("slow", own),
            "rounding": {
                at: self._one(outer, at, "rounding", own[at])
                for at in progress["rounded"]
                if at < len(own)
            },
            "rule": {name: row(name, shapes) for name, shapes in kept.items()},
            "codecs": codecs,
            "in_flight": [record for record in begun if record is not None],
            "groups": [
                {n: v for n, v in group.get(OUTER, {}).items() if n != PROGRESS} for group in groups
            ],
        }

    def _codec(
        self,
        outer: Sequence[Mapping[str, Tensor]],
        fragment: int,
        part: Sequence[int],
        memory: dict[str, Any],
    ) -> dict[str, Any]:
        """Return a codec's memory with its residuals; ``part``: the fragment when it was saved."""
        if memory.get("error") is None:
            return memory
        residuals = _residuals(part, memory["error"])
        shapes: Sequence[torch.Size | None] = [None] * len(residuals)
        if any(hasattr(parameter, "to_local") for parameter in self._params) and list(
            part
        ) == self._here(fragment):
            shapes = self._sent(fragment)
        return memory | {
            "error": [
                self._one(outer, *place, shape)
                for place, shape in zip(residuals, shapes, strict=False)
            ]
        }

    def _here(self, fragment: int) -> list[int]:
        return list(self._parts[fragment]) if fragment < len(self._parts) else []

    def _one(
        self, outer: Sequence[Mapping[str, Tensor]], index: int, name: str, shape: torch.Size | None
    ) -> Tensor:
        if name not in outer[index]:
            raise ValueError(
                f"the saved outer state has no {name!r} of parameter {index}: load it whole, and "
                "by the same method"
            )
        tensor = outer[index][name]
        part = local(tensor)
        return (
            part
            if part is tensor or shape is None or part.numel() != shape.numel()
            else part.reshape(shape)
        )


def check_names(
    was: Sequence[int], saved: Sequence[str], now: Sequence[int], own: Sequence[str]
) -> None:
    """Raise ValueError if a parameter of the inner optimizer had another name when the state was
    saved.

    ``was``, ``now``: the numbers of the averaged parameters among those of the inner optimizer;
    ``saved``, ``own``: their names, each empty where there was no model.
    """
    before = dict(zip(was, saved, strict=False))
    for number, name in zip(now, own, strict=True):
        then = before.get(number, "")
        if name and then and name != then:
            raise ValueError(
                f"number {number} of the inner optimizer's parameters was {then!r} when the state "
                f"was saved, and is {name!r} now: "
                "make the inner optimizer, and the model, as they were then"
            )


def in_order(
    whole: Mapping[str, Any], order: Sequence[int], parts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return a whole state with its parameters in another ``order``, which has the same numbers as
    that of the state.

    What is in flight is taken back: it was sent in the old order. ``parts``: positions of each
    fragment in the new order.
    """
    place = {number: at for at, number in enumerate(whole["order"])}
    source = [place[number] for number in order]
    """For each position its old one."""
    names = whole.get("names") or [""] * len(source)
    rounding = whole.get("rounding", {})
    rule = {
        name: [tensors[old] for old in source] if len(tensors) == len(source) else tensors
        for name, tensors in whole["rule"].items()
    }
    return {
        **whole,
        "slow": [whole["slow"][old] for old in source],
        "rule": rule,
        "rounding": {new: rounding[old] for new, old in enumerate(source) if old in rounding},
        "codecs": [
            _memory_in_order(memory, [source[new] for new in part])
            for memory, part in zip(whole.get("codecs", ()), parts, strict=False)
        ],
        "in_flight": [],
        "order": list(order),
        "names": [names[old] for old in source],
    }


def _memory_in_order(memory: Mapping[str, Any], source: Sequence[int]) -> dict[str, Any]:
    """Return a codec's memory of a fragment whose parameters had the positions ``source``, which
    were ascending.
    """
    error = memory.get("error")
    if error is None or len(error) % len(source):
        return dict(memory)
    ascending = sorted(source)
    within = [ascending.index(old) for old in source]
    count = len(source)
    moved = [error[first + at] for first in range(0, len(error), count) for at in within]
    return {**memory, "error": moved}


def _residuals(part: Sequence[int], count: int) -> list[tuple[int, str]]:
    """Return for each of the ``count`` tensors of a contribution its parameter's position and its
    name.
    """
    return [
        (part[number % len(part)], f"residual_{number // len(part)}") for number in range(count)
    ]


def _is_flattened() -> bool:
    """Return True if ``get_optimizer_state_dict`` of torch calls, with the option that flattens
    what it gets.

    It tells no optimizer of its options, so they are read where it keeps them; unread ones are
    refused when the state is loaded.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != TORCH_CHECKPOINT:
        frame = frame.f_back
    info = None if frame is None else frame.f_locals.get("info")
    return bool(getattr(info, FLATTEN, False))


def _place(fragment: int, name: str, number: int) -> str:
    return f"in_flight_{fragment}_{name}_{number}"
