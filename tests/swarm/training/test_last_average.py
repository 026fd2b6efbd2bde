"""The end of a run: all members that are there take the mean of their weights.

Real hosts on loopback, loops in threads.
"""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

import shoal
from shoal.optim import Exchange, Handle, Mean, NoLoCo, Simulation
from shoal.optim.exchange.update_screen import TRUSTING
from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership.last_step import at_their_end, still_training
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.training import last_average
from shoal.swarm.training.last_average import (
    GRACE_S,
    LONGEST_WAIT_S,
    SECOND_TRY_S,
    STEP_TIME_FACTOR,
    EndReport,
    LastAverage,
    make_last_screen,
)
from shoal.swarm.training.run_end import RunEnd, allowed
from shoal.swarm.wire.messages import MemberEnd
from tests.support.records import MODEL, member_of
from tests.support.session_loops import HERE, loop, model, sgd, together
from tests.support.waiting import until


def created(count):
    return shoal.create(
        state=model(0),
        method="noloco",
        every=5,
        lag=0,
        start_when=count,
        wait_s=1.0,
        network=HERE,
        node="peer-0",
    )


def peers(count, steps=20):
    """Train ``count`` own loops with data of their own; return their models, their slow weights
    before the end, and reports.
    """
    first = created(count)
    link = first.link

    def one(number):
        net = first._state.model if number == 0 else model(number)
        session = (
            first
            if number == 0
            else shoal.join(link, state=net, network=HERE, node=f"peer-{number}")
        )
        with session:
            opt = session.optimizer(sgd(net))
            loop(opt, net, number, steps=steps)
            opt.settle()
            before = [tensor.clone() for tensor in opt.slow]
            session.finish()
        return [p.detach().clone() for p in net.parameters()], before, session.ended

    return together(*(lambda number=number: one(number) for number in range(count)))


@pytest.mark.ci
def test_three_own_loops_end_with_the_mean_of_their_weights():
    found = peers(3)
    by_hand = [
        sum(tensors) / 3 for tensors in zip(*(before for _, before, _ in found), strict=True)
    ]
    models = [weights for weights, _, _ in found]
    assert not torch.equal(found[0][1][0], found[1][1][0])
    for weights in models:
        assert all(torch.equal(a, b) for a, b in zip(weights, models[0], strict=True))
    torch.testing.assert_close(models[0], by_hand)
    for _, _, report in found:
        assert report.members == ("peer-0", "peer-1", "peer-2")
        assert report.missing == ()


@pytest.mark.ci
def test_a_member_that_left_shows_with_whom_it_ended():
    first = created(2)
    link, directory = first.link, first.membership.directory

    def stays():
        with first:
            net = first._state.model
            loop(first.optimizer(sgd(net)), net, 0, steps=20)
            first.finish()

            def gone():
                directory.look()
                return list(directory.departed().values())

            until(gone, 30)
            return gone()

    def leaves():
        net = model(1)
        losses = iter([2.5, 2.25])
        with shoal.join(link, state=net, network=HERE, node="peer-1") as session:
            loop(session.optimizer(sgd(net)), net, 1, steps=20)
            session.finish(lambda: next(losses))

    ((record,), _) = together(stays, leaves)
    assert record.name == "peer-1"
    assert record.end == MemberEnd(members=2, names=("peer-0",), loss_before=2.5, loss_after=2.25)


