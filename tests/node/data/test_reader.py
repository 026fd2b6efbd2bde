"""Streams of documents: from files, dealt by a pure function, and read in batches that have every
token once and resume.
"""

import gzip
import json
import logging
import tracemalloc
from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.checkpoint import store as checkpoint
from shoal.node.data import record_files
from shoal.node.data.reader import Reader
from shoal.node.data.record_files import RecordFiles
from shoal.node.data.sharding import HELD_OUT_ONE_IN, assigned, is_held_out, is_in_shard
from shoal.node.data.source import DataError, Document, Listed, Skipped
from shoal.node.data.tokenizer import Bytes
from shoal.node.task import Shard
from shoal.node.tasks.documents import open_stream, read_documents


def listed(*contents):
    return Listed([Document(f"{i}", content) for i, content in enumerate(contents)], "the list")


ALL = Shard(0, 1, 3)


def reader(source, shard=ALL, *, context=4, batch=3, shuffle=40):
    return Reader(source, Bytes(), shard, context=context, batch=batch, shuffle=shuffle)


def same(a, b):
    return all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


DOCUMENTS = st.lists(st.binary(max_size=60), min_size=1, max_size=12)


@settings(deadline=None, max_examples=30)
@given(
    DOCUMENTS,
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([1, 17, 64, 4096]),
    st.integers(0, 25),
    st.data(),
)
def test_reader_resumes_with_the_same_batches(contents, of, context, batch, shuffle, taken, data):
    """A resumed reader gives the same batches from any place on."""
    source, shard = (
        listed(*contents, b"enough for a window"),
        Shard(data.draw(st.integers(0, of - 1)), of, 3),
    )

    def made():
        return reader(source, shard, context=context, batch=batch, shuffle=shuffle)

    whole = made()
    before = list(islice(whole, taken))
    state = whole.state_dict()
    after = list(islice(whole, 12))
    again = made()
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert same(islice(again, 12), after)
    # The place is right after any number of resumptions too.
    third = made()
    for expected in (before + after)[:15]:
        assert same([next(third)], [expected])
        place = third.state_dict()
        third = made()
        third.load_state_dict(place)


@settings(deadline=None, max_examples=30)
@given(DOCUMENTS, st.integers(1, 6), st.sampled_from([1, 30, 10_000]))
def test_epoch_has_each_token_once(contents, context, shuffle):
    """An epoch has each next token once but for the last few."""
    source = listed(*contents, b"enough for a window")
    total = sum(len(document.content) + 1 for document in source.known)
    count = (total - 1) // context
    epoch = list(islice(reader(source, context=context, batch=1, shuffle=shuffle), count))
    order = [document for _, document in source.documents(Shard(0, 1, 3), 0)]
    text = b"".join(document.content + b"\n" for document in order)
    windows = sorted(text[i * context : (i + 1) * context + 1] for i in range(count))
    assert (
        sorted(bytes([*inputs[0].tolist(), targets[0, -1].item()]) for inputs, targets in epoch)
        == windows
    )
    assert all(torch.equal(inputs[:, 1:], targets[:, :-1]) for inputs, targets in epoch)


def test_batches_differ_by_shard_seed_and_epoch():
    """Batches are whole numbers and differ by shard seed and epoch."""
    source = listed(*(f"document number {i}, of some length".encode() for i in range(40)))
    inputs, targets = next(reader(source))
    assert inputs.shape == targets.shape == (3, 4)
    assert inputs.dtype == targets.dtype == torch.int64
    a, b, c = (
        list(islice(reader(source, shard), 4))
        for shard in (Shard(0, 2, 3), Shard(1, 2, 3), Shard(0, 2, 4))
    )
    assert not same(a, b)
    assert not same(a, c)
    assert same(a, islice(reader(source, Shard(0, 2, 3)), 4))
    one = reader(
        listed(b"0123456789abcdef"), context=4, batch=4, shuffle=10_000
    )  # a batch is all of an epoch
    first, second = next(one)[0], next(one)[0]
    assert sorted(first.flatten().tolist()) == sorted(b"0123456789abcdef")
    assert not torch.equal(first, second)


def test_a_state_is_small_and_a_checkpoint_holds_it(tmp_path):
    made = reader(listed(b"x" * 5000, b"y" * 5000), shuffle=8000)
    list(islice(made, 7))
    checkpoint.save(tmp_path, 7, {"data": made.state_dict()})
    _, state = checkpoint.load(tmp_path)
    assert state["data"] == made.state_dict()
    assert len(str(state)) < 300
    assert len(made._left) <= 2


