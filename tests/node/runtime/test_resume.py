"""A trainer begins with the weights of another run, of any method; what is asked for wrongly is one
sentence.
"""

import pytest
import torch

from shoal.node.checkpoint import store as checkpoint
from shoal.node.checkpoint.folder import CheckpointError
from shoal.node.config.settings import load
from shoal.node.runtime.join import for_new_swarm, new_manifest
from shoal.node.runtime.resume import (
    SavedRun,
    begin_from,
    find,
    is_newer,
    restore,
)
from shoal.node.runtime.task_setup import continued
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.node.training.training_error import TrainingError
from shoal.optim import METHODS, Alone, DiLoCo, NoLoCo
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import open_manifest, swarm_id
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.state.snapshot import State
from tests.support.blocking import blocking
from tests.support.trainer_loops import Small

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Scheduled(Small):
    def __init__(self, width=6):
        self.width = width

    def model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(4, self.width), torch.nn.Dropout(0.5), torch.nn.Linear(self.width, 1)
        )

    def lr_scheduler(self, optimizer, steps):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def trainer(method="noloco", shard=(0, 2), task=None):
    made = Trainer(task or Scheduled(), blocking(method=method, every=4), TrainSettings(seed=1))
    made.connect(Alone(), "run", Shard(*shard, 1))
    return made


def trained(*arguments, steps=10, **options):
    made = trainer(*arguments, **options)
    for _ in range(steps):
        made.step()
    return made


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return Identity.create(tmp_path_factory.mktemp("key") / "key")


def save(folder, made, identity, **overrides):
    """As NodeRun does; the swarm."""
    settings = load(
        None, {"outer.method": made.outer.method, "outer.every": made.outer.every, **overrides}
    )
    sealed = new_manifest(settings, identity, "0" * 64)
    state = {"swarm": swarm_id(sealed), "manifest": sealed.hex(), "trainer": made.state()}
    checkpoint.save(folder, made.opt.steps, state)
    return state["swarm"]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_weights_resume_with_every_method(tmp_path, identity, method):
    """The weights come over to every method and all else begins."""
    old, new, fresh = (
        trained("diloco", steps=10),
        trainer(method, shard=(1, 8)),
        trainer(method, shard=(1, 8)),
    )
    save(tmp_path, old, identity)
    saved = find(
        load(None, {"node.folder": str(tmp_path / "new"), "node.resume_from": str(tmp_path)}).node
    )
    (line,) = restore(new, saved, "another swarm")
    assert line.startswith("begins with the weights of the checkpoint in ")
    assert same(new.model.parameters(), old.model.parameters())
    assert all(
        torch.equal(slow, own)
        for slow, own in zip(new.opt.slow, old.model.parameters(), strict=True)
    )
    assert (new.opt.round, new.opt.applied) == (
        1,
        [0] * new.opt.fragments,
    )  # who joins takes these, not those of the seed
    fresh.model.load_state_dict(new.model.state_dict())
    fresh.opt.restart_from_model()
    fresh.opt.round, fresh.opt.applied = 1, [0] * fresh.opt.fragments
    ends = []
    for made in (new, fresh):
        torch.manual_seed(5)
        for _ in range(9):
            made.step()
        ends.append(list(made.model.parameters()))
    assert same(*ends)


@pytest.mark.parametrize(
    "damage", [lambda one: one.update(exp_avg=torch.zeros(3)), lambda one: one.pop("exp_avg_sq")]
)
def test_unusable_inner_state_names_its_file(tmp_path, identity, damage):
    """Fault: torch loads it, and the node ended at its first step as by a fault of its own."""
    old = trained()
    inner = old.opt.inner.state
    damage(inner[next(iter(inner))])
    swarm = save(tmp_path, old, identity)
    saved, new = (
        find(load(None, {"node.folder": str(tmp_path), "node.resume": True}).node),
        trainer(),
    )
    assert restore(new, saved, swarm) == ["goes on from the checkpoint of step 10"]
    with pytest.raises(TrainingError) as refused:
        new.step()
    assert "\n" not in str(refused.value)
    assert f"{str(saved.path)!r} holds a state that the inner optimizer cannot use (" in str(
        refused.value
    )
    whole = trained()
    swarm = save(tmp_path / "whole", whole, identity)
    saved, new = (
        find(load(None, {"node.folder": str(tmp_path / "whole"), "node.resume": True}).node),
        trainer(),
    )
    restore(new, saved, swarm)
    new.step()
    new.opt.inner.step = lambda *a, **k: [][1]  # what fails later is no fault of the file
    with pytest.raises(IndexError):
        new.step()


