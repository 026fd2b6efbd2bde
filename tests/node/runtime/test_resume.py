"""A trainer goes on from a checkpoint of another method, codec, shard or schedule; what is asked for wrongly is one sentence."""

import copy

import pytest
import torch

from shoal.node.checkpoint import store as checkpoint
from shoal.node.checkpoint.folder import CheckpointError
from shoal.node.config.settings import load
from shoal.node.runtime import resume as beginning
from shoal.node.runtime.door import continued
from shoal.node.runtime.join import for_new_swarm, new_manifest
from shoal.node.runtime.resume import SavedRun, check_same_outer, find, is_newer, migrate_state, restore
from shoal.node.task import Shard, Task
from shoal.node.training.trainer import Trainer, TrainingError
from shoal.optim import METHODS, Alone, DiLoCo, NoLoCo
from shoal.swarm.identity import Identity
from shoal.swarm.manifest.manifest import open_manifest, swarm_id
from shoal.swarm.manifest.outer import OuterSettings, TrainSettings
from shoal.swarm.state.snapshot import State
from tests.blocking import blocking

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Small(Task):
    def __init__(self, width=6, decay=0.9, lr=0.05):
        self.width, self.decay, self.lr = width, decay, lr

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, self.width), torch.nn.Dropout(0.5), torch.nn.Linear(self.width, 1))

    def batches(self, shard):
        generator = torch.Generator().manual_seed(shard.index + 10 * shard.of)
        while True:
            yield torch.randn(8, 4, generator=generator)

    def loss(self, model, batch):
        return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

    def evaluate(self, model):
        return 0.0

    def inner_optimizer(self, params):
        return torch.optim.AdamW(params, lr=self.lr)

    def lr_scheduler(self, optimizer, steps):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay) if self.decay else None


def trainer(method="noloco", shard=(0, 2), task=None, steps=0, **outer):
    settings = blocking(method=method, **{"every": 4, **outer})
    made = Trainer(task or Small(), settings, TrainSettings(steps=steps, seed=1))
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
    settings = load(None, {"outer.method": made.outer.method, "outer.every": made.outer.every, **overrides})
    sealed = new_manifest(settings, identity, "0" * 64)
    state = {"swarm": swarm_id(sealed), "manifest": sealed.hex(), "trainer": made.state()}
    checkpoint.save(folder, made.opt.steps, state)
    return state["swarm"]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_weights_inner_state_and_steps_come_over_to_every_method(tmp_path, identity, method):
    old = trained("diloco", steps=10)
    save(tmp_path, old, identity)
    new = trainer(method)
    saved = find(load(None, {"node.folder": str(tmp_path / "new"), "node.resume_from": str(tmp_path)}).node)
    lines = restore(new, saved, "another swarm")
    assert lines[0].startswith("goes on from step 10 of the checkpoint in ")
    lost = method not in ("diloco", "diloco-hb", "streaming", "decoupled", "eager")
    assert lines[1:] == ([f"not carried over: the outer momentum of diloco (the method is {method} now)"] if lost else [])
    assert same(new.model.parameters(), old.model.parameters())
    assert same(new.opt.slow, old.opt.slow)
    inner = [[state[name] for state in made.opt.state.values() for name in ("exp_avg", "exp_avg_sq")] for made in (new, old)]
    assert same(*inner)
    assert (new.opt.steps, new.schedule.scheduler.last_epoch) == (10, 10)
    assert torch.equal(torch.get_rng_state(), old.state()["rng"])
    assert torch.equal(next(new._batches), next(old._batches))
    new.step()


def test_the_same_settings_in_another_swarm_go_on_bit_by_bit():
    old, new = trained("noloco"), trainer("noloco")
    assert migrate_state(new, copy.deepcopy(old.state()), old.outer) == []
    ends = []
    for made in (old, new):
        torch.manual_seed(5)
        for _ in range(7):
            made.step()
        ends.append(list(made.model.parameters()))
    assert same(*ends)
    assert old.opt.param_groups[0]["lr"] == new.opt.param_groups[0]["lr"]


def test_what_is_different_now_is_named():
    old, new = trained("noloco"), trainer("gasloc", shard=(1, 8), task=Small(decay=0.5, lr=0.2))
    assert migrate_state(new, old.state(), old.outer) == [
        "the outer momentum of noloco (the method is gasloc now)",
        "the learning-rate schedule (it is another one now)",
        "the place in the data (the shard is 1/8 now, not 0/2)",
    ]
    assert new.opt.param_groups[0]["lr"] == 0.2
    assert torch.equal(next(new._batches), next(new.task.batches(new.shard)))
    new.step()
    without = trainer("noloco", task=Small(decay=None))
    assert migrate_state(without, old.state(), old.outer) == ["the learning-rate schedule (it is another one now)"]


def test_checkpoints_of_older_versions_come_over_too():
    for was, now, lost in [("diloco", "diloco", False), ("diloco", "streaming", False), ("noloco", "diloco", True)]:
        old, new = trained(was), trainer(now)
        state = old.state()
        state["optimizer"] = {name: value for name, value in state["optimizer"].items() if name not in ("kind", "schedule")}
        del state["rng_device"]
        dropped = migrate_state(new, state, old.outer)
        assert dropped == ([f"the outer momentum of {was} (the method is {now} now)"] if lost else [])
        again = trainer(was)
        again.resume(state)
        assert same(again.opt.slow, old.opt.slow)


