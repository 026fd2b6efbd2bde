"""Every method from its settings: defaults are the method's own, and each trains through the node's
trainer.
"""

import re
import typing
from pathlib import Path

import pytest
import torch

from shoal.node.checkpoint import store as checkpoint
from shoal.node.cli.main import demo, up
from shoal.node.config.settings import ConfigError, load
from shoal.node.task import Shard, Task
from shoal.node.training.trainer import Trainer
from shoal.optim import (
    METHODS,
    Alone,
    Mean,
    NoLoCoRule,
    Simulation,
    by_rate,
    by_tokens,
    codec_named,
    equal,
    method_named,
    methods_with,
)
from shoal.optim.codecs.buffer_tail import BufferTailCodec
from shoal.optim.exchange.base import Exchange, Handle
from shoal.swarm.errors import OuterError
from shoal.swarm.settings.outer import KNOBS, OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.training.factories import make_outer
from shoal.swarm.wire.messages import Offer
from tests.support.blocking import blocking

PAGE = Path(__file__).resolve().parents[3] / "docs" / "methods.md"
EVERY, PEERS = 4, ["0", "1"]
VALUES = {
    "every": 6, "lr": 0.31, "momentum": 0.21, "fragments": 2, "lag": 3,
}  # fmt: skip
EVERYONE = [name for name, method in METHODS.items() if method.group == "everyone"]


class Layers(Task):
    """Three layers with BatchNorm, a target of each shard's own."""

    def model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)
        )

    def batches(self, shard):
        generator = torch.Generator().manual_seed(shard.index)
        while True:
            yield ["no tensor", {"x": torch.randn(8, 4, generator=generator)}]

    def loss(self, model, batch):
        return (model(batch[1]["x"]) - batch[1]["x"].sum(1, keepdim=True)).square().mean()

    @torch.no_grad()
    def evaluate(self, model):
        return float(sum(p.double().square().sum() for p in model.parameters()))

    def inner_optimizer(self, params):
        return torch.optim.SGD(params, lr=0.05)


def made(settings):
    task = Layers()
    model = task.model()
    return make_outer(
        settings,
        task.inner_optimizer(model.parameters()),
        Alone(),
        model=model,
        slow_device=torch.device("cpu"),
        on_round=None,
    )


def test_settings_know_every_method_and_knob():
    """The settings know every method and every knob is some methods."""
    assert typing.get_args(OuterSettings.model_fields["method"].annotation) == tuple(METHODS)
    assert all(methods_with(knob) for knob in KNOBS)
    # What a factory has beyond these is not for a settings file: DiLoCo's two forms have names, the
    # rest of CO2 is for experiments.
    assert {knob for method in METHODS.values() for knob in method.knobs} == {
        *KNOBS, "nesterov", "keep", "penalty", "clip", "pull", "mix", "part",
        "phase",
    }  # fmt: skip
    assert set(VALUES) == set(KNOBS)


@pytest.mark.parametrize("command", [up, demo])
def test_the_help_names_every_method(command):
    (option,) = [option for option in command.params if option.name == "outer.method"]
    words = re.findall(r"[a-z0-9-]+", option.help)
    assert [name for name in METHODS if name not in words] == []


def test_docs_table_has_every_method():
    """The table in the docs has every method with whom it meets."""
    who = {"a partner": "pair", "everyone": "everyone", "no peer": "nobody"}
    rows = re.findall(
        rf"^\| `([a-z0-9-]+)` \| ({'|'.join(who)}) \|", PAGE.read_text(encoding="utf-8"), re.M
    )
    assert {name: who[group] for name, group in rows} == {
        name: method.group for name, method in METHODS.items()
    }


@pytest.mark.parametrize("name", METHODS)
def test_settings_not_given_are_the_methods_own(name):
    torch.manual_seed(0)
    ours = made(OuterSettings(method=name))
    torch.manual_seed(0)
    task = Layers()
    model = task.model()
    overlap = OuterSettings(
        method=name
    ).overlap()  # what a swarm begins with may differ from what a loop of one's own does
    theirs = method_named(name).make(
        task.inner_optimizer(model.parameters()), Alone(), model=model, **overlap
    )
    written = OuterSettings(method=name).resolved().model_dump_json()  # as in a manifest
    resolved = made(OuterSettings.model_validate_json(written))
    for opt in (ours, resolved):
        assert (opt.rule, opt.schedule, opt.weight) == (theirs.rule, theirs.schedule, theirs.weight)
        assert opt.codec.name == method_named(name).codec


