"""A node takes a change of the swarm's settings: its rate, its end and its schedule, what it keeps
of its own, what is saved.
"""

from types import SimpleNamespace

import pytest

from shoal.node.config.settings import load
from shoal.node.runtime.join import for_new_swarm, new_manifest
from shoal.node.runtime.resume import SavedRun
from shoal.node.runtime.task_setup import continued, own_steps
from shoal.node.runtime.training_node import TrainingNode
from shoal.swarm.changes import Change, ChangePart, settings_at
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import open_manifest, swarm_id
from shoal.swarm.wire.envelope import seal

CREATOR = Identity.ephemeral()
SWARMS = {"train.steps": 100, "train.optimizer": "adamw", "train.lr": 0.5}


def swarm(**overrides):
    sealed = new_manifest(load(None, {**SWARMS, **overrides}), CREATOR, "0" * 64)
    return sealed, open_manifest(sealed)


def change(sealed, *parts):
    made = Change(swarm=swarm_id(sealed), creator=CREATOR.peer_id, number=1, parts=parts)
    return made, seal(made, CREATOR)


class Followed:
    """A node in the swarm of ``manifest``, of which nothing is there but what a change concerns."""

    def __init__(self, manifest, *parts, **own):
        self.said, self.written, self.taken, self.ends = [], [], [], []
        found = change(swarm()[0], *parts)[0]
        changes = SimpleNamespace(
            settings_at=lambda round: settings_at(found, manifest.train, round)
        )
        node = self.node = TrainingNode.__new__(TrainingNode)
        node.options = SimpleNamespace(settings=load(None, own))
        node.settings = load(None, {**SWARMS, **own})
        node.membership = SimpleNamespace(changes=changes, manifest=manifest)
        node.trainer = SimpleNamespace(change=lambda **given: self.taken.append(given))
        node.options.display = SimpleNamespace(message=self.said.append, resize=self.ends.append)
        node.metrics = SimpleNamespace(
            write=lambda event, **given: self.written.append((event, given))
        )


def test_a_change_is_taken_once_in_its_round_and_said():
    """Mutants: it is taken before its round, or at every step after it."""
    made = Followed(swarm()[1], ChangePart(round=3, lr=0.25), ChangePart(round=5, steps=200))
    for round in (0, 2, 3, 3, 4, 5, 6):
        made.node._follow_changes(round)
    assert made.taken == [
        {"lr": 0.25, "steps": 100, "length": 100},
        {"lr": 0.25, "steps": 200, "length": 200},
    ]
    assert made.said == [
        "the swarm's creator has changed train.lr=0.25, from round 3 on here",
        "the swarm's creator has changed train.steps=200, from round 5 on here",
    ]
    assert made.written == [
        ("change", {"round": 3, "lr": 0.25}),
        ("change", {"round": 5, "steps": 200}),
    ]
    assert made.ends == [100, 200]
    assert made.node.settings.train.steps == 200


def test_a_node_keeps_its_own_steps():
    """Its schedule is that of the swarm all the same, in which it takes part for less."""
    made = Followed(swarm()[1], ChangePart(round=3, steps=200), **{"train.steps": 50})
    made.node._follow_changes(3)
    assert made.taken == [{"lr": 0.5, "steps": 50, "length": 200}]
    assert made.said == [
        "the swarm's creator has changed train.steps=200, from round 3 on here; this node keeps "
        "its own --steps 50"
    ]


@pytest.mark.parametrize(
    ("given", "own"), [({}, None), ({"train.steps": 100}, None), ({"train.steps": 7}, 7)]
)
def test_the_number_in_the_creators_own_file_is_the_swarms(given, own):
    """Fault: the creator's node, whose file has the swarm's steps, would keep them as its own."""
    assert own_steps(load(None, given), swarm()[1]) == own


def test_a_new_swarm_goes_on_with_what_was_changed():
    """Mutant: --resume-from takes the rate of the manifest, from before it was changed."""
    sealed, manifest = swarm()
    _, signed = change(sealed, ChangePart(round=2, lr=0.25), ChangePart(round=9, lr=0.125))
    fragments = manifest.outer.overlap()["fragments"]
    trainer = {"optimizer": {"round": 4 * fragments}}
    saved = SavedRun("runs/a", swarm_id(sealed), sealed, manifest, trainer, signed)
    assert (saved.round, saved.manifest_then.train.lr) == (4, 0.25)
    assert for_new_swarm(continued(load(), saved.manifest_then)).train.lr == 0.25
    before = SavedRun("runs/a", swarm_id(sealed), sealed, manifest, trainer)
    assert before.manifest_then is manifest


def test_own_optimizer_keeps_its_rate():
    """Fault: train.lr beside the task's own optimizer is refused in a new swarm's settings."""
    sealed, manifest = swarm(**{"train.optimizer": "task", "train.lr": None})
    _, signed = change(sealed, ChangePart(round=0, lr=0.25))
    saved = SavedRun("a", swarm_id(sealed), sealed, manifest, {"optimizer": {"round": 0}}, signed)
    train = continued(load(), saved.manifest_then).train
    assert (train.optimizer, train.lr) == ("task", None)
