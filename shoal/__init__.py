"""Train one model together over ordinary internet links: gossip with a random peer in place of an
all-reduce.

    import shoal
    from shoal import NoLoCo

    # or shoal.create(state=model), whose session.link others join by
    with shoal.join("shoal://LINK", state=model) as session:
        opt = NoLoCo(inner, session.exchange(), every=50)
        for batch in loader:
            model(batch).backward()
            # every 50th step also averages with a partner
            opt.step()
            opt.zero_grad()

All public names are here; each is imported when it is first asked for, so ``import shoal`` alone is
quick and loads no torch:

* `shoal.optim`: outer optimizers, codecs, schedules and exchanges, for a loop of one's own without
  a network;
* `create`, `join`, `Session`, `NetworkOptions`: a swarm in a loop of one's own, and `Run`: its
  checkpoints and metrics;
* `Task`, `Shard`: a task for ``shoal up --task FILE:CLASS``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal.optim import __all__ as _OF_OPTIM

if TYPE_CHECKING:
    from shoal.node.integrations.own_loop import Run as Run
    from shoal.node.task import Shard as Shard
    from shoal.node.task import Task as Task
    from shoal.optim.public import *
    from shoal.swarm.membership.membership import NetworkOptions as NetworkOptions
    from shoal.swarm.training.session import Session as Session
    from shoal.swarm.training.session_entry import create as create
    from shoal.swarm.training.session_entry import join as join

_PACKAGES = ("node", "optim", "swarm", "verification")
_HOMES = {  # where those names are that are not in shoal.optim
    "shoal.node.integrations.own_loop": ("Run",),
    "shoal.node.task": ("Shard", "Task"),
    "shoal.swarm.membership.membership": ("NetworkOptions",),
    "shoal.swarm.training.session": ("Session",),
    "shoal.swarm.training.session_entry": ("create", "join"),
}

__all__ = sorted([*_OF_OPTIM, *(name for names in _HOMES.values() for name in names)])


def __getattr__(name: str) -> Any:
    """Import what is asked for: a public name, or one of the four packages."""
    if name in _PACKAGES:
        return importlib.import_module(f"shoal.{name}")
    if name in __all__:
        home = next((module for module, names in _HOMES.items() if name in names), "shoal.optim")
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Name all that ``__getattr__`` finds, for completion in a shell."""
    return sorted([*__all__, *_PACKAGES])
