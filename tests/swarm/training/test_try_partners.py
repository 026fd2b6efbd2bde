"""An own loop that has its partners' weights tried."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.optim import Alone, NoLoCo
from shoal.optim.exchange.base import RoundKey
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.training.session import Session, SessionError


def session(check_loss=True, model=True, optimizer=True):
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    opt = NoLoCo(torch.optim.SGD(module.parameters(), lr=0.1), Alone(), every=2, lag=0)
    return SimpleNamespace(
        settings=SimpleNamespace(check_loss=check_loss), _screen=DistanceScreen(suspect=0), _model=module if model else None,
        _opt=opt if optimizer else None, _ranks=None,
    )  # fmt: skip


def square(model, batch):
    return model(batch).square().mean()


def test_what_a_partner_sends_is_tried_on_the_loops_own_batches():
    mine = session()
    Session.try_partners(mine, square, itertools.repeat(torch.ones(2, 1)))
    assert "4" in mine._screen.problem(RoundKey("run", 0), lambda: [torch.ones(1, 1)], "peer", [torch.full((1, 1), 2.0)])
    assert mine._screen.problem(RoundKey("run", 1), lambda: [torch.ones(1, 1)], "peer", [torch.full((1, 1), 0.5)]) is None


def test_batches_that_end_end_the_trying_and_each_is_used_once():
    mine, used = session(), []
    batches = (used.append(number) or torch.ones(2, 1) for number in range(4))
    Session.try_partners(mine, square, batches)
    for number in range(3):
        verdict = mine._screen.problem(RoundKey("run", number), lambda: [torch.ones(1, 1)], "peer", [torch.full((1, 1), 9.0)])
        assert (verdict is None) == (number == 2)
    assert used == [0, 1, 2, 3]


def test_a_swarm_that_does_not_ask_for_it_tries_nothing():
    mine = session(check_loss=False, model=False)
    Session.try_partners(mine, square, [])
    assert mine._screen.loss_check is None


@pytest.mark.parametrize("lacks", ["model", "optimizer"])
def test_it_needs_a_module_and_an_optimizer(lacks):
    with pytest.raises(SessionError, match="make it first"):
        Session.try_partners(session(**{lacks: False}), square, [])