@pytest.mark.ci
def test_a_late_loop_is_waited_for():
    """It takes its last steps only once it sees that the others are at their end."""
    first = created(2)
    link = first.link

    def early():
        with first:
            net = first._state.model
            opt = first.optimizer(sgd(net))
            loop(opt, net, 0, steps=20)
        return [p.detach().clone() for p in net.parameters()], first.ended

    def late():
        net = model(1)
        with shoal.join(link, state=net, network=HERE, node="peer-1") as session:
            opt = session.optimizer(sgd(net))
            loop(opt, net, 1, steps=15)

            def other_ended():
                session.membership.directory.look()
                return any(m.finished for m in session.membership.directory.members().values())

            until(other_ended, 30)
            loop(opt, net, 2, steps=5)
        return [p.detach().clone() for p in net.parameters()], session.ended

    (one, report), (other, _) = together(early, late)
    assert report.members == ("peer-0", "peer-1")
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.ci
def test_a_loop_that_joined_late_waits_too():
    """It ends where the swarm is, before the other, which has done more steps by then.

    Mutant: steps that each counts from its own join are compared, and it waits for nobody.
    """
    first = created(1)
    link = first.link
    joined = threading.Event()

    def early():
        with first:
            net = first._state.model
            opt = first.optimizer(sgd(net))
            loop(opt, net, 0, steps=10)
            assert joined.wait(30)
            loop(opt, net, 0, steps=5)

            def other_ended():
                first.membership.directory.look()
                return any(m.finished for m in first.membership.directory.members().values())

            until(other_ended, 30)
            loop(opt, net, 0, steps=5)
        return [p.detach().clone() for p in net.parameters()], first.ended

    def late():
        net = model(1)
        with shoal.join(link, state=net, network=HERE, node="peer-1") as session:
            opt = session.optimizer(sgd(net))
            joined.set()
            left = 20 - session.progress

            def other_is_beyond():
                session.membership.directory.look()
                steps = [m.step for m in session.membership.directory.members().values()]
                return any(step > left for step in steps)

            until(other_is_beyond, 30)
            loop(opt, net, 1, steps=left)
        return [p.detach().clone() for p in net.parameters()], session.ended

    (one, report), (other, _) = together(early, late)
    assert report.members == ("peer-0", "peer-1")
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.ci
def test_who_dies_at_the_end_is_left_out():
    first = created(3)
    link, gone = first.link, threading.Event()

    def dies():
        net = model(2)
        session = shoal.join(link, state=net, network=HERE, node="peer-2")
        opt = session.optimizer(sgd(net))
        loop(opt, net, 2, steps=20)
        session._member.end()
        until(lambda: seen_by_all(first), 30)
        session._membership.host.close()
        gone.set()
        with contextlib.suppress(NetworkError):
            session._membership.close()

    def seen_by_all(session):
        members = session.membership.directory.members().values()
        session.membership.directory.look()
        return any(member.name == "peer-2" and member.finished for member in members)

    def stays(session, number):
        net = session._state.model
        with session:
            opt = session.optimizer(sgd(net))
            loop(opt, net, number, steps=20)
            assert gone.wait(60)
        return [p.detach().clone() for p in net.parameters()], session.ended

    def joins():
        return stays(shoal.join(link, state=model(1), network=HERE, node="peer-1"), 1)

    (one, report), (other, _), _ = together(lambda: stays(first, 0), joins, dies)
    assert report.members == ("peer-0", "peer-1")
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_session_measures_what_the_mean_gained():
    first = created(2)
    link = first.link

    def run(session, number):
        net = session._state.model
        with session:
            opt = session.optimizer(sgd(net))
            loop(opt, net, number, steps=20)
            before = [tensor.clone() for tensor in opt.slow]
            session.finish(lambda: float(next(net.parameters()).detach().sum()))
        return before, [p.detach().clone() for p in net.parameters()], session.ended

    def joins():
        return run(shoal.join(link, state=model(1), network=HERE, node="peer-1"), 1)

    for before, after, report in together(lambda: run(first, 0), joins):
        assert report.loss_before == pytest.approx(float(before[0].sum()))
        assert report.loss_after == pytest.approx(float(after[0].sum()))
        assert report.said() == (
            f"one model of 2 members (peer-0, peer-1): held-out loss {report.loss_before:.4f} "
            f"before, {report.loss_after:.4f} after"
        )


# -- who is waited for, without a network ----------------------------------------------------------

ME, BERT, CARL = (Identity.ephemeral().peer_id for _ in range(3))


