"""Saving and loading of an outer optimizer, with what is in flight.

    torch.save(opt.state_dict(), path)
    opt.load_state_dict(torch.load(path))       # into an optimizer that was made alike

There are two forms: ``state_dict`` is that of torch's optimizers (`shoal.optim.outer.torch_form`),
``whole_state`` has lists, for nodes' checkpoints. Either can be loaded. Why it is as it is:
docs/internals.md, "Saved state".
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import copy as shallow_copy
from typing import Any

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec, Rejectable, Resendable, Shape
from shoal.optim.codecs.error_feedback import ErrorFeedback
from shoal.optim.exchange.base import RoundKey
from shoal.optim.outer.checks import (
    check_keys,
    check_rank,
    check_record,
    check_rule_state,
    check_shapes,
    groups_of,
    settings_changed,
    settings_of,
)
from shoal.optim.outer.in_flight import PendingExchange, Record, Sent
from shoal.optim.outer.inner import all_parameters
from shoal.optim.outer.outer_groups import SETTINGS
from shoal.optim.outer.progress import Progress
from shoal.optim.outer.rule import START, KeepsFast, RoundContext, State, assign, kind_of
from shoal.optim.outer.state import OuterState
from shoal.optim.outer.torch_form import TorchForm, check_names, in_order


class SavedState(OuterState):
    """The part of an outer optimizer that saves and loads it."""

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Return everything needed to go on, in torch's form; in a peer of several ranks in lists.

        A resumed run begins the exchanges in flight anew, so that it goes on bit by bit as if it
        had not been interrupted, if the others do so too or had no part in them. Where that cannot
        be (sharded parameters, or a loader that reads no entries for them) they are taken back:
        what was sent is sent again with the next contribution.

        The outer tensors of sharded parameters are DTensors, so torch.distributed.checkpoint saves
        them, and restores them into another layout.

        Args:
            copy: False: slow weights, the rule's state and what is in flight are the optimizer's
                own tensors, for callers that copy or write them at once.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        whole = self.whole_state(copy=copy)
        rank = self._weights.rank
        state = self._form.pack(whole) if rank is None else {**whole, "rank": rank}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def whole_state(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the same state in lists, in the order of ``parameters``: for nodes' checkpoints.

        Of sharded parameters, and in a peer of several ranks, this process's part only.
        """
        rule: State = {}
        for name, tensors in self.rule_state.items():
            own = copy or name == START  # it is changed below
            rule[name] = [_copied(tensor, own) for tensor in tensors]
        in_flight = self._records(copy)
        # All else is as if what is in flight were taken back, for loaders that cannot begin it
        # anew.
        if START in rule:
            for pending in self._in_flight:
                for index, motion in zip(pending.part, pending.sent.contribution, strict=True):
                    rule[START][index].add_(motion)
        rounding = self._weights.rounding
        return {
            "inner": self.inner.state_dict(),
            "slow": [_copied(tensor, copy) for tensor in self.slow],
            "rounding": {index: _copied(tensor, copy) for index, tensor in rounding.items()},
            "rule": rule,
            "codecs": [fragment.codec_state() for fragment in self._fragments],
            "steps": self.steps,
            "position": self.position,
            "length": self.length.state_dict(),
            "round": self.round,
            "tokens": self.tokens,
            "sent_at": [list(fragment.sent_at) for fragment in self._fragments],
            "applied": list(self.applied),
            "arrivals": [] if self._auto is None else self._auto.state(),
            "kind": kind_of(self.rule),
            "settings": settings_of(self.rule),
            "schedule": repr(self.schedule),
            "groups": self.outer.settings(),
            "in_flight": in_flight,
            "order": self._form.order,
            "names": list(self._params.names),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` or ``whole_state`` returned; the model is up to the caller.

        All that is in parameter groups is restored, as torch does: the inner optimizer's settings,
        the outer ``lr`` and ``momentum``. The others (rule, schedule) stay those of the
        constructor, because all peers must have the same; a warning names those that were others
        when the state was saved.

        Raises:
            ValueError: shapes differ from this model's, or another method, codec or number of
                fragments saved it; nothing is changed then.
        """
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state = before(self, state) or state
        check_rank(state.get("rank"), self._weights.rank)
        state = self.whole_form(state)
        groups = groups_of(state, len(self.outer.param_groups))
        rule_state = self._weights.housed(self._checked_rule(state, self.slow))
        codecs = self._loaded_codecs(state)
        progress = Progress.of(state, self.applied)
        in_flight = self._loaded_in_flight(state, progress)
        arrivals = [int(positions) for positions in state.get("arrivals", ())]
        length = state.get("length", {})
        shallow_copy(self.length).load_state_dict(length, progress.tokens)

        # Nothing has been changed so far, nor has this if it raises.
        self.inner.load_state_dict(state["inner"])
        self.outer.restore(groups)
        self.length.load_state_dict(length, progress.tokens)
        assign(self.slow, state["slow"])
        self._weights.rounding = {
            int(index): error.to(self.slow[0], copy=True)
            for index, error in state.get("rounding", {}).items()
        }
        # A checkpoint from before the first round may lack state, which is then the initial one.
        self.rule_state = rule_state
        for name, tensors in state["rule"].items():
            assign(rule_state[name], tensors)
        self.progress = progress
        if self._auto is not None:
            self._auto.restore(arrivals)
        self._restore_fragments(state, codecs, in_flight)
        self._resumed = True
        self._watch.forget_weights()  # the model may be loaded before or after this
        self._watch.loaded_count = True
        changed = settings_changed(state, self.rule, self.schedule, SETTINGS)
        if changed is not None:
            warnings.warn(
                f"{changed}: these outer settings stay those of the constructor", stacklevel=2
            )
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def whole_form(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state of either form in that of ``whole_state``, in this order.

        Raises:
            ValueError: it is not an outer optimizer's, has other parameters, or is one rank's part
                of another order.
        """
        form = self._form
        whole = dict(state)
        if "param_groups" in state:
            whole = form.unpack(state, self.rule_state)
        order = whole.get("order", form.order)
        check_names(order, whole.get("names", ()), form.order, self._params.names)
        if order != form.order:
            if sorted(order) != sorted(form.order) or whole.get("rank") is not None:
                raise ValueError(
                    "the saved outer state is of other parameters, or of another order of them: "
                    "train the same ones of the model, by an inner optimizer of the same groups"
                )
            whole = in_order(whole, form.order, self._parts)
        return check_keys(whole)

    @property
    def _form(self) -> TorchForm:
        every = all_parameters(self.inner)
        return TorchForm(every, self._params, self._parts, self._weights.coarse, self._sent_shapes)

    @property
    def _parts(self) -> list[list[int]]:
        """Of each fragment the positions of its parameters."""
        return [fragment.part for fragment in self._fragments]

    def _restore_fragments(
        self,
        state: Mapping[str, Any],
        codecs: Sequence[Codec],
        in_flight: Sequence[tuple[PendingExchange, Record]],
    ) -> None:
        for fragment, codec in zip(self._fragments, codecs, strict=True):
            fragment.codec = codec
            fragment.drop()
            fragment.listens = False  # what was adopted before and is to be trained first is gone
        if state.get("sent_at"):
            for fragment, (steps, tokens) in zip(self._fragments, state["sent_at"], strict=True):
                fragment.sent_at = (int(steps), int(tokens))
        for pending, record in in_flight:
            if START in self.rule_state:
                assign(self._start_of(pending.part), record["tensors"]["start"])
            fragment = self._fragments[pending.fragment]
            self._load_memory(fragment.codec, record)
            fragment.in_flight.append(pending)

    def _checked_rule(self, state: Mapping[str, Any], slow: Sequence[Tensor]) -> State:
        """Return the rule's initial state for these slow weights.

        ValueError unless what was saved fits it, and the fragments.
        """
        rule_state = self.rule.initial(slow)
        check_shapes("the saved outer state 'slow'", state["slow"], slow)
        for index, tensor in state.get("rounding", {}).items():
            own = slow[int(index) : int(index) + 1]
            check_shapes("the saved outer state 'rounding'", [tensor], own)
        check_rule_state(state, rule_state, kind_of(self.rule))
        for name in ("sent_at", "applied", "codecs"):
            if state.get(name) and len(state[name]) != self.fragments:
                raise ValueError(
                    f"the saved outer state has {len(state[name])} fragments, this optimizer "
                    f"{self.fragments}"
                )
        return rule_state

    def _loaded_codecs(self, state: Mapping[str, Any]) -> list[Codec]:
        """Return the fragments' codecs with the saved memory.

        ValueError for another codec's, or one of other tensors.
        """
        codecs = [fragment.codec for fragment in self._fragments]
        for number, memory in enumerate(state.get("codecs") or ()):
            codec = codecs[number].fresh()
            codec.load_state_dict(memory)
            error = memory.get("error")
            if error is not None and _shapes(error) != self._residual_shapes(number):
                raise ValueError(
                    f"the saved memory of the codec {codec.name} is of other tensors than are sent "
                    "now"
                )
            codecs[number] = codec
        return codecs

    def _records(self, copy: bool) -> list[Record]:
        """Return the exchanges in flight to be saved.

        Those that a codec could not send again as they were are taken back.
        """
        codec = self.codec
        if isinstance(codec, Rejectable) and not isinstance(codec, Resendable):
            return []
        records: list[Record] = []
        for pending in self._in_flight:
            codec = self._fragments[pending.fragment].codec
            records.append(pending.record(codec, self._start_of(pending.part), copy=copy))
        return records

    def _loaded_in_flight(
        self, state: Mapping[str, Any], progress: Progress
    ) -> list[tuple[PendingExchange, Record]]:
        """Return the saved exchanges in flight that this schedule would apply.

        ValueError if one does not fit.
        """
        found: dict[int, tuple[PendingExchange, Record]] = {}
        for record in state.get("in_flight", ()):
            check_record(record, self.fragments, progress.steps, progress.position)
            lag = record["facts"]["lag"]
            if not 0 < lag <= self.schedule.every or (self._auto is None and lag != self.lag):
                continue  # it stays taken back
            fragment = record["facts"]["fragment"]
            part = self.positions(fragment)
            if not self._weights.dealt:  # otherwise rank 0 has checked the whole
                self._check_record_tensors(record, self._weights.shapes)
            places: list[int] = []
            for _, some in record["facts"]["settings"]:
                places += some
            if fragment in found or sorted(places) != list(range(len(part))):
                raise ValueError(
                    f"the saved exchanges in flight of fragment {fragment} do not fit together"
                )
            found[fragment] = (self._pending_of(record), record)
        return [found[fragment] for fragment in sorted(found)]

    def _pending_of(self, record: Record) -> PendingExchange:
        """Return the exchange that a checked record describes, without a handle yet."""
        facts = record["facts"]
        tensors = record["tensors"]
        like = self.slow[0]
        key = RoundKey(self.run, facts["round"], facts["fragment"])
        counts = float(facts["counts"])
        sent = Sent(
            contribution=[tensor.to(like, copy=True) for tensor in tensors["sent"]],
            tail=tensors["tail"],
            weight=float(facts["weight"]),
            unweighted_count=facts["even"],
            state=tuple(facts["state"]),
        )
        return PendingExchange(
            weights=self._weights,
            part=self.positions(facts["fragment"]),
            context=RoundContext(key, weight=counts, total=counts),
            sent=sent,
            rules=self.outer.again(facts["settings"]),
            step=facts["step"],
            position=facts["position"],
            lag=facts["lag"],
            absent=bool(facts["absent"]),
            fast=[tensor.to(like, copy=True) for tensor in tensors["fast"]],
            arrived=facts["arrived"],
        )

    def _check_record_tensors(self, record: Record, shapes: Sequence[Shape]) -> None:
        """Raise ValueError unless a saved exchange's tensors fit parameters of these shapes."""
        tensors = record["tensors"]
        fragment = record["facts"]["fragment"]
        own = [torch.Size(shapes[index]) for index in self.positions(fragment)]
        sent = self._sent_shapes(fragment)
        wanted = {
            "sent": sent,
            "tail": _shapes(self._buffers.now()) if fragment == 0 else [],
            "fast": own if isinstance(self.rule, KeepsFast) else [],
            "start": own if START in self.rule_state else [],
        }
        for name, expected in wanted.items():
            if _shapes(tensors[name]) != expected:
                raise ValueError(
                    f"the saved exchange in flight of fragment {fragment} has {name!r} of other "
                    "tensors than this model"
                )
        if tensors["error"] and _shapes(tensors["error"]) != self._residual_shapes(fragment):
            raise ValueError(
                f"the saved exchange in flight of fragment {fragment} has an error of other "
                "tensors than are sent"
            )
        self._load_memory(self._fragments[fragment].codec.fresh(), record)

    def _load_memory(self, codec: Codec, record: Record) -> None:
        """Load the memory of a codec that awaits an outcome. ValueError for another codec's."""
        memory = record["facts"]["codec"]
        if memory is None or not self._weights.first:
            return
        tensors = record["tensors"]
        loaded = {**memory, "error": list(tensors["error"]) or None}
        if tensors["payload"]:
            loaded["payload"] = tensors["payload"][0]
        codec.load_state_dict(loaded)

    def _start_of(self, part: Sequence[int]) -> list[Tensor]:
        """Return the rule's START for these parameters; nothing if it has none."""
        if START not in self.rule_state:
            return []
        return [self.rule_state[START][index] for index in part]

    def _residual_shapes(self, fragment: int) -> list[torch.Size]:
        """Return the shapes of what a codec with error feedback keeps of a fragment."""
        codec = self._fragments[fragment].codec
        times = codec.residuals if isinstance(codec, ErrorFeedback) else 1
        return self._sent_shapes(fragment) * times

    def _sent_shapes(self, fragment: int) -> list[torch.Size]:
        """Return the shapes of the rule's contribution for a fragment, by a trial call.

        It needs memory only if the rule reads values.
        """
        try:
            return self._trial(fragment, torch.device("meta"))
        except RuntimeError:
            return self._trial(fragment, self.slow[0].device)

    @torch.no_grad()
    def _trial(self, fragment: int, device: torch.device) -> list[torch.Size]:
        dtype = self.slow[0].dtype
        shapes = [self._weights.shapes[index] for index in self.positions(fragment)]
        slow = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        fast = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        context = RoundContext(RoundKey("", 0, fragment))
        return _shapes(self.rule.contribution(slow, fast, self.rule.initial(slow), context))


def _copied(tensor: Tensor, copy: bool) -> Tensor:
    return tensor.clone() if copy else tensor


def _shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]
