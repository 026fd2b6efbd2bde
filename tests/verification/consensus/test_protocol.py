"""The state machine: what is taken when, what is refused and counted, and what a drawn peer has to
do.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._votes_peers import toy_signer, toy_verify
from shoal.verification.consensus.draws import Times
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.planting import BEHIND, Chain, must_plant
from shoal.verification.consensus.protocol import REASONS, Consensus, Limits
from shoal.verification.consensus.records import (
    Claim,
    Dispute,
    Entry,
    Opening,
    Refused,
    Reveal,
    Signed,
    Verdict,
)
from shoal.verification.consensus.sortition import Electorate
from shoal.verification.consensus.voter import Checked, Voter
from tests.support.consensus_stories import RULES, ballots, claim_of, digest

PEERS = tuple(f"p{number:02}" for number in range(16))
TIMES = Times(commit_s=10.0, skew_s=2.0, reveal_s=5.0)
ROUND = 10


class Scene:
    """One peer's consensus, with a clock that the test moves."""

    def __init__(self, peers=PEERS, banned=(), **settings):
        self.now, self.peers = 0.0, peers
        known = {"rules": RULES, "times": TIMES, **settings}
        self.consensus = Consensus(
            "run", toy_verify, lambda: self.now, banned=lambda peer: peer in banned, **known
        )
        self.consensus.advance(ROUND)

    def take(self, record):
        self.consensus.take(Signed.by(toy_signer(record.peer), record))

    def refused(self, record, reason):
        before = self.consensus.counts[reason]
        with pytest.raises(Refused) as caught:
            self.take(record)
        assert caught.value.reason == reason
        assert reason in REASONS
        assert self.consensus.counts[reason] == before + 1

    def open(self, round=ROUND):
        """Draw for ``round``, and let the case begin."""
        self.consensus.advance(max(self.consensus.round, round + 2))
        self.consensus.open(
            Electorate(round, digest("beacon", round), {peer: peer for peer in self.peers})
        )
        self.now += TIMES.skew_s

    def drawn(self, peer=PEERS[0], slot=0):
        """A claim whose verifiers are drawn, and its seats."""
        claim = claim_of(peer, ROUND, slot)
        self.take(claim)
        self.open()
        return claim, self.consensus.ruling(claim.id).trials[0].verifiers

    def duties(self, peer):
        return [duty.what for duty in self.consensus.duties(peer)]


def parts(claim, peer, behaviour="valid", attempt=0):
    return ballots(claim.id, attempt, peer, behaviour)[0]


def test_a_case_from_claim_to_ruling():
    scene = Scene()
    claim, seats = scene.drawn()
    assert [scene.duties(peer) for peer in seats] == [["check"]] * 3
    assert all(scene.duties(peer) == [] for peer in PEERS if peer not in seats)
    for peer in seats:
        assert scene.duties(seats[0]) != ["reveal"]
        scene.take(parts(claim, peer)[0])
    assert [scene.duties(peer) for peer in seats] == [
        ["reveal"]
    ] * 3  # all have committed: nobody waits for the clock
    for peer in seats:
        scene.take(parts(claim, peer)[1])
    (duty,) = scene.consensus.duties(seats[0])
    assert (duty.what, duty.marks) == ("state", ("valid",) * 3)
    for peer in seats[:2]:
        assert scene.consensus.ruling(claim.id).outcome == "unverified" or peer != seats[0]
        scene.take(Verdict(peer=peer, case=claim.id, attempt=0, marks=duty.marks))
    assert scene.consensus.ruling(claim.id).outcome == "valid"
    assert scene.duties(seats[0]) == []
    assert scene.consensus.counts == {"accepted": 9}


