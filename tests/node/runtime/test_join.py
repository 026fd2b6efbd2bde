"""What a joiner takes from the manifest and what is its own affair; the check of manifests, and
which shard it gets.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from shoal.node.cli.main import cli
from shoal.node.cli.options import overrides
from shoal.node.config.setting_types import spec_label
from shoal.node.config.settings import ConfigError, load
from shoal.node.config.train_settings import OwnTraining, TrainTable
from shoal.node.data.task_options import options_of_member
from shoal.node.demo.run_nodes import settings_toml
from shoal.node.plan.advice import averages_as_chosen
from shoal.node.runtime import task_setup, training_node
from shoal.node.runtime.join import (
    choose_shard,
    for_new_swarm,
    is_few_but_chosen,
    new_manifest,
    with_own_lag,
)
from shoal.node.runtime.result import Setup
from shoal.node.runtime.task_setup import (
    check_not_fixed,
    check_size,
    continued,
    enter,
    swarm_settings,
)
from shoal.node.runtime.training_node import TrainingNode
from shoal.node.task import Shard
from shoal.node.tasks.gpt import GPT, sized
from shoal.node.tasks.text_size import TextSize
from shoal.node.tasks.user_class import HookError
from shoal.node.training import resources
from shoal.node.training.resources import GB, MemoryBudgetError
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.access.link import Link
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import open_manifest
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.settings.verification import Terms
from shoal.swarm.state.query import ModelDiffersError
from tests.support.records import member_of

ME = Identity.ephemeral()


def manifest(**overrides):
    settings = load(None, {"swarm.shards": 4, "train.seed": 5, **overrides})
    return open_manifest(new_manifest(settings, ME, "0" * 64))


def member(shard, shards=4):
    peer = Identity.ephemeral().peer_id
    return member_of(peer, shard=shard, shards=shards)


def members(*shards):
    return {m.peer: m for m in map(member, shards)}


@pytest.mark.parametrize(("method", "written"), [("noloco", 2), ("streaming", 2), ("diloco", None)])
def test_manifest_states_the_models_fragments(method, written):
    """A manifest has the fragments that the model is cut into."""
    settings = load(None, {"outer.method": method})
    assert (
        open_manifest(new_manifest(settings, ME, "0" * 64, fragments=2)).outer.fragments == written
    )


MUON = {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({}, MUON),
        (
            {"task.options": {"width": 32, "warmup": 9}, "outer.method": "diloco", "train.seed": 3},
            MUON | {"seed": 3},
        ),
        ({"train.optimizer": "task"}, {}),
        ({"train.optimizer": "adamw"}, {"optimizer": "adamw", "lr": 3e-4, "weight_decay": 0.01}),
        ({"train.optimizer": "muon", "train.lr": 0.1}, MUON | {"lr": 0.1}),
        ({"task.options": {"lr": 0.01}}, {}),  # which is AdamW's
        ({"task.hooks": "task.py:Mine"}, {}),
        (
            {"task.hooks": "task.py:Mine", "train.optimizer": "muon", "train.weight_decay": 0.1},
            MUON | {"weight_decay": 0.1},
        ),
        ({"task.hooks": "rl"}, {}),
    ],
)
def test_new_manifest_has_muon_and_its_rates(given, written):
    """A new manifest has muon for the built in task and writes its rates down."""
    settings = for_new_swarm(load(None, given))
    made = open_manifest(new_manifest(settings, ME, "0" * 64)).train
    assert made.model_dump(exclude_defaults=True) == written
    assert swarm_settings(
        load(None, {"task.hooks": given.get("task.hooks", "text")}), manifest(**given)
    ).train.optimizer == (
        load(None, given).train.optimizer
    )  # who joins takes what the manifest says, or leaves out


@pytest.mark.parametrize(
    ("given", "trained"), [({}, "muon"), ({"train.optimizer": "task"}, "task")]
)
def test_demo_hands_on_the_given_optimizer(tmp_path, given, trained):
    """A demo hands on the optimizer that was given and no other."""
    (tmp_path / "swarm.toml").write_text(settings_toml(load(None, given)))
    assert for_new_swarm(load(tmp_path / "swarm.toml")).train.optimizer == trained


def test_without_muon_the_task_keeps_its_optimizer(monkeypatch):
    """Without muon in torch the built in task has its own optimizer."""
    monkeypatch.delattr("torch.optim.Muon")
    assert for_new_swarm(load()) == load()


@pytest.mark.parametrize(
    ("given", "guarded"),
    [
        ({}, {"robust": "clipped-gossip", "check_loss": True}),
        ({"outer.method": "diloco"}, {"robust": "centered-clip"}),
        ({"outer.method": "none"}, {}),
        ({"outer.robust": "none"}, {"check_loss": True}),
        ({"outer.check_loss": False}, {"robust": "clipped-gossip"}),
        ({"outer.weights": "tokens"}, {"check_loss": True}),
        ({"outer.method": "sparseloco", "outer.codec": "topk2-senders+ef:0.95"}, {}),
    ],
)
def test_public_swarm_has_defences_by_default(given, guarded):
    """A public swarm has its defences unless the user chose others."""
    before = load(None, given | {"swarm.public": True, "swarm.name": "whales"})
    outer = open_manifest(new_manifest(for_new_swarm(before), ME, "0" * 64)).outer
    chosen = {name: getattr(outer, name) for name in ("robust", "check_loss")}
    usual = {name: getattr(before.outer, name) for name in ("robust", "check_loss")}
    assert chosen == usual | guarded
    private = for_new_swarm(load(None, given)).outer
    assert (private.robust, private.check_loss) == ("none", False)


FEW = {"method": "streaming", "codec": "sign+ef", "every": 16, "lr": 1.0, "momentum": 0.3}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"swarm.start_when": 2}, FEW),
        ({"swarm.start_when": 4}, FEW),
        ({"swarm.start_when": 5}, FEW | {"codec_back": "e3m0+ef", "lr": 1.4}),
        ({"swarm.start_when": 16}, FEW | {"codec_back": "e3m0+ef", "lr": 1.4}),
        ({"swarm.start_when": 17}, {}),
        ({"swarm.start_when": 1}, {}),
        ({"swarm.start_when": 4, "swarm.bucket": 4}, {}),
        ({"swarm.start_when": 4, "outer.every": 9}, {"every": 9}),
        ({"swarm.start_when": 4, "outer.method": "noloco"}, {}),
        ({"swarm.start_when": 4, "task.hooks": "rl"}, {"method": "none"}),
        (
            {"swarm.start_when": 4, "swarm.public": True},
            {"robust": "clipped-gossip", "check_loss": True},
        ),
    ],
)
def test_few_private_peers_average_over_everyone(given, written):
    """Who chooses anything about averaging chooses its method too, and else has pairs."""
    outer = for_new_swarm(load(None, given)).outer
    assert outer.model_dump(exclude_defaults=True) == written


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"swarm.start_when": 3, "outer.every": 9, "outer.wait_s": 20.0}, True),
        ({"swarm.start_when": 3}, False),
        ({"swarm.start_when": 3, "outer.every": 9, "outer.method": "noloco"}, False),
        ({"swarm.start_when": 1, "outer.every": 9}, False),
        ({"swarm.start_when": 3, "outer.every": 9, "swarm.public": True}, False),
    ],
)
def test_pairs_by_a_setting_besides_the_method_are_told(given, told):
    """The fault: every = 16 alone made pairs of a swarm of three, and nobody said so."""
    settings = load(None, given)
    assert is_few_but_chosen(settings) == told
    if told:
        assert averages_as_chosen(settings.outer, 3) == (
            "this swarm averages in pairs, because [outer] sets every and wait_s: with nothing set "
            "there, its 3 peers would average over everyone (streaming, in one bit), which ends "
            "with a lower loss"
        )


def test_the_folder_of_a_task_is_nobody_elses_affair():
    assert spec_label("/home/somebody/task.py:Mine") == "task.py:Mine"
    assert spec_label("package.module:Mine") == "package.module:Mine"
    assert spec_label("text") == "text"


def test_a_joiner_takes_the_swarms_settings_and_keeps_its_own():
    theirs = manifest(
        **{
            "outer.every": 7,
            "train.steps": 100,
            "task.options": {"width": 32},
            "swarm.name": "whales",
        }
    )
    mine = load(None, {"node.data": "here", "node.name": "me"})
    settings = swarm_settings(mine, theirs)
    assert (settings.outer.every, settings.train.steps, settings.train.seed) == (7, 100, 5)
    assert (settings.swarm.name, settings.swarm.shards, settings.task.options) == (
        "whales",
        4,
        {"width": 32},
    )
    assert (settings.node.name, settings.node.data) == ("me", "here")
    shorter = swarm_settings(load(None, {"train.steps": 9}), theirs)
    assert shorter.train.steps == 9


OWN_TRAINING = {
    "precision": "bfloat16",
    "accumulate": 4,
    "compile": True,
    "recompute": True,
    "workers": 2,
}


def test_compute_settings_stay_out_of_the_manifest():
    """How a node computes is its own and in no manifest."""
    assert set(OWN_TRAINING) == set(OwnTraining.model_fields)
    agreed = {
        "optimizer": "adamw",
        "lr": 0.01,
        "weight_decay": 0.1,
        "schedule": "cosine",
        "warmup": 5,
        "clip": 1.0,
        "steps": 50,
    }
    agreed["seed"] = 5
    own = {f"train.{name}": value for name, value in OWN_TRAINING.items()}
    theirs = manifest(**own, **{f"train.{name}": value for name, value in agreed.items()})
    assert type(theirs.train) is TrainSettings
    assert theirs.train == TrainSettings(**agreed)
    plain = swarm_settings(load(None, {}), theirs)
    assert plain.train == TrainTable(**agreed)
    chosen = swarm_settings(load(None, {**own, "train.steps": 7}), theirs)
    assert chosen.train == TrainTable(**agreed | OWN_TRAINING | {"steps": 7})
    assert manifest(**own).train == manifest().train


def test_the_flags_of_a_table_make_the_same_table_again():
    for own in ({}, OWN_TRAINING, {"recompute": True}):
        context = cli.commands["join"].make_context(
            "join", ["shoal://x", *OwnTraining(**own).flags()]
        )
        assert load(None, overrides(context.params)).train == TrainTable(**own)


@pytest.mark.parametrize(
    ("key", "wanted", "had"),
    [
        ("outer.lr", 0.5, "outer.lr=1.0"),
        ("outer.method", "diloco", "outer.method='noloco'"),
        ("outer.every", 3, "outer.every=7"),
        ("outer.codec", "int8", "outer.codec='mod4'"),
        ("swarm.name", "x", "swarm.name='whales'"),
        ("swarm.start_when", 9, "swarm.start_when=1"),
        ("swarm.invite_only", True, "swarm.invite_only=False"),
        ("train.seed", 6, "train.seed=5"),
        ("train.eval_every", 6, "train.eval_every=0"),
        ("train.clip", 2.0, "train.clip=0.0"),
        ("train.schedule", "constant", "train.schedule='task'"),
        ("verify.audit_rate", 0.5, "verify.audit_rate=0.0"),
        ("task.options.width", 64, "task.options.width=32"),
        ("task.options.layers", 2, "no task.options.layers"),
    ],
)
def test_fixed_settings_are_refused_unless_equal(key, wanted, had):
    """What the manifest fixes is refused and named unless it is the same."""
    theirs = manifest(**{"outer.every": 7, "task.options": {"width": 32}, "swarm.name": "whales"})
    with pytest.raises(ConfigError) as caught:
        swarm_settings(load(None, {key: wanted, "train.steps": 3}), theirs)
    assert str(caught.value).startswith(
        f"The swarm has {had}, and this node was given {key}={wanted!r}: leave that out"
    )
    table, _, name = key.rpartition(".")
    if not had.startswith("no "):
        had_value = getattr(
            theirs if table == "swarm" else getattr(theirs, table.split(".")[0]), name, None
        )
        same = 32 if table == "task.options" else had_value
        assert swarm_settings(load(None, {key: same}), theirs)


@pytest.mark.parametrize(
    "asked",
    [
        {"outer.method": "streaming", "outer.fragments": 4},
        {
            "outer.method": "diloco",
            "outer.codec": "sign+ef",
            "outer.codec_back": "e3m0+ef",
            "swarm.public": True,
        },
        {"outer.method": "none", "outer.weights": "tokens"},
        {"task.options": {"data": "./folder", "width": 8}},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_a_creator_asked_for_fits_its_own_swarm(asked):
    """It resumes by the same command, whatever was made of its settings."""
    settings = load(None, {"task.hooks": "a/task.py:Mine"} | asked)
    sealed = new_manifest(for_new_swarm(settings), ME, "0" * 64, fragments=3)
    check_not_fixed(settings, open_manifest(sealed))


def test_fewer_fragments_than_the_swarms_are_refused():
    asked = {"outer.method": "streaming", "outer.fragments": 2}
    with pytest.raises(ConfigError, match=r"has outer\.fragments=3, .*given outer\.fragments=2"):
        check_not_fixed(load(None, asked), manifest(**asked | {"outer.fragments": 3}))


@pytest.mark.parametrize("named", ["./mine", "file.txt"])
def test_own_data_stand_in_where_the_swarm_names_none(named):
    own = options_of_member("task.py:Mine", {"width": 8}, {"data": named})
    assert own == {"width": 8, "data": named}
    assert options_of_member("task.py:Mine", {"data": "wiki"}, {"data": named})["data"] == "wiki"


def test_several_are_named_at_once():
    with pytest.raises(ConfigError, match=r"given outer\.lr=0\.5, swarm\.name='x': leave"):
        swarm_settings(load(None, {"outer.lr": 0.5, "swarm.name": "x"}), manifest())


def test_the_task_rl_asks_for_no_method():
    theirs = manifest(**{"task.hooks": "rl", "outer.method": "noloco"})
    assert swarm_settings(load(None, {"task.hooks": "rl"}), theirs).outer.method == "noloco"
    with pytest.raises(ConfigError, match=r"outer\.method='none'"):
        swarm_settings(load(None, {"task.hooks": "rl", "outer.method": "none"}), theirs)


@pytest.mark.parametrize(
    ("mine", "theirs", "sentence"),
    [
        (
            "text",
            "a/task.py:Mine",
            "The swarm trains 'task.py:Mine', and a link carries no code: get its files",
        ),
        (
            "b/task.py:Other",
            "a/task.py:Mine",
            "this node was given 'b/task.py:Other', a file that is not there: use the swarm's task",
        ),
        (
            "tests/node/runtime/test_join.py:Other",
            "a/task.py:Mine",
            "test_join.py:Other': use the swarm's task",
        ),
        ("b/task.py:Mine", "text", "The swarm trains 'text', this node was given 'b/task.py:Mine'"),
    ],
)
def test_another_task_than_the_swarms_is_named(mine, theirs, sentence):
    with pytest.raises(HookError, match=sentence.replace(".", r"\.")):
        swarm_settings(load(None, {"task.hooks": mine}), manifest(**{"task.hooks": theirs}))


def test_swarm_of_own_loops_has_no_task():
    """A swarm of own loops has no task that a node could run."""
    theirs = manifest().model_copy(update={"task": "own-loop"})
    with pytest.raises(HookError, match=r"join it with shoal\.join\(link, state=model\)"):
        swarm_settings(load(None, {}), theirs)


def test_the_same_task_may_lie_elsewhere():
    settings = swarm_settings(
        load(None, {"task.hooks": "b/task.py:Mine"}), manifest(**{"task.hooks": "a/task.py:Mine"})
    )
    assert settings.task.hooks == "b/task.py:Mine"


def test_newcomer_picks_its_shard_after_the_weights(monkeypatch):
    """A newcomer looks who holds which shard after it has taken over the weights.

    Its progress is steps, and bytes without gossip. The fault: a node that hung counted as alive,
    because it sent statuses.
    """
    traffic = TrafficMeter()
    traffic.sent, traffic.gossip_sent = 500, 400
    traffic.received, traffic.gossip_received = 70, 40
    view = {}  # of the directory, which another newcomer enters while this one downloads

    def download(*_, **__):
        view.update(members(0, 1, 2))

    class Dealt(Exception):
        pass

    def exchange(*_, **__):
        raise Dealt

    dealt = []
    node = TrainingNode.__new__(TrainingNode)
    node.options = SimpleNamespace(
        link=Link("a" * 52, (f"/ip4/1.1.1.1/tcp/1/p2p/{ME.peer_id}",)),
        display=SimpleNamespace(message=None),
    )
    node.settings, node.device = load(None, {}), None
    node._activity = SimpleNamespace(doing=lambda *_, **__: nullcontext(), progress=None)
    node._saved, node.metrics = None, SimpleNamespace(begin=lambda about: None)
    node._swarm_state, node._own_run = download, lambda: None
    directory = SimpleNamespace(refresh=lambda seconds: None, members=lambda: dict(view))
    node.membership = SimpleNamespace(
        host=SimpleNamespace(traffic=traffic, peer_id=ME.peer_id),
        directory=directory,
        manifest=manifest(),
        swarm="a" * 52,
    )
    for name in ("about", "model_digest", "make_screen", "TrainingMember"):
        monkeypatch.setattr(training_node, name, lambda *_, **__: None)
    monkeypatch.setattr(training_node, "make_exchange", exchange)
    monkeypatch.setattr(
        training_node,
        "choose_shard",
        lambda *given: dealt.append((len(given[2]), choose_shard(*given))),
    )
    whole = SimpleNamespace(fragments=1, lag=0, steps=9)
    node.trainer = SimpleNamespace(whole=whole, params=[], task=None)
    with pytest.raises(Dealt):
        node._build(None)
    assert dealt == [(3, Shard(3, 4, 5))]
    assert node._activity.progress() == (9, 100 + 30)


def test_least_used_shard_is_the_default():
    """The least used shard is taken unless one is asked for."""
    settings, swarm = load(None, {}), manifest()
    assert choose_shard(settings, swarm, members(0, 1, 3), ME.peer_id) == Shard(2, 4, 5)
    assert choose_shard(settings, swarm, members(0, 0, 1, 2, 2, 3, 3), ME.peer_id) == Shard(1, 4, 5)
    # The same number of shards, or it is another dealing.
    other = {m.peer: m for m in (member(2, 8), member(0), member(1), member(3))}
    assert choose_shard(settings, swarm, other, ME.peer_id) == Shard(2, 4, 5)
    asked = load(None, {"node.shard": "1/2"})
    assert choose_shard(asked, swarm, members(0, 1, 3), ME.peer_id) == Shard(1, 2, 5)


def test_lone_peers_choose_shards_by_identity():
    """With nobody else peers choose differently but each always the same."""
    settings, swarm = load(None, {}), manifest()
    peers = [Identity.ephemeral().peer_id for _ in range(40)]
    chosen = [choose_shard(settings, swarm, {}, peer).index for peer in peers]
    assert set(chosen) == {0, 1, 2, 3}
    assert chosen == [choose_shard(settings, swarm, {}, peer).index for peer in peers]


def test_own_lag_replaces_the_swarms():
    """A node's own lag is in no manifest and replaces the swarms."""
    swarms = {"outer.lag": "auto", "outer.fragments": 3}
    theirs = manifest(**swarms, **{"node.lag": 7})
    assert theirs.outer == manifest(**swarms).outer
    assert (theirs.outer.fragments, theirs.outer.lag) == (3, "auto")
    for own in (7, 0, "auto"):
        settings = with_own_lag(swarm_settings(load(None, {"node.lag": own}), theirs))
        assert settings.outer.knobs() == theirs.outer.knobs() | {"lag": own}
    unchanged = swarm_settings(load(None, {}), theirs)
    assert with_own_lag(unchanged) == unchanged
    # The first node's own trainer cuts the model as its manifest says, which blocks here.
    first = with_own_lag(load(None, {"outer.lag": 0, "node.lag": "auto"}))
    assert (first.outer.fragments, first.outer.lag) == (1, "auto")