def test_another_model_is_refused_and_nothing_is_changed():
    new = trainer(task=Scheduled(width=7))
    before = [tensor.clone() for tensor in new.opt.slow]
    with pytest.raises(TrainingError, match=r"of another model \(its '0.bias' differs\)"):
        begin_from(new, trained().state())
    assert same(before, new.opt.slow)
    assert new.opt.steps == 0


def node(folder, **more):
    return load(
        None,
        {"node.folder": str(folder), **{f"node.{name}": value for name, value in more.items()}},
    ).node


def test_which_checkpoint_is_meant(tmp_path, identity):
    own, other = tmp_path / "own", tmp_path / "other"
    assert find(node(own)) is None
    swarms = [
        save(own, trained(), identity),
        save(other, trained(steps=5), identity),
        save(other, trained(steps=6), identity),
    ]
    assert find(node(own, resume=True)).swarm == swarms[0]
    assert find(node(tmp_path / "new", resume_from=str(other))).swarm == swarms[2]
    assert find(node(tmp_path / "new", resume_from=str(other / "step-00000005"))).swarm == swarms[1]
    assert find(node(own, resume_from=str(own))).swarm == swarms[0]
    assert find(node(own, resume_from=str(own / "step-00000010"))).shard == Shard(0, 2, 1)
    for asked, words in [
        (node(own), "holds checkpoints of an earlier run: pass --resume"),
        (node(own, resume_from=str(other)), "holds checkpoints of an earlier run"),
        (node(own, resume=True, resume_from=str(other)), "pass one of them"),
        (node(tmp_path / "new", resume_from=str(tmp_path / "nothing")), "There is no checkpoint"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            find(asked)
    checkpoint.save(tmp_path / "odd", 1, {"something": "else"})
    checkpoint.save(
        tmp_path / "odd2", 1, {"swarm": "s", "manifest": "00", "trainer": {"shard": [0, 1, 2]}}
    )
    for folder in ("odd", "odd2"):
        with pytest.raises(CheckpointError, match="is not that of a node"):
            find(node(tmp_path / "new", resume_from=str(tmp_path / folder)))


def saved(identity, **overrides):
    sealed = new_manifest(load(None, overrides), identity, "0" * 64)
    return SavedRun("runs/a", swarm_id(sealed), sealed, open_manifest(sealed), {})


def test_new_swarm_takes_the_checkpoints_task(identity):
    """A new swarm has the checkpoint's task unless it is told another."""
    old = saved(identity, **{"task.options": {"width": 32}})
    assert continued(load(None, {"outer.method": "diloco"}), old.manifest).task.options == {
        "width": 32
    }
    assert continued(load(None, {"task.options": {"width": 8}}), old.manifest).task.options == {
        "width": 8
    }
    rl = saved(identity, **{"task.hooks": "rl", "rl.env": "sapo9"})
    made = continued(load(), rl.manifest)
    assert (made.task.hooks, made.task.options, made.rl.env) == ("rl", {}, "sapo9")


def test_new_swarm_takes_the_checkpoints_optimizer(identity):
    """A new swarm has the checkpoint's inner optimizer unless it is told another."""
    ours, adamw = (
        saved(identity, **{"train.optimizer": "muon", "train.lr": 0.03, "train.seed": 5}),
        saved(identity),
    )
    for given, kept in (({}, ("muon", 0.03, 0)), ({"train.optimizer": "muon"}, ("muon", None, 0))):
        train = for_new_swarm(continued(load(None, given), ours.manifest)).train
        assert (train.optimizer, train.lr, train.seed) == kept
    assert for_new_swarm(continued(load(), adamw.manifest)).train.optimizer == "task"
    assert (
        for_new_swarm(
            continued(load(None, {"train.optimizer": "muon"}), adamw.manifest)
        ).train.optimizer
        == "muon"
    )


@pytest.mark.parametrize(
    ("method", "round", "applied", "away", "newer"),
    [
        (DiLoCo, 7, 6, 0.0, True),
        (DiLoCo, 5, 4, 1.0, False),
        (DiLoCo, 6, 5, 0.0, False),
        (DiLoCo, 6, 5, 1.0, True),  # the node had missed a round when it stopped
        (DiLoCo, 6, 4, 1.0, False),
        (NoLoCo, 6, 5, 1.0, False),  # no two peers hold the same
        (NoLoCo, 7, 6, 1.0, True),
    ],
)
def test_newer_swarm_weights_are_taken(method, round, applied, away, newer):
    """The swarm's weights are taken if they are newer or the own have drifted."""
    lag = {"lag": 0} if method is NoLoCo else {}  # one fragment
    opt = method(
        torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1), Alone(), every=5, **lag
    )
    opt.adopt([tensor.clone() for tensor in opt.slow], round=6, applied=[5])
    state = State(round, [tensor + away for tensor in opt.slow], {}, [applied])
    assert is_newer(state, opt) is newer
