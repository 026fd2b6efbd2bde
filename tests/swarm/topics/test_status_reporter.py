"""What a node tells those who watch: gathered from training, bounded, and never more than a status
may hold.
"""

import threading

import pytest

from shoal.swarm.topics.status import (
    BANNED,
    HELD_S,
    PARTNERS,
    PER_SECOND,
    PROJECTED,
    ROUNDS,
    SAVE_S,
    Status,
    StatusReporter,
)
from shoal.swarm.wire.envelope import pack, unpack
from tests.support.reporting_member import ME, PEERS, membership


def over(status_reporter, number, members, **changes):
    usual = {
        "round": number,
        "step": 10 * number,
        "sent": 7,
        "received": 6,
        "wait_s": 0.5,
        "loss": 1.5,
    }
    status_reporter.round(members, **{**usual, **changes})


def progress(round, step, loss, steps_per_s, **more):
    return {
        "state": "training",
        "round": round,
        "step": step,
        "loss": loss,
        "steps_per_s": steps_per_s,
        **more,
    }


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
    assert status.peers == said


def test_before_anything_happened_it_waits(status_reporter):
    status = status_reporter.status()
    assert (status.peer, status.name, status.state, status.rounds, status.loss) == (
        ME,
        "anna",
        "waiting",
        (),
        None,
    )
    assert (status.sent, status.received, len(status.addresses)) == (100, 50, 4)
    assert status.reward is status.claims is None
    assert (status.reach, status.throughput) == ("punched", 1.5e6)


def test_the_newest_rounds_are_told_with_their_partners(status_reporter):
    for number in range(ROUNDS + 3):
        over(status_reporter, number, [ME, PEERS[1]])
    status_reporter.progress(
        progress(9, 90, 1.25, 4.0, tokens_per_s=2048.0, mfu=0.4, lag=7, lag_auto=True, late=2)
    )
    status = status_reporter.status()
    assert (status.tokens_per_s, status.mfu) == (2048.0, 0.4)
    assert (status.lag, status.lag_auto, status.late) == (7, True, 2)
    assert [done.round for done in status.rounds] == list(range(3, ROUNDS + 3))
    assert {done.partners for done in status.rounds} == {(PEERS[1][-8:],)}
    assert (status.state, status.round, status.step, status.loss, status.steps_per_s) == (
        "training",
        9,
        90,
        1.25,
        4.0,
    )
    assert status.faults == ()


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
        status_reporter.progress(progress(1, 1, 1.0, 1.0))
    assert writing.wait(10)
    assert saves == [status_reporter._saver]  # one at a time, and not before it is time
    disk.set()
    status_reporter._saver.join(10)
    assert saves[0] is not threading.current_thread()


def test_faults_are_counted(status_reporter):
    over(status_reporter, 1, [ME])
    over(status_reporter, 2, [], suspicious=2)
    status_reporter._membership.host.restarts = 1
    assert status_reporter.status().faults == (
        ("daemon-restarts", 1),
        ("no-partner", 2),
        ("refused", 2),
    )


def test_the_odd_one_out_is_no_fault(status_reporter):
    over(status_reporter, 1, [ME], odd=True)
    assert status_reporter.status().faults == ()


def test_it_is_told_why_the_newest_round_had_no_partner(status_reporter):
    over(status_reporter, 1, [ME], why="bert could not be reached")
    assert status_reporter.status().why == "bert could not be reached"
    over(status_reporter, 2, [ME, PEERS[1]])
    assert status_reporter.status().why == ""


def test_alone_is_no_fault_where_nobody_averages():
    status_reporter = StatusReporter(membership("none"), "anna")
    over(status_reporter, 1, [ME])
    assert status_reporter.status().faults == ()


def test_reinforcement_learning_and_verification_are_told(status_reporter):
    for reward in (0.25, 0.5):
        status_reporter.event(
            "rl", round=1, reward=reward, own=4, foreign=2, worth=None, loss=0.1, used=[], shared=4
        )
    status_reporter.event("verify", round=1, banned=PEERS[1:], check_s=0.1, votes={}, voted=0)
    status_reporter.event("evaluation", step=3, loss=1.0)
    status_reporter.verified({"claimed": 5, "planted": 1, "checked": 4, "invalid": 1})
    status = status_reporter.status()
    assert (status.reward, status.rollouts_own, status.rollouts_foreign) == (0.5, 8, 4)
    assert (status.claims, status.checked, status.invalid, len(status.banned)) == (5, 4, 1, BANNED)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_left_out(status_reporter, bad):
    over(status_reporter, 1, [ME, PEERS[1]], loss=bad)
    status_reporter.event(
        "rl", round=1, reward=bad, own=1, foreign=0, worth=None, loss=0.1, used=[], shared=0
    )
    status = status_reporter.status()
    assert status.loss is status.reward is status.rounds[0].loss is None
    assert (status.steps_per_s, status.tokens_per_s, status.mfu) == (0.0, 0.0, None)


def test_a_large_group_fits(status_reporter):
    for number in range(ROUNDS):
        over(status_reporter, number, [ME, *(PEERS[1:] * 50)[:499]])
    status = status_reporter.status()
    assert all((done.members, len(done.partners)) == (500, PARTNERS) for done in status.rounds)
    assert len(pack(status)) < Status.LIMIT // 2


def test_newest_projection_arrives_rounded(
    status_reporter,
):
    """The projection of the newest round arrives rounded and one that is no number is left out."""
    over(status_reporter, 4, [ME], projection=(*(1.23456789 * n for n in range(PROJECTED)), 9.0))
    status = status_reporter.status()
    number, norm, sums = status.projection
    assert (number, norm, sums[1], len(sums)) == (4, 9.0, 1.234568, PROJECTED)
    assert unpack(pack(status), Status) == status
    over(status_reporter, 5, [ME], projection=(float("nan"),) * (PROJECTED + 1))
    assert status_reporter.status().projection is None


def test_short_rounds_choose_equal_projections():
    """In short rounds all peers send the projections of the same exchanges."""

    def sent(begin, step_s):
        now = [0.0]
        reporter = StatusReporter(membership(), "anna", clock=lambda: now[0])
        found = []
        for number in range(begin, 64):
            now[0] += step_s
            over(reporter, number, [ME], projection=(1.0,) * (PROJECTED + 1))
            found.append(reporter.status().projection[0])
        return set(found)

    assert sent(1, 2 * HELD_S) == set(range(1, 64))  # each exchange, where they are slow
    one, other = sent(1, HELD_S / 4), sent(3, HELD_S / 5)
    assert {8, 16, 32} <= one & other
