"""An outer optimizer's state in the form of torch's optimizers.

    {"state": {3: {"exp_avg": ..., "outer": {"slow": ..., "momentum": ...}}},
     "param_groups": [{"lr": ..., "params": [3], "outer": {"lr": ..., "progress": "{...}"}}]}

This form goes through ``torch.save`` and torch.distributed.checkpoint, and reads like the state of
any optimizer. What belongs to a parameter (slow weights, momentum, rounding error, residuals) is
beside the inner optimizer's state of it, under "outer". All that is no tensor is JSON, under
"progress" of each group. `TorchForm` converts it from and to the whole state in lists, which
``OuterOptimizer.whole_state`` returns. Why it looks so: docs/internals.md, "Saved state".
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shoal.optim.outer.in_flight import Record
from shoal.optim.outer.outer_groups import rows_at
from shoal.optim.outer.sharded import local, sharded_like

OUTER = "outer"
"""Key of all that is ours, in a parameter's entry and in a group."""
PROGRESS = "progress"
"""Key of the JSON text in a group's OUTER."""
PLAIN = (
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
"""Entries of the whole state that JSON holds as they are."""
TORCH_CHECKPOINT = "torch.distributed.checkpoint.state_dict"
"""Module of torch whose option FLATTEN loses what is under OUTER."""
FLATTEN = "flatten_optimizer_state_dict"


class TorchForm:
    """Converts one optimizer's whole state into torch's form, and back.

    Args:
        every: all parameters of the inner optimizer.
        params: those that are averaged.
        parts: of each fragment the positions in ``params``.
        coarse: tells by position whether rounding errors are kept.
        sent_shapes: returns the shapes of a fragment's contribution.
    """

    def __init__(
        self,
        every: Sequence[Tensor],
        params: Sequence[Tensor],
        parts: Sequence[Sequence[int]],
        coarse: Callable[[int], bool],
        sent_shapes: Callable[[int], list[torch.Size]],
    ) -> None:
        self._every = every
        self._params = params
        self._parts = parts
        self._coarse = coarse
        self._sent_shapes = sent_shapes
        self._number = {parameter: number for number, parameter in enumerate(every)}
        self._place = {parameter: index for index, parameter in enumerate(params)}
        numbers = [number for number, parameter in enumerate(every) if parameter in self._place]
        self.order = sorted(numbers, key=lambda number: self._place[every[number]])
        """The number among all parameters of each averaged one."""

    def pack(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return a whole state in torch's form; tensors of sharded parameters are DTensors.

        Raises:
            ValueError: torch asks for it to flatten it, and the outer part would be lost.
        """
        if _is_flattened():
            raise ValueError(
                "a state of flatten_optimizer_state_dict=True loses the slow weights, outer "
                "momentum and round when it is loaded: leave that option out, here and where it is "
                "loaded"
            )
        state = dict(whole["inner"]["state"])
        outer = self._outer_tensors(whole)
        for number, parameter in enumerate(self._every):
            if parameter not in self._place:
                continue
            tensors = outer[self._place[parameter]]
            own = {name: sharded_like(parameter, tensor) for name, tensor in tensors.items()}
            state[number] = {**state.get(number, {}), OUTER: own}
        in_flight: list[Record] = []
        if not self._sharded:
            in_flight = [self._pack_record(record, state) for record in whole["in_flight"]]
        progress = {name: whole[name] for name in PLAIN}
        progress["rounded"] = sorted(whole["rounding"])
        progress["rule"] = sorted(whole["rule"])
        progress["parts"] = [list(part) for part in self._parts]
        progress["codecs"] = [_without_residuals(memory) for memory in whole["codecs"]]
        progress["in_flight"] = in_flight
        text = json.dumps(progress)
        groups = [
            {**group, OUTER: {**settings, PROGRESS: text}}
            for group, settings in zip(whole["inner"]["param_groups"], whole["groups"], strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def unpack(
        self, state: Mapping[str, Any], rule: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, Any]:
        """Return the whole state of a packed one, in which parameters may have names for numbers.

        ``rule``: the rule's present state, for its shapes.

        Raises:
            ValueError: parameters or groups are others, or the outer part is missing.
        """
        saved = self._read(state)
        progress = saved.progress
        shapes = [local(parameter).shape for parameter in self._params]
        whole = {name: progress[name] for name in PLAIN if name in progress}
        whole["codecs"] = []
        memories = zip(progress["parts"], progress["codecs"], strict=True)
        for fragment, (part, memory) in enumerate(memories):
            whole["codecs"].append(self._codec_memory(saved, fragment, part, memory))
        whole["in_flight"] = []
        for packed in progress.get("in_flight", ()):
            record = self._unpack_record(packed, saved)
            if record is not None:
                whole["in_flight"].append(record)
        whole["inner"] = saved.inner()
        whole["slow"] = saved.tensors("slow", shapes)
        whole["rounding"] = {}
        for index in progress["rounded"]:
            if index < len(shapes):
                whole["rounding"][index] = saved.tensor(index, "rounding", shapes[index])
        whole["rule"] = {}
        for name in progress["rule"]:
            own = [tensor.shape for tensor in rule[name]] if name in rule else shapes
            whole["rule"][name] = saved.tensors(name, own)
        whole["groups"] = saved.outer_settings()
        return whole

    @property
    def _sharded(self) -> bool:
        return any(hasattr(parameter, "to_local") for parameter in self._params)

    def _outer_tensors(self, whole: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Return the outer tensors of each averaged parameter by name.

        Every entry is there, zeros for what is empty yet: a new optimizer's state is the template
        into which torch loads a checkpoint.
        """
        outer: list[dict[str, Tensor]] = []
        for index, slow in enumerate(whole["slow"]):
            tensors = {"slow": slow}
            for name, values in whole["rule"].items():
                tensors[name] = values[index]
            if self._coarse(index):
                error = whole["rounding"].get(index)
                tensors["rounding"] = torch.zeros_like(slow) if error is None else error
            outer.append(tensors)
        for fragment, memory in enumerate(whole["codecs"]):
            if "error" not in memory:
                continue
            residuals = memory["error"]
            if residuals is None:
                shapes = self._sent_shapes(fragment)
                times = memory.get("residuals", 1)
                residuals = [torch.zeros(shape, device="cpu") for shape in shapes * times]
            places = _residual_places(self._parts[fragment], len(residuals))
            for (index, name), residual in zip(places, residuals, strict=True):
                outer[index][name] = residual
        return outer

    def _read(self, state: Mapping[str, Any]) -> _Saved:
        """Return a packed state as it is read, in this optimizer's order of parameters."""
        groups = state["param_groups"]
        texts = [group[OUTER][PROGRESS] for group in groups if OUTER in group]
        if not texts:
            raise ValueError(
                "the saved state has no outer part, so it is not an outer optimizer's (load it "
                "into the inner one), or it was read with flatten_optimizer_state_dict, which does "
                "not keep it"
            )
        keys = list(itertools.chain.from_iterable(group["params"] for group in groups))
        if len(keys) != len(self._every):
            raise ValueError(
                f"the saved parameter groups have {len(keys)} parameters, this optimizer "
                f"{len(self._every)}"
            )
        entries = [dict(state["state"].get(key, {})) for key in keys]
        outer = [entries[self._number[parameter]].get(OUTER, {}) for parameter in self._params]
        return _Saved(groups, entries, outer, self._in_own_order(json.loads(texts[0])))

    def _in_own_order(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Return ``progress`` with the parameters counted in this optimizer's order.

        Exchanges in flight are left out: what was sent is in the old order.
        """
        was = progress.get("order", self.order)
        if was == self.order or sorted(was) != sorted(self.order):
            return progress
        moved_to = [self.order.index(number) for number in was]
        names = progress.get("names", [""] * len(was))
        return {
            **progress,
            "parts": [sorted(moved_to[old] for old in part) for part in progress["parts"]],
            "rounded": [moved_to[old] for old in progress["rounded"]],
            "in_flight": [],
            "order": self.order,
            "names": [names[was.index(number)] for number in self.order],
        }

    def _codec_memory(
        self, saved: _Saved, fragment: int, part: Sequence[int], memory: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a codec's memory with its residuals; ``part``: the fragment as it was saved."""
        if memory.get("error") is None:
            return memory
        places = _residual_places(part, memory["error"])
        shapes: Sequence[torch.Size | None] = [None] * len(places)
        own = list(self._parts[fragment]) if fragment < len(self._parts) else []
        if self._sharded and list(part) == own:
            shapes = self._sent_shapes(fragment) * memory.get("residuals", 1)
        residuals = []
        for (index, name), shape in zip(places, shapes, strict=False):
            residuals.append(saved.tensor(index, name, shape))
        return {**memory, "error": residuals}

    def _holder(self, fragment: int) -> int:
        """Return the number of the parameter that keeps the tensors of a fragment in flight."""
        return self._number[self._params[self._parts[fragment][0]]]

    def _pack_record(self, record: Record, state: dict[Any, Any]) -> Record:
        """Put the tensors of an exchange in flight into ``state``; return their counts instead."""
        fragment = record["facts"]["fragment"]
        own = state[self._holder(fragment)][OUTER]
        counts: dict[str, int] = {}
        for name, tensors in record["tensors"].items():
            counts[name] = len(tensors)
            for number, tensor in enumerate(tensors):
                own[_in_flight_key(fragment, name, number)] = tensor
        return {"facts": record["facts"], "tensors": counts}

    def _unpack_record(self, record: Record, saved: _Saved) -> Record | None:
        """Return the record with its tensors; None if they are not all there."""
        fragment = int(record["facts"]["fragment"])
        if not 0 <= fragment < len(self._parts):
            return None
        own = saved.entries[self._holder(fragment)].get(OUTER, {})
        tensors: dict[str, list[Tensor]] = {}
        for name, count in record["tensors"].items():
            keys = [_in_flight_key(fragment, name, number) for number in range(count)]
            if any(key not in own for key in keys):
                return None
            tensors[name] = [own[key] for key in keys]
        return {"facts": record["facts"], "tensors": tensors}


@dataclass(frozen=True)
class _Saved:
    """A state in torch's form while it is read."""

    groups: Sequence[Mapping[str, Any]]
    entries: Sequence[Mapping[str, Any]]
    """Of each parameter of the inner optimizer."""
    outer: Sequence[Mapping[str, Tensor]]
    """The OUTER entry of each averaged parameter."""
    progress: dict[str, Any]

    def tensor(self, index: int, name: str, shape: torch.Size | None) -> Tensor:
        """Return a tensor of an averaged parameter, of a sharded one the local part.

        ``shape``: of the local part, where the mesh may have added dimensions; None: as it is.
        """
        if name not in self.outer[index]:
            raise ValueError(
                f"the saved outer state has no {name!r} of parameter {index}: load it whole, and "
                "by the same method"
            )
        tensor = self.outer[index][name]
        part = local(tensor)
        if part is tensor or shape is None or part.numel() != shape.numel():
            return part
        return part.reshape(shape)

    def tensors(self, name: str, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return the tensor of this name of each averaged parameter."""
        return [self.tensor(index, name, shape) for index, shape in enumerate(shapes)]

    def inner(self) -> dict[str, Any]:
        """Return the inner optimizer's own state, with the parameters numbered in a row."""
        state: dict[int, Any] = {}
        for number, entry in enumerate(self.entries):
            own = {name: value for name, value in entry.items() if name != OUTER}
            if own:
                state[number] = own
        groups = []
        first = 0
        for group in self.groups:
            own = {name: value for name, value in group.items() if name != OUTER}
            own["params"] = list(range(first, first + len(group["params"])))
            first += len(group["params"])
            groups.append(own)
        return {"state": state, "param_groups": groups}

    def outer_settings(self) -> list[dict[str, Any]]:
        """Return the outer settings of each group."""
        settings = []
        for group in self.groups:
            own = {name: value for name, value in group.get(OUTER, {}).items() if name != PROGRESS}
            settings.append(own)
        return settings


def check_names(
    was: Sequence[int], saved: Sequence[str], now: Sequence[int], own: Sequence[str]
) -> None:
    """Raise ValueError if a parameter of the inner optimizer had another name when it was saved.

    ``was``, ``now``: the numbers of the averaged parameters among those of the inner optimizer;
    ``saved``, ``own``: their names, empty where there was no model.
    """
    before = dict(zip(was, saved, strict=False))
    for number, name in zip(now, own, strict=True):
        then = before.get(number, "")
        if name and then and name != then:
            raise ValueError(
                f"number {number} of the inner optimizer's parameters was {then!r} when the state "
                f"was saved, and is {name!r} now: make the inner optimizer, and the model, as they "
                "were then"
            )


def in_order(
    whole: Mapping[str, Any], order: Sequence[int], parts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return a whole state with its parameters in another ``order`` of the same numbers.

    What is in flight is left out: it was sent in the old order. ``parts``: of each fragment the
    positions in the new order.
    """
    old_place = {number: place for place, number in enumerate(whole["order"])}
    source = [old_place[number] for number in order]
    """For each position its old one."""
    names = whole.get("names") or [""] * len(source)
    rounding = whole.get("rounding", {})
    rule = {}
    for name, tensors in whole["rule"].items():
        each_has_one = len(tensors) == len(source)
        rule[name] = [tensors[old] for old in source] if each_has_one else tensors
    codecs = []
    for memory, part in zip(whole.get("codecs", ()), parts, strict=False):
        codecs.append(_memory_in_order(memory, [source[new] for new in part]))
    return {
        **whole,
        "slow": [whole["slow"][old] for old in source],
        "rule": rule,
        "rounding": {new: rounding[old] for new, old in enumerate(source) if old in rounding},
        "codecs": codecs,
        "in_flight": [],
        "order": list(order),
        "names": [names[old] for old in source],
    }


def _memory_in_order(memory: Mapping[str, Any], source: Sequence[int]) -> dict[str, Any]:
    """Return a codec's memory of a fragment whose parameters had the positions ``source``.

    The residuals were in ascending order of these, one or more times over.
    """
    error = memory.get("error")
    count = len(source)
    if error is None or len(error) % count:
        return dict(memory)
    ascending = sorted(source)
    within = [ascending.index(old) for old in source]
    return {**memory, "error": rows_at(error, within, count)}


def _without_residuals(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Return a codec's memory for JSON: in place of its residuals their number."""
    error = memory.get("error")
    return dict(memory) if error is None else {**memory, "error": len(error)}


def _residual_places(part: Sequence[int], count: int) -> list[tuple[int, str]]:
    """Return of each of ``count`` residuals its parameter's position, and its name there."""
    size = len(part)
    return [(part[number % size], f"residual_{number // size}") for number in range(count)]


def _in_flight_key(fragment: int, name: str, number: int) -> str:
    return f"in_flight_{fragment}_{name}_{number}"


def _is_flattened() -> bool:
    """Return True if torch asks for the state in order to flatten it.

    torch tells no optimizer of its options, so they are read in the frame that keeps them.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != TORCH_CHECKPOINT:
        frame = frame.f_back
    info = None if frame is None else frame.f_locals.get("info")
    return bool(getattr(info, FLATTEN, False))