def test_vote_is_revealed_after_all_commitments():
    """A vote is revealed only when nobody can commit any more."""
    scene = Scene()
    claim, seats = scene.drawn()
    start = scene.now
    scene.take(parts(claim, seats[0])[0])
    for second, due in (
        (0, []),
        (9.9, []),
        (10, []),
        (11.9, []),
        (12, ["reveal"]),
        (16.9, ["reveal"]),
        (17, ["state"]),
    ):
        scene.now = start + second
        assert scene.duties(seats[0]) == due, second
    scene.now = start + 11
    scene.refused(parts(claim, seats[1])[0], "late")


@settings(deadline=None)
@given(st.floats(0, 2), st.floats(0, 9.9))
def test_clock_skew_keeps_commitments_before_reveals(skew, at):
    """Whoever is ahead by ``skew`` reveals, at its earliest, when whoever is behind takes no
    commitments any more.
    """
    ahead, behind = Scene(), Scene()
    claim, seats = ahead.drawn()
    behind.drawn()
    ahead.take(parts(claim, seats[0])[0])
    behind.take(parts(claim, seats[0])[0])
    start = ahead.now
    ahead.now, behind.now = start + at + skew, start + at
    while ahead.duties(seats[0]) != ["reveal"]:
        ahead.now, behind.now = ahead.now + 0.25, behind.now + 0.25
    if skew < TIMES.skew_s:
        behind.refused(parts(claim, seats[1])[0], "late")
    else:
        assert behind.now >= start + TIMES.commit_s - 1e-9


def test_forged_and_replayed_records_are_refused():
    scene = Scene()
    claim = claim_of(PEERS[0], ROUND)
    with pytest.raises(Refused, match="signature"):
        scene.consensus.take(Signed(claim, b"\0" * 32))
    with pytest.raises(Refused, match="signature"):
        scene.consensus.take(Signed.by(toy_signer(PEERS[1]), claim))
    assert scene.consensus.counts == {"forged": 2}
    assert claim.id not in scene.consensus.ledger
    scene.take(claim)
    scene.refused(claim, "replayed")
    scene.open()
    scene.refused(claim, "replayed")
    seats = scene.consensus.ruling(claim.id).trials[0].verifiers
    commitment = parts(claim, seats[0])[0]
    scene.take(commitment)
    scene.refused(commitment, "replayed")


def test_foreign_and_banned_claims_are_refused():
    """Claims of other runs rounds and of banned peers are refused."""
    scene = Scene(banned=(PEERS[5],))
    foreign = Claim(**{**claim_of(PEERS[0], ROUND).model_dump(), "run": "another"})
    scene.refused(foreign, "foreign")
    scene.refused(claim_of(PEERS[0], ROUND + 2), "future")
    scene.refused(claim_of(PEERS[0], ROUND - 2), "late")
    scene.refused(claim_of(PEERS[5], ROUND), "banned")
    scene.take(claim_of(PEERS[0], ROUND + 1))
    scene.take(
        claim_of(PEERS[0], ROUND - 1)
    )  # for a moment after a round its claims may still be on their way
    scene.now += TIMES.skew_s
    scene.refused(claim_of(PEERS[1], ROUND - 1), "late")


def test_round_is_drawn_once_after_its_beacon():
    """A round is drawn for once and not before its beacon can be known."""
    scene = Scene()
    beacon = Electorate(ROUND, digest("beacon"), {})
    with pytest.raises(ValueError, match="too early"):
        scene.consensus.open(beacon)
    scene.consensus.advance(ROUND + 2)
    scene.consensus.open(beacon)
    with pytest.raises(ValueError, match="done"):
        scene.consensus.open(beacon)
    with pytest.raises(ValueError, match="before"):
        scene.consensus.advance(ROUND)


def test_ballots_of_others_are_refused():
    scene = Scene()
    claim, seats = scene.drawn()
    outsider = next(peer for peer in PEERS if peer not in seats)
    for record in parts(claim, outsider):
        scene.refused(record, "not-drawn")
    scene.refused(
        Verdict(peer=outsider, case=claim.id, attempt=0, marks=("invalid",) * 3), "not-drawn"
    )
    scene.refused(parts(claim, seats[0], attempt=1)[0], "not-drawn")
    scene.refused(Verdict(peer=seats[0], case=claim.id, attempt=0, marks=("invalid",) * 7), "unfit")
    scene.refused(parts(claim_of(PEERS[3]), seats[0])[0], "unknown")


