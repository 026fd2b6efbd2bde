"""Pacing of bulk, over links of virtual time: a slow one is filled without a queue, a fast one is
not slowed down.
"""

import asyncio
import contextlib
import statistics

import pytest

from shoal.swarm.pacing import pacer as pacers
from shoal.swarm.pacing.link import EMPTY_DELAY_VALID_S
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.pacing.pace import MAX_PONG_TIMEOUT_S, MIN_PING_GAP_BYTES
from shoal.swarm.pacing.pacer import Pacer
from shoal.swarm.pacing.pings import Echo
from shoal.swarm.pacing.window import SURPLUS_BYTES
from tests.sim.clock import VirtualLoop

MBIT, MB = 125_000, 1_000_000


class Line:
    """One direction of a link, ``rate`` bytes a second with a queue without end, ``delay`` seconds
    long.
    """

    def __init__(self, loop, rate, delay):
        self.loop, self.rate, self.delay, self.free = loop, rate, delay, 0.0

    def wait(self):
        return max(self.free - self.loop.time(), 0.0)

    def push(self, nbytes, then=lambda: None):
        self.free = max(self.free, self.loop.time()) + nbytes / self.rate
        self.loop.call_at(self.free + self.delay, then)


class SlowStart(Line):
    """A line under a TCP that begins with ten packets and doubles them each round trip, and begins
    anew after a second's pause.
    """

    def __init__(self, loop, rate, delay):
        super().__init__(loop, rate, delay)
        self.began = 0.0

    def push(self, nbytes, then=lambda: None):
        now, trip = self.loop.time(), 2 * self.delay
        if now - self.free > 1.0:
            self.began = now
        self.free, left = max(self.free, now), nbytes
        while left > 0:
            rate = min(self.rate, 14_480 / trip * 2 ** min((self.free - self.began) / trip, 40))
            step = min(left / rate, trip / 20)
            self.free, left = self.free + step, left - rate * step - 1e-6
        self.loop.call_at(self.free + self.delay, then)


class Net:
    """What one node sees: its uplink, the way back, and bulk to peers that answer pings."""

    def __init__(self, loop, up, delay, down=1000.0, peer="answers"):
        self.loop, self.peer = loop, peer
        self.up, self.down = Line(loop, up * MBIT, delay / 2), Line(loop, down * MBIT, delay / 2)
        self.others = {}
        self.pacer = Pacer(self.echo, loop.time)

    @contextlib.asynccontextmanager
    async def echo(self, peer):
        if self.peer == "is here":
            yield None
            return
        if self.peer == "refuses":
            raise OSError
        answers = asyncio.Queue()

        def back(data):
            if self.peer == "lies":
                data = bytes(len(data))
            if self.peer != "is silent":
                (self.others[peer].up if self.others else self.down).push(
                    100, lambda: answers.put_nowait(data)
                )

        yield Echo(lambda data: self.up.push(100, lambda: back(data)), answers.get)

    async def send(self, nbytes, peer="b"):
        """Return the instant at which all has arrived."""
        arrived = self.loop.create_future()
        with self.pacer.to(peer) as pace:
            while nbytes:
                size = await pace.room(min(nbytes, MB))
                nbytes -= size
                self.up.push(size, lambda left=nbytes: left or arrived.set_result(self.loop.time()))
        return await arrived

    async def watch(self, waits):
        while True:
            waits.append((self.loop.time(), self.up.wait()))
            await asyncio.sleep(0.05)


@pytest.fixture
def loop():
    made = VirtualLoop(busy=100_000)
    yield made
    left = asyncio.all_tasks(made)
    for task in left:
        task.cancel()
    if left:
        made.run_until_complete(asyncio.wait(left, timeout=60))
    made.close()


def run(loop, net, *transfers):
    """Return the instants at which the transfers ended, and (instant, seconds that a small message
    would wait) until then.
    """
    waits = []

    async def work():
        watching = asyncio.ensure_future(net.watch(waits))
        try:
            return await asyncio.gather(*transfers)
        finally:
            watching.cancel()
            while rest := asyncio.all_tasks() - {
                asyncio.current_task()
            }:  # they measure for a moment more
                await asyncio.wait(rest)

    return loop.run_until_complete(work()), waits


