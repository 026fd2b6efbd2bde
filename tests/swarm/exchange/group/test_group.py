"""Groups: the arithmetic of dealing and deciding, the channel to a leader where it breaks, and a
mean over four real hosts.
"""

import asyncio
import gc
import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim import RoundKey
from shoal.optim.codecs.registry import codec_named
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.common_mean import common_mean
from shoal.optim.exchange.weighted_mean import weighted_mean
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.group.leader import partition_into_groups
from shoal.swarm.exchange.group.roster import HeartbeatChannel
from shoal.swarm.exchange.round_tracker import RoundTracker
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.envelope import pack
from shoal.swarm.wire.messages import GroupAlive, GroupReport
from tests.sim.clock import VirtualLoop
from tests.sim.memory_stream import stream_pair
from tests.support.records import member_of


@given(
    st.sets(st.text(min_size=1), min_size=2, max_size=40),
    st.integers(2, 9),
    st.integers(0, 5),
    st.integers(0, 99),
)
def test_everybody_is_dealt_into_one_group_of_nearly_equal_size(peers, largest, seed, round):
    groups = partition_into_groups(seed, round, peers, largest)
    assert sorted(itertools.chain(*groups)) == sorted(peers)
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 2
    assert max(sizes) <= largest + (largest == 2 and len(peers) % 2)
    assert groups == partition_into_groups(seed, round, sorted(peers, reverse=True), largest)


def test_a_largest_group_of_one_is_a_mistake():
    with pytest.raises(ValueError):
        partition_into_groups(0, 0, "ab", 1)


@given(
    st.integers(2, 7).flatmap(
        lambda n: st.dictionaries(st.integers(0, n - 1), st.integers(0, 2**n - 1), max_size=n)
    )
)
def test_all_takers_hold_the_whole_mean_and_are_in_it(reports):
    held = {place: places | 1 << place for place, places in reports.items()}
    mean, takers = common_mean(held)
    taking = [place for place in held if takers >> place & 1]
    if not mean:
        assert takers == 0
        return
    assert len(taking) >= 2
    for place in taking:
        assert mean & ~held[place] == 0
        assert mean >> place & 1


@pytest.mark.parametrize(("held", "expected"), [
    ({0: 0b111, 1: 0b111, 2: 0b111}, (0b111, 0b111)),
    ({0: 0b111, 1: 0b111}, (0b111, 0b11)),  # the third died, but both have what it sent
    ({0: 0b111, 1: 0b011}, (0b011, 0b11)),  # only one has it
    ({0: 0b011, 1: 0b011, 2: 0b111}, (0b011, 0b011)),  # what the third sent was of no use
    # the first two cannot reach each other
    ({0: 0b1101, 1: 0b1110, 2: 0b1111, 3: 0b1111}, (0b1110, 0b1110)),
    # one that says it holds nobody's goes alone
    ({0: 0b1111, 1: 0b1111, 2: 0b0100, 3: 0b1111}, (0b1111, 0b1011)),
    # whom all the others refuse is out, alone
    ({0: 0b0111, 1: 0b0111, 2: 0b0111, 3: 0b1111}, (0b0111, 0b0111)),
    # one refuses one: the refused is out
    ({0: 0b1101, 1: 0b1111, 2: 0b1111, 3: 0b1111}, (0b1101, 0b1101)),
    ({0: 0b1}, (0, 0)), ({0: 0b01, 1: 0b10}, (0, 0)), ({}, (0, 0)),
])  # fmt: skip
def test_what_is_decided(held, expected):
    assert common_mean(held) == expected


def test_latecomer_goes_to_its_fragments_next_round():
    """A latecomer is sent to the next round of its fragment."""
    rounds = RoundTracker(3)
    rounds.begin(4, 1)
    assert rounds.instead(4, 1) is None
    assert rounds.instead(1, 1) == 4
    rounds.end(4, 1)
    assert [rounds.instead(round, 1) for round in (1, 4, 7)] == [7, 7, None]
    rounds.begin(7, 1)
    assert [rounds.instead(round, 1) for round in (4, 6, 7, 8, 10)] == [7, 7, None, 10, None]
    assert rounds.next_round == 8
    assert rounds.instead(5, 3) == 8  # a last average of everything, behind where this node will be


def test_joiner_tells_of_no_round_before_its_first():
    """A node that joined tells of no round before its first."""
    rounds = RoundTracker(2)
    rounds.next_round = 5
    assert [rounds.instead(round, 0) for round in (1, 4, 5, 6)] == [5, 6, None, None]


