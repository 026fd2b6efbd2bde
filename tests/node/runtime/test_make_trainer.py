"""The learning-rate schedule of a node that joins late: at the swarm's place in it, never back, and
never beyond its end.
"""

from types import SimpleNamespace

import pytest
import torch

from shoal.node.config.settings import load
from shoal.node.runtime.join import follow_schedule, schedule_steps
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from tests.support.trainer_loops import Small

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EVERY = 5


def settings(steps=40, **more):
    return load(None, {"train.steps": steps, "outer.every": EVERY, "outer.lag": 0, **more})


def trainer(given, swarm=None):
    steps = schedule_steps(given, swarm)
    made = Trainer(Small(), given.outer, given.train, schedule_steps=steps)
    made.connect(Alone(), "run", Shard(0, 2, 1))
    return made


def manifest(steps=40, **outer):
    given = OuterSettings(**{"every": EVERY, "lag": 0, **outer})
    return SimpleNamespace(outer=given.resolved(), train=TrainSettings(steps=steps))


def member(steps_per_s=0.0, tokens_per_s=0.0):
    return SimpleNamespace(peer="x", steps_per_s=steps_per_s, tokens_per_s=tokens_per_s)


COSINE = {"train.schedule": "cosine"}


def rate(made):
    return made.opt.param_groups[0]["lr"]


def test_late_node_begins_where_the_swarm_is():
    """A late node begins where the swarm is and says so."""
    made, on_time = trainer(settings(**COSINE)), trainer(settings(**COSINE))
    line = follow_schedule(made, settings(**COSINE), manifest(), 4, [], {})
    assert line == (
        "the learning-rate schedule begins at step 20 of 40, where the swarm is, and stays at its "
        "end from this node's step 20 on"
    )
    for _ in range(20):
        on_time.schedule.step()
    assert rate(made) == rate(on_time)
    for _ in range(20):
        made.step()
        on_time.schedule.step()
        assert rate(made) == rate(on_time)
    made.step()
    assert rate(made) == rate(on_time)  # at its end
    assert made.opt.steps == 21


@pytest.mark.parametrize(
    ("given", "swarm"),
    [
        ({"train.schedule": "constant"}, manifest()),
        (COSINE, manifest(steps=0)),  # a swarm without an end has no place in a schedule
    ],
)
def test_without_a_swarm_it_begins_at_step_zero(given, swarm):
    """Where there is nothing to follow it begins at its own first step."""
    made = trainer(settings(**given))
    before = rate(made)
    assert follow_schedule(made, settings(**given), swarm, 4, [], {}) is None
    assert (made.schedule.done, rate(made)) == (0, before)


@pytest.mark.parametrize("round", [8, 9, 10**6, 2**53, 2**63])
def test_lying_round_reaches_the_end_at_most(round):
    """Fault: a round of 9e15, as a hostile peer answers, is stepped through, or leads beyond the
    end of OneCycle.
    """
    made = trainer(settings(**COSINE))
    assert "begins at step 40 of 40, where the swarm is" in follow_schedule(
        made, settings(**COSINE), manifest(), round, [], {}
    )
    assert rate(made) == pytest.approx(0.1 * 3e-4)
    made.step()


def test_it_never_goes_back():
    made = trainer(settings(**COSINE))
    made.schedule_at(30)
    before = rate(made)
    assert follow_schedule(made, settings(**COSINE), manifest(), 4, [], {}) is None
    assert (made.schedule.done, rate(made)) == (30, before)
    assert "goes on at step 35 of 40" in follow_schedule(
        made, settings(**COSINE), manifest(), 7, [], {}
    )


@pytest.mark.parametrize(
    ("own", "swarm", "length"),
    [
        (10, 40, 40),  # it takes part for less, and ends where it is
        (80, 40, 80),
        (0, 40, 0),
        (10, 0, 10),
        (10, None, 10),  # it creates the swarm
    ],
)
def test_schedule_length_is_the_swarms(own, swarm, length):
    """The length is the swarms where a node takes part for less."""
    given = settings(own)
    assert schedule_steps(given, None if swarm is None else TrainSettings(steps=swarm)) == length


def test_a_short_visit_has_the_rates_that_the_others_have():
    given, swarm = settings(10, **COSINE), manifest()
    made = trainer(given, swarm.train)
    line = follow_schedule(made, given, swarm, 4, [], {})
    assert line == "the learning-rate schedule begins at step 20 of 40, where the swarm is"
    made.run()
    assert (made.opt.steps, made.schedule.done) == (10, 30)


@pytest.mark.parametrize(
    ("round", "members", "step"),
    [
        (
            "tokens:100",
            [member(2.0, 20.0), member(1.0, 10.0), member(4.0, 4e9)],
            30,
        ),  # 10 tokens a step
        ("seconds:2.0", [member(2.5), member(1e9), member(0.0)], 15),
        ("seconds:auto", [member(10.0), member(10.0)], 30),
    ],
)
def test_uneven_rounds_are_steps_by_majority(round, members, step):
    """Rounds of tokens and seconds are steps by what most members say."""
    given = settings(**COSINE, **{"outer.round": round})
    made = trainer(given)
    assert f"begins at step {step} of 40" in follow_schedule(
        made, given, manifest(round=round), 3, members, {}
    )


@pytest.mark.parametrize("round", ["tokens:100", "seconds:2.0", "seconds:auto"])
def test_unknown_speed_is_said(round):
    """Where no member says how fast it is that is said."""
    given = settings(**COSINE, **{"outer.round": round})
    made = trainer(given)
    line = follow_schedule(made, given, manifest(round=round), 3, [member()], {})
    assert line.startswith(
        "the learning-rate schedule goes on from step 0 of 40: how far the swarm is cannot be told"
    )
    assert made.schedule.done == 0


def test_resumed_node_keeps_its_place():
    """A resumed node keeps the place that it had and not its own steps."""
    given = settings(**COSINE)
    made = trainer(given)
    follow_schedule(made, given, manifest(), 4, [], {})
    made.step()
    again = trainer(given)
    assert again.resume(made.state()) is True
    assert (again.opt.steps, again.schedule.done, rate(again)) == (1, 21, rate(made))


@pytest.mark.parametrize(
    "make",
    [
        lambda opt, steps: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=steps),
        lambda opt, steps: torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps),
    ],
)
def test_own_scheduler_follows_and_ends_nothing(make):
    """A task's own scheduler follows too and does not end the run at its end."""

    class Own(Small):
        def lr_scheduler(self, optimizer, steps):
            return make(optimizer, steps)

    given = settings()
    made, on_time = (Trainer(Own(), given.outer, given.train) for _ in range(2))
    made.connect(Alone(), "run", Shard(0, 2, 1))
    follow_schedule(made, given, manifest(), 6, [], {})
    for _ in range(30):
        on_time.schedule.step()
    assert rate(made) == rate(on_time)
    made.run()
    assert (made.opt.steps, made.schedule.done) == (40, 40)
