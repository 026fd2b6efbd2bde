"""Tiny policies that are made once."""

import pytest
import torch

from shoal.node.rl.environment import Strings
from shoal.node.rl.tiny import Tiny, Warm


@pytest.fixture(scope="session")
def tiny():
    """With hardly a warm start: not clever, but it ends its completions. Not to be trained."""
    return Tiny(Strings(), seed=1, width=32, warm=Warm(steps=30, batch=32))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model that was never trained, saved as transformers does."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, eos_token_id=0, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    place = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    words = {"<end>": 0, **{chr(code): code - 31 for code in range(32, 127)}}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>").save_pretrained(place)
    return place
