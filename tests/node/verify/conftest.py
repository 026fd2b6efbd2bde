"""A small policy, what its honest claims look like, and claims of it: honest ones and others."""

import pytest
import torch

from shoal.node.rl.environment import Env, canonical
from shoal.node.rl.strings import Strings
from shoal.node.rl.tiny import Tiny, Warm
from shoal.node.verify.calibrate import self_calibrate
from shoal.node.verify.material import Agreed
from shoal.node.verify.snapshot import snapshot
from tests.support.claims import HONEST, World


@pytest.fixture(scope="session")
def world():
    torch.set_num_threads(1)
    env = Env("strings", canonical({}), Strings())
    # Little warm, so that it does not end at once.
    policy = Tiny(env.made, seed=1, warm=Warm(steps=40, batch=32))
    agreed = Agreed(1.0, 12, 8)
    calibration = self_calibrate(
        policy, env, agreed, policy_name="tiny", claims=HONEST, dtypes=("float32", "bfloat16")
    )
    return World(env, policy, agreed, calibration, snapshot(policy))
