"""The benchmark of rollout sharing runs, says what it promises, and gives the same numbers each
time.
"""

import json

import pytest
import torch

from bench import sapo
from bench._hacpo import Capability, Correction, clipped_weight
from bench._world import Settings, questions_of, share_of
from shoal.optim.rl.advantages import group_advantages
from shoal.optim.rl.completions import Completions
from shoal.optim.rl.losses import LOSSES

ROWS = ["8/0", "6/2", "4/4", "2/6", "poison", "trusting"]
LANGUAGE_ROWS = ["8/0", "4/4", "2/6"]


@pytest.mark.ci
def test_json_has_every_row_and_the_same_numbers_each_time(called, program):
    done = program("sapo.py", "--nodes", "3", "--seeds", "2", "--rounds", "10", "--json")
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert (result["policy"], result["nodes"], result["seeds"], result["rounds"]) == (
        "linear",
        3,
        2,
        10,
    )
    assert list(result["rows"]) == ROWS
    for row in result["rows"].values():
        assert set(row) == {"cumulative", "sd", "interval", "final"}
        # Student's t for two: 12.71 standard errors.
        low, high = row["interval"]
        assert high - row["cumulative"] == pytest.approx(12.706 * row["sd"] / 2**0.5, abs=0.02)
        assert row["cumulative"] - low == pytest.approx(high - row["cumulative"], abs=0.003)
        assert 10 / 32 < row["cumulative"] < 10
        assert 0 < row["sd"] < row["cumulative"]
        assert row["final"] > row["cumulative"] / 10  # it learns
    assert "poison" in done.stderr  # the table is for people, so it does not mix with the JSON
    assert (
        called(sapo.main, "--nodes", "3", "--seeds", "2", "--rounds", "10", "--json").stdout
        == done.stdout
    )


def test_sharing_pays_and_a_lie_is_not_believed(called):
    done = called(sapo.main, "--seeds", "1", "--rounds", "60", "--json")
    found = {name: row["cumulative"] for name, row in json.loads(done.stdout)["rows"].items()}
    assert found["4/4"] > 1.3 * found["8/0"]
    assert found["poison"] > 1.3 * found["trusting"]


@pytest.mark.slow(reason="trains a transformer on both sides")
def test_the_small_transformer_is_measured_too(program):
    done = program(
        "sapo.py", "--policy", "tiny", "--nodes", "2", "--seeds", "1", "--rounds", "3", "--json"
    )
    result = json.loads(done.stdout)
    assert (result["policy"], result["loss"]) == ("tiny", "positive")
    assert list(result["rows"]) == ROWS
    for row in result["rows"].values():
        assert 0 <= row["cumulative"] < 3
        assert 0 <= row["final"] < 0.5


