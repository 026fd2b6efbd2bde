"""Outer optimizers for low-communication training, as pure mathematics on tensors: no clock, no socket, no global random numbers.

inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
opt = NoLoCo(inner, exchange, every=50)          # exchange: Alone(), a Simulation's, or a swarm session's
for batch in batches:
    loss(model, batch).backward()
    opt.step()                                   # every 50th step also averages with a random peer
    opt.zero_grad()
with opt.averaged():                             # evaluate with the slow weights
    evaluate(model)
"""

from shoal.optim.codecs.adaptive import AutoCodec
from shoal.optim.codecs.base import BFLOAT16, FLOAT16, FLOAT32, Codec
from shoal.optim.codecs.error_feedback import ErrorFeedback
from shoal.optim.codecs.registry import E3M0, INT8, SIGN, TOPK2, codec_named
from shoal.optim.exchange.base import (
    Alone,
    Contribution,
    Exchange,
    Handle,
    Mean,
    RoundKey,
    candidates,
    groups,
    order,
    partner_of,
    weighted_mean,
)
from shoal.optim.exchange.distributed import Distributed
from shoal.optim.exchange.simulation import Faults, Simulation
from shoal.optim.inner import hidden_matrices, muon
from shoal.optim.methods import (
    CO2,
    METHODS,
    SPARTA,
    DecoupledDiLoCo,
    DiLoCo,
    Eager,
    GASLoC,
    LocalSGD,
    Method,
    NoLoCo,
    Options,
    SparseLoCo,
    StreamingDiLoCo,
    method_named,
    methods_with,
)
from shoal.optim.outer.fragments import by_rate, by_steps, by_tokens, equal, strided
from shoal.optim.outer.in_flight import RoundInfo
from shoal.optim.outer.inner import Stepped, float_buffers
from shoal.optim.outer.optimizer import OuterOptimizer, config_diff
from shoal.optim.ranks.ranks import Ranks
from shoal.optim.rules.base import RoundContext, Rule
from shoal.optim.rules.diloco import CO2Rule, DecoupledRule, DiLoCoRule, EagerRule, rda
from shoal.optim.rules.gossip import GASLoCRule, LocalSGDRule, NoLoCoRule, SpartaRule
from shoal.optim.schedule import Apply, Delayed, Every, RoundLength, Schedule, Seconds, Send, Steps, Streaming, Tokens

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
    "Schedule",
    "Seconds",
    "Send",
    "Simulation",
    "SparseLoCo",
    "SpartaRule",
    "Stepped",
    "Steps",
    "Streaming",
    "StreamingDiLoCo",
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
    "method_named",
    "methods_with",
    "muon",
    "order",
    "partner_of",
    "rda",
    "strided",
    "weighted_mean",
]
