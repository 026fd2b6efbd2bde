"""What the manifest says of data and tokenizer: names and a digest. What is a path stays on the machine that has it."""

import pytest

from shoal.node.cli.options import overrides
from shoal.node.config.settings import load
from shoal.node.data.reader import flags
from shoal.node.data.source import DataError
from shoal.node.runtime.door import swarm_settings
from shoal.node.runtime.join import new_manifest
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import open_manifest

ME = Identity.ephemeral()
DIGEST = {"tokenizer_digest": "f" * 64}


def manifest(options, hooks="text", agreed=None):
    settings = load(None, {"task.options": options, "task.hooks": hooks})
    return open_manifest(new_manifest(settings, ME, "0" * 64, agreed=agreed))


def joined(theirs, own=None):
    return swarm_settings(load(None, {f"task.options.{key}": value for key, value in (own or {}).items()}), theirs).task.options


def test_a_manifest_holds_a_name_but_never_a_path():
    assert manifest({"data": "/home/ada/texts", "width": 32}).task_options == {"width": 32}
    assert manifest({"data": "hf:./folder"}).task_options == {}
    named = {"data": "hf:owner/name:train", "field": "body", "tokenizer": "owner/name"}
    assert manifest(named, agreed=DIGEST).task_options == {**named, **DIGEST}
    assert manifest({"tokenizer": "/home/ada/tok"}, agreed=DIGEST).task_options == {"tokenizer": "tok", **DIGEST}
    assert manifest({"data": "/of/its/own", "width": 8}, hooks="a.py:Mine").task_options == {"width": 8}
    assert manifest({"data": "cifar10"}, hooks="a.py:Mine").task_options == {"data": "cifar10"}


def test_a_joiner_has_its_own_data_and_its_own_copy_of_the_tokenizer():
    theirs = manifest({"data": "hf:owner/name", "tokenizer": "./tok", "width": 32}, agreed=DIGEST)
    assert joined(theirs) == {"data": "hf:owner/name", "tokenizer": "tok", "width": 32, **DIGEST}
    own = {"data": "mine.jsonl", "tokenizer": "./copy"}
    assert joined(theirs, own) == {**own, "width": 32, **DIGEST}


@pytest.mark.parametrize(
    "options",
    [
        *[{"data": data} for data in ("/etc", "hf:../x", "", "hf: /etc", "hf:text", "hf:a/b,/etc", "hf:/a/b", "hf:a/b:/etc")],
        *[{"tokenizer": name} for name in ("/etc/x", "..", " /etc/x")],
    ],
)
def test_a_path_in_a_strangers_manifest_is_refused(options):
    # hf:text would be a format of the package datasets, read from the current folder; a space hid a path from the check once
    theirs = manifest({}).model_copy(update={"task_options": options})
    with pytest.raises(DataError, match=r"The swarm names '.*', a path on somebody's machine"):
        joined(theirs)


def test_a_tokenizer_where_the_swarm_has_bytes_is_one_sentence():
    with pytest.raises(DataError, match="The swarm trains on bytes, this node was given the tokenizer 'gpt2': leave it out"):
        joined(manifest({}), {"tokenizer": "gpt2"})
    assert joined(manifest({}), {"tokenizer": "bytes"}) == {"tokenizer": "bytes"}


def test_flags_and_options_become_settings():
    given = {"node.data": "a.jsonl", "task.options.tokenizer": "gpt2", "task.options": ("field=body", "width=8", "tokenizer=bytes")}
    settings = load(None, overrides(given))
    assert settings.node.data == "a.jsonl"
    assert settings.task.options == {"field": "body", "width": 8, "tokenizer": "gpt2"}
    assert not load(None, overrides({"node.data": None, "task.options": ()})).task.model_fields_set


def test_nodes_of_one_machine_are_given_what_the_manifest_does_not_tell():
    assert flags("text", {"data": "a.jsonl", "tokenizer": "./tok", "width": 8}) == ["--data", "a.jsonl", "--tokenizer", "./tok"]
    assert flags("a.py:Mine", {"data": "./x"}) == ["--data", "./x"]
    assert flags("text", {"width": 8}) == flags("a.py:Mine", {"data": "cifar10"}) == flags("rl", {"letters": 3}) == []


@pytest.mark.parametrize("data", ["/etc", "./x", "a,b", "hf: /etc", "here"])
def test_nor_is_a_task_of_ones_own_given_a_strangers_path(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").write_text("mine")
    for options in ({"data": data}, {"data": "cifar10", "width": 3}):
        theirs = manifest({}, hooks="a.py:Mine").model_copy(update={"task_options": options})
        if options["data"] == data:
            with pytest.raises(DataError, match="a path on somebody's machine"):
                swarm_settings(load(None, {"task.hooks": "b/a.py:Mine"}), theirs)
        else:
            assert swarm_settings(load(None, {"task.hooks": "b/a.py:Mine"}), theirs).task.options == options