def test_a_reveal_that_does_not_fit_is_refused_and_marked():
    scene = Scene()
    claim, seats = scene.drawn()
    commitment, wrong = parts(claim, seats[0], "unfit")
    scene.take(commitment)
    scene.refused(wrong, "unfit")
    scene.now += TIMES.total_s
    (duty,) = scene.consensus.duties(seats[0])
    assert duty.marks == ("withheld", "absent", "absent")


def test_second_commitment_is_proof_and_floods_end():
    """A second commitment is kept as a proof and floods are cut off."""
    scene = Scene()
    claim, seats = scene.drawn()
    commitment, reveal, other = parts(claim, seats[0], "twice")
    scene.take(commitment)
    scene.refused(other, "contradiction")
    scene.take(reveal)
    scene.now += TIMES.total_s
    assert scene.consensus.duties(seats[0])[0].marks[0] == "withheld"
    for number in range(2):
        scene.refused(Reveal(**{**reveal.model_dump(), "salt": digest(number)}), "contradiction")
    scene.refused(Reveal(**{**reveal.model_dump(), "salt": digest(2)}), "contradiction")
    scene.refused(Reveal(**{**reveal.model_dump(), "salt": digest(3)}), "quota")


def test_late_reveals_are_refused_but_known_to_the_ledger():
    scene = Scene()
    claim, seats = scene.drawn()
    commitment, reveal = parts(claim, seats[0])
    scene.take(commitment)
    scene.now += TIMES.total_s
    scene.refused(reveal, "late")
    assert reveal.id in scene.consensus.ledger
    assert scene.consensus.duties(seats[0])[0].marks[0] == "withheld"


@pytest.mark.parametrize(("second", "late"), [(11.9, False), (12.0, True)])
def test_commitments_are_late_once_votes_are_shown(second, late):
    """Also a second one of the same verifier; and they go with their records."""
    scene = Scene()
    claim, seats = scene.drawn()
    commitment, _, again = parts(claim, seats[0], "twice")
    scene.now += second
    scene.refused(commitment, "late")
    scene.refused(again, "contradiction")
    assert scene.consensus.late == ({commitment.id, again.id} if late else set())
    scene.consensus.keep(Ledger())
    assert scene.consensus.late == set()


def test_no_shows_lead_to_another_draw_at_most_twice():
    scene = Scene()
    claim, seats = scene.drawn()
    draws = [seats]
    for attempt in range(3):
        checking = [peer for peer in PEERS if scene.duties(peer) and "check" in scene.duties(peer)]
        assert len(checking) == 3
        draws.append(tuple(checking))
        scene.now += TIMES.total_s
        assert sum(scene.duties(peer).count("state") for peer in PEERS) == 3 * (attempt + 1)
    assert len({peer for seats in draws for peer in seats}) == 9
    assert not any("check" in scene.duties(peer) for peer in PEERS)
    assert scene.consensus.ruling(claim.id).outcome == "unverified"


def test_ten_thousand_claims_a_minute_are_cut_off():
    scene = Scene(limits=Limits(claims=20, waiting=50, strangers=40, cases=30))
    scene.consensus.electorates[1] = Electorate(1, digest("beacon"), {peer: peer for peer in PEERS})
    taken = 0
    for number in range(400):
        try:
            scene.take(claim_of(f"sybil{number % 3}", ROUND, number))
        except Refused:
            continue
        taken += 1
    assert taken == 40
    for number in range(25):
        try:
            scene.take(
                claim_of(PEERS[0], ROUND, number)
            )  # who can be drawn is not crowded out by fresh keys
        except Refused:
            continue
        taken += 1
    assert taken == 50
    assert scene.consensus.counts["overflow"] + scene.consensus.counts["quota"] == 375
    scene.open()
    assert sum(scene.duties(peer).count("check") for peer in PEERS) == 30 * 3


