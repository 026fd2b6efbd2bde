"""Differences of two outer optimizers for every method and every knob; and an inner one stepped by a library."""

import pytest
import torch

from shoal.optim import INT8, METHODS, Alone, DiLoCo, NoLoCo, Seconds, Stepped, Tokens, by_tokens, config_diff

OTHER = {
    "every": 6, "lr": 0.31, "momentum": 0.21, "pull": 0.11, "fragments": 2, "lag": 3, "mix": 0.75, "penalty": 1.5, "clip": 0.9,
    "part": 0.5, "keep": True, "nesterov": False,
}  # fmt: skip


@pytest.fixture
def module():
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))


def made(method, module, **options):
    return METHODS[method].make(Stepped(module.parameters()), Alone(), model=module, **options)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_settings_make_no_difference_and_every_knob_makes_one(method, module):
    twin = made(method, module, slow_device="meta")
    assert all(tensor.is_meta for tensor in twin.slow)
    assert config_diff(made(method, module), twin) is None
    for knob in METHODS[method].knobs:
        if knob == "lag":  # each peer may have its own, as long as it sends the same fragments at the same steps
            for lag in (0, 3, "auto"):
                assert config_diff(made(method, module, fragments=twin.fragments, lag=lag), twin) is None
            continue
        assert config_diff(made(method, module, **{knob: OTHER[knob]}), twin) is not None, knob


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
    twins = [module, torch.nn.Sequential(*(type(m)(*a) for m, a in ((module[0], (4, 6)), (module[1], (6,)), (module[2], (6, 1)))))]
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
    assert all(torch.equal(a, b) for a, b in zip(twins[0].parameters(), twins[1].parameters(), strict=True))
    assert Stepped(module.parameters()).step(lambda: 2.0) == 2.0


def test_an_exchange_that_wants_its_optimizer_is_given_it(module):
    class Curious(Alone):
        def attach(self, optimizer):
            self.rounds = optimizer.round

    exchange = Curious()
    DiLoCo(torch.optim.SGD(module.parameters(), lr=0.1), exchange, every=3)
    assert exchange.rounds == 0