def test_who_joins_takes_over_these_weights_and_not_those_of_the_seed():
    new = trainer()
    migrate_state(new, trained(steps=2).state(), new.outer)
    assert (new.opt.round, new.opt.applied) == (1, [0])


def test_another_model_is_refused_and_nothing_is_changed():
    new = trainer(task=Small(width=7))
    before = [tensor.clone() for tensor in new.opt.slow]
    with pytest.raises(TrainingError, match=r"of another model \(its '0.bias' differs\)"):
        migrate_state(new, trained().state(), new.outer)
    assert same(before, new.opt.slow)
    assert new.opt.steps == 0


def test_a_run_that_would_end_at_once_is_refused(tmp_path, identity):
    save(tmp_path, trained(), identity)
    saved = beginning._read(tmp_path)
    with pytest.raises(CheckpointError, match="has 10 steps, and this run ends after 10: pass --steps with more than 10"):
        restore(trainer(steps=10), saved, "another")


def node(folder, **more):
    return load(None, {"node.folder": str(folder), **{f"node.{name}": value for name, value in more.items()}}).node


def test_which_checkpoint_is_meant(tmp_path, identity):
    own, other = tmp_path / "own", tmp_path / "other"
    assert find(node(own)) is None
    swarms = [save(own, trained(), identity), save(other, trained(steps=5), identity), save(other, trained(steps=6), identity)]
    assert find(node(own, resume=True)).swarm == swarms[0]
    assert find(node(tmp_path / "new", resume_from=str(other))).swarm == swarms[2]
    assert find(node(tmp_path / "new", resume_from=str(other / "step-00000005"))).swarm == swarms[1]
    assert find(node(own, resume_from=str(own))).swarm == swarms[0]
    assert find(node(own, resume_from=str(own / "step-00000010"))).shard == Shard(0, 2, 1)
    for asked, words in [
        (node(own), "holds checkpoints of another run: pass --resume"),
        (node(own, resume_from=str(other)), "holds checkpoints of another run"),
        (node(own, resume=True, resume_from=str(other)), "pass one of them"),
        (node(tmp_path / "new", resume_from=str(tmp_path / "nothing")), "There is no checkpoint"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            find(asked)
    checkpoint.save(tmp_path / "odd", 1, {"something": "else"})
    checkpoint.save(tmp_path / "odd2", 1, {"swarm": "s", "manifest": "00", "trainer": {"shard": [0, 1, 2]}})
    for folder in ("odd", "odd2"):
        with pytest.raises(CheckpointError, match="is not that of a node"):
            find(node(tmp_path / "new", resume_from=str(tmp_path / folder)))


def saved(identity, **overrides):
    sealed = new_manifest(load(None, overrides), identity, "0" * 64)
    return SavedRun("runs/a", swarm_id(sealed), sealed, open_manifest(sealed), {})


def test_other_settings_than_the_swarms_are_refused_with_the_way_out(identity):
    old = saved(identity, **{"outer.method": "diloco", "outer.every": 7})
    for given in ({}, {"method": "diloco"}, {"every": 7, "method": "diloco", "lr": 0.7, "codec": None}):
        check_same_outer(OuterSettings(**given), old)
    with pytest.raises(CheckpointError) as caught:
        check_same_outer(OuterSettings(method="noloco"), old)
    assert str(caught.value) == (
        "The swarm of the checkpoint has outer.method=diloco, and a swarm's settings are fixed: leave method out, or pass "
        "--resume-from runs/a in place of --resume to go on in a new swarm with outer.method=noloco."
    )


def test_a_new_swarm_has_the_checkpoints_task_unless_it_is_told_another(identity):
    old = saved(identity, **{"task.options": {"width": 32}})
    assert continued(load(None, {"outer.method": "diloco"}), old.manifest).task.options == {"width": 32}
    assert continued(load(None, {"task.options": {"width": 8}}), old.manifest).task.options == {"width": 8}
    rl = saved(identity, **{"task.hooks": "rl", "rl.env": "sapo9"})
    made = continued(load(), rl.manifest)
    assert (made.task.hooks, made.task.options, made.rl.env) == ("rl", {}, "sapo9")


def test_a_new_swarm_has_the_checkpoints_inner_optimizer_unless_it_is_told_another(identity):
    ours, adamw = saved(identity, **{"train.optimizer": "muon", "train.lr": 0.03, "train.seed": 5}), saved(identity)
    for given, kept in (({}, ("muon", 0.03, 0)), ({"train.optimizer": "muon"}, ("muon", None, 0))):
        train = for_new_swarm(continued(load(None, given), ours.manifest)).train
        assert (train.optimizer, train.lr, train.seed) == kept
    assert for_new_swarm(continued(load(), adamw.manifest)).train.optimizer == "task"
    assert for_new_swarm(continued(load(None, {"train.optimizer": "muon"}), adamw.manifest)).train.optimizer == "muon"


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
def test_the_swarms_weights_are_taken_if_they_are_newer_or_the_own_have_drifted(method, round, applied, away, newer):
    lag = {"lag": 0} if method is NoLoCo else {}  # one fragment
    opt = method(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1), Alone(), every=5, **lag)
    opt.adopt([tensor.clone() for tensor in opt.slow], round=6, applied=[5])
    state = State(round, [tensor + away for tensor in opt.slow], {}, [applied])
    assert is_newer(state, opt) is newer
