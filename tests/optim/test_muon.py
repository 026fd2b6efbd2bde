"""Muon: which parameters go to it, its steps by the papers' formulas, and its place in an outer
optimizer.
"""

import copy
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from shoal.node.rl.tiny import TinyModel
from shoal.node.tasks.gpt import GPT
from shoal.node.tasks.loader import load_task
from shoal.optim import Alone, NoLoCo, hidden_matrices, muon
from shoal.optim.inner import Float32Muon, split

STEPS = 4


def model():
    torch.manual_seed(0)
    return GPT(layers=2, width=16, heads=2, context=8)


def gradients(net, steps=STEPS, first=0):
    """Yield after setting the gradients of each step."""
    for step in range(first, first + steps):
        tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(step))
        net.zero_grad()
        nn.functional.cross_entropy(
            net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
        yield


def orthogonalised(matrix):
    """Newton and Schulz's iteration as in the post on Muon: five quintic steps from the matrix over
    its Frobenius norm.
    """
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


SCALES = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def step_of_muon(weight, gradient, momentum, scale, *, lr, decay, beta):
    """Return weight and momentum after a step: heavy ball, Nesterov's look ahead, decoupled
    decay.
    """
    momentum = beta * momentum + gradient
    ahead = gradient + beta * momentum
    return weight - lr * decay * weight - lr * scale(*weight.shape) * orthogonalised(
        ahead
    ), momentum


def step_of_adamw(weight, gradient, moments, step, *, lr, decay):
    one = 0.9 * moments[0] + 0.1 * gradient
    two = 0.95 * moments[1] + 0.05 * gradient.square()
    part = (one / (1 - 0.9**step)) / ((two / (1 - 0.95**step)).sqrt() + 1e-8)
    return weight - lr * decay * weight - lr * part, (one, two)


def in_float32(monkeypatch):
    """Let torch's own Muon iterate in float32, to compare formulas and not roundings; as it is, it
    iterates in bfloat16.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())


def test_a_step_of_the_pair_is_that_of_the_papers():
    net = model()
    inner = muon(net, lr=0.03, adamw_lr=0.004, momentum=0.9, weight_decay=0.2)
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    memory = {name: torch.zeros_like(p) for name, p in weights.items()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in weights.items()}
    for step, _ in enumerate(gradients(net), start=1):
        for name, p in net.named_parameters():
            if name.startswith("blocks.") and p.ndim == 2:
                weights[name], memory[name] = step_of_muon(
                    weights[name],
                    p.grad,
                    memory[name],
                    SCALES["original"],
                    lr=0.03,
                    decay=0.2,
                    beta=0.9,
                )
            else:
                weights[name], moments[name] = step_of_adamw(
                    weights[name], p.grad, moments[name], step, lr=0.004, decay=0.2
                )
        inner.step()
        for name, p in net.named_parameters():
            torch.testing.assert_close(
                p.detach(), weights[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
            p.data.copy_(weights[name])  # each step is compared by itself


@pytest.mark.parametrize("adjust", list(SCALES))
@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (8, 8)])
def test_torchs_muon_is_that_of_the_papers_with_either_scale(monkeypatch, adjust, shape):
    in_float32(monkeypatch)
    generator = torch.Generator().manual_seed(3)
    weight = nn.Parameter(torch.randn(shape, generator=generator))
    inner = torch.optim.Muon(
        [weight], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjust
    )
    momentum = torch.zeros(shape)
    for _ in range(STEPS):
        weight.grad = torch.randn(shape, generator=generator)
        wanted, momentum = step_of_muon(
            weight.detach().clone(),
            weight.grad,
            momentum,
            SCALES[adjust],
            lr=0.02,
            decay=0.1,
            beta=0.95,
        )
        inner.step()
        torch.testing.assert_close(weight.detach(), wanted, rtol=0, atol=1e-6)


def test_hooks_run_once_and_a_closure_keeps_its_types():
    """Only the iteration is in float32, and whoever hooks into a step is called once."""
    # From now on the step of torch's class has a wrapper.
    torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))])
    weight = nn.Parameter(torch.eye(3))
    inner, called = Float32Muon([weight]), []
    inner.register_step_pre_hook(lambda *_: called.append("before"))
    inner.register_step_post_hook(lambda *_: called.append("after"))

    def closure():
        weight.grad = torch.eye(3)
        return torch.ones(1).bfloat16()

    assert inner.step(closure).dtype is torch.bfloat16
    assert called == ["before", "after"]


def test_what_is_not_given_is_what_was_measured():
    matrices, rest = muon(model()).param_groups
    assert (
        matrices["lr"],
        matrices["momentum"],
        matrices["weight_decay"],
        matrices["nesterov"],
    ) == (0.02, 0.9, 0.0, True)
    assert (rest["lr"], rest["betas"], rest["weight_decay"]) == (0.02, (0.9, 0.95), 0.0)
    assert muon(model(), lr=0.1).param_groups[1]["lr"] == 0.1


def test_model_order_and_one_schedule_for_both():
    """An outer optimizer has the models order and a schedule changes both rates."""
    net = model()
    inner = muon(net)
    opt = NoLoCo(inner, Alone(), every=2, lag=0, model=net)
    assert [id(p) for p in opt.parameters] == [id(p) for p in net.parameters()]
    assert [tuple(p.shape) for p in opt.slow] == [tuple(p.shape) for p in net.parameters()]
    schedule = LambdaLR(opt, lambda step: 0.5**step)
    for _ in gradients(net, 2):
        opt.step()
        schedule.step()
    assert [group["lr"] for group in inner.param_groups] == [pytest.approx(0.005)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["state_dict", "whole_state"])
def test_a_saved_pair_goes_on_bit_by_bit(dtype, form):
    def made():
        net = model().to(dtype)
        return net, NoLoCo(
            muon(net, weight_decay=0.1), Alone(), every=3, fragments=2, lag=1, model=net
        )

    net, opt = made()
    for _ in gradients(net):
        opt.step()
    again, resumed = made()
    again.load_state_dict(net.state_dict())
    resumed.load_state_dict(copy.deepcopy(getattr(opt, form)()))
    for one, other in ((net, opt), (again, resumed)):
        for _ in gradients(one, 5, first=STEPS):
            other.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(opt.slow, resumed.slow, strict=True))


def test_a_torch_without_muon_is_named_and_has_all_else():
    code = (
        "import torch; del torch.optim.Muon; from shoal.optim import NoLoCo, muon; "
        "muon(torch.nn.Linear(2, 2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "has no Muon: install 2.9 or newer, or choose AdamW" in done.stderr.splitlines()[-1]


BLOCK = ("attention.qkv", "attention.out", "up", "down")


def test_muon_takes_block_matrices_only():
    """The matrices of repeated blocks are Muon's and embeddings head and norms are not."""
    gpt = GPT(layers=2, width=64, heads=4, context=64)
    assert hidden_matrices(gpt) == [
        f"blocks.{number}.{name}.weight" for number in (0, 1) for name in BLOCK
    ]
    found = split(gpt)
    assert sum(found.muon.values()) == 2 * 12 * 64**2
    assert list(found.adamw) == [
        name for name, _ in gpt.named_parameters() if name not in found.muon
    ]
    assert (
        str(found)
        == "Muon trains 98,304 parameters (8 matrices), AdamW 37,504 parameters (13 tensors)"
    )


def test_one_block_leaves_adamw_the_head():
    """A model of one block gives muon all but its last linear layer."""
    gpt = GPT(layers=1, width=16, heads=2, context=8)
    assert hidden_matrices(gpt) == [f"blocks.0.{name}.weight" for name in BLOCK]
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 2))
    assert hidden_matrices(plain) == ["0.weight", "2.weight"]


