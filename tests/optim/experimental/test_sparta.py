"""SPARTA: averaging of chosen values only, and the mask that nobody sends."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim import (
    SPARTA,
    Alone,
    Apply,
    LocalSGD,
    OuterOptimizer,
    RoundContext,
    RoundKey,
    Send,
    SpartaRule,
    groups,
)
from shoal.optim.experimental.sparta import chosen


def test_sparta_of_everything_is_parameter_averaging_each_step(lab):
    found = lab.run(SPARTA, 20, part=1.0)
    for peer, expected in lab.run(LocalSGD, 20, every=1, lag=0).items():
        assert np.array_equal(found[peer].fast, expected.fast)
        assert np.array_equal(found[peer].slow, expected.fast)


def test_sparta_of_nothing_is_training_alone(lab):
    for peer, found in lab.run(SPARTA, 20, part=0.0).items():
        lab.close(found.fast, [lab.trained(peer, lab.start(), steps) for steps in range(1, 21)])


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_sparta_averages_the_chosen_values_only_and_conserves_the_mean(lab, every, size):
    found = lab.run(SPARTA, 12, every=every, part=0.4, size=size, begin=lab.own_start)
    weights = {peer: lab.own_start(peer) for peer in lab.PEERS}
    for step in range(1, 13):
        weights = {peer: lab.trained(peer, w, 1) for peer, w in weights.items()}
        if step % every == 0:
            round = step // every - 1
            mask = chosen(RoundKey("run", round), 5, 0.4).numpy()
            assert len(mask) == 2
            before = np.mean(list(weights.values()), axis=0)
            for group in groups(0, round, lab.PEERS, size):
                mean = np.mean([weights[peer][mask] for peer in group], axis=0)
                for peer in group:
                    weights[peer][mask] = mean
            lab.close(np.mean(list(weights.values()), axis=0), before, atol=1e-12)
        for peer in lab.PEERS:
            lab.close(found[peer].fast[step - 1], weights[peer])


class Later:
    """Schedule that sends after each fourth step and applies two steps later."""

    def at(self, step):
        return {0: [Send(0)], 2: [Apply(0)]}.get(step % 4, []) if step > 3 else []


def test_local_progress_survives_a_late_mean(lab):
    """Sparta keeps what was learnt while a late mean was in flight."""

    def method(inner, exchange, *, on_round):
        return OuterOptimizer(
            inner, exchange, rule=SpartaRule(1.0), schedule=Later(), on_round=on_round
        )

    found = lab.run(method, 11, loss=lab.linear, begin=lab.own_start)
    mean = np.mean([lab.own_start(p) for p in lab.PEERS], axis=0)
    steps = {peer: lab.RATE * lab.problem(peer)[0][0] for peer in lab.PEERS}
    common = mean - 4 * np.mean(list(steps.values()), axis=0)
    for peer in lab.PEERS:
        lab.close(found[peer].fast[5], common - 2 * steps[peer])


@given(
    count=st.integers(1, 3000),
    part=st.floats(0, 1),
    round=st.integers(0, 10**9),
    fragment=st.integers(0, 50),
)
def test_the_mask_has_a_fixed_number_of_different_positions(count, part, round, fragment):
    found = chosen(RoundKey("run", round, fragment), count, part).tolist()
    assert len(found) == min(max(builtin_round(part * count), 0), count)
    assert found == sorted(set(found))
    assert not found or (found[0] >= 0 and found[-1] < count)


builtin_round = round


def test_the_mask_follows_from_the_key_alone():
    """Other processes get the same mask, whatever their random state; other keys give others.

    The numbers are the protocol's.
    """
    code = (
        "import torch; torch.manual_seed(5); from shoal.optim import RoundKey; from "
        "shoal.optim.experimental.sparta import chosen;"
        "print(chosen(RoundKey('r', 7, 1), 1000, 0.008).tolist())"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    here = chosen(RoundKey("r", 7, 1), 1000, 0.008).tolist()
    assert str(here) == there
    assert torch.equal(state, torch.get_rng_state())
    for key in (RoundKey("s", 7, 1), RoundKey("r", 8, 1), RoundKey("r", 7, 2)):
        assert chosen(key, 1000, 0.008).tolist() != here


def test_values_are_chosen_uniformly():
    """Every value is chosen equally often and coverage is as independent draws."""
    count, part, rounds = 997, 0.01, 6000
    hits = torch.zeros(count)
    for round in range(rounds):
        hits[chosen(RoundKey("run", round), count, part)] += 1
        if round == 99:
            covered = (hits > 0).float().mean().item()
    assert covered == pytest.approx(1 - (1 - part) ** 100, abs=0.05)
    expected = rounds * 10 / count
    assert ((hits - expected) ** 2 / expected).sum().item() == pytest.approx(
        count, rel=0.15
    )  # chi-squared: sd 45
    together = torch.stack([chosen(RoundKey("run", r), count, part) for r in range(3000)]).float()
    assert (
        torch.corrcoef(together.T).fill_diagonal_(0).abs().max() < 0.07
    )  # no run of positions knows of another


def test_a_mask_over_billions_of_values_fits():
    found = chosen(RoundKey("run", 0), 2**33, 1e-5)
    assert len(found) == builtin_round(2**33 * 1e-5)
    assert (found.diff() > 0).all()
    assert found[0] >= 0
    assert found[-1] < 2**33


def test_small_tensors_are_reached_too():
    """The mask is cut from the whole fragment, so that a bias of two values is reached too."""
    weights = [torch.nn.Parameter(torch.zeros(n)) for n in (900, 2, 98)]
    reached = torch.zeros(3)

    class Spy(Alone):
        def start(self, contribution):
            assert [t.numel() for t in contribution.tensors] == [10]
            for index, at in enumerate(opt.rule._places(weights, RoundContext(contribution.key))):
                reached[index] += len(at)
            return super().start(contribution)

    opt = SPARTA(torch.optim.SGD(weights, lr=0.1), Spy(), part=0.01)
    for _ in range(500):
        opt.step()
    assert reached.sum() == 5000
    torch.testing.assert_close(
        reached, 500 * 10 * torch.tensor([0.9, 0.002, 0.098]), rtol=0.1, atol=7
    )
