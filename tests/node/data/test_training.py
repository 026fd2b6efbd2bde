"""The text task on streams and tokens: it resumes bit by bit; and what the manifest says of data
and tokenizer.
"""

import gzip
import json
import math
from itertools import islice

import pytest
import torch

from shoal.node.checkpoint import store as checkpoint
from shoal.node.cli.options import overrides
from shoal.node.config.settings import load
from shoal.node.data.sharding import is_held_out
from shoal.node.data.source import DataError
from shoal.node.data.task_options import local_flags
from shoal.node.runtime.join import new_manifest
from shoal.node.runtime.task_setup import swarm_settings
from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import open_manifest
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from tests.support.blocking import blocking
from tests.support.tokenizers_made_here import train

TINY = {"width": 8, "heads": 2, "layers": 1, "context": 8, "batch": 2, "warmup": 3}
STEPS = 9


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "texts.jsonl.gz"
    lines = (
        json.dumps({"text": f"document {i} says that {i} times {i} is {i * i}."}) + "\n"
        for i in range(120)
    )
    path.write_bytes(gzip.compress("".join(lines).encode()))
    return str(path)


def trainer(task, shard=(1, 2)):
    made = Trainer(task, blocking(method="noloco", every=4), TrainSettings(steps=STEPS, seed=1))
    made.connect(Alone(), "run", Shard(*shard, 1))
    return made


def weights(made):
    return [*made.model.state_dict().values(), *made.opt.slow]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("saved_at", [0, 1, 5, STEPS])
def test_run_on_a_stream_resumes_bit_equal(tmp_path, stream, saved_at):
    """A run on a stream resumes from any step with the same bits."""

    def made():
        return trainer(TextTask(data=stream, shuffle=80, **TINY))

    whole = made()
    for _ in range(saved_at):
        whole.step()
    checkpoint.save(tmp_path, saved_at, whole.state())
    whole.run()
    again = made()
    again.task.batches_from = None  # a resumed run reads nothing that it had: it is not called
    again.resume(checkpoint.load(tmp_path)[1])
    again.run()
    assert same(weights(again), weights(whole))
    assert same(again._feed.next(0), whole._feed.next(0))


def test_untrained_batch_is_drawn_again(tmp_path, stream, monkeypatch):
    """Memory ran out in the step: the state that is saved then is of the step before."""
    whole, one, again = (trainer(TextTask(data=stream, shuffle=80, **TINY)) for _ in range(3))
    whole.run()
    for _ in range(3):
        one.step()
    monkeypatch.setattr(one.inner_step, "gradients", lambda batch: torch.zeros(1 << 62))
    with pytest.raises(RuntimeError):
        one.step()
    checkpoint.save(tmp_path, 3, one.state())
    again.resume(checkpoint.load(tmp_path)[1])
    again.run()
    assert same(weights(again), weights(whole))


def test_checkpoint_of_other_data_is_refused(tmp_path, stream):
    """A checkpoint of other data is refused and nothing is changed."""
    old = trainer(TextTask(data=stream, **TINY))
    for _ in range(3):
        old.step()
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "another text " * 50}) * 30)
    new = trainer(TextTask(data=str(tmp_path / "other.jsonl"), **TINY))
    before = [tensor.clone() for tensor in weights(new)]
    with pytest.raises(DataError, match=r"trained on other data.*this is other\.jsonl"):
        new.resume(old.state())
    assert same(weights(new), before)
    assert new.opt.steps == 0


def test_held_out_documents_are_never_trained_on(stream):
    """Held out documents of a stream are the same everywhere and never trained on."""
    task = TextTask(data=stream, **TINY)
    held = task.held_out()
    assert 3 < len(held) < 30
    assert all(is_held_out(document.content) for document in held)
    seen = [
        list(task._training().documents(Shard(index, 2, seed), 0))
        for index in range(2)
        for seed in (0, 7)
    ]
    names = {document.name for part in seen for _, document in part}
    assert not names & {document.name for document in held}
    assert len(names) + len(held) == 120
    torch.manual_seed(0)
    model = task.model()
    assert task.evaluate(model) == TextTask(data=stream, **TINY).evaluate(model)