def test_no_usable_document_is_one_sentence():
    with pytest.raises(DataError, match="There is no usable document in the list: name other data"):
        next(reader(listed()))


def test_too_little_text_names_the_shard():
    with pytest.raises(
        DataError,
        match=r"shard 1 of 2 has only \d+ tokens in 64 epochs of the list, where 1025 are needed",
    ):
        next(reader(listed(b"few", b"words"), Shard(1, 2, 3), context=1024))


def test_little_text_is_gathered_over_epochs():
    assert next(reader(listed(b"few", b"words"), Shard(1, 2, 3), context=16))[0].shape == (3, 16)


def test_foreign_place_is_refused_and_changes_nothing():
    """A place in other data or of another shard is refused and changes nothing."""
    source = listed(b"some text that is long enough", b"and another one")
    made, other = reader(source), reader(source)
    list(islice(made, 3))
    state = made.state_dict()
    for wrong in (
        reader(listed(b"other text")),
        reader(source, Shard(0, 2, 3)),
        reader(source, Shard(0, 1, 4)),
        reader(source, context=5),
        reader(source, shuffle=80),
    ):
        with pytest.raises(
            DataError, match="trained on other data, or with another tokenizer, context or shuffle"
        ):
            wrong.load_state_dict(state)
    for key, value in [("epoch", -1), ("place", 3), ("drawn", None), ("offset", "1")]:
        with pytest.raises(DataError, match="damaged"):
            other.load_state_dict({**state, key: value})
    assert same(islice(other, 4), islice(reader(source), 4))


def test_less_text_than_before_is_one_sentence():
    source = listed(b"text " * 30)
    made = reader(source, shuffle=100)
    list(islice(made, 5))
    state = made.state_dict()
    short = replace(source, known=[Document("0", b"text " * 30)])
    short.known[0].__dict__["content"] = b"text"
    again = reader(short, shuffle=100)
    again.load_state_dict(state)
    with pytest.raises(DataError, match="less text than when"):
        next(again)


NAMES = st.lists(st.text(st.characters(codec="utf-8"), max_size=8), max_size=40)
SEED, EPOCH, OF = st.integers(0, 2**32), st.integers(0, 10_000), st.integers(1, 9)


@settings(deadline=None, max_examples=40)
@given(NAMES, SEED, EPOCH, OF)
def test_shards_divide_an_epoch_evenly(names, seed, epoch, of):
    """The shards of an epoch have each known document once and as many."""
    shards = [assigned(names, Shard(index, of, seed), epoch) for index in range(of)]
    assert sorted(i for shard in shards for i in shard) == list(range(len(names)))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@settings(deadline=None, max_examples=40)
@given(NAMES, SEED, EPOCH, OF)
def test_each_document_of_a_stream_is_of_one_shard(names, seed, epoch, of):
    for name in names:
        assert sum(is_in_shard(Shard(index, of, seed), epoch, name) for index in range(of)) == 1


@settings(deadline=None, max_examples=40)
@given(NAMES, SEED, EPOCH, OF)
def test_the_same_again_and_wherever_the_documents_stand(names, seed, epoch, of):
    shard = Shard(of - 1, of, seed)
    once = assigned(names, shard, epoch)
    assert assigned(names, shard, epoch) == once
    backwards = names[::-1]
    assert [backwards[i] for i in assigned(backwards, shard, epoch)] == [names[i] for i in once]


@settings(deadline=None, max_examples=40)
@given(SEED, EPOCH)
def test_epochs_and_seeds_differ_in_order(seed, epoch):
    """Epochs and seeds differ in order and in whom they deal to."""
    names = [f"document {i}" for i in range(60)]  # 60! orders: two are the same by chance never
    here, there = Shard(0, 4, seed), Shard(0, 4, seed + 1)
    assert assigned(names, here, epoch) != assigned(names, here, epoch + 1)
    assert assigned(names, here, epoch) != assigned(names, there, epoch)
    whose = [
        [is_in_shard(shard, each, name) for name in names]
        for shard, each in [(here, epoch), (here, epoch + 1), (there, epoch)]
    ]
    assert whose[0] != whose[1]
    assert whose[0] != whose[2]


