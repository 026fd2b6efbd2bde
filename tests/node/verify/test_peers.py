"""`shoal peers`: the standings follow from what is signed, whatever else a log says; and what a
node says of them.
"""

import contextlib
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.node.verify import peers
from shoal.node.verify.feed import Feed
from shoal.node.verify.peers import read_peers, reasons, rules_of, summary, table_of
from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.settings.verification import VerifySettings
from shoal.swarm.topics.attestation import sign_record
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.log import Log, encode
from shoal.verification.consensus.records import Claim, Entry, Signed
from shoal.verification.consensus.reputation import (
    ABSENT,
    ScoreRules,
    Standing,
    Table,
    compute_scores,
)
from shoal.verification.consensus.rulings import Rules
from shoal.verification.consensus.sortition import SETTLED
from tests.support.consensus_stories import Story, claim_of

ROUND, ROUND_S, SWARM = 20, 60.0, "run"
VERIFY = VerifySettings(audit_rate=1.0, round_s=ROUND_S)
RULES = rules_of(VERIFY)


@pytest.fixture(scope="module")
def identities():
    made = [
        Identity(Ed25519PrivateKey.from_private_bytes(bytes([number] * 32))) for number in range(6)
    ]
    return {identity.peer_id: identity for identity in made}


@pytest.fixture(scope="module")
def story(identities):
    """The first lies twice, the others do as they should."""
    found = Story(tuple(identities), rules=RULES)
    liar, honest, *_ = identities
    for round in (10, 11):
        found.claim(liar, round, behaviours=("invalid",) * 3)
        found.claim(honest, round)
    return found


def signed(identities, records):
    return tuple(
        Signed(record, sign_record(identities[record.peer], record.encoded)) for record in records
    )


def log_of(identities, story, more=()):
    return Log(
        electorates=tuple(story.electorates.values()),
        records=(*signed(identities, story.records), *more),
    )


def test_the_rules_are_the_swarms():
    assert rules_of(VerifySettings(audit_rate=0.25)) == Rules(audit=0.25)


def test_what_is_forged_or_of_another_swarm_changes_nothing(identities, story):
    liar, honest, judge, *_ = identities
    right = table_of(log_of(identities, story), SWARM, RULES, ROUND)
    ledger = Ledger(story.records)
    assert (
        right.digest == compute_scores(ledger, story.electorates, RULES, ScoreRules(), ROUND).digest
    )
    assert right.standings[liar].claims["invalid"] == 2
    assert right.is_banned(liar)
    assert not any(right.is_banned(peer) for peer in identities if peer != liar)
    # The liar makes up what would ruin the honest one, or save itself.
    slander = Story(tuple(identities), rules=RULES, records=[])
    claim = slander.claim(honest, 12, behaviours=("invalid",) * 3)
    forged = [
        Signed(record, sign_record(identities[liar], record.encoded)) for record in slander.records
    ]
    for round in (10, 11):
        again = claim_of(
            honest, round, prompt=bytes(32)
        )  # a second claim of one slot would be a contradiction
        forged.append(Signed(again, bytes(64)))
    foreign = [
        Claim(**{**claim.model_dump(), "run": "other"}),
        Claim(**{**claim_of(honest, 10, prompt=bytes(32)).model_dump(), "run": "other"}),
        Entry(peer=judge, run="other", round=9, operator=liar, anchor=bytes(32)),
    ]
    told = log_of(identities, story, (*forged, *signed(identities, foreign)))
    assert table_of(told, SWARM, RULES, ROUND).digest == right.digest
    assert set(table_of(told, SWARM, RULES, ROUND).rulings) == set(right.rulings)


