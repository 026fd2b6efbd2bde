"""Deadlines that follow what a transfer moves: over links of virtual time, a slow one is waited for
and a trickle is not.
"""

import asyncio

import pytest
import torch

from shoal.optim import FLOAT32, RoundKey
from shoal.optim.exchange.base import Contribution
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.round_time import FIRST_RATE
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.pacing.progress import (
    MAX_EXTENSION_S,
    SLOWEST_BYTES_PER_S,
    WINDOW_S,
    Progress,
    extension_s,
)
from tests.sim.clock import VirtualLoop
from tests.sim.isolation import isolated
from tests.sim.network import Links, SimNetwork, Trace, settled
from tests.support.records import member_of

MB = 1_000_000
SWARM, MODEL = "a" * 52, "0" * 64


def test_how_long_a_transfer_may_go_on():
    assert extension_s(MB) == MB / SLOWEST_BYTES_PER_S
    assert extension_s(2**60) == MAX_EXTENSION_S


def given_up(rates, nbytes=15 * MB, deadline=120.0, longest=1800.0):
    """The second in which a transfer is given up whose two directions move at so many bytes a
    second; None if it is complete.
    """
    progress, left = Progress(deadline, longest), [float(nbytes)] * len(rates)
    for now in range(100_000):
        if progress.overdue(float(now), tuple(left)):
            return now
        left = [max(rest - rate(now), 0.0) for rest, rate in zip(left, rates, strict=True)]
        if not any(left):
            return None
    return None


def steady(rate):
    return lambda now: rate


@pytest.mark.parametrize("rate", [9e3, 15e3, 125e3])
def test_slow_link_is_awaited_if_in_time(rate):
    """A slow link is waited for while it will be done in time."""
    assert given_up([steady(rate), steady(1e6)]) == (None if rate > 15 * MB / 1800 else 120)


def test_without_more_time_the_deadline_holds():
    assert given_up([steady(125e3 - 100), steady(1e6)], longest=0.0) == 120


@pytest.mark.parametrize("slow", [0, 1])
def test_a_trickle_is_dropped_at_the_deadline_in_whichever_direction(slow):
    rates = [steady(1e6), steady(1e6)]
    rates[slow] = steady(100)
    assert given_up(rates) == 120


def test_who_slows_down_to_a_trickle_is_dropped_soon():
    """Most of it came quickly: what counts is what came recently."""
    fast = steady(100e3)
    assert 140 <= given_up([lambda now: 100e3 if now < 140 else 5, fast]) <= 140 + WINDOW_S + 1


def test_nothing_goes_on_beyond_the_longest():
    assert (
        given_up(
            [lambda now: 15 * MB / 1800 * 1.2 if now < 1795 else 0, steady(1e6)], nbytes=18 * MB
        )
        <= 1800
    )


@pytest.fixture
def network():
    loop = VirtualLoop(busy=1_000_000)
    made = SimNetwork(loop, 1, Links(0.02, 0.0, 125e3), Trace())  # 1 Mbit/s
    with isolated(loop):
        yield made
        made.end()


def exchanged(network, kind, exchange=10.0, chunk=5.0):
    """What two peers get that exchange 3 MB with a deadline of so many seconds, and the seconds
    that it took.
    """
    hosts = [network.host(name, network.identity(name)) for name in "ab"]
    members = {host.peer_id: member_of(host.peer_id, name=host.name) for host in hosts}
    timeouts = ExchangeTimeouts(10.0, chunk, exchange)
    exchanges = [
        kind(PeerContext(host, host.identity, SWARM, MODEL, 0, lambda: members), timeouts)
        for host in hosts
    ]

    async def both():
        values = [torch.full((750_000,), value) for value in (1.0, 3.0)]
        begun = [
            one.start(Contribution(RoundKey(SWARM, 0), [value], 1.0, FLOAT32))
            for one, value in zip(exchanges, values, strict=True)
        ]
        return await asyncio.gather(*map(settled, begun))

    began = network.loop.time()
    means = network.loop.run_until_complete(both())
    return [mean and mean.tensors[0][0].item() for mean in means], network.loop.time() - began


@pytest.mark.parametrize("kind", [PairExchange, GroupExchange])
def test_slow_links_exchange_beyond_their_deadline(network, kind):
    """Peers on a slow link exchange more than their deadline allows for."""
    got, seconds = exchanged(network, kind)
    assert got == [2.0, 2.0]
    assert 24 < seconds < 40


@pytest.mark.parametrize(("kind", "least"), [(PairExchange, 3e6 / FIRST_RATE), (GroupExchange, 60)])
def test_a_peer_whose_bytes_only_trickle_is_given_up(network, kind, least):
    """A group does at the deadline; a pair once training has waited for as long as half 1 Mbit/s
    takes.
    """
    network.links = Links(
        0.02, 0.0, 3e3
    )  # something moves within each chunk timeout, and 3 MB take a quarter of an hour
    got, seconds = exchanged(network, kind, exchange=60.0, chunk=30.0)
    assert got == [None, None]
    assert least <= seconds < 300
