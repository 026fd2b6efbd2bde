"""Two whose weights have drifted from each other never wait for each other, whoever asked first."""

import pytest
import torch

from shoal.swarm.state.selection import SOON, STATE_PROTOCOL, StateServer
from shoal.swarm.state.snapshot import State
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.messages import Answer, StateHeader, StateRequest

SWARM, MODEL = "a" * 52, "0" * 64


@pytest.fixture
def two(network):
    """Two hosts, the one with the lower peer id first, and the server of the other."""
    lower, higher = sorted((network.host() for _ in range(2)), key=lambda host: host.peer_id)
    return lower, higher


def ask(network, asking, asked, *, astray, since=0):
    """A question, answered with "wait"; returns what hears the next answer."""

    async def begin():
        stream = await asking.open(asked.peer_id, STATE_PROTOCOL, timeout=30)
        await stream.send(pack(StateRequest(swarm=SWARM, model=MODEL, astray=astray, round=5, since=since)), 5)
        assert unpack(await stream.receive(Answer.LIMIT, 5), Answer).verdict == "wait"
        return stream

    stream = asking.call(begin(), 60)

    async def hear(seconds):
        said = unpack(await stream.receive(StateHeader.LIMIT, seconds), Answer, StateHeader)
        return said.verdict if isinstance(said, Answer) else said.round

    return lambda: asking.call(hear(5), 60)


def never():
    raise AssertionError("weights that have drifted are handed to nobody")


def test_who_drifts_turns_away_those_with_lower_ids_that_drifted_too(network, two):
    lower, higher = two
    server = StateServer(higher, SWARM, MODEL, [(4,)])
    answer = ask(network, lower, higher, astray=True)
    server.diverged = 5
    server.offer(never)
    assert answer() == "refuse"


def test_who_asks_for_a_round_that_is_far_away_keeps_no_place(network, two):
    """The fault: a caller may state any round to wait for, and 64 such kept all newcomers out for a minute each."""
    asking, asked = two
    server = StateServer(asked, SWARM, MODEL, [(4,)])
    far = ask(network, asking, asked, astray=False, since=2**53)
    near = ask(network, asking, asked, astray=False, since=5 + SOON)
    server.offer(lambda: State(5, [torch.zeros(4)], {}, [4]))
    assert far() == "busy"
    assert len(server._wanted) == 1
    server.offer(lambda: State(5 + SOON, [torch.zeros(4)], {}, [4]))
    assert near() == 5 + SOON


@pytest.mark.parametrize(("first_asks", "astray"), [(True, False), (False, True)], ids=["a newcomer", "a higher id"])
def test_others_wait_until_it_is_back(network, two, first_asks, astray):
    asking, asked = two if first_asks else two[::-1]
    server = StateServer(asked, SWARM, MODEL, [(4,)])
    ask(network, asking, asked, astray=astray)
    server.diverged = 5
    server.offer(never)
    assert len(server._wanted) == 1
