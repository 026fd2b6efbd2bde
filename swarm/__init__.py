"""The network: identity, discovery, streams, and the exchange of weights between peers. Knows nothing of training loops.

    from shoal import swarm
    with swarm.join(link, state=model) as s:        # or swarm.create(state=model, every=50), whose s.link others join by
        opt = NoLoCo(inner, s.exchange(), every=50)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.swarm.membership.membership import Place
    from shoal.swarm.training.session import Session, create, join

__all__ = ["Place", "Session", "create", "join"]


def __getattr__(name: str) -> Any:
    """Late, for a seed runs without torch, and everybody imports this file."""
    if name in __all__:
        return getattr(importlib.import_module("shoal.swarm.training.session"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
