"""Whole swarms in one process: cheats are banned, honest peers never, and all peers come to the
same table.
"""

from dataclasses import replace

import pytest

from bench._votes_peers import Peer, is_right
from bench.votes_simulation import START, Swarm, World
from shoal.verification.consensus.records import Claim, Commitment
from shoal.verification.consensus.reputation import compute_scores
from shoal.verification.consensus.rulings import Rules, salts
from shoal.verification.consensus.voter import Checked

HONEST = {f"honest-{number}": "honest" for number in range(5)}
WORLD = World()


def ran(cheats=(), honest=5, rounds=22, world=WORLD, each=lambda round: None):
    kinds = {f"honest-{number}": "honest" for number in range(honest)}
    kinds.update({f"{kind}-{number}": kind for number, kind in enumerate(cheats)})
    swarm = Swarm(kinds, world)
    swarm.run(rounds, each)
    return swarm


def agreed(swarm, but=()):
    """All honest peers, ``but`` those, have the same table and rulings, which this returns the
    first of.
    """
    tables = [
        peer.participant.table
        for peer in swarm.peers
        if peer.kind == "honest" and peer.name not in but
    ]
    assert all(table.standings == tables[0].standings for table in tables)
    drawn = [
        {key: ruling for key, ruling in table.rulings.items() if ruling.trials} for table in tables
    ]
    assert all(rulings == drawn[0] for rulings in drawn)
    return tables[0]


def banned(swarm, but=()):
    table = agreed(swarm, but)
    return {peer for peer, standing in table.standings.items() if standing.until is not None}


def all_counts(swarm, reason):
    return sum(peer.participant.consensus.counts[reason] for peer in swarm.peers)


@pytest.mark.ci
def test_liar_and_copier_are_found_in_thirty_claims():
    """Seven peers, each of which claims once a round.

    A copier that waits for a vote to copy is as late as a slow machine.
    """
    swarm = ran(("liar", "copier"), rounds=32)
    assert banned(swarm) == {"liar-0"}
    table = agreed(swarm)
    assert sum(table.standings["liar-0"].claims.values()) <= 30
    copier = table.standings["copier-1"]
    assert copier.votes["agreed"] == 0
    others = [standing for name, standing in table.standings.items() if name.startswith("honest")]
    assert copier.votes["absent"] < min(standing.votes["agreed"] for standing in others) / 2
    assert copier.absence > 0 == max(standing.absence for standing in others)
    assert not any(
        ruling.outcome == "valid" for ruling in table.rulings.values() if not is_right(ruling.claim)
    )
    assert not any(
        ruling.outcome == "invalid" for ruling in table.rulings.values() if is_right(ruling.claim)
    )
    # The same records, though they came at other times and in another order; and the pruned past
    # counts as it was.
    for peer in swarm.peers:
        known = peer.participant
        again = compute_scores(
            known.consensus.ledger,
            known.consensus.electorates,
            swarm.world.rules,
            swarm.world.prices,
            table.round,
            known.base,
        )
        assert again.standings == table.standings
        assert all(
            record.round >= known.base.round
            for record in known.consensus.ledger
            if isinstance(record, Claim)
        )


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("cheat", "rounds"), [("thief", 26), ("farmer", 24), ("replayer", 16), ("lazy", 40)]
)
def test_each_cheat_is_banned_and_nobody_else(cheat, rounds):
    """A thief copies commitments; a farmer lies once it is respected; a replayer claims old outputs
    and repeats others' records.
    """
    world = replace(WORLD, rules=Rules(planted=0.4)) if cheat == "lazy" else WORLD
    swarm = ran((cheat,), honest=6, rounds=rounds, world=world)
    assert banned(swarm) == {f"{cheat}-0"}
    if cheat == "farmer":
        assert agreed(swarm).standings["farmer-0"].claims["invalid"] <= 3
    if cheat == "replayer":
        assert all_counts(swarm, "replayed") > 0


@pytest.mark.ci
def test_who_never_votes_is_not_drawn_and_keeps_its_membership():
    """Its seats are not drawn once it has missed three; what it claims is still checked, and cheats
    are banned as ever.
    """
    # in two or three more rounds the first is drawn again
    swarm = ran(("absent", "absent", "liar"), honest=6, rounds=26)
    assert banned(swarm) == {"liar-2"}
    table, away = agreed(swarm), [name for name in swarm.names if name.startswith("absent")]
    electorates = swarm.peer("honest-0").participant.consensus.electorates
    last = max(electorates)
    assert not any(name in electorates[last].operators for name in away)
    assert len(electorates[last].operators) == 6
    for name in away:
        standing = table.standings[name]
        assert standing.votes["absent"] < 20
        assert standing.claims["valid"] > 10
        assert standing.score > 0


