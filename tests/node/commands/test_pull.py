"""``shoal pull`` without a network, and `shoal sample` of what is there: what they take, refuse and
leave on the disk.
"""

import asyncio
import contextlib
import json
from concurrent.futures import Future

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from shoal.node.checkpoint.export import export_model
from shoal.node.cli.main import cli
from shoal.node.commands import pull as module
from shoal.node.commands.download import PullError, ResumableDownload, begun_download
from shoal.node.commands.pull import build_model, pull
from shoal.node.commands.sample import SampleError, continuation, load_pulled, prompt_tokens, sample
from shoal.node.config.settings import load
from shoal.node.data.source import DataError
from shoal.node.data.tokenizer import Bytes, load_tokenizer
from shoal.node.runtime.join import new_manifest
from shoal.node.runtime.task_setup import make_task
from shoal.node.tasks.gpt import GPT
from shoal.optim.codecs.floats import FLOAT32
from shoal.swarm.access.link import Link
from shoal.swarm.errors import NetworkError, printable
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import open_manifest
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.state import sync
from shoal.swarm.state.offers import SnapshotOffer
from shoal.swarm.state.query import ModelDiffersError
from shoal.swarm.state.snapshot import DIGEST_BYTES, State, chunk_size, encode
from shoal.swarm.state.snapshot import make as snapshot_of
from shoal.swarm.wire.envelope import CHUNK, pack_names
from tests.support.records import member_of
from tests.support.tokenizers_made_here import train

ME = Identity.ephemeral()
LINK = Link("a" * 52, (f"/ip4/127.0.0.1/tcp/1/p2p/{ME.peer_id}",))
HOOKS = '''
import torch
from shoal.node.task import Task

class Mine(Task):
    """Two layers, in two groups of the optimizer, the later one first."""
    def model(self):
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Linear(300, 1000), torch.nn.BatchNorm1d(1000), torch.nn.Linear(1000, 2))
    def inner_optimizer(self, params):
        first, *rest = params
        return torch.optim.SGD([{"params": rest}, {"params": [first]}], lr=0.1)
    def batches(self, shard): ...
    def loss(self, model, batch): ...
    def evaluate(self, model): return float(model[0].bias.detach().sum())
'''  # noqa: E501


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "task.py"
    path.write_text(HOOKS)
    return f"{path}:Mine"


def manifest(model, **overrides):
    return open_manifest(new_manifest(load(None, overrides), ME, model))


class World:
    """The swarm as `pull` sees it: its members' offers, and chunks that may end early."""

    def __init__(self, monkeypatch, manifest, tensors, names):
        self.manifest, self.peer_id, self.traffic = manifest, ME.peer_id, TrafficMeter()
        state = State(4, tensors, {"momentum": tensors}, [3])
        self.snapshot = self.offered = snapshot_of(state, encode(state), pack_names(names))
        self.held, self.most, self.given, self.met = True, 10**9, [], {}
        monkeypatch.setattr(module, "visited", self.visited)
        for name in ("choose_source", "fetch_digests", "download"):
            monkeypatch.setattr(sync, name, getattr(self, name))

    @contextlib.contextmanager
    def visited(self, link, admitted):
        model = self.manifest.model
        member = member_of(
            ME.peer_id,
            swarm=link.swarm,
            round=self.snapshot.header.round,
            step=10,
            loss=2.5,
            model=model,
        )
        other = Identity.ephemeral().peer_id
        yield (
            self,
            self.manifest,
            {
                ME.peer_id: member,
                other: member.model_copy(update={"peer": other, "step": 30, "loss": None}),
            },
            2,
        )

    def submit(self, coroutine):
        fetched = Future()
        try:
            fetched.set_result(asyncio.run(coroutine))
        except Exception as error:
            fetched.set_exception(error)
        return fetched

    async def choose_source(self, host, query, sources, attempt):
        query.check(ME.peer_id, self.offered.header)
        return [SnapshotOffer(ME.peer_id, (), self.offered.header)]

    async def fetch_digests(self, host, swarm, header, holders):
        if not self.held or header != self.snapshot.header:
            raise NetworkError("none of the peers that were asked holds the weights any more.")
        return self.snapshot.digests

    async def download(self, host, swarm, header, digests, holders, sink, wanted, arrived):
        for chunk in wanted:
            if chunk not in sink.have:
                if len(self.given) == self.most:
                    raise NetworkError(
                        "the peers that hold the weights have gone with some chunks missing."
                    )
                data = self.snapshot.content.numpy().data[
                    chunk * CHUNK : chunk * CHUNK + chunk_size(header.nbytes, chunk)
                ]
                sink.write(chunk, data)
                arrived(len(data))
                self.given.append(chunk)
        return set()


def fresh(task):
    built, why = build_model(manifest_of(task), task)
    assert why == ""
    return built


