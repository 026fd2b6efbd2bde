"""The table of methods is complete and correct, and config_diff tells any two optimizers of it
apart, by every knob.
"""

import importlib
import inspect
import pkgutil

import pytest
import torch

from shoal import optim
from shoal.optim import (
    INT8,
    METHODS,
    Alone,
    DiLoCo,
    NoLoCo,
    OuterOptimizer,
    Seconds,
    Stepped,
    Tokens,
    by_tokens,
    codec_named,
    config_diff,
    experimental,
    method_named,
    methods_with,
    public,
    rules,
)
from shoal.optim.methods import DEFAULT_LAG, methods_of
from shoal.optim.rules.gossip import GossipOptimizer
from shoal.optim.schedule.schedules import Delayed, Streaming

SIGN, BF16 = codec_named("sign"), codec_named("bfloat16")


def pieces():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(24)))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def test_every_method_is_a_class_in_the_table():
    classes = set()
    for folder in (experimental, rules):
        for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            classes |= {
                value
                for value in vars(importlib.import_module(module.name)).values()
                if inspect.isclass(value) and issubclass(value, OuterOptimizer)
            }
    abstract = {OuterOptimizer, GossipOptimizer}
    assert classes - abstract == {method.optimizer for method in METHODS.values()}


def test_public_names_are_those_of_the_package():
    """Mutant: a rule's name is left out of ``__all__`` or of ``public``."""
    defined = {name for name in vars(public) if not name.startswith("_")}
    assert defined == set(optim.__all__)


def test_experiments_stand_below_the_others():
    names = list(METHODS)
    assert names[-4:] == ["gasloc", "decoupled", "eager", "sparta"]
    assert [method.experimental for method in METHODS.values()] == [False] * 8 + [True] * 4
    assert "gasloc" in methods_of("pair")
    assert methods_of("pair", experimental=False) == ["noloco", "local"]
    assert methods_of("pair", experimental=True) == ["gasloc"]


@pytest.mark.parametrize("name", METHODS)
def test_its_row_says_how_it_is_scheduled(name):
    model, inner = pieces()
    method = method_named(name)
    made = method.make(inner, Alone(), model=model).schedule
    assert method.schedule == (
        "overlaps"
        if isinstance(made, Streaming)
        else "delayed"
        if isinstance(made, Delayed)
        else "waits"
    )
    assert (
        (method.schedule == "overlaps") == ("lag" in method.knobs) == ("fragments" in method.knobs)
    )


@pytest.mark.parametrize("name", METHODS)
def test_its_row_says_what_its_rule_and_codec_remember(name):
    """In times the slow weights: `shoal.node.training.resources` sums the memory of a node by it,
    before there is a state.
    """
    model, inner = pieces()
    method = method_named(name)
    opt = method.make(inner, Alone(), model=model)
    remembered = sum(
        tensor.numel() for tensors in opt.rule_state.values() for tensor in tensors if tensor.ndim
    )
    residual = codec_named(method.codec).name.partition("+")[1] == "+"
    assert method.memory.state == remembered / sum(slow.numel() for slow in opt.slow) + residual


def test_an_optimizer_is_of_the_class_that_made_it():
    class Half(NoLoCo):
        """A method of one's own."""

        def __init__(self, inner, exchange, **options):
            super().__init__(inner, exchange, lr=0.5, **options)

    model, inner = pieces()
    opt = Half(inner, Alone(), every=7, model=model)
    assert isinstance(opt, NoLoCo)
    assert isinstance(opt, torch.optim.Optimizer)
    assert (opt.rule.lr, opt.schedule.every) == (0.5, 7)
    assert repr(opt).startswith("Half (")
    assert isinstance(method_named("sparseloco").make(inner, Alone()), DiLoCo)
    assert not method_named("diloco-hb").make(inner, Alone()).rule.nesterov


@pytest.mark.parametrize("name", METHODS)
def test_what_it_sends_is_what_its_factory_lets_through(name):
    model, inner = pieces()
    method = method_named(name)
    method.check_codec(BF16)
    if method.sends == "displacement":
        method.check_codec(SIGN)
        assert method.make(inner, Alone(), codec=SIGN, model=model).codec is SIGN
        return
    for refused in (
        method.check_codec,
        lambda codec: method.make(inner, Alone(), codec=codec, model=model),
    ):
        with pytest.raises(
            ValueError, match="sends whole weights, of which the codec sign loses too much"
        ):
            refused(SIGN)


@pytest.mark.parametrize("name", METHODS)
def test_its_own_codec_is_the_one_it_uses(name):
    model, inner = pieces()
    method = method_named(name)
    opt = method.make(inner, Alone(), model=model)
    assert opt.codec.name == (
        "float32" if method.group == "pair" else method.codec
    )  # mod4 needs an exchange of pairs
    assert codec_named(method.codec).name == method.codec
    again = method.make(inner, Alone(), model=model).codec
    assert opt.codec is not again or opt.codec.fresh() is opt.codec  # a memory is nobody else's


