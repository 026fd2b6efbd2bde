"""Streams of documents from files: in bounded memory, from any place on, and around what is no record."""

import gzip
import json
import logging
import tracemalloc

import pytest

from shoal.node.data import source as module
from shoal.node.data.source import RecordFiles, Skipped
from shoal.node.task import Shard
from shoal.node.tasks.text import DataError, open_stream, read_documents

ALL = Shard(0, 1, 5)


def write(path, texts, field="text"):
    lines = "".join(json.dumps({field: text, "n": i}) + "\n" for i, text in enumerate(texts)).encode()
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)
    return path


def stream(*paths, field="text"):
    return RecordFiles([(path.name, path) for path in paths], field, Skipped())


def texts(source, shard=ALL, epoch=0, place=None):
    return [document.content.decode() for _, document in source.documents(shard, epoch, place)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_records_are_documents_with_the_text_of_their_field(tmp_path, name):
    wanted = [f"text {i}, naïve 🐟\nand more" for i in range(50)]
    assert texts(stream(write(tmp_path / name, wanted, "body"), field="body")) == wanted
    assert [d.name for _, d in stream(tmp_path / name, field="body").documents(ALL, 0)][:2] == [f"{name}:1", f"{name}:2"]


def test_packed_text_is_cut_at_ends_of_lines_and_nothing_is_lost(tmp_path):
    content = "".join(f"line {i} of a text\n" for i in range(3000)) + "and no end of line"
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content.encode()))
    found = texts(stream(tmp_path / "a.txt.gz"))
    assert "".join(found) == content
    assert all(piece.endswith("\n") and 4096 <= len(piece) < 4200 for piece in found[:-1])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt.gz"])
def test_the_shards_of_an_epoch_have_each_document_once(tmp_path, name):
    if name == "a.txt.gz":
        (tmp_path / name).write_bytes(gzip.compress(b"".join(b"%05d" % i * 200 + b"\n" for i in range(400))))
    else:
        write(tmp_path / name, [f"text {i}" for i in range(200)])
    source = stream(tmp_path / name)
    whole = texts(source)
    for epoch in (0, 1):
        parts = [texts(source, Shard(index, 3, 5), epoch) for index in range(3)]
        assert sorted(text for part in parts for text in part) == sorted(whole)
    assert texts(source, Shard(0, 3, 5), 0) != texts(source, Shard(0, 3, 5), 1)


def test_files_come_in_another_order_in_another_epoch(tmp_path):
    paths = [write(tmp_path / f"{i}.jsonl", [f"file {i}"]) for i in range(12)]
    first, second = texts(stream(*paths)), texts(stream(*paths), epoch=1)
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt.gz"])
def test_from_the_place_of_any_document_on_the_same_follows(tmp_path, name):
    write(tmp_path / "b.jsonl", [f"other {i}" for i in range(5)])
    if name == "a.txt.gz":
        (tmp_path / name).write_bytes(gzip.compress(b"".join(b"%05d" % i * 200 + b"\n" for i in range(100))))
    else:
        write(tmp_path / name, [f"text {i} " * (i + 1) for i in range(30)])
    source, shard = stream(tmp_path / name, tmp_path / "b.jsonl"), Shard(1, 2, 5)
    whole = list(source.documents(shard, 2))
    assert len(whole) > 10
    for i, (place, _) in enumerate(whole):
        assert list(source.documents(shard, 2, place)) == whole[i:]


def test_what_is_no_record_is_skipped_counted_and_told_once(tmp_path, caplog):
    bad = [b"not json", b"[1]", b'{"body": "x"}', b'{"text": 3}', b"[" * 100_000, b"\xff\xfe", b'{"text": "bad \\ud800 half"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([b'{"text": "good"}', *bad, b"", b'{"text": ""}', b'{"text": "too"}']))
    source = stream(tmp_path / "a.jsonl")
    with caplog.at_level(logging.WARNING):
        assert texts(source) == ["good", "bad ? half", "too"]
    assert source.skipped.count == 6
    (record,) = caplog.records
    assert record.getMessage() == (
        "Line 2 of 'a.jsonl' is no JSON object with a text in the field 'text', so it is skipped, and others like it will be "
        "without a word."
    )


def test_lines_that_are_too_long_are_skipped_without_being_held(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "MAX_LINE", 2**20)
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(b'{"text": "before"}\n')
        for _ in range(64):
            file.write(b" " * 2**20)  # 64 MiB that take about 300 kB
        file.write(b'\n{"text": "after"}\n')
    source = stream(tmp_path / "bomb.jsonl.gz")
    tracemalloc.start()
    try:
        assert texts(source) == ["before", "after"]
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert source.skipped.count == 1
    assert "Line 2 of 'bomb.jsonl.gz' is longer than 1 MiB" in caplog.text
    assert [place["line"] for place, _ in source.documents(ALL, 0)] == [1, 3]


def test_a_line_of_the_greatest_length_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINE", 40)
    fits, long = [json.dumps({"text": "x" * n}) for n in (28, 29)]
    assert (len(fits), len(long)) == (40, 41)
    for end in ("\n", ""):
        (tmp_path / "a.jsonl").write_text(f"{long}\n{fits}{end}")
        assert texts(stream(tmp_path / "a.jsonl")) == ["x" * 28]
        (tmp_path / "a.jsonl").write_text(f"{fits}\n{long}{end}")
        assert texts(stream(tmp_path / "a.jsonl")) == ["x" * 28]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl.gz", b"plain", "Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9999, mtime=0)[:-40], "ended before"),
        ("a.txt.gz", gzip.compress(b"x" * 99, mtime=0)[:10] + b"\xff" * 50, "invalid|Error -3"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        texts(stream(tmp_path / name))
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_that_became_shorter_is_one_sentence(tmp_path, name):
    path = write(tmp_path / name, [f"text {i}" for i in range(9)])
    *_, (place, _) = stream(path).documents(ALL, 0)
    write(path, ["text"])
    with pytest.raises(DataError, match="shorter than it was"):
        texts(stream(path), place=place)


def test_a_place_of_another_source_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="place in the data is damaged"):
        texts(stream(write(tmp_path / "a.jsonl", ["x"])), place={"row": 3})


def test_which_data_is_a_stream(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.txt").write_text("plain text\n" * 50)
    assert open_stream(str(tmp_path / "plain"), "text", Skipped()) is None
    assert open_stream("", "text", Skipped()) is None
    write(tmp_path / "plain" / "b.jsonl", ["a record"])
    (tmp_path / "plain" / "picture").write_bytes(b"\0" * 9000)
    source = open_stream(str(tmp_path / "plain"), "text", Skipped())
    assert isinstance(source, RecordFiles)
    assert sorted(texts(source)) == ["a record", "plain text\n" * 50]


def test_records_can_be_held_in_memory_too(tmp_path):
    write(tmp_path / "a.jsonl", [f"text {i}" for i in range(200)])
    documents = read_documents(str(tmp_path / "a.jsonl"), 2**20)
    assert {d.content.decode() for d in documents} == {f"text {i}" for i in range(200)}
    assert sum(len(d.content) for d in read_documents(str(tmp_path / "a.jsonl"), 101)) == 101
    with pytest.raises(DataError, match=r"no usable document in a\.jsonl \(texts in the field 'body'\)"):
        read_documents(str(tmp_path / "a.jsonl"), 2**20, "body")
