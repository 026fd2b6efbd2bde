"""A policy on a GPU: it learns what one on the CPU does, and its claims are judged alike."""

import sys
from contextlib import nullcontext

import pytest
import torch

from shoal.node.config.rl_settings import RLSettings
from shoal.node.rl.loading import load_env
from shoal.node.rl.task import RLTask
from shoal.node.rl.tiny import END, Tiny, Warm
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from tests.support.gpu import STANDIN, assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("same_adam")]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_policy_learns_from_the_same_completions(monkeypatch):
    env = load_env("strings", {"families": "last", "letters": 3})
    found = []
    for device in (CPU, CUDA):
        policy = Tiny(env.made, seed=1, width=16, warm=Warm(steps=20, batch=16))
        policy.module.to(device)
        task = RLTask(
            env, lambda policy=policy: policy, RLSettings(held_out=20, local=2, external=0), seed=1
        )
        trainer = Trainer(
            task,
            OuterSettings(method="none", every=2),
            TrainSettings(steps=4, optimizer="adamw"),
            device=device,
        )
        trainer.connect(trainer.opt.exchange, "run", Shard(0, 1, 0))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            trainer.run()
            found.append([*trainer.params, torch.tensor(trainer.evaluate())])
    assert_same(found[1], found[0])


def no_end(module, given, made):
    """Let no row end, so that all tokens are written."""
    made[0][..., END].fill_(-1e9)


def test_gpu_completions_equal_the_cpus():
    """Completions are those of the CPU and the host waits once for eight tokens."""
    env, found, waits = load_env("strings", {"families": "last", "letters": 3}), [], []
    for device in (CPU, CUDA):
        policy = Tiny(env.made, seed=1, width=16, warm=Warm(steps=5, batch=16))
        policy.module.to(device).register_forward_hook(no_end)
        for most in (8, 40):
            with sys.modules["standin"].waits() if STANDIN else nullcontext() as counted:
                found.append(
                    policy.generate(["last: abc", "x"], 3, temperature=1.0, max_tokens=most, seed=5)
                )
            waits.append(sum(counted.values()) if STANDIN else 0)
    assert [[one.tokens for one in group] for group in found[2] + found[3]] == [
        [one.tokens for one in group] for group in found[0] + found[1]
    ]
    if STANDIN:
        assert waits[3] - waits[2] == (40 - 8) // 8