@pytest.mark.parametrize(
    ("swarm", "words"),
    [
        (
            {"outer.every": 7, "outer.lag": "auto"},
            "a lag of 7 steps does not fit into a round of 7: choose a shorter lag",
        ),
        ({"outer.method": "diloco"}, "the method 'diloco' has no lag: leave it out"),
    ],
)
def test_misfit_own_lag_is_one_sentence(swarm, words):
    """An own lag that does not fit the swarm is one sentence."""
    settings = swarm_settings(load(None, {"node.lag": 7}), manifest(**swarm))
    with pytest.raises(
        ConfigError, match=rf"^The setting node\.lag=7 cannot be used in this swarm: {words}.*\.$"
    ):
        with_own_lag(settings)


@pytest.mark.parametrize(("text", "value"), [("7", 7), ("0", 0), ("auto", "auto")])
def test_the_flag_of_an_own_lag(text, value):
    for command, first in (("join", ["shoal://x"]), ("up", [])):
        context = cli.commands[command].make_context(command, [*first, "--lag", text])
        assert overrides(context.params) == {"node.lag": value}


def test_a_swarm_that_verifies_has_no_buckets():
    settings = load(None, {"swarm.bucket": 64, "verify.audit_rate": 0.1})
    with pytest.raises(
        ConfigError, match=r"swarm\.bucket and verify\.audit_rate do not go together"
    ):
        new_manifest(settings, ME, "0" * 64)


