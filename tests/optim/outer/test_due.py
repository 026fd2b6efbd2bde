"""The optimizer numbers what it hands in as its exchange says."""

from types import SimpleNamespace

import torch

from shoal.optim import StreamingDiLoCo
from shoal.optim.exchange.base import Alone
from shoal.optim.ranks.ranks import RankExchange


class Numbered(Alone):
    """An exchange whose fragments each have rounds of their own."""

    def __init__(self):
        self.later, self.handed_in = [0, 0], []

    def due(self, round, fragment):
        return round + self.later[fragment]

    def start(self, contribution):
        self.handed_in.append((contribution.key.fragment, contribution.key.round))
        return super().start(contribution)


def test_what_is_handed_in_has_the_round_that_is_due():
    """Mutants: the optimizer's own count; the rounds of the other fragment move too."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    exchange = Numbered()
    opt = StreamingDiLoCo(
        torch.optim.SGD(model.parameters(), lr=0.1), exchange, every=4, fragments=2
    )

    def turn():
        exchange.handed_in.clear()
        for _ in range(4):
            model(torch.ones(1, 4)).sum().backward()
            opt.step()
        return dict(exchange.handed_in)

    first = turn()
    assert sorted(first.values()) == [0, 1]
    exchange.later[1] = 6
    second = turn()
    assert second == {0: first[0] + 2, 1: first[1] + 2 + 6}
    assert opt.round == second[1] + (1 if first[1] else 2)
    exchange.later = [-6, 0]  # the other one stays in its rounds
    assert turn() == {0: first[0] + 4, 1: second[1] + 2}


def test_ranks_pass_the_question_on():
    exchange = Numbered()
    exchange.later[1] = 4
    ranks = RankExchange(SimpleNamespace(agreed=lambda value: value), exchange)
    assert [ranks.due(3, fragment) for fragment in (0, 1)] == [3, 7]


def test_a_node_that_goes_back_stays_in_step():
    """Mutant: all fragments are in one round, which is that of one of them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    opt = StreamingDiLoCo(
        torch.optim.SGD(model.parameters(), lr=0.1), Alone(), every=6, fragments=3
    )
    opt.round, opt.applied = 105, [102, 103, 11]
    assert opt.applied_before(103) == [102, 100, 11]
    opt.go_back(40)
    assert opt.round == 40
    assert opt.applied == [39, 37, 11]
    opt.go_back(2)
    assert opt.applied == [0, 1, -1]
