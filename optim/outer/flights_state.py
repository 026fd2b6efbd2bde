"""The exchanges in flight in the state of an outer optimizer: saved, checked, and ready to be begun anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec, Shape
from shoal.optim.codecs.state import Rejectable, Resendable
from shoal.optim.exchange.base import RoundKey
from shoal.optim.outer.in_flight import InFlight, PendingExchange, Record, Sent
from shoal.optim.outer.inner import Wrapper
from shoal.optim.outer.param_groups import OuterGroups
from shoal.optim.outer.parameters import AveragedBuffers
from shoal.optim.outer.state_checks import check_record
from shoal.optim.outer.weights import ModelWeights
from shoal.optim.rules.base import START, KeepsFast, RoundContext, Rule, State
from shoal.optim.schedule.auto_lag import AutoLag
from shoal.optim.schedule.schedule import Delayed, Schedule


class FlightsState(Wrapper):
    """Base of ``OuterState``: what is sent, and what is in flight."""

    outer: OuterGroups
    rule: Rule
    schedule: Schedule
    run: str
    slow: list[Tensor]
    rule_state: State
    _parts: list[list[int]]
    _weights: ModelWeights
    _codecs: list[Codec]
    _buffers: AveragedBuffers
    _in_flight: InFlight
    _auto: AutoLag | None

    @property
    def lag(self) -> int:
        """Positions between sending and applying the next exchange: 0 if it is waited for at once, ``every`` if a whole round."""
        if self._auto is not None:
            return self._auto.lag
        return self.schedule.every if isinstance(self.schedule, Delayed) else int(getattr(self.schedule, "lag", 0))

    @property
    def lag_auto(self) -> bool:
        """True if this optimizer chooses its ``lag`` itself."""
        return self._auto is not None

    def _records(self, copy: bool) -> list[Record]:
        """Return the exchanges in flight to be saved; those that a codec could not send again as they were are taken back."""
        if isinstance(self._codecs[0], Rejectable) and not isinstance(self._codecs[0], Resendable):
            return []
        return [p.record(self._codecs[p.fragment], self._start_of(p.part), copy=copy) for p in self._in_flight]

    def _loaded_in_flight(self, state: Mapping[str, Any], steps: int, position: int) -> list[tuple[PendingExchange, Record]]:
        """Return the saved exchanges in flight that this schedule would apply. ValueError if one does not fit."""
        found: dict[int, tuple[PendingExchange, Record]] = {}
        for record in state.get("in_flight", ()):
            check_record(record, len(self._parts), steps, position, self.schedule.every)
            facts, tensors = record["facts"], record["tensors"]
            fragment, lag = facts["fragment"], facts["lag"]
            if lag == 0 or (self._auto is None and lag != self.lag):
                continue  # it stays taken back
            part = self._parts[fragment]
            if not self._weights.dealt:  # otherwise rank 0 has checked the whole
                self._check_record_tensors(record, self._weights.shapes)
            if fragment in found or sorted(place for _, places in facts["settings"] for place in places) != [*range(len(part))]:
                raise ValueError(f"the saved exchanges in flight of fragment {fragment} do not fit together")
            key = RoundKey(self.run, facts["round"], fragment)
            context = RoundContext(key, weight=float(facts["counts"]), total=float(facts["counts"]))
            moved = {name: [tensor.to(self.slow[0], copy=True) for tensor in tensors[name]] for name in ("sent", "fast")}
            sent = Sent(moved["sent"], tensors["tail"], float(facts["weight"]), facts["even"], tuple(facts["state"]))
            found[fragment] = PendingExchange(
                self._weights, part, context, sent, self.outer.again(facts["settings"]), facts["step"], facts["position"], lag,
                absent=bool(facts["absent"]), fast=moved["fast"], arrived=facts["arrived"],
            ), record  # fmt: skip
        return [found[fragment] for fragment in sorted(found)]

    def _check_record_tensors(self, record: Record, shapes: Sequence[Shape]) -> None:
        """Raise ValueError unless the tensors of a saved exchange fit parameters of these shapes."""
        tensors, fragment = record["tensors"], record["facts"]["fragment"]
        own = [torch.Size(shapes[index]) for index in self._parts[fragment]]
        wanted = {
            "sent": self._sent_shapes(fragment),
            "tail": [tensor.shape for tensor in self._buffers.now()] if fragment == 0 else [],
            "fast": own if isinstance(self.rule, KeepsFast) else [],
            "start": own if START in self.rule_state else [],
        }
        for name, expected in wanted.items():
            if [tensor.shape for tensor in tensors[name]] != expected:
                raise ValueError(
                    f"the saved exchange in flight of fragment {fragment} has {name!r} of other tensors than this model"
                )
        if tensors["error"] and [tensor.shape for tensor in tensors["error"]] != wanted["sent"]:
            raise ValueError(f"the saved exchange in flight of fragment {fragment} has an error of other tensors than are sent")
        self._load_memory(self._codecs[fragment].fresh(), record)

    def _load_memory(self, codec: Codec, record: Record) -> None:
        """Load the memory of a codec that awaits an outcome. ValueError for another codec's."""
        memory, tensors = record["facts"]["codec"], record["tensors"]
        if memory is not None and self._weights.first:
            payload = {"payload": tensors["payload"][0]} if tensors["payload"] else {}
            codec.load_state_dict({**memory, "error": list(tensors["error"]) or None, **payload})

    def _start_of(self, part: Sequence[int]) -> list[Tensor]:
        return [self.rule_state[START][index] for index in part] if START in self.rule_state else []

    def _sent_shapes(self, fragment: int) -> list[torch.Size]:
        """Return the shapes of the rule's contribution for a fragment, by a trial call, which needs memory if it reads values."""
        try:
            return self._trial(fragment, torch.device("meta"))
        except RuntimeError:
            return self._trial(fragment, self.slow[0].device)

    @torch.no_grad()
    def _trial(self, fragment: int, device: torch.device) -> list[torch.Size]:
        shapes = [self._weights.shapes[index] for index in self._parts[fragment]]
        slow, fast = ([torch.zeros(shape, dtype=self.slow[0].dtype, device=device) for shape in shapes] for _ in range(2))
        sent = self.rule.contribution(slow, fast, self.rule.initial(slow), RoundContext(RoundKey("", 0, fragment)))
        return [tensor.shape for tensor in sent]