@pytest.mark.parametrize("hooks", ["my task.py:Mine", "aufgäbe.py:Mine", "task.py:Größe"])
def test_unstorable_task_name_is_one_sentence(hooks):
    """A task whose name no manifest can hold is one sentence."""
    with pytest.raises(
        ConfigError,
        match=r"^The task '.*' cannot be a swarm's: give its file a name of ASCII letters",
    ):
        manifest(**{"task.hooks": hooks})


@pytest.mark.parametrize(("theirs", "expected"), [("0", Shard(1, 2, 5)), ("z", Shard(0, 2, 5))])
def test_simultaneous_joiners_settle_their_shards(theirs, expected):
    """Before its first step a node settles its shard with those that came at the same moment."""
    other, view, said, connected = f"{theirs}ther", {}, [], []
    node = TrainingNode.__new__(TrainingNode)
    node.options = SimpleNamespace(display=SimpleNamespace(message=said.append))

    def refresh(seconds):
        view[other] = SimpleNamespace(peer=other, shard=0, shards=2, state="waiting")

    node.membership = SimpleNamespace(
        directory=SimpleNamespace(refresh=refresh, members=lambda: view), swarm="a" * 52
    )
    node.trainer = SimpleNamespace(
        connect=lambda exchange, run, shard: connected.append((exchange, run, shard))
    )
    node.member = SimpleNamespace(shard=Shard(0, 2, 5), exchange="its")
    setup = Setup(method="noloco", device="cpu", shard="0/2", params=1)
    node.result = SimpleNamespace(peer="me", setup=setup)
    node._settle(set())
    assert (node.member.shard, node.result.setup.shard) == (expected, f"{expected.index}/2")
    moved = expected.index == 1
    assert connected == [("its", "a" * 52, expected)] * moved
    assert (
        said
        == ["another node that came at the same moment has shard 0/2: this one takes 1/2"] * moved
    )


