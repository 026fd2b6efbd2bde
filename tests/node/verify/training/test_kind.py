"""Sessions of several nodes that claim inner steps, over a board in memory: who did not do them is banned, and nobody else."""

import hashlib
import itertools
import json

import pytest
import torch

from shoal.node.config.rl import RLSettings
from shoal.node.config.settings import ConfigError, Settings
from shoal.node.rl.task import RLTask
from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.node.training.trainer import Trainer
from shoal.node.verify.audit.errors import NotCheckable, VerifyError
from shoal.node.verify.service import Verification
from shoal.node.verify.terms import make_terms
from shoal.node.verify.training import kind as inner_steps
from shoal.node.verify.training.kind import StepClaims
from shoal.node.verify.training.material import TrainingMaterial
from shoal.node.verify.training.terms import check_stretch_terms, make_stretch_terms, training_terms
from shoal.optim import Alone
from shoal.swarm.identity import Identity
from shoal.swarm.manifest.manifest import Manifest
from shoal.swarm.wire.envelope import unpack
from tests.blocking import blocking
from tests.node.verify.board import ROUND_S, SWARM, TICKS, Board, Net

SHARDS = 8
NAMES = ("ann", "bob", "cat", "dan", "elsewhere", "idle")
GUILTY = {"elsewhere", "idle"}
OPTIONS = {"max_bytes": 1 << 18, "layers": 1, "width": 16, "context": 16, "batch": 2}
CREATED = {"name": "text", "created": 0.0, "creator": Identity.ephemeral().peer_id, "task": "text", "model": "0" * 64}


def settings_of(steps=0, **verify):
    agreed = {"kind": "training", "audit_rate": 1.0, "claims": 1, "round_s": ROUND_S, "planted": 0.0, **verify}
    return Settings.model_validate(
        {"train": {"steps": steps}, "verify": agreed, "node": {"verify_seconds": 60.0}, "swarm": {"shards": SHARDS}}
    )


def manifest_of(settings, task):
    terms = make_stretch_terms(settings, task)
    agreed = {"train": settings.train, "verify": settings.verify, "terms": terms, "shards": SHARDS}
    return Manifest.model_validate({**CREATED, **agreed})


def shard_of(name):
    """What all say of themselves."""
    return Shard(NAMES.index(name), SHARDS, 0)


class Lazy(TextTask):
    """Learns from one batch in five, and from the others nothing to speak of."""

    def loss(self, model, batch):
        self.seen = getattr(self, "seen", -1) + 1
        return super().loss(model, batch) * (1.0 if self.seen % 5 == 0 else 0.0)


class Trainee:
    """A node that trains a small model on text and verifies."""

    def __init__(self, board, me, settings, *, task=None, trained=None):
        self.me, self.said = me, []
        mine = TextTask(**OPTIONS)
        manifest = manifest_of(settings, mine)
        outer = blocking(method="noloco", every=12)
        self.trainer = Trainer(task or mine, outer, settings.train)
        self.trainer.connect(Alone(), SWARM, trained or shard_of(me))
        self.network, salts = Net(board, me), itertools.count()
        clock = lambda: board.now  # noqa: E731
        kind = StepClaims(
            settings, training_terms(manifest.terms, manifest, SWARM), self.trainer, mine, self.trainer.shard, self.network,
            shard_of, clock,
        )  # fmt: skip
        self.verification = Verification(
            settings, kind, self.network, clock=clock, timer=clock,
            salt=lambda: hashlib.sha256(f"{me}:{next(salts)}".encode()).digest(),
        )  # fmt: skip
        self.verification.prepare()

    def step(self, train):
        self.verification.step()
        if train:
            self.trainer.step()
            self.verification.after_step()
        self.verification.tell(self.said.append, lambda event, **fields: None)

    @property
    def banned(self):
        return {peer for peer in self.verification.table.standings if self.verification.is_banned(peer)}


def run(board, nodes, rounds):
    for tick in range(int(rounds * TICKS)):
        for node in nodes:
            node.step(train=tick % 2 == 0)
        board.now += ROUND_S / TICKS


@pytest.fixture(autouse=True)
def few(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(inner_steps, "SELF_CLAIMS", 20)


def test_who_did_not_do_its_steps_or_did_others_is_banned_and_nobody_else():
    board, settings = Board(), settings_of(planted=0.3)
    nodes = [Trainee(board, name, settings) for name in NAMES[:4]]
    nodes.append(Trainee(board, "elsewhere", settings, trained=shard_of("ann")))
    nodes.append(Trainee(board, "idle", settings, task=Lazy(**OPTIONS)))
    run(board, nodes, 12)
    assert {one.me: one.banned for one in nodes} == {one.me: GUILTY for one in nodes}
    assert len({one.verification.table.digest for one in nodes}) == 1
    reports = {one.me: one.verification.report() for one in nodes}
    standings = reports["ann"]["standings"]
    for name in NAMES[:4]:
        told = standings[name]
        assert told["score"] > 0
        assert told["claims"]["valid"] >= 2
        assert told["claims"]["invalid"] == told["seats"]["against"] + told["seats"]["missed"] + told["seats"]["absent"] == 0
        assert reports[name]["claim_s"] > 0
    assert sum(standings[name]["claims"]["planted"] for name in NAMES[:4]) > 0
    assert all(report["skipped"] == report["uncheckable"] == report["lost"] == 0 for report in reports.values())
    assert all(json.loads(json.dumps(report)) == report for report in reports.values())
    said = "\n".join(nodes[0].said)
    assert nodes[0].said[0] == "measured 20 honest stretches of steps of its own, to check others by"
    assert "of elsewhere's node is invalid: The steps were claimed on another shard than the peer's own." in said
    assert "of idle's node is invalid: The steps, done again, do not lead to the claimed weights (" in said


def test_verifying_changes_no_bit_of_training():
    ends = []
    for verified in (False, True):
        board, settings = Board(), settings_of()
        ann = Trainee(board, "ann", settings)
        others = [Trainee(board, name, settings) for name in NAMES[1:4]] if verified else []
        if verified:
            run(board, [ann, *others], 5)
        else:
            for _ in range(5 * TICKS // 2):
                ann.trainer.step()
        assert ann.trainer.opt.steps == 5 * TICKS // 2
        assert (ann.verification.report()["claimed"] > 0) == verified
        ends.append([value.clone() for value in ann.trainer.model.state_dict().values()])
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))