@pytest.mark.parametrize(
    "end",
    [
        lambda known: known.keep(Ledger()),
        lambda known: known.advance(ROUND + RULES.appeal_rounds + 1),
    ],
)
def test_others_duties_go_with_their_case(end):
    scene = Scene()
    scene.drawn()
    assert scene.consensus.cases.verifiers
    scene.now += 1000  # over, and nobody has asked for the duties
    end(scene.consensus)
    assert not scene.consensus.cases.verifiers


def decided(scene, claim, seats, votes):
    for peer, vote in zip(seats, votes, strict=True):
        scene.take(parts(claim, peer, vote)[0])
    for peer, vote in zip(seats, votes, strict=True):
        scene.take(parts(claim, peer, vote)[1])
    for peer in seats:
        scene.take(Verdict(peer=peer, case=claim.id, attempt=0, marks=tuple(votes)))


def test_a_dispute_draws_seven_others_once():
    scene = Scene()
    claim, seats = scene.drawn()
    dispute = Dispute(peer=PEERS[0], round=ROUND + 2, claim=claim.id, attempt=0)
    scene.refused(dispute, "unknown")
    decided(scene, claim, seats, ("invalid", "invalid", "valid"))
    scene.refused(Dispute(peer="stranger", round=ROUND + 2, claim=claim.id, attempt=0), "not-drawn")
    scene.refused(
        Dispute(peer=PEERS[0], round=ROUND + 2, claim=digest("no claim"), attempt=0), "unknown"
    )
    scene.take(dispute)
    scene.refused(Dispute(peer=PEERS[0], round=ROUND + 3, claim=claim.id, attempt=0), "quota")
    scene.open(ROUND + 2)
    judges = [peer for peer in PEERS if "check" in scene.duties(peer)]
    assert len(judges) == 7
    assert not set(judges) & {PEERS[0], *seats}


@pytest.mark.parametrize(
    ("rounds", "taken"), [(RULES.appeal_rounds, True), (RULES.appeal_rounds + 1, False)]
)
def test_appeal_is_taken_until_its_window_ends(rounds, taken):
    """An appeal is taken until the last round of its window."""
    scene = Scene()
    claim, seats = scene.drawn()
    decided(scene, claim, seats, ("invalid", "invalid", "valid"))
    scene.consensus.advance(ROUND + rounds)
    dispute = Dispute(peer=PEERS[0], round=ROUND + rounds, claim=claim.id, attempt=0)
    if taken:
        scene.take(dispute)
    else:
        scene.refused(dispute, "stale")


def planting(scene, peer):
    """An entry of ``peer`` and the first slot of the round that it has to plant."""
    chain = Chain(digest("secret", peer), ROUND - BEHIND, 64)
    before = Electorate(ROUND - BEHIND, digest("beacon", ROUND - BEHIND), {p: p for p in PEERS})
    slots = [
        slot
        for slot in range(64)
        if must_plant(chain.link(ROUND), before.beacon, slot, RULES.planted)
    ]
    return chain, before, slots


