"""Who meets whom when peers are late, early, gone, busy, or see different memberships."""

import asyncio
import logging
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from shoal.optim import BFLOAT16
from shoal.optim.exchange.pairing import chains, partner_of, rank
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange import kept_streams
from shoal.swarm.exchange.pair.calls import EXCHANGE_PROTOCOL
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.wire.envelope import ENVELOPE, pack, seal, unseal
from shoal.swarm.wire.messages import Answer, Offer
from tests.support.pair_peers import LONG, SEED, Peer, at_once, value
from tests.support.waiting import until

WAIT = 1.5


def a_round(ids, wanted):
    """A round in which the partners are as wanted: pairs of peers."""
    for round in range(1000):
        if all(partner_of(SEED, round, a, ids) == b for a, b in wanted):
            return round
    raise AssertionError


def test_mates_that_call_at_the_same_moment_meet(network):
    a, b = Peer(network, wait=LONG), Peer(network, wait=LONG)
    for round in range(20):
        handles = [a.start(round, 1.0), b.start(round, 3.0)]
        assert [value(handle.result()) for handle in handles] == [2.0, 2.0]
    assert a.exchange.waited < LONG / 2


def test_four_peers_in_their_own_time_always_meet_their_mates(network):
    peers = [Peer(network, wait=20.0) for _ in range(4)]
    ids = [peer.id for peer in peers]
    met = {}

    def train(peer):
        for round in range(30):
            mean = peer.start(round, 1.0).result()
            met[peer.id, round] = mean and mean.members

    at_once(train, peers)
    expected = {
        (peer, round): tuple(sorted((peer, partner_of(SEED, round, peer, ids))))
        for peer in ids
        for round in range(30)
    }
    assert met == expected


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("how", ["refused", "lost"])
def test_calls_cross_and_one_side_cannot_dial(network, who, how):
    """Behind its router: nobody answers there, or nothing comes back at all.

    The call that came in is the one that counts.
    """
    pair = sorted(
        (Peer(network, wait=LONG) for _ in range(2)), key=lambda peer: rank(SEED, 0, peer.id)
    )
    stuck, other = pair[who], pair[1 - who]
    dialing = threading.Event()

    async def nowhere(peer_id, protocol, *, addresses=(), timeout):
        dialing.set()
        while (
            how == "lost" or not stuck.exchange.state.under_way[0].called.is_set()
        ):  # how soon the call comes is the machine's
            await asyncio.sleep(0.01)
        raise NetworkError("nobody answers.", "unreachable")

    stuck.host.open = nowhere
    first = stuck.start(0, 1.0)
    assert dialing.wait(60)
    second = other.start(0, 3.0)
    assert [value(handle.result(LONG / 2)) for handle in (first, second)] == [2.0, 2.0]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nobody_waits_for_a_partner_at_its_end(network, when):
    a, b = Peer(network, wait=LONG), Peer(network, wait=LONG)
    if when == "meanwhile":
        handle = a.start(0, 1.0)
        until(lambda: b.exchange.held.calls)
    b.exchange.end()
    if when == "before":
        handle = a.start(0, 1.0)
    assert handle.result() is None
    assert a.exchange.waited < LONG / 2


def test_late_end_leaves_the_next_round_alone(network, monkeypatch):
    """A round that was called off and ends late leaves the next one alone."""
    meet, ended, end = PairExchange._meet, threading.Event(), asyncio.Event()

    async def slowly_cancelled(matchmaker, pairing):
        try:
            return await meet(matchmaker, pairing)
        except asyncio.CancelledError:
            await end.wait()
            asyncio.get_running_loop().call_soon(ended.set)
            raise

    monkeypatch.setattr(PairExchange, "_meet", slowly_cancelled)
    a, b = Peer(network, wait=LONG), Peer(network, wait=LONG)
    first = a.start(0, 1.0)
    until(lambda: b.exchange.held.calls)
    assert first.result(0.0) is None
    until(lambda: not b.exchange.held.calls)
    second = a.start(5, 1.0)
    until(lambda: a.exchange.state.at(0) == 5)
    network.loop.call_soon_threadsafe(end.set)
    assert ended.wait(60)
    assert a.exchange.next_round == 6
    assert [value(handle.result()) for handle in (b.start(5, 3.0), second)] == [2.0, 2.0]