def test_logs_that_take_minutes_are_refused(identities, story, monkeypatch):
    log = log_of(identities, story)
    old = Table(ROUND - 2 * RULES.kept_rounds - 1, {"x": Standing(score=2**15)}, {})
    with pytest.raises(ValueError, match="too old"):
        table_of(replace(log, base=old), SWARM, RULES, ROUND)
    later = 10 + 2 * RULES.kept_rounds  # the claims of round 10 can still be of use then
    assert len(table_of(log, SWARM, RULES, later).rulings) == 4
    assert len(table_of(log, SWARM, RULES, later + 1).rulings) == 2
    monkeypatch.setattr(peers, "MOST_PAIRS", 4 * len(identities) - 1)
    with pytest.raises(ValueError, match="more voters"):
        table_of(log, SWARM, RULES, ROUND)
    monkeypatch.setattr(peers, "MOST_PAIRS", 4 * len(identities))
    assert table_of(log, SWARM, RULES, ROUND).standings


@pytest.fixture
def look(identities, story, monkeypatch):
    """`read_peers` of a swarm whose members hand out the given logs; None for one that does not
    answer.
    """

    def look(logs, terms=True, verify=VERIFY):
        @contextlib.contextmanager
        def visited(link):
            members = {
                peer: SimpleNamespace(name=f"n{at}", addresses=())
                for at, peer in enumerate(identities)
            }
            chosen = {peer: members[peer] for peer in logs}
            yield (
                None,
                SimpleNamespace(name="demo", verify=verify, terms=terms or None),
                chosen,
                len(chosen),
            )

        def fetch(host, peer, addresses, swarm, since, timeout):
            if logs[peer] is None:
                raise NetworkError("Gone.")
            return logs[peer] if isinstance(logs[peer], bytes) else encode(logs[peer])

        now = (ROUND + SETTLED) * ROUND_S
        monkeypatch.setattr(
            peers,
            "time",
            SimpleNamespace(time=lambda: now, strftime=time.strftime, localtime=time.localtime),
        )
        monkeypatch.setattr(peers, "visited", visited)
        monkeypatch.setattr(peers, "fetch_log", fetch)
        return read_peers(SimpleNamespace(swarm=SWARM))

    return look


def test_the_table_that_most_give_is_shown(identities, story, look):
    liar, honest, first, second, third, _ = identities
    whole = log_of(identities, story)
    empty = Log()
    found = look({liar: empty, first: whole, second: whole, third: None})
    assert (found["asked"], found["agree"], found["round"]) == (3, 2, ROUND)
    by_peer = {one["peer"]: one for one in found["peers"]}
    assert by_peer[liar]["banned_until"] == pytest.approx((11 + ScoreRules().ban + 1) * ROUND_S)
    assert by_peer[liar]["why"] == "2 claims found invalid"
    assert by_peer[honest] | {"claims": 0, "votes": 0} == {
        "name": "",
        "peer": honest,
        "here": False,
        "score": by_peer[honest]["score"],
        "claims": 0,
        "votes": 0,
        "disputes": {"won": 0, "lost": 0},
        "bans": 0,
        "banned_until": None,
        "why": "",
        "drawn": True,
    }
    assert by_peer[honest]["claims"]["valid"] == 2
    assert by_peer[honest]["score"] > 0
    assert by_peer[third]["here"]
    shown = summary(found)
    assert f"demo: {len(by_peer)} peers; 2 of 3 logs agree" in shown
    (line,) = [line for line in shown.splitlines() if liar[-8:] in line]
    assert "0/2/0" in line
    assert "2 claims found invalid" in line
    assert "(away)" in next(line for line in shown.splitlines() if honest[-8:] in line)
    assert "fewer than" not in shown
    few = summary({**found, "peers": found["peers"][:3]})
    assert "a claim is checked by 3 others, so none is with fewer than 4" in few