TINY = {"layers": 1, "width": 8, "heads": 2, "context": 8, "batch": 1}
WIDE = {"layers": 1, "width": 2048, "heads": 2, "context": 8, "batch": 1}  # 51,417,088 parameters


def door_manifest(options, digest=None, **fields):
    size = (
        {key: options[key] for key in ("layers", "width", "heads", "context")}
        if digest is None
        else None
    )
    digest = digest or model_digest(AveragedParameters.of(sized(**size)))
    made = open_manifest(new_manifest(load(None, {"task.options": options}), ME, digest))
    return made.model_copy(update=fields)


@pytest.mark.parametrize("size", [(1, 8, 2, 8, 256), (3, 24, 4, 9, 301)])
def test_the_size_is_that_of_the_model_that_is_made(size):
    made, small = GPT(*size), sized(*size)
    assert model_digest(AveragedParameters.of(small)) == model_digest(AveragedParameters.of(made))
    assert list(small.state_dict()) == list(made.state_dict())
    assert all(parameter.is_meta for parameter in small.parameters())
    *outline, vocabulary = size
    counted = sum(p.numel() for p in made.parameters())
    assert TextSize(*outline).parameter_count(vocabulary) == counted


def test_task_setup_passes_no_model(monkeypatch):
    """Entering gives settings and a task, and no model."""
    monkeypatch.setattr(GPT, "__init__", None)  # a model of any size would end this test
    monkeypatch.setattr(task_setup, "check_size", lambda *arguments, **options: None)
    settings, task = enter(load(None, {"node.data": "mine"}), door_manifest(TINY, "0" * 64))
    assert (settings.task.options, task.data, task.size.width) == (TINY, "mine", 8)