def test_language_model_is_measured_row_by_row(called, tmp_path, monkeypatch):
    """A language model is measured row by row and its runs are kept."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("bench._language.ASKED", (20, 5))
    monkeypatch.setattr("bench._language.QUESTIONS", 100)
    kept, base = tmp_path / "runs.jsonl", tmp_path / "small"
    options = [
        "--policy",
        "small",
        "--env",
        "strings",
        "--solved",
        2,
        "--base",
        base,
        "--nodes",
        2,
        "--rounds",
        2,
        "--seeds",
        1,
    ]
    done = called(sapo.main, *options, "--resume", kept, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["policy"], result["loss"], result["env"]) == ("small", "sapo", "strings")
    assert list(result["rows"]) == LANGUAGE_ROWS
    for row in result["rows"].values():
        assert row["interval"] is None
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"], abs=0.003)
        assert row["parts"]["write"] > 0 < row["tokens_s"]
    written = [result["rows"][name]["tokens"] for name in LANGUAGE_ROWS]
    assert written == sorted(written, reverse=True)
    assert [json.loads(line)["row"] for line in kept.read_text().splitlines()] == LANGUAGE_ROWS
    kept.write_text(
        "".join(kept.read_text().splitlines(keepends=True)[:2])
    )  # as if it was cut off in the third
    again = json.loads(called(sapo.main, *options, "--resume", kept, "--json").stdout)["rows"]
    for name in LANGUAGE_ROWS[:2]:
        assert again[name] == result["rows"][name]
    # the same numbers, from the model that was kept
    assert again["2/6"]["sums"] == result["rows"]["2/6"]["sums"]


def test_ratio_is_paired_seed_by_seed():
    """Seeds differ more among each other than the rows do."""
    found = sapo.ratio_of([9.0, 99.0, 900.0], [10.0, 100.0, 1000.0])
    low, high = found["interval"]
    assert found["mean"] == pytest.approx((0.9 * 0.99 * 0.9) ** (1 / 3), abs=1e-4)
    assert (low, high) == (pytest.approx(0.8104, abs=1e-4), pytest.approx(1.0651, abs=1e-4))
    assert sapo.ratio_of([9.0], [10.0]) == {"mean": 0.9, "interval": None}
    assert sapo.ratio_of([9.0, 0.0], [10.0, 1.0]) is None


def test_loss_has_the_mean_of_its_paper(called, monkeypatch):
    given = []

    def made(settings, seed):
        given.append(settings.per)
        return sapo.linear_world(settings, seed)

    monkeypatch.setitem(sapo.WORLDS, "linear", made)
    called(sapo.main, "--loss", "luspo", "--seeds", "1", "--rounds", "1", "--rows", "1/0")
    assert set(given) == {"completion_sum"}


@pytest.mark.parametrize("rows", ["8", "0/4", "a/b", "8/0,", "+clip"])
def test_rows_that_are_none_are_refused(called, rows):
    done = called(sapo.main, "--rows", rows)
    assert done.returncode == 2
    assert "must be like 8/0,4/4" in done.stderr


def test_wall_time_is_that_of_writing_and_of_the_rest():
    """Half of the writing saves more of a round the larger a share of it writing is."""
    first = {"history": [0.0] * 2, "parts": {"write": 8.0, "judge": 1.0, "learn": 7.0}}
    half = {"history": [0.0] * 4, "parts": {"write": 8.0, "judge": 1.0, "learn": 15.0}}
    assert sapo.wall_of([half], [first]) == {
        "write": 0.5,
        "rest": 1.0,
        "measured": 0.75,
        "write 0.5": 0.75,
        "write 0.8": 0.6,
        "write 0.95": 0.525,
    }


# Nodes that differ


def test_both_kinds_of_nodes_are_reported_by_name(called):
    options = [
        "--seeds",
        "2",
        "--rounds",
        "3",
        "--unlike",
        "speed",
        "--rows",
        "8/0,4/4+clip",
        "--json",
    ]
    result = json.loads(called(sapo.main, *options).stdout)
    assert result["unlike"] == "speed"
    assert list(result["rows"]) == ["8/0", "4/4+clip"]
    for row in result["rows"].values():
        kinds = row["kinds"]
        assert set(kinds) == {"fast", "slow"}
        mean = (kinds["fast"]["cumulative"] + kinds["slow"]["cumulative"]) / 2
        assert mean == pytest.approx(row["cumulative"], abs=0.002)


def test_a_slow_node_takes_what_it_does_not_write():
    assert share_of(0, (4, 4), "speed") == (4, 4)
    assert share_of(1, (4, 4), "speed") == (1, 7)
    # Alone it has nobody to take them from.
    assert share_of(1, (8, 0), "speed") == (2, 0)
    assert share_of(1, (4, 4), "size") == (4, 4)


def test_nodes_of_unlike_families_ask_no_question_of_both():
    settings = Settings(policy="linear", nodes=2, loss=LOSSES["sapo"], rate=None)
    world = sapo.linear_world(settings, seed=0)
    asked = [set(questions_of(node, world, "families")) for node in (0, 1)]
    assert not asked[0] & asked[1]
    assert asked[0] | asked[1] == set(questions_of(0, world, None)) == set(range(sapo.QUESTIONS))


def test_a_smaller_policy_tells_fewer_questions_apart():
    settings = Settings(policy="linear", nodes=2, loss=LOSSES["sapo"], rate=None, unlike="size")
    large, small = sapo.linear_world(settings, seed=0).policies
    assert large.features.shape[1] - small.features.shape[1] == sapo.QUESTIONS // 2


# HACPO's changes (2603.02604), from the formulas of the paper


REWARDS = [(0.0, 1.0), (0.0, 0.0, 0.0, 1.0)]


def plain_advantages():
    flat = torch.tensor([reward for group in REWARDS for reward in group], dtype=torch.float64)
    return group_advantages(flat, torch.tensor([0, 0, 1, 1, 1, 1]))


def test_baseline_is_what_the_learner_would_have_reached():
    """The author is twice as good, so the learner would have had half of the group's mean."""
    changed = Correction(frozenset({"baseline"}), (None, 2.0))
    found = changed.advantages(plain_advantages(), REWARDS)
    deviation = (0.25 * 0.75) ** 0.5
    expected = [(reward - 0.25 / 2) / deviation for reward in REWARDS[1]]
    assert found[:2].tolist() == plain_advantages()[:2].tolist()  # its own group
    assert found[2:].tolist() == pytest.approx(expected, rel=1e-3)


