"""Datasets by name: what the name says, and rows as a stream that can be continued.

Nothing here goes to the network.
"""

import gzip
import json
import logging
import sys

import pytest

from shoal.node.data import hub_dataset
from shoal.node.data.hub_dataset import HubDataset
from shoal.node.data.hub_name import DatasetName
from shoal.node.data.source import DataError, Skipped
from shoal.node.task import Shard
from shoal.node.tasks.documents import open_stream, read_documents

ALL = Shard(0, 1, 5)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("hf:wikitext", DatasetName("wikitext", None, "train")),
        ("hf:owner/name", DatasetName("owner/name", None, "train")),
        ("hf:owner/name:validation", DatasetName("owner/name", None, "validation")),
        ("hf:owner/name:train[:10%]", DatasetName("owner/name", None, "train[:10%]")),
        ("hf:owner/name/config-1.0", DatasetName("owner/name", "config-1.0", "train")),
        ("hf:owner/name/config:test", DatasetName("owner/name", "config", "test")),
    ],
)
def test_names(data, name):
    assert DatasetName.parse(data) == name


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("hf:", "is no dataset: write hf:NAME"),
        ("hf:a/b/c/d", "is no dataset"),
        ("hf:a/../b", "is no dataset"),
        ("hf:owner/na me", "is no dataset"),
        ("hf:./none", "There is no folder './none'"),
    ],
)
def test_what_is_no_name_is_one_sentence(data, words):
    with pytest.raises(DataError, match=words) as caught:
        DatasetName.parse(data)
    assert "\n" not in str(caught.value)


def test_hub_name_is_never_a_local_folder(tmp_path, monkeypatch):
    """A name is never a folder that happens to be here."""
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=r"folder 'owner/name' here, named as a dataset: write hf:\./owner/name"
    ):
        DatasetName.parse("hf:owner/name")
    assert DatasetName.parse("hf:./owner/name:test") == DatasetName("./owner/name", None, "test")


def test_without_the_package_the_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError,
        match=r"needs the package datasets, .* run pip install 'shoal\[data\]', or name files",
    ):
        read_documents("hf:owner/name", 1000)


class Rows:
    """As much of a streamed dataset as is in use."""

    def __init__(self, rows, at=0):
        self.rows, self.at = rows, at

    def __iter__(self):
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]

    def skip(self, count):
        return Rows(self.rows, count)


class Stateful(Rows):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("kind", [Rows, Stateful])
def test_stream_continues_alike_from_any_place(monkeypatch, kind):
    """From any place on the same follows with and without a state."""
    monkeypatch.setattr(hub_dataset, "ANCHOR_EVERY_ROWS", 7)
    monkeypatch.setattr(
        HubDataset, "_open", lambda self: kind([{"text": f"row {i}"} for i in range(60)])
    )
    source, shard = HubDataset("hf:owner/name", "text", Skipped()), Shard(1, 2, 5)
    whole = list(source.documents(shard, 0))
    assert 20 < len(whole) < 40
    for i, (place, _) in enumerate(whole):
        assert ("state" in place) == (kind is Stateful and place["row"] >= 7)
        again = list(source.documents(shard, 0, place))
        assert [d for _, d in again] == [d for _, d in whole[i:]]
        assert [p["row"] for p, _ in again] == [p["row"] for p, _ in whole[i:]]
    other = {d.name for _, d in source.documents(Shard(0, 2, 5), 0)}
    assert not other & {d.name for _, d in whole}
    assert len(other) + len(whole) == 60


def test_an_error_on_the_way_is_one_sentence(monkeypatch):
    def rows():
        yield {"text": "one"}
        raise ConnectionError("the server is gone\nand more")

    source = HubDataset("hf:owner/name", "text", Skipped())
    monkeypatch.setattr(HubDataset, "_open", lambda self: rows())
    with pytest.raises(
        DataError, match=r"Cannot read hf:owner/name .*the server is gone"
    ) as caught:
        list(source.documents(ALL, 0))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset of 700 rows in three packed files, as one finds them on the hub."""
    pytest.importorskip("datasets", reason="datasets is not installed: pip install 'shoal[data]'")
    root = tmp_path_factory.mktemp("dataset")
    for part, rows in enumerate([range(300), range(300, 310), range(310, 700)]):
        lines = "".join(
            json.dumps({"body": f"row {i} says something", "n": i}) + "\n" for i in rows
        )
        (root / f"part-{part}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return root


def test_folder_continues_by_its_own_state(folder, monkeypatch):
    """A folder is read by the package and continued by its own state."""
    monkeypatch.setattr(hub_dataset, "ANCHOR_EVERY_ROWS", 100)
    source, shard = open_stream(f"hf:{folder}", "body", Skipped()), Shard(0, 3, 5)
    whole = list(source.documents(shard, 1))
    others = [d for index in (1, 2) for _, d in source.documents(Shard(index, 3, 5), 1)]
    assert {d.content.decode() for d in others} | {d.content.decode() for _, d in whole} == {
        f"row {i} says something" for i in range(700)
    }
    assert len(others) + len(whole) == 700
    assert "state" in whole[-1][0]
    for i in (0, len(whole) // 2, len(whole) - 1):
        again = list(source.documents(shard, 1, whole[i][0]))
        assert [d for _, d in again] == [d for _, d in whole[i:]]


def test_a_column_or_a_split_that_is_not_there(folder, caplog):
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(DataError, match=r"no usable document .*in the column 'text'"),
    ):
        read_documents(f"hf:{folder}", 1000)
    assert "Row 0 of hf:" in caplog.text
    with pytest.raises(DataError, match=r"Cannot open the dataset .*, split 'test'") as caught:
        read_documents(f"hf:{folder}:test", 1000)
    assert "\n" not in str(caught.value)
