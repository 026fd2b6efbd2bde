"""Outer optimizers for low-communication training, as pure mathematics on tensors: no clock, no
socket, no global random numbers.

    inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
    opt = NoLoCo(inner, exchange, every=25)
    for batch in batches:
        loss(model, batch).backward()
        opt.step()                               # every 25th step also averages with a random peer
        opt.zero_grad()
    with opt.averaged():                         # evaluate with the slow weights
        evaluate(model)

The exchange is ``Alone()``, a simulation's, or that of a session in a swarm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal.optim.methods import METHODS as METHODS

if TYPE_CHECKING:
    from shoal.optim.public import *

__all__ = sorted(
    {
        "BFLOAT16",
        "E3M0",
        "FLOAT16",
        "FLOAT32",
        "INT8",
        "SIGN",
        "TOPK2",
        "Alone",
        "Apply",
        "AutoCodec",
        "CO2Rule",
        "Codec",
        "Contribution",
        "DecoupledRule",
        "Delayed",
        "DiLoCoRule",
        "Distributed",
        "EagerRule",
        "ErrorFeedback",
        "Every",
        "Exchange",
        "Faults",
        "GASLoCRule",
        "Handle",
        "LocalSGDRule",
        "Mean",
        "NoLoCoRule",
        "Options",
        "OuterOptimizer",
        "Ranks",
        "RoundContext",
        "RoundInfo",
        "RoundKey",
        "RoundLength",
        "Rule",
        "Schedule",
        "Seconds",
        "Send",
        "Simulation",
        "SpartaRule",
        "Stepped",
        "Steps",
        "Streaming",
        "Tokens",
        "by_rate",
        "by_steps",
        "by_tokens",
        "candidates",
        "codec_named",
        "config_diff",
        "equal",
        "float_buffers",
        "groups",
        "hidden_matrices",
        "muon",
        "order",
        "partner_of",
        "partners_of",
        "rda",
        "strided",
        "weighted_mean",
        "METHODS",
        "Method",
        "method_named",
        "methods_with",
        *(method.place.rpartition(".")[2] for method in METHODS.values()),
    }
)


def __getattr__(name: str) -> Any:
    """Import what is asked for: all but the table of methods comes with torch."""
    if name in __all__:
        return getattr(importlib.import_module("shoal.optim.public"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Name what ``__getattr__`` finds, for completion in a shell."""
    return __all__