def test_a_partner_that_is_rounds_behind_is_waited_for_too(network):
    peers = a, b, c, d = [Peer(network, wait=5.0) for _ in range(4)]
    ids = [peer.id for peer in peers]
    first = next(
        r
        for r in range(1000)
        if partner_of(SEED, r, a.id, ids) == c.id and partner_of(SEED, r + 1, a.id, ids) == b.id
    )
    c.start(first)
    assert (
        value(a.start(first).result()) == 0.0
    )  # in that round b and d are to meet, and neither has begun it
    handle = a.start(first + 1, 1.0)
    until(lambda: b.exchange.held.calls)
    other = b.start(first, 5.0)
    assert value(d.start(first, 7.0).result()) == value(other.result()) == 6.0
    assert not handle.done()
    assert value(b.start(first + 1, 3.0).result()) == value(handle.result()) == 2.0


def test_nobody_answers_within_the_wait(network):
    a, b = Peer(network, wait=WAIT), Peer(network)
    began = time.monotonic()
    handle = a.start()
    assert handle.result() is None
    assert time.monotonic() - began > WAIT * 0.9
    assert (
        not handle._attempt.commit.closed
    )  # it ended by itself: it was not called off at the exchange's limit
    assert b.start().result(0.3) is None  # "passed" sends it to a round in which nobody is either


def test_a_partner_that_vanished_costs_no_wait(network):
    a, b = Peer(network, wait=LONG), Peer(network)
    b.host.die()
    began = time.monotonic()
    assert a.start().result() is None
    assert time.monotonic() - began < LONG / 2


def test_vanished_partner_is_not_waited_for(network):
    """Its stream stays open, as one through a relay does, and libp2p opens further ones: only an
    answer shows that it is there.
    """
    a, b = Peer(network, wait=LONG, chunk=0.5), Peer(network, wait=LONG)
    a.sees = b.sees = [a.id, b.id]
    handle = a.start(0, 1.0)
    until(lambda: b.exchange.held.calls)

    async def silence(protocol, stream):
        await asyncio.Event().wait()

    b.host.answer = silence
    began = time.monotonic()
    assert value(handle.result()) is None
    assert time.monotonic() - began < LONG / 2


@pytest.mark.parametrize("held", [True, False])
def test_whom_a_silent_partner_kept_waiting_calls_nobody_else(network, held):
    """The wait for one that is gone is all that training stands still for; the search of others
    would come on top of it.
    """
    peers = a, b, c, d = [Peer(network, wait=LONG, chunk=0.5) for _ in range(4)]
    ids = [peer.id for peer in peers]
    round, called, opened = a_round(ids, [(a.id, b.id), (c.id, d.id)]), [], a.host.open

    async def silence(protocol, stream):
        await asyncio.Event().wait()

    async def open(peer_id, protocol, *, addresses=(), timeout):
        if protocol == EXCHANGE_PROTOCOL:
            called.append(peer_id)
            if not held:
                await asyncio.sleep(timeout)
                raise NetworkError("nobody answers.", "timeout")
        return await opened(peer_id, protocol, addresses=addresses, timeout=timeout)

    a.host.open = open
    handle = a.start(round)
    if held:
        until(lambda: b.exchange.held.calls)
    b.host.answer = silence
    assert value(handle.result()) is None
    assert called == [b.id]


def test_a_caller_that_vanishes_while_it_is_held_is_forgotten(network):
    a, b = Peer(network), Peer(network)
    a.start()
    until(lambda: b.exchange.held.calls)
    a.host.die()
    until(lambda: not b.exchange.held.calls)
    assert b.start().result() is None


@pytest.mark.parametrize("last", [0, 1, 2])
def test_three_peers_all_exchange_in_one_round(network, last):
    """The middle of the chain moves by what both exchanges move it; whoever of the three comes
    last.
    """
    peers = {peer.id: peer for peer in (Peer(network, wait=LONG) for _ in range(3))}
    (chain,) = chains(SEED, 0, peers)
    values = dict(zip(chain, (1.0, 5.0, 2.0), strict=True))
    began = time.monotonic()
    handles = {me: peers[me].start(value=values[me]) for me in chain if me != chain[last]}
    if last != 1:  # the other end and the middle have met, and the middle waits
        end = handles[chain[2 - last]].result()
        assert value(end) == (values[chain[1]] + values[chain[2 - last]]) / 2
    handles[chain[last]] = peers[chain[last]].start(value=values[chain[last]])
    means = [handles[me].result() for me in chain]
    assert [value(mean) for mean in means] == [3.0, 1.5, 3.5]
    assert [len(mean.members) for mean in means] == [2, 3, 2]
    assert time.monotonic() - began < LONG / 2


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_of_three_peers_the_living_meet(network, dead):
    peers = {peer.id: peer for peer in (Peer(network, wait=LONG) for _ in range(3))}
    (chain,) = chains(SEED, 0, peers)
    peers[chain[dead]].host.die()
    living = [me for me in chain if me != chain[dead]]
    began = time.monotonic()
    handles = [peers[me].start(value=2.0 * place) for place, me in enumerate(living)]
    assert [value(handle.result()) for handle in handles] == [1.0, 1.0]
    assert time.monotonic() - began < LONG / 2


