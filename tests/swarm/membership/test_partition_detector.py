"""A partition is suspected when members vanish together, not when they crash one by one, leave, or
while this node sleeps.
"""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.swarm.identity import Identity
from shoal.swarm.training.partition_detector import CONFIRM_S, FORGET_S, PartitionDetector
from tests.support.records import member_of

PERIOD, TTL = 5.0, 30.0
PEERS = {name: Identity.ephemeral().peer_id for name in ("me", "anna", "bert", "carl", "dora")}


def member(name, issued, **changes):
    return member_of(PEERS[name], **{"name": name, "issued": issued, **changes})


class Scene:
    """The directory of "me": each peer renews its record every five seconds, at a phase of its own,
    until it is cut off.
    """

    def __init__(self, phases=(0.0, 1.0, 2.5, 4.0)):
        self.absence = PartitionDetector(PEERS["me"])
        self.phases = dict(zip(("anna", "bert", "carl", "dora"), phases, strict=True))
        self.cut, self.left, self.now, self.said = {}, set(), 0.0, []

    def members(self):
        there = {PEERS["me"]: member("me", self.now)}
        for name, phase in self.phases.items():
            end = min(self.now, self.cut.get(name, self.now))
            issued = phase + PERIOD * ((end - phase) // PERIOD)
            if issued >= 0 and issued > self.now - TTL and name not in self.left:
                there[PEERS[name]] = member(name, issued)
        return there

    def until(self, end, step=1.0):
        while self.now < end:
            self.now += step
            self.said += self.absence.look(
                self.members(), {PEERS[name] for name in self.left}, self.now
            )
        return self


def test_simultaneous_loss_is_a_partition():
    """Two that vanish together are a partition and what is said says who."""
    scene = Scene().until(60)
    scene.cut = {"carl": 60.0, "dora": 60.0}
    scene.until(60 + TTL)
    assert scene.said == []
    scene.until(60 + TTL + CONFIRM_S + PERIOD)
    (said,) = scene.said
    assert said.startswith("a partition is suspected: 2 of 5 members vanished within ")
    assert said.endswith(
        " s (carl, dora); training goes on with 3, and they come together again by themselves"
    )
    assert scene.absence.suspected.fields()["missing_names"] == ("carl", "dora")
    assert member("me", 0.0, **scene.absence.suspected.fields()).missing == 2


def test_those_who_come_back_end_it():
    scene = Scene().until(60)
    scene.cut = {"carl": 60.0, "dora": 60.0}
    scene.until(120)
    del scene.cut["carl"]
    scene.until(130)
    assert scene.absence.suspected is None  # one alone is a crash
    assert scene.said[1:] == ["together again with carl"]
    scene.cut.clear()
    scene.until(140)
    assert len(scene.said) == 2


@settings(deadline=None)
@given(st.lists(st.floats(0, 4.99), min_size=4, max_size=4), st.floats(60, 70))
def test_cut_is_seen_at_once_in_any_phase(phases, moment):
    """A cut at one moment is seen as one whatever the phases."""
    scene = Scene(phases).until(moment)
    scene.cut = dict.fromkeys(("bert", "carl", "dora"), moment)
    scene.until(moment + TTL + CONFIRM_S + PERIOD + 2)
    assert set(scene.absence.suspected.names) == {"bert", "carl", "dora"}


def test_one_by_one_is_no_partition():
    scene = Scene().until(60)
    for number, name in enumerate(("anna", "bert", "carl")):
        scene.cut[name] = (
            60 + number * 18.0
        )  # the last signs of a cut at one moment differ by less than 2 periods
    scene.until(200)
    assert scene.said == []


def test_who_is_left_with_nobody_may_be_cut_off_itself():
    scene = Scene().until(60)
    scene.left = {"bert", "carl", "dora"}
    scene.until(100)
    assert scene.said == []
    scene.cut["anna"] = 100.0
    scene.until(160)
    assert scene.said[0] == (
        "anna vanished without leaving, and nobody else is here: it has stopped, or this node is "
        "cut off; training goes on without a partner until it comes back"
    )


def test_goodbyes_are_no_partition():
    scene = Scene().until(60)
    scene.left = {"anna", "bert", "carl"}
    assert scene.until(200).said == []


def test_a_node_that_slept_itself_suspects_nobody():
    scene = Scene().until(60)
    scene.now = 300.0
    assert (
        scene.absence.look({PEERS["me"]: member("me", 300.0)}, set(), 300.0) == []
    )  # all records are old until it reads again
    scene.until(400)
    assert scene.said == []


def test_what_is_long_past_is_forgotten():
    scene = Scene().until(60)
    scene.cut = {"carl": 60.0, "dora": 60.0}
    scene.until(60 + TTL + FORGET_S + 2 * CONFIRM_S, step=10.0)
    assert scene.absence.suspected is None
    assert len(scene.said) == 1


def test_it_says_nothing_of_a_full_house():
    absence = PartitionDetector(PEERS["me"])
    there = {PEERS[name]: member(name, time.time()) for name in PEERS}
    assert [absence.look(there, set(), float(second)) for second in range(5)] == [[]] * 5
    assert absence.suspected is None


@pytest.mark.parametrize("count", [3, 4])
def test_three_of_four_and_more_are_counted(count):
    scene = Scene().until(60)
    scene.cut = dict.fromkeys(list(scene.phases)[:count], 61.0)
    scene.until(120)
    assert scene.absence.suspected.of == 5
    assert len(scene.absence.suspected.names) == count
