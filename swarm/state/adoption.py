"""The round in which a node begins that takes over others' weights in the middle of a run."""

from __future__ import annotations

import itertools

from shoal.optim import OuterOptimizer
from shoal.optim.schedule.schedule import Send
from shoal.swarm.state.snapshot import State


def in_step(opt: OuterOptimizer, state: State) -> int:
    """Return the first round, not before that of ``state``, in which the swarm sends the fragment that ``opt`` sends next.

    Rounds of one fragment are as many apart as there are fragments. In another round nobody else would send it.
    """
    fragments = len(state.applied)
    if fragments < 2:
        return state.round
    later = itertools.chain.from_iterable(opt.schedule.at(opt.position + number) for number in range(1, opt.schedule.every + 1))
    fragment = next((action.fragment for action in later if isinstance(action, Send)), 0)
    last = state.applied[fragment]
    return state.round + ((last if last >= 0 else fragment) - state.round) % fragments
