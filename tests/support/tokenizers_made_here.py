"""A tiny tokenizer, made here: nothing goes to the network."""

import pytest

TEXT = (
    "the quick brown fox jumps over the lazy dog, and the dog does not mind the fox at all. " * 20
)


def train(path, size=300, special=("<|endoftext|>",)):
    """A tiny byte-level BPE tokenizer in ``path``; returns its file."""
    tokenizers = pytest.importorskip(
        "tokenizers", reason="tokenizers is not installed: pip install 'shoal[data]'"
    )
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    path.mkdir(parents=True, exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    return path / "tokenizer.json"