def test_alone_in_the_swarm(network):
    began = time.monotonic()
    assert Peer(network, wait=LONG).start().result() is None
    assert time.monotonic() - began < LONG / 2


def test_disagreeing_memberships_still_end(network):
    """Peers that disagree about the membership still come to an end."""
    # a sees {a, b, c} and is to meet c; b and c do not know each other, and both expect a.
    a, b, c = peers = [Peer(network, wait=LONG) for _ in range(3)]
    b.sees, c.sees = [a.id, b.id], [a.id, c.id]
    ids = [peer.id for peer in peers]
    round = next(r for r in range(1000) if chains(SEED, r, ids) == [(a.id, c.id, b.id)])
    began = time.monotonic()
    handles = [peer.start(round, number) for peer, number in ((a, 1.0), (b, 5.0), (c, 3.0))]
    assert [value(handle.result()) for handle in handles] == [2.0, None, 2.0]
    assert time.monotonic() - began < LONG / 2


def test_peers_left_over_meet_each_other(network):
    # The partners of a and of b are dead.
    a, b, c, d = peers = [Peer(network, wait=10.0) for _ in range(4)]  # listening: a second
    round = a_round([peer.id for peer in peers], [(a.id, c.id), (b.id, d.id)])
    c.host.die()
    d.host.die()
    handles = [a.start(round, 1.0), b.start(round, 3.0)]
    assert [value(handle.result()) for handle in handles] == [2.0, 2.0]


def test_later_leaver_keeps_its_pair(network):
    """Who left after this round is not left out of its pairs."""
    # a and b have met in this last round and a has left; without it, c would be paired with b, who
    # has passed, or be odd.
    a, b, c, d = peers = [Peer(network) for _ in range(4)]
    ids = [peer.id for peer in peers]
    three = [b.id, c.id, d.id]
    round = next(
        r
        for r in range(1000)
        if partner_of(SEED, r, a.id, ids) == b.id and partner_of(SEED, r, c.id, three) != d.id
    )
    a.host.die()
    for peer in (c, d):
        peer.sees, peer.gone = three, {a.id: network.member(a.id, round + 1)}
    b.exchange.next_round = round + 1
    handles = [c.start(round, 1.0), d.start(round, 3.0)]
    assert [value(handle.result()) for handle in handles] == [2.0, 2.0]


def test_slow_peer_is_told_and_catches_up(network):
    """A slow peer is told that the round has passed and catches up."""
    a, b = Peer(network, wait=5.0), Peer(network, wait=5.0)
    b.rounds = {a.id: 7, b.id: 4}
    a.exchange.next_round = 8
    slow = b.start(round=4, value=1.0)
    until(lambda: a.exchange.held.calls)
    assert value(a.start(round=8, value=3.0).result()) == 2.0
    assert value(slow.result()) == 2.0
    assert b.exchange.next_round == 9


def test_one_peer_cannot_move_another_to_an_empty_round(network):
    """One peer alone cannot send another to a round where nobody is."""
    peers = a, b, c = [Peer(network) for _ in range(3)]
    round = a_round([peer.id for peer in peers], [(a.id, b.id)])
    b.rounds = {peer.id: round for peer in peers}
    a.exchange.next_round = 10**9
    c.host.die()
    assert b.start(round).result() is None
    assert b.exchange.next_round <= round + 3


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("offer", "reason"), [
    ({"codec": BFLOAT16}, "the codec is (float32|bfloat16) here and (float32|bfloat16) there"),
    ({"shape": (5,)}, r"tensor 0 has shape \[[45]\] here and \[[45]\] there"),
    ({"shape": (2, 2)}, r"tensor 0 has shape \[(4|2, 2)\] here and \[(4|2, 2)\] there"),
])  # fmt: skip
def test_refused_contribution_names_the_difference(network, caplog, offer, reason):
    first, second = Peer(network, wait=LONG), Peer(network, wait=LONG)
    handles = [first.start(**offer), second.start()]
    began = time.monotonic()
    assert [handle.result() for handle in handles] == [None, None]
    assert time.monotonic() - began < LONG / 2
    said = [
        record.getMessage()
        for record in caplog.records
        if "will not exchange with this node" in record.getMessage()
    ]
    assert any(re.search(reason, sentence) for sentence in said)