def test_tied_head_is_adamws():
    """A head that shares an embedding is AdamWs wherever it stands."""
    gpt = GPT(layers=1, width=16, heads=2, context=8)
    gpt.last = nn.Linear(16, 2)
    gpt.head.weight = gpt.bytes.weight
    assert hidden_matrices(gpt) == [f"blocks.0.{name}.weight" for name in BLOCK]


class Mixed(nn.Module):
    """A block with an attention, a kernel of a convolution, a table that is looked up, a layer that
    is frozen and a bare matrix.
    """

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.local = nn.Conv1d(8, 8, 3)
        self.places = nn.Embedding(4, 8)
        self.still = nn.Linear(8, 8).requires_grad_(False)
        self.decay = nn.Parameter(torch.ones(8, 2))
        self.recurrent = nn.GRU(8, 8)


def test_irregular_block_weights_are_adamws():
    """Kernels tables frozen bare and recurrent weights in a block are not muons."""
    model = nn.ModuleList(Mixed() for _ in range(2))
    assert hidden_matrices(model) == [
        f"{number}.attention.{name}"
        for number in (0, 1)
        for name in ("in_proj_weight", "out_proj.weight")
    ]


class Adapted(nn.Module):
    """A frozen layer with a LoRA adapter, named as peft names it."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(8, 8).requires_grad_(False)
        self.lora_A, self.lora_B = (
            nn.ModuleDict({"default": nn.Linear(8, 2)}),
            nn.ModuleDict({"default": nn.Linear(2, 8)}),
        )


def test_the_two_matrices_of_an_adapter_are_muons():
    model = nn.Sequential(Adapted(), Adapted())
    assert hidden_matrices(model) == [
        f"{n}.lora_{which}.default.weight" for n in (0, 1) for which in "AB"
    ]


class WithOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.lm_head, self.pool = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)

    def get_output_embeddings(self):
        return self.lm_head


def test_stated_output_layer_is_adamws():
    """The output that a model of transformers states is not muons."""
    assert hidden_matrices(WithOutput()) == ["inner.weight"]
    assert hidden_matrices(nn.ModuleDict({"base": WithOutput(), "after": nn.Linear(8, 8)})) == [
        "base.inner.weight",
        "base.pool.weight",
    ]


def test_names_of_ones_own_are_checked():
    gpt = GPT(layers=1, width=16, heads=2, context=8)
    gpt.head.weight = gpt.bytes.weight
    assert list(split(gpt, ["head.weight"]).muon) == ["bytes.weight"], "either of its names"
    gpt.blocks[0].up.requires_grad_(False)
    for names, words in [
        (["nothing"], "no parameter 'nothing', which Muon"),
        (
            ["norm.bias"],
            r"'norm.bias', which Muon is to train, is not a matrix \(16\): leave it to AdamW",
        ),
        (
            ["blocks.0.up.weight"],
            "'blocks.0.up.weight', which Muon is to train, is frozen: leave it to AdamW",
        ),
        ([], "no matrix for Muon"),
    ]:
        with pytest.raises(ValueError, match=words):
            split(gpt, names)
    with pytest.raises(ValueError, match="no matrix for Muon"):
        split(nn.Linear(3, 3))


TEMPLATES = Path(__file__).parents[2] / "node" / "templates"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_the_template_of_pretraining():
    task = load_task(f"{TEMPLATES}/pretrain/task.py:Pretrain", {})
    own = (
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    )
    assert hidden_matrices(task.model()) == [
        f"blocks.layers.{number}.{name}" for number in (0, 1) for name in own
    ]


@pytest.mark.parametrize("lora", [0, 4])
def test_the_template_of_finetuning_whole_or_an_adapter(lora):
    pytest.importorskip("peft" if lora else "transformers", reason="needs the extra hf")
    found = split(load_task(f"{TEMPLATES}/finetune/task.py:Finetune", {"lora": lora}).model())
    assert len(found.muon) == 2 * 7 * (2 if lora else 1)
    assert all(any(layer in name for layer in LINEAR) for name in found.muon)
    assert not any(layer in name for layer in LINEAR for name in found.adamw)
    assert bool(found.adamw) == (not lora)


def test_the_policy_that_reinforcement_learning_makes_itself():
    own = ("qkv", "out", "up", "down")
    assert hidden_matrices(TinyModel(2, 8, 2)) == [
        f"blocks.{number}.{name}.weight" for number in (0, 1) for name in own
    ]
