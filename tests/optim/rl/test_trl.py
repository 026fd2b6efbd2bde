"""Losses and advantages against trl's: values and gradients of 60 drawn cases each."""

import functools
import importlib.metadata
import json
import math
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from shoal.optim.rl.advantages import group_advantages
from shoal.optim.rl.completions import Completions
from shoal.optim.rl.losses import LOSSES, MEANS
from shoal.optim.rl.objective import Objective
from tests.support.trl_losses import (
    CASES,
    GROUP,
    MAX_TOKENS,
    ROWS,
    SCALES,
    computed,
    drawn_case,
    drawn_rewards,
)

RECORDED = json.loads(Path(__file__).with_name("trl_numbers.json").read_text())
NEWEST = ("1.16", "2")
"""Versions of trl that the numbers are to be equal to: from the first on, below the second."""


def named(name, **terms):
    """Return the objective of the loss ``name``, without the bound that ours has and trl's not."""
    loss = LOSSES[name]
    if name in ("grpo", "dr_grpo", "dapo", "gspo", "luspo"):
        loss = functools.partial(loss, delta=None)
    per = terms.pop("per", MEANS.get(name, "token"))
    return Objective(loss, per=per, max_tokens=MAX_TOKENS, **terms)


OURS = {
    **{name: named(name) for name in ROWS if name in LOSSES},
    "grpo of all tokens": named("grpo", per="token"),
    "delta": Objective(functools.partial(LOSSES["grpo"], delta=1.5), per="completion"),
    "kl": named("grpo", kl_coef=0.04, kl_cap=math.inf),
    "off_policy_mask": named("grpo", off_policy_mask=0.1),
    "entropy": named("dapo", entropy_coef=0.01),
}


def our_numbers(row, number):
    drawn = drawn_case(row, number)
    mask = torch.tensor(drawn.pop("mask"))
    case = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in drawn.items()}
    new = case["new"].requires_grad_()
    entropy = case["entropy"].requires_grad_()
    loss = OURS[row](
        Completions(
            new,
            new.detach(),
            mask,
            case["advantages"],
            case["writer"],
            case["reference"],
            entropy,
        )
    )
    loss.backward()
    numbers = [loss.item(), *new.grad[mask].tolist()]
    if entropy.grad is not None:
        numbers += entropy.grad[mask].tolist()
    return numbers


def our_advantages(scale, number):
    groups = torch.arange(2).repeat_interleave(GROUP)
    rewards = torch.tensor(drawn_rewards(number), dtype=torch.float64)
    return group_advantages(rewards, groups, scale=scale, deviation="sample").tolist()


@pytest.mark.parametrize("row", ROWS)
def test_losses_and_gradients_equal_those_recorded_of_trl(row):
    assert len(RECORDED["losses"][row]) == CASES
    for number, expected in enumerate(RECORDED["losses"][row]):
        assert our_numbers(row, number) == pytest.approx(expected, rel=1e-10, abs=1e-11), number


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_equal_those_recorded_of_trl(scale):
    """Trl computes them in float32."""
    assert len(RECORDED["advantages"][scale]) == CASES
    for number, expected in enumerate(RECORDED["advantages"][scale]):
        assert our_advantages(scale, number) == pytest.approx(expected, abs=1e-6), number


@pytest.mark.slow(reason="loads trl, and runs its trainer on 900 cases")
def test_the_recorded_numbers_are_those_of_the_installed_trl():
    try:
        installed = Version(importlib.metadata.version("trl"))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("trl is not installed")
    if not Version(NEWEST[0]) <= installed < Version(NEWEST[1]):
        pytest.skip(f"trl {installed} is not in the range {NEWEST}")
    found = computed()
    for part in ("losses", "advantages"):
        for row, cases in RECORDED[part].items():
            for case, expected in zip(found[part][row], cases, strict=True):
                assert case == pytest.approx(expected, rel=1e-6, abs=1e-6), row
