"""What was written before the modules were moved is read as it was then (tests/data/before_the_move/README.md)."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from shoal.node.checkpoint import store
from shoal.node.config.settings import load
from shoal.node.runtime.resume import find, restore
from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.node.training.trainer import Trainer
from shoal.node.watch.recording import Recorder, recorded
from shoal.optim import Alone
from shoal.swarm.access.link import Link
from shoal.swarm.manifest.manifest import open_manifest, swarm_id
from shoal.verification.calibration.calibration import Pair
from shoal.verification.calibration.file import load_calibration, save_calibration
from shoal.verification.fingerprints import Evidence, Feature

DATA = Path(__file__).parent / "data" / "before_the_move"
EXPECTED = json.loads((DATA / "expected.json").read_text())
METHODS = pytest.mark.parametrize("method", ["diloco", "sparseloco"])


def short(data):
    return hashlib.sha256(data).hexdigest()[:16]


def digests(value, at=""):
    """Return dtype, shape and digest of each tensor below ``value`` and the text of each other leaf, by path."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: text for key, item in items for path, text in digests(item, f"{at}/{key}").items()}
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return {at: f"{value.dtype} {list(value.shape)} {short(data)}"}
    return {at: repr(value) if len(repr(value)) < 200 else short(repr(value).encode())}


def saved(method):
    return find(load(None, {"node.folder": str(DATA / method), "node.resume": True}).node)


def plain(model):
    return json.loads(model.model_dump_json())


def test_a_link():
    text = (DATA / "link").read_text()
    link = Link.parse(text)
    assert link.swarm == EXPECTED["link"]["swarm"]
    assert repr(link) == EXPECTED["link"]["fields"]
    assert str(link) == EXPECTED["link"]["text"] == text.strip()


def test_a_sealed_manifest():
    sealed = (DATA / "manifest").read_bytes()
    assert swarm_id(sealed) == EXPECTED["link"]["swarm"]
    assert plain(open_manifest(sealed, EXPECTED["link"]["swarm"])) == EXPECTED["manifest"]


@METHODS
def test_every_value_of_a_checkpoint(method):
    expected = EXPECTED["checkpoints"][method]
    step, state = store.load(DATA / method)
    assert step == expected["step"]
    assert digests(state) == expected["file"]
    read = saved(method)
    assert (read.swarm, read.shard) == (expected["swarm"], Shard(*expected["shard"]))
    assert plain(read.manifest) == expected["manifest"]


@METHODS
def test_a_node_goes_on_from_a_checkpoint_in_its_swarm(method, tmp_path):
    expected, read = EXPECTED["checkpoints"][method], saved(method)
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"{number}: a shoal of fish stays together and no one leads it " * 4)
    task = TextTask(data=str(tmp_path), **read.manifest.task_options)
    trainer = Trainer(task, read.manifest.outer, read.manifest.train)
    trainer.connect(Alone(), read.swarm, read.shard)
    assert restore(trainer, read, read.swarm) == []
    tensors = {path: text for path, text in digests(trainer.state()).items() if text.startswith("torch.") and path != "/rng"}
    assert tensors == expected["resumed"]
    memory = {"diloco": "/optimizer/rule/momentum/", "sparseloco": "/optimizer/codecs/0/error/"}[method]
    assert sum(path.startswith(memory) for path in tensors) == len(trainer.opt.slow)
    while trainer.opt.steps < read.manifest.train.steps:
        trainer.step()
    assert trainer.opt.round == 6


def test_a_recording_is_replayed_and_recorded_in_the_same_bytes(tmp_path):
    events = list(recorded(DATA / "watch.jsonl"))
    assert [plain(event) for event in events] == EXPECTED["watch"]
    recorder = Recorder(tmp_path / "again")
    for event in events:
        recorder.take(event)
    recorder.close()
    assert (tmp_path / "again").read_bytes() == (DATA / "watch.jsonl").read_bytes()


def test_a_calibration(tmp_path):
    expected = EXPECTED["calibration"]
    calibration = load_calibration(DATA / "calibration.safetensors")
    ((pair, honest),) = calibration.pairs.items()
    assert pair == Pair(*expected["pair"])
    assert [[[list(row) for row in claim.values], list(claim.sizes)] for claim in honest.claims] == expected["claims"]
    assert [[feature.name, feature.grain] for feature in honest.features] == expected["features"]
    for name in ("mean", "between", "within", "statistics"):
        assert list(getattr(honest, name)) == expected[name], name
    assert honest.threshold(0.05) == expected["threshold"]
    features = tuple(Feature(*feature) for feature in expected["features"])
    assert honest.statistic(Evidence(features, ((3.0, 1.0), (2.5, 0.0)), (1.0, 1.0)))[0] == expected["statistic"]
    save_calibration(calibration, tmp_path / "again")
    assert load_calibration(tmp_path / "again").pairs == calibration.pairs
