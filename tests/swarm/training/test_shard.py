"""Which part of the data a peer takes, and who keeps it where several took the same at one moment."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.training.shard import Shard, least_used, settled

PEERS = [f"peer-{number:02}" for number in range(12)]


def members(held, state="waiting"):
    return {peer: SimpleNamespace(peer=peer, shard=index, shards=8, state=state) for peer, index in held.items()}


def settle(held, before, trains=()):
    """The shards once each of those that came has settled, by what all announced before."""
    view = {**members(held), **members({peer: held[peer] for peer in trains}, "training")}
    return {peer: settled(view, Shard(held[peer], 8, 5), peer, before).index for peer in held if peer not in (*before, *trains)}


def test_of_two_that_took_the_same_the_lower_id_keeps_it_and_the_other_takes_a_free_one():
    old = {peer: index for index, peer in enumerate(PEERS[:6])}
    found = settle({**old, PEERS[8]: 6, PEERS[9]: 6}, before=old, trains=old)
    assert found == {PEERS[8]: 6, PEERS[9]: 7}


def test_who_trains_keeps_its_shard_whatever_its_id():
    old = {peer: index for index, peer in enumerate(PEERS[:6])}
    held = {**old, PEERS[8]: 6, PEERS[9]: 6}
    assert settle(held, before=old, trains=[*old, PEERS[9]]) == {PEERS[8]: 7}


def test_a_shard_that_was_taken_as_one_that_others_have_is_kept():
    """More peers than shards: its holders were known when it was chosen."""
    old = {peer: index % 8 for index, peer in enumerate(PEERS[:9])}
    assert settle({**old, PEERS[9]: 3}, before=old, trains=old) == {PEERS[9]: 3}


@given(st.integers(0, 4), st.permutations(PEERS).flatmap(lambda order: st.integers(5, 8).map(lambda count: order[:count])))
def test_all_that_see_each_other_end_with_shards_of_their_own(known, peers):
    old = {peer: index for index, peer in enumerate(peers[:known])}
    chosen = {peer: least_used(members(old), 8, peer) for peer in peers[known:]}
    held = {**old, **chosen}
    for _ in range(len(chosen)):  # those that moved may have moved to the choice of another
        held |= settle(held, before=old, trains=old)
    assert len(set(held.values())) == len(peers)
    assert {peer: held[peer] for peer in old} == old
