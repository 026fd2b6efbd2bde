"""What becomes of a peer's claims: which count, when that is an alarm, what a restart or a lie
changes, and how it is explained.
"""

import json
import math
import sqlite3
from contextlib import closing

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.verify import evidence_file
from shoal.node.verify.errors import VerifyError
from shoal.node.verify.evidence_file import NAME, EvidenceFile
from shoal.node.verify.finding import Finding, Measured
from shoal.node.verify.history import History
from shoal.node.verify.stated_odds import stated_odds
from shoal.verification.calibration import Honest, Pair
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.records import Dispute, Reveal
from shoal.verification.consensus.reputation import Standing, Table
from shoal.verification.consensus.rulings import Ruling, Trial
from shoal.verification.consensus.sortition import Electorate
from shoal.verification.fingerprints.fingerprint import Evidence, Feature
from shoal.verification.sequential import ALARM
from tests.support.consensus_stories import claim_of

FEATURES = (Feature("error", 0.01),)
PAIR = Pair("activations", "tiny", "float32", "float32")
HONEST = Honest.of([Evidence(FEATURES, ((0.1 + 0.0003 * n,),), (1.0,)) for n in range(200)])
OTHERS = ("bob", "cat", "dan", "eve")


def found(value, accepted=True, honest=HONEST):
    measured = Measured(PAIR, honest, Evidence(FEATURES, ((value,),), (1.0,)), "torch 2.13.0, cpu")
    return Finding(accepted, "As found.", {"tokens": 9.0}, 0.1, (measured,))


class World:
    """A node "me" that checks a claim of "ann" in each round.

    ``says``: the odds that others state about ann.
    """

    def __init__(self, path):
        self.path, self.round, self.bans = path, 0, 0
        self.rulings, self.ledger, self.electorates, self.says = {}, Ledger(), {}, {}
        self.restart()

    def restart(self):
        self.history = History(self.path, "me")

    def check(self, value, peer="ann", opened=False, finding=None):
        """Check one claim, and settle its round; return what is voted, and about whom there is an
        alarm now.
        """
        self.round += 1
        claim = claim_of(peer, self.round)
        voted = self.history.weigh(claim, finding or found(value))
        verifiers = tuple(self.says)
        trial = Trial(verifiers, ("valid",) * len(verifiers))
        for verifier, evidence in self.says.items():
            data = (
                evidence if isinstance(evidence, bytes) else json.dumps({"odds": evidence}).encode()
            )
            self.ledger.add(
                Reveal(
                    peer=verifier,
                    case=claim.id,
                    attempt=0,
                    vote="valid",
                    evidence=data,
                    salt=bytes(32),
                )
            )
        self.electorates[self.round] = Electorate(
            self.round, bytes(32), {peer: peer.partition("-")[0] for peer in verifiers}
        )
        self.rulings = {claim.id: Ruling(claim, "valid", (trial,), None, opened)}
        standing = Standing(bans=self.bans)
        alarms = self.history.settle(
            Table(self.round, {peer: standing}, self.rulings), self.ledger, self.electorates
        )
        return voted, alarms

    def until_alarm(self, value, most=60):
        for count in range(1, most + 1):
            if self.check(value)[1]:
                return count
        return None


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / NAME)


def test_honest_claims_are_no_alarm_and_odds_are_stated(world):
    for n in range(30):
        voted, alarms = world.check(0.1 + 0.001 * (37 * n % 60))
        assert (voted.accepted, alarms) == (True, [])
        assert list(voted.statistics) == ["odds", "tokens"]
    assert 0 < json.loads(voted.evidence)["odds"] < 1


def test_an_alarm_is_said_once_and_alone_changes_no_vote(world):
    assert world.until_alarm(0.3) <= 12
    for _ in range(3):
        voted, alarms = world.check(0.3)
        assert (voted.accepted, alarms) == (True, [])
        assert voted.statistics["odds"] >= math.exp(ALARM)
    assert world.check(0.12, "bob")[0].accepted


