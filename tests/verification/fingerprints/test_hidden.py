"""The hook on the last hidden state, with a KV cache and without, in three dtypes."""

import copy

import pytest
import torch
from torch import nn

from bench import _verification_tiny as tiny
from shoal.verification.fingerprints.activations import LastHidden, output_head


def prefilled(model, asked, tokens):
    states, logits = tiny.prefill_rows(model, asked[None], tokens[None])
    return states[0], logits[0]


@pytest.mark.parametrize("cached", [True, False])
def test_generation_and_prefill_have_the_same_states(cached):
    model, asked = tiny.TinyGPT(), tiny.prompt(1)
    tokens, states = tiny.generate(model, asked, 20, cached=cached)
    again, logits = prefilled(model, asked, tokens)
    torch.testing.assert_close(states, again, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.head(again), logits, atol=1e-5, rtol=1e-5)
    assert states.shape == (20, tiny.WIDTH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near(dtype):
    exact, model, asked = tiny.TinyGPT(), tiny.TinyGPT().to(dtype), tiny.prompt(2)
    tokens, states = tiny.generate(model, asked, 20)
    assert states.dtype == dtype
    again, _ = prefilled(exact, asked, tokens)
    assert float((states.float() - again).norm() / again.norm()) < 0.02


def test_the_hook_is_gone_afterwards():
    model = tiny.TinyGPT()
    with LastHidden(model) as hidden, torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.int64))
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert hidden.states().shape == (1, 1, tiny.WIDTH)
    with pytest.raises(RuntimeError), LastHidden(model):
        raise RuntimeError
    assert not model.head._forward_pre_hooks


def test_the_model_goes_on_with_the_same_numbers():
    model, tokens = tiny.TinyGPT(), torch.arange(6).unsqueeze(0)
    plain = model(tokens)
    with LastHidden(model, every=True) as hidden:
        assert torch.equal(model(tokens), plain)
    assert not hidden.states().requires_grad


def test_which_layer_is_the_head():
    model = tiny.TinyGPT()
    assert output_head(model) is model.head
    assert output_head(model, "blocks.0.up") is model.blocks[0].up
    assert output_head(model, model.head) is model.head
    other = copy.copy(model)
    other.get_output_embeddings = lambda: model.blocks[1].up
    assert output_head(other) is model.blocks[1].up
    with pytest.raises(ValueError, match="no module 'lm'"):
        output_head(model, "lm")
    with pytest.raises(ValueError, match="no linear layer"):
        output_head(nn.Embedding(2, 2))


def test_states_of_a_model_that_was_not_called_are_refused():
    with pytest.raises(ValueError, match="was not called"):
        LastHidden(tiny.TinyGPT()).states()