@pytest.mark.ci
def test_colluders_are_banned_and_the_outvoted_win():
    """Two of three verifiers collude now and then; the author disputes, and a larger draw overturns
    the ruling.
    """
    overturned = 0
    for seed in (0, 4):
        swarm = ran(("colluder", "colluder"), honest=8, rounds=22, world=replace(WORLD, seed=seed))
        assert banned(swarm) == {"colluder-0", "colluder-1"}
        for ruling in agreed(swarm).rulings.values():
            assert ruling.outcome != ("invalid" if is_right(ruling.claim) else "valid")
            overturned += ruling.overturned
    assert overturned > 0


@pytest.mark.ci
def test_lost_records_are_made_up_for():
    """Every hundredth record does not reach a peer: it learns from others' logs what it missed."""
    swarm = ran(("liar",), honest=6, rounds=26, world=replace(WORLD, loss=0.01))
    assert swarm.lost > 30
    assert swarm.pulled > 0
    assert banned(swarm) == {"liar-0"}


def test_who_comes_late_learns_the_same_table_and_takes_part():
    swarm = ran(("liar",), honest=6, rounds=24, world=replace(WORLD, joins={"honest-5": 9}))
    assert banned(swarm) == {"liar-0"}
    standing = agreed(swarm).standings["honest-5"]
    assert standing.claims["valid"] > 0
    assert standing.votes["agreed"] > 0


def test_who_comes_after_the_beginning_was_forgotten_gets_the_base():
    rules = Rules(planted=0.2, appeal_rounds=4)
    swarm = ran(
        ("liar",), honest=6, rounds=26, world=replace(WORLD, rules=rules, joins={"honest-5": 21})
    )
    bases = {peer.participant.base.digest for peer in swarm.peers if peer.kind == "honest"}
    assert len(bases) == 1
    assert swarm.peer("honest-5").participant.base.standings["liar-0"].until is not None
    assert banned(swarm) == {"liar-0"}


def test_restarted_planter_is_no_cheat():
    """The fault: what was planted, and the chain that shows it, were kept in memory alone; each
    lost plant is a ban.
    """
    stopped = 12

    def stop(round):
        if round == stopped:
            swarm.peers[-1] = Peer("honest-5", "honest", swarm)

    swarm = Swarm(
        {f"honest-{number}": "honest" for number in range(6)},
        replace(WORLD, rules=Rules(planted=0.5)),
    )
    swarm.run(24, stop)
    table, open_then = agreed(swarm), range(START + stopped - 2, START + stopped + 1)
    mine = [
        ruling
        for ruling in table.rulings.values()
        if ruling.claim.peer == "honest-5" and ruling.claim.round in open_then
    ]
    assert {ruling.planted for ruling in mine if not is_right(ruling.claim)} == {True}
    assert table.standings["honest-5"].claims["invalid"] == 0
    assert banned(swarm) == set()
    assert table.standings["honest-5"].claims["valid"] > 0


def test_absentee_does_not_dispute_a_miss(monkeypatch):
    """A second draw would have the evidence, and those who rightly said that it was not served
    would pay for its author.
    """
    away, check = set(), Peer.check
    monkeypatch.setattr(
        Peer,
        "check",
        lambda peer, claim: Checked("invalid") if claim.peer in away else check(peer, claim),
    )

    def leave(round):
        if round == 10:
            away.add(swarm.peers.pop().name)
        elif round == 12:
            away.clear()
            swarm.peers.append(Peer("honest-9", "honest", swarm))

    swarm = Swarm(
        {f"honest-{number}": "honest" for number in range(10)},
        replace(WORLD, rules=Rules(planted=0.0)),
    )
    swarm.run(22, leave)
    table = agreed(swarm)
    assert table.standings["honest-9"].claims["invalid"] > 0
    assert not any(ruling.appeal for ruling in table.rulings.values())
    assert not any(standing.votes["against"] for standing in table.standings.values())


@pytest.mark.parametrize("seconds", [1.0, -1.0])
def test_a_clock_that_is_a_second_off_does_no_harm(seconds):
    swarm = ran(("liar",), honest=6, rounds=20, world=replace(WORLD, clocks={"honest-5": seconds}))
    assert banned(swarm) == {"liar-0"}
    assert not any(
        agreed(swarm).standings["honest-5"].votes[bad] for bad in ("absent", "withheld", "against")
    )


def test_a_small_audit_leaves_no_round_without_salts():
    """Where no vote is cast on a round, the draws of the next could be known in advance."""
    swarm = Swarm(HONEST, replace(WORLD, rules=Rules(audit=0.1)))
    swarm.run(14)
    known = swarm.peer("honest-0").participant.consensus
    agreed_on = [e for e in known.electorates.values() if e.claims]
    assert len(agreed_on) >= 6
    for electorate in known.electorates.values():
        if known.ledger.published(electorate.round) and electorate.operators:
            assert electorate.claims
    first, *later = sorted(e.round for e in agreed_on)
    for round in later:
        assert salts(round - 1, known.ledger, known.electorates, known.rules) or round == first