def test_records_and_text_draw_at_random_and_in_epochs(tmp_path, stream):
    """Records can be drawn from at random and plain text in epochs."""
    in_memory = TextTask(data=stream, order="random", **TINY)
    assert in_memory.stream is None
    assert next(in_memory.batches(Shard(0, 2, 1)))[0].shape == (2, 8)
    (tmp_path / "plain.txt").write_bytes(bytes(range(32, 127)) * 200)
    epochs = TextTask(data=str(tmp_path / "plain.txt"), order="epochs", **{**TINY, "batch": 1})
    tokens = sum(len(document.content) + 1 for document in epochs._not_held_out())
    count = (tokens - 1) // 8
    first = [
        bytes(inputs[0].tolist()) for inputs, _ in islice(epochs.batches(Shard(0, 1, 1)), 2 * count)
    ]
    assert (
        abs(
            sum(part.count(b"A") for part in first[:count])
            - sum(part.count(b"A") for part in first[count:])
        )
        < 5
    )
    assert first[:count] != first[count:]


def test_a_stream_without_text_is_one_sentence(tmp_path):
    (tmp_path / "bad.jsonl").write_text("nothing\n" * 20)
    task = TextTask(data=str(tmp_path / "bad.jsonl"), **TINY)
    with pytest.raises(
        DataError, match=r"There is no usable document in bad\.jsonl \(texts in the field 'text'\)"
    ):
        next(task.batches(Shard(0, 1, 0)))
    with pytest.raises(DataError, match="There is no usable document"):
        task.evaluate(task.model())
    assert task.extra_results(0.0)["skipped"] >= 20


def test_tokenizer_sets_the_agreed_vocabulary(tmp_path, stream):
    """A tokenizer sets the vocabulary and its digest is agreed on."""
    path = str(train(tmp_path).parent)
    task = TextTask(data=stream, tokenizer=path, **TINY)
    model = task.model()
    assert model.head.out_features == model.bytes.num_embeddings == 300
    assert task.agreed_options() == {"tokenizer_digest": task.tokenizer.digest}
    assert TextTask().agreed_options() == {}
    assert max(int(inputs.max()) for inputs, _ in islice(task.batches(Shard(0, 1, 0)), 40)) > 256
    loss = task.evaluate(model)
    assert math.log(300) - 0.5 < loss < math.log(300) + 1.5
    text = b"".join(document.content for document in task.held_out())
    tokens = sum(
        len(piece)
        for document in task.held_out()
        for piece in task.tokenizer.encode(document.content)
    )
    assert task.extra_results(loss) == {
        "bits_per_byte": pytest.approx(loss / math.log(2) * tokens / len(text)),
        "skipped": 0,
    }
    assert TextTask().extra_results(math.log(256)) == {"bits_per_byte": pytest.approx(8.0)}
    with pytest.raises(DataError, match="another one here"):
        TextTask(tokenizer=path, tokenizer_digest="0" * 64).model()


