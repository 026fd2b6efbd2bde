"""A late joiner's first round: it takes part with weight 0, so the others go on as if it were absent."""

import pytest
import torch

from shoal.optim import Simulation, method_named
from shoal.optim.exchange.base import weighted_mean
from shoal.optim.outer.fragments import by_tokens

PAIRS, GROUPS = ("noloco", "local", "gasloc"), ("diloco", "eager", "co2", "sparseloco")


def tensors(value):
    return [torch.full((3,), value)]


def test_a_peer_without_weight_takes_part_and_is_not_in_the_mean():
    mean = weighted_mean([("c", 1.0, tensors(4.0)), ("a", 0.0, tensors(100.0)), ("b", 3.0, tensors(8.0))])
    assert torch.equal(mean.tensors[0], torch.full((3,), 7.0))
    assert (mean.weight, mean.members, mean.counted) == (4.0, ("a", "b", "c"), 2)


def test_if_all_weights_are_0_all_count_the_same():
    mean = weighted_mean([("b", 0.0, tensors(4.0)), ("a", 0.0, tensors(8.0))])
    assert torch.equal(mean.tensors[0], torch.full((3,), 6.0))
    assert (mean.weight, mean.members, mean.counted) == (2.0, ("a", "b"), 2)


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ValueError, match="finite and not negative"):
        weighted_mean([("a", weight, tensors(1.0)), ("b", 1.0, tensors(1.0))])


def trained(method, peers, listening=(), rounds=1, **options):
    """Return the slow weights of each peer after ``rounds`` rounds; ``listening`` ones join late, with other gradients."""
    made = method_named(method)
    size = len(peers) if made.group == "everyone" else 2

    def train(exchange):
        weight = torch.nn.Parameter(torch.zeros(4))
        opt = made.make(torch.optim.SGD([weight], lr=0.1), exchange, every=2, **options)
        if exchange.peer in listening:
            opt.listen()
        infos = []
        opt.on_round = infos.append
        for step in range(2 * rounds):
            weight.grad = torch.full((4,), 1.0 + ord(exchange.peer[0]) - ord("a")) * (1 + step)
            opt.count(ord(exchange.peer[0]))
            opt.step()
        opt.finish()
        return opt.slow[0].clone(), weight.detach().clone(), [info.members for info in infos]

    return Simulation(peers, size=size).run(train)


# (Alone, sparseloco does not send, and so loses nothing to its codec.)
@pytest.mark.parametrize("method", [*PAIRS, *GROUPS[:-1]])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_others_go_on_as_if_it_were_not_there(method, weighted):
    options = {"weight": by_tokens} if weighted else {}
    alone = trained(method, ["a"], **options)["a"][0]
    slow, _, members = trained(method, ["a", "b"], listening=("b",), **options)["a"]
    assert torch.allclose(slow, alone, rtol=0, atol=1e-6)
    assert members == [("a", "b")]


@pytest.mark.parametrize("method", GROUPS)
@pytest.mark.parametrize("weighted", [False, True])
def test_in_a_group_it_holds_what_the_others_hold(method, weighted):
    options = {"weight": by_tokens} if weighted else {}
    found = trained(method, ["a", "b", "c"], listening=("c",), rounds=3, **options)
    if method != "eager":  # each is ahead of the group by its own pseudo-gradient there
        assert torch.allclose(found["c"][0], found["a"][0], rtol=0, atol=1e-6)
    once = trained(method, ["a", "b", "c"], listening=("c",), **options)
    pair = trained(method, ["a", "b"], **options)
    assert torch.allclose(once["a"][0], pair["a"][0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_with_a_partner_it_takes_the_partners_mean(weighted):
    found = trained("local", ["a", "b"], listening=("b",), **({"weight": by_tokens} if weighted else {}))
    assert torch.equal(found["b"][0], found["a"][0])


@pytest.mark.parametrize("method", [*PAIRS, *GROUPS])
@pytest.mark.parametrize("weighted", [False, True])
def test_two_newcomers_average_like_any_two(method, weighted):
    found = trained(method, ["a", "b"], listening=("a", "b"), **({"weight": by_tokens} if weighted else {}))
    usual = trained(method, ["a", "b"], **({"weight": lambda tokens, steps: 1.0} if weighted else {}))
    for peer in "ab":
        assert torch.allclose(found[peer][0], usual[peer][0], rtol=0, atol=1e-6)


def test_only_the_first_round_does_not_count():
    found = trained("local", ["a", "b"], listening=("b",), rounds=2)
    # Round 0: both take a's weights. Round 1: the plain mean of what both made of them.
    first = trained("local", ["a"])["a"][0]
    moves = [0.1 * (1.0 + peer) * (3 + 4) for peer in (0, 1)]
    assert torch.allclose(found["a"][0], first - sum(moves) / 2, rtol=0, atol=1e-6)
    assert torch.equal(found["a"][0], found["b"][0])