@pytest.mark.parametrize(
    ("says", "refused"),
    [
        ({"bob": 1e6, "cat": 0.2, "dan": 3e4}, True),  # three of four
        ({"bob": 1e6, "cat": 0.2}, True),  # two of three
        ({"bob": 0.5, "cat": 0.2, "dan": 1e30}, False),  # two of four: no majority
        ({"bob": 1e30}, False),  # two in all are too few
        ({"bob-1": 1e30, "bob-2": 1e30, "cat": 0.1, "dan": 0.1}, False),  # an operator speaks once
        ({"bob": 1e30, "cat": b"{", "dan": b"\xff"}, False),  # two of two that say anything
    ],
)
def test_a_vote_needs_the_alarm_of_more_than_half(world, says, refused):
    world.until_alarm(0.3)
    world.says = says
    world.check(0.3)
    voted, _ = world.check(0.3)
    assert voted.accepted is not refused
    assert ("verifiers find so, this one with odds of" in voted.reason) is refused


def test_nobody_is_refused_whose_own_claims_speak_for_it(world):
    """All others collude against ann; this node has seen its claims."""
    world.says = dict.fromkeys(OTHERS, 1e30)
    for n in range(12):
        voted, _ = world.check(0.1 + 0.001 * (37 * n % 60))
    assert voted.statistics["odds"] < 1
    assert voted.accepted


def test_a_refused_claim_stays_refused_and_training_is_left_alone(world):
    assert not world.check(0.1, finding=found(0.3, accepted=False))[0].accepted
    plain = Finding(True, "Good.", {"turned": 0.0})
    assert world.check(0.1, finding=plain)[0] is plain


def test_what_its_author_had_to_make_wrong_does_not_count(world):
    for _ in range(20):
        assert world.check(9.0, opened=True)[1] == []
    assert not EvidenceFile(world.path).peers()


def test_nothing_counts_before_its_round_is_settled(world):
    claim = claim_of("ann", 5)
    world.history.weigh(claim, found(0.3))
    ruling = {claim.id: Ruling(claim, "valid", ())}
    world.history.settle(Table(4, {}, {}), Ledger(), {})
    assert not EvidenceFile(world.path).peers()
    for round in (5, 6):  # and once only
        world.history.settle(Table(round, {}, ruling), Ledger(), {})
        world.history.weigh(claim, found(0.3))
    assert [row.claims for row in EvidenceFile(world.path).series("ann")] == [1]


def test_a_restart_changes_nothing(tmp_path):
    values = [0.1 + 0.003 * (7 * n % 11) for n in range(12)]
    worlds = [World(tmp_path / "one"), World(tmp_path / "two")]
    for value in values:
        for world in worlds:
            world.check(value)
        worlds[1].restart()
    one, two = (EvidenceFile(world.path).claims("ann", 1) for world in worlds)
    assert len(one) == 12
    assert one == two
    assert worlds[0].history.log_odds("ann") == worlds[1].history.log_odds("ann")


def test_another_calibration_begins_another_series(world):
    other = Honest.of([Evidence(FEATURES, ((0.2 + 0.001 * n,),), (1.0,)) for n in range(30)])
    world.until_alarm(0.3)
    before = world.history.log_odds("ann")
    world.check(0.2, finding=found(0.2, honest=other))
    rows = EvidenceFile(world.path).series("ann")
    assert [(row.number, row.claims) for row in rows][1:] == [(2, 1)]
    assert EvidenceFile(world.path).claims("ann", 1) == []  # a summary stays
    assert world.history.log_odds("ann") == rows[0].log_odds == before


