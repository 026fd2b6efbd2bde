"""SAPO's loss and its variants against a plain float64 reference, closed forms, and invariances."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim.rl.advantages import group_advantages
from shoal.optim.rl.completions import Completions
from shoal.optim.rl.effective_sample import effective_sample_size, log_weights
from shoal.optim.rl.losses import LOSSES, decoupled, positive, sapo, tis
from shoal.optim.rl.objective import Objective, policy_loss

SEEDS = st.integers(0, 2**32 - 1)
PERS = ("token", "completion", "completion_sum", "max_tokens")
PER = st.sampled_from(PERS)
EVERY = pytest.mark.parametrize("name", sorted(LOSSES))
WRITTEN_OUT = ("sapo", "tis", "decoupled", "positive", "prime", "dppo", "ipo")
"""Losses that `reference` has; the others are compared with trl's (test_trl.py)."""
MAX_TOKENS = 7
some = settings(max_examples=40)
# In 64ths, so that sums and shifts of them are exact.
REWARDS = st.lists(st.integers(-640, 640).map(lambda n: n / 64), min_size=1, max_size=9)


def reference(name, per, new, old, behaviour, advantages, mask):
    """Return the loss in plain Python, token by token, and its derivative by each entry of
    ``new``.
    """
    rows, columns = len(new), len(new[0])
    lengths = [sum(row) for row in mask]
    loss, slope = 0.0, [[0.0] * columns for _ in range(rows)]
    for i in range(rows):
        for t in range(columns):
            if not mask[i][t]:
                continue
            completions = sum(length > 0 for length in lengths)
            share = {
                "token": 1 / sum(lengths),
                "completion": 1 / lengths[i] / completions,
                "completion_sum": 1 / completions,
                "max_tokens": 1 / MAX_TOKENS / completions,
            }[per]
            gain = max(advantages[i], 0.0) if name == "positive" else advantages[i]
            weight = math.exp(old[i][t] - behaviour[i][t])
            if name == "tis":
                gain *= min(weight, 2.0)
            elif name == "decoupled":
                gain *= weight if weight <= 5.0 else 0.0
            if name == "prime":
                logs = [new[i][s] - behaviour[i][s] for s in range(columns) if mask[i][s]]
                log = new[i][t] - behaviour[i][t]
                if 0.125 <= math.exp(log) <= 8 and 0.1 <= math.exp(sum(logs) / len(logs)) <= 10:
                    loss += share * (1e-3 * log**2 - math.exp(log) * gain)
                    slope[i][t] = share * (2e-3 * log - math.exp(log) * gain)
                continue
            if name in ("dppo", "ipo"):
                log = new[i][t] - behaviour[i][t]
                moved = math.exp(new[i][t]) - math.exp(behaviour[i][t])
                kept = moved <= 0.2 if gain > 0 else moved >= -0.2
                if name == "ipo":
                    kept = abs(moved) <= 0.1
                counted = math.exp(log) * gain if kept and math.exp(log) <= 8 else 0.0
                loss += share * (1e-3 * log**2 - counted)
                slope[i][t] = share * (2e-3 * log - counted)
                continue
            ratio = math.exp(new[i][t] - old[i][t])
            free, held = ratio * gain, min(max(ratio, 0.8), 1.28) * gain
            loss -= share * min(free, held)
            if free <= held:
                slope[i][t] = -share * free
    return loss, slope


def random_batch(seed, rows=5, columns=4, spread=0.5):
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = torch.rand((rows, columns), generator=generator) < 0.7
    mask[0] = True
    new = -numbers(rows, columns).abs()
    old = new + spread * numbers(rows, columns)
    behaviour = old + 2 * spread * numbers(rows, columns)
    return Completions(new.requires_grad_(), old, mask, numbers(rows), behaviour)


def loss_and_slope(batch, loss=sapo, **options):
    if options.get("per") == "max_tokens":
        options["max_tokens"] = MAX_TOKENS
    new = batch.new.detach().clone().requires_grad_()
    value = policy_loss(replace(batch, new=new), loss, **options)
    value.backward()
    return value.item(), new.grad


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", WRITTEN_OUT)
@given(PER, SEEDS)
def test_loss_and_gradient_equal_the_reference(name, per, seed):
    batch = random_batch(seed, spread=1.5)
    parts = (batch.new, batch.old, batch.behaviour, batch.advantages, batch.mask)
    expected, expected_slope = reference(name, per, *(part.tolist() for part in parts))
    value, slope = loss_and_slope(batch, LOSSES[name], per=per)
    assert value == pytest.approx(expected, abs=1e-12)
    close(slope, torch.tensor(expected_slope, dtype=torch.float64))


