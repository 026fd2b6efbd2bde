"""Offers that are no good: one sentence answers them, and nothing is moved, held or allocated."""

import asyncio
import time

import pytest

from shoal.swarm.exchange.pair.calls import EXCHANGE_PROTOCOL
from shoal.swarm.wire.envelope import (
    ENVELOPE,
    MAX_BYTES,
    MAX_COUNT,
    fresh_nonce,
    pack,
    seal,
    unpack,
)
from shoal.swarm.wire.messages import Answer, Offer
from tests.support.pair_peers import LONG, MODEL, SWARM, Peer, value
from tests.support.waiting import until


def offer(**changes):
    good = {
        "swarm": SWARM,
        "round": 0,
        "fragment": 0,
        "nbytes": 16,
        "shapes": ((4,),),
        "dtype": "float32",
        "codec": "float32",
        "sha256": bytes(32),
        "weight": 1.0,
        "model": MODEL,
        "nonce": fresh_nonce(),
    }
    return Offer(**{**good, **changes})


class Stranger:
    """Calls a peer with an offer of its own."""

    def __init__(self, network):
        self.host = network.host()

    async def _offer(self, peer, made):
        self.stream = await self.host.open(peer, EXCHANGE_PROTOCOL, timeout=LONG)
        await self.stream.send(seal(made, self.host.identity), LONG)

    async def _answer(self):
        return unpack(await self.stream.receive(Answer.LIMIT, LONG), Answer)

    def offers(self, peer, **changes):
        self.host.call(self._offer(peer.id, offer(**changes)), LONG)

    def answer(self):
        return self.host.call(self._answer(), LONG)

    async def _close(self):
        self.stream.close()

    def close(self):
        self.host.call(self._close(), LONG)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swarm": "b" * 52}, f"this node is in swarm {SWARM}, the offer is for {'b' * 52}"),
        (
            {"model": "1" * 64},
            "the models differ in the names, shapes or types of their parameters",
        ),
        ({"fragment": 2}, "there are 1 fragments here, the offer is for number 2"),
    ],
    ids=["swarm", "model", "fragment"],
)
def test_offer_of_another_kind_is_refused(network, changes, reason):
    a, stranger = Peer(network), Stranger(network)
    stranger.offers(a, **changes)
    answer = stranger.answer()
    assert (answer.verdict, answer.reason, answer.round) == ("refuse", reason, 0)
    assert not a.exchange.held.calls
    assert a.exchange.next_round == 0


@pytest.mark.parametrize(
    "changes",
    [{"round": MAX_COUNT}, {"round": 1, "nbytes": MAX_BYTES}],
    ids=["round", "size"],
)
def test_numbers_at_their_bounds_move_nothing(network, changes):
    """The call waits for this node no longer than its caller does, and costs no memory."""
    a, b, stranger = Peer(network, wait=LONG), Peer(network, wait=LONG), Stranger(network)
    a.sees = b.sees = [a.id, b.id]
    stranger.offers(a, **changes)
    until(lambda: a.exchange.held.calls)
    assert not a.exchange.held._receiving.total()
    assert [value(each.result()) for each in (a.start(0, 1.0), b.start(0, 3.0))] == [2.0, 2.0]
    assert a.exchange.next_round == 1
    stranger.close()
    until(lambda: not a.exchange.held.calls)


def test_partner_that_accepts_and_falls_silent_costs_a_deadline(network):
    """After the answer, before its offer: one failure, and the stream is gone."""
    a, partner = Peer(network, wait=LONG, chunk=0.5), network.host()
    streams = []

    async def accept(stream):
        streams.append(stream)
        await stream.receive(Offer.LIMIT + ENVELOPE, LONG)
        await stream.send(pack(Answer(verdict="accept", round=0)), LONG)
        await asyncio.sleep(LONG)

    partner.serve(EXCHANGE_PROTOCOL, accept)
    began = time.monotonic()
    assert a.start().result() is None
    assert time.monotonic() - began < LONG / 2
    assert a.exchange.stats.report()["failures"] == (("timeout", 1),)
    assert len(streams) == 1
    assert not a.exchange.state.under_way