def test_after_a_ban_the_odds_begin_anew(world):
    world.until_alarm(0.3)
    counted = world.round
    world.bans = 1
    world.check(0.3)  # of the round that banned it
    assert world.history.log_odds("ann") == 0
    world.check(0.12)
    assert world.history.log_odds("ann") < 0
    world.restart()
    assert world.history.log_odds("ann") < 0
    rows = EvidenceFile(world.path).series("ann")
    assert [(row.number, row.bans, row.claims) for row in rows] == [(1, 0, counted + 1), (2, 1, 1)]


def test_a_full_file_forgets_the_peer_with_the_least_odds(world, monkeypatch):
    monkeypatch.setattr(evidence_file, "MAX_PEERS", 2)
    world.check(0.3, "ann")
    world.check(0.05, "bob")
    world.check(0.3, "cat")
    assert EvidenceFile(world.path).peers() == ["ann", "cat"]


def test_a_series_that_is_full_is_followed_by_another(world, monkeypatch):
    monkeypatch.setattr(evidence_file, "LENGTH", 5)
    for _ in range(11):
        world.check(0.12)
    assert [row.claims for row in EvidenceFile(world.path).series("ann")] == [5, 5, 1]
    monkeypatch.setattr(evidence_file, "MAX_SERIES", 2)
    for _ in range(5):
        world.check(0.12)
    assert [row.number for row in EvidenceFile(world.path).series("ann")] == [3, 4]


def test_a_damaged_file_is_one_sentence_and_no_evidence(world, caplog):
    world.path.write_bytes(b"not a database" * 100)
    with pytest.raises(
        VerifyError,
        match=r"^The evidence in '.*evidence.sqlite' cannot be used \(.*\): free space, or move",
    ):
        EvidenceFile(world.path).peers()
    voted, alarms = world.check(0.3)
    assert (voted.accepted, alarms, voted.statistics["odds"]) == (True, [], 1.0)
    assert "cannot be used" in caplog.text


# -- what others state -----------------------------------------------------------------------------

SAID = b'{"odds":5e4}'


def read(evidence, mark="valid", more=()):
    claim = claim_of("ann", 3)
    ledger = Ledger(
        [
            Reveal(peer="bob", case=claim.id, attempt=0, vote="valid", evidence=e, salt=bytes(32))
            for e in (evidence, *more)
        ]
    )
    return stated_odds(
        Table(3, {}, {claim.id: Ruling(claim, "valid", (Trial(("bob",), (mark,)),))}), ledger, {}
    )


def test_a_statement_is_read():
    assert read(SAID) == {"ann": {"bob": pytest.approx(math.log(5e4))}}
    assert read(b'{"odds":1e300}') == {"ann": {"bob": 69.0}}


@pytest.mark.parametrize(
    "evidence",
    [
        b"",
        b"e",
        b"[]",
        b"{}",
        b'{"odds":true}',
        b'{"odds":"9"}',
        b'{"odds":-1}',
        b'{"odds":0}',
        b'{"odds":Infinity}',
        b'{"odds":NaN}',
        b'{"odds":' + b"9" * 400 + b"}",
        b"[" * 512,
        b'{"odds":[1]}',
    ],
)
def test_what_states_nothing_is_left_out(evidence):
    assert read(evidence) == {}


def test_only_votes_that_count_speak():
    assert read(SAID, mark=None) == read(SAID, mark="withheld") == {}
    assert read(SAID, more=[b'{"odds":1}']) == {}  # two reveals contradict each other