@given(REWARDS, st.integers(-640, 640).map(lambda n: n / 64))
def test_advantages_ignore_a_common_reward(rewards, shift):
    """Advantages do not change when all rewards of a group rise."""
    values, group = (
        torch.tensor(rewards, dtype=torch.float64),
        torch.zeros(len(rewards), dtype=torch.int64),
    )
    close(group_advantages(values + shift, group), group_advantages(values, group), atol=1e-9)


@given(st.lists(REWARDS, min_size=1, max_size=4), st.randoms())
def test_advantages_are_normalised_in_each_group(groups, random):
    """Advantages have mean 0 and spread 1 in each group wherever its members stand."""
    entries = [(place, reward) for place, rewards in enumerate(groups) for reward in rewards]
    random.shuffle(entries)
    group = torch.tensor([10 * place - 7 for place, _ in entries])
    found = group_advantages(
        torch.tensor([reward for _, reward in entries], dtype=torch.float64), group
    )
    for place, rewards in enumerate(groups):
        own = found[group == 10 * place - 7]
        alone = torch.tensor([reward for at, reward in entries if at == place], dtype=torch.float64)
        close(own, group_advantages(alone, torch.zeros(len(rewards), dtype=torch.int64)), atol=1e-9)
        assert own.sum().item() == pytest.approx(0, abs=1e-9)
        if min(rewards) < max(rewards):
            spread = torch.tensor(rewards, dtype=torch.float64).std(correction=0).item()
            assert own.std(correction=0).item() == pytest.approx(spread / (spread + 1e-4), abs=1e-9)
        else:
            assert own.tolist() == [0.0] * len(rewards)


def test_advantages_in_closed_form():
    found = group_advantages(torch.tensor([1.0, 0, 0, 0, 2, 2]), torch.tensor([5, 5, 5, 5, 3, 3]))
    spread = 3**0.5 / 4
    close(found, torch.tensor([0.75, -0.25, -0.25, -0.25, 0, 0]) / (spread + 1e-4), atol=1e-6)
    assert found.dtype == torch.float32


def test_near_equal_rewards_give_no_advantage():
    """Rewards that differ by their last bit give no advantage to speak of."""
    third = torch.tensor(1 / 3, dtype=torch.float32)
    rewards = torch.stack([third, third, torch.nextafter(third, torch.tensor(1.0)), third])
    found = group_advantages(rewards, torch.zeros(4, dtype=torch.int64))
    assert found.any()
    assert found.abs().max().item() < 1e-3


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 + 0.1, -0.7])
@pytest.mark.parametrize("size", [1, 3, 8, 13])
def test_equal_rewards_give_exactly_no_advantage(value, size):
    rewards = torch.full((size,), value, dtype=torch.float64)
    assert group_advantages(rewards, torch.zeros(size, dtype=torch.int64)).tolist() == [0.0] * size


@EVERY
@some
@given(PER, SEEDS)
def test_a_group_without_spread_adds_nothing_to_the_gradient(name, per, seed):
    batch = random_batch(seed, rows=6)
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.5], dtype=torch.float64)
    batch = replace(batch, advantages=group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1, 1])))
    loss = LOSSES[name]
    if name in ("prime", "dppo", "ipo"):
        # The penalty holds without an advantage.
        loss = partial(loss, penalty=0.0)
    _, slope = loss_and_slope(batch, loss, per=per)
    assert not slope[:3].any()
    other = replace(batch, new=torch.cat([batch.new[:3] + 1, batch.new[3:]]).detach())
    close(loss_and_slope(other, loss, per=per)[1], slope)