def test_a_model_with_another_digest_than_the_manifests_is_refused():
    assert enter(load(), door_manifest(TINY))[1].size.width == 8
    with pytest.raises(ModelDiffersError, match="does not fit the swarm"):
        enter(load(), door_manifest(TINY, "1" * 64))


def test_foreign_model_is_refused_and_own_one_warned_of(monkeypatch):
    """A stranger's model is refused where one's own is only warned of."""
    monkeypatch.setattr(resources, "free_memory", lambda: (1.0 * GB, 8.0 * GB))
    monkeypatch.setattr(resources, "held", lambda: 100_000_000)
    with pytest.raises(
        MemoryBudgetError,
        match=r"about 1\.\d+ GB of memory .* 51,\d+,\d+ parameters and can have 1\.10: end",
    ):
        enter(load(), door_manifest(WIDE))
    assert enter(load(), door_manifest(WIDE), trains=False)
    assert enter(load(None, {"node.ram": 4.0}), door_manifest(WIDE)), "the user allows it"
    with pytest.raises(MemoryBudgetError, match=r"and --ram allows 0\.5: allow more"):
        enter(load(None, {"node.ram": 0.5}), door_manifest(WIDE))
    logged = []
    own = load(None, {"task.options": WIDE})
    check_size(task_setup.make_task(own), own, "cpu", logged.append)
    assert len(logged) == 1
    assert "so the system may end it" in logged[0]