def test_the_newest_statement_counts_and_that_of_an_appeal():
    claims = [claim_of("ann", round) for round in (3, 4)]
    dispute = Dispute(peer="ann", round=5, claim=claims[1].id, attempt=0)
    cases = (
        (claims[0].id, 0, "bob", 2.0),
        (claims[1].id, 0, "bob", 3.0),
        (dispute.id, 0, "cat", 4.0),
        (claims[1].id, 1, "cat", 5.0),
    )
    ledger = Ledger(
        Reveal(
            peer=peer,
            case=case,
            attempt=attempt,
            vote="valid",
            evidence=json.dumps({"odds": odds}).encode(),
            salt=bytes(32),
        )
        for case, attempt, peer, odds in cases
    )
    bob, cat = Trial(("bob",), ("valid",)), Trial(("cat",), ("valid",))
    rulings = {
        claims[1].id: Ruling(claims[1], "valid", (bob, cat), dispute),
        claims[0].id: Ruling(claims[0], "valid", (bob,)),
    }
    said = stated_odds(Table(5, {}, rulings), ledger, {})["ann"]
    assert {peer: round(math.exp(odds), 6) for peer, odds in said.items()} == {
        "bob": 3.0,
        "cat": 4.0,
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A node's folder in which one peer cheats and two do not."""
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path / "runs" / "node" / NAME)
    for _ in range(12):
        world.check(0.3, "peer-of-ann")
        world.check(0.13, "peer-of-bob")
    world.check(0.13, "else-of-bob")
    return world.path.parent


def run(*words):
    return CliRunner().invoke(cli, ["verify", "explain", *words])


def test_json_has_every_claim_with_its_odds(folder):
    done = run("peer-of-ann", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert (report["peer"], report["alarm_at"]) == ("peer-of-ann", 20_000)
    (node,) = report["nodes"]
    assert (node["folder"], node["alarm"], node["bans"]) == (str(folder), True, 0)
    (series,) = node["series"]
    assert (series["claims"], series["first_round"], series["last_round"]) == (12, 1, 23)
    stored = EvidenceFile(folder / NAME).claims("peer-of-ann", 1)
    assert [one["claim"] for one in series["counted"]] == [row.claim for row in stored]
    assert [one["p"] for one in series["counted"]] == [{"error": row.p[0]} for row in stored]
    assert {one["kernel"] for one in series["counted"]} == {"torch 2.13.0, cpu"}
    odds = [one["odds"] for one in series["counted"]]
    assert node["odds"] == series["odds"] == max(odds) > 20_000
    assert odds == sorted(odds)
    assert (
        json.loads(run("else", "--json", "--folder", str(folder)).output)["nodes"][0]["alarm"]
        is False
    )


def test_people_read_the_decision_and_the_newest_claims(folder):
    shown = run("…f-ann").output
    assert shown.startswith(
        f"peer peer-of-ann; an alarm at odds of 20,000 to 1\n{folder}: an alarm, odds of "
    )
    assert (
        "1. activations of tiny, float32 checked in float32: 12 claims of rounds 1 to 23, odds up "
        "to " in shown
    )
    newest = EvidenceFile(folder / NAME).claims("peer-of-ann", 1)[-1]
    last = shown.rstrip().splitlines()[-1]
    assert last.strip().startswith(f"{newest.claim[:12]}  round 23  odds ")
    assert last.endswith("of error  by torch 2.13.0, cpu")
    assert "no alarm, odds of " in run("peer-of-bob").output


def test_a_claim_that_an_earlier_version_stored_has_no_kernel(folder):
    with closing(sqlite3.connect(folder / NAME)) as database, database:
        rows = database.execute("SELECT rowid, row FROM claims").fetchall()
        earlier = [(json.dumps(json.loads(row)[:6]), key) for key, row in rows]
        database.executemany("UPDATE claims SET row = ? WHERE rowid = ?", earlier)
    assert run("peer-of-ann").output.rstrip().endswith("of error")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["nobody"],
            "No claim was counted of 'nobody' in runs/node: name the peer as `shoal peers` shows "
            "it",
        ),
        (["bob"], "No claim was counted of 'bob'"),  # too short
        (["peer-of"], "2 peers are called 'peer-of'"),
    ],
)
def test_an_unknown_or_doubtful_peer_is_one_sentence(folder, words, message):
    done = run(*words)
    assert done.exit_code != 0
    assert message in str(done.exception or done.output)