def test_what_a_node_leads_says_nothing_of_its_own_rounds():
    rounds = RoundTracker(1)
    rounds.formed(10**6, 0)
    assert rounds.instead(10**6, 0) == 10**6 + 1
    assert rounds.instead(3, 0) is None


@given(st.integers(1, 5), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_who_moves_stays_in_step_and_within_the_limit(fragments, mine, wanted, limit):
    moved = RoundTracker(fragments).within(wanted, mine, limit)
    assert moved == mine or (
        mine < moved <= min(wanted, limit) and (wanted - moved) % fragments == 0
    )


def test_broken_channel_leaves_no_error_behind():
    """asyncio reports an exception that nobody has looked at, and a node's log would show it as a
    warning.
    """
    reported = []

    async def work():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        one, two = (Stream("x", *ends, TrafficMeter()) for ends in stream_pair())
        hearing = asyncio.ensure_future(
            HeartbeatChannel(one, 5.0).receive(loop.time() + 5.0, GroupReport)
        )
        for _ in range(3):
            await asyncio.sleep(0)
        reading = [
            task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_receive"
        ]  # one, before Python 3.12
        two.close()
        while not all(task.done() for task in reading):
            await asyncio.sleep(0)
        hearing.cancel()  # before it has seen what became of the reading
        with pytest.raises(asyncio.CancelledError):
            await hearing

    asyncio.run(asyncio.wait_for(work(), 30))
    gc.collect()
    assert reported == []


def test_messages_that_come_quickly_do_not_put_off_the_heartbeats():
    """Each began the time to the next heartbeat anew: a member that heard much was taken for dead
    (seed 91531).
    """
    loop, beats = VirtualLoop(), [0.0]

    async def work():
        one, two = (Stream("x", *ends, TrafficMeter()) for ends in stream_pair())
        channel = HeartbeatChannel(one, 1.0)

        async def hear():
            while True:
                await channel.receive(loop.time() + 10.0, GroupReport)

        async def count():
            while True:
                await two.receive(GroupAlive.LIMIT, 1.0)
                beats.append(loop.time())

        tasks = [asyncio.ensure_future(hear()), asyncio.ensure_future(count())]
        for _ in range(25):
            await asyncio.sleep(0.2)
            await two.send(pack(GroupReport(nonce=bytes(16), held=1)), 1.0)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    loop.run_until_complete(work())
    loop.close()
    assert (
        max(later - earlier for earlier, later in zip(beats, [*beats[1:], 5.0], strict=True))
        <= 0.26
    )


SWARM, MODEL = "a" * 52, "0" * 64
SHAPES = [(300, 100), (7,), (64, 64)]


def member(host):
    return member_of(host.peer_id, addresses=host.addresses(), issued=time.time())


@pytest.fixture(scope="module")
def hosts():
    identities = [Identity.ephemeral() for _ in range(4)]
    started = [Host.start(identity, timeout=30) for identity in identities]
    yield list(zip(started, identities, strict=True))
    for host in started:
        host.close()


@pytest.fixture
def group(hosts):
    members = {host.peer_id: member(host) for host, _ in hosts}
    contexts = [
        PeerContext(host, identity, SWARM, MODEL, 0, lambda: members) for host, identity in hosts
    ]
    return [GroupExchange(context, ExchangeTimeouts(20.0, 5.0)) for context in contexts]


def tensors(number, round=0):
    generator = torch.Generator().manual_seed(100 * number + round)
    return [torch.empty(shape).uniform_(-1, 1, generator=generator) for shape in SHAPES]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "name", ["float32", "float16", "bfloat16", "int8+ef", "topk2+ef", "sign+matrices+ef"]
)
def test_mean_of_decoded_values_has_equal_bits(group, hosts, name):
    """The mean is that of the decoded contributions and has the same bits everywhere."""
    codecs = [codec_named(name) for _ in group]
    twins = [codec_named(name) for _ in group]
    for round in range(2):
        handles = [
            exchange.start(
                Contribution(
                    RoundKey(SWARM, round), tensors(number, round), 1.0 + number, codecs[number]
                )
            )
            for number, exchange in enumerate(group)
        ]
        means = [handle.result() for handle in handles]
        expected = weighted_mean(
            [
                (
                    host.peer_id,
                    1.0 + number,
                    twins[number].decode(twins[number].encode(tensors(number, round)), SHAPES),
                )
                for number, (host, _) in enumerate(hosts)
            ]
        )
        for mean in means:
            assert (mean.members, mean.weight) == (expected.members, 10.0)
            for got, first, wanted in zip(
                mean.tensors, means[0].tensors, expected.tensors, strict=True
            ):
                assert torch.equal(got, first)
                torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
