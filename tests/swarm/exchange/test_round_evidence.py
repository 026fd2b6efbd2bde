"""How far the words of others move a node's round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.round_evidence import ALONE, QUICKER, RoundEvidence
from shoal.swarm.identity import Identity
from shoal.swarm.wire.envelope import MAX_COUNT
from shoal.swarm.wire.messages import Answer

MODEL, OTHER = "0" * 64, "1" * 64
FAR = 9 * 10**15


class Record:
    def __init__(self, round, model=MODEL):
        self.round, self.model = round, model


def evidence(members, fragments=1):
    return RoundEvidence(
        PeerContext(None, Identity.ephemeral(), "a" * 52, MODEL, 0, lambda: members), fragments
    )


def trained(members, fragments=1, until=10, met=()):
    """A node that has been in ``until`` rounds of a second each, and has exchanged with ``met`` in
    the last one.
    """
    node = evidence(members, fragments)
    for round in range(until * fragments):
        node.begin(round / fragments, round)
    node.met(met, until * fragments)
    return node


def test_free_records_move_a_node_nowhere():
    """A hundred free records and a member that says the same move a node nowhere."""
    members = {f"free{n}": Record(FAR) for n in range(100)} | {
        "liar": Record(FAR),
        "friend": Record(10),
    }
    node = trained(members, met=["friend"])
    assert (
        node.furthest("liar", FAR, 10.0) == 9
    )  # where the friend has been, for its next round is 10
    node.heard("friend", 14)
    assert node.furthest("friend", 14, 10.0) == 14  # whom it has met is believed


def test_a_newcomer_that_heard_two_follows_no_single_word():
    """The fault: one whose record had not come did not count, and the other was believed."""
    node = evidence({"liar": Record(FAR)})
    node.begin(0.0, 6)
    node.heard("liar", FAR)
    node.heard(node._context.me, 6)  # it asked itself whether it may lead
    assert node.furthest("liar", FAR, 0.0) > 6 + ALONE  # there is nobody else
    node.heard("friend", 6)
    assert node.furthest("liar", FAR, 0.0) <= 6 + ALONE


def test_median_of_met_peers_decides():
    """Of those met the median decides and another model does not count."""
    members = {
        "a": Record(12),
        "b": Record(20),
        "liar": Record(FAR),
        "else": Record(FAR, OTHER),
        "more": Record(FAR, OTHER),
    }
    node = trained(members, met=["a", "b", "liar", "else", "more"])
    assert node.furthest("liar", FAR, 10.0) == 21


def test_slower_half_counts_with_a_little_room():
    """Without that, of twelve peers of unlike speed more than half were alone."""
    members = {"a": Record(12), "b": Record(14), "c": Record(20), "d": Record(30)}
    node = trained({"a": Record(12), "d": Record(30)}, met=["a", "d"])
    assert [node.furthest("d", 30, 10.0) for _ in range(2)] == [13, 11]
    node = trained(members, met=["a", "b", "c", "d"])
    assert [node.furthest("d", 30, 10.0) for _ in range(2)] == [16, 13]
    node.met(["d"], 30)
    assert node.furthest("d", 31, 10.0) == 16


def test_met_liar_moves_two_nodes_by_one_round():
    """With one round for each of its words it drove both before it, as far as it liked."""
    names, at = ("one", "two"), {"one": 10, "two": 10}
    records = {name: Record(10) for name in names} | {"liar": Record(FAR)}
    others = {
        name: {peer: record for peer, record in records.items() if peer != name} for name in names
    }
    nodes = {name: trained(others[name], met=list(others[name])) for name in names}
    for _ in range(50):
        for name, other in (names, names[::-1]):
            nodes[name].heard("liar", FAR)
            at[name] = max(at[name], nodes[name].furthest("liar", FAR, 10.0))
            records[name].round = at[name]
            nodes[other].heard(name, at[name])
            nodes[name].met(["liar"], at[name])  # and it exchanges as an honest peer does
            nodes[name].met([other], at[name])
    assert max(at.values()) == 12


def test_two_liars_of_four_move_by_two_rounds():
    """Two met liars of four peers move a node by two rounds."""
    node = trained(
        {name: Record(10) for name in "ab"} | {name: Record(FAR) for name in "cd"}, met="abcd"
    )
    for liar in "cdcd":
        node.heard(liar, FAR)
        assert node.furthest(liar, FAR, 10.0) <= 12
        node.met([liar], 10)
    assert node.furthest("c", FAR, 10.0) == 9


def test_the_clock_is_a_limit_whoever_says_more():
    members = {"liar": Record(FAR), "other": Record(FAR)}
    node = trained(members, met=["liar", "other"], fragments=4)
    assert node.furthest("liar", FAR, 10.0) == 4 * QUICKER * 11


def test_single_word_moves_a_lone_node_a_little():
    """A node that had met only the liar, or nobody, went to `QUICKER` times its rounds."""
    liar = Record(0)
    for met in ([], ["liar"]):
        node = trained({"liar": liar, "dead": Record(FAR)}, met=met)
        at = 10
        for now in range(10, 60):
            node.begin(now, at)
            liar.round = at + 2 if now % 2 else FAR
            node.heard("liar", liar.round)
            at = 1 + max(at, node.furthest("liar", liar.round, now + 0.5))
            node.missed()
        assert at <= 60 + ALONE + 2 * len(met)


def test_new_node_follows_the_only_other_in_its_first_round():
    """The record that told it its round is seconds old; later, one word moves it a little."""
    node = evidence({"friend": Record(12)})
    node.begin(0.0, 12)
    assert node.furthest("friend", 22, 0.5) == 22
    assert node.furthest("friend", FAR, 0.5) == 12 + QUICKER
    node.begin(1.0, 13)
    assert node.furthest("friend", FAR, 1.5) == 12
    for members in ({"friend": Record(12), "other": Record(12)}, {"other": Record(12)}):
        node = evidence(members)
        node.begin(0.0, 12)
        assert node.furthest("friend", FAR, 0.5) <= 12


def test_of_two_the_one_ahead_goes_back():
    """Of two that are all there are the one ahead goes back at once."""
    node = trained({"friend": Record(50)})
    node.called("friend", 50)
    node.missed()
    assert node.back(500) == 50


@pytest.mark.parametrize("distance", [1, ALONE])
def test_lonely_node_slightly_ahead_goes_back(distance):
    """Those behind may have no rounds left by which one word moves them, and never came up."""
    node = trained({"friend": Record(50), "dead": Record(50)})
    for alone in range(2 * ALONE):
        node.called("friend", 50 - distance)
        assert node.back(50) is None, alone
        node.missed()
    assert node.back(50) == 50 - distance


def test_two_unmet_words_move_to_the_lower():
    """Two words of peers never met move a newcomer to the lower."""
    node = trained({"a": Record(0), "b": Record(0), "liar": Record(FAR)})
    for peer, round in (("a", 500), ("liar", FAR)):
        node.heard(peer, round)
    assert node.furthest("liar", FAR, 10.0) == 499
    node.heard("stranger", FAR)  # no member
    node.heard("b", 501)
    assert node.furthest("b", 501, 10.0) == 501


def test_newer_of_word_and_record_counts():
    """A newcomer hears one word a round: the others' are as old as its last calls, and it would
    stay as many rounds behind.
    """
    members = {"a": Record(0), "b": Record(0), "silent": Record(FAR)}
    node = trained(members)
    node.heard("a", 40)
    node.heard("b", 30)
    members["b"].round = 60
    assert node.furthest("a", 70, 10.0) == 39
    members["a"].round = 50
    assert node.furthest("a", 70, 10.0) == 49


def test_sleeper_may_go_as_far_as_its_clock():
    """A node that slept may go as far as its clock."""
    node = trained({"friend": Record(5000)}, met=["friend"])
    assert node.furthest("friend", 5000, 5000.0) == 5000


def test_lonely_node_ahead_goes_back_to_callers():
    """A node that is ahead and alone goes back to those who call it."""
    node = trained({"friend": Record(50), "dead": Record(50)}, fragments=4)
    node.called("friend", 49)
    for _ in range(ALONE * 4):
        assert node.back(10**6 + 1) is None
        node.missed()
    back = node.back(10**6 + 1)
    assert 49 <= back < 49 + 4
    assert back % 4 == (10**6 + 1) % 4  # each fragment keeps its place
    assert node.back(back) is None


def test_nobody_takes_a_node_back_to_before_their_last_exchange():
    """A liar that called for round 0 did, and those whom it passed over were so for as many rounds
    again.
    """
    node = trained({"liar": Record(FAR), "friend": Record(50)}, until=40, met=["liar", "friend"])
    for _ in range(ALONE):
        node.called("liar", 0)
        node.missed()
    assert node.back(50) == 40


def test_strangers_do_not_move_a_node_that_exchanges():
    """Strangers do not take a node back that exchanges nor one that met callers know."""
    node = trained({}, until=100)
    for n in range(20):
        node.called(f"free{n}", 0)
    node.met(["friend"], 100)
    for _ in range(ALONE):
        node.missed()
    assert node.back(100) is None  # what was called before the exchange counts no more
    for n in range(20):
        node.called(f"free{n}", 0)
    node.called("friend", 99)
    assert node.back(100) is None


@given(
    said=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, MAX_COUNT)), max_size=30),
    records=st.lists(st.integers(0, MAX_COUNT), min_size=4, max_size=4),
    met=st.sets(st.sampled_from("abcd")),
    year=st.floats(0, 3.2e7),
)
def test_no_own_message_is_ever_out_of_bounds(said, records, met, year):
    """In a year of rounds of a tenth of a second, whatever others say."""
    members = {peer: Record(at) for peer, at in zip("abcd", records, strict=True)}
    node = evidence(members)
    node.begin(0.0, 0)
    node.begin(0.1, 1)
    node.met(met, 1)
    at = 1
    for peer, round in said:
        node.heard(peer, round)
        at = max(at, min(round, node.furthest(peer, round, year)))
        Answer(verdict="passed", round=at + 1)
    assert at <= QUICKER * (year / 0.1 + 2)


@pytest.mark.parametrize("said", [0, 1, MAX_COUNT])
def test_the_bounds_of_a_round(said):
    assert 0 <= evidence({}).furthest("anyone", said, 0.0) <= QUICKER
