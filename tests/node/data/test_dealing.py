"""Who gets which document: a pure function of (seed, shard, epoch), and the shards of an epoch have each once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.data.source import HELD_OUT_ONE_IN, belongs, dealt, held_out
from shoal.node.task import Shard

NAMES = st.lists(st.text(st.characters(codec="utf-8"), max_size=8), max_size=40)
SEED, EPOCH, OF = st.integers(0, 2**32), st.integers(0, 10_000), st.integers(1, 9)


@settings(deadline=None, max_examples=40)
@given(NAMES, SEED, EPOCH, OF)
def test_the_shards_of_an_epoch_have_each_known_document_once_and_as_many(names, seed, epoch, of):
    shards = [dealt(names, Shard(index, of, seed), epoch) for index in range(of)]
    assert sorted(i for shard in shards for i in shard) == list(range(len(names)))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@settings(deadline=None, max_examples=40)
@given(NAMES, SEED, EPOCH, OF)
def test_each_document_of_a_stream_is_of_one_shard(names, seed, epoch, of):
    for name in names:
        assert sum(belongs(Shard(index, of, seed), epoch, name) for index in range(of)) == 1


@settings(deadline=None, max_examples=40)
@given(NAMES, SEED, EPOCH, OF)
def test_the_same_again_and_wherever_the_documents_stand(names, seed, epoch, of):
    shard = Shard(of - 1, of, seed)
    once = dealt(names, shard, epoch)
    assert dealt(names, shard, epoch) == once
    backwards = names[::-1]
    assert [backwards[i] for i in dealt(backwards, shard, epoch)] == [names[i] for i in once]


@settings(deadline=None, max_examples=40)
@given(SEED, EPOCH)
def test_epochs_and_seeds_differ_in_order_and_in_whom_they_deal_to(seed, epoch):
    names = [f"document {i}" for i in range(60)]  # 60! orders: two are the same by chance never
    here, there = Shard(0, 4, seed), Shard(0, 4, seed + 1)
    assert dealt(names, here, epoch) != dealt(names, here, epoch + 1)
    assert dealt(names, here, epoch) != dealt(names, there, epoch)
    whose = [[belongs(shard, each, name) for name in names] for shard, each in [(here, epoch), (here, epoch + 1), (there, epoch)]]
    assert whose[0] != whose[1]
    assert whose[0] != whose[2]


def test_fewer_documents_than_shards_come_to_each_in_some_epoch():
    for index in range(5):
        assert any(dealt(["one", "two"], Shard(index, 5, 3), epoch) for epoch in range(30))


def test_a_stream_is_dealt_evenly_enough():
    counts = [sum(belongs(Shard(index, 4, 7), 3, f"x:{line}") for line in range(4000)) for index in range(4)]
    assert sum(counts) == 4000
    assert max(counts) - min(counts) < 200


def test_one_document_in_ten_is_held_out_by_its_text_alone():
    held = sum(held_out(f"text {i}".encode()) for i in range(5000))
    assert abs(held - 5000 / HELD_OUT_ONE_IN) < 100
    assert held_out(b"the same") == held_out(b"the same")
