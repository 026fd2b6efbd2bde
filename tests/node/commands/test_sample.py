"""`shoal sample`: what it continues, by which rule a token is drawn, and what in a folder it does not believe."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from shoal.node.cli.main import cli
from shoal.node.commands.sample import SampleError, continuation, load_pulled, prompt_tokens, sample
from shoal.node.data.reader import Bytes, load_tokenizer
from shoal.node.data.source import DataError
from shoal.node.tasks.text import GPT
from shoal.swarm.errors import printable
from tests.node.data.tokenizers_made_here import train

SIZE = {"layers": 1, "width": 8, "heads": 2, "context": 4}


def written(folder, weights=None, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(3)
    save_file((weights or GPT(**SIZE)).state_dict(), folder / "model.safetensors")
    about = {"swarm": "s", "name": "n", "round": 7, "task": "text", "task_options": {}, "model": SIZE, "named": True, **changes}
    (folder / "shoal.json").write_text(json.dumps(about))
    return folder


class Counts(torch.nn.Module):
    """Says that the next byte is one more than the last, by ``sure``; it remembers what it was shown."""

    def __init__(self, context=4, sure=50.0):
        super().__init__()
        self.positions = torch.nn.Embedding(context, 1)
        self.sure, self.seen = sure, []

    def forward(self, tokens):
        self.seen.append(tokens[0].tolist())
        return torch.nn.functional.one_hot((tokens + 1) % 256, 256).float() * self.sure


def draw(model, begun, count, temperature=1.0, top_k=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return continuation(model, begun, count, temperature=temperature, top_k=top_k, generator=generator)


def test_a_token_follows_from_the_last_ones_that_the_context_holds():
    model = Counts(context=3)
    assert draw(model, [10, 97], 5) == [98, 99, 100, 101, 102]
    assert model.seen == [[10, 97], [10, 97, 98], [97, 98, 99], [98, 99, 100], [99, 100, 101]]


def test_temperature_and_top_k_narrow_the_draw():
    flat = Counts(sure=1.0)
    assert draw(flat, [65], 3, temperature=0) == [66, 67, 68]
    assert draw(Counts(sure=1e10), [65], 3, temperature=1e-30) == [66, 67, 68]  # 1e40 is no float32
    assert draw(flat, [65], 3, temperature=100.0, top_k=1) == [66, 67, 68]
    assert draw(flat, [65], 50, top_k=10_000) == draw(flat, [65], 50)
    assert draw(flat, [65], 50) != draw(flat, [65], 50, seed=1)
    assert len(set(draw(flat, [65], 200))) > 50  # the likeliest has weight e, the 255 others have 1 each


def test_a_prompt_begins_a_document_and_does_not_end_one(tmp_path):
    assert prompt_tokens(Bytes(), "ab") == [10, 97, 98]
    assert prompt_tokens(Bytes(), "") == [10]
    named = load_tokenizer(str(train(tmp_path)))
    begun = prompt_tokens(named, "the fox")
    assert begun[0] == 0  # <|endoftext|>
    assert 0 not in begun[1:]
    assert named.decode(begun[1:]) == "the fox"
    assert Bytes().decode([97, 255, 98]) == "a\ufffdb"


def test_the_same_seed_gives_the_same_texts_and_the_report_names_it(tmp_path):
    folder = written(tmp_path / "w")
    one = sample(folder, prompt="ab", tokens=20, samples=2)
    assert (one["name"], one["round"], one["tokens"]) == ("n", 7, 20)
    assert all(text.startswith("ab") for text in one["texts"])
    assert one["texts"][0] != one["texts"][1]
    assert sample(folder, prompt="ab", tokens=20, samples=2, seed=one["seed"])["texts"] == one["texts"]


def test_the_command_prints_text_that_cannot_drive_a_terminal(tmp_path, monkeypatch):
    folder = str(written(tmp_path / "w"))
    assert printable("a\x1b[2Jb\tc\nd\x00", "\n\t", "\ufffd") == "a\ufffd[2Jb\tc\nd\ufffd"
    arguments = ["sample", folder, "--prompt", "x\x1by", "--tokens", "3", "--samples", "2", "--seed", "1"]
    plain = CliRunner().invoke(cli, arguments, standalone_mode=False).stdout
    assert "\x1b" not in plain
    assert [part[:3] for part in plain.split("\n---\n")] == ["x\ufffdy"] * 2
    report = json.loads(CliRunner().invoke(cli, [*arguments, "--json"], standalone_mode=False).stdout)
    assert report["texts"] == sample(tmp_path / "w", prompt="x\x1by", tokens=3, samples=2, seed=1)["texts"]


def test_a_tokenizer_of_the_swarm_is_named_and_compared(tmp_path):
    file = train(tmp_path / "mine")
    digest = load_tokenizer(str(file)).digest
    options = {"tokenizer": "mine", "tokenizer_digest": digest}
    size = {**SIZE, "vocabulary": 300}
    folder = written(tmp_path / "w", GPT(**size), model=size, task_options=options)
    assert load_pulled(folder, str(file)).tokenizer.digest == digest
    train(tmp_path / "other", 280)
    with pytest.raises(DataError, match="is another one here"):
        load_pulled(folder, str(tmp_path / "other"))
    bare = written(tmp_path / "bare", GPT(**size), model=size, task_options={"tokenizer": "mine"})
    with pytest.raises(DataError, match="has 280 tokens and the model 300: name the swarm's"):
        load_pulled(bare, str(tmp_path / "other"))
    hostile = written(tmp_path / "hostile", GPT(**size), model=size, task_options={"tokenizer": str(file)})
    with pytest.raises(DataError, match="a path on somebody's machine"):
        load_pulled(hostile)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"task": "task.py:Mine"}, "are of the task 'task.py:Mine', .* load them as README.md there says"),
        ({"model": None}, "without the names of the model"),
        ({"model": {**SIZE, "width": 7}}, "is damaged: pull the weights again"),
        ({"model": {**SIZE, "layers": 0}}, "is damaged"),
        ({"model": {**SIZE, "context": True}}, "is damaged"),
        ({"model": {**SIZE, "context": 2**60}}, "is damaged"),
        ({"model": {**SIZE, "secret": 1}}, "is damaged"),
        ({"task_options": None}, "is damaged"),
        ({"model": {**SIZE, "width": 2**16}}, "are not of the model that shoal.json names"),
        ({"model": {**SIZE, "width": 2**16 + 2}}, "is damaged"),
        ({"model": {**SIZE, "layers": 2**10}}, "are not of the model"),
        ({"model": {**SIZE, "layers": 2**10 + 1}}, "is damaged"),
        ({"model": {**SIZE, "vocabulary": 2**21 + 1}}, "is damaged"),
        ({"model": {**SIZE, "layers": 2}}, "are not of the model"),
    ],
)
def test_what_the_folder_says_is_compared_before_memory_is_taken(tmp_path, changes, sentence):
    with pytest.raises(SampleError, match=sentence):
        load_pulled(written(tmp_path / "w", **changes))


def test_a_folder_without_weights_or_with_damaged_ones_is_one_sentence(tmp_path):
    with pytest.raises(SampleError, match=r"There are no weights of `shoal pull` in .*: name the folder"):
        load_pulled(tmp_path)
    for content in ("", "[]", "[" * 100_000):
        (tmp_path / "shoal.json").write_text(content)
        with pytest.raises(SampleError, match="is damaged"):
            load_pulled(tmp_path)
    folder = written(tmp_path / "w")
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(SampleError, match="cannot be read"):
        load_pulled(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SampleError, match="cannot be read"):
        load_pulled(folder)


def test_weights_that_are_not_finite_are_said(tmp_path):
    model = GPT(**SIZE)
    torch.nn.init.constant_(model.head.weight, float("nan"))
    with pytest.raises(SampleError, match="not finite"):
        sample(written(tmp_path / "w", model))