def manifest_of(task):
    settings = load(None, {"task.hooks": task})
    built = module._model(settings, make_task(settings))
    return manifest(
        model_digest(built.parameters), **{"task.hooks": task, "outer.method": "diloco"}
    )


@pytest.fixture
def world(monkeypatch, task):
    parameters = fresh(task).parameters
    generator = torch.Generator().manual_seed(1)
    return World(
        monkeypatch,
        manifest_of(task),
        [torch.randn(shape, generator=generator) for shape in parameters.shapes],
        parameters.names,
    )


def slow(world):
    header = world.snapshot.header
    return FLOAT32.decode(world.snapshot.content[: FLOAT32.nbytes(header.shapes)], header.shapes)


def test_pulled_names_are_the_models(world, task, tmp_path):
    """The file has the names of the model in whatever order the optimizer has them."""
    report = pull(LINK, tmp_path / "out", hooks=task)
    state = load_file(tmp_path / "out" / "model.safetensors")
    model = fresh(task).model
    model.load_state_dict(state)
    tensors = slow(world)
    names = list(fresh(task).parameters.names)
    assert names[:2] == ["0.weight", "0.bias"]
    for name in names:
        assert torch.equal(state[name], tensors[names.index(name)])
    assert (report["named"], report["round"], report["values"]) == (
        True,
        4,
        sum(t.numel() for t in tensors),
    )
    assert "fresh model" in report["notes"][0]  # the statistics of its BatchNorm
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "model.safetensors",
        "shoal.json",
    ]
    assert (
        json.loads((tmp_path / "out" / "shoal.json").read_text())["snapshot"]
        == world.snapshot.id.hex()
    )


def test_without_a_task_parameters_are_numbered(world, tmp_path, monkeypatch):
    """Without the task parameters are numbered and shapes are those of the manifest."""
    report = pull(LINK, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(state[f"parameter.{i}"], tensor) for i, tensor in enumerate(slow(world)))
    assert report["named"] is False
    assert "a link carries no code" in report["notes"][0]
    other = State(4, [torch.zeros(3)])
    world.offered = snapshot_of(other, encode(other))
    with pytest.raises(
        PullError,
        match=r"cannot be checked against the swarm's manifest: name your copy of the task",
    ):
        pull(LINK, tmp_path, force=True)


def test_the_card_has_what_manifest_and_members_say(world, task, tmp_path):
    report = pull(LINK, tmp_path, hooks=task)
    about = json.loads((tmp_path / "shoal.json").read_text())
    assert (about["peers"], about["steps"], about["train_loss"], about["rounds"]) == (
        2,
        [10, 30],
        2.5,
        4,
    )
    assert (about["outer"]["codec"], about["train"]["optimizer"], about["held_out_loss"]) == (
        "float32",
        "task",
        None,
    )
    card = (tmp_path / "README.md").read_text()
    assert "* Training loss: 2.5000, the mean" in card
    assert f"* Parameters: {report['values']:,}\n" in card


def test_held_out_loss_is_of_the_pulled_weights(world, task, tmp_path):
    """A held out loss is computed with the weights that came."""
    report = pull(LINK, tmp_path, hooks=task, evaluate=True)
    assert report["held_out_loss"] == pytest.approx(float(slow(world)[1].sum()))  # 0.bias
    assert f"held-out loss {report['held_out_loss']:.4f}, on the task's own data" in module.summary(
        report
    )
    assert f", after {report['rounds']} round" in module.summary(report)
    with pytest.raises(PullError, match="pull without --evaluate"):
        pull(LINK, tmp_path / "other", evaluate=True)
    assert world.given.count(0) == 1  # the second has downloaded nothing


@pytest.mark.parametrize(
    ("given", "swarms", "shown"),
    [
        (None, {}, "the Python standard library"),
        ("/home/anna/secret", {}, "files named with --data"),
        ("hf:./folder", {}, "files named with --data"),
        (None, {"data": "hf:a/b"}, "hf:a/b"),
        ("hf:c/d:test", {"data": "hf:a/b"}, "hf:c/d:test"),
    ],
)
def test_held_out_data_is_named_without_a_path(given, swarms, shown):
    """The data of a held out loss is named without a path."""
    made = manifest("1" * 64).model_copy(update={"task_options": swarms})
    assert module._held_out_on(made, given) == shown


def test_what_broke_off_goes_on_where_it_was(world, task, tmp_path):
    world.most = 1
    with pytest.raises(NetworkError, match="chunks missing"):
        pull(LINK, tmp_path, hooks=task)
    assert begun_download(tmp_path / ".pull") == world.snapshot.header
    assert not (tmp_path / "model.safetensors").exists()
    world.most = 10**9
    pull(LINK, tmp_path, hooks=task)
    assert sorted(world.given) == sorted(set(world.given))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["0.weight"], slow(world)[0])
    assert not (tmp_path / ".pull").exists()


