"""Whole swarms in one process: cheats are banned, honest peers never, and all peers come to the same table."""

import pytest

from verification.reputation import reckon
from verification.simulation import Swarm, World, is_right

HONEST = {f"honest-{number}": "honest" for number in range(5)}


def banned(swarm):
    return {peer for peer, standing in swarm.peers[0].table.standings.items() if standing.until is not None}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_liar_and_a_copier_are_banned_within_thirty_claims_and_no_honest_peer_is(seed):
    """Seven peers, each of which claims once a round, as in the issue."""
    swarm = Swarm({**HONEST, "liar-0": "liar", "copier-0": "copier"}, World(seed=seed))
    swarm.run(26)
    assert banned(swarm) == {"liar-0", "copier-0"}
    rulings = swarm.peers[0].table.rulings.values()
    for cheat in ("liar-0", "copier-0"):
        assert sum(ruling.claim.peer == cheat for ruling in rulings) <= 30
    assert not any(ruling.outcome == "valid" for ruling in rulings if not is_right(ruling.claim))
    assert not any(ruling.outcome == "invalid" for ruling in rulings if is_right(ruling.claim))
    # The same records, though they came at other times and in another order.
    first = swarm.peers[0].consensus
    expected = reckon(first.ledger, first.electorates, swarm.world.rules, swarm.world.prices, 20)
    for peer in swarm.peers[1:]:
        known = peer.consensus
        assert known.electorates == first.electorates
        assert reckon(known.ledger, known.electorates, swarm.world.rules, swarm.world.prices, 20).standings == expected.standings


def test_colluders_and_lazy_peers_are_found_among_many_honest_ones():
    kinds = {**{f"honest-{number}": "honest" for number in range(6)}, "colluder-0": "colluder", "colluder-1": "colluder"}
    swarm = Swarm({**kinds, "lazy-0": "lazy"}, World(seed=3))
    swarm.run(24)
    assert {"colluder-0", "colluder-1"} <= banned(swarm) <= {"colluder-0", "colluder-1", "lazy-0"}
    lazy = swarm.peers[0].table.standings["lazy-0"]
    assert lazy.seats["missed"] > 0
    assert lazy.score < 0


def test_nothing_is_decided_where_nobody_verifies():
    swarm = Swarm({**{f"absent-{number}": "absent" for number in range(4)}, "honest-0": "honest"})
    swarm.run(10)
    assert {ruling.outcome for ruling in swarm.peers[0].table.rulings.values()} <= {"unverified"}
