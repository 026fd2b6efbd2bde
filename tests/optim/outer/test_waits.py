"""What an exchange makes the host wait for the device: a few times, whatever the size, and equal to
the CPU bit for bit.
"""

import sys

import pytest
import torch

from shoal.optim import Simulation, codec_named
from shoal.optim.methods import METHODS

pytestmark = pytest.mark.gpu(standin=True)
MOST = 3
STEPS = 18


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.wide = torch.nn.Embedding(40, width), torch.nn.Linear(width, 2 * width)
        self.norm, self.back = torch.nn.BatchNorm1d(2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, tokens):
        return self.back(self.norm(self.wide(self.table(tokens))))


def trained(device, slow, method, codec, dtype, width=32, buffers="average"):
    """Return the weights and buffers of two peers, and the waits of the first one's busiest step
    but for the first rounds.
    """
    waits = []

    def peer(exchange):
        torch.manual_seed(0)
        model = Net(width).to(device, dtype)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        knobs = (
            {"every": 10 if method == "decoupled" else 4}
            if "every" in METHODS[method].knobs
            else {}
        )
        if codec is not None:
            knobs["codec"] = codec_named(codec)
            if codec == "auto:2+ef":
                knobs["codec"].codec.every = 1  # measures in each round
        opt = METHODS[method].make(
            inner, exchange, model=model, slow_device=slow, run="r", buffers=buffers, **knobs
        )
        generator = torch.Generator().manual_seed(int(exchange.peer))
        for step in range(STEPS):
            tokens = torch.randint(40, (16,), generator=generator)
            model(tokens.to(device)).float().square().mean().backward()
            opt.count(16)
            if exchange.peer == "0" and device != "cpu" and step > 8:
                with sys.modules["standin"].waits() as found:
                    opt.step()
                own = [
                    why
                    for why in found.elements()
                    if why.split(" | ")[0] in ("peer-0", "MainThread")
                ]
                waits.append(own)
            else:
                opt.step()
            opt.zero_grad()
            exchange.sleep(1.0)
        opt.finish(average=True)
        return [tensor.detach().cpu() for tensor in model.state_dict().values()]

    size = {"pair": 2, "everyone": 2, "nobody": 1}[METHODS[method].group]
    return Simulation(["0", "1"], seed=1, size=size).run(peer), max(waits, key=len, default=[])


def cases():
    lossy = ["float16", "int8+ef", "e3m0+ef", "topk2+ef:0.95", "sign+ef", "auto:2+ef"]
    for number, method in enumerate(METHODS):
        codecs = (
            [None, "int8"]
            if METHODS[method].sends == "weights"
            else [None, lossy[number % 6], lossy[(number + 3) % 6]]
        )
        for codec in codecs:
            yield method, codec, torch.float32
        yield method, codecs[-1], torch.bfloat16
    yield "diloco", "auto:2+ef", torch.bfloat16


@pytest.mark.parametrize("slow", ["cpu", "cuda"])
@pytest.mark.parametrize(("method", "codec", "dtype"), list(cases()))
def test_at_most_three_device_waits(method, codec, dtype, slow):
    """An exchange waits three times at most and has the bits of the CPU."""
    found, waits = trained("cuda", slow, method, codec, dtype)
    wanted, _ = trained("cpu", "cpu", method, codec, dtype)
    for name in wanted:
        assert all(
            torch.equal(one, other) for one, other in zip(found[name], wanted[name], strict=True)
        )
    assert len(waits) <= MOST, "\n".join(waits)


@pytest.mark.parametrize("slow", ["cpu", "cuda"])
@pytest.mark.parametrize("codec", [None, "topk2+ef:0.95"])
def test_a_larger_model_waits_no_more_often(slow, codec):
    few, many = (
        len(trained("cuda", slow, "diloco", codec, torch.float32, width)[1]) for width in (16, 300)
    )
    assert few == many <= MOST
