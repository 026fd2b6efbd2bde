"""Whose addresses are in a link, and in which order."""

from typing import NamedTuple

import pytest

from shoal.swarm.access import Link
from shoal.swarm.errors import LinkError
from shoal.swarm.identity import ID_HEADER, b58encode
from shoal.swarm.manifest import swarm_id
from shoal.swarm.membership.link_addresses import lasting_link

SWARM = swarm_id(b"a swarm")


class Record(NamedTuple):
    addresses: tuple
    issued: float = 1000.0


def peer(number):
    return b58encode(ID_HEADER + bytes([number]) * 32)


def at(number, host=None, port=4001):
    return f"/ip4/{host or f'198.{number}.0.1'}/tcp/{port}/p2p/{peer(number)}"


def relayed(number, by=99):
    return f"/ip4/9.9.9.9/tcp/4001/p2p/{peer(by)}/p2p-circuit/p2p/{peer(number)}"


def members(*numbers, **changes):
    return {peer(number): Record((at(number),), **changes) for number in numbers}


def chosen(others=(), **how):
    return lasting_link(SWARM, dict(others), **{"seeds": {}, **how}).bootstrap


def test_bootstrap_nodes_first_then_the_node_itself_and_direct_members_then_relayed_ones():
    others = {**members(1), peer(2): Record((relayed(2),), 2000.0), **members(3, issued=1500.0)}
    found = chosen(others, seeds={peer(50): (at(50),), peer(51): (at(51),)}, own=[at(7)])
    assert found == (at(50), at(51), at(7), at(3), at(1), relayed(2))


def test_a_node_behind_a_relay_stands_behind_those_that_can_be_dialled():
    assert chosen(members(1), own=[relayed(7)]) == (at(1), relayed(7))


def test_met_members_come_before_those_only_read_of():
    assert chosen(members(1, 2, 3), met={peer(3)}) == (at(3), at(1), at(2))
    assert chosen({**members(1), peer(2): Record((relayed(2),))}, met={peer(2)}) == (at(1), relayed(2))


def test_one_of_each_address_range_comes_before_the_second_of_any():
    crowd = {peer(number): Record((at(number, f"203.0.{number}.1"),), 2000.0 + number) for number in range(1, 30)}
    others = {**crowd, **members(40, 41)}
    found = chosen(others)
    assert found[:3] == (at(29, "203.0.29.1"), at(40), at(41))
    assert len(found) == 16
    assert found[3] == at(28, "203.0.28.1")


def test_a_full_link_keeps_bootstrap_nodes_and_the_node_itself():
    seeds = {peer(number): (at(number), at(number, port=4002)) for number in range(50, 56)}
    own = [at(7, port=port) for port in range(5000, 5008)]
    found = chosen(members(*range(10, 40)), seeds=seeds, own=own)
    assert len(found) == 16
    assert found[:4] == tuple(at(number) for number in range(50, 54))
    assert found[4:8] == tuple(own[:4])
    assert found[8:] == tuple(at(number) for number in sorted(range(10, 40), key=peer)[:8])


def test_second_addresses_fill_what_is_left_and_others_come_last():
    others = {peer(1): Record((at(1), at(1, port=4002), at(1, port=4003)))}
    found = chosen(others, seeds={peer(50): (at(50), at(50, port=4002))}, own=[at(7)], otherwise=[at(9), at(1)])
    assert found == (at(50), at(50, port=4002), at(7), at(1), at(1, port=4002), at(9))


def test_an_address_beyond_the_machine_is_preferred_and_a_relay_where_there_is_one():
    here, lan = at(1, "127.0.0.1"), at(1, "192.168.0.7")
    assert chosen({peer(1): Record((here, lan))}) == (lan,)
    assert chosen({}, own=[here, at(1)]) == (at(1),)
    assert chosen({}, own=[here]) == (here,)
    assert chosen({peer(1): Record((lan, relayed(1)))}) == (relayed(1), lan)
    assert chosen({peer(1): Record((here,))}) == (here,)


@pytest.mark.parametrize("far", [at(50), at(50).replace("/ip4/198.50.0.1", "/dns4/seed.example.org"), relayed(50)])
def test_private_addresses_are_handed_on_only_in_a_swarm_that_is_known_by_no_other(far):
    lan, cgnat = at(1, "192.168.0.7"), at(7, "100.64.1.2")
    others = {peer(1): Record((lan, at(1)), 2000.0), peer(2): Record((at(2, "10.0.0.2"),))}
    assert chosen(others, seeds={peer(50): (far,)}, own=[cgnat], otherwise=[at(9, "172.16.0.9")]) == (far, at(1))
    assert chosen(others, own=[cgnat], otherwise=[far]) == (at(1), far)
    assert chosen(others, own=[cgnat, far])[0] == (at(1) if far == relayed(50) else far)
    assert not {lan, cgnat} & {*chosen(others, own=[cgnat, far])}


def test_a_members_word_of_a_public_address_drops_no_private_one():
    lan = at(7, "192.168.0.7")
    assert chosen(members(1), own=[lan]) == (lan, at(1))
    assert chosen({peer(1): Record((at(1, "10.0.0.1"), at(1)))}) == (at(1), at(1, "10.0.0.1"))


def test_what_a_stranger_names_of_others_or_malformed_is_left_out():
    victim = Record((at(2), "/ip4/1.2.3.4/tcp/1", f"/x/p2p/{peer(1)}"))
    with pytest.raises(LinkError, match="names no peer to join through"):
        chosen({peer(1): victim})
    assert chosen({peer(1): victim}, own=["/ip4/0/tcp/1", at(7)], otherwise=["/nonsense"]) == (at(7),)


def test_it_is_a_link_to_the_swarm_without_an_invitation():
    made = lasting_link(SWARM, members(1), seeds={})
    assert (made.swarm, made.invite) == (SWARM, "")
    assert Link.parse(str(made)) == made


def test_of_many_members_those_behind_relays_are_left_out_but_not_the_node_itself():
    behind = {peer(number): Record((relayed(number),), 2000.0) for number in range(60, 80)}
    found = chosen({**behind, **members(*range(10, 40))}, own=[relayed(7)])
    assert found[-1] == relayed(7)
    assert len(found) == 16
    assert all(address in {at(number) for number in range(10, 40)} for address in found[:-1])
