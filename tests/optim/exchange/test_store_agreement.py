"""All processes agree on members and outcome, whichever gives up at any time.

In threads, over a store in memory.
"""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import FLOAT32, Distributed
from shoal.optim.exchange import distributed
from shoal.optim.exchange.base import Mean
from shoal.optim.exchange.store_consensus import (
    ProcessCoordinates,
    RoundTicket,
    StoreConsensus,
    StoreOffer,
)

PEERS, SHARDS = 3, 2


def together(behave, peers=PEERS, shards=SHARDS, wait=0.2, store=None, rounds=1):
    """Return the value of ``behave(consensus, ticket, place)`` for each process in each round."""
    store = store or dist.HashStore()
    found, errors = {}, []

    def process(place):
        consensus = StoreConsensus(dist.PrefixStore("test", store), place, wait)
        for round in range(rounds):
            try:
                found[place.peer, place.shard, round] = behave(
                    consensus, RoundTicket(f"round {round}", tuple(range(peers))), place
                )
            except BaseException as error:
                errors.append(error)

    threads = [
        threading.Thread(target=process, args=(ProcessCoordinates(p, s, shards),))
        for p in range(peers)
        for s in range(shards)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for error in errors:
        raise error
    return found


PLANS = [
    "takes part",
    "absent",
    "never comes",
    "closed before",
    "closes while it waits",
    "closes before the vote",
    "has failed",
]


@settings(max_examples=40)
@given(plans=st.lists(st.sampled_from(PLANS), min_size=PEERS * SHARDS, max_size=PEERS * SHARDS))
def test_all_learn_the_same_members_and_the_same_outcome(plans):
    def behave(consensus, ticket, place):
        plan = plans[place.peer * SHARDS + place.shard]
        if plan == "never comes":
            return None
        consensus.arrive(
            ticket, None if plan == "absent" else StoreOffer("alike", 1.0 + place.peer)
        )
        if plan == "absent":
            return None
        if plan == "closed before":
            ticket.closed.set()
        closer = threading.Timer(0.005, ticket.closed.set)
        if plan == "closes while it waits":
            closer.start()
        members = consensus.members(ticket)
        if place.peer not in members:
            return members, None
        assert [offer.weight for offer in consensus.offers(ticket, members)] == [
            1.0 + peer for peer in members
        ]
        if plan == "closes before the vote":
            ticket.closed.set()
        return members, consensus.agree(ticket, members, plan != "has failed", 1.0)

    found = [note for note in together(behave, wait=0.05).values() if note is not None]
    assert len({members for members, _ in found}) <= 1
    outcomes = {counts for _, counts in found if counts is not None}
    assert len(outcomes) <= 1
    (members,) = {members for members, _ in found} or {()}
    mine = {peer: plans[peer * SHARDS : (peer + 1) * SHARDS] for peer in range(PEERS)}
    assert all(plan not in ("absent", "never comes") for peer in members for plan in mine[peer])
    if all(plan == "takes part" for plan in plans):
        assert members == (0, 1, 2)
        assert outcomes == {True}
    if any(
        plan in ("has failed", "closes before the vote") for peer in members for plan in mine[peer]
    ):
        assert outcomes == {False}


def test_dead_peer_costs_one_wait(caplog):
    """A dead peer costs one wait in all and one sentence."""
    waited = []

    def behave(consensus, ticket, place):
        if place.peer == 2:
            return None
        consensus.arrive(ticket, StoreOffer("alike", 1.0))
        members = consensus.members(ticket)
        waited.append(consensus._silent.get(2, (0, 0.0))[1])
        return members

    found = together(behave, shards=1, rounds=10, wait=1.0)
    assert all(found[peer, 0, round] == (0, 1) for peer in (0, 1) for round in range(10))
    assert 1.0 <= max(waited) < 10.0  # seconds that they have waited for it: not in each round
    sentences = [
        record.getMessage()
        for record in caplog.records
        if "peer 2 did not come" in record.getMessage()
    ]
    assert 1 <= len(sentences) <= 2  # one of each process that waited


def test_a_peer_that_has_left_costs_no_wait():
    def behave(consensus, ticket, place):
        if place.peer == 2:
            consensus.leave()
            return None
        consensus.arrive(ticket, StoreOffer("alike", 1.0))
        return consensus.members(ticket)

    found = together(behave, shards=1, wait=1000.0)
    assert found[0, 0, 0] == found[1, 0, 0] == (0, 1)


@pytest.mark.parametrize("expected", [(0,), (1, 2)])
def test_a_single_or_unexpected_peer_waits_for_nobody(expected):
    consensus = StoreConsensus(dist.HashStore(), ProcessCoordinates(0, 0, 1), 1000.0)
    assert consensus.members(RoundTicket("round 0", expected)) == ()


def test_what_is_over_leaves_nothing_in_the_store():
    store = dist.HashStore()
    barrier = threading.Barrier(PEERS * SHARDS)

    def behave(consensus, ticket, place):
        consensus.arrive(ticket, StoreOffer("alike", 1.0))
        counts = consensus.agree(ticket, consensus.members(ticket), True, 5.0)
        barrier.wait(20)
        consensus.forget_offer(ticket)
        consensus.forget(ticket)
        return counts

    assert set(together(behave, store=store).values()) == {True}
    assert store.num_keys() == PEERS  # how often each has come


@pytest.mark.parametrize(
    ("size", "members", "dropped"),
    [(0, (0, 1, 2), 0), (2, (0, 1), 0), (2, (0, 1, 2), 1), (3, (0, 1, 2), 1), (6, (0, 1, 2), 0)],
)
def test_a_group_that_hardly_ever_meets_again_is_not_kept(size, members, dropped):
    """Each has sockets and threads: with groups drawn anew in each round a process ran out of
    them. With pairs a chain of three is one.
    """
    mean, gone, offer = (
        Mean([], 1.0, ("0", "1", "2")),
        [],
        SimpleNamespace(what="same", weight=1.0, state=()),
    )
    exchange = object.__new__(Distributed)
    consensus = SimpleNamespace(
        arrive=lambda *_: None,
        members=lambda _: members,
        offers=lambda *_: [offer],
        over=None,
        agree=lambda *_: True,
    )
    vars(exchange).update(
        _consensus=consensus,
        _gloo=SimpleNamespace(mean=lambda *_: mean, drop=gone.append),
        _process=SimpleNamespace(peer=0),
        _pairing=distributed._Pairing(seed=0, peers=6, size=size),
        _timeout=1.0,
        _kept=SimpleNamespace(add=lambda key, ticket: None),
    )
    ticket, payload = (
        SimpleNamespace(expected=members, closed=threading.Event()),
        SimpleNamespace(codec=FLOAT32, message=None),
    )
    assert (
        exchange._meet(
            SimpleNamespace(key=None, ticket=ticket, offer=offer, payload=payload, chain=())
        )
        is mean
    )
    assert len(gone) == dropped