def test_peers_of_another_swarm_or_model_are_never_met(network):
    a, b = Peer(network), Peer(network, swarm="b" * 52)
    handles = [a.start(), b.start(run="b" * 52)]
    assert [handle.result() for handle in handles] == [None, None]
    c = Peer(network, model="1" * 64)
    c.sees = [c.id]
    a.sees = [a.id, c.id]
    selector = a.exchange._selector
    selector._context = replace(
        selector._context, members=lambda: {c.id: network.member(c.id, model="1" * 64)}
    )
    network.opened.clear()
    assert a.start(1).result() is None
    assert network.opened == []


def test_somebody_unknown_who_calls_is_looked_up(network):
    a, b = Peer(network), Peer(network)
    a.sees = [a.id]
    b.start()
    until(lambda: a.looked)


def test_a_shorter_deadline_and_hurry_are_kept(network):
    a, _ = Peer(network, wait=LONG), Peer(network, wait=LONG)
    began = time.monotonic()
    assert a.start(0).result(0.3) is None
    assert time.monotonic() - began < LONG / 2
    handle = a.start(1)
    threading.Timer(0.2, a.exchange.hurry, [0.2]).start()
    assert handle.result() is None
    assert 0.2 < a.exchange.waited < time.monotonic() - began < LONG / 2


def test_a_round_of_another_run_is_the_callers_mistake(network):
    a = Peer(network)
    with pytest.raises(ValueError):
        a.start(run="another")


OTHER = {"round": 1, "swarm": "b" * 52, "model": "1" * 64, "nonce": bytes(16)}


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "change", [{name: value} for name, value in OTHER.items()], ids=OTHER.keys()
)
def test_acceptor_must_offer_the_same(network, caplog, change):
    """Who accepts must offer for the same round swarm and model."""
    a, partner = Peer(network), network.host()

    async def answer(stream):
        _, offer = unseal(await stream.receive(Offer.LIMIT + ENVELOPE, 2), Offer)
        await stream.send(pack(Answer(verdict="accept", round=offer.round)), 2)
        await stream.send(seal(offer.model_copy(update=change), partner.identity), 2)

    partner.serve(EXCHANGE_PROTOCOL, answer)
    with caplog.at_level(logging.INFO, logger="shoal"):
        assert a.start().result() is None
    assert "accepted something else than was offered" in caplog.text


def test_node_far_ahead_returns_to_the_others(network):
    """As after the checkpoint of a swarm that was led astray: nobody believes it, so it follows
    those who call it.
    """
    ahead, a, b = peers = [Peer(network, wait=0.3) for _ in range(3)]
    records = {}
    for peer in peers:
        peer.rounds, peer.sees = records, [a.id, b.id]
    assert [value(handle.result()) for handle in (a.start(0, 1.0), b.start(0, 1.0))] == [1.0, 1.0]
    a.sees = b.sees = ahead.sees = None
    ahead.exchange.next_round = 10**6
    met_again, went_back, end = threading.Event(), [], time.monotonic() + 60.0

    def train(peer):  # as an optimizer does, which goes on where its exchange is
        while not met_again.is_set() and time.monotonic() < end:
            records[peer.id] = peer.exchange.next_round = peer.exchange.next_round
            mean = peer.start(records[peer.id], 1.0).result()
            if peer is ahead and mean is not None:
                met_again.set()
            elif (
                peer is ahead and (back := peer.exchange.back(peer.exchange.next_round)) is not None
            ):
                went_back.append(back)

    at_once(train, peers)
    assert met_again.is_set()
    assert went_back
    assert max(peer.exchange.next_round for peer in peers) < 10**5  # nobody followed it


def test_few_streams_are_kept_and_none_for_long():
    """The one used last is taken first; one that was ended meanwhile is not."""

    class Kept:
        def __init__(self, peer):
            self.peer_id, self.ended = peer, False

        def close(self):
            self.ended = True

    async def main():
        kept = kept_streams.KeptStreams(SimpleNamespace(usable=lambda stream: stream is not last))
        of_one = [Kept("a") for _ in range(kept_streams.KEPT_EACH + 2)]
        last = of_one[-1]
        for stream in of_one:
            kept.keep(stream)
        assert [stream.ended for stream in of_one[:3]] == [True, True, False]
        assert kept.take("b") is None
        assert kept.take("a") is of_one[-2]
        assert last.ended
        for number in range(kept_streams.KEPT):
            kept.keep(Kept(f"peer {number}"))
        assert all(stream.ended for stream in of_one[:-2])
        assert not of_one[-2].ended
        assert len(kept._idle) == kept_streams.KEPT
        handles = list(kept._idle.values())
        assert all(
            abs(handle.when() - asyncio.get_running_loop().time() - kept_streams.KEPT_S) < LONG
            for handle in handles
        )
        for stream in list(kept._idle):
            kept._end(stream)
        assert all(handle.cancelled() for handle in handles)

    asyncio.run(main())