def test_who_saw_late_commitments_takes_what_most_state():
    """Its own electorate has another beacon, so it pulls that of the others."""

    def see_late(round):
        known = swarm.peer("honest-4").participant.consensus
        known.late.update(record.id for record in known.ledger if isinstance(record, Commitment))

    swarm = Swarm(HONEST, WORLD)
    swarm.run(10, see_late)
    assert swarm.pulled > 0
    first, *others = (peer.participant.consensus.electorates for peer in swarm.peers)
    assert all(electorates == first for electorates in others)
    assert any(electorate.operators for electorate in first.values())


@pytest.mark.parametrize(("rounds", "reason"), [(2, "future"), (-2, "late")])
def test_wrong_clock_harms_only_itself(rounds, reason):
    """A clock that is two rounds off is ignored and harms only itself."""
    clocks = {"honest-5": rounds * WORLD.round_s}
    swarm = ran(("liar",), honest=6, rounds=20, world=replace(WORLD, clocks=clocks))
    assert banned(swarm, but=("honest-5",)) == {"liar-0"}
    assert "honest-5" not in agreed(swarm, but=("honest-5",)).standings
    assert swarm.peer("honest-0").participant.consensus.counts[reason] > 0


@pytest.mark.ci
def test_half_shown_votes_divide_nobody():
    """Who shows its votes to half of the others divides nobody."""
    swarm = ran(("withholder",), honest=6, rounds=24)
    assert banned(swarm) <= {"withholder-0"}
    assert swarm.pulled > 0
    honest = [
        standing for name, standing in agreed(swarm).standings.items() if name != "withholder-0"
    ]
    assert not any(
        standing.votes[bad]
        for standing in honest
        for bad in ("absent", "withheld", "against", "missed")
    )


def test_who_claims_different_things_to_different_peers_divides_nobody():
    swarm = ran(("twofaced",), honest=6, rounds=20)
    assert banned(swarm) <= {"twofaced-0"}


def test_claim_flood_costs_honest_claims_nothing():
    """Ten thousand claims a minute are counted and cost honest claims nothing."""
    swarm = ran(("flooder",), honest=6, rounds=18)
    assert all_counts(swarm, "quota") > 6 * 14_000
    assert banned(swarm) == set()
    honest = swarm.peer("honest-0").participant
    assert len(honest.consensus.ledger) < 3000
    flood = [
        ruling
        for ruling in agreed(swarm).rulings.values()
        if ruling.claim.round == START + WORLD.defects
    ]
    assert sum(ruling.outcome != "unverified" for ruling in flood) >= 6
    assert not any(
        ruling.outcome == "unverified" for ruling in flood if ruling.claim.peer.startswith("honest")
    )


@pytest.mark.ci
def test_outnumbering_fresh_keys_are_not_drawn():
    """Nine sybils come together, lie, and would approve each other: who has shown nothing yet does
    not vote.
    """
    world = replace(WORLD, joins={f"colluder-{number}": 7 for number in range(9)})
    swarm = ran(("colluder",) * 9, honest=6, rounds=20, world=world)
    assert banned(swarm) == {f"colluder-{number}" for number in range(9)}
    assert not any(
        ruling.outcome == "valid"
        for ruling in agreed(swarm).rulings.values()
        if not is_right(ruling.claim)
    )


def test_checks_that_take_a_while_cost_nobody_a_seat():
    swarm = ran(("liar",), honest=6, rounds=16, world=replace(WORLD, check_s=4.0))
    assert banned(swarm) == {"liar-0"}
    honest = [standing for name, standing in agreed(swarm).standings.items() if name != "liar-0"]
    assert not any(standing.votes[bad] for standing in honest for bad in ("withheld", "against"))


@pytest.mark.ci
def test_what_a_participant_keeps_does_not_grow_with_the_rounds():
    """rl-swarm #369: after hours a node's memory was full."""
    swarm = Swarm({f"honest-{number}": "honest" for number in range(4)}, WORLD)
    kept = {}

    def look(round):
        if round in (40, 60):
            participant = swarm.peers[0].participant
            known, table = participant.consensus, participant.table
            parts = known.ledger, known.electorates, table.rulings, table.standings
            kept[round] = [len(part) for part in parts]

    swarm.run(61, look)
    assert kept[40][0] > 500
    for before, after in zip(kept[40], kept[60], strict=True):
        assert after <= 1.1 * before
