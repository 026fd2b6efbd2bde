"""A round waits for the members of the last group of its fragment."""

from types import SimpleNamespace

import pytest

from shoal.optim import RoundKey
from shoal.optim.exchange.pairing import order
from shoal.swarm.exchange.group.roster import LOOK_ROUNDS, LivenessView
from tests.support.fake_network import MODEL, SWARM, group_ready

PEERS = ("a", "b", "c", "d")
FRAGMENTS = 2


class Directory:
    """The members in view, which all state one round."""

    def __init__(self):
        self.round, self.issued = 0, dict.fromkeys(PEERS, 1.0)

    def members(self):
        return {
            peer: SimpleNamespace(model=MODEL, round=self.round, issued=issued)
            for peer, issued in self.issued.items()
        }


@pytest.fixture
def directory():
    return Directory()


@pytest.fixture
def view(directory):
    context = SimpleNamespace(
        me="a", model=MODEL, members=directory.members, look=lambda: None, is_barred=lambda _: False
    )
    return LivenessView(context, FRAGMENTS)


def test_a_round_waits_for_the_last_group_of_its_fragment(view):
    """Mutants: one group is of all fragments; all in view are waited for."""
    assert view.awaited(2, 0) == set(PEERS)  # there was none yet
    view.note_group(0, {"a", "b", "c"})
    assert view.awaited(2, 0) == {"a", "b", "c"}
    assert view.awaited(3, 1) == set(PEERS)


def test_every_sixteenth_round_is_of_all_in_view(view):
    """Mutant: a leader that told each half of the others of a group with it had parted them."""
    view.note_group(0, {"a", "b", "c"})
    waits = [len(view.awaited(round, 0)) for round in range(0, 4 * LOOK_ROUNDS, FRAGMENTS)]
    assert waits == [4, *[3] * (LOOK_ROUNDS - 1)] * 2
    look = FRAGMENTS * LOOK_ROUNDS
    assert view.order(7, look, 0) == order(7, look, PEERS)
    assert not view.is_outside(0)


def test_of_several_groups_none_is_the_roster(view):
    """Mutants: a node that missed one round is outside for ever; the last group of all leads."""
    view.note_group(0, {"a", "b", "c"})
    view.miss_group(0)
    view.note_group(0, ())
    assert view.awaited(2, 0) == set(PEERS)
    assert not view.is_outside(0)
    assert view.order(7, 2, 0) == order(7, 2, PEERS)


def test_a_smaller_part_waits_for_all_in_view(view, directory):
    """So that parts of a swarm that came apart meet again, at the larger one or, where two are
    equal, by the order of all.

    Mutants: half is enough; nobody asks the others first.
    """
    view.note_group(0, {"a", "b"})
    assert view.awaited(2, 0) == set(PEERS)
    assert view.is_outside(0)
    view.note_group(0, {"a", "b", "c"})
    assert view.awaited(2, 0) == {"a", "b", "c"}
    assert not view.is_outside(0)
    del directory.issued["b"], directory.issued["c"]  # they were stopped: one of two is left
    assert view.awaited(2, 0) == {"a", "d"}


def test_who_is_absent_or_left_is_not_waited_for(view, directory):
    view.note_group(0, set(PEERS))
    view.mark_absent(["b"])
    assert view.awaited(2, 0) == {"a", "c", "d"}
    directory.issued["b"] = 2.0  # it is there after all
    assert view.awaited(2, 0) == set(PEERS)
    view.attendance.missed("c", 0)
    view.attendance.missed("c", 2)
    del directory.issued["d"]
    assert view.awaited(4, 0) == {"a", "b"}


def test_a_record_that_is_new_brings_nobody_back(view, directory):
    """The fault: who slept was waited for in each round once its record was new, though it had
    missed the group.
    """
    view.note_group(0, {"a", "b", "c"})
    directory.issued["d"] = 2.0
    assert "d" not in view.awaited(2, 0)


def test_the_last_group_leads_first(view):
    """So that its members have the same leader, whoever else each of them sees."""
    for round in range(2, 32, FRAGMENTS):
        ranked = order(7, round, PEERS)
        assert view.order(7, round, 0) == ranked
    view.note_group(0, {"a", "b", "d"})
    for round in range(2, 32, FRAGMENTS):
        ranked = order(7, round, PEERS)
        first = [peer for peer in ranked if peer != "c"]
        assert view.order(7, round, 0) == first + [peer for peer in ranked if peer not in first]


