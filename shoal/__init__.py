"""Train one model together over ordinary internet links: gossip with a random peer in place of an all-reduce.

    import shoal
    from shoal import NoLoCo

    with shoal.join("shoal://LINK", state=model) as session:     # or shoal.create(state=model), whose session.link others join by
        opt = NoLoCo(inner, session.exchange(), every=50)
        for batch in loader:
            model(batch).backward()
            opt.step()                                           # every 50th step also averages with a partner
            opt.zero_grad()

All public names are here; each is imported when it is first asked for, so ``import shoal`` alone is quick and loads no torch:

* `shoal.optim`: outer optimizers, codecs, schedules and exchanges, for a loop of one's own without a network;
* `create`, `join`, `Session`, `NetworkOptions`: a swarm in a loop of one's own, and `Run`: its checkpoints and metrics;
* `Task`, `Shard`: a task for ``shoal up --task FILE:CLASS``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.node.integrations.own_loop import Run
    from shoal.node.task import Shard, Task
    from shoal.optim import *  # its __all__, which the list below repeats
    from shoal.swarm.membership.membership import NetworkOptions
    from shoal.swarm.training.session import Session, create, join

_PACKAGES = ("node", "optim", "swarm", "verification")
_HOMES = {  # where those names are that are not in shoal.optim
    "shoal.node.integrations.own_loop": ("Run",),
    "shoal.node.task": ("Shard", "Task"),
    "shoal.swarm.membership.membership": ("NetworkOptions",),
    "shoal.swarm.training.session": ("Session", "create", "join"),
}

__all__ = [
    "BFLOAT16",
    "CO2",
    "E3M0",
    "FLOAT16",
    "FLOAT32",
    "INT8",
    "METHODS",
    "SIGN",
    "SPARTA",
    "TOPK2",
    "Alone",
    "Apply",
    "AutoCodec",
    "CO2Rule",
    "Codec",
    "Contribution",
    "DecoupledDiLoCo",
    "DecoupledRule",
    "Delayed",
    "DiLoCo",
    "DiLoCoRule",
    "Distributed",
    "Eager",
    "EagerRule",
    "ErrorFeedback",
    "Every",
    "Exchange",
    "Faults",
    "GASLoC",
    "GASLoCRule",
    "Handle",
    "LocalSGD",
    "LocalSGDRule",
    "Mean",
    "Method",
    "NetworkOptions",
    "NoLoCo",
    "NoLoCoRule",
    "Options",
    "OuterOptimizer",
    "Ranks",
    "RoundContext",
    "RoundInfo",
    "RoundKey",
    "RoundLength",
    "Rule",
    "Run",
    "Schedule",
    "Seconds",
    "Send",
    "Session",
    "Shard",
    "Simulation",
    "SparseLoCo",
    "SpartaRule",
    "Stepped",
    "Steps",
    "Streaming",
    "StreamingDiLoCo",
    "Task",
    "Tokens",
    "by_rate",
    "by_steps",
    "by_tokens",
    "candidates",
    "codec_named",
    "config_diff",
    "create",
    "equal",
    "float_buffers",
    "groups",
    "hidden_matrices",
    "join",
    "method_named",
    "methods_with",
    "muon",
    "order",
    "partner_of",
    "rda",
    "strided",
    "weighted_mean",
]


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
