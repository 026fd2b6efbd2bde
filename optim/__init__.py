"""Outer optimizers for low-communication training, as pure mathematics on tensors: no clock, no socket, no global random numbers.

    inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
    opt = NoLoCo(inner, exchange, every=50)          # exchange: Alone(), a Simulation's, or swarm.exchange.SwarmExchange
    for batch in batches:
        loss(model, batch).backward()
        opt.step()                                   # every 50th step also exchanges weights with a random peer
        opt.zero_grad()
    with opt.averaged():                             # evaluate with the slow weights
        evaluate(model)
"""

from optim.codec import BFLOAT16, FLOAT16, FLOAT32, Codec
from optim.codec_auto import AutoCodec
from optim.codec_feedback import ErrorFeedback
from optim.codecs import E3M0, INT8, SIGN, TOPK2, codec_named
from optim.exchange import Alone, Exchange, Handle, Mean, RoundKey, weighted_mean
from optim.outer import LocalSGD, NoLoCo, OuterOptimizer, RoundInfo
from optim.pairing import candidates, groups, mate, order
from optim.rules import LocalSGDRule, NoLoCoRule, Rule
from optim.schedule import Apply, Every, Schedule, Send
from optim.simulation import Faults, Simulation

__all__ = [
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
    "Codec",
    "ErrorFeedback",
    "Every",
    "Exchange",
    "Faults",
    "Handle",
    "LocalSGD",
    "LocalSGDRule",
    "Mean",
    "NoLoCo",
    "NoLoCoRule",
    "OuterOptimizer",
    "RoundInfo",
    "RoundKey",
    "Rule",
    "Schedule",
    "Send",
    "Simulation",
    "candidates",
    "codec_named",
    "groups",
    "mate",
    "order",
    "weighted_mean",
]