class World:
    """A directory with records that a test sets, and a clock."""

    def __init__(self, monkeypatch):
        self.now, self.members = 0.0, {}
        monkeypatch.setattr(last_average.time, "monotonic", lambda: self.now)
        directory = SimpleNamespace(
            members=lambda: self.members,
            look=lambda: None,
            is_barred=lambda peer: False,
            own=lambda: self.members.get(ME),
        )
        manager = SimpleNamespace(partner="of training")
        host = SimpleNamespace(
            serve=lambda protocol, handler: None,
            resource_manager=manager,
            internal_errors=None,
        )
        membership = SimpleNamespace(
            host=host,
            identity=SimpleNamespace(peer_id=ME),
            swarm="a" * 52,
            directory=directory,
            manifest=SimpleNamespace(train=SimpleNamespace(seed=0)),
        )
        self.said = []
        self.last = LastAverage(membership, OuterSettings(), 1, MODEL)
        self.last.announce = lambda: self.set(ME, step=100, finished=True)
        self.last.say = self.said.append
        assert manager.partner == "of training"

    def set(self, peer, **changes):
        name = {ME: "anna", BERT: "bert", CARL: "carl"}[peer]
        self.members[peer] = member_of(peer, name=name, **changes)

    def there(self):
        return sorted(one.name for one in self.last.present().values())


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_soon_ending_members_are_waited_for(world):
    """Members that end soon by their own speed are waited for."""
    every = OuterSettings().resolved().every
    world.last.announce = lambda: world.set(ME, step=100, round=8, finished=True)
    world.set(BERT, step=90, round=8, steps_per_s=1.0)
    world.set(CARL, step=90, round=7, steps_per_s=every / 1000)
    world.last.begin()
    assert world.there() == ["anna", "bert"]
    assert world.said == [
        "the last step is done: waiting at most 120 s for bert, to end with one model"
    ]


def test_nobody_is_waited_for_without_end(world):
    world.set(BERT, step=90, steps_per_s=1.0)
    world.last.begin()
    world.now = STEP_TIME_FACTOR * 10 + GRACE_S - 1
    assert world.there() == ["anna", "bert"]
    world.now += 2  # and its record still says 90
    assert world.there() == ["anna"]
    world.set(BERT, step=100, finished=True)
    assert world.there() == ["anna", "bert"]


def test_a_member_in_its_last_step_is_waited_for(world):
    """Fault: rounds of seconds need no further exchange, so who was in a long step had 10 s."""
    world.set(BERT, step=100, steps_per_s=1 / 40)
    world.last.begin()
    world.now = STEP_TIME_FACTOR * 40 + GRACE_S - 1
    assert world.there() == ["anna", "bert"]
    world.now += 2
    assert world.there() == ["anna"]


def test_a_node_says_that_it_ended_before_it_evaluates(world):
    """Fault: others waited 10 s for a node whose evaluation takes 25, and lost the average."""
    world.set(ME, step=99)
    opt = SimpleNamespace(settle=lambda: None, steps=100, average_over=lambda *_, **how: ())
    ended = []

    def evaluated():
        ended.append(world.members[ME].finished)

    end = RunEnd(averages=True)
    end.last = world.last
    end.run(opt, evaluated)
    assert ended == [True]


def test_the_wait_has_a_deadline_whatever_a_member_says(world):
    world.set(BERT, step=0, steps_per_s=0.9)  # 111 s, so 177 with the slack
    world.last.begin()
    world.now = LONGEST_WAIT_S - 1
    assert world.there() == ["anna", "bert"]
    world.now = LONGEST_WAIT_S + 1
    assert world.there() == ["anna"]
    assert world.last.inner.time.patience(1) == SECOND_TRY_S


@pytest.mark.parametrize("step", [101, 10], ids=["is beyond", "is far behind"])
def test_who_trains_on_in_this_round_has_a_moment(world, step):
    """It may have ended in this round, and its record come late; if it goes on, all end without."""
    world.set(BERT, step=step, steps_per_s=0.5)
    world.last.begin()
    assert world.there() == ["anna", "bert"]
    world.now = STEP_TIME_FACTOR * 2 + GRACE_S + 1
    assert world.there() == ["anna"]


