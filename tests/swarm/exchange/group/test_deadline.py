"""The deadline of a group follows what its members take, and nothing else is held against them."""

import asyncio

import pytest

from shoal.optim import RoundKey
from shoal.swarm.exchange.group.deadline import FORMING_S, GROUPS, MEDIANS, GroupDeadline
from shoal.swarm.exchange.group.exchange import _ReductionDeadline
from shoal.swarm.exchange.round_time import FIRST_RATE, FIRST_S, LEAST_S
from shoal.swarm.exchange.timeouts import ExchangeTimeouts

KEY = RoundKey("a" * 52, 0)
NBYTES = 1000


def deadline(*, took=(), period=0.0, trial=0.0, fragments=1):
    """Return the deadline of a node whose rounds take ``period`` and members ``took`` seconds."""
    found = GroupDeadline(ExchangeTimeouts(trial=trial), fragments)
    found._periods = {0: (period, period)}
    found.measure(took, NBYTES)
    return found


def test_a_group_has_four_medians():
    """Mutant: the mean of all, or the slowest."""
    assert deadline(took=(1.0, 2.0, 60.0)).reducing(NBYTES, 0) == MEDIANS * 2.0


def test_a_slow_member_moves_no_median():
    """By what it takes in round after round.

    Mutant: the slowest of each group counts.
    """
    found = deadline(took=(1.0, 1.0, 1.0))
    for seconds in (3.0, 9.0, 30.0, 90.0):
        found.measure((1.0, seconds, 1.0), NBYTES)
    assert found.reducing(NBYTES, 0) == MEDIANS * 1.0


def test_one_quick_group_is_no_measure():
    """Where several fragments are under way, one of them may have the line for itself.

    The fault: a deadline of four times what the newest group took, which others of that round
    missed.
    Mutant: the newest group counts, or the quickest.
    """
    found = deadline(took=(5.0, 5.0))
    found.measure((4.0, 6.0), NBYTES)
    found.measure((0.1, 0.2), NBYTES)
    assert found.reducing(NBYTES, 0) == MEDIANS * 4.0
    for _ in range(GROUPS):
        found.measure((0.5, 0.5), NBYTES)
    assert found.reducing(NBYTES, 0) == MEDIANS * 0.5  # it follows


def test_a_larger_contribution_has_longer():
    found = deadline(took=(2.0, 2.0))
    assert found.reducing(3 * NBYTES, 0) == 3 * MEDIANS * 2.0
    assert found.reducing(NBYTES // 2, 0) == MEDIANS * 2.0


def test_a_quarter_of_a_round_is_left_in_any_case():
    """And a second at least."""
    assert deadline(took=(0.1,), period=12.0).reducing(NBYTES, 0) == 3.0
    assert deadline(took=(0.1,), period=12.0, fragments=2).reducing(NBYTES, 0) == 1.5
    assert deadline(took=(0.1,)).reducing(NBYTES, 0) == LEAST_S


def test_without_a_measure_bytes_set_it():
    assert deadline().reducing(NBYTES, 0) == FIRST_S
    assert deadline(trial=4.0).reducing(10**6, 0) == 10**6 / FIRST_RATE + 4.0


def test_a_quarter_of_a_round_for_who_has_not_come():
    assert deadline(period=40.0).forming(0) == 10.0
    assert deadline(period=40.0, fragments=2).forming(0) == 5.0
    assert deadline(period=1.0).forming(0) == FORMING_S


@pytest.mark.parametrize(
    ("periods", "waits"),
    [((0.0, 9.0), True), ((1.0, 9.0), False), ((9.0, 1.0), False), ((9.0, 8.0), True)],
)
def test_one_long_round_makes_no_long_rounds(periods, waits):
    """A node that slept had one: its group would wait until training needs the mean.

    Mutant: the newest counts; nobody knows the first.
    """
    found = GroupDeadline(ExchangeTimeouts(), 1, overlap=True)
    found._periods = {0: periods}
    assert found.waits_until_needed(0) is waits


class Arrived:
    """A reduction: when the last of what each member sends was here."""

    def __init__(self, took):
        self.arrived = took


@pytest.fixture
def node(school):
    """Return the first of three; the others are called ``peers``."""
    first, *others = school.peers(3)
    first.peers = [peer.id for peer in others]
    return first


def group_of(node, round, took, late=(), unheard=(), most=8.0, ago=0.0, ends=None):
    """Let a node note a group that began ``ago`` seconds before now."""

    async def note():
        now = asyncio.get_running_loop().time()
        began = now - ago
        hold = _ReductionDeadline(
            began, NBYTES, most, LEAST_S, None if ends is None else now - ends
        )
        hold.late, hold.unheard = set(late), set(unheard)
        arrived = {peer: began + seconds for peer, seconds in took.items()}
        key = RoundKey(KEY.run, round, 0)
        node.exchange._note_times(Arrived(arrived), key, hold)

    asyncio.run(note())


def is_out(node, peer, round):
    return node.exchange._view.attendance.is_turned_away(peer, round)


def test_who_comes_last_over_a_full_line_stays(node):
    """The fault: what came last, most often of one member, was charged to it, and then the others
    trained without it.

    Mutant: what a member takes beyond the median counts against it.
    """
    quick, last = node.peers
    for round in range(64):
        group_of(node, round, {quick: 2.0, last: 7.9}, ago=8.0)
        assert not is_out(node, last, round + 1)
    assert node.exchange.time.reducing(NBYTES, 0) == MEDIANS * 2.0


def test_who_misses_two_deadlines_is_turned_away(node):
    quick, slow = node.peers
    group_of(node, 0, {quick: 1.0}, late=[slow], ago=8.0, ends=0.0)
    assert not is_out(node, slow, 1)
    group_of(node, 1, {quick: 1.0}, late=[slow], ago=8.0, ends=0.0)
    assert is_out(node, slow, 2)
    assert not is_out(node, quick, 2)


def test_who_is_late_at_others_is_late_here(node):
    """The leader decided without it, at about the time at which it would be given up here."""
    quick, slow = node.peers
    for round in (0, 1):
        group_of(node, round, {quick: 1.0}, unheard=[slow], ago=7.0)
    assert is_out(node, slow, 2)


def test_a_group_that_was_called_off_blames_nobody(node):
    """An all-reduce ends for all as soon as one is gone.

    Mutant: all that had still to send were late.
    """
    for round in (0, 1, 2):
        group_of(node, round, {}, unheard=node.peers, ago=1.0)
    assert not any(is_out(node, peer, 3) for peer in node.peers)


def test_who_slept_itself_blames_nobody(node):
    """Mutant: what came while this node slept was late."""
    for round in (0, 1, 2):
        group_of(node, round, {}, late=node.peers, ago=60.0, ends=30.0)
    assert not any(is_out(node, peer, 3) for peer in node.peers)
    assert node.exchange.time.reducing(NBYTES, 0) == FIRST_S


def test_the_deadline_follows_when_all_are_late(node):
    """Else a line that has become slow would carry no group any more.

    Mutant: only what came in time is measured.
    """
    group_of(node, 0, dict.fromkeys(node.peers, 1.0), ago=2.0)
    for round in (1, 2):
        group_of(node, round, {}, late=node.peers, ago=4.0, ends=0.0)
    assert node.exchange.time.reducing(NBYTES, 0) == pytest.approx(MEDIANS * 4.0, rel=0.05)
