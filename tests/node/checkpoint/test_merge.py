"""``shoal merge``: the weighted mean, the first difference by name, and a file that is whole or not
there.
"""

import json
import math
import os

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shoal.node.checkpoint import merge as merge_module
from shoal.node.checkpoint import store as checkpoint
from shoal.node.checkpoint.folder import CheckpointError
from shoal.node.checkpoint.merge import MergeError, merge, parse_weights
from shoal.node.cli.main import cli
from shoal.node.task import Shard, Task
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone
from shoal.swarm.errors import ShoalError
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings


def tensors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        "head.weight": torch.randn(3, 4, generator=generator).to(dtype),
        "scale": torch.randn((), generator=generator),
        "empty": torch.zeros(0, 2),
        "half": torch.randn(5, generator=generator).half(),
        "steps": torch.tensor(seed),
        "mask": torch.tensor([True, False, seed > 1]),
    }


def files(folder, *contents):
    paths = [folder / f"{number}.safetensors" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        save_file(content, path)
    return paths


@settings(max_examples=25, deadline=None)
@given(
    weights=st.lists(st.floats(0, 100), min_size=1, max_size=4).filter(lambda w: sum(w) > 1e-3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_it_is_the_weighted_mean_in_the_models_own_types(tmp_path_factory, weights, dtype):
    folder = tmp_path_factory.mktemp("merge")
    contents = [tensors(seed, dtype) for seed in range(len(weights))]
    out = folder / "out.safetensors"
    report = merge(files(folder, *contents), out, weights=weights)
    merged = load_file(out)
    assert set(merged) == set(contents[0])
    for name, first in contents[0].items():
        expected = first
        if first.is_floating_point():
            shares = [weight / math.fsum(weights) for weight in weights]
            expected = sum(
                share * content[name].double()
                for share, content in zip(shares, contents, strict=True)
            ).to(first.dtype)
        assert merged[name].dtype == first.dtype
        assert merged[name].shape == first.shape
        torch.testing.assert_close(merged[name], expected)  # to the precision of the type
    assert report["bytes"] == out.stat().st_size
    assert (report["tensors"], report["values"]) == (6, 12 + 1 + 0 + 5 + 1 + 3)
    assert len(list(folder.iterdir())) == len(weights) + 1


def test_equal_weights_by_default(tmp_path):
    """Equal weights by default and what counts nothing may be NaN."""
    one, two = files(tmp_path, {"a": torch.tensor([1.0, 3.0])}, {"a": torch.tensor([2.0, 5.0])})
    merge([one, two], tmp_path / "mean")
    assert load_file(tmp_path / "mean")["a"].tolist() == [1.5, 4.0]
    save_file({"a": torch.tensor([math.nan, 1.0])}, one)
    merge([one, two], tmp_path / "second", weights=[0, 7])
    assert load_file(tmp_path / "second")["a"].tolist() == [2.0, 5.0]


BASE = {"a": torch.zeros(2), "b": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            {"a": torch.zeros(2)},
            r"0\.safetensors' has a tensor 'b' that .*1\.safetensors' lacks: merge checkpoints of "
            r"one model\.",
        ),
        (
            {**BASE, "c": torch.zeros(1)},
            r"1\.safetensors' has a tensor 'c' that .*0\.safetensors' lacks",
        ),
        (
            {**BASE, "b": torch.zeros(3, 2)},
            r"tensor 'b' is F32 \[2, 3\] in .*0\.safetensors' and F32 \[3, 2\] in .*1\.safe",
        ),
        ({**BASE, "a": torch.zeros(2).half()}, r"tensor 'a' is F32 \[2\] in .* and F16 \[2\] in "),
    ],
)
def test_the_first_difference_is_named_and_nothing_is_written(tmp_path, other, sentence):
    with pytest.raises(MergeError, match=sentence) as caught:
        merge(files(tmp_path, BASE, other), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ([1.0], "There are 2 checkpoints and 1 weights"),
        ([1.0, -1.0], "must be finite, not negative"),
        ([0.0, 0.0], "not all 0"),
        ([math.inf, 1.0], "must be finite"),
        ([math.nan, 1.0], "must be finite"),
    ],
)
def test_weights_that_are_none(tmp_path, weights, sentence):
    with pytest.raises(MergeError, match=sentence):
        merge(files(tmp_path, BASE, BASE), tmp_path / "out", weights=weights)
    with pytest.raises(MergeError, match="'1,x' are not numbers: write one for each checkpoint"):
        parse_weights("1,x")


def test_what_cannot_be_read_is_said(tmp_path):
    (path,) = files(tmp_path, BASE)
    wrong = tmp_path / "wrong"
    wrong.write_text("no tensors")
    (tmp_path / "empty").mkdir()
    for paths, kind, sentence in [
        ([path, wrong], MergeError, "A checkpoint cannot be read"),
        ([path, tmp_path / "absent"], MergeError, "There is no checkpoint .*absent'"),
        ([path, tmp_path / "empty"], CheckpointError, "There is no checkpoint in .*empty'"),
        ([], MergeError, "There is nothing to merge"),
    ]:
        with pytest.raises(kind, match=sentence):
            merge(paths, tmp_path / "out")
    with pytest.raises(
        MergeError, match="holds one set of weights: --slow is for the checkpoints of nodes"
    ):
        merge([path], tmp_path / "out", slow=True)
    with pytest.raises(MergeError, match=r"Cannot write .*nowhere"):
        merge([path], tmp_path / "nowhere" / "out")
    assert not (tmp_path / "out").exists()


