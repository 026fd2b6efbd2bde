"""Migration of saved outer state to another method, codec, number of fragments, or length of rounds.

State with the same meaning in both is taken over; the rest starts afresh and is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.optim.outer.state import OuterState
from shoal.optim.outer.state_checks import check_shapes
from shoal.optim.rules.base import START, State, kind_of, same_memory

NAMES = {
    "momentum": "the outer momentum",
    "offset": "the outer momentum",
    "eager": "the record of updates applied before their mean",
    "share": "the share in the last mean",
    "moved": "the length of the last outer step",
    "usual": "the usual length of a mean",
}
"""Descriptions of the rules' state. (Without ``START`` contributions are measured from the slow weights: nothing is lost.)"""


def migrate_state(
    opt: OuterState,
    saved: Mapping[str, Any],
    *,
    kind: str | None = None,
    groups: bool = True,
    methods: tuple[str, str] | None = None,
) -> list[str]:
    """Load the ``state_dict`` of any outer optimizer of the same model, and return a list of what could not be used.

    Slow weights, the inner optimizer's state (of the same kind of optimizer), steps, tokens and the number of the round are always
    taken over (restoring the model's own weights is up to the caller); the state of a rule or a codec if it means the same; the
    position in the round if the schedule is the same, else a round begins. What was in flight is taken back, and sent again with
    the next contribution: its mean would be that of other settings.

    Args:
        opt: a new optimizer, before any step.
        saved: the state that ``state_dict`` or ``whole_state`` returned.
        kind: kind of the rule that saved it (``kind_of``), if an older version did not save that.
        methods: names of the method that saved it and of the present one; by default the kinds of their rules.
        groups: take over the inner optimizer's settings (learning rates) too, not only its state for each parameter.

    Returns:
        What was dropped, as phrases such as "the outer momentum of diloco (the method is noloco now)"; empty if nothing was.

    Raises:
        ValueError: the shapes are those of another model; nothing is changed then.
    """
    saved = opt._without_frozen(opt._whole(saved))
    check_shapes("the saved outer state 'slow'", saved["slow"], opt.slow)
    dropped: list[str] = []
    state: dict[str, Any] = {
        "inner": _inner(opt.inner.state_dict(), saved["inner"], groups, dropped),
        "slow": saved["slow"],
        "rounding": saved.get("rounding", {}),
        "rule": _rule(opt, saved, saved.get("kind", kind), methods, dropped),
        "codecs": _codecs(opt, saved, dropped),
        "steps": saved["steps"],
        "tokens": saved.get("tokens", 0),
        "round": saved["round"],
        "arrivals": saved.get("arrivals", []),
        "applied": [int(saved["round"]) - 1] * opt.fragments,  # nothing is in flight
    }
    if saved.get("schedule") == repr(opt.schedule):
        state |= {name: saved[name] for name in ("position", "length", "sent_at") if name in saved}
    else:
        state["position"] = int(saved["steps"]) // opt.schedule.every * opt.schedule.every
        state["sent_at"] = [[state["steps"], state["tokens"]]] * opt.fragments
    opt.load_state_dict(state)
    return dropped


def _inner(mine: dict[str, Any], theirs: Mapping[str, Any], groups: bool, dropped: list[str]) -> dict[str, Any]:
    """Return the inner optimizer's state to load. ValueError if it has another number of parameters."""
    own, saved = mine["param_groups"], theirs["param_groups"]
    sizes, others = ([len(group["params"]) for group in groups] for groups in (own, saved))
    if sum(sizes) != sum(others):
        raise ValueError("the saved inner optimizer has other parameter groups")
    # Another version of torch may add a setting; another optimizer both lacks settings and has others, or groups of its own (Muon).
    if sizes != others or not all(set(a) <= set(b) or set(b) <= set(a) for a, b in zip(_plain(own), _plain(saved), strict=True)):
        dropped.append("the inner optimizer's state (it is another optimizer now)")
        return mine
    merged = [{**a, **b} if groups else {**b, **a} for a, b in zip(own, saved, strict=True)]
    return {"state": theirs["state"], "param_groups": merged}


def _plain(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups without the setting that schedulers add."""
    return [{name: value for name, value in group.items() if name != "initial_lr"} for group in groups]


def _rule(opt: OuterState, saved: Mapping[str, Any], was: str | None, methods: tuple[str, str] | None, dropped: list[str]) -> State:
    now, own = kind_of(opt.rule), opt.rule.initial(opt.slow)
    kept: State = {}
    lost = []
    for name, tensors in saved["rule"].items():
        same_meaning = was == now or (name == "momentum" and was is not None and same_memory(was, now))
        if same_meaning and name in own and _fit(tensors, own[name]):
            kept[name] = tensors
        elif name != START and any(bool(tensor.any()) for tensor in tensors):
            lost.append(NAMES.get(name, repr(name)))
    if START in own and START not in kept:
        kept[START] = saved["slow"]
    if lost:
        before, present = methods or (was or "a method that was not noted", now)
        why = f"the method is {present} now" if before != present else "it is not used any more"
        dropped.append(f"{', '.join(lost)} of {before} ({why})")
    return kept


def _fit(tensors: Sequence[Tensor], own: Sequence[Tensor]) -> bool:
    return [tensor.shape for tensor in tensors] == [tensor.shape for tensor in own]


def _codecs(opt: OuterState, saved: Mapping[str, Any], dropped: list[str]) -> list[dict[str, Any]]:
    """Return the codecs' states, one for each fragment, or none at all."""
    memories: list[dict[str, Any]] = list(saved.get("codecs", []))
    if not any(memories):
        return []
    names = sorted({str(memory.get("codec")) for memory in memories})
    if len(memories) != opt.fragments:
        why = f"there are {opt.fragments} fragments now, not {len(memories)}"
    elif not all(_loads(opt, fragment, memory) for fragment, memory in enumerate(memories)):
        why = f"the codec is {opt.codec.name} now" if names != [opt.codec.name] else "other tensors are sent now"
    else:
        return memories
    if any(_holds(memory) for memory in memories):
        dropped.append(f"the memory of the codec {' and '.join(names)} ({why})")
    return []


def _loads(opt: OuterState, fragment: int, memory: dict[str, Any]) -> bool:
    """Return True if the fragment's codec can load that state and go on with the tensors that are sent now."""
    try:
        opt._loaded_codec(fragment, memory)
    except (ValueError, KeyError, TypeError):
        return False
    return True


def _holds(memory: Mapping[str, Any]) -> bool:
    """Return True if dropping this state of a codec loses information."""
    error = memory.get("error")
    return bool(memory.get("choice")) or any(bool(tensor.any()) for tensor in error or [])