def test_a_change_that_ends_all_at_once_lets_them_wait(world):
    """`shoal end` sets the end behind the steps of all, who end in one round."""
    every = OuterSettings().resolved().every
    world.set(ME, step=200, round=8)
    world.set(BERT, step=300, round=8, steps_per_s=1.0)
    world.set(CARL, step=90, round=7, steps_per_s=every / 10)
    world.last.announce = lambda: world.set(ME, step=200, round=8, finished=True)
    world.last.begin()
    assert world.there() == ["anna", "bert", "carl"]
    world.now = STEP_TIME_FACTOR + GRACE_S + 1  # a step of bert's takes a second
    assert world.there() == ["anna", "carl"]  # in round 8 in 10 s


def test_members_beyond_this_nodes_end_are_waited_for(world):
    """`shoal end` sets the steps of who came late: the others end past them, in the same round.

    Mutants: only who is past the end itself waits for others beyond it; they have ten seconds,
    however long a round takes.
    """
    every = OuterSettings().resolved().every
    world.set(BERT, step=180, round=7, steps_per_s=every / 20)  # so it needs 20 s
    world.set(CARL, step=190, round=8, steps_per_s=every / 20)
    world.last.announce = lambda: world.set(ME, step=100, round=8, finished=True)
    world.last.begin()
    assert world.there() == ["anna", "bert", "carl"]
    world.now = STEP_TIME_FACTOR * 20 / every + GRACE_S + 1
    assert world.there() == ["anna", "bert"]
    world.now = STEP_TIME_FACTOR * 20 + GRACE_S + 1
    assert world.there() == ["anna"]


def test_training_leader_awaits_who_ends_with_others(world):
    """Mutant: only a node at its end knows where others end."""
    world.set(ME, step=99, steps_per_s=1.0)
    world.set(BERT, step=150, finished=True)
    world.set(CARL, step=150, steps_per_s=1.0)
    assert world.there() == ["anna", "bert", "carl"]
    world.now = STEP_TIME_FACTOR + GRACE_S + 1
    assert world.there() == ["anna", "bert"]


def test_each_end_lets_others_wait_anew(world):
    """Fault: a node with fewer steps of its own had ended, and at the end of another nobody was
    waited for any more.
    """
    world.set(ME, step=60, steps_per_s=1.0)
    world.set(BERT, step=50, finished=True)
    assert world.there() == ["anna", "bert"]
    world.now = 40.0
    assert world.there() == ["bert"]
    world.set(CARL, step=100, finished=True)
    assert world.there() == ["anna", "bert", "carl"]


def test_a_false_end_ends_no_wait(world):
    """Mutant: members are expected at the furthest end, which a stranger may state."""
    far = 10**9
    world.set(BERT, step=far, round=far, finished=True)
    world.set(CARL, step=90, steps_per_s=1.0)
    world.last.begin()
    world.now = GRACE_S + 2
    assert world.there() == ["anna", "bert", "carl"]


def test_a_step_left_of_a_long_round_is_waited_for(world):
    """Mutant: a member that is in the round before needs a whole round, which is too long."""
    every = OuterSettings().resolved().every
    world.set(ME, step=10 * every, round=10)
    world.set(BERT, step=10 * every - 1, round=9, steps_per_s=every / (LONGEST_WAIT_S + 10))
    world.last.announce = lambda: world.set(ME, step=10 * every, round=10, finished=True)
    world.last.begin()
    assert world.there() == ["anna", "bert"]


def test_training_members_wait_for_each_other_by_steps(world):
    """Of two that end by a change and still train, whoever leads drops neither after a moment.

    Mutant: who is in the same round is at its end.
    """
    world.set(ME, step=50, round=2, steps_per_s=1.0)
    world.set(CARL, step=50, round=2, steps_per_s=1.0)
    world.set(BERT, step=100, round=4, finished=True)
    assert world.there() == ["anna", "bert", "carl"]
    world.now = GRACE_S + 1
    assert world.there() == ["anna", "bert", "carl"]


