"""Decoders of files that a user may have from elsewhere, and of a server's answers."""

import contextlib
import functools
import hashlib
import json

import torch
from safetensors.torch import save

from shoal.node.checkpoint import merge, store
from shoal.node.commands import creator, status
from shoal.node.commands.sample import SampleError, load_pulled
from shoal.node.data.source import DataError
from shoal.node.rl.completion_server import CompletionServer, _said
from shoal.node.rl.policy import PolicyError
from shoal.node.runtime import result, resume
from shoal.node.task import Shard
from shoal.node.tasks.gpt import GPT
from shoal.node.tasks.text import TextTask
from shoal.node.training.trainer import Trainer
from shoal.node.training.training_error import TrainingError
from shoal.node.verify.material import decode_material as decode_material
from shoal.node.watch.events import Unreachable, WatchError, event_of, line_of
from shoal.optim import Alone
from shoal.swarm.errors import IdentityError, LinkError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import swarm_id
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from tests.security.decoder import HERE, ME, TINY, Folder, one, text
from tests.security.hostile import (
    DIGESTED,
    JSON,
    SAFETENSORS,
)
from tests.security.wire_decoders import LINK, manifest


@functools.cache
def trainer(seed=0, steps=2):
    made = Trainer(
        TextTask(**TINY, batch=1), OuterSettings(method="noloco"), TrainSettings(seed=seed)
    )
    made.connect(Alone(), "x", Shard(0, 2, 0))
    for _ in range(steps):
        made.step()
    return made


@functools.cache
def checkpoint():
    folder = HERE / "checkpoint"
    state = {
        "swarm": swarm_id(manifest()),
        "manifest": manifest().hex(),
        "trainer": trainer().state(),
    }
    path = store.save(folder, 1, state)
    return path, (path / store.STATE).read_bytes(), (path / store.TENSORS).read_bytes()


def resumed(path):
    """What ``up --resume-from`` makes of a folder: the run, its settings, and a trainer that goes
    on from it.
    """
    saved = resume._read(path)
    own = trainer(1, 0)
    resume.restore(own, saved, "b" * 52)
    return saved


def read_state(data):
    path, _, _ = checkpoint()
    aside = HERE / "strange"
    aside.mkdir(exist_ok=True)
    if not (aside / store.TENSORS).exists():
        (aside / store.TENSORS).write_bytes((path / store.TENSORS).read_bytes())
    (aside / store.STATE).write_bytes(data)
    return resumed(aside)


def read_tensors(data):
    _, state, _ = checkpoint()
    aside = HERE / "tensors"
    aside.mkdir(exist_ok=True)
    (aside / store.TENSORS).write_bytes(data)
    tree = DIGESTED.open(state)
    (aside / store.STATE).write_bytes(
        DIGESTED.make({**tree, "tensors_sha256": hashlib.sha256(data).hexdigest()})
    )
    return resumed(aside)


def merged(data):
    (HERE / "one.safetensors").write_bytes(data)
    return merge.merge([HERE / "one.safetensors"] * 2, HERE / "out.safetensors", force=True)


def merged_state(data):
    read_aside = HERE / "merge"
    read_aside.mkdir(exist_ok=True)
    _, _, tensors = checkpoint()
    (read_aside / store.TENSORS).write_bytes(tensors)
    (read_aside / store.STATE).write_bytes(data)
    return merge.merge([read_aside], HERE / "out.safetensors", force=True, slow=True)


@functools.cache
def pulled():
    torch.manual_seed(3)
    about = {
        "swarm": "s",
        "name": "n",
        "round": 7,
        "task": "text",
        "task_options": {},
        "model": TINY,
        "named": True,
    }
    return save(GPT(**TINY).state_dict()), json.dumps(about).encode()


def pulled_weights(data):
    return Folder("pulled", shoal__json=pulled()[1]).reader("model.safetensors", load_pulled)(data)


def pulled_about(data):
    return Folder("about", **{"model__safetensors": pulled()[0]}).reader("shoal.json", load_pulled)(
        data
    )


def current(data):
    return Folder("linked").reader("link.json", status.current_link)(data)


def keys_named(data):
    """Return the key files that a node's link file names, each of which is then tried."""
    folder = HERE / "runs" / "anna"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "link.json").write_bytes(data)
    found = creator._keys_of_nodes(HERE / "runs")
    for path in found:
        with contextlib.suppress(IdentityError):
            Identity.load(path)
    return found


def file_decoders():
    return [
        one(
            "state of a checkpoint",
            "node/checkpoint/store.py:_read node/checkpoint/packing.py:_unpack_array "
            "node/checkpoint/packing.py:_unpack_bytes node/runtime/resume.py:_read",
            read_state,
            lambda: checkpoint()[1],
            DIGESTED,
            store.CheckpointError,
            TrainingError,
        ),
        one(
            "tensors of a checkpoint",
            "node/checkpoint/store.py:load",
            read_tensors,
            lambda: checkpoint()[2],
            SAFETENSORS,
            store.CheckpointError,
            TrainingError,
        ),
        one(
            "weights to merge",
            "node/checkpoint/merge.py:merge",
            merged,
            lambda: pulled()[0],
            SAFETENSORS,
            merge.MergeError,
        ),
        one(
            "checkpoint to merge",
            "node/checkpoint/merge.py:merge",
            merged_state,
            lambda: checkpoint()[1],
            DIGESTED,
            merge.MergeError,
            store.CheckpointError,
        ),
        one(
            "pulled weights",
            "node/commands/sample.py:_model node/commands/sample.py:_check_header",
            pulled_weights,
            lambda: pulled()[0],
            SAFETENSORS,
            SampleError,
            DataError,
        ),
        one(
            "what was pulled",
            "node/commands/sample.py:_about",
            pulled_about,
            lambda: pulled()[1],
            JSON,
            SampleError,
            DataError,
        ),
        one(
            "link of a node",
            "node/commands/status.py:_saved_link",
            current,
            lambda: json.dumps(
                {"link": LINK, "written": 1.0, "name": "n", "invite_only": False}
            ).encode(),
            JSON,
            LinkError,
        ),
        one(
            "result of a run",
            "node/runtime/result.py:ended_at",
            Folder("result").reader(result.RESULT, result.ended_at),
            lambda: json.dumps({"interrupted": False, "progress": {"step": 30}}).encode(),
            JSON,
        ),
        one(
            "key of a node",
            "node/commands/creator.py:_keys_of_nodes",
            keys_named,
            lambda: json.dumps({"link": LINK, "identity": "anna.key"}).encode(),
            JSON,
        ),
        one(
            "completions of a server",
            "node/rl/completion_server.py:CompletionServer.read",
            lambda data: CompletionServer("http://[::1]:1").read(data, 1, 4, 9),
            lambda: (
                b'{"choices": [{"index": 0, "logprobs": {"tokens": ["token_id:3"], '
                b'"token_logprobs": [-0.5]}}]}'
            ),
            JSON,
            PolicyError,
        ),
        one(
            "error of a server",
            "node/rl/completion_server.py:_said",
            _said,
            lambda: b'{"error": {"message": "no such model"}}',
            JSON,
        ),
        one(
            "recording",
            "node/watch/events.py:event_of",
            text(event_of),
            lambda: line_of(Unreachable(time=1.0, peer=ME.peer_id, reason="x")).encode(),
            JSON,
            WatchError,
        ),
    ]