def test_who_misses_its_votes_is_shown_with_the_reason(identities, look):
    story = Story(tuple(identities), rules=RULES)
    away, *others = identities
    missed = 0
    for slot in range(12):
        claim = story.claim(others[0], ROUND, slot, ("absent",) * 3, stating=())
        seats = story.verifiers(claim)[0]
        story.vote(claim.id, 0, seats, ["absent" if seat == away else "valid" for seat in seats])
        missed += away in seats
    assert missed > 3
    found = look({others[0]: log_of(identities, story)})
    by_peer = {one["peer"]: one for one in found["peers"]}
    assert [peer for peer, one in by_peer.items() if not one["drawn"]] == [away]
    assert (by_peer[away]["banned_until"], by_peer[away]["score"], by_peer[away]["why"]) == (
        None,
        0,
        "",
    )
    (line,) = [line for line in summary(found).splitlines() if "not drawn" in line]
    assert f"not drawn: {missed} votes not cast" in line
    assert away[-8:] in line


def test_invalid_log_does_not_count(identities, story, look):
    """A log that is none does not count and none at all is said."""
    first, second, *_ = identities
    found = look({first: b"junk", second: log_of(identities, story)})
    assert (found["asked"], found["agree"]) == (1, 1)
    with pytest.raises(
        NetworkError,
        match="No member of the swarm served its log of verification: try again in a minute",
    ):
        look({first: None, second: b"junk"})


def test_where_nothing_is_verified_that_is_said(look, identities):
    found = look(dict.fromkeys(identities), terms=None, verify=VerifySettings())
    assert (
        summary(found)
        == "demo: nothing is verified in this swarm (it was created without --verify)"
    )
    assert found["asked"] == 0


def test_a_name_is_no_markup():
    told = {
        "name": "[bold]demo[/bold]",
        "verify": "activations",
        "agree": 1,
        "asked": 1,
        "peers": [
            {
                "name": "[red]eve[/red][link=http://x]",
                "peer": "12D3KooWeve",
                "score": -1.0,
                "claims": Standing().claims,
                "votes": Standing().votes,
                "banned_until": None,
                "why": "",
                "drawn": True,
            }
        ],
    }
    shown = summary(told)
    assert "[bold]demo[/bold]" in shown
    assert "[red]eve[/red][link=http://x]" in shown


def test_what_cost_reputation_is_said_in_a_few_words():
    assert reasons(Standing()) == ""
    standing = Standing()
    (
        standing.claims["invalid"],
        standing.votes["missed"],
        standing.votes["agreed"],
        standing.appeals["lost"],
    ) = 2, 1, 9, 1
    assert reasons(standing) == "2 claims found invalid, 1 planted claims approved, 1 disputes lost"


ME, OTHER = "me", "other"


def said(*tables):
    """The sentences after each of the tables."""
    feed, found = Feed(ME, lambda peer: f"'{peer}'", 60.0), []
    for table in tables:
        feed.settled(table, 0.0)
        sentences = []
        feed.drain(sentences.append, lambda *event, **values: None)
        found.append(sentences)
    return found


def table(round, **absences):
    standings = {peer: Standing(absence=absence) for peer, absence in absences.items()}
    for standing in standings.values():
        standing.votes["absent"] = 7
    return Table(round, standings, {})


def test_undrawn_node_says_so_once():
    """A node that is not drawn for want of votes says so once with what to do and when it is
    over.
    """
    before, first, still, after = said(
        table(1, me=ABSENT - 1), table(2, me=ABSENT), table(3, me=ABSENT + 1), table(4, me=0)
    )
    assert (before, still, after) == ([], [], ["this node is drawn as a verifier again"])
    (sentence,) = first
    assert sentence.startswith(
        "this node is not drawn as a verifier for a while, because 7 of its votes did not come; it "
        "stays a"
    )
    assert sentence.endswith("run less on this machine")


def test_unrelated_absence_is_not_said():
    """The absence of others and of a node without a standing is not said."""
    assert said(table(1, other=2 * ABSENT), Table(2, {}, {})) == [[], []]


def test_a_ban_is_said_with_its_reason_and_once():
    standing = Standing(until=20)
    standing.claims["invalid"], standing.votes["absent"] = 2, 9
    one = Table(10, {OTHER: standing}, {})
    (first,), again = said(one, one)
    assert first.startswith("'other' is banned until ")
    assert first.endswith(": 2 claims found invalid")
    assert again == []
