"""A change of the settings of training: what counts in which round, how one is added to another,
and what is refused.
"""

import pytest

from shoal.swarm.changes import (
    MAX_PARTS,
    Change,
    ChangePart,
    changed,
    described,
    extended,
    rank_of,
    refusal,
    settings_at,
)
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest
from shoal.swarm.settings.training import TrainSettings

CREATOR, SWARM = Identity.ephemeral().peer_id, "a" * 52
TRAIN = TrainSettings(steps=100, optimizer="adamw", lr=0.5)


def manifest(**train):
    fields = {**TRAIN.model_dump(exclude_unset=True), **train}
    return Manifest(
        name="x", created=1.0, creator=CREATOR, task="text", model="0" * 64,
        train=TrainSettings(**fields),
    )  # fmt: skip


def change(*parts, number=1):
    return Change(swarm=SWARM, creator=CREATOR, number=number, parts=parts)


def add(before, part, now=0, least=1, **train):
    return extended(before, manifest(**train), SWARM, part, now=now, least=least)


def test_a_part_counts_from_its_round_on():
    made = change(ChangePart(round=3, lr=0.25), ChangePart(round=5, steps=200))
    found = [settings_at(made, TRAIN, round) for round in (2, 3, 4, 5, 9)]
    assert [(one.lr, one.steps) for one in found] == [
        (0.5, 100), (0.25, 100), (0.25, 100), (0.25, 200), (0.25, 200),
    ]  # fmt: skip
    assert found[0] is TRAIN
    assert settings_at(None, TRAIN, 9) is TRAIN


def test_addition_keeps_what_lies_ahead():
    """Mutants: an earlier change is lost; a record that grows with each change."""
    made = add(None, ChangePart(round=2, lr=0.25))
    made = add(made, ChangePart(round=9, steps=50), now=4)
    made = add(made, ChangePart(round=6, lr=0.125), now=4)
    assert made.parts == (
        ChangePart(round=2, lr=0.25),
        ChangePart(round=6, lr=0.125),
        ChangePart(round=9, steps=50),
    )
    made = add(made, ChangePart(round=20, lr=0.75), now=9)
    assert made.parts == (
        ChangePart(round=9, lr=0.125, steps=50),
        ChangePart(round=20, lr=0.75),
    )
    assert made.number == 4


def test_a_later_change_of_the_same_round_replaces_the_setting():
    made = add(add(None, ChangePart(round=2, lr=0.25, steps=7)), ChangePart(round=2, lr=0.125))
    assert made.parts == (ChangePart(round=2, lr=0.125, steps=7),)


def test_the_number_rises_and_is_never_below_the_clock():
    assert add(None, ChangePart(round=1, lr=0.1), least=77).number == 77
    before = change(ChangePart(round=1, lr=0.1), number=99)
    assert add(before, ChangePart(round=1, lr=0.2), least=77).number == 100


def test_too_many_changes_ahead_are_refused():
    made = None
    for round in range(1, MAX_PARTS + 1):
        made = add(made, ChangePart(round=round, lr=0.1))
    with pytest.raises(ValueError, match=r"^3 changes lie ahead already: wait until one of them"):
        add(made, ChangePart(round=99, lr=0.1))


def test_a_schedule_that_leads_to_an_end_keeps_one():
    with pytest.raises(ValueError, match="cosine leads to an end: steps must be above 0"):
        add(None, ChangePart(round=1, steps=0), schedule="cosine")
    assert add(None, ChangePart(round=1, steps=0)).parts[0].steps == 0


def test_of_two_changes_of_one_number_all_take_the_same():
    one, other = change(ChangePart(round=1, lr=0.1)), change(ChangePart(round=1, lr=0.2))
    assert rank_of(one, b"one") != rank_of(other, b"other")
    assert rank_of(None, b"") < rank_of(one, b"one")


def test_a_change_in_words():
    now = TRAIN.model_copy(update={"lr": 1e-4, "steps": 7})
    assert described(changed(TRAIN, now)) == "train.lr=0.0001, train.steps=7"
    assert changed(TRAIN, TRAIN) == {}


ABLE = "it can change train.lr and train.steps."
ANEW = (
    " A new swarm with another value can begin with the weights of this one (shoal up "
    "--resume-from)."
)


CANNOT = "cannot change while the swarm runs, because"
OWN = "is each node's own: start that node again with it (--resume goes on from its checkpoint)."
REASONS = {
    "outer.codec": "partners compute with the same method, codec and length of rounds, and one "
    "that has "
    "another cannot meet the rest",
    "train.seed": "the state of the inner optimizer, the data and the schedule were made with it",
    "swarm.name": "the swarm's id follows from it",
}


@pytest.mark.parametrize("key", REASONS)
def test_what_cannot_change_is_one_sentence(key):
    assert refusal(key) == f"The setting {key} {CANNOT} {REASONS[key]}; {ABLE}{ANEW}"


def test_a_setting_of_each_node_is_named_as_such():
    for key in ("node.upload", "train.compile"):
        assert refusal(key, ["train.compile"]) == f"The setting {key} {OWN}"
    assert refusal("train.lr") == refusal("train.steps") == ""