@pytest.mark.parametrize("name", METHODS)
def test_knobs_reach_rule_and_schedule(name):
    """Knobs come through the manifest to the rule and the schedule."""
    knobs = {knob: VALUES[knob] for knob in KNOBS if knob in method_named(name).knobs}
    settings = OuterSettings.model_validate({"method": name, **knobs})
    assert OuterSettings.model_validate_json(settings.resolved().model_dump_json()).knobs() == knobs
    opt = made(settings)
    rule, schedule = vars(opt.rule), vars(opt.schedule)
    for knob, value in knobs.items():
        assert value == {**rule, **schedule}[knob], knob


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("knob", KNOBS)
def test_a_knob_of_other_methods_is_refused_by_name(name, knob):
    if knob in method_named(name).knobs:
        return
    with pytest.raises(
        ValueError,
        match=f"the method '{name}' has no {knob}: leave it out, or choose one that has it ",
    ):
        OuterSettings.model_validate({"method": name, knob: VALUES[knob]})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"method": "noloco", "codec_back": "sign+ef"},
            "the method 'noloco' does not average over everyone, so nothing is sent back: leave "
            "out codec_back",
        ),
        (
            {"method": "diloco", "codec": "sign+ef", "robust": "distance"},
            "a robust rule needs whole contributions, of which no averages are sent back: leave "
            "out codec_back, or robust",
        ),
        (
            {"method": "sparseloco"},
            "averages cannot be sent back by a codec of their own where contributions are sent by "
            "topk2: choose sign.ef, e3m0.ef, int8.ef",
        ),
        ({"method": "diloco"}, "only where contributions have error feedback: choose float32.ef"),
        (
            {"method": "diloco", "codec": "sign+ef", "codec_back": "sign"},
            "averages sent back by sign would lose what it leaves out for good: choose sign.ef",
        ),
        (
            {"method": "diloco", "codec": "sign+ef,back=sign+ef"},
            "the codec of averages is a setting of its own: outer.codec_back",
        ),
    ],
)
def test_a_codec_of_averages_that_does_not_fit_is_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        OuterSettings.model_validate({"codec_back": "sign+ef", **settings})


def test_averages_come_back_by_the_codec_of_the_settings():
    settings = OuterSettings(method="streaming", codec="sign+ef", codec_back="e3m0+ef", every=8)
    assert made(settings.resolved()).codec.name == "sign+ef,back=e3m0+ef"
    assert made(settings.model_copy(update={"codec_back": ""})).codec.name == "sign+ef"
    public = settings.guarded()
    assert (public.robust, public.codec_back) == ("centered-clip", None)


@pytest.mark.parametrize(
    "name",
    ["float32", "topk2+ef:0.95", "auto:2.5+ef:0.999", "sign+ef:0.999,back=auto:2.5+ef:0.999"],
)
def test_a_codecs_name_fits_the_wire_also_with_buffers(name):
    (pattern,) = [
        bound.pattern
        for bound in Offer.model_fields["codec"].metadata
        if getattr(bound, "pattern", None)
    ]
    codec = codec_named(name)
    assert re.fullmatch(pattern, codec.name)
    assert re.fullmatch(pattern, BufferTailCodec(codec, 1000).name)


def test_weights_are_the_methods_own_unless_asked_for():
    assert made(OuterSettings()).weight is equal
    assert made(OuterSettings(method="decoupled")).weight is by_rate
    assert made(OuterSettings(method="decoupled", weights="equal")).weight is equal
    assert made(OuterSettings(method="diloco", weights="tokens")).weight is by_tokens
    assert made(OuterSettings(weights="equal")).rule == NoLoCoRule()  # one tensor travels, not two


