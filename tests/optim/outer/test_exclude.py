"""Parameters that stay a peer's own: trained, but in no message, no slow weights and no rule's state."""

import pytest
import torch
from torch import nn

from shoal.optim import METHODS, Alone, DecoupledDiLoCo, DiLoCo, NoLoCo, Simulation, StreamingDiLoCo, config_diff, method_named


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, rows):
        return self.head(self.norm(self.blocks(rows)))


def make():
    torch.manual_seed(0)
    return Body()


def learn(net, opt, steps, peer=0):
    for step in range(steps):
        opt.zero_grad()
        (net(torch.randn(6, 3, generator=torch.Generator().manual_seed(step))) - peer).square().mean().backward()
        opt.count(6)
        opt.step()


WAYS = {
    "a module": ["head"],
    "a pattern": ["head.*"],
    "names": ["head.weight", "head.bias"],
    "parameters": None,
}


@pytest.mark.parametrize(("name", "way"), [*((name, "a module") for name in METHODS), *(("streaming", way) for way in WAYS)])
def test_what_is_excluded_stays_local_and_the_rest_is_averaged(name, way):
    def peer(exchange):
        net = make()
        own = list(net.head.parameters()) if WAYS[way] is None else WAYS[way]
        method = method_named(name)
        short = {"every": 4} if method.knobs["every"] > 4 else {}
        opt = method.make(torch.optim.SGD(net.parameters(), lr=0.1), exchange, model=net, exclude=own, **short)
        learn(net, opt, 8, peer=int(exchange.peer))
        opt.finish()
        with opt.averaged():
            return [p.detach().clone() for p in net.parameters()], opt, [p.detach().clone() for p in net.head.parameters()]

    found = Simulation(["0", "1"]).run(peer)
    (one, opt, head), (other, _, others_head) = found["0"], found["1"]
    assert len(opt.slow) == len(one) - 2
    assert all(len(tensors) == len(opt.slow) for tensors in opt.rule_state.values())
    assert not any(torch.equal(a, b) for a, b in zip(head, others_head, strict=True))
    if opt.anchored:  # else the peers differ anyway
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one[:-2], other[:-2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one[:-2], opt.slow, strict=True))


def test_it_is_not_sent_and_not_restored_by_averaged():
    class Noted(Alone):
        sent = ()

        def start(self, contribution):
            self.sent = [tuple(tensor.shape) for tensor in contribution.tensors]
            return super().start(contribution)

    net, exchange = make(), Noted()
    opt = NoLoCo(
        torch.optim.SGD(net.parameters(), lr=0.1), exchange, every=2, model=net, exclude=["head", "norm"], buffers="average", lag=0
    )
    learn(net, opt, 2)
    assert exchange.sent == [(3, 3), (3,)] * 3  # the buffers of the excluded module neither
    with opt.averaged():
        net.head.bias.data.fill_(7.0)
    assert net.head.bias.tolist() == [7.0, 7.0]
    assert NoLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), model=net, exclude=["*.bias"], lag=0).slow[-1].shape == (2, 3)


def test_a_frozen_one_that_is_excluded_may_be_trained_later():
    net = make()
    net.head.requires_grad_(False)
    opt = DiLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=2, model=net, exclude=["head"])
    net.head.requires_grad_(True)
    before = net.head.weight.detach().clone()
    learn(net, opt, 2)
    assert not torch.equal(before, net.head.weight)


def test_names_are_those_of_the_plain_model_in_wrappers():
    class Wrap(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    net = make()
    opt = NoLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), model=Wrap(net), exclude=["head.weight"], lag=0)
    assert [tuple(slow.shape) for slow in opt.slow[-2:]] == [(3,), (2,)]


def test_what_fits_nothing_is_refused():
    net = make()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    for exclude, words in {
        ("heat",): "no parameter of the model fits 'heat'",
        (nn.Parameter(torch.ones(4)),): r"of shape \(4,\), is not in the inner optimizer",
        "head": "put it into brackets",
        ("*",): "got none",
    }.items():
        with pytest.raises(ValueError, match=words):
            NoLoCo(inner, Alone(), model=net, exclude=exclude, lag=0)
    with pytest.raises(ValueError, match="hand in model="):
        NoLoCo(inner, Alone(), exclude=["head"], lag=0)


def test_peers_that_exclude_others_differ_and_fragments_are_cut_from_the_rest():
    net = make()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    one, other = (NoLoCo(inner, Alone(), model=net, exclude=[name], lag=0) for name in ("head", "norm"))
    assert config_diff(one, other) is not None
    opt = StreamingDiLoCo(inner, Alone(), model=net, fragments=9, exclude=["blocks.1"], lag=1)
    assert opt.fragments == 4  # blocks 0 and 2, norm, head
    plain = DecoupledDiLoCo(inner, Alone(), model=net, fragments=2, exclude=["blocks.0"], plain=list(net.head.parameters()), lag=2)
    marked = {plain._parts[fragment][position] for fragment, position in plain.rule.plain}
    assert [plain.parameters[index].shape for index in sorted(marked)] == [(2, 3), (2,)]