@EVERY
@some
@given(PER, SEEDS, st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_what_stands_in_the_padding_never_matters(name, per, seed, rubbish):
    batch = random_batch(seed)
    spoiled = [
        part.detach().masked_fill(~batch.mask, rubbish)
        for part in (batch.new, batch.old, batch.behaviour)
    ]
    other = Completions(spoiled[0], spoiled[1], batch.mask, batch.advantages, spoiled[2])
    value, slope = loss_and_slope(batch, LOSSES[name], per=per)
    other_value, other_slope = loss_and_slope(other, LOSSES[name], per=per)
    assert other_value == value
    assert torch.equal(other_slope, slope)
    assert not slope[~batch.mask].any()
    assert torch.equal(log_weights(other), log_weights(batch))


@EVERY
@some
@given(PER, SEEDS)
def test_more_padding_on_either_side_and_empty_completions_change_nothing(name, per, seed):
    batch = random_batch(seed)
    pad = partial(torch.nn.functional.pad, pad=(2, 1, 0, 2))
    parts = [pad(part.detach()) for part in (batch.new, batch.old, batch.mask)]
    advantages = torch.cat([batch.advantages, torch.tensor([3.0, math.nan], dtype=torch.float64)])
    wider = Completions(*parts, advantages, pad(batch.behaviour))
    value, slope = loss_and_slope(batch, LOSSES[name], per=per)
    wider_value, wider_slope = loss_and_slope(wider, LOSSES[name], per=per)
    assert wider_value == pytest.approx(value, abs=1e-12)
    close(wider_slope, pad(slope))


@EVERY
@some
@given(PER, SEEDS, st.permutations(range(5)))
def test_the_order_of_completions_does_not_matter(name, per, seed, order):
    batch = random_batch(seed)
    parts = (batch.new.detach(), batch.old, batch.mask, batch.advantages, batch.behaviour)
    value, slope = loss_and_slope(batch, LOSSES[name], per=per)
    other_value, other_slope = loss_and_slope(
        Completions(*(part[order] for part in parts)), LOSSES[name], per=per
    )
    assert other_value == pytest.approx(value, abs=1e-12)
    close(other_slope, slope[order])


@EVERY
@some
@given(PER, SEEDS, st.integers(1, 4))
def test_losses_of_micro_batches_add_up(name, per, seed, cut):
    batch = random_batch(seed)
    parts = (batch.new.detach(), batch.old, batch.mask, batch.advantages, batch.behaviour)
    total = int(batch.mask.any(1).sum())
    if per == "token":
        total = int(batch.mask.sum())
    value, slope = loss_and_slope(batch, LOSSES[name], per=per)
    halves = [
        Completions(*(part[some] for part in parts)) for some in (slice(cut), slice(cut, None))
    ]
    found = [loss_and_slope(half, LOSSES[name], per=per, total=total) for half in halves]
    assert sum(one for one, _ in found) == pytest.approx(value, abs=1e-12)
    close(torch.cat([one for _, one in found]), slope)


@EVERY
@some
@given(SEEDS)
def test_at_ratio_1_the_gradient_is_that_of_reinforce(name, seed):
    batch = random_batch(seed)
    batch = replace(batch, old=batch.new.detach(), behaviour=None)
    _, slope = loss_and_slope(batch, LOSSES[name])
    advantages = batch.advantages.clamp(min=0) if name == "positive" else batch.advantages
    new = batch.new.detach().clone().requires_grad_()
    reinforce = -(new * advantages[:, None])[batch.mask].mean()
    reinforce.backward()
    close(slope, new.grad)


@given(PER, SEEDS)
def test_the_losses_coincide_on_what_the_own_policy_wrote(per, seed):
    batch = replace(random_batch(seed), behaviour=None)
    value, slope = loss_and_slope(batch, sapo, per=per)
    for known in (None, batch.old):
        for loss in (tis, decoupled):
            found, found_slope = loss_and_slope(replace(batch, behaviour=known), loss, per=per)
            assert found == value
            assert torch.equal(found_slope, slope)
    better = replace(batch, advantages=batch.advantages.abs())
    assert loss_and_slope(better, positive, per=per)[0] == loss_and_slope(better, sapo, per=per)[0]


@given(SEEDS)
def test_unclipped_loss_is_importance_weighted(seed):
    """An uncapped weight and no clip give the importance weighted estimate."""
    batch = random_batch(seed)
    open_loss = partial(decoupled, cap=math.inf, low=1.0, high=math.inf)
    expected = -((batch.new - batch.behaviour).exp() * batch.advantages[:, None])[batch.mask].mean()
    assert policy_loss(batch, open_loss).item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.27, 1.0, -1.27, -1.27),
        (1.5, 1.0, -1.28, 0.0),  # far enough up
        (0.5, 1.0, -0.5, -0.5),  # may always come back
        (0.79, -1.0, 0.8, 0.0),  # far enough down
        (1.5, -1.0, 1.5, 1.5),
        (0.81, -1.0, 0.81, 0.81),
    ],
)
def test_the_clip_holds_only_what_has_gone_far_enough(ratio, advantage, loss, slope):
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = Completions(math.log(ratio) * one, 0 * one, one.bool(), advantage * one[0])
    found, found_slope = loss_and_slope(batch)
    assert found == pytest.approx(loss, abs=1e-12)
    assert found_slope.item() == pytest.approx(slope, abs=1e-12)