@pytest.mark.parametrize(
    ("mbit", "delay"), [(0.5, 0.05), (1, 0.001), (1, 0.05), (1, 0.6), (5, 0.03), (20, 0.1)]
)
def test_a_slow_uplink_is_used_and_small_messages_hardly_wait(loop, mbit, delay):
    net = Net(loop, mbit, delay)
    nbytes = round(mbit * MBIT * 60)
    (end,), waits = run(loop, net, net.send(nbytes))
    assert end < 60 / 0.85
    assert max(wait for _, wait in waits) < 1.2
    late = [wait for at, wait in waits if at > 5]
    assert max(late) < 1.0
    assert statistics.mean(late) < 0.1 + 1.2 * SURPLUS_BYTES / (mbit * MBIT)


@pytest.mark.parametrize(
    ("mbit", "delay", "most"),
    [(1000, 0.0003, 1.2), (1000, 0.02, 1.9), (100, 0.1, 1.6), (100, 0.4, 2.3)],
)
def test_a_fast_link_stays_fast(loop, mbit, delay, most):
    net = Net(loop, mbit, delay, down=mbit)
    (end,), _ = run(loop, net, net.send(40 * MB))
    assert end < 40 * MB / (mbit * MBIT) * most


def test_transfer_after_a_pause_is_unpaced(loop):
    """While TCP begins slowly its queue is no sign of a slow link, and nothing waits for the empty
    link to be measured.
    """
    net, took = Net(loop, 100, 0.4, down=100), []
    net.up = SlowStart(loop, 100 * MBIT, 0.2)

    async def often():
        for _ in range(6):
            began = loop.time()
            await net.send(10 * MB)
            took.append(loop.time() - began)
            await asyncio.sleep(20)

    run(loop, net, often())
    began, free = loop.time() + 10, SlowStart(loop, 100 * MBIT, 0.2)
    loop.run_until_complete(asyncio.sleep(10))
    free.push(10 * MB)
    assert max(took[1:]) < 1.2 * (free.free - began)


def test_narrow_window_grows_between_transfers(loop):
    """A window that holds short transfers back grows from one to the next."""
    net, took = Net(loop, 1000, 0.2, down=1000), []

    async def often():
        await net.send(40 * MB)
        # as after a moment in which this machine was busy
        window = net.pacer._paces["b"].pace.window
        window.nbytes = MB / 2
        window.young = False
        for _ in range(6):
            began = loop.time()
            await net.send(MB)
            took.append(loop.time() - began)
            await asyncio.sleep(2)

    run(loop, net, often())
    assert took[0] > 0.3  # half of it waited for a round trip or two
    assert max(took[2:]) < 0.12  # one way, and the line's time


def test_transfers_to_one_peer_move_together(loop):
    """One that waited for another's end would be given up as silent."""
    net = Net(loop, 1, 0.03)
    (first, second, third), _ = run(loop, net, net.send(MB), net.send(MB), net.send(MB))
    assert min(first, second, third) > 0.9 * max(first, second, third)


def test_four_peers_share_the_queue_of_an_uplink(loop):
    net = Net(loop, 1, 0.03)
    ends, waits = run(loop, net, *(net.send(2 * MB, peer) for peer in "bcde"))
    assert max(ends) < 8 * MB / MBIT / 0.85
    late = [wait for at, wait in waits if at > 10]
    assert statistics.mean(late) < 0.2


def test_a_link_that_becomes_slow_is_not_flooded(loop):
    net = Net(loop, 10, 0.05)

    async def worsen():
        await asyncio.sleep(10)
        net.up.rate = MBIT

    _, waits = run(loop, net, net.send(18 * MB), worsen())
    assert max(wait for at, wait in waits if at > 15) < 0.5


def test_two_peers_share_an_uplink(loop):
    net = Net(loop, 2, 0.05)
    (first, second), waits = run(loop, net, net.send(5 * MB, "b"), net.send(5 * MB, "c"))
    assert min(first, second) > 10 * MB / (2 * MBIT) * 0.7
    assert max(wait for at, wait in waits if at > 5) < 0.6


def test_both_ways_at_once(loop):
    """The pings of each wait in the other's queue too."""
    one, two = Net(loop, 1, 0.05), Net(loop, 1, 0.05)
    one.down, two.down = two.up, one.up
    ends, waits = run(loop, one, one.send(3 * MB), two.send(3 * MB))
    assert max(ends) < 3 * MB / MBIT / 0.75
    assert max(wait for at, wait in waits if at > 5) < 0.5


