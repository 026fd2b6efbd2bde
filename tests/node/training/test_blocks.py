"""Blocks of a model that compute their activations again: found by themselves, with the same gradients and names."""

import copy

import pytest
import torch
from torch import nn

from shoal.node.config.settings import OwnTraining
from shoal.node.task import Shard, Task
from shoal.node.tasks.text import GPT, Block
from shoal.node.training.trainer import Trainer, TrainingError, recompute
from shoal.optim import Alone
from shoal.optim.inner import repeated_blocks
from shoal.swarm.manifest import OuterSettings, TrainSettings

STEPS = 4


class Layer(nn.Module):
    """A layer with dropout, that counts its calls."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.drop, self.calls = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.3), 0

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        return x + scale * self.drop(self.down(torch.relu(self.up(x))))


class Deep(nn.Module):
    """Layers between two that are not repeated."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(Layer(8) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.last(x)


class Layered(Task):
    def model(self):
        return Deep()

    def batches(self, shard):
        generator = torch.Generator().manual_seed(shard.index)
        while True:
            yield torch.randn(8, 4, generator=generator)

    def loss(self, model, batch):
        return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

    def evaluate(self, model):
        with torch.no_grad():
            return float(self.loss(model, torch.ones(8, 4)))


def trainer(task=None, **own):
    made = Trainer(task or Layered(), OuterSettings(every=2), TrainSettings(steps=STEPS, seed=1), own=OwnTraining(**own))
    made.connect(Alone(), "run", Shard(0, 2, 1))
    return made


@pytest.mark.parametrize("own", [{}, {"accumulate": 2, "precision": "bfloat16"}])
def test_the_steps_are_the_same_bit_by_bit_with_dropout_too(own):
    plain, again = trainer(**own), trainer(recompute=True, **own)
    for made in (plain, again):
        torch.manual_seed(3)
        made.run()
    one, other = plain.state()["model"], again.state()["model"]
    assert list(one) == list(other), "names stay"
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert again._names() == plain._names()
    parts = own.get("accumulate", 1)
    assert [layer.calls for layer in plain.model.layers] == [parts * STEPS] * 3
    assert [layer.calls for layer in again.model.layers] == [2 * parts * STEPS] * 3
    again.evaluate()
    assert [layer.calls for layer in again.model.layers] == [2 * parts * STEPS + 1] * 3, "nothing is kept, nothing computed again"


def test_a_copy_computes_with_its_own_weights():
    model = Deep()
    recompute(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.layers.parameters():
            parameter.zero_()
    x = torch.ones(2, 4)
    assert torch.equal(twin(x), twin.last(twin.first(x)))
    twin(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_blocks_of_models():
    gpt = GPT(3, 8, 2, 8)
    assert repeated_blocks(gpt) == list(gpt.blocks)
    assert all(isinstance(block, Block) for block in repeated_blocks(gpt))
    nested = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*[nn.ModuleDict({"a": Deep()}) for _ in range(2)]))
    assert len(repeated_blocks(nested)) == 6, "of what is called"
    mixed = nn.ModuleDict({"one": Layer(8), "two": Layer(8), "other": Deep()})
    assert repeated_blocks(mixed) == [mixed["one"], mixed["two"], *mixed["other"].layers]


def test_a_model_without_blocks_is_refused():
    class Flat(Layered):
        def model(self):
            return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    with pytest.raises(TrainingError, match=r"The model has no repeated blocks to compute again .*: leave train\.recompute out"):
        trainer(Flat(), recompute=True)


def test_models_of_transformers_with_an_adapter():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    settings = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    gradients = []
    tokens = torch.arange(12).reshape(2, 6)
    for again in (False, True):
        torch.manual_seed(0)
        base = transformers.LlamaForCausalLM(settings).eval()  # as from_pretrained returns it
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        if again:
            assert repeated_blocks(model) == list(base.model.layers)
            recompute(model)
        calls = []
        base.model.layers[0].mlp.register_forward_pre_hook(lambda *args, calls=calls: calls.append(1))
        with torch.no_grad():  # B of an adapter begins at zero, and A has no gradient then
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert len(calls) == 1 + again
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        with torch.no_grad():  # a cache that a call asks for is one, and is filled once
            first = model(input_ids=tokens, use_cache=True)
            assert first.past_key_values.get_seq_length() == 6
    one, other = gradients
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
