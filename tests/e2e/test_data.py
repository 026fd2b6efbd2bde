"""Real nodes on a stream of records with a tokenizer: what they agree on, and what is refused."""

import gzip
import json

import pytest

SIZE = {"layers": 1, "width": 32, "heads": 2, "context": 32, "field": "body"}


def tokenizer(path, size):
    """A tiny tokenizer in ``path``."""
    tokenizers = pytest.importorskip(
        "tokenizers", reason="tokenizers is not installed: pip install 'shoal[data]'"
    )
    from tokenizers import models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["the quick brown fox says that"],
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet),
    )
    path.mkdir()
    made.save(str(path / "tokenizer.json"))


@pytest.mark.slow(reason="real nodes train on records")
def test_peers_agree_on_records_and_tokenizer(shoal):
    """Peers agree on records and tokenizer and who has another is told."""
    lines = (
        json.dumps({"body": f"the quick brown fox says that {i} and {i} are {i + i}"}) + "\n"
        for i in range(500)
    )
    (shoal.home / "a.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    tokenizer(shoal.home / "tok", 280)
    tokenizer(shoal.home / "other", 270)
    table = shoal.toml(
        swarm={"start_when": 2}, outer={"every": 10, "lag": 0}, train={"steps": 40}, options=SIZE
    )

    def node(verb, what, name, *arguments):
        return shoal.start(verb, what, *shoal.own(name), "--data", "a.jsonl.gz", *arguments)

    first = node("up", table, "a", "--tokenizer", "./tok")
    link = first.line()
    told = node("join", link, "c", "--tokenizer", "./other").error()
    assert "other' is another one here (digest " in told
    second = node("join", link, "b", "--tokenizer", "./tok")
    assert (first.wait(), second.wait()) == (0, 0), first.said() + second.said()
    results = [shoal.result(name) for name in "ab"]
    assert all(
        result["loss"]["held_out"] < result["loss"]["held_out_first"] - 1 for result in results
    )
    assert all(
        result["task"]["skipped"] == 0 and result["task"]["bits_per_byte"] < 8 for result in results
    )
    assert all(result["exchanges"]["with_partner"] == 4 for result in results)