def test_openings_are_taken_for_what_the_lottery_planted_alone():
    scene = Scene()
    fresh = Consensus("run", toy_verify, lambda: scene.now, rules=RULES, times=TIMES)
    chain, before, slots = planting(scene, PEERS[0])
    fresh.advance(ROUND - BEHIND)
    scene.consensus = fresh
    scene.take(
        Entry(
            peer=PEERS[0], run="run", round=ROUND - BEHIND, operator=PEERS[0], anchor=chain.anchor
        )
    )
    fresh.advance(ROUND)
    fresh.open(before)
    lie, planted = (
        claim_of(PEERS[0], ROUND, next(s for s in range(64) if s not in slots)),
        claim_of(PEERS[0], ROUND, slots[0]),
    )
    scene.take(lie)
    scene.take(planted)
    scene.open()
    for claim in (lie, planted):
        decided(scene, claim, fresh.ruling(claim.id).trials[0].verifiers, ("invalid",) * 3)
    link = chain.link(ROUND)
    scene.refused(
        Opening(peer=PEERS[0], round=ROUND + 2, claim=lie.id, attempt=0, link=link), "unfit"
    )
    scene.refused(
        Opening(peer=PEERS[1], round=ROUND + 2, claim=planted.id, attempt=0, link=link), "unfit"
    )
    scene.take(Opening(peer=PEERS[0], round=ROUND + 2, claim=planted.id, attempt=0, link=link))
    assert fresh.ruling(planted.id).planted
    assert not fresh.ruling(lie.id).planted


def test_decided_cases_are_forgotten_and_the_ledger_keeps_the_ruling():
    scene = Scene()
    claim, seats = scene.drawn()
    decided(scene, claim, seats, ("valid",) * 3)
    scene.now += 100
    scene.consensus.advance(ROUND + RULES.appeal_rounds + 1)
    scene.refused(parts(claim, seats[0], "twice")[2], "unknown")
    assert scene.consensus.ruling(claim.id).outcome == "valid"


def member(scene, peer, check):
    """A voter, and the records that it publishes."""
    records = []
    publish = lambda signed: records.append(signed.record)  # noqa: E731
    return Voter(
        peer, scene.consensus, publish, toy_signer(peer), check, lambda: digest("salt", peer)
    ), records


def test_a_member_commits_reveals_and_states():
    scene = Scene()
    _, seats = scene.drawn()
    pairs = [member(scene, peer, lambda claim: Checked("valid", b"close")) for peer in seats]
    assert [each.work() for each, _ in pairs] == [1, 1, 1]
    for _ in range(2):
        assert [each.work() for each, _ in pairs] == [0, 0, 0]
    assert [[record.KIND for record in records] for _, records in pairs] == [
        ["commitment", "reveal", "verdict"]
    ] * 3


def test_a_member_that_leaves_reveals_first():
    scene = Scene()
    _, seats = scene.drawn()
    (leaving, records), *others = [
        member(scene, peer, lambda claim: Checked("valid")) for peer in seats
    ]
    leaving.work()
    leaving.reveal()
    for _ in range(3):
        for each, _ in others:
            each.work()
    assert [record.KIND for record in records] == ["commitment", "reveal"]
    assert [records[-1].marks for _, records in others] == [("valid",) * 3] * 2
    leaving.reveal()
    assert len(records) == 2


def test_member_without_budget_leaves_its_seat_empty():
    """A member without budget leaves its seat empty and states that."""
    scene = Scene()
    _, seats = scene.drawn()
    asked = []
    idle, records = member(scene, seats[0], asked.append)
    assert [idle.work(0), idle.work(1), idle.work(1)] == [0, 1, 0]
    assert len(asked) == 1
    scene.now += TIMES.total_s
    idle.work()
    assert [(record.KIND, record.marks) for record in records] == [("verdict", ("absent",) * 3)]


@pytest.mark.parametrize("seconds", [TIMES.commit_s, 600 * TIMES.commit_s])
def test_a_check_that_takes_too_long_is_no_error(seconds):
    scene = Scene()
    _, seats = scene.drawn()

    def slow(claim):
        scene.now += seconds
        return Checked("valid")

    late, records = member(scene, seats[0], slow)
    assert late.work() == 1
    assert [record.KIND for record in records] == (["verdict"] if seconds > TIMES.total_s else [])
    assert (
        late._check_s == TIMES.commit_s
    )  # where this node slept it leaves out one more seat, not fourteen
    assert scene.consensus.counts["late"] == 1