def test_fewer_documents_than_shards_come_to_each_in_some_epoch():
    for index in range(5):
        assert any(assigned(["one", "two"], Shard(index, 5, 3), epoch) for epoch in range(30))


def test_a_stream_is_dealt_evenly_enough():
    counts = [
        sum(is_in_shard(Shard(index, 4, 7), 3, f"x:{line}") for line in range(4000))
        for index in range(4)
    ]
    assert sum(counts) == 4000
    assert max(counts) - min(counts) < 200


def test_one_document_in_ten_is_held_out():
    """One document in ten is held out by its text alone."""
    held = sum(is_held_out(f"text {i}".encode()) for i in range(5000))
    assert abs(held - 5000 / HELD_OUT_ONE_IN) < 100
    assert is_held_out(b"the same") == is_held_out(b"the same")


FILE_ALL = Shard(0, 1, 5)


def write(path, texts, field="text"):
    lines = "".join(
        json.dumps({field: text, "n": i}) + "\n" for i, text in enumerate(texts)
    ).encode()
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)
    return path


def stream(*paths, field="text"):
    return RecordFiles([(path.name, path) for path in paths], field, Skipped())


def texts(source, shard=FILE_ALL, epoch=0, place=None):
    return [document.content.decode() for _, document in source.documents(shard, epoch, place)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_records_are_documents_with_the_text_of_their_field(tmp_path, name):
    wanted = [f"text {i}, naïve 🐟\nand more" for i in range(50)]
    assert texts(stream(write(tmp_path / name, wanted, "body"), field="body")) == wanted
    assert [d.name for _, d in stream(tmp_path / name, field="body").documents(FILE_ALL, 0)][
        :2
    ] == [f"{name}:1", f"{name}:2"]


def test_packed_text_is_cut_at_line_ends(tmp_path):
    """Packed text is cut at ends of lines and nothing is lost."""
    content = "".join(f"line {i} of a text\n" for i in range(3000)) + "and no end of line"
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content.encode()))
    found = texts(stream(tmp_path / "a.txt.gz"))
    assert "".join(found) == content
    assert all(piece.endswith("\n") and 4096 <= len(piece) < 4200 for piece in found[:-1])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt.gz"])
def test_the_shards_of_an_epoch_have_each_document_once(tmp_path, name):
    if name == "a.txt.gz":
        (tmp_path / name).write_bytes(
            gzip.compress(b"".join(b"%05d" % i * 200 + b"\n" for i in range(400)))
        )
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
        (tmp_path / name).write_bytes(
            gzip.compress(b"".join(b"%05d" % i * 200 + b"\n" for i in range(100)))
        )
    else:
        write(tmp_path / name, [f"text {i} " * (i + 1) for i in range(30)])
    source, shard = stream(tmp_path / name, tmp_path / "b.jsonl"), Shard(1, 2, 5)
    whole = list(source.documents(shard, 2))
    assert len(whole) > 10
    for i, (place, _) in enumerate(whole):
        assert list(source.documents(shard, 2, place)) == whole[i:]


def test_what_is_no_record_is_skipped_counted_and_told_once(tmp_path, caplog):
    bad = [
        b"not json",
        b"[1]",
        b'{"body": "x"}',
        b'{"text": 3}',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"text": "bad \\ud800 half"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(
        b"\n".join([b'{"text": "good"}', *bad, b"", b'{"text": ""}', b'{"text": "too"}'])
    )
    source = stream(tmp_path / "a.jsonl")
    with caplog.at_level(logging.WARNING):
        assert texts(source) == ["good", "bad ? half", "too"]
    assert source.skipped.count == 6
    (record,) = caplog.records
    assert record.getMessage() == (
        "Line 2 of 'a.jsonl' is no JSON object with a text in the field 'text', so it is skipped, "
        "and others like it will be without a word."
    )


def test_lines_that_are_too_long_are_skipped_without_being_held(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(record_files, "MAX_LINE_BYTES", 2**20)
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
    assert [place["line"] for place, _ in source.documents(FILE_ALL, 0)] == [1, 3]


def test_a_line_of_the_greatest_length_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "MAX_LINE_BYTES", 40)
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
    *_, (place, _) = stream(path).documents(FILE_ALL, 0)
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
    with pytest.raises(
        DataError, match=r"no usable document in a\.jsonl \(texts in the field 'body'\)"
    ):
        read_documents(str(tmp_path / "a.jsonl"), 2**20, "body")
