"""Who misses two rounds of a group is left out for a while."""

import pytest

from shoal.swarm.exchange.group.attendance import Attendance
from shoal.swarm.exchange.terms import FORGOTTEN, REMEMBERED, TERMS


def after_misses(*rounds, fragments=1, held=False):
    found = Attendance(fragments)
    for round in rounds:
        found.missed("peer", round, held=held)
    return found


def left_out(attendance, upto=3000):
    """Return the rounds in which the peer is left out."""
    return [round for round in range(upto) if attendance.is_left_out("peer", round)]


def test_one_miss_leaves_nobody_out():
    """Mutant: no miss is allowed."""
    assert left_out(after_misses(3)) == []
    assert left_out(after_misses(3, 4)) == list(range(4, 8))


def test_terms_end_alike_whenever_they_began():
    """Two nodes that count the second miss in unlike rounds take the same peer for the leader
    later.

    Mutant: a term is counted from its miss.
    """
    one, two = after_misses(1, 9), after_misses(10, 14)
    assert max(left_out(one)) == max(left_out(two)) == 15


@pytest.mark.parametrize("fragments", [1, 4])
def test_each_further_miss_makes_the_term_longer(fragments):
    """Mutant: all terms are of 8 rounds."""
    attendance, round = after_misses(0, fragments=fragments), fragments
    for term in (*TERMS, TERMS[-1]):
        attendance.missed("peer", round)
        ends = next(at for at in range(round, 10_000) if not attendance.is_left_out("peer", at))
        assert ends % (term * fragments) == 0
        assert ends - round <= term * fragments
        round = ends


def test_misses_are_forgotten_after_rounds_in_time():
    """Mutant: a miss counts for ever."""
    last = after_misses(3, 3 + FORGOTTEN - 1)
    assert last.is_left_out("peer", 3 + FORGOTTEN)
    assert left_out(after_misses(3, 3 + FORGOTTEN)) == []


def test_fragments_in_flight_together_are_one_miss():
    """A member that slept for a moment has missed a round of each fragment.

    Mutant: every fragment counts.
    """
    assert left_out(after_misses(4, 5, 6, 7, fragments=4)) == []
    assert left_out(after_misses(4, 5, 8, fragments=4)) == list(range(5, 32))


def test_only_who_held_a_group_is_turned_away():
    """Who came too late only may be in a group for which it is in time.

    Mutant: everyone who is left out is turned away, or nobody is.
    """
    assert not after_misses(3, 4).is_turned_away("peer", 5)
    held = after_misses(3, 4, held=True)
    assert held.is_turned_away("peer", 5)
    assert not held.is_turned_away("peer", 8)
    assert not held.is_turned_away("other", 5)


def test_who_is_in_time_is_forgiven_that_it_held_one():
    """The fault: who held a group once, and slept an hour later, was turned away, by those leaders
    that had been in that group.
    """
    found = after_misses(3, held=True)
    found.was_in_time("peer")
    found.was_in_time("other")
    found.missed("peer", 5)
    assert found.is_left_out("peer", 6)
    assert not found.is_turned_away("peer", 6)


def test_a_node_that_went_back_leaves_nobody_out():
    """Mutant: a term has no beginning."""
    assert left_out(after_misses(40, 41))[0] == 41


def test_strangers_do_not_make_it_grow():
    """Mutant: every peer is remembered."""
    found = Attendance(1)
    for number in range(REMEMBERED + 9):
        found.missed(str(number), 0)
    assert len(found._misses) == REMEMBERED
