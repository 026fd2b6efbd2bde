"""The partners when some peers are dead: the free ones find each other, and no other peer is called."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.exchange.base import partner_of
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.pair.calls import PairSelector

SEED, MODEL = 3, "0" * 64


class Directory(dict):
    def see(self, peer, issued=1.0, model=MODEL, round=0):
        self[peer] = SimpleNamespace(model=model, issued=issued, round=round)


def directory(count):
    made = Directory()
    for number in range(count):
        made.see(f"peer-{number}")
    return made


def selector(me, here):
    return PairSelector(PeerContext(None, SimpleNamespace(peer_id=me), "swarm", MODEL, SEED, lambda: here))


@given(st.integers(2, 12), st.integers(0, 50), st.data())
def test_those_left_over_name_each_other(count, round, data):
    here = directory(count)
    dead = data.draw(st.sets(st.sampled_from(sorted(here))))
    alone = {}
    for me in sorted(here.keys() - dead):
        node = selector(me, here)
        assert node.left_over(round) is None
        assert node.of(round)[0] == partner_of(SEED, round, me, here)
        for peer in dead:
            node.failed(peer)
        partner, order = node.of(round)
        if partner in dead:
            alone[me] = set(order)
            assert partner not in order
        elif partner is not None:
            assert order[0] == partner
    odd = {me for me in here.keys() - dead if partner_of(SEED, round, me, here) is None}
    for me, others in alone.items():
        assert others == (alone.keys() | odd) - {me}


@pytest.mark.parametrize("sign", ["called", "record", "gone"])
def test_a_sign_of_life_ends_it(sign):
    here = directory(2)
    node = selector("peer-0", here)
    node.failed("peer-1")
    assert node.of(0) == ("peer-1", [])
    if sign == "called":
        node.alive("peer-1")
    elif sign == "record":
        here.see("peer-1", issued=2.0)
    else:
        record = here.pop("peer-1")
        assert node.of(0) == (None, [])
        here["peer-1"] = record
    assert node.of(0) == ("peer-1", ["peer-1"])


def test_who_left_had_a_partner_up_to_the_round_that_it_did_not_begin():
    """Its last record states the round that would have been its next."""
    here, gone = directory(2), Directory()
    gone.see("peer-2", round=5)
    node = PairSelector(PeerContext(None, SimpleNamespace(peer_id="peer-0"), "swarm", MODEL, SEED, lambda: here), lambda: gone)
    three = {"peer-0", "peer-1", "peer-2"}
    for round in range(10):
        peers = three if round < 5 else three - {"peer-2"}
        assert node.of(round)[0] == partner_of(SEED, round, "peer-0", peers), round


def test_who_is_not_in_the_directory_is_not_remembered():
    node = selector("peer-0", directory(1))
    node.failed("peer-9")
    assert node._unreached == {}