def test_a_run_with_a_tokenizer_in_memory_learns(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(30):
        (tmp_path / "text" / f"{i}.txt").write_text(
            f"the quick brown fox jumps over the lazy dog {i}. " * 20
        )
    task = TextTask(
        data=str(tmp_path / "text"),
        tokenizer=str(train(tmp_path / "tok").parent),
        **{**TINY, "width": 16, "batch": 8},
    )
    made = Trainer(task, OuterSettings(method="none"), TrainSettings(steps=40, seed=1))
    made.connect(Alone(), "run", Shard(0, 1, 1))
    before = made.evaluate()
    made.run()
    assert made.evaluate() < before - 1


ME = Identity.ephemeral()
DIGEST = {"tokenizer_digest": "f" * 64}


def manifest(options, hooks="text", agreed=None):
    settings = load(None, {"task.options": options, "task.hooks": hooks})
    return open_manifest(new_manifest(settings, ME, "0" * 64, agreed=agreed))


def joined(theirs, own=None):
    return swarm_settings(
        load(None, {f"task.options.{key}": value for key, value in (own or {}).items()}), theirs
    ).task.options


def test_a_manifest_holds_a_name_but_never_a_path():
    assert manifest({"data": "/home/ada/texts", "width": 32}).task_options == {"width": 32}
    assert manifest({"data": "hf:./folder"}).task_options == {}
    named = {"data": "hf:owner/name:train", "field": "body", "tokenizer": "owner/name"}
    assert manifest(named, agreed=DIGEST).task_options == {**named, **DIGEST}
    assert manifest({"tokenizer": "/home/ada/tok"}, agreed=DIGEST).task_options == {
        "tokenizer": "tok",
        **DIGEST,
    }
    assert manifest({"data": "/of/its/own", "width": 8}, hooks="a.py:Mine").task_options == {
        "width": 8
    }
    assert manifest({"data": "cifar10"}, hooks="a.py:Mine").task_options == {"data": "cifar10"}


def test_joiner_has_its_own_data_and_tokenizer():
    """A joiner has its own data and its own copy of the tokenizer."""
    theirs = manifest({"data": "hf:owner/name", "tokenizer": "./tok", "width": 32}, agreed=DIGEST)
    assert joined(theirs) == {"data": "hf:owner/name", "tokenizer": "tok", "width": 32, **DIGEST}
    own = {"data": "mine.jsonl", "tokenizer": "./copy"}
    assert joined(theirs, own) == {**own, "width": 32, **DIGEST}


@pytest.mark.parametrize(
    "options",
    [
        *[
            {"data": data}
            for data in (
                "/etc",
                "hf:../x",
                "",
                "hf: /etc",
                "hf:text",
                "hf:a/b,/etc",
                "hf:/a/b",
                "hf:a/b:/etc",
            )
        ],
        *[{"tokenizer": name} for name in ("/etc/x", "..", " /etc/x")],
    ],
)
def test_a_path_in_a_strangers_manifest_is_refused(options):
    # hf:text would be a format of the package datasets, read from the current folder; a space hid a
    # path from the check once
    theirs = manifest({}).model_copy(update={"task_options": options})
    with pytest.raises(DataError, match=r"The swarm names '.*', a path on somebody's machine"):
        joined(theirs)


def test_a_tokenizer_where_the_swarm_has_bytes_is_one_sentence():
    with pytest.raises(
        DataError,
        match="The swarm trains on bytes, this node was given the tokenizer 'gpt2': leave it out",
    ):
        joined(manifest({}), {"tokenizer": "gpt2"})
    assert joined(manifest({}), {"tokenizer": "bytes"}) == {"tokenizer": "bytes"}


def test_flags_and_options_become_settings():
    given = {
        "node.data": "a.jsonl",
        "task.options.tokenizer": "gpt2",
        "task.options": ("field=body", "width=8", "tokenizer=bytes"),
    }
    settings = load(None, overrides(given))
    assert settings.node.data == "a.jsonl"
    assert settings.task.options == {"field": "body", "width": 8, "tokenizer": "gpt2"}
    assert not load(None, overrides({"node.data": None, "task.options": ()})).task.model_fields_set


def test_local_nodes_get_what_the_manifest_omits():
    """Nodes of one machine are given what the manifest does not tell."""
    assert local_flags("text", {"data": "a.jsonl", "tokenizer": "./tok", "width": 8}) == [
        "--data",
        "a.jsonl",
        "--tokenizer",
        "./tok",
    ]
    assert local_flags("a.py:Mine", {"data": "./x"}) == ["--data", "./x"]
    assert (
        local_flags("text", {"width": 8})
        == local_flags("a.py:Mine", {"data": "cifar10"})
        == local_flags("rl", {"letters": 3})
        == []
    )


@pytest.mark.parametrize("data", ["/etc", "./x", "a,b", "hf: /etc", "here"])
def test_own_task_is_given_no_foreign_path(data, tmp_path, monkeypatch):
    """Nor is a task of one's own given a stranger's path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").write_text("mine")
    for options in ({"data": data}, {"data": "cifar10", "width": 3}):
        theirs = manifest({}, hooks="a.py:Mine").model_copy(update={"task_options": options})
        if options["data"] == data:
            with pytest.raises(DataError, match="a path on somebody's machine"):
                swarm_settings(load(None, {"task.hooks": "b/a.py:Mine"}), theirs)
        else:
            assert (
                swarm_settings(load(None, {"task.hooks": "b/a.py:Mine"}), theirs).task.options
                == options
            )
