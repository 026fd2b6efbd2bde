"""Tokenizers by name: the digest by which peers agree, and text cut in pieces.

Made here, for nothing goes to the network.
"""

import json
import math
import sys

import pytest
import torch

from shoal.node.data import tokenizer
from shoal.node.data.source import DataError
from shoal.node.data.tokenizer import Bytes, label, load_tokenizer
from tests.support.tokenizers_made_here import TEXT, train


def test_bytes_need_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    made = load_tokenizer("bytes")
    assert isinstance(made, Bytes)
    assert (made.vocabulary, made.digest) == (256, "")
    (piece,) = made.encode(b"ab\xff")
    assert piece.tolist() == [97, 98, 255, 10]
    with pytest.raises(
        DataError, match=r"needs the package tokenizers, .* run pip install 'shoal\[data\]'"
    ):
        load_tokenizer("gpt2")


def test_folder_and_file_are_the_same_and_text_comes_back(tmp_path):
    file = train(tmp_path / "a")
    one, other = load_tokenizer(str(tmp_path / "a")), load_tokenizer(str(file))
    assert one.digest == other.digest
    assert one.vocabulary == 300
    ids = torch.cat(list(one.encode(TEXT.encode() + "naïve 🐟".encode())))
    assert ids.dtype == torch.int32
    assert ids[-1] == 0  # <|endoftext|>
    assert one._inner.decode(ids[:-1].tolist()) == TEXT + "naïve 🐟"
    assert len(ids) < len(TEXT) / 2


def test_missing_end_token_is_a_line_end(tmp_path):
    """Without a token for ends it is an end of line."""
    made = load_tokenizer(str(train(tmp_path, special=())))
    *_, end = made.encode(b"text")
    assert made._inner.decode(end.tolist()) == "\n"


def test_long_documents_are_cut_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 100)
    made = load_tokenizer(str(train(tmp_path)))
    pieces = list(made.encode(TEXT.encode()))
    assert len(pieces) == math.ceil(len(TEXT) / 100) + 1
    assert made._inner.decode(torch.cat(pieces[:-1]).tolist()) == TEXT


def test_digest_is_of_vocabulary_and_cutting(tmp_path):
    """The digest is of vocabulary and cutting not of the file."""
    file = train(tmp_path / "a")
    body = json.loads(file.read_text())
    (tmp_path / "same.json").write_text(json.dumps(dict(reversed(body.items())), indent=4))
    body["truncation"] = {
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    (tmp_path / "short.json").write_text(json.dumps(body))
    body["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "lower.json").write_text(json.dumps(body))
    digests = [
        load_tokenizer(str(path)).digest
        for path in (file, tmp_path / "same.json", tmp_path / "short.json")
    ]
    assert len(set(digests)) == 1
    assert load_tokenizer(str(tmp_path / "lower.json")).digest != digests[0]
    assert load_tokenizer(str(train(tmp_path / "b", size=290))).digest != digests[0]


def test_another_tokenizer_than_the_swarms_is_one_sentence(tmp_path):
    path = str(train(tmp_path))
    digest = load_tokenizer(path).digest
    assert load_tokenizer(path, digest).digest == digest
    words = (
        rf"another one here \(digest {digest[:12]}\) than in the swarm \(ffffffffffff\): "
        r".*--tokenizer"
    )
    with pytest.raises(DataError, match=words):
        load_tokenizer(path, "f" * 64)
    with pytest.raises(DataError, match=r"another one here .*of bytes"):
        load_tokenizer("bytes", digest)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./none", "There is no tokenizer at './none'"),
        ("a/b/c", "names no tokenizer"),
        ("a/..", "names no tokenizer"),
        ("a b", "names no tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_one_sentence(tmp_path, monkeypatch, name, words):
    pytest.importorskip(
        "tokenizers", reason="tokenizers is not installed: pip install 'shoal[data]'"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=words) as caught:
        load_tokenizer(name)
    assert "\n" not in str(caught.value)


def test_a_damaged_or_huge_file_is_one_sentence(tmp_path, monkeypatch):
    file = train(tmp_path)
    file.write_text(file.read_text()[:500])
    with pytest.raises(DataError, match="cannot be loaded") as caught:
        load_tokenizer(str(file))
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(tokenizer, "MAX_FILE_BYTES", 100)
    with pytest.raises(DataError, match="is larger than"):
        load_tokenizer(str(file))


def test_hub_is_asked_for_missing_files_only(tmp_path, monkeypatch):
    """The hub is asked for what is not here and not for too much."""
    hub = pytest.importorskip(
        "huggingface_hub", reason="huggingface_hub is not installed: pip install 'shoal[data]'"
    )
    file, asked = train(tmp_path), []

    def download(name, filename, local_files_only=False):
        asked.append((name, filename, local_files_only))
        if local_files_only:
            raise FileNotFoundError("not in the cache")
        return str(file)

    size = 1000
    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr(
        hub, "get_hf_file_metadata", lambda url: type("Metadata", (), {"size": size})
    )
    assert load_tokenizer("owner/name").vocabulary == 300
    assert asked == [
        ("owner/name", "tokenizer.json", True),
        ("owner/name", "tokenizer.json", False),
    ]
    size = 2**40
    with pytest.raises(DataError, match="'owner/name' is larger than 64 MiB"):
        load_tokenizer("owner/name")

    def unreachable(url):
        raise ConnectionError("no route to host\nin many lines")

    monkeypatch.setattr(hub, "get_hf_file_metadata", unreachable)
    with pytest.raises(
        DataError, match=r"cannot be loaded \(no route to host\): check its name and the network"
    ) as caught:
        load_tokenizer("owner/name")
    assert "\n" not in str(caught.value)
    assert len(asked) == 4


def test_a_folder_of_transformers_is_the_same_tokenizer(tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install 'shoal[hf]'"
    )
    file = train(tmp_path / "a")
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), eos_token="<|endoftext|>"
    ).save_pretrained(tmp_path / "b")
    assert load_tokenizer(str(tmp_path / "b")).digest == load_tokenizer(str(file)).digest


def test_labels_have_no_folder():
    assert [label(name) for name in ("bytes", "owner/name", "./a/tok/", "~/tok.json", "/x/y")] == [
        "bytes", "owner/name", "tok", "tok.json", "y",
    ]  # fmt: skip
