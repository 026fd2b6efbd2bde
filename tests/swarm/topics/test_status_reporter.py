"""What a node tells those who watch: gathered from training, bounded, and never more than a status
may hold.
"""

import threading

import pytest

from shoal.swarm.errors import MessageError
from shoal.swarm.topics.status import (
    HELD_S,
    OLD_S,
    PER_SECOND,
    PROJECTED,
    ROUNDS,
    SAVE_S,
    Status,
    StatusReporter,
)
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.record import MAX_PARTNERS, TAIL, Faults, NodeRecord, Round
from tests.support.reasons import raises_for
from tests.support.records import in_groups
from tests.support.reporting_member import LINK, ME, PEERS, membership


def over(status_reporter, number, partners=(), record=None, tokens=0, projection=(), **changes):
    usual = {
        "round": number,
        "step": 10 * number,
        "members": 1 + len(partners),
        "partners": tuple(peer[-TAIL:] for peer in partners[:MAX_PARTNERS]),
        "bytes_sent": 7,
        "bytes_received": 6,
        "wait_s": 0.5,
        "loss": 1.5,
    }
    done = Round(**{**usual, **changes})
    status_reporter.round(done, record or NodeRecord(), partners, tokens, projection)


def record_of(**fields):
    return NodeRecord(**in_groups(NodeRecord, {"state": "training", **fields}))


@pytest.fixture
def status_reporter():
    return StatusReporter(membership(), "anna")


def test_partial_view_sends_as_rarely_as_the_whole(
    status_reporter,
):
    """In a swarm of which it sees a part it sends as rarely as the whole demands."""
    assert status_reporter._publisher.gaps() == (400 / PER_SECOND, 400 / PER_SECOND)


@pytest.mark.parametrize(
    ("bucket", "seen", "said"), [(0, 25, None), (64, 25, 400), (64, 400, None)]
)
def test_bucket_view_estimates_the_swarm(bucket, seen, said):
    """Where it sees one bucket it says how many peers there are about."""
    status = StatusReporter(membership(bucket=bucket, seen=seen), "anna").status()
    assert status.progress.swarm_size == said


@pytest.mark.parametrize("off", [-OLD_S - 1, OLD_S + 1], ids=["old", "future"])
def test_a_status_of_another_time_is_not_passed_on(status_reporter, off):
    status = status_reporter.status()
    check = status_reporter._publisher.topic.handler
    check(status.peer, status)
    with raises_for("old", MessageError):
        check(status.peer, status.model_copy(update={"issued": status.issued + off}))


def test_before_anything_happened_it_waits(status_reporter):
    status = status_reporter.status()
    assert (status.peer, status.name, status.rounds) == (ME, "anna", ())
    assert (status.progress.state, status.loss.training) == ("waiting", None)
    assert (status.link, len(status.addresses)) == (LINK, 4)
    assert status.rollouts is status.checks is None


def test_the_newest_rounds_are_told_with_their_partners(status_reporter):
    record = record_of(round=9, step=90, training=1.25, lag_steps=7, late=2, invalid=1, reward=0.5)
    for number in range(ROUNDS + 3):
        over(status_reporter, number, [PEERS[1]])
    status_reporter.progress(record)
    status = status_reporter.status()
    assert [done.round for done in status.rounds] == list(range(3, ROUNDS + 3))
    assert {done.partners for done in status.rounds} == {(PEERS[1][-8:],)}
    for group in NodeRecord.model_fields.keys() - {"link"}:
        assert getattr(status, group) == getattr(record, group)


def test_what_it_does_stands_beside_its_record(status_reporter):
    status_reporter.doing("evaluating")
    status_reporter.progress(record_of(members=25))
    progress = status_reporter.status().progress
    assert (progress.state, progress.doing, progress.members) == ("training", "evaluating", None)


def test_tally_disk_does_not_delay_training(tmp_path):
    """Training does not wait for the disk that takes the tally."""
    now, writing, disk, saves = [0.0], threading.Event(), threading.Event(), []
    status_reporter = StatusReporter(membership(), "anna", lambda: now[0], tmp_path)

    def save():
        saves.append(threading.current_thread())
        writing.set()
        disk.wait(10)

    status_reporter.tally.save = save
    for seconds in (SAVE_S - 1, SAVE_S, 2 * SAVE_S, 3 * SAVE_S):
        now[0] = seconds
        status_reporter.progress(record_of())
    assert writing.wait(10)
    assert saves == [status_reporter._saver]  # one at a time, and not before it is time
    disk.set()
    status_reporter._saver.join(10)
    assert saves[0] is not threading.current_thread()


def test_faults_go_on_while_training_stands_still(status_reporter):
    over(status_reporter, 1, record=record_of(contributions_refused=2, without_partner=1))
    host = status_reporter._membership.host
    host.restarts = 1
    host.internal_errors.caught("codec", ValueError("x"))
    status = status_reporter.status()
    assert status.faults == Faults(contributions_refused=2, daemon_restarts=1, internal_errors=1)
    assert status.exchanges.without_partner == 1


def test_a_large_group_fits(status_reporter):
    for number in range(ROUNDS):
        over(status_reporter, number, (PEERS[1:] * 50)[:499])
    status = status_reporter.status()
    assert all((done.members, len(done.partners)) == (500, MAX_PARTNERS) for done in status.rounds)
    assert len(pack(status)) < Status.LIMIT // 2


def test_newest_projection_arrives_rounded(
    status_reporter,
):
    """The projection of the newest round arrives rounded and one that is no number is left out."""
    over(status_reporter, 4, projection=(*(1.23456789 * n for n in range(PROJECTED)), 9.0))
    status = status_reporter.status()
    number, norm, sums = status.projection
    assert (number, norm, sums[1], len(sums)) == (4, 9.0, 1.234568, PROJECTED)
    assert unpack(pack(status), Status) == status
    over(status_reporter, 5, projection=(float("nan"),) * (PROJECTED + 1))
    assert status_reporter.status().projection is None


def test_short_rounds_choose_equal_projections():
    """In short rounds all peers send the projections of the same exchanges."""

    def sent(begin, step_s):
        now = [0.0]
        reporter = StatusReporter(membership(), "anna", clock=lambda: now[0])
        found = []
        for number in range(begin, 64):
            now[0] += step_s
            over(reporter, number, projection=(1.0,) * (PROJECTED + 1))
            found.append(reporter.status().projection[0])
        return set(found)

    assert sent(1, 2 * HELD_S) == set(range(1, 64))  # each exchange, where they are slow
    one, other = sent(1, HELD_S / 4), sent(3, HELD_S / 5)
    assert {8, 16, 32} <= one & other
