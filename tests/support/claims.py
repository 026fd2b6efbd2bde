"""A small policy, and claims of it: honest ones and others."""

import copy
from dataclasses import dataclass

import torch

from shoal.node.rl.environment import Env
from shoal.node.rl.policy import Policy
from shoal.node.rl.tiny import Tiny, Warm
from shoal.node.verify.checker import Checker
from shoal.node.verify.material import DTYPES, Agreed, Coordinates, seed_of
from shoal.node.verify.proven_group import make_claim, prove
from shoal.node.verify.snapshot import digest
from shoal.verification.calibration import Calibration

RUN, ROUND, PEER, SLOT = "run", 7, "peer", 1
HONEST = 60


@dataclass
class World:
    """One policy and all that its claims need."""

    env: Env
    policy: Policy
    agreed: Agreed
    calibration: Calibration
    snapshot: bytes

    def question(self, index):
        return Coordinates.of(self.env, 99, index)

    def proven(self, index=0, policy=None, seed=None, dtype="float32", **options):
        """A group by ``policy``, whoever it says it is by."""
        by = copy.deepcopy(policy or self.policy)
        by.module.to(DTYPES[dtype])
        at = self.question(index)
        drawn = seed_of(RUN, ROUND, PEER, SLOT, at.hash) if seed is None else seed
        return prove(
            by,
            self.env,
            at,
            self.agreed,
            drawn,
            policy_name="tiny",
            snapshot_bytes=len(self.snapshot),
            **options,
        )

    def claim(self, proven, **fields):
        said = {
            "run": RUN,
            "round": ROUND,
            "peer": PEER,
            "slot": SLOT,
            "model": digest(self.snapshot),
        }
        return make_claim(proven, **{**said, **fields})

    def checker(self, **options):
        width = self.policy.module.head.in_features
        make = lambda: Tiny(self.env.made, seed=8, width=width, warm=Warm(steps=0))  # noqa: E731
        return Checker(make, self.env, self.agreed, self.calibration, "tiny", **options)

    def check(self, proven, checker=None, snapshot=None):
        return (checker or self.checker()).check(
            self.claim(proven), proven.material, snapshot or self.snapshot
        )

    def changed(self, change):
        """The policy with ``change(weight)`` in place of every matrix of its blocks."""
        other = copy.deepcopy(self.policy)
        with torch.no_grad():
            for weight in other.module.blocks.parameters():
                if weight.dim() == 2:
                    weight.copy_(change(weight))
        return other