@given(SEEDS)
def test_nothing_is_pulled_further_than_the_clip(seed):
    batch = random_batch(seed, spread=3.0)
    gain = -sapo(batch) / batch.advantages[:, None]
    up = (batch.advantages > 0)[:, None].expand_as(gain)
    assert gain[up].max().item() <= 1.28 + 1e-12 if up.any() else True
    assert gain[~up].min().item() >= 0.8 - 1e-12 if not up.all() else True


@pytest.mark.parametrize(
    ("behind", "tis_weight", "decoupled_weight"),
    [(0.5, 0.5, 0.5), (2.5, 2.0, 2.5), (5.5, 2.0, 0.0)],
)
def test_how_much_a_foreign_token_counts(behind, tis_weight, decoupled_weight):
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = Completions(0 * one, 0 * one, one.bool(), one[0], -math.log(behind) * one)
    assert policy_loss(batch, tis).item() == pytest.approx(-tis_weight, abs=1e-12)
    assert policy_loss(batch, decoupled).item() == pytest.approx(-decoupled_weight, abs=1e-12)


@EVERY
@pytest.mark.parametrize("size", [3e4, -3e4])
def test_wild_log_probabilities_give_finite_numbers(name, size):
    row = torch.full((1, 2), size)
    for parts in ((row, 0 * row, 0 * row), (0 * row, row, 0 * row), (0 * row, 0 * row, row)):
        for advantage in (-1.0, 1.0):
            new, old, behaviour = parts
            batch = Completions(new, old, row.bool(), torch.tensor([advantage]), behaviour)
            value, slope = loss_and_slope(batch, LOSSES[name])
            assert math.isfinite(value)
            assert slope.isfinite().all()


@EVERY
def test_excluded_token_has_no_gradient(name):
    """A token that the policy excludes by now gives a finite loss and no gradient."""
    new = torch.tensor([[-math.inf, -1.0]])
    value, slope = loss_and_slope(
        Completions(new, -torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.ones(1)),
        LOSSES[name],
    )
    assert math.isfinite(value)
    assert slope[0, 0] == 0
    assert (slope[0, 1] != 0) == (
        name != "prime"
    )  # whose mean over the completion leaves all of it out


@EVERY
def test_no_stranger_lifts_a_token_above_the_cap(name):
    """Whatever log-probability the writer of a completion states."""
    new = torch.full((1, 3), -1.0)
    for stated in (-1e4, -9.0, -0.5, 0.0):
        batch = Completions(
            new, new, torch.ones(1, 3).bool(), -torch.ones(1), torch.full((1, 3), stated)
        )
        _, slope = loss_and_slope(batch, LOSSES[name], per="completion_sum")
        assert slope.abs().max().item() <= 8.1


@EVERY
def test_half_precision_is_computed_in_single(name):
    batch = random_batch(3)
    half = Completions(
        *(part.detach().bfloat16() for part in (batch.new, batch.old)),
        batch.mask,
        batch.advantages.float(),
    )
    wide = Completions(half.new.float(), half.old.float(), batch.mask, half.advantages)
    assert policy_loss(half, LOSSES[name]).dtype == torch.float32
    assert policy_loss(half, LOSSES[name]).item() == policy_loss(wide, LOSSES[name]).item()


def test_no_tokens_no_loss():
    new = torch.zeros(2, 3, requires_grad=True)
    batch = Completions(new, torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), torch.ones(2))
    for per in PERS:
        value, slope = loss_and_slope(batch, per=per)
        assert value == 0
        assert not slope.any()


