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

from optim.buffers import float_buffers
from optim.codec import BFLOAT16, FLOAT16, FLOAT32, Codec
from optim.codec_auto import AutoCodec
from optim.codec_feedback import ErrorFeedback
from optim.codecs import E3M0, INT8, SIGN, TOPK2, codec_named
from optim.difference import difference
from optim.distributed import Distributed
from optim.exchange import Alone, Exchange, Handle, Mean, RoundKey, weighted_mean
from optim.fragments import strided
from optim.length import RoundLength, Seconds, Steps, Tokens
from optim.methods import (
    CO2,
    SPARTA,
    DecoupledDiLoCo,
    DiLoCo,
    Eager,
    GASLoC,
    LocalSGD,
    NoLoCo,
    Options,
    SparseLoCo,
    StreamingDiLoCo,
)
from optim.outer import OuterOptimizer, RoundInfo
from optim.pairing import candidates, groups, mate, order
from optim.registry import METHODS, Method, method_named, methods_with
from optim.rule import RoundFacts, Rule
from optim.rules import GASLoCRule, LocalSGDRule, NoLoCoRule
from optim.rules_delayed import CO2Rule, EagerRule
from optim.rules_diloco import DecoupledRule, DiLoCoRule, rda
from optim.schedule import Apply, Delayed, Every, Schedule, Send, Streaming
from optim.simulation import Faults, Simulation
from optim.sparta import SpartaRule
from optim.stepped import Stepped
from optim.universal import carry_over
from optim.weights import by_rate, by_steps, by_tokens, equal

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
    "RoundFacts",
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
    "carry_over",
    "codec_named",
    "difference",
    "equal",
    "float_buffers",
    "groups",
    "mate",
    "method_named",
    "methods_with",
    "order",
    "rda",
    "strided",
    "weighted_mean",
]
