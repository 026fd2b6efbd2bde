"""Every method on a GPU leaves what it leaves on the CPU: weights, slow weights and buffers,
wherever the slow weights are.
"""

import copy
import io
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from shoal.optim import Faults, Simulation, by_steps, codec_named
from shoal.optim.inner import muon
from shoal.optim.methods import METHODS
from tests.support.gpu import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("same_adam")]

STEPS, RESUMED = 15, 8
CODECS = [
    "float16",
    "bfloat16",
    "int8",
    "e3m0+ef",
    "topk2+ef:0.95",
    "topk2-senders+ef:0.95",
    "sign+ef",
    "auto:2+ef",
]


class Net(torch.nn.Module):
    """An embedding, a buffer that moves, and matrices of which a codec makes several blocks."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(40, 48), torch.nn.BatchNorm1d(96)
        # A bias before a norm has the gradient 0: of what rounding makes of it Adam takes whole
        # steps, others on each device.
        self.up, self.down = torch.nn.Linear(48, 96, bias=False), torch.nn.Linear(96, 48)
        self.out = torch.nn.Linear(48, 40)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.out(x + self.down(F.gelu(self.norm(self.up(x)))))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


@dataclass(frozen=True)
class Setup:
    method: str
    codec: str | None = None
    inner: object = adamw
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)


def peer(setup, place, devices, exchange):
    """Train one peer; return its weights, buffers and slow weights.

    ``devices``: before and after a resume.
    """
    spec, resumed = METHODS[setup.method], len(devices) > 1
    options = dict(setup.options)
    if "every" in spec.knobs:
        options["every"] = 10 if setup.method == "decoupled" else 4
    if setup.codec is not None:
        options["codec"] = codec_named(setup.codec)

    def made(state, device):
        model = copy.deepcopy(state).to(device=device, dtype=setup.dtype)
        slow = device if place == "device" else place
        return model, spec.make(
            setup.inner(model), exchange, model=model, slow_device=slow, run="r", **options
        )

    torch.manual_seed(0)
    device = devices[0]
    model, opt = made(Net(), device)
    generator = torch.Generator().manual_seed(100 + int(exchange.peer))
    for step in range(STEPS):
        if resumed and step == RESUMED:
            saved = io.BytesIO()
            torch.save({"model": model, "opt": opt.state_dict()}, saved)
            saved.seek(0)
            device = devices[1]
            state = torch.load(saved, weights_only=False, map_location="cpu")
            model, opt = made(state["model"], device)
            opt.load_state_dict(state["opt"])
        tokens = torch.randint(40, (16,), generator=generator)
        F.cross_entropy(
            model(tokens.to(device)).float(), ((tokens * 7 + 3) % 40).to(device)
        ).backward()
        opt.count(16)
        opt.step()
        opt.zero_grad()
        exchange.sleep(1.0)
    with opt.averaged():
        slow = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    opt.finish(average=True)
    return [*model.parameters(), *model.buffers(), *slow]


def trained(setup, place, *devices):
    size = {"pair": 2, "everyone": 3, "nobody": 1}[METHODS[setup.method].group]
    simulation = Simulation(
        ["0", "1", "2"], seed=1, size=size, faults=Faults(delay=lambda peer, key: 2.5)
    )
    found = simulation.run(partial(peer, setup, place, devices))
    return [tensor for name in sorted(found) for tensor in found[name]]


def compare(setup, places=("cpu", "device")):
    expected = trained(setup, places[0] if places[0] != "device" else "cpu", "cpu")
    for place in places:
        assert_same(trained(setup, place, "cuda"), expected, **within(setup))


def within(setup):
    """On a card a last bit may become a step of the codec, another value that is sent, or a step of
    bfloat16.
    """
    coarse = setup.codec is not None or setup.method == "sparseloco"
    off = 4e-2 if setup.dtype == torch.bfloat16 else 1e-2 if coarse else 1e-4
    return {"rtol": off, "atol": off}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_does_what_it_does_on_the_cpu(method):
    compare(Setup(method))


@pytest.mark.parametrize("method", METHODS)
def test_so_it_does_with_coarse_parameters_and_averaged_buffers(method):
    compare(Setup(method, dtype=torch.bfloat16, options={"buffers": "average"}))


@pytest.mark.parametrize(
    ("method", "codec"), [("noloco", "int8"), *(("diloco", codec) for codec in CODECS)]
)
def test_so_it_does_with_every_codec(method, codec):
    compare(Setup(method, codec))


def torchs_muon(model):
    """Iterating in bfloat16 on the CPU too, so that only the places differ."""
    with mock.patch("shoal.optim.inner._kind", return_value=torch.optim.Muon):
        return muon(model, lr=0.01)


@pytest.mark.parametrize(
    "setup",
    [
        Setup("diloco", dtype=torch.float64),
        Setup("noloco", options={"weight": by_steps}),
        Setup("diloco", "int8", inner=torchs_muon, options={"weight": by_steps}),
        Setup("streaming", "int8", options={"buffers": "average"}),
    ],
    ids=["float64", "weighted", "Muon", "streaming"],
)
def test_so_it_does_with_other_parameters_weights_and_inner_optimizers(setup):
    compare(setup)


@pytest.mark.parametrize(
    "setup",
    [Setup("noloco"), Setup("diloco", "int8", dtype=torch.bfloat16), Setup("eager", "e3m0+ef")],
)
def test_so_it_does_with_slow_weights_in_files(tmp_path, setup):
    compare(setup, [tmp_path])


@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_on_another_kind_of_device(method):
    setup = Setup(method, options={"buffers": "average"})
    expected = trained(setup, "cpu", "cpu", "cpu")
    assert_same(trained(setup, "cpu", "cuda", "cpu"), expected, **within(setup))
    assert_same(trained(setup, "device", "cpu", "cuda"), expected, **within(setup))
