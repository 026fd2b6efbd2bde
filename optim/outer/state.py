"""State of an outer optimizer: saving, loading, and adoption of another peer's weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy as shallow
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal.optim.codecs.base import FLOAT32, Codec, Rejectable, Resendable, Shape
from shoal.optim.exchange.base import Exchange, RoundKey
from shoal.optim.outer.averaged import AveragedBuffers, Exclude, excluded, trained
from shoal.optim.outer.checks import (
    check_given,
    check_keys,
    check_rank,
    check_record,
    check_shapes,
    groups_of,
    settings_changed,
    settings_of,
)
from shoal.optim.outer.contribution_weight import Weight, equal
from shoal.optim.outer.fragments import Fragment, codecs_of, positions
from shoal.optim.outer.in_flight import InFlight, PendingExchange, Record, RoundInfo, Sent
from shoal.optim.outer.inner import Inner, Wrapper, all_parameters, as_one
from shoal.optim.outer.outer_groups import SETTINGS, OuterGroups
from shoal.optim.outer.rule import (
    AHEAD,
    START,
    Anchored,
    KeepsFast,
    RoundContext,
    Rule,
    State,
    assign,
    kind_of,
    same_memory,
)
from shoal.optim.outer.torch_form import TorchForm, check_names, in_order
from shoal.optim.outer.watch import LoopWatch, Unfrozen
from shoal.optim.outer.weights import ModelWeights, Processes
from shoal.optim.schedule.auto_lag import AutoLag
from shoal.optim.schedule.round_length import RoundLength, Steps
from shoal.optim.schedule.schedules import Delayed, Every, Schedule, Streaming


class OuterState(Wrapper):
    """Base of ``OuterOptimizer``: what it is made of, and the state that outlives a step, with what
    is in flight.
    """

    restarts = 0
    """Times that ``restart_from_model`` was called."""

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
            schedule = replace(
                schedule, lag=min(1, schedule.every - 1)
            )  # the processes of a peer would apply at different steps
        self.inner, self.exchange, self.rule, self.schedule = inner, exchange, rule, schedule
        self._auto = AutoLag(schedule.every) if getattr(schedule, "lag", 0) == "auto" else None
        codec = codec or exchange.codec or FLOAT32
        self.run, self.on_round, self.weight = run, on_round, weight
        self.length = length or Steps()
        every, own = all_parameters(inner), excluded(exclude, inner, model)
        self._params = trained(inner, exchange, own, model)
        unfrozen = Unfrozen(model, [p for p in every if p not in own], exclude)
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "the outer optimizer is made under torch.inference_mode(), where nothing can be "
                "trained: make it outside"
            )
        if not self._params:
            raise ValueError(
                "the outer optimizer averages floating-point parameters that require a gradient, "
                "got none"
            )
        everything = list(range(len(self._params)))
        self._parts = [everything] if fragments is None else positions(fragments, self._params)
        if isinstance(schedule, Every | Streaming | Delayed) and len(self._parts) > getattr(
            schedule, "fragments", 1
        ):
            raise ValueError(
                f"this schedule sends one fragment, so of {len(self._parts)} fragments= most would "
                "never be averaged"
            )
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
        """The slow weights as an optimizer, whose groups hold the outer ``lr`` and ``momentum``,
        for schedulers of torch.
        """
        self._codecs = codecs_of(self._parts, codec, self._params, model)
        self.steps = 0
        self.position = 0
        """In the schedule: ``steps``, unless rounds are of another ``length``."""
        self.round = 0
        """Number of the next exchange; a peer that fell behind may set it forward to average with
        the others again.
        """
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
        self._watch = LoopWatch(inner, self._weights, unfrozen)
        self.exchange.attach(self)
        self._watch.note_weights()

    def _check_weights(self) -> None:
        """Warn, once in all, if the model's weights were changed since they were noted."""
        if not self._watch.weights_changed():
            return
        if self.steps == 0 and self._weights.holds_slow():
            return  # such as DDP, which copies equal weights
        if self._watch.loaded_count:
            self._watch.warn_of_weights(stacklevel=4)
        else:
            self._start_from_slow()
            self._watch.note_weights()

    def _check_not_averaged(self, what: str) -> None:
        if self._averaged:
            raise RuntimeError(
                f"{what}() within averaged() would be lost: the block ends with the weights that "
                "it began with"
            )

    def _inside(self) -> Sequence[torch.optim.Optimizer]:
        return [self.inner] if "inner" in vars(self) else []

    @property
    def _form(self) -> TorchForm:
        every = all_parameters(self.inner)
        return TorchForm(every, self._params, self._parts, self._weights.coarse, self._sent_shapes)

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Return everything needed to go on, in torch's form (`shoal.optim.outer.torch_form`).

        Exchanges in flight are begun anew by a resumed run, with the same key, contribution and
        weight, so that it goes on bit by bit as if it had not been interrupted, if the others do so
        too or had no part in them. Of sharded parameters, whose parts no rank has together, they
        are taken back instead: what was sent is sent again with the next contribution. So it is
        where a state is loaded without their entries (torch.distributed.checkpoint, which reads
        what a new optimizer has too). The outer tensors of sharded parameters are DTensors, so
        torch.distributed.checkpoint and its ``get_optimizer_state_dict`` save and restore them,
        also into another layout. In a peer of several ranks it is this rank's part in lists, which
        the same rank of as many loads again; ``shoal.optim.ranks.orders.whole_state`` gathers what
        one process would have. ``copy=False``: slow weights, the rule's state and what is in flight
        are the optimizer's own tensors, for callers that copy or write them at once.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        own, rank = self.whole_state(copy=copy), self._weights.rank
        state = self._form.pack(own) if rank is None else own | {"rank": rank}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def whole_state(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the same state in lists, in the order of ``parameters``: the form of nodes'
        checkpoints.

        Of sharded parameters, and in a peer of several ranks, this process's part only.
        """
        own = dict.fromkeys(self.rule_state, copy) | (
            {START: True} if START in self.rule_state else {}
        )
        rule = {
            name: [_copied(tensor, own[name]) for tensor in tensors]
            for name, tensors in self.rule_state.items()
        }
        # All else is as if what is in flight were taken back, for loaders that cannot begin it
        # anew.
        begun = self._records(copy)
        for pending in self._in_flight if START in rule else ():
            for index, motion in zip(pending.part, pending.sent.contribution, strict=True):
                rule[START][index].add_(motion)
        return {
            "inner": self.inner.state_dict(),
            "slow": [_copied(tensor, copy) for tensor in self.slow],
            "rounding": {
                index: _copied(tensor, copy) for index, tensor in self._weights.rounding.items()
            },
            "rule": rule,
            "codecs": [self._codec_state(fragment) for fragment in range(self.fragments)],
            "steps": self.steps,
            "position": self.position,
            "length": self.length.state_dict(),
            "round": self.round,
            "tokens": self.tokens,
            "sent_at": [list(pair) for pair in self._sent_at],
            "applied": list(self.applied),
            "arrivals": [] if self._auto is None else self._auto.state(),
            "kind": kind_of(self.rule),
            "settings": settings_of(self.rule),
            "schedule": repr(self.schedule),
            "groups": self.outer.settings(),
            "in_flight": begun,
            "order": self._form.order,
            "names": list(self._params.names),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` or ``whole_state`` returned (restoring the model's own
        weights is up to the caller).

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
        rule_state, codecs = (
            self._weights.housed(self._checked_rule(state, self.slow)),
            self._loaded_codecs(state),
        )
        counts = {
            name: int(state.get(name, default))
            for name, default in (("steps", 0), ("round", 0), ("tokens", 0))
        }
        position, length = int(state.get("position", counts["steps"])), state.get("length", {})
        begun = self._loaded_in_flight(state, counts["steps"], position)
        arrivals = [int(positions) for positions in state.get("arrivals", ())]
        shallow(self.length).load_state_dict(length, counts["tokens"])
        self.inner.load_state_dict(
            state["inner"]
        )  # nothing has been changed so far, nor has this if it raises
        self.outer.restore(groups)
        self.length.load_state_dict(length, counts["tokens"])
        self._codecs = codecs
        assign(self.slow, state["slow"])
        self._weights.rounding = {
            int(i): t.to(self.slow[0], copy=True) for i, t in state.get("rounding", {}).items()
        }
        # a checkpoint from before the first round may lack state, which is then the initial one
        self.rule_state = rule_state
        for name, tensors in state["rule"].items():
            assign(rule_state[name], tensors)
        for fragment in range(len(self._parts)):
            self._in_flight.drop(fragment, self._codecs[fragment])
        self.steps, self.round, self.tokens, self.position = (
            counts["steps"],
            counts["round"],
            counts["tokens"],
            position,
        )
        self.applied = [int(round) for round in state.get("applied", self.applied)]
        self._sent_at = [
            (int(steps), int(tokens)) for steps, tokens in state.get("sent_at", self._sent_at)
        ]
        if self._auto is not None:
            self._auto.restore(arrivals)
        for pending, record in begun:
            if START in rule_state:
                assign(self._start_of(pending.part), record["tensors"]["start"])
            self._load_memory(self._codecs[pending.fragment], record)
            self._in_flight.add(pending)
        self._resumed = True
        self._watch.forget_weights()  # the model may be loaded before or after this
        self._listening.clear()  # what was adopted before and is to be trained first is gone
        self._watch.loaded_count = True
        changed = settings_changed(state, self.rule, self.schedule, SETTINGS)
        if changed is not None:
            warnings.warn(
                f"{changed}: these outer settings stay those of the constructor", stacklevel=2
            )
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def whole_form(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state of either form in that of ``whole_state``.

        ValueError if it is not an outer optimizer's.
        """
        return check_keys(self._whole(state))

    def _whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole state of a saved one of either form, in this optimizer's order of
        parameters.

        ValueError if it has other parameters, or is one rank's part of another order.
        """
        form = self._form
        whole = dict(state)
        if "param_groups" in state:
            whole = form.unpack(state, self.rule_state)
        order = whole.get("order", form.order)
        check_names(order, whole.get("names", ()), form.order, self._params.names)
        if order == form.order:
            return whole
        if sorted(order) != sorted(form.order) or whole.get("rank") is not None:
            raise ValueError(
                "the saved outer state is of other parameters, or of another order of them: train "
                "the same ones of the model, by "
                "an inner optimizer of the same groups"
            )
        return in_order(whole, form.order, self._parts)

    def _checked_rule(self, state: Mapping[str, Any], slow: Sequence[Tensor]) -> State:
        """Return the rule's initial state for these slow weights.

        ValueError unless what was saved fits it, and the fragments.
        """
        rule_state = self.rule.initial(slow)
        check_shapes("the saved outer state 'slow'", state["slow"], slow)
        for name, tensors in state["rule"].items():
            if name not in rule_state:
                raise ValueError(
                    f"the saved outer state has {name!r}, which this method does not use: resume "
                    "with the same method"
                )
            check_shapes(f"the saved outer state {name!r}", tensors, rule_state[name])
        for index, tensor in state.get("rounding", {}).items():
            check_shapes(
                "the saved outer state 'rounding'", [tensor], slow[int(index) : int(index) + 1]
            )
        was, now = state.get("kind"), kind_of(self.rule)
        if state["rule"] and was is not None and not same_memory(was, now):
            raise ValueError(
                f"the saved outer state is of {was}, not of {now}: resume with the same method"
            )
        for name in ("sent_at", "applied", "codecs"):
            if state.get(name) and len(state[name]) != len(self._parts):
                raise ValueError(
                    f"the saved outer state has {len(state[name])} fragments, this optimizer "
                    f"{len(self._parts)}"
                )
        return rule_state

    def _loaded_codecs(self, state: Mapping[str, Any]) -> list[Codec]:
        """Return the fragments' codecs with the saved memory.

        ValueError for another codec's, or one of other tensors.
        """
        codecs: list[Codec] = []
        for fragment, memory in enumerate(state.get("codecs") or ()):
            codecs.append(codec := self._codecs[fragment].fresh())
            codec.load_state_dict(memory)
            error = memory.get("error")
            if error is not None and [tensor.shape for tensor in error] != self._sent_shapes(
                fragment
            ):
                raise ValueError(
                    f"the saved memory of the codec {codec.name} is of other tensors than are sent "
                    "now"
                )
        return codecs or self._codecs

    @property
    def listens(self) -> bool:
        """True if the next contribution of a fragment has weight 0 (`listen`)."""
        return bool(self._listening)

    @property
    def codec(self) -> Codec:
        """That of the first fragment; each of the others has its own of the same name."""
        return self._codecs[0]

    @property
    def fragments(self) -> int:
        return len(self._parts)

    def positions(self, fragment: int) -> list[int]:
        """Return the positions of a fragment's parameters in ``slow`` and in the rule's state."""
        return self._parts[fragment]

    def slow_of(self, fragment: int) -> list[Tensor]:
        return [self.slow[index] for index in self._parts[fragment]]

    def sketch_of(self, fragment: int) -> tuple[float, ...]:
        """Return the ``sketch`` of the slow weights of a fragment, of all ranks (each calls it)."""
        return self._weights.sketch(self._parts[fragment])

    def projection_of(self, fragment: int) -> tuple[float, ...]:
        """Return the ``projection`` of the slow weights of a fragment; empty in a peer of several
        ranks.

        Empty too for the number after the last fragment's, which the mean at the end has
        (`finish`).
        """
        return (
            self._weights.projection(self._parts[fragment]) if fragment < len(self._parts) else ()
        )

    @property
    def shapes(self) -> Sequence[Shape]:
        """The shapes of the averaged parameters; in a peer of several ranks a tensor of ``slow``
        that another rank has is empty.
        """
        return self._weights.shapes

    def in_flight(self, fragment: int) -> list[int]:
        """Return the rounds in which a fragment was sent that are not applied yet."""
        return [pending.context.key.round for pending in self._in_flight.of(fragment)]

    @property
    def anchored(self) -> bool:
        """True if all peers of a group have the same slow weights, so that a peer that missed a
        round must adopt them.
        """
        return isinstance(self.rule, Anchored)

    @property
    def shared(self) -> State:
        """The part of the rule's state that is the same on all peers of a group, which a newcomer
        adopts with the slow weights.
        """
        names = self.rule.shared if isinstance(self.rule, Anchored) else ()
        return {name: self.rule_state[name] for name in names if name in self.rule_state}

    @property
    def shared_shapes(self) -> dict[str, list[Shape]]:
        return {
            name: [
                () if tensor.dim() == 0 else shape
                for tensor, shape in zip(tensors, self.shapes, strict=True)
            ]
            for name, tensors in self.shared.items()
        }

    @torch.no_grad()
    def restart_from_model(self) -> None:
        """Begin anew from the weights that the model holds now: call it after loading others on
        purpose.

        The slow weights become the model's; the rule's state (momentum, start) and the codecs'
        memory what they are at first. Exchanges in flight are dropped: what they sent was learnt
        from the weights before. Steps, round, tokens, the outer settings and the inner optimizers'
        state go on. All peers should do so between the same rounds, with the same weights: where
        all hold equal ones the larger part's count, and in gossip one alone is mixed with the
        others.

        Raises:
            RuntimeError: within ``averaged``.
        """
        self._check_not_averaged("restart_from_model")
        for fragment, codec in enumerate(self._codecs):
            self._in_flight.drop(fragment, codec)
        self._codecs = [codec.fresh() for codec in self._codecs]
        self._weights.begin_anew()
        for name, tensors in self.rule.initial(self.slow).items():
            assign(self.rule_state[name], tensors)
        self._sent_at = [(self.steps, self.tokens)] * len(self._parts)
        self._resumed = False
        self.restarts += 1
        self._watch.loaded_count = True
        self._watch.note_weights()

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
        """Adopt slow weights, round number and ``shared`` state of a running swarm; return the
        adopted fragments.

        ``into_model`` also starts the fast weights there, as for a joiner. With ``applied`` (of the
        source peer) only those fragments are adopted whose last round there is not older than here,
        and exchanges of later rounds stay in flight: else a round's outcome would be missing or
        applied twice. Other exchanges in flight are cancelled.

        The fast weights stay as they are, so the next contribution is this peer's whole difference
        to the swarm: right after one missed round, whose progress is so contributed late. In the
        fragments ``rebase`` they move with the slow ones, so that the next contribution is only
        what was learnt since the last one: right after several rounds apart. Otherwise the swarm
        would be pulled back, and, if all contributions were refused, each outer step without a
        partner would be repeated and grow.

        Raises:
            ValueError: names or shapes do not fit; nothing is changed then.
            RuntimeError: within ``averaged``.
        """
        self._check_not_averaged("adopt")
        self._check_weights()
        check_given(slow, shared or {}, applied, self.slow, self.shared, len(self._parts))
        every = range(len(self._parts))
        taken = (
            list(every)
            if applied is None or into_model
            else [p for p in every if applied[p] >= self.applied[p]]
        )
        for fragment in taken:
            moves = fragment in rebase and not into_model
            if moves:
                self._weights.read(self._parts[fragment])
            for i in self._parts[fragment]:
                # The model goes on from its weights, so their rounding errors stay the same.
                if not into_model and not moves:
                    self._weights.keep_rounding(i)
                if moves:
                    self.move(i, slow[i])
                self.slow[i].copy_(slow[i])
                for name, tensors in (shared or {}).items():
                    self.rule_state[name][i].copy_(tensors[i])
            if moves:
                self._weights.restart(self._parts[fragment])
            # Unless all hold the same, what was sent before is of another model than the one that
            # goes on from here.
            stays = applied is not None and (self.anchored or not into_model)
            self._in_flight.drop(
                fragment,
                self._codecs[fragment],
                applied[fragment] if applied and stays else math.inf,
            )
            if applied is not None:
                self.applied[fragment] = applied[fragment]
        self.round = round
        if into_model:
            self._codecs = [codec.fresh() for codec in self._codecs]
            self._start_from_slow()
            for ahead in self.rule_state.get(
                AHEAD, ()
            ):  # it is not in these weights, so no mean may take it back
                ahead.zero_()
        self._watch.note_weights()
        return taken

    def _start_from_slow(self) -> None:
        """Let training, and the rule, go on from the slow weights."""
        assign(self._weights.stage(self._weights.everything), self.slow)
        self._weights.restart(self._weights.everything)
        if START in self.rule_state:
            assign(self.rule_state[START], self.slow)

    @torch.no_grad()
    def begin_from_slow(self) -> None:
        """Put the slow weights into the model, and again if others are loaded into it before the
        next step.

        For a state that was loaded while the swarm's weights count, whichever of model and
        optimizer the caller loads first. Where other code takes the inner steps, only what was
        loaded before this is replaced.
        """
        self._start_from_slow()
        self._watch.note_weights()
        self._watch.loaded_count = False

    def go_back(self, round: int) -> None:
        """Go on in an earlier ``round``, where the other peers are; what is in flight ends in its
        own.
        """
        self.round = round
        self.applied = [min(applied, round - 1) for applied in self.applied]

    @torch.no_grad()
    def move(self, index: int, slow: Tensor) -> None:
        """Replace the slow weights of one parameter; its staged fast weights and its start move by
        as much.
        """
        by = slow.to(self.slow[index].device) - self.slow[index]
        for follows in (self._weights.fast, self.rule_state.get(START, ())):
            if follows:
                follows[index].add_(by)
        self.slow[index].copy_(slow)

    def _codec_state(self, fragment: int) -> dict[str, Any]:
        """Return the state of a fragment's codec as if the contribution whose outcome is not known
        yet had been refused.
        """
        unsent = next(
            (pending for pending in self._in_flight.of(fragment) if not pending.finished), None
        )
        codec = self._codecs[fragment]
        return codec.state_dict() if unsent is None else unsent.state_of(codec)

    @property
    def lag(self) -> int:
        """Positions between sending and applying the next exchange: 0 if it is waited for at once,
        ``every`` if a whole round.
        """
        if self._auto is not None:
            return self._auto.lag
        return (
            self.schedule.every
            if isinstance(self.schedule, Delayed)
            else int(getattr(self.schedule, "lag", 0))
        )

    @property
    def lag_auto(self) -> bool:
        return self._auto is not None

    def _records(self, copy: bool) -> list[Record]:
        """Return the exchanges in flight to be saved; those that a codec could not send again as
        they were are taken back.
        """
        if isinstance(self._codecs[0], Rejectable) and not isinstance(self._codecs[0], Resendable):
            return []
        return [
            p.record(self._codecs[p.fragment], self._start_of(p.part), copy=copy)
            for p in self._in_flight
        ]

    def _loaded_in_flight(
        self, state: Mapping[str, Any], steps: int, position: int
    ) -> list[tuple[PendingExchange, Record]]:
        """Return the saved exchanges in flight that this schedule would apply.

        ValueError if one does not fit.
        """
        exchanges: dict[int, tuple[PendingExchange, Record]] = {}
        for record in state.get("in_flight", ()):
            check_record(record, len(self._parts), steps, position)
            facts, tensors = record["facts"], record["tensors"]
            fragment, lag = facts["fragment"], facts["lag"]
            if not 0 < lag <= self.schedule.every or (self._auto is None and lag != self.lag):
                continue  # it stays taken back
            part = self._parts[fragment]
            if not self._weights.dealt:  # otherwise rank 0 has checked the whole
                self._check_record_tensors(record, self._weights.shapes)
            if fragment in exchanges or sorted(
                place for _, places in facts["settings"] for place in places
            ) != [*range(len(part))]:
                raise ValueError(
                    f"the saved exchanges in flight of fragment {fragment} do not fit together"
                )
            key = RoundKey(self.run, facts["round"], fragment)
            context = RoundContext(key, weight=float(facts["counts"]), total=float(facts["counts"]))
            moved = {
                name: [tensor.to(self.slow[0], copy=True) for tensor in tensors[name]]
                for name in ("sent", "fast")
            }
            sent = Sent(
                moved["sent"],
                tensors["tail"],
                float(facts["weight"]),
                facts["even"],
                tuple(facts["state"]),
            )
            exchanges[fragment] = (
                PendingExchange(
                    self._weights,
                    part,
                    context,
                    sent,
                    self.outer.again(facts["settings"]),
                    facts["step"],
                    facts["position"],
                    lag,
                    absent=bool(facts["absent"]),
                    fast=moved["fast"],
                    arrived=facts["arrived"],
                ),
                record,
            )
        return [exchanges[fragment] for fragment in sorted(exchanges)]

    def _check_record_tensors(self, record: Record, shapes: Sequence[Shape]) -> None:
        """Raise ValueError unless the tensors of a saved exchange fit parameters of these
        shapes.
        """
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
                    f"the saved exchange in flight of fragment {fragment} has {name!r} of other "
                    "tensors than this model"
                )
        if tensors["error"] and [tensor.shape for tensor in tensors["error"]] != wanted["sent"]:
            raise ValueError(
                f"the saved exchange in flight of fragment {fragment} has an error of other "
                "tensors than are sent"
            )
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
        """Return the shapes of the rule's contribution for a fragment, by a trial call, which needs
        memory if it reads values.
        """
        try:
            return self._trial(fragment, torch.device("meta"))
        except RuntimeError:
            return self._trial(fragment, self.slow[0].device)

    @torch.no_grad()
    def _trial(self, fragment: int, device: torch.device) -> list[torch.Size]:
        shapes = [self._weights.shapes[index] for index in self._parts[fragment]]
        slow, fast = (
            [torch.zeros(shape, dtype=self.slow[0].dtype, device=device) for shape in shapes]
            for _ in range(2)
        )
        sent = self.rule.contribution(
            slow, fast, self.rule.initial(slow), RoundContext(RoundKey("", 0, fragment))
        )
        return [tensor.shape for tensor in sent]


def _copied(tensor: Tensor, copy: bool) -> Tensor:
    return tensor.clone() if copy else tensor