def test_steps_that_were_claimed_before_a_restart_are_not_claimed_again():
    """A node that lost what it had trained since its last checkpoint trains the same batches again."""
    board, settings = Board(), settings_of()
    nodes = [Trainee(board, name, settings) for name in NAMES[:4]]
    run(board, nodes, 6)
    before = nodes[0].verification.report()["claimed"]
    assert before >= 2
    nodes[0].verification.close()
    again, bodies = Trainee(board, "ann", settings), nodes[0].network.bodies
    again.network.bodies |= bodies
    nodes[0] = again
    run(board, nodes, 10)
    materials = [body for body in again.network.bodies.values() if len(body) < TrainingMaterial.LIMIT]  # snapshots are larger
    claimed = [one for one in (unpack(body, TrainingMaterial).stretch for body in materials) if one.shard == shard_of("ann")]
    assert len(claimed) == len(set(claimed)) == before + again.verification.report()["claimed"]
    after = nodes[1].verification.report()["standings"]["ann"]["claims"]
    assert after["invalid"] == 0
    assert after["valid"] > before
    assert all(one.banned == set() for one in nodes)


def test_nothing_is_copied_while_no_claim_is_due():
    board = Board()
    ann = Trainee(board, "ann", settings_of())
    ann.trainer.step()
    ann.verification.after_step()
    ann.step(train=True)
    assert ann.verification.report()["claimed"] == 0
    with pytest.raises(NotCheckable, match="fetch it from the claim's author"):
        ann.verification._auditor._checker.check(None, b"", None)


class Dropping(TextTask):
    def loss(self, model, batch):
        return super().loss(model, batch) * (1 + 1e-3 * torch.rand(()))


def kind_of(task, settings=None, **changed):
    settings = settings or settings_of()
    trainer = Trainer(task, blocking(**{"method": "noloco", "every": 12, **changed}), settings.train)
    manifest = manifest_of(settings, TextTask(**OPTIONS))
    terms = training_terms(manifest.terms, manifest, SWARM)
    return StepClaims(settings, terms, trainer, task, Shard(0, SHARDS, 0), Net(Board(), "ann"), shard_of)


def test_what_cannot_be_verified_is_said_at_the_start(monkeypatch):
    with pytest.raises(VerifyError, match="steps draw random numbers"):
        kind_of(Dropping(**OPTIONS))
    with pytest.raises(VerifyError, match="Rounds of 5 steps leave no room to audit 5"):
        kind_of(TextTask(**OPTIONS), every=5)
    with pytest.raises(VerifyError, match=r"leave node\.calibration out"):
        kind_of(TextTask(**OPTIONS), Settings.model_validate({**settings_of().model_dump(), "node": {"calibration": "x"}}))
    monkeypatch.setattr(inner_steps, "MOST_BYTES", 10_000)
    with pytest.raises(VerifyError, match="train fewer parameters"):
        kind_of(TextTask(**OPTIONS))


def test_terms_are_for_tasks_whose_steps_others_can_do_again(monkeypatch):
    task = TextTask(**OPTIONS)
    with pytest.raises(ConfigError, match="Training of 99 steps is too short to be verified by 5"):
        make_terms(settings_of(steps=99), task)
    with pytest.raises(ConfigError, match="pass --verify activations with --task rl"):
        make_terms(settings_of(), RLTask(None, None, RLSettings(), seed=0))
    with pytest.raises(ConfigError, match="pass --task rl with it, or --verify training"):
        make_terms(settings_of(kind="activations"), task)
    assert make_terms(settings_of(kind="none"), task) is None
    count = itertools.count()
    monkeypatch.setattr(task, "batches", lambda shard: iter([torch.tensor(next(count))]))
    with pytest.raises(ConfigError, match="gives other batches each time"):
        make_terms(settings_of(), task)


def test_who_joins_must_have_the_swarms_data_and_steps(tmp_path):
    settings, task = settings_of(steps=200), TextTask(**OPTIONS)
    manifest = manifest_of(settings, task)
    check_stretch_terms(manifest.terms, manifest, settings.train, task)
    for name, value in [("precision", "bfloat16"), ("accumulate", 2), ("compile", True)]:
        with pytest.raises(ConfigError, match=f"others do steps again as the task itself does them: leave train.{name} out"):
            check_stretch_terms(manifest.terms, manifest, settings.train.model_copy(update={name: value}), task)
    with pytest.raises(ConfigError, match="for 200 steps, not 300: leave --steps out"):
        check_stretch_terms(manifest.terms, manifest, settings_of(steps=300).train, task)
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"{number} fish in the water " * 50)
    with pytest.raises(ConfigError, match="other data than the swarm"):
        check_stretch_terms(manifest.terms, manifest, settings.train, TextTask(**OPTIONS, data=str(tmp_path)))