def test_knobs_are_those_of_the_factories():
    assert method_named("noloco").knobs == {
        "every": 25,
        "lr": 1.0,
        "momentum": 0.3,
        "pull": None,
        "fragments": None,
        "lag": DEFAULT_LAG,
    }
    assert method_named("diloco").knobs == {
        "every": 500,
        "lr": 0.7,
        "momentum": 0.6,
        "nesterov": True,
    }
    assert method_named("sparseloco").knobs == {"every": 30, "lr": 1.0}
    assert "nesterov" not in method_named("diloco-hb").knobs
    assert methods_with("pull") == ["noloco"]
    assert methods_with("lag") == ["noloco", "local", "streaming", "gasloc", "decoupled"]
    assert methods_with("every") == list(METHODS)


def test_an_unknown_name():
    with pytest.raises(ValueError, match="unknown method 'dilco': choose one of noloco, local, "):
        method_named("dilco")


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if method.group == "everyone"]
)
def test_the_codec_of_pairs_is_refused_where_groups_are_larger(name):
    with pytest.raises(
        ValueError,
        match="mod4 is for pairs that read each other by their own weights, not for groups",
    ):
        method_named(name).check_codec(codec_named("mod4"))


OTHER = {
    "every": 6,
    "lr": 0.31,
    "momentum": 0.21,
    "pull": 0.11,
    "fragments": 2,
    "lag": 3,
    "mix": 0.75,
    "penalty": 1.5,
    "clip": 0.9,
    "part": 0.5,
    "keep": True,
    "nesterov": False,
    "phase": "apply",
}
NEEDED = {"phase": {"lag": 3}}
"""What a knob's other value needs besides."""


@pytest.fixture
def module():
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)
    )


def made(method, module, **options):
    return METHODS[method].make(Stepped(module.parameters()), Alone(), model=module, **options)


@pytest.mark.parametrize("method", METHODS)
def test_every_setting_makes_a_difference(method, module):
    """The same settings make no difference and every knob makes one."""
    twin = made(method, module, slow_device="meta")
    assert all(tensor.is_meta for tensor in twin.slow)
    assert config_diff(made(method, module), twin) is None
    for knob in METHODS[method].knobs:
        if (
            knob == "lag"
        ):  # each peer may have its own, as long as it sends the same fragments at the same steps
            for lag in (0, 3, "auto"):
                assert (
                    config_diff(made(method, module, fragments=twin.fragments, lag=lag), twin)
                    is None
                )
            continue
        other = made(method, module, **{knob: OTHER[knob]}, **NEEDED.get(knob, {}))
        assert config_diff(other, twin) is not None, knob


def test_what_is_sent_ahead_has_one_lag(module):
    """With another lag it would be sent at other steps, unlike what is applied later."""
    ahead = [made("streaming", module, phase="apply", lag=lag) for lag in (2, 2, 3)]
    assert config_diff(ahead[0], ahead[1]) is None
    assert config_diff(ahead[0], ahead[2]) == "lag is 2 and not 3"


def test_methods_codecs_weights_lengths_and_buffers_are_distinguished(module):
    twin = made("diloco", module)
    others = {
        "it is NoLoCo and not DiLoCo": made("noloco", module),
        "the codec is int8 and not float32": made("diloco", module, codec=INT8),
        "the weight is by_tokens and not equal": made("diloco", module, weight=by_tokens),
        "the round is Tokens 100 and not Steps": made("diloco", module, length=Tokens(100)),
        "the number of averaged buffers is 2 and not 0": made("diloco", module, buffers="average"),
    }
    assert {config_diff(opt, twin) for opt in others.values()} == set(others)
    auto = [made("diloco", module, length=Seconds(lambda: 3.0, lambda: 0.0)) for _ in range(2)]
    assert config_diff(*auto) is None


def test_a_loop_that_steps_elsewhere_takes_the_outer_part_only(module):
    twins = [
        module,
        torch.nn.Sequential(
            *(type(m)(*a) for m, a in ((module[0], (4, 6)), (module[1], (6,)), (module[2], (6, 1))))
        ),
    ]
    twins[1].load_state_dict(module.state_dict())
    wrapped = NoLoCo(torch.optim.SGD(twins[0].parameters(), lr=0.1), Alone(), every=3, lag=0)
    inner = torch.optim.SGD(twins[1].parameters(), lr=0.1)
    outer = NoLoCo(Stepped(twins[1].parameters()), Alone(), every=3, lag=0)
    data = torch.randn(7, 5, 4, generator=torch.Generator().manual_seed(0))
    for x in data:
        for one in twins:
            one(x).square().mean().backward()
        wrapped.step()
        wrapped.zero_grad()
        inner.step()
        outer.step()
        inner.zero_grad()
    assert (wrapped.steps, wrapped.round) == (outer.steps, outer.round) == (7, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(twins[0].parameters(), twins[1].parameters(), strict=True)
    )
    assert Stepped(module.parameters()).step(lambda: 2.0) == 2.0


def test_an_exchange_that_wants_its_optimizer_is_given_it(module):
    class Curious(Alone):
        def attach(self, optimizer):
            self.rounds = optimizer.round

    exchange = Curious()
    DiLoCo(torch.optim.SGD(module.parameters(), lr=0.1), exchange, every=3)
    assert exchange.rounds == 0