@pytest.mark.parametrize(
    ("options", "needs"),
    [({"batch": 2**16, "context": 2**12}, "batch 5"), ({"shuffle": 2**28}, "batch 1.07")],
)
def test_batches_and_blocks_of_a_manifest_count_too(options, needs, monkeypatch):
    monkeypatch.setattr(resources, "free_memory", lambda: (1.0 * GB, 8.0 * GB))
    with pytest.raises(MemoryBudgetError, match=needs):
        enter(load(), door_manifest({**TINY, **options}))


def test_model_leaves_main_memory_first_on_a_gpu(monkeypatch):
    """On a GPU the model leaves main memory before the rest is made."""
    monkeypatch.setattr(resources, "free_memory", lambda: (4e12, 4e12))
    monkeypatch.setattr(resources, "held", lambda: 0)
    params = [torch.empty(250_000_000, device="meta")]
    with pytest.raises(MemoryBudgetError, match=r"about 1\.00 GB of memory .*model"):
        resources.check(0.1, params, method="none", slow_here=False, device="cuda")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "../x"}, r"swarm\.name"),
        ({"shards": 2**53}, r"swarm\.shards"),
        ({"bucket": 3}, r"swarm\.bucket"),
    ],
)
def test_what_no_node_can_have_is_refused(fields, said):
    with pytest.raises(
        ConfigError,
        match=rf"^The swarm's manifest has a {said} that no node can have \(.*\): join another "
        r"swarm\.$",
    ):
        swarm_settings(load(), door_manifest(TINY, **fields))


