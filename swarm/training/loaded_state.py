"""What a session's optimizer goes on from when a saved state is loaded into it, as after a crash.

    optimizer = session.optimizer(inner)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])

The swarm has gone on meanwhile. Of the checkpoint's weights and the swarm's, those of the later
round count; in the same round, or before a swarm begins, all of the checkpoint does. What else
counts in each case: docs/internals.md, "A peer that comes back".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.optim import OuterOptimizer, Ranks

PLACE = ("steps", "position", "length", "round", "tokens", "sent_at", "applied", "arrivals")
"""What says how far an optimizer is: in its schedule, and among the rounds of its swarm."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedState:
    """What is loaded in place of a saved state."""

    state: dict[str, Any]
    from_swarm: bool = False
    """True if the swarm's weights count."""
    listens: bool = False
    """True if this node's next round is to have weight 0."""
    said: str = ""
    """What to tell the user once it is loaded."""


class StateLoader:
    """Loads saved states into a session's optimizer, each between `begin` and `end`."""

    def __init__(self) -> None:
        self.began_at = 0
        """The swarm's round when this node took over its weights."""
        self._loaded: LoadedState | None = None

    def begin(
        self, opt: OuterOptimizer, saved: dict[str, Any], ranks: Ranks | None
    ) -> dict[str, Any]:
        """Return what to load in place of ``saved``, the same in all ``ranks`` of this peer."""
        began_at = self.began_at
        round = opt.round
        steps = opt.steps
        if ranks is not None:  # rank 0 alone is in the network
            began_at, round, steps = ranks.agreed((began_at, round, steps))
        swarm_round = round if steps > 0 else began_at
        self._loaded = of_later_round(opt, saved, swarm_round)
        return self._loaded.state

    def end(self, opt: OuterOptimizer) -> bool:
        """Finish the load; return False if none was begun."""
        loaded = self._loaded
        self._loaded = None
        if loaded is None:
            return False
        settle(opt, loaded)
        return True


def of_later_round(opt: OuterOptimizer, saved: Mapping[str, Any], swarm_round: int) -> LoadedState:
    """Return what to load into ``opt``, which is in a swarm at ``swarm_round``.

    ValueError if ``saved`` is not an outer optimizer's state.
    """
    whole = opt.whole_form(saved)
    saved_round = int(whole["round"])
    if saved_round == swarm_round or (saved_round > swarm_round and _is_followed(opt, swarm_round)):
        return LoadedState(dict(saved))
    own = opt.whole_state()
    rank = {"rank": saved["rank"]} if "rank" in saved else {}
    here = opt.round // opt.fragments
    there = saved_round // opt.fragments
    if saved_round < swarm_round:
        state = own | {"inner": whole["inner"], "in_flight": []} | rank
        said = (
            f"the swarm is at round {here}, beyond the saved {there}: its weights count, and of "
            "what is loaded the inner optimizer's state"
        )
        return LoadedState(state, from_swarm=True, listens=opt.listens, said=said)
    place = {name: own[name] for name in PLACE}
    said = (
        f"the saved round {there} is beyond the swarm's: goes on from the saved weights in its "
        f"round {here}"
    )
    return LoadedState(whole | place | {"in_flight": []} | rank, said=said)


def _is_followed(opt: OuterOptimizer, swarm_round: int) -> bool:
    """Return True if others come to a later round than the swarm's ``swarm_round``, or do not train
    yet.
    """
    return swarm_round == 0 or opt.anchored


def settle(opt: OuterOptimizer, loaded: LoadedState) -> None:
    """Finish the load: the model gets the swarm's weights if these count, whether it is loaded
    before or after this.
    """
    if loaded.from_swarm:
        opt.begin_from_slow()
    if loaded.listens:
        opt.listen()
    if loaded.said:
        log.warning("%s", loaded.said)
