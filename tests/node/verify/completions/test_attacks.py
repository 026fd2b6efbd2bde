"""Each attack on a claim of completions: what one claim of some 60 tokens shows of it, and the
bound of what passes.
"""

import copy
import dataclasses

import pytest
import torch

from shoal.node.verify.calibrate import self_calibrate
from shoal.node.verify.snapshot import snapshot
from tests.node.verify.completions.attacks import (
    adapter,
    drawn,
    fp8,
    prefilled,
    rounded,
    steered,
    tuned,
)

# nats: no token of an accepted claim is further from the one that the claimed weights and seed give
FARTHEST = 0.1


@pytest.fixture(scope="module")
def peaked(world):
    """The policy with logits 2.5 times as large: it has all but one answer left, as a trained one
    has.
    """
    policy = copy.deepcopy(world.policy)
    with torch.no_grad():
        policy.module.head.weight *= 2.5
    calibration = self_calibrate(policy, world.env, world.agreed, policy_name="tiny", claims=40)
    return dataclasses.replace(
        world, policy=policy, calibration=calibration, snapshot=snapshot(policy)
    )


@pytest.fixture
def worlds(world, peaked):
    return {"fresh": world, "peaked": peaked}


def judged(world, claims):
    """For each (claim, material, largest margin): whether it is accepted, and that margin."""
    checker = world.checker(allowed=("float32",))
    return [
        (checker.check(claim, material, world.snapshot).accepted, margin)
        for claim, material, margin in claims
    ]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", ["fresh", "peaked"])
@pytest.mark.parametrize("cheat", ["int4", "fp8", "one step of SGD"])
def test_these_weights_are_always_found(worlds, kind, cheat):
    world = worlds[kind]
    policy = {
        "int4": lambda: world.changed(rounded(4)),
        "fp8": lambda: world.changed(fp8),
        "one step of SGD": lambda: tuned(world, 1, 0.01),
    }[cheat]()
    checker = world.checker(allowed=("float32",))
    for index in range(6):
        assert (
            "does not compute these activations"
            in world.check(world.proven(index, policy), checker).reason
        )


@pytest.mark.parametrize(
    ("cheat", "least"), [(rounded(8), 4), (adapter(0.01), 4)], ids=["int8", "adapter of 1 %"]
)
def test_slight_changes_are_found_in_some_claims(world, cheat, least):
    """60 tokens are few: of 12 claims two thirds of int8 and of an adapter are found, as measured
    on 30. So it takes a few.
    """
    policy, checker = world.changed(cheat), world.checker(allowed=("float32",))
    accepted = [
        index for index in range(12) if world.check(world.proven(index, policy), checker).accepted
    ]
    assert len(accepted) <= 12 - least
    texts = [prefilled(world, index, drawn(world, index, policy)) for index in accepted]
    assert all(margin < FARTHEST for _, _, margin in texts)


@pytest.mark.parametrize("kind", ["fresh", "peaked"])
def test_foreign_text_is_always_found(worlds, kind):
    """Text of a tuned copy or without noise or with another seed is always found."""
    world = worlds[kind]
    copied = tuned(world, 20, 0.3)
    for index in range(5):
        texts = [
            drawn(world, index, copied),
            drawn(world, index, temperature=0.0),
            drawn(world, index, seed=77 + index),
        ]
        claims = [prefilled(world, index, rows) for rows in texts]
        assert [accepted for accepted, _ in judged(world, claims)] == [False] * 3


@pytest.mark.parametrize("lie", ["temperature", "int4"])
def test_lies_pass_only_within_rounding(peaked, lie):
    """A peaked policy writes the same at .9 as at 1, and in int4, more often than not: then there
    is nothing to be found.
    """
    coarse = peaked.changed(rounded(4))
    texts = [
        drawn(peaked, index, temperature=0.9)
        if lie == "temperature"
        else drawn(peaked, index, coarse)
        for index in range(12)
    ]
    found = judged(peaked, [prefilled(peaked, index, rows) for index, rows in enumerate(texts)])
    same = [rows == drawn(peaked, index) for index, rows in enumerate(texts)]
    assert 0 < sum(same) < len(same)
    assert all(accepted for (accepted, _), unchanged in zip(found, same, strict=True) if unchanged)
    assert all(margin < FARTHEST for accepted, margin in found if accepted)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["fresh", "peaked"])
def test_one_planted_token_is_found(worlds, kind):
    """The sum of margins may be small, and the mean over the claim smaller: the largest one is
    not.
    """
    world = worlds[kind]
    groups = [
        (index, *found) for index in range(14) if (found := steered(world, index)) is not None
    ]
    assert min(cost for _, cost, _ in groups) < 1.0
    found = judged(world, [prefilled(world, index, rows) for index, _, rows in groups])
    assert all(margin < FARTHEST for accepted, margin in found if accepted)
    assert sum(accepted for accepted, _ in found) <= 1