def test_who_follows_no_schedule_is_waited_for_by_steps(world):
    """Mutant: loops are expected in this node's round only."""
    every = OuterSettings().resolved().every
    world.set(BERT, step=2 * every, round=4, steps_per_s=every / 25)
    world.last.announce = lambda: world.set(ME, step=4 * every, round=4, finished=True)
    world.last.begin()
    world.now = GRACE_S + 1
    assert world.there() == ["anna", "bert"]


def test_who_is_far_behind_may_be_at_its_end(world):
    """It joined late, and follows the schedule of the swarm.

    Mutant: only its steps count, by which it would be too late.
    """
    world.set(BERT, step=30, round=10, steps_per_s=0.5)
    world.last.announce = lambda: world.set(ME, step=300, round=10, finished=True)
    world.last.begin()
    assert world.there() == ["anna", "bert"]


def test_training_leader_leads_while_awaited(world):
    """A node that still trains leads a group only as long as it is waited for."""
    world.set(ME, step=50, steps_per_s=1.0)
    world.set(BERT, step=100, finished=True)
    assert world.there() == ["anna", "bert"]
    world.now = STEP_TIME_FACTOR * 50 + GRACE_S + 1
    assert world.there() == ["bert"]


def test_missing_member_gets_a_second_try(world):
    """A second try follows if somebody who is there is not in the mean."""
    world.set(BERT, step=100, finished=True)
    world.set(CARL, step=100, finished=True)
    world.last.begin()
    assert not world.last.enough((ME, BERT))
    assert world.last.report.said() == (
        "one model of 2 members (anna, bert); without carl, who did not come in time"
    )
    assert world.last.enough((ME, BERT, CARL))
    assert world.last.report.members == ("anna", "bert", "carl")
    assert world.last.report.missing == ()


def test_who_was_waited_for_in_vain_is_named(world):
    """The fault: "one model of 2 members" of a swarm of three, whose third came to its end later
    and with another model.
    """
    world.set(BERT, step=100, finished=True)
    world.set(CARL, step=99, steps_per_s=1.0)
    world.last.begin()
    world.now = LONGEST_WAIT_S + 1
    assert world.last.enough((ME, BERT))
    assert world.last.report.training == ("carl",)
    assert world.last.report.said() == (
        "one model of 2 members (anna, bert); without carl, still in training"
    )
    assert not world.last.enough(())
    assert world.last.report.missing == ("bert",)


def test_those_who_train_on_are_no_failed_exchange(world):
    """Fault: "no exchange with bert was committed" of one with more steps of its own."""
    world.set(BERT, step=10, steps_per_s=1.0)
    world.last.begin()
    world.now = LONGEST_WAIT_S + 1
    assert world.last.enough(())
    assert world.last.report.said().startswith(
        "no last average: no other member was at its end in time (bert still in training), so"
    )


def test_a_second_end_of_one_peer_is_an_end(world):
    """It was resumed with more steps. Mutant: only who never ended before has others waited for."""
    world.set(BERT, step=50, finished=True)
    world.set(CARL, step=40, steps_per_s=1.0)
    world.set(ME, step=40, steps_per_s=1.0)
    assert world.there() == ["anna", "bert", "carl"]
    world.now = LONGEST_WAIT_S
    assert world.there() == ["bert"]
    world.set(BERT, step=60, finished=False, steps_per_s=1.0)
    assert world.there() == ["anna", "bert", "carl"]
    world.set(BERT, step=100, finished=True)
    assert world.there() == ["anna", "bert", "carl"]


def test_a_node_alone_at_its_end_says_so(world):
    world.last.begin()
    assert world.last.enough(())
    assert world.last.report.said() == (
        "no last average: no other member was at its end in time, so this node ends with a model "
        "of its own; `shoal pull LINK --average` makes one of members that still serve, `shoal "
        "merge --slow` one of checkpoints"
    )


