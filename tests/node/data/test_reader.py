"""Batches from a stream: every token once, in another order in each epoch, and a resumed reader gives the very same ones."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.checkpoint import store as checkpoint
from shoal.node.data.reader import Bytes, Reader
from shoal.node.data.source import DataError, Document, Listed
from shoal.node.task import Shard


def listed(*contents):
    return Listed([Document(f"{i}", content) for i, content in enumerate(contents)], "the list")


ALL = Shard(0, 1, 3)


def reader(source, shard=ALL, *, context=4, batch=3, shuffle=40):
    return Reader(source, Bytes(), shard, context=context, batch=batch, shuffle=shuffle)


def same(a, b):
    return all(torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


DOCUMENTS = st.lists(st.binary(max_size=60), min_size=1, max_size=12)


@settings(deadline=None, max_examples=30)
@given(
    DOCUMENTS, st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), st.sampled_from([1, 17, 64, 4096]), st.integers(0, 25),
    st.data(),
)  # fmt: skip
def test_a_resumed_reader_gives_the_same_batches_from_any_place_on(contents, of, context, batch, shuffle, taken, data):
    source, shard = listed(*contents, b"enough for a window"), Shard(data.draw(st.integers(0, of - 1)), of, 3)

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
def test_an_epoch_has_each_next_token_once_but_for_the_last_few(contents, context, shuffle):
    source = listed(*contents, b"enough for a window")
    total = sum(len(document.content) + 1 for document in source.known)
    count = (total - 1) // context
    epoch = list(islice(reader(source, context=context, batch=1, shuffle=shuffle), count))
    order = [document for _, document in source.documents(Shard(0, 1, 3), 0)]
    text = b"".join(document.content + b"\n" for document in order)
    windows = sorted(text[i * context : (i + 1) * context + 1] for i in range(count))
    assert sorted(bytes([*inputs[0].tolist(), targets[0, -1].item()]) for inputs, targets in epoch) == windows
    assert all(torch.equal(inputs[:, 1:], targets[:, :-1]) for inputs, targets in epoch)


def test_batches_are_whole_numbers_and_differ_by_shard_seed_and_epoch():
    source = listed(*(f"document number {i}, of some length".encode() for i in range(40)))
    inputs, targets = next(reader(source))
    assert inputs.shape == targets.shape == (3, 4)
    assert inputs.dtype == targets.dtype == torch.int64
    a, b, c = (list(islice(reader(source, shard), 4)) for shard in (Shard(0, 2, 3), Shard(1, 2, 3), Shard(0, 2, 4)))
    assert not same(a, b)
    assert not same(a, c)
    assert same(a, islice(reader(source, Shard(0, 2, 3)), 4))
    one = reader(listed(b"0123456789abcdef"), context=4, batch=4, shuffle=10_000)  # a batch is all of an epoch
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
    with pytest.raises(DataError, match=r"shard 1 of 2 has only \d+ tokens in 64 epochs of the list, where 1025 are needed"):
        next(reader(listed(b"few", b"words"), Shard(1, 2, 3), context=1024))


def test_little_text_is_gathered_over_epochs():
    assert next(reader(listed(b"few", b"words"), Shard(1, 2, 3), context=16))[0].shape == (3, 16)


def test_a_place_in_other_data_or_of_another_shard_is_refused_and_changes_nothing():
    source = listed(b"some text that is long enough", b"and another one")
    made, other = reader(source), reader(source)
    list(islice(made, 3))
    state = made.state_dict()
    for wrong in (
        reader(listed(b"other text")), reader(source, Shard(0, 2, 3)), reader(source, Shard(0, 1, 4)), reader(source, context=5),
        reader(source, shuffle=80),
    ):  # fmt: skip
        with pytest.raises(DataError, match="trained on other data, or with another tokenizer, context or shuffle"):
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