def test_two_whose_bulk_begins_apart_use_the_link_without_queues(loop):
    """The answers of each wait behind the other's bulk and come in lumps; bytes that went out in
    lumps made queues by turns.
    """
    one, two = Net(loop, 1, 0.05), Net(loop, 1, 0.05)
    one.down, two.down = two.up, one.up
    took = []

    async def often(net, after):
        await asyncio.sleep(after)
        for _ in range(6):
            began = loop.time()
            await net.send(1_500_000)  # 12 s of the link
            took.append(loop.time() - began)
            await asyncio.sleep(max(15 - took[-1], 0.0))

    _, waits = run(loop, one, often(one, 0.0), often(two, 0.3))
    late = sorted(wait for at, wait in waits if at > 15)
    assert statistics.mean(took[2:]) < 14.5
    assert late[int(0.99 * len(late))] < 0.3


@pytest.mark.parametrize(("mbit", "delay"), [(20, 0.001), (20, 0.1), (100, 0.001)])
def test_of_two_that_send_to_each_other_none_starves(loop, mbit, delay):
    """Pings wait in both queues.

    Who took the other's for its own sent ever less, and a transfer took five times as long.
    """
    one, two = Net(loop, mbit, delay), Net(loop, mbit, delay)
    one.down, two.down = two.up, one.up
    nbytes, took = 6 * mbit * MBIT, {one: [], two: []}

    async def often(net, after):
        await asyncio.sleep(after)
        for _ in range(5):
            began = loop.time()
            await net.send(nbytes)
            took[net].append((loop.time() - began) / 6)
            await asyncio.sleep(2)

    _, waits = run(loop, one, often(one, 0.0), often(two, 0.3))
    assert all(statistics.mean(later) < 1.25 for _, *later in took.values())
    late = sorted(wait for at, wait in waits if at > 5)
    assert late[int(0.99 * len(late))] < 0.3


def test_eight_senders_use_freed_capacity(loop):
    """As in a group.

    The last of seven transfers of a node went on at the rate that it had beside the others.
    """
    peers = "abcdefgh"
    nets = {peer: Net(loop, 20, 0.1) for peer in peers}
    nbytes, took = 3 * MB, []
    for net in nets.values():
        net.others = nets  # whose uplinks carry the answers

    async def all_to_all():
        for _ in range(3):
            began = loop.time()
            await asyncio.gather(*(of_one(peer, 0.1 * index) for index, peer in enumerate(peers)))
            took.append((loop.time() - began) / (7 * nbytes / (20 * MBIT)))
            await asyncio.sleep(5)

    async def of_one(peer, after):
        await asyncio.sleep(after)
        await asyncio.gather(*(nets[peer].send(nbytes, other) for other in peers if other != peer))

    run(loop, nets["a"], all_to_all())
    assert statistics.mean(took[1:]) < 1.35


def test_momentary_low_rate_holds_nothing_back(loop):
    """As while both nodes are busy.

    A cap by the recent rates rose by a quarter a second, and each transfer paid for it.
    """
    net = Net(loop, 2, 0.001)

    async def mend():
        await asyncio.sleep(4)
        net.up.rate = 100 * MBIT

    (end, _), _ = run(loop, net, net.send(40 * MB), mend())
    assert end < 4 + 1.3 * 40 * MB / (100 * MBIT)


@pytest.mark.parametrize("peer", ["refuses", "lies", "is here"])
def test_without_pings_nothing_is_held_back(loop, peer):
    net = Net(loop, 1000, 0.01, peer=peer)
    (end,), _ = run(loop, net, net.send(40 * MB))
    assert end < 0.4


@pytest.mark.parametrize("answered", [False, True])
def test_a_silent_peer_gets_no_more(loop, answered):
    """Of one that fell asleep every few seconds a few bytes went out, and looked as if it took
    them: it held training for long.
    """
    net, sent = Net(loop, 8, 0.01, peer="answers" if answered else "is silent"), []

    async def watched():
        loop.call_at(1.0, lambda: setattr(net, "peer", "is silent"))
        with contextlib.suppress(asyncio.TimeoutError), net.pacer.to("b") as pace:
            while loop.time() < 60:
                nbytes = await asyncio.wait_for(pace.room(MB), 60)
                net.up.push(nbytes)
                sent.append(loop.time())

    run(loop, net, watched())
    assert (0.9 < max(sent) < 1.5) if answered else not sent


def test_silent_peer_gets_the_rest(loop):
    """A peer that was silent for a while gets the rest."""
    net, late = Net(loop, 8, 0.01), 12.0
    loop.call_at(1.0, lambda: setattr(net.up, "free", late))
    (end,), _ = run(loop, net, net.send(4 * MB))
    assert late + 2.5 < end < late + 10