@pytest.mark.parametrize(
    ("scale", "deviation", "divisor"),
    [
        ("group", "population", 0.5),
        ("group", "sample", 0.5**0.5),
        ("batch", "population", 0.1875**0.5),
        ("batch", "sample", 0.5),
        ("none", "population", 1 - 1e-4),
    ],
)
def test_advantages_by_each_scale_and_deviation(scale, deviation, divisor):
    rewards, groups = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
    found = group_advantages(rewards, groups, scale=scale, deviation=deviation)
    close(found, torch.tensor([-0.5, 0.5, 0, 0]) / (divisor + 1e-4), atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_one_has_no_advantage(scale):
    found = group_advantages(
        torch.tensor([0.7]), torch.tensor([3]), scale=scale, deviation="sample"
    )
    assert found.tolist() == [0.0]


def test_a_reference_draws_the_policy_towards_it():
    """The gradient of the KL term is 0 at the reference, and else leads there."""
    new = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    reference = torch.tensor([[-1.0, -0.5, -2.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    batch = Completions(new, new.detach(), mask, torch.zeros(1), None, reference)
    Objective(sapo, kl_coef=0.5)(batch).backward()
    assert new.grad[0, 0] == 0
    assert new.grad[0, 1] < 0 < new.grad[0, 2]


def test_the_off_policy_mask_drops_the_bad_and_far():
    new = torch.full((4, 2), -2.0, requires_grad=True)
    writer = torch.tensor([[-1.0, -1.0], [-1.9, -2.0], [-1.0, -1.0], [-3.0, -3.0]])
    advantages = torch.tensor([-1.0, -1.0, 1.0, -1.0])
    batch = Completions(new, new.detach(), torch.ones(4, 2).bool(), advantages, writer)
    Objective(sapo, off_policy_mask=0.5)(batch).backward()
    assert new.grad.any(1).tolist() == [False, True, True, True]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.floats(-700, 700))
def test_effective_sample_size(logs, shift):
    weights = [math.exp(log) for log in logs]
    expected = sum(weights) ** 2 / sum(weight**2 for weight in weights)
    found = effective_sample_size(torch.tensor(logs, dtype=torch.float64) + shift).item()
    assert found == pytest.approx(expected, rel=1e-9)
    assert 1 - 1e-9 <= found <= len(logs) + 1e-9


def test_effective_sample_size_at_the_ends():
    assert effective_sample_size(torch.zeros(7)).item() == 7
    assert effective_sample_size(torch.tensor([0.0, -math.inf, -math.inf])).item() == 1
    assert effective_sample_size(torch.tensor([-math.inf, -math.inf])).item() == 0
    assert effective_sample_size(torch.tensor([])).item() == 0


def test_completion_weight_is_the_product():
    """The weight of a completion is the product of its tokens weights."""
    batch = random_batch(1)
    expected = ((batch.old - batch.behaviour) * batch.mask).sum(1)
    close(log_weights(batch), expected)
    assert not log_weights(replace(batch, behaviour=None)).any()


def test_what_does_not_fit_is_refused():
    rows, flags, row = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2)
    with pytest.raises(ValueError, match="mask bool"):
        Completions(rows, rows, rows, row)
    with pytest.raises(ValueError, match="old must have the shape"):
        Completions(rows, rows[:1], flags, row)
    with pytest.raises(ValueError, match="behaviour must have the shape"):
        Completions(rows, rows, flags, row, rows.T)
    with pytest.raises(ValueError, match="one number per completion"):
        Completions(rows, rows, flags, rows)
    for bad in (math.nan, -math.inf):
        with pytest.raises(ValueError, match="behaviour holds a number that is not finite"):
            Completions(rows, rows, flags, row, rows + bad)
    for bad in (math.nan, math.inf):
        with pytest.raises(
            ValueError, match="new holds NaN or infinity: the policy that is updated has diverged"
        ):
            Completions(rows + bad, rows, flags, row)
    with pytest.raises(ValueError, match="reward is not finite"):
        group_advantages(torch.tensor([1.0, math.inf]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"shape \(B,\)"):
        group_advantages(row, torch.tensor([0]))
    batch = Completions(rows, rows, flags, row)
    with pytest.raises(ValueError, match="per must be"):
        policy_loss(batch, per="word")
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        policy_loss(batch, per="max_tokens")
    with pytest.raises(ValueError, match="total must be at least 1"):
        policy_loss(batch, total=0)


@pytest.mark.gpu
@EVERY
@pytest.mark.parametrize("per", PERS)
def test_on_a_gpu_it_is_the_same(name, per):
    batch = random_batch(11)
    rewards, group = torch.tensor([0.0, 1.0, 0.5, 0.5, 0.5]), torch.tensor([1, 1, 1, 0, 0])
    advantages = group_advantages(rewards.cuda(), group.cuda())
    close(advantages.cpu(), group_advantages(rewards, group), atol=1e-6)
    parts = (batch.new.detach(), batch.old, batch.mask, batch.advantages, batch.behaviour)
    there = Completions(*(part.cuda() for part in parts))
    value, slope = loss_and_slope(batch, LOSSES[name], per=per)
    other_value, other_slope = loss_and_slope(there, LOSSES[name], per=per)
    assert other_value == pytest.approx(value, abs=1e-12)
    close(other_slope.cpu(), slope)
    close(log_weights(there).cpu(), log_weights(batch))
