"""torch.set_default_device, as scripts call it, is the model's matter: what Shoal makes for itself
stays on the CPU.
"""

import pytest
import torch

from shoal.node.checkpoint.store import load
from shoal.node.checkpoint.writer import CheckpointWriter
from shoal.optim import Simulation
from shoal.optim.methods import METHODS
from shoal.optim.outer.sketch import projection, sketch
from shoal.optim.rules import stability
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.training.factories import make_outer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def clean():
    yield
    torch.set_default_device(None)


def trained(device, **settings):
    """Return what two peers have after two rounds, each in a thread of its own: the default device
    is each thread's.
    """
    stability.limit.cache_clear()

    def peer(exchange):
        generator = torch.Generator().manual_seed(ord(exchange.peer[0]))
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 8, device="cpu"), torch.nn.Linear(8, 1, device="cpu")
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(
                    torch.linspace(-1, 1, parameter.numel(), device="cpu").view_as(parameter)
                )
        torch.set_default_device(device)
        outer = OuterSettings(every=2, **settings)
        opt = make_outer(
            outer,
            torch.optim.SGD(model.parameters(), lr=0.01),
            exchange,
            model=model,
            slow_device=CPU,
        )
        for _ in range(4):
            model(torch.randn(4, 8, generator=generator, device="cpu")).square().mean().backward()
            opt.count(4)
            opt.step()
            opt.zero_grad()
        opt.finish()
        return [*opt.slow, *model.parameters()], sketch(opt.slow), projection(opt.slow)

    return Simulation(["a", "b"]).run(peer)


@pytest.mark.parametrize("method", METHODS)
def test_rounds_of_all_methods_are_as_without_it(method):
    found, wanted = trained("meta", method=method), trained(None, method=method)
    for name in ("a", "b"):
        assert all(
            torch.equal(one, other)
            for one, other in zip(found[name][0], wanted[name][0], strict=True)
        )
        assert found[name][1:] == wanted[name][1:]


def test_a_checkpoint_is_saved(tmp_path):
    torch.set_default_device("meta")
    writer = CheckpointWriter(
        tmp_path, keep=1, state=lambda: {"x": torch.ones(3, device="cpu")}, notify=print
    )
    assert writer.last(1) is None
    torch.set_default_device(None)
    assert load(tmp_path)[1]["x"].tolist() == [1.0] * 3