def test_another_way_through_the_network_is_learnt_from_one_transfer(loop):
    """A machine that was taken to a mobile network sent a fifth of what its line carried for eight
    minutes.
    """
    net, took = Net(loop, 1, 0.05), []

    async def often():
        for number in range(6):
            if number == 2:
                net.up.delay += 0.3
            began = loop.time()
            await net.send(MB)
            took.append(loop.time() - began)
            await asyncio.sleep(EMPTY_DELAY_VALID_S / 12)

    _, waits = run(loop, net, often())
    assert took[1] < 1.2 * MB / MBIT
    assert took[2] > 1.5 * MB / MBIT  # taken for a queue
    assert max(took[3:]) < 1.3 * MB / MBIT
    assert max(wait for at, wait in waits if at > 5) < 0.8


@pytest.mark.parametrize("known", [True, False])
def test_changed_link_is_learnt_during_a_transfer(loop, known):
    """A link that is known to be another is learnt in the midst of a transfer."""
    net = Net(loop, 1, 0.05)

    async def moved():
        await net.send(MB)
        net.up.delay += 0.3
        loop.call_later(2.0, net.pacer.forget, "b" if known else "another")
        began = loop.time()
        await net.send(4 * MB)
        return loop.time() - began

    (took,), waits = run(loop, net, moved())
    assert (took < 1.3 * 4 * MB / MBIT) == known
    assert max(wait for at, wait in waits if at > 5) < 0.8


def test_two_senders_keep_queues_short(loop):
    """Two that send to each other for long do not raise each other's queues."""
    one, two = Net(loop, 1, 0.05), Net(loop, 1, 0.05)
    one.down, two.down = two.up, one.up

    _, waits = run(loop, one, one.send(40 * MB), two.send(40 * MB))
    assert max(wait for at, wait in waits if at > 5) < 0.6


def test_the_paces_of_many_peers_are_forgotten(loop, monkeypatch):
    monkeypatch.setattr(pacers, "MAX_PACES", 3)
    net = Net(loop, 1000, 0.001)

    async def all_in_turn():
        for number in range(9):
            await net.send(MB, str(number))

    run(loop, net, all_in_turn())
    assert list(net.pacer._paces) == ["6", "7", "8"]


@pytest.mark.parametrize("late", range(6))
def test_measuring_ends_with_the_transfer(loop, late):
    """``asyncio.wait_for`` loses a cancellation that comes with the answer; one task that went on
    would let bulk go every 2 s.
    """
    echoes = []

    @contextlib.asynccontextmanager
    async def echo(peer):
        answers = asyncio.Queue()
        echoes.append(answers)
        yield Echo(answers.put_nowait, answers.get)

    async def work():
        pacer = Pacer(echo, loop.time)
        for _ in range(4):
            with pacer.to("b") as pace:
                for _ in range(3):
                    await pace.room(MIN_PING_GAP_BYTES)  # each with a ping, and its answer at once
                for _ in range(late):
                    await asyncio.sleep(0)
            await asyncio.sleep(10 * MAX_PONG_TIMEOUT_S)
            assert asyncio.all_tasks() == {asyncio.current_task()}
        with pacer.to("b") as pace:
            await asyncio.sleep(10 * MAX_PONG_TIMEOUT_S)
            assert len(asyncio.all_tasks()) == 2  # this, and the one that measures
            assert pace.window.is_paced

    loop.run_until_complete(work())


def test_bulk_rate_counts_sending_time(loop):
    """The rate of bulk counts the time in which some is sent."""
    net = Net(loop, 8, 0.02)
    meter = TrafficMeter(None, net.pacer, loop.time)

    async def bulk(nbytes, seconds, after):
        await asyncio.sleep(after)
        with meter.pace("b", nbytes):
            await asyncio.sleep(seconds)
            meter.sent += nbytes

    async def work():
        assert meter.rate() is None
        await asyncio.gather(bulk(MB, 2.0, 0.0), bulk(MB, 3.0, 1.0))  # four seconds with bulk
        assert meter.rate() is None  # too short to tell
        meter.sent += 5 * MB  # without bulk
        await asyncio.gather(bulk(2 * MB, 4.0, 100.0), asyncio.sleep(150))
        assert meter.rate() == pytest.approx(4 * MB / 8)
        going = asyncio.ensure_future(bulk(8 * MB, 9.0, 0.0))
        await asyncio.sleep(4)
        meter.sent += MB
        assert meter.rate() == pytest.approx(5 * MB / 12)
        await going
        with meter.pace("b", 10):
            await asyncio.sleep(100)
        assert meter.rate() == pytest.approx(13 * MB / 17)

    run(loop, net, work())
    assert TrafficMeter().rate() is None