def test_who_was_in_no_group_asks_the_others_first(view):
    """Mutant: it leads in the rounds that its rank gives to it, where nobody comes."""
    view.note_group(0, set(PEERS))
    round = next(round for round in range(2, 99, 2) if order(7, round, PEERS)[0] == "a")
    assert view.order(7, round, 0)[0] == "a"
    view.miss_group(0)
    assert view.order(7, round, 0)[-1] == "a"
    assert view.order(7, round, 1)[0] == "a"  # each fragment for itself
    view.mark_silent("b")
    assert view.order(7, round, 0)[-2:] == ["b", "a"]
    view.note_group(0, {"a", "c", "d"})
    assert view.order(7, round, 0)[0] == "a"


def test_a_last_average_is_of_all(view):
    view.note_group(FRAGMENTS, {"a", "b"})
    view.miss_group(FRAGMENTS)
    assert view.awaited(3, FRAGMENTS) == set(PEERS)
    assert not view.is_outside(FRAGMENTS)


def test_only_who_is_waited_for_can_be_late(view):
    """Mutant: a newcomer is charged with a round that did not wait for it."""
    view.note_group(0, {"a", "b", "c"})
    for round in (2, 4):
        view.mark_late({"a", "b"} | {"d"}, round, 0)
    assert view.attendance.is_left_out("c", 5)
    for round in (6, 8):
        view.mark_late({"a", "b", "c"}, round, 0)
    assert not view.attendance.is_left_out("d", 9)


def test_what_comes_late_says_by_how_much(school):
    """It counts in the next round of its fragment, and the one after that is due then.

    Mutant: the rounds of all fragments move.
    """
    *others, late = school.ranked(school.peers(3, fragments=2))
    for peer in others:
        peer.sees = [one.id for one in others]
    assert school.values([peer.start(0, 1.0) for peer in others]) == [1.0] * 2
    handle = late.start(0, 4.0)
    school.until(lambda: any(peer.waiting(2) for peer in others))
    assert school.values([handle, *(peer.start(2, 1.0) for peer in others)]) == [2.0] * 3
    exchange = late.exchange
    assert [exchange.due(1, fragment) for fragment in (0, 1)] == [4, 1]
    assert exchange.due(2, 0) == 6  # also if that one came to nothing
    assert [exchange.behind(RoundKey(SWARM, round), 1) for round in (0, 2)] == [2, 0]
    assert others[0].exchange.behind(RoundKey(SWARM, 2), 1) == 0


def test_without_following_the_next_round_is_that_of_the_others(school):
    *others, late = school.ranked(school.peers(3, wait=5.0, follow=False))
    for peer in others:
        peer.sees = [one.id for one in others]
    for round in range(3):
        assert school.values([peer.start(round, 1.0) for peer in others]) == [1.0] * 2
    assert late.start(0, 9.0).result() is None
    assert late.exchange.due(1, 0) == 3


def test_rounds_follow_those_of_weights_that_were_taken_over(school):
    """Each fragment has its own: a newcomer that counted all alike was a round ahead with some."""
    first, newcomer = (peer.exchange for peer in school.peers(2, fragments=3))
    first.took_over([-1, -1, -1])
    assert [first.due(9, fragment) for fragment in range(3)] == [9, 9, 9]
    newcomer.took_over([6, 7, 5], newcomer=True)
    assert [newcomer.due(9, fragment) for fragment in range(3)] == [9, 10, 8]
    assert newcomer.rounds.instead(8, 2) is None
    assert newcomer.rounds.instead(5, 2) == 8
    assert all(newcomer._view.is_outside(fragment) for fragment in range(3))
    newcomer._view.note_group(0, {newcomer._context.me, first._context.me})
    newcomer.took_over([12, 7, 5])  # and again, for it had missed two rounds
    assert newcomer.due(9, 0) == 15
    newcomer.rounds.go_back(4)
    assert newcomer.due(4, 1) == 4
    assert not newcomer._view.is_outside(0)


def test_a_leader_that_waits_elsewhere_is_not_on_its_way(school, monkeypatch):
    """The fault: its training waited for the mean of one fragment, and its group of another for
    its training: two such leaders waited for each other.
    """
    leader = school.peers(1, fragments=2)[0].exchange._leader
    monkeypatch.setattr(leader.time, "waits_until_needed", lambda fragment: True)
    events = [SimpleNamespace(is_set=lambda: False) for _ in range(4)]
    leader.expect(group_ready(leader.context, round=1, fragment=1), *events[:2])
    leader.expect(group_ready(leader.context, round=2), *events[2:])
    assert leader._is_early(3, 1)
    events[2].is_set = lambda: True
    assert not leader._is_early(3, 1)
    events[3].is_set = lambda: True
    assert leader._is_early(3, 1)