def test_baseline_above_the_largest_reward_is_none():
    changed = Correction(frozenset({"baseline"}), (None, 0.2))  # .25 / .2 is above 1
    assert torch.equal(changed.advantages(plain_advantages(), REWARDS), plain_advantages())


def test_groups_of_a_better_author_weigh_more():
    changed = Correction(frozenset({"weight"}), (None, 2.0))
    found = changed.advantages(plain_advantages(), REWARDS)
    factors = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    assert torch.equal(found, plain_advantages() * factors)


def test_clipped_weight_has_value_and_gradient_of_the_paper():
    """Ratios of sequences: .5 and 1.5 are clipped and have no gradient, .9 is not."""
    ratios = torch.tensor([0.5, 0.9, 1.5], dtype=torch.float64)
    new = (ratios.log()[:, None] - 1).expand(3, 2).clone().requires_grad_()
    writer = torch.full((3, 2), -1.0, dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    mask = torch.ones(3, 2, dtype=torch.bool)
    batch = Completions(new, new.detach(), mask, advantages, writer)
    loss = clipped_weight(batch)
    assert loss[:, 0].tolist() == pytest.approx([-0.8 * 0.8, 0.9 * 0.9 * 2, -3.0])
    torch.autograd.backward(loss.mean(1).sum())
    # Only one of the two factors .9 has a gradient: .9 * .9 * 2 for the mean of two tokens.
    assert new.grad.sum(1).tolist() == pytest.approx([0.0, 0.9 * 0.9 * 2, 0.0])


def test_only_others_completions_have_the_clipped_weight():
    new = torch.zeros(6, 1, dtype=torch.float64)
    mask = torch.ones(6, 1, dtype=torch.bool)
    batch = Completions(new, new, mask, plain_advantages(), new - 1)
    base = LOSSES["sapo"]
    mixed = Correction(frozenset({"clip"}), (None, 2.0)).loss(base, REWARDS)(batch)
    assert torch.equal(mixed[:2], base(batch)[:2])
    assert torch.equal(mixed[2:], clipped_weight(batch)[2:])
    assert Correction(frozenset({"weight"}), (None, 2.0)).loss(base, REWARDS) is base


def test_capability_is_of_the_last_rounds_and_limited():
    known = Capability()
    assert known.ratio(1, 0) == 1.0
    for _ in range(5):
        known.add(0, [(0.0, 1.0)])
        known.add(1, [(1.0, 1.0), (0.0, 1.0)])
    assert known.ratio(1, 0) == pytest.approx(1.5)
    for _ in range(5):
        known.add(1, [(0.0, 0.0)])
    assert known.ratio(1, 0) == 0.1
    assert known.ratio(0, 1) == 10.0