def rl(env):
    return open_manifest(
        new_manifest(load(None, {"task.hooks": "rl", "rl.env": env}), ME, "0" * 64)
    )


def test_checkpoint_resumes_with_the_named_code():
    """A checkpoint of one's own code goes on with the code that is named."""
    theirs = rl("somewhere/add_env.py:Add")
    with pytest.raises(
        HookError,
        match=r"learns 'add_env\.py:Add', and a checkpoint carries no code: .* with --env\.$",
    ):
        continued(load(), theirs)
    assert (
        continued(load(None, {"rl.env": "mine/add_env.py:Add"}), theirs).rl.env
        == "mine/add_env.py:Add"
    )
    assert continued(load(None, {"rl.env": "strings"}), theirs).rl.env == "strings", (
        "a new swarm may learn something else"
    )
    assert continued(load(), rl("sapo9")).rl.env == "sapo9"
    made = continued(
        load(None, {"task.hooks": "a/task.py:Mine"}),
        door_manifest(TINY, "0" * 64, task="task.py:Mine"),
    )
    assert made.task.hooks == "a/task.py:Mine"
    with pytest.raises(
        HookError,
        match=r"trains 'task\.py:Mine', and a checkpoint carries no code: .* with --task\.$",
    ):
        continued(load(), door_manifest(TINY, "0" * 64, task="task.py:Mine"))


