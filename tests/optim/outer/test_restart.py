"""Weights that change behind the outer optimizer: begun from anew when it is asked to, and else
said, once.
"""

import re
import warnings

import pytest
import torch

from shoal.optim import METHODS, Alone, DiLoCo, NoLoCo, Simulation, Stepped, method_named
from tests.support.outer_training import model, same, train

KNOBS = {
    "noloco": {"every": 6, "fragments": 2, "lag": 2},
    "gasloc": {"every": 6, "fragments": 2, "lag": 2},
    "local": {"every": 6, "lag": 0},
    "sparta": {"every": 3, "part": 0.2},
    "diloco": {"every": 6},
    "diloco-hb": {"every": 6},
    "streaming": {"every": 6, "fragments": 2, "lag": 2},
    "sparseloco": {"every": 6},
    "decoupled": {"every": 6, "fragments": 2, "lag": 2},
    "co2": {"every": 6},
    "eager": {"every": 6},
}


def test_all_methods_that_exchange_are_restarted():
    assert set(KNOBS) == set(METHODS) - {"none"}


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05)


def held(net, opt):
    tensors = [
        *opt.slow,
        *net.parameters(),
        *(t for name in sorted(opt.rule_state) for t in opt.rule_state[name]),
    ]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.thinned(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["memory", "files"])
@pytest.mark.parametrize("name", KNOBS)
def test_restart_equals_a_new_optimizer(name, place, dtype, tmp_path, recwarn):
    """Mutants: momentum, start, an eager part, a codec's residual, a rounding error or a mean in
    flight is left of before.
    """
    if (place, dtype) == ("files", torch.bfloat16):
        dtype = torch.float64
    options = {**KNOBS[name], "slow_device": tmp_path if place == "files" else "cpu"}

    def peer(exchange, rounds=None):
        net = model(dtype=dtype)
        opt = method_named(name).make(sgd(net), exchange, model=net, **options)
        seed = 1000 * (1 + ord(exchange.peer))
        if rounds is None:
            train(net, opt, 24, first=seed)
            overlaps = options.get("lag", 0) > 0 or name in ("co2", "eager")
            assert any(opt.in_flight(part) for part in range(opt.fragments)) is overlaps
            net.load_state_dict(model(5, dtype).state_dict())
            opt.restart_from_model()
        else:
            net.load_state_dict(model(5, dtype).state_dict())
            opt = method_named(name).make(sgd(net), exchange, model=net, **options)
            opt.round = rounds
        begun, round = held(net, opt), opt.round
        train(net, opt, 24, first=500 + seed)
        return begun, held(net, opt), round

    found = Simulation(["a", "b"]).run(peer)
    wanted = Simulation(["a", "b"]).run(lambda exchange: peer(exchange, found["a"][2]))
    for one, other in zip(found.values(), wanted.values(), strict=True):
        assert same(one[0], other[0])
        assert same(one[1], other[1])
    assert not [str(w.message) for w in recwarn if "changed outside" in str(w.message)]


def test_restart_is_refused_within_averaged():
    """A restart within averaged is refused and before any step it is a new one."""
    net = model()
    opt = DiLoCo(sgd(net), Alone(), every=2)
    with (
        opt.averaged(),
        pytest.raises(
            RuntimeError, match=r"restart_from_model\(\) within averaged\(\) would be lost"
        ),
    ):
        opt.restart_from_model()
    net.load_state_dict(model(5).state_dict())
    opt.restart_from_model()
    assert same(opt.slow, list(model(5).parameters()))


def load(net):
    net.load_state_dict(model(5).state_dict())


@pytest.mark.parametrize("then", ["step", "averaged", "finish", "adopt"])
def test_outside_change_is_reported_once(then):
    """A change outside a step is said once with the remedy."""
    net = model()
    opt = NoLoCo(sgd(net), Alone(), every=2, lag=0)
    train(net, opt, 3)
    load(net)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if then == "step":
            opt.step()
        elif then == "averaged":
            with opt.averaged():
                pass
        elif then == "finish":
            opt.finish()
        else:
            opt.adopt([t.clone() for t in opt.slow], round=opt.round)
        for _ in range(5):
            load(net)
            train(net, opt, 1, first=3)
    said = [str(one.message) for one in found]
    assert len(said) == 1
    assert re.search(
        r"changed outside step\(\) \(4 of 4 tensors\).* call opt.restart_from_model\(\)", said[0]
    )


def test_legitimate_changes_are_not_reported(recwarn):
    """Mutant: its own writing (a round, averaged, adopt, finish, loaded state) or equal weights
    copied before step 1 count.
    """
    net = model()
    opt = NoLoCo(sgd(net), Alone(), every=2, lag=0)
    load(net)
    net.load_state_dict(
        model(0).state_dict()
    )  # as DDP does, which sends rank 0's weights, equal ones, to all
    train(net, opt, 3)
    with opt.averaged(), opt.averaged():
        net(torch.ones(1, 3))
    train(net, opt, 1, first=3)
    opt.adopt([t + 1 for t in opt.slow], round=opt.round, into_model=True)
    train(net, opt, 1, first=4)
    opt.finish(average=True)
    train(net, opt, 1, first=5)
    for before in (True, False):
        saved = opt.state_dict()
        if before:
            load(net)
        opt.load_state_dict(saved)
        if not before:
            load(net)
        train(net, opt, 1, first=6)
    load(net)
    opt.restart_from_model()
    train(net, opt, 3, first=7)
    net.double().float()
    train(net, opt, 1, first=9)
    other = model()
    inner, stepped = sgd(other), NoLoCo(Stepped(list(other.parameters())), Alone(), every=2, lag=0)
    for step in range(4):
        train(other, inner, 1, first=step)
        stepped.step()
    stepped.finish()

    class Interrupted(Exception):
        pass

    def closure():
        load(net)
        raise Interrupted

    with pytest.raises(Interrupted):
        opt.step(closure)
    with pytest.raises(Interrupted), opt.averaged():
        raise Interrupted
    train(net, opt, 1, first=10)
    assert not [str(w.message) for w in recwarn if "changed outside" in str(w.message)]
