"""``shoal pull`` without a network: what it takes and refuses, what stays on the disk when it breaks off, and what it writes."""

import asyncio
import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file

from shoal.node.checkpoint.export import export_model
from shoal.node.commands import pull as module
from shoal.node.commands.pull import PullError, ResumableDownload, begun_download, build_model, pull
from shoal.node.config.settings import load
from shoal.node.runtime.door import make_task
from shoal.node.runtime.join import new_manifest
from shoal.optim.codecs.base import FLOAT32
from shoal.swarm.access import Link
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import open_manifest
from shoal.swarm.pacing import TrafficMeter
from shoal.swarm.state import sync
from shoal.swarm.state.selection import SnapshotOffer
from shoal.swarm.state.snapshot import DIGEST, State, chunk_size, encode
from shoal.swarm.state.snapshot import make as snapshot_of
from shoal.swarm.state.sync import ModelDiffersError
from shoal.swarm.wire.envelope import CHUNK
from tests.records import member_of

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
'''


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "task.py"
    path.write_text(HOOKS)
    return f"{path}:Mine"


def manifest(model, **overrides):
    return open_manifest(new_manifest(load(None, overrides), ME, model))


class World:
    """The swarm as `pull` sees it: its members' offers, and chunks that may end early."""

    def __init__(self, monkeypatch, manifest, tensors):
        self.manifest, self.peer_id, self.traffic = manifest, ME.peer_id, TrafficMeter()
        state = State(4, tensors, {"momentum": tensors}, [3])
        self.snapshot = self.offered = snapshot_of(state, encode(state))
        self.held, self.most, self.given, self.met = True, 10**9, [], {}
        monkeypatch.setattr(module, "visited", self.visited)
        for name in ("choose_source", "fetch_digests", "download"):
            monkeypatch.setattr(sync, name, getattr(self, name))

    @contextlib.contextmanager
    def visited(self, link):
        model = self.manifest.model
        member = member_of(ME.peer_id, swarm=link.swarm, round=self.snapshot.header.round, step=10, loss=2.5, model=model)
        other = Identity.ephemeral().peer_id
        yield (
            self,
            self.manifest,
            {ME.peer_id: member, other: member.model_copy(update={"peer": other, "step": 30, "loss": None})},
            2,
        )

    def call(self, coroutine, timeout):
        return asyncio.run(coroutine)

    async def choose_source(self, host, query, sources, attempt):
        query.check(ME.peer_id, self.offered.header)
        return [SnapshotOffer(ME.peer_id, (), self.offered.header)]

    async def fetch_digests(self, host, swarm, header, holders):
        if not self.held or header != self.snapshot.header:
            raise NetworkError("none of the peers that were asked holds the weights any more.")
        return self.snapshot.digests

    async def download(self, host, swarm, header, digests, holders, sink, wanted):
        for chunk in wanted:
            if chunk not in sink.have:
                if len(self.given) == self.most:
                    raise NetworkError("the peers that hold the weights have gone with some chunks missing.")
                data = self.snapshot.content.numpy().data[chunk * CHUNK : chunk * CHUNK + chunk_size(header.nbytes, chunk)]
                sink.write(chunk, data)
                self.given.append(chunk)
        return set()


def fresh(task):
    built, why = build_model(manifest_of(task), task)
    assert why == ""
    return built


def manifest_of(task):
    settings = load(None, {"task.hooks": task})
    built = module._model(settings, make_task(settings))
    return manifest(model_digest(built.parameters), **{"task.hooks": task, "outer.method": "diloco"})


@pytest.fixture
def world(monkeypatch, task):
    shapes = [tuple(parameter.shape) for parameter in fresh(task).parameters]
    generator = torch.Generator().manual_seed(1)
    return World(monkeypatch, manifest_of(task), [torch.randn(shape, generator=generator) for shape in shapes])


def slow(world):
    header = world.snapshot.header
    return FLOAT32.decode(world.snapshot.content[: FLOAT32.nbytes(header.shapes)], header.shapes)


def test_the_file_has_the_names_of_the_model_in_whatever_order_the_optimizer_has_them(world, task, tmp_path):
    report = pull(LINK, tmp_path / "out", hooks=task)
    state = load_file(tmp_path / "out" / "model.safetensors")
    model = fresh(task).model
    model.load_state_dict(state)
    tensors = slow(world)
    assert torch.equal(state["0.weight"], tensors[-1])
    assert torch.equal(state["0.bias"], tensors[0])
    assert torch.equal(state["2.bias"], tensors[4])
    assert (report["named"], report["round"], report["values"]) == (True, 4, sum(t.numel() for t in tensors))
    assert "fresh model" in report["notes"][0]  # the statistics of its BatchNorm
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "model.safetensors", "shoal.json"]
    assert json.loads((tmp_path / "out" / "shoal.json").read_text())["snapshot"] == world.snapshot.id.hex()


def test_without_the_task_parameters_are_numbered_and_shapes_are_those_of_the_manifest(world, tmp_path, monkeypatch):
    report = pull(LINK, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(state[f"parameter.{i}"], tensor) for i, tensor in enumerate(slow(world)))
    assert report["named"] is False
    assert "a link carries no code" in report["notes"][0]
    other = State(4, [torch.zeros(3)])
    world.offered = snapshot_of(other, encode(other))
    with pytest.raises(PullError, match=r"cannot be checked against the swarm's manifest: name your copy of the task"):
        pull(LINK, tmp_path, force=True)


def test_the_card_has_what_manifest_and_members_say(world, task, tmp_path):
    report = pull(LINK, tmp_path, hooks=task)
    about = json.loads((tmp_path / "shoal.json").read_text())
    assert (about["peers"], about["steps"], about["train_loss"], about["rounds"]) == (2, [10, 30], 2.5, 4)
    assert (about["outer"]["codec"], about["train"]["optimizer"], about["held_out_loss"]) == ("float32", "task", None)
    card = (tmp_path / "README.md").read_text()
    assert "* Training loss: 2.5000, the mean" in card
    assert f"* Parameters: {report['values']:,}\n" in card


def test_a_held_out_loss_is_computed_with_the_weights_that_came(world, task, tmp_path):
    report = pull(LINK, tmp_path, hooks=task, evaluate=True)
    assert report["held_out_loss"] == pytest.approx(float(slow(world)[0].sum()))  # 0.bias is the optimizer's first
    assert f"held-out loss {report['held_out_loss']:.4f}, on the task's own data" in module.summary(report)
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
def test_the_data_of_a_held_out_loss_is_named_without_a_path(given, swarms, shown):
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
    assert torch.equal(load_file(tmp_path / "model.safetensors")["0.weight"], slow(world)[-1])
    assert not (tmp_path / ".pull").exists()


def test_what_nobody_holds_any_more_is_given_up_for_something_newer(world, task, tmp_path):
    world.most = 1
    with pytest.raises(NetworkError):
        pull(LINK, tmp_path, hooks=task)
    newer = State(9, [tensor + 1 for tensor in slow(world)])
    world.most, world.snapshot = 10**9, snapshot_of(newer, encode(newer))
    world.offered = world.snapshot
    assert pull(LINK, tmp_path, hooks=task)["round"] == 9


def test_only_the_weights_are_taken_and_not_what_the_rule_shares(world, task, tmp_path):
    pull(LINK, tmp_path, hooks=task)
    need = FLOAT32.nbytes(world.snapshot.header.shapes)
    assert world.snapshot.header.nbytes == 2 * need
    assert world.given == list(range(-(-need // CHUNK)))


def test_a_partial_file_is_believed_only_as_far_as_its_digests(world, tmp_path):
    header, digests = world.snapshot.header, world.snapshot.digests
    kept = ResumableDownload(tmp_path / "p", header, digests, header.nbytes)
    assert kept.have == set()
    for chunk in (0, 2):
        kept.write(chunk, world.snapshot.content.numpy().data[chunk * CHUNK : chunk * CHUNK + chunk_size(header.nbytes, chunk)])
    kept.close()
    with kept.path.open("r+b") as file:
        file.seek(2 * CHUNK + 7)
        file.write(b"!!!!")
    again = ResumableDownload(tmp_path / "p", header, digests, header.nbytes)
    assert again.have == {0}
    again.close()
    assert len(digests) == DIGEST * 3


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (lambda w: {"max_bytes": 1000}, PullError, "at most 1,000 may come: allow more with --max-bytes"),
        (lambda w: setattr(w, "manifest", manifest(w.manifest.model, **{"outer.method": "none"})), PullError, "method none"),
        (lambda w: setattr(w, "manifest", manifest("1" * 64, **{"task.hooks": "task.py:Mine"})), ModelDiffersError, "not the"),
    ],
)  # fmt: skip
def test_what_cannot_be_pulled_is_said(world, task, tmp_path, change, error, sentence):
    options = change(world) or {}
    with pytest.raises(error, match=sentence):
        pull(LINK, tmp_path, hooks=task, **options)


def test_weights_that_are_there_stay_unless_forced(world, task, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(PullError, match=r"There are weights in .* already: choose another folder, or pass --force"):
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
def test_a_module_with_state_beside_tensors_is_written_and_loads_as_the_card_says(tmp_path, monkeypatch, extra):
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
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert "GPT2LMHeadModel.from_pretrained" in (tmp_path / "README.md").read_text()