@pytest.mark.parametrize("policy", ["tiny:copy:60", "hf:/models/mine"])
def test_policy_name_is_local_and_sampling_the_swarms(policy):
    """A policy has its own name here and its sampling is the swarms."""
    terms = Terms(policy="tiny", base="0" * 64, group=4, temperature=1.0, max_tokens=8)
    settings = load(None, {"task.hooks": "rl", "verify.audit_rate": 1.0})
    theirs = open_manifest(new_manifest(settings, ME, "0" * 64, terms))
    found = swarm_settings(load(None, {"rl.policy": policy}), theirs).rl
    assert (found.policy, found.group, found.max_tokens) == (policy, 4, 8)
    with pytest.raises(
        ConfigError, match=r"^The swarm has rl\.group=4, and this node was given rl\.group=8: "
    ):
        swarm_settings(load(None, {"rl.policy": policy, "rl.group": 8}), theirs)


def test_settings_with_any_character_are_read_back(tmp_path):
    """Fault: a demo in a folder with an emoji in its name: "swarm.toml is not TOML"."""
    data = '/runs/\U0001f41f \x7f\t"q\\\\é'
    file = tmp_path / "swarm.toml"
    file.write_text(settings_toml(load(None, {"task.options.data": data})), encoding="utf-8")
    assert load(file).task.options["data"] == data
