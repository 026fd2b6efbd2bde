"""Public names of `shoal.optim` that come with torch."""

# ruff: noqa: F401
# mypy: implicit-reexport

from shoal.optim.codecs.adaptive import AutoCodec
from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.error_feedback import ErrorFeedback
from shoal.optim.codecs.floats import BFLOAT16, FLOAT16, FLOAT32
from shoal.optim.codecs.registry import E3M0, INT8, SIGN, TOPK2, codec_named
from shoal.optim.exchange.base import Alone, Contribution, Exchange, Handle, Mean, RoundKey
from shoal.optim.exchange.distributed import Distributed
from shoal.optim.exchange.pairing import candidates, groups, order, partner_of, partners_of
from shoal.optim.exchange.simulation import Faults, Simulation
from shoal.optim.exchange.weighted_mean import weighted_mean
from shoal.optim.experimental.decoupled import DecoupledDiLoCo, DecoupledRule, rda
from shoal.optim.experimental.eager import Eager, EagerRule
from shoal.optim.experimental.gasloc import GASLoC, GASLoCRule
from shoal.optim.experimental.sparta import SPARTA, SpartaRule
from shoal.optim.inner import muon
from shoal.optim.layers import hidden_matrices
from shoal.optim.methods import METHODS, Method, method_named, methods_with
from shoal.optim.outer.averaged import float_buffers
from shoal.optim.outer.config_diff import config_diff
from shoal.optim.outer.contribution_weight import by_rate, by_steps, by_tokens, equal
from shoal.optim.outer.fragments import strided
from shoal.optim.outer.in_flight import RoundInfo
from shoal.optim.outer.inner import Stepped
from shoal.optim.outer.optimizer import OuterOptimizer
from shoal.optim.outer.options import Options
from shoal.optim.outer.rule import RoundContext, Rule
from shoal.optim.ranks.ranks import Ranks
from shoal.optim.rules.co2 import CO2, CO2Rule
from shoal.optim.rules.diloco import DiLoCo, DiLoCoRule
from shoal.optim.rules.local_sgd import LocalSGD, LocalSGDRule
from shoal.optim.rules.noloco import NoLoCo, NoLoCoRule
from shoal.optim.rules.sparseloco import SparseLoCo
from shoal.optim.rules.streaming import StreamingDiLoCo
from shoal.optim.schedule.round_length import RoundLength, Seconds, Steps, Tokens
from shoal.optim.schedule.schedules import Apply, Delayed, Every, Schedule, Send, Streaming
