"""What a node says about the standings: who is banned, and whether it is drawn itself."""

from shoal.node.verify.service import Feed
from shoal.verification.consensus.rulings import ABSENT, Standing, Table

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


def test_a_node_that_is_not_drawn_for_want_of_votes_says_so_once_with_what_to_do_and_when_it_is_over():
    before, first, still, after = said(table(1, me=ABSENT - 1), table(2, me=ABSENT), table(3, me=ABSENT + 1), table(4, me=0))
    assert (before, still, after) == ([], [], ["this node is drawn as a verifier again"])
    (sentence,) = first
    assert sentence.startswith("this node is not drawn as a verifier for a while, because 7 of its votes did not come; it stays a")
    assert sentence.endswith("run less on this machine")


def test_the_absence_of_others_and_of_a_node_without_a_standing_is_not_said():
    assert said(table(1, other=2 * ABSENT), Table(2, {}, {})) == [[], []]


def test_a_ban_is_said_with_its_reason_and_once():
    standing = Standing(until=20)
    standing.claims["invalid"], standing.votes["absent"] = 2, 9
    one = Table(10, {OTHER: standing}, {})
    (first,), again = said(one, one)
    assert first.startswith("'other' is banned until ")
    assert first.endswith(": 2 claims found invalid")
    assert again == []
