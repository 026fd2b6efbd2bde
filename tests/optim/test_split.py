"""Which parameters go to Muon: the rule, by models of every kind, and names of one's own."""

from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.node.rl.tiny import TinyModel
from shoal.node.tasks.loader import load_task
from shoal.node.tasks.text import GPT
from shoal.optim import hidden_matrices
from shoal.optim.inner import split

BLOCK = ("attention.qkv", "attention.out", "up", "down")


def test_the_matrices_of_repeated_blocks_are_muons_and_embeddings_head_and_norms_are_not():
    gpt = GPT(layers=2, width=64, heads=4, context=64)
    assert hidden_matrices(gpt) == [f"blocks.{number}.{name}.weight" for number in (0, 1) for name in BLOCK]
    found = split(gpt)
    assert sum(found.muon.values()) == 2 * 12 * 64**2
    assert list(found.adamw) == [name for name, _ in gpt.named_parameters() if name not in found.muon]
    assert str(found) == "Muon trains 98,304 parameters (8 matrices), AdamW 37,504 parameters (13 tensors)"


def test_a_model_of_one_block_gives_muon_all_but_its_last_linear_layer():
    gpt = GPT(layers=1, width=16, heads=2, context=8)
    assert hidden_matrices(gpt) == [f"blocks.0.{name}.weight" for name in BLOCK]
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 2))
    assert hidden_matrices(plain) == ["0.weight", "2.weight"]


def test_a_head_that_shares_an_embedding_is_adamws_wherever_it_stands():
    gpt = GPT(layers=1, width=16, heads=2, context=8)
    gpt.last = nn.Linear(16, 2)
    gpt.head.weight = gpt.bytes.weight
    assert hidden_matrices(gpt) == [f"blocks.0.{name}.weight" for name in BLOCK]


class Mixed(nn.Module):
    """A block with an attention, a kernel of a convolution, a table that is looked up, a layer that is frozen and a bare matrix."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.local = nn.Conv1d(8, 8, 3)
        self.places = nn.Embedding(4, 8)
        self.still = nn.Linear(8, 8).requires_grad_(False)
        self.decay = nn.Parameter(torch.ones(8, 2))
        self.recurrent = nn.GRU(8, 8)


def test_kernels_tables_frozen_bare_and_recurrent_weights_in_a_block_are_not_muons():
    model = nn.ModuleList(Mixed() for _ in range(2))
    assert hidden_matrices(model) == [
        f"{number}.attention.{name}" for number in (0, 1) for name in ("in_proj_weight", "out_proj.weight")
    ]


class Adapted(nn.Module):
    """A frozen layer with a LoRA adapter, named as peft names it."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(8, 8).requires_grad_(False)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": nn.Linear(8, 2)}), nn.ModuleDict({"default": nn.Linear(2, 8)})


def test_the_two_matrices_of_an_adapter_are_muons():
    model = nn.Sequential(Adapted(), Adapted())
    assert hidden_matrices(model) == [f"{n}.lora_{which}.default.weight" for n in (0, 1) for which in "AB"]


class WithOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.lm_head, self.pool = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)

    def get_output_embeddings(self):
        return self.lm_head


def test_the_output_that_a_model_of_transformers_states_is_not_muons():
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
        (["norm.bias"], r"'norm.bias', which Muon is to train, is not a matrix \(16\): leave it to AdamW"),
        (["blocks.0.up.weight"], "'blocks.0.up.weight', which Muon is to train, is frozen: leave it to AdamW"),
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
    own = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    assert hidden_matrices(task.model()) == [f"blocks.layers.{number}.{name}" for number in (0, 1) for name in own]


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
    assert hidden_matrices(TinyModel(2, 8, 2)) == [f"blocks.{number}.{name}.weight" for number in (0, 1) for name in own]