@pytest.mark.parametrize("finish", ["none", "average"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_two_rounds_between_two_peers(name, finish):
    def peer(exchange):
        settings = OuterSettings.model_validate(
            {"method": name, "every": EVERY, "finish": finish, "buffers": "average"}
        )
        infos = []
        trainer = Trainer(
            Layers(), settings, TrainSettings(steps=2 * EVERY, seed=1), on_round=infos.append
        )
        trainer.connect(exchange, "run", Shard(int(exchange.peer), 2, 1))
        first = trainer.evaluate()
        trainer.run()
        if finish == "average" and name != "none":
            trainer.opt.finish(average=True)
        return trainer, infos, first

    found = Simulation(PEERS).run(peer)
    (one, infos, first), (other, _, _) = found["0"], found["1"]
    assert one.evaluate() != first
    assert all(tensor.isfinite().all() for tensor in one.opt.slow)
    met = [info for info in infos if info.members == ("0", "1")]
    assert len(met) == len(infos) if name != "none" else not met
    assert infos
    assert one.opt.tokens == 2 * EVERY * 32
    if finish == "average" and name != "none":
        for mine, theirs in zip(
            one.model.state_dict().values(), other.model.state_dict().values(), strict=True
        ):
            assert torch.equal(mine, theirs)
        assert one.round_loss() is not None


class Echo(Exchange):
    """A group of one that gets back what the codec made of its own."""

    def start(self, mine):
        shapes = [tuple(tensor.shape) for tensor in mine.tensors]
        mean = Mean(
            mine.codec.decode(mine.codec.encode(mine.tensors), shapes), mine.weight, ("me",)
        )
        return type(
            "Ready",
            (Handle,),
            {"done": lambda self: True, "result": lambda self, deadline=None: mean},
        )()


@pytest.mark.parametrize("saved_at", [6, 7])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_goes_on_from_a_checkpoint(name, saved_at, tmp_path):
    codec = "auto:2+ef" if method_named(name).sends == "displacement" else "int8"

    def trainer():
        made = Trainer(
            Layers(),
            blocking(method=name, every=EVERY, codec=codec),
            TrainSettings(steps=12, seed=1),
        )
        made.connect(Echo(), "run", Shard(0, 2, 1))
        return made

    whole = trainer()
    for _ in range(saved_at):
        whole.step()
    checkpoint.save(tmp_path, saved_at, whole.state())
    whole.run()
    again = trainer()
    again.resume(checkpoint.load(tmp_path)[1])
    again.run()
    assert again.opt.steps == whole.opt.steps == 12
    if method_named(name).slow:  # something was in flight, and is sent again
        assert all(tensor.isfinite().all() for tensor in again.opt.slow)
    else:
        for mine, theirs in zip(
            [*again.opt.slow, *again.params], [*whole.opt.slow, *whole.params], strict=True
        ):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", METHODS)
def test_evaluation_may_use_the_slow_weights(name):
    """Evaluation is with the slow weights where the method says so."""
    torch.manual_seed(0)
    trainer = Trainer(Layers(), OuterSettings(method=name, every=EVERY), TrainSettings(seed=1))
    trainer.connect(Alone(), "run", Shard(0, 2, 1))
    for _ in range(EVERY + 2):
        trainer.step()
    slow = float(sum(t.double().square().sum() for t in trainer.opt.slow))
    fast = Layers().evaluate(trainer.model)
    assert abs(slow - fast) > 1e-6
    assert trainer.evaluate() == pytest.approx(slow if method_named(name).slow else fast, abs=1e-9)
    assert Layers().evaluate(trainer.model) == fast


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"method": "streaming", "every": 4, "lag": 4},
            r"a lag of 4 steps does not fit into a round of 4: choose a shorter lag",
        ),
        ({"method": "noloco", "lag": 50}, r"a lag of 50 steps does not fit into a round of 25"),
        (
            {"method": "decoupled", "every": 2, "fragments": 3},
            r"a round of 2 steps has no room for 3 fragments: choose fewer",
        ),
        (
            {"lag": "never"},
            r"outer\.lag='never' cannot be used: it should be auto, or a whole number from 0 to "
            r"1000000",
        ),
        (
            {"method": "diloco", "lag": 3},
            r"the method 'diloco' has no lag: leave it out, or choose one that has it \(noloco, "
            r"local,",
        ),
        ({"method": "none", "lag": 0}, r"the method 'none' has no lag"),
    ],
)
def test_what_does_not_go_together_is_said_in_one_sentence(settings, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load(None, {f"outer.{name}": value for name, value in settings.items()})
    assert str(caught.value).count("\n") == 0
    assert str(caught.value).endswith(".")


def test_model_dependent_errors_are_one_sentence():
    """What shows only with the model is said in one sentence."""
    with pytest.raises(OuterError, match=r"^The outer settings cannot be used for 'noloco': .*\.$"):
        made(OuterSettings().model_copy(update={"lag": -1}))


def test_there_are_never_more_fragments_than_layers():
    assert made(OuterSettings(method="decoupled")).fragments == 3
    assert made(OuterSettings(method="streaming", fragments=2)).fragments == 2