def test_strangers_are_averaged_deterministically():
    """Strangers are averaged by a rule of which all compute the same bits."""
    assert make_last_screen(OuterSettings()) is TRUSTING
    for outer in (OuterSettings(check_loss=True), OuterSettings(robust="clipped-gossip")):
        screen = make_last_screen(outer)
        assert (screen.robust, screen.gathers, screen.suspect) == ("centered-clip", True, 0.0)


@pytest.mark.parametrize(
    ("before", "after", "taken"),
    [
        (2.0, 1.9, True),
        (2.0, 2.019, True),
        (2.0, 2.021, False),
        (2.0, None, False),
        (None, 9.0, True),
        (-2.0, -1.99, True),
    ],
)
def test_worse_mean_is_not_taken_from_strangers(before, after, taken):
    """A mean that is worse on held out data is not taken from strangers."""
    assert allowed(before, after) is taken


@pytest.mark.parametrize(
    ("report", "loss"),
    [
        (EndReport(loss_before=2.0), 2.0),
        (EndReport(("anna", "bert"), loss_before=2.0, loss_after=1.5), 1.5),
        (EndReport((), loss_before=2.0, loss_after=9.0, refused=True), 2.0),
        (EndReport(("anna", "bert"), loss_before=2.0), None),
    ],
    ids=["alone", "taken", "refused", "not finite"],
)
def test_the_loss_is_that_of_the_weights_kept(report, loss):
    """The fault: a mean whose loss is not finite was shown with the loss before it."""
    assert report.loss == loss


def test_partners_of_a_round_are_those_that_still_train():
    records = {"a": member_of(BERT), "b": member_of(CARL, finished=True)}
    assert list(still_training(records)) == ["a"]
    assert list(at_their_end(records)) == ["b"]


def test_rejected_mean_is_undone_exactly():
    """A mean that is not accepted is put back to the last bit."""

    def peer(exchange):
        net = model(int(exchange.peer))
        opt = NoLoCo(sgd(net), exchange, every=5, lag=0)
        loop(opt, net, int(exchange.peer), steps=5)
        opt.settle()
        before = [tensor.clone() for tensor in opt.slow]
        accepted = exchange.peer == "1"
        members = opt.average_over(exchange, tries=1, accept=lambda: accepted)
        after = [p.detach().clone() for p in net.parameters()]
        return before, after, [t.clone() for t in opt.slow], members

    found = Simulation(["1", "2"]).run(peer)
    before, after, slow, members = found["2"]
    assert members == ()
    assert all(torch.equal(a, b) for a, b in zip(before, slow, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert found["1"][3] == ("1", "2")
    torch.testing.assert_close(found["1"][1][0], (before[0] + found["1"][0][0]) / 2)


def test_first_mean_members_bring_it_to_the_second():
    """So the mean is of all three with equal shares, though one of them came late."""

    class Tries(Exchange):
        def __init__(self, means):
            self.means, self.brought = list(means), []

        def start(self, contribution):
            self.brought.append((contribution.key, [t.clone() for t in contribution.tensors]))
            return Ready(self.means.pop(0))

    net = model(0)
    opt = NoLoCo(sgd(net), shoal.Alone(), every=5, lag=0)
    values = [torch.full_like(t, 2.0) for t in opt.slow]
    tries = Tries([Mean(values, 2.0, ("a", "b")), None])
    members = opt.average_over(tries, enough=lambda members: len(members) == 3)
    assert members == ("a", "b")
    assert all(torch.equal(a, b) for a, b in zip(tries.brought[1][1], values, strict=True))
    assert [key.round for key, _ in tries.brought] == [0, 1]
    assert {key.fragment for key, _ in tries.brought} == {1}


class Ready(Handle):
    def __init__(self, mean):
        self._mean = mean

    def done(self):
        return True

    def result(self, deadline=None):
        return self._mean