def test_vanished_snapshot_gives_way_to_a_newer(world, task, tmp_path):
    """What nobody holds any more is given up for something newer."""
    world.most = 1
    with pytest.raises(NetworkError):
        pull(LINK, tmp_path, hooks=task)
    newer = State(9, [tensor + 1 for tensor in slow(world)])
    world.most, world.snapshot = 10**9, snapshot_of(newer, encode(newer))
    world.offered = world.snapshot
    assert pull(LINK, tmp_path, hooks=task)["round"] == 9


def test_only_weights_are_pulled(world, task, tmp_path):
    """Only the weights are taken and not what the rule shares."""
    pull(LINK, tmp_path, hooks=task)
    need = FLOAT32.nbytes(world.snapshot.header.shapes)
    assert world.snapshot.header.nbytes == 2 * need
    assert world.given == list(range(-(-need // CHUNK)))


def test_partial_file_is_checked_by_digests(world, tmp_path):
    """A partial file is believed only as far as its digests."""
    header, digests = world.snapshot.header, world.snapshot.digests
    kept = ResumableDownload(tmp_path / "p", header, digests, header.nbytes)
    assert kept.have == set()
    for chunk in (0, 2):
        kept.write(
            chunk,
            world.snapshot.content.numpy().data[
                chunk * CHUNK : chunk * CHUNK + chunk_size(header.nbytes, chunk)
            ],
        )
    kept.close()
    with kept.path.open("r+b") as file:
        file.seek(2 * CHUNK + 7)
        file.write(b"!!!!")
    again = ResumableDownload(tmp_path / "p", header, digests, header.nbytes)
    assert again.have == {0}
    again.close()
    assert len(digests) == DIGEST_BYTES * 3


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (
            lambda w: {"max_bytes": 1000},
            PullError,
            "at most 1,000 may come: allow more with --max-bytes",
        ),
        (
            lambda w: setattr(
                w, "manifest", manifest(w.manifest.model, **{"outer.method": "none"})
            ),
            PullError,
            "method none",
        ),
        (
            lambda w: setattr(w, "manifest", manifest("1" * 64, **{"task.hooks": "task.py:Mine"})),
            ModelDiffersError,
            "not the",
        ),
    ],
)
def test_what_cannot_be_pulled_is_said(world, task, tmp_path, change, error, sentence):
    options = change(world) or {}
    with pytest.raises(error, match=sentence):
        pull(LINK, tmp_path, hooks=task, **options)


def test_weights_that_are_there_stay_unless_forced(world, task, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(
        PullError, match=r"There are weights in .* already: choose another folder, or pass --force"
    ):
        pull(LINK, tmp_path, hooks=task)
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"
    pull(LINK, tmp_path, hooks=task, force=True)
    assert load_file(tmp_path / "model.safetensors")


def test_weights_that_are_not_finite_are_not_written(monkeypatch, world, task, tmp_path):
    spoiled = State(4, [tensor * float("nan") for tensor in slow(world)])
    world.snapshot = world.offered = snapshot_of(spoiled, encode(spoiled))
    with pytest.raises(PullError, match="NaN or infinity"):
        pull(LINK, tmp_path, hooks=task)
    assert list(tmp_path.glob("model*")) == []


@pytest.mark.parametrize("extra", [{"seen": 3}, None, torch.ones(2)])
def test_non_tensor_state_is_written_and_loads(tmp_path, monkeypatch, extra):
    """A module with state beside tensors is written and loads as the card says."""

    class Counting(torch.nn.Linear):
        def get_extra_state(self):
            return extra

        def set_extra_state(self, state):
            pass

    torch.manual_seed(0)
    made = Counting(2, 1)
    export_model(made, {"round": 3, "notes": []}, tmp_path, tmp_path / ".pull" / "new")
    lines = (tmp_path / "README.md").read_text().split("```")[1].removeprefix("python\n")
    monkeypatch.chdir(tmp_path)
    fresh = Counting(2, 1)
    exec(lines, {"model": fresh})
    assert torch.equal(fresh.weight, made.weight)


def test_a_model_of_transformers_is_written_as_it_writes_itself(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    files = export_model(model, {"round": 3, "notes": []}, tmp_path, tmp_path / ".pull" / "new")
    assert {"config.json", "model.safetensors", "README.md", "shoal.json"} <= set(files)
    again = transformers.GPT2LMHeadModel.from_pretrained(str(tmp_path))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    assert "GPT2LMHeadModel.from_pretrained" in (tmp_path / "README.md").read_text()


SIZE = {"layers": 1, "width": 8, "heads": 2, "context": 4}


def written(folder, weights=None, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(3)
    save_file((weights or GPT(**SIZE)).state_dict(), folder / "model.safetensors")
    about = {
        "swarm": "s",
        "name": "n",
        "round": 7,
        "task": "text",
        "task_options": {},
        "model": SIZE,
        "named": True,
        **changes,
    }
    (folder / "shoal.json").write_text(json.dumps(about))
    return folder


class Counts(torch.nn.Module):
    """Says that the next byte is one more than the last, by ``sure``; it remembers what it was
    shown.
    """

    def __init__(self, context=4, sure=50.0):
        super().__init__()
        self.positions = torch.nn.Embedding(context, 1)
        self.sure, self.seen = sure, []

    def forward(self, tokens):
        self.seen.append(tokens[0].tolist())
        return torch.nn.functional.one_hot((tokens + 1) % 256, 256).float() * self.sure


def draw(model, begun, count, temperature=1.0, top_k=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return continuation(
        model, begun, count, temperature=temperature, top_k=top_k, generator=generator
    )


def test_next_token_follows_from_the_context():
    """A token follows from the last ones that the context holds."""
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
    assert (
        len(set(draw(flat, [65], 200))) > 50
    )  # the likeliest has weight e, the 255 others have 1 each


def test_a_prompt_begins_a_document_and_does_not_end_one(tmp_path):
    assert prompt_tokens(Bytes(), "ab") == [10, 97, 98]
    assert prompt_tokens(Bytes(), "") == [10]
    named = load_tokenizer(str(train(tmp_path)))
    begun = prompt_tokens(named, "the fox")
    assert begun[0] == 0  # <|endoftext|>
    assert 0 not in begun[1:]
    assert named.decode(begun[1:]) == "the fox"
    assert Bytes().decode([97, 255, 98]) == "a\ufffdb"


def test_same_seed_samples_the_same_text(tmp_path):
    """The same seed gives the same texts and the report names it."""
    folder = written(tmp_path / "w")
    one = sample(folder, prompt="ab", tokens=20, samples=2)
    assert (one["name"], one["round"], one["tokens"]) == ("n", 7, 20)
    assert all(text.startswith("ab") for text in one["texts"])
    assert one["texts"][0] != one["texts"][1]
    assert (
        sample(folder, prompt="ab", tokens=20, samples=2, seed=one["seed"])["texts"] == one["texts"]
    )


def test_the_command_prints_text_that_cannot_drive_a_terminal(tmp_path, monkeypatch):
    folder = str(written(tmp_path / "w"))
    assert printable("a\x1b[2Jb\tc\nd\x00", "\n\t", "\ufffd") == "a\ufffd[2Jb\tc\nd\ufffd"
    arguments = [
        "sample",
        folder,
        "--prompt",
        "x\x1by",
        "--tokens",
        "3",
        "--samples",
        "2",
        "--seed",
        "1",
    ]
    plain = CliRunner().invoke(cli, arguments, standalone_mode=False).stdout
    assert "\x1b" not in plain
    assert [part[:3] for part in plain.split("\n---\n")] == ["x\ufffdy"] * 2
    report = json.loads(
        CliRunner().invoke(cli, [*arguments, "--json"], standalone_mode=False).stdout
    )
    assert (
        report["texts"]
        == sample(tmp_path / "w", prompt="x\x1by", tokens=3, samples=2, seed=1)["texts"]
    )


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
    hostile = written(
        tmp_path / "hostile", GPT(**size), model=size, task_options={"tokenizer": str(file)}
    )
    with pytest.raises(DataError, match="a path on somebody's machine"):
        load_pulled(hostile)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"task": "task.py:Mine"},
            "are of the task 'task.py:Mine', .* load them as README.md there says",
        ),
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


def test_damaged_folder_is_one_sentence(tmp_path):
    """A folder without weights or with damaged ones is one sentence."""
    with pytest.raises(
        SampleError, match=r"There are no weights of `shoal pull` in .*: name the folder"
    ):
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


def test_mean_of_all_members_is_checked_and_written(world, task, tmp_path):
    """Here all members serve the same snapshot, so the mean is that, to the last bit."""
    said = []
    report = pull(LINK, tmp_path / "out", hooks=task, average=True, say=said.append)
    assert [part["left_out"] for part in report["average"]] == [""] * len(report["average"])
    assert report["average"]
    losses = {part["loss"] for part in report["average"]}
    assert losses == {report["held_out_loss"]}
    assert len(said) == report["averaged"] == len(report["average"])
    state = load_file(tmp_path / "out" / "model.safetensors")
    names = list(fresh(task).parameters.names)
    assert all(torch.equal(state[name], slow(world)[at]) for at, name in enumerate(names))
    assert (
        "The weights are the mean of the newest ones of" in (tmp_path / "out/README.md").read_text()
    )
    assert not (tmp_path / "out" / ".pull").exists()