def test_existing_output_stays_unless_forced(tmp_path):
    """An existing file stays unless forced even if it is an input."""
    one, two = files(tmp_path, {"a": torch.tensor([1.0])}, {"a": torch.tensor([2.0])})
    with pytest.raises(MergeError, match="exists: choose another name, or pass --force"):
        merge([one, two], one)
    assert load_file(one)["a"].tolist() == [1.0]
    merge([one, two], one, force=True)
    assert load_file(one)["a"].tolist() == [1.5]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch, step):
    """A failure while writing leaves the old file and no other."""
    one, two = files(tmp_path, BASE, BASE)
    out = tmp_path / "out"
    out.write_text("old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merge_module.os, step, full)
    with pytest.raises(MergeError, match=r"Cannot write .*out' \(No space left on device\)"):
        merge([one, two], out, force=True)
    assert out.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors", "out"]


class Tied(Task):
    """A tied weight, BatchNorm, a frozen parameter, and an optimizer that takes the parameters in
    another order.
    """

    def model(self):
        net = torch.nn.Sequential(
            torch.nn.Linear(3, 3),
            torch.nn.BatchNorm1d(3),
            torch.nn.Linear(3, 3),
            torch.nn.Linear(3, 3),
        )
        net[2].weight = net[0].weight
        net[3].requires_grad_(False)
        return net

    def batches(self, shard):
        generator = torch.Generator().manual_seed(shard.index)
        while True:
            yield torch.randn(4, 3, generator=generator)

    def loss(self, model, batch):
        return model(batch).square().mean()

    def evaluate(self, model):
        return 0.0

    def inner_optimizer(self, params):
        return torch.optim.SGD(list(params)[::-1], lr=0.1)


def trained(folder, index, steps=5):
    trainer = Trainer(Tied(), OuterSettings(every=3), TrainSettings(seed=1))
    trainer.connect(Alone(), "run", Shard(index, 2, 1))
    for _ in range(steps):
        trainer.step()
    checkpoint.save(folder, steps, {"swarm": "s", "manifest": "00", "trainer": trainer.state()})
    return trainer


def test_checkpoints_merge_as_model_or_slow_weights(tmp_path):
    """Nodes checkpoints give the model or its slow weights under its own names."""
    one, two = (trained(tmp_path / str(index), index) for index in range(2))
    paths = [tmp_path / "0", tmp_path / "1" / "step-00000005"]
    merge(paths, tmp_path / "fast", weights=[3, 1])
    merge(paths, tmp_path / "slow", weights=[3, 1], slow=True)
    fast, slow = load_file(tmp_path / "fast"), load_file(tmp_path / "slow")
    expected = {}
    for trainer in (one, two):
        trainer.model.eval()
    for name, mine in one.model.state_dict().items():
        theirs = two.model.state_dict()[name]
        expected[name] = 0.75 * mine + 0.25 * theirs if mine.is_floating_point() else mine
        torch.testing.assert_close(fast[name], expected[name])
    with one.opt.averaged(), two.opt.averaged():
        for name, mine in one.model.state_dict().items():
            theirs = two.model.state_dict()[name]
            torch.testing.assert_close(
                slow[name], 0.75 * mine + 0.25 * theirs if mine.is_floating_point() else mine
            )
    assert not torch.equal(slow["0.weight"], fast["0.weight"])
    assert torch.equal(slow["0.weight"], slow["2.weight"])
    again = Tied().model()
    again.load_state_dict(slow)


def test_what_modules_keep_beside_tensors_has_no_mean(tmp_path):
    for name in "ab":
        checkpoint.save(
            tmp_path / name,
            5,
            {"trainer": {"model": {"w": torch.ones(2), "_extra_state": {"seen": torch.ones(1)}}}},
        )
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert list(load_file(tmp_path / "out")) == ["w"]


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    trained(tmp_path / "0", 0)
    checkpoint.save(tmp_path / "1", 5, {"something": "else"})
    with pytest.raises(CheckpointError, match="is not that of a node"):
        merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    file = tmp_path / "0" / "step-00000005" / checkpoint.TENSORS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=r"The checkpoint is damaged: .* is not as it was written: take another one",
    ):
        merge([tmp_path / "0"], tmp_path / "out")
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{checkpoint.TENSORS}' .No such file or directory"):
        merge([tmp_path / "0"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_by_the_command_line(tmp_path):
    one, two = files(tmp_path, {"a": torch.tensor([1.0])}, {"a": torch.tensor([4.0])})
    out = tmp_path / "out.safetensors"
    run = CliRunner().invoke(
        cli, ["merge", str(one), str(two), "--out", str(out), "--weights", "2,1", "--json"]
    )
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["weights"] == [2 / 3, 1 / 3]
    assert report["out"] == os.fspath(out)
    assert load_file(out)["a"].tolist() == [2.0]
    run = CliRunner().invoke(
        cli, ["merge", str(one), "--out", str(out), "--force"], standalone_mode=False
    )
    assert run.output == f"{out}: the mean of 1 checkpoints, 1 values in 1 tensors\n"
    refused = CliRunner().invoke(
        cli, ["merge", str(one), str(two), "--out", str(out)], standalone_mode=False
    )
    assert isinstance(refused.exception, ShoalError)
