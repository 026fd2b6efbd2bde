"""What a stated weight can do: in a mean, in a simulation of pairs and groups, and to the share that a rule sees."""

from statistics import median_low

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim import DiLoCo, Eager, GASLoC, LocalSGD, NoLoCo, Simulation, weighted_mean
from shoal.optim.exchange.base import MOST, counted_weights

LIES = (1e30, 1e-30, 1e300)


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=9))
def test_no_weight_is_more_than_four_times_the_median(stated):
    counted, limit = counted_weights(stated)
    positive = [weight for weight in stated if weight]
    assert limit == MOST * (median_low(positive) if positive else 1.0)
    assert counted == ([min(weight, limit) for weight in stated] if positive else [1.0] * len(stated))


@given(st.lists(st.floats(1.0, 10.0), min_size=2, max_size=6), st.data())
def test_a_minority_cannot_own_a_mean(honest, data):
    lies = data.draw(st.lists(st.sampled_from(LIES), min_size=1, max_size=(len(honest) - 1) or 1))
    counted, _ = counted_weights([*honest, *lies])
    share = sum(counted[len(honest) :]) / sum(counted)
    assert share <= MOST * len(lies) / (MOST * len(lies) + len(honest) / 10)
    if len(honest) == len(lies) == 1:
        assert share <= MOST / (MOST + 1)


@pytest.mark.parametrize("lie", LIES)
def test_in_a_pair_both_sides_count_the_same(lie):
    def parts(order):
        made = {"a": (lie, torch.tensor([10.0])), "b": (2.0, torch.tensor([0.0]))}
        return [(peer, made[peer][0], [made[peer][1].clone()]) for peer in order]

    here, there = weighted_mean(parts("ab")), weighted_mean(parts("ba"))
    assert here.tensors[0].item() == there.tensors[0].item() == pytest.approx(8.0 if lie > 2 else 2.0)
    assert (here.weight, here.limit) == (there.weight, there.limit)


def test_the_first_tensors_get_a_plain_mean():
    parts = [("a", 3.0, [torch.tensor(1.0), torch.tensor(1.0)]), ("b", 1.0, [torch.tensor(5.0), torch.tensor(5.0)])]
    assert [tensor.item() for tensor in weighted_mean(parts, even=1).tensors] == [3.0, 2.0]


def moved(method, lie, *, size, steps=40, peers=6, **options):
    """How far the honest peers are from their optimum, 0, where one peer pulls towards 1 and states the weight ``lie``."""

    def peer(exchange):
        hostile = exchange.peer == "peer0"
        weight = torch.nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([weight], lr=0.1)
        opt = method(inner, exchange, every=5, weight=(lambda tokens, steps: lie) if hostile else 1.0, **options)
        for _ in range(steps):
            exchange.sleep(1.0)
            weight.grad = weight.detach() - float(hostile)
            opt.step()
        opt.finish()
        return opt.slow[0].item()

    found = Simulation([f"peer{number}" for number in range(peers)], seed=1, size=size).run(peer)
    return max(abs(value) for name, value in found.items() if name != "peer0")


@pytest.mark.parametrize("lie", [1e30, 1e-30])
@pytest.mark.parametrize(
    ("method", "size", "most"),
    [(NoLoCo, 2, 0.45), (LocalSGD, 2, 0.45), (GASLoC, 2, 0.3), (DiLoCo, 6, 0.5), (Eager, 6, 0.5)],
)
def test_a_stated_weight_moves_the_others_no_further_than_four_honest_peers_would(method, size, most, lie):
    assert moved(method, lie, size=size) <= most
    assert moved(method, MOST, size=size) == pytest.approx(moved(method, 1e30, size=size), abs=1e-6)


def test_a_rule_that_asks_for_its_share_is_told_the_counted_one():
    """Eager updates put the own share in at once: one above 1 would take the others' away."""
    shares = []

    def peer(exchange):
        weight = torch.nn.Parameter(torch.zeros(1))
        opt = Eager(torch.optim.SGD([weight], lr=0.1), exchange, every=1, weight=100.0 if exchange.peer == "a" else 1.0)
        apply = opt.rule.apply

        def noted(slow, fast, mean, state, context):
            if context.members > 1:
                shares.append((exchange.peer, context.share))
            apply(slow, fast, mean, state, context)

        object.__setattr__(opt.rule, "apply", noted)
        for _ in range(4):
            exchange.sleep(1.0)
            weight.grad = torch.ones(1)
            opt.step()

    Simulation(["a", "b"]).run(peer)
    assert dict(shares) == {"a": pytest.approx(0.8), "b": pytest.approx(0.2)}
