"""An update refused by a node's screen never counts, in pairs and groups; the screen's mean is what the node gets."""

import pytest
import torch

from shoal.optim import FLOAT32, RoundKey, weighted_mean
from shoal.optim.codecs.registry import codec_named
from shoal.optim.exchange.averaging import UpdateScreen
from shoal.optim.exchange.base import Contribution
from shoal.swarm.exchange.context import ExchangeTimeouts
from tests.clocks import until
from tests.swarm.conftest import SWARM, paired


class Choosy:
    """Refuses what begins with ``bad``; its mean is the first one's, plus 100."""

    def __init__(self, bad=None, gathers=False):
        self.bad, self.gathers, self.asked = bad, gathers, []

    def problem(self, key, own, peer, theirs):
        self.asked.append((key.round, peer, own()[0].flatten()[0].item(), theirs[0].flatten()[0].item()))
        return "it is bad" if theirs[0].flatten()[0].item() == self.bad else None

    def mean(self, me, fragment, contributions, even=0):
        mean = weighted_mean(contributions)
        mean.tensors[0].add_(100.0)
        return mean


@pytest.fixture
def two(network):
    """Exchanges of two hosts, and how to start a round in which the first calls."""
    exchanges = paired(network, 2, ExchangeTimeouts(30.0, 10.0, 30.0))

    def make(*screens):
        for exchange, screen in zip(exchanges, screens, strict=True):
            exchange._screen = screen

        def run(caller, callee, round=0):
            first = exchanges[0].start(Contribution(RoundKey(SWARM, round), [torch.full((4,), caller)]))
            until(lambda: exchanges[1]._matchmaker.held.calls)
            second = exchanges[1].start(Contribution(RoundKey(SWARM, round), [torch.full((4,), callee)]))
            return [None if mean is None else mean.tensors[0][0].item() for mean in (first.result(), second.result())]

        return run

    return [exchange._context.me for exchange in exchanges], make


@pytest.mark.parametrize("who", [0, 1])
def test_a_pair_of_which_one_refuses_goes_apart(two, who):
    ids, make = two
    choosy, other = Choosy(bad=5.0), Choosy()
    run = make(*((choosy, other) if who == 0 else (other, choosy)))
    values = (1.0, 5.0) if who == 0 else (5.0, 1.0)
    assert run(*values) == [None, None]
    assert choosy.asked == [(0, ids[1 - who], 1.0, 5.0)]
    assert run(1.0, 3.0, round=1) == [102.0, 102.0]


def test_each_side_of_a_pair_takes_what_its_own_defence_makes_of_it(two):
    _, make = two
    gentle = Choosy()
    gentle.mean = lambda me, fragment, contributions, even=0: weighted_mean(contributions)
    assert make(gentle, Choosy())(1.0, 3.0) == [2.0, 102.0]


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_group_goes_on_without_whom_the_others_refuse(school, count, codec):
    peers = school.peers(count, screen=Choosy(bad=9.0, gathers=True))
    handles = [peer.start(0, 9.0 if number == 1 else 2.0, codec_named(codec)) for number, peer in enumerate(peers)]
    expected = [None if number == 1 else 102.0 for number in range(count)]
    assert [value and round(value, 3) for value in school.values(handles)] == expected
    assert peers[1].id not in handles[0].result().members


def test_one_that_refuses_everybody_puts_only_itself_out(school):
    gathers = UpdateScreen()
    gathers.gathers = True
    peers = school.peers(5, screen=gathers)
    peers[0].exchange._screen = Choosy(bad=2.0)
    assert school.values([peer.start(0, 2.0) for peer in peers]) == [None, 2.0, 2.0, 2.0, 2.0]


def test_who_must_see_each_contribution_takes_no_part_in_an_all_reduce(school):
    peers = school.ranked(school.peers(4, wait=2.0))
    careful = peers[-1]
    careful.exchange._screen = Choosy(gathers=True)
    handles = [peer.start(0, 2.0, FLOAT32) for peer in peers]
    values = school.values(handles)
    assert values[-1] is None
    assert values[:-1] == [2.0, 2.0, 2.0]  # an all-reduce that fails is done once more, by gathering, with those who are left
