"""The benchmark with a real model, here with tiny ones: its report, its runs, and that a second
call goes on where it was.
"""

import json
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from bench import _real_task as tasks
from bench import real
from bench._real_figure import draw
from shoal.node.task import Shard


@pytest.fixture
def tiny(tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install 'shoal[hf]'"
    )
    from tests.support.tokenizers_made_here import train

    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=300, **small)
    ).save_pretrained(tmp_path / "model")
    file = train(tmp_path / "tokenizer")
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(file)).save_pretrained(
        tmp_path / "model"
    )
    return tmp_path / "model"


@pytest.fixture
def fresh(tmp_path):
    """The task from random weights, with a tokenizer that was learnt from two files."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'shoal[hf]'")
    files = []
    for name, line in (
        ("a.txt", "the cat sat on the mat {}\n"),
        ("b.txt", "of making many books there is no end {}\n"),
    ):
        files.append(tmp_path / name)
        files[-1].write_text(
            "".join(line.format(number) for number in range(6000)), encoding="utf-8"
        )
    data = ",".join(map(str, files))
    base = tasks.learn(tmp_path / "tokenizer", "tiny", data, 100_000)

    def fresh(**options):
        return tasks.FreshText(
            size="tiny", most=100_000, base=str(base), data=data, context=16, **options
        )

    return fresh


@pytest.mark.slow(reason="two real nodes together, and both alone")
def test_a_report_with_every_figure_that_a_second_call_repeats(tiny, tmp_path, program):
    options = [
        "--model",
        tiny,
        "--nodes",
        2,
        "--steps",
        4,
        "--every",
        2,
        "--folder",
        tmp_path / "kept",
        "--json",
    ]
    options += [
        "--outer=--set=outer.lag=0",
        "--outer=--set=outer.codec=float32",
    ]  # each waits for its partner, however busy
    report = json.loads(program("real.py", *options, timeout=1200, nodes=True).stdout)
    assert (report["nodes"], report["steps"], report["exchanges"], report["pairs_none"]) == (
        2,
        4,
        4,
        0,
    )
    assert report["bytes_sent"] > 2 * 2 * report["params"] * 4
    assert report["peak_mb"] > 100
    assert 0 <= report["wait_s"] < report["wall_s"] < report["seconds"]
    assert report["loss_last"] < report["loss_first"]
    assert report["loss_alone"] == pytest.approx(sum(report["alone"]) / 2)
    (tmp_path / "kept" / "alone-0" / "result.json").unlink()  # not read again
    assert json.loads(program("real.py", *options, timeout=1200, nodes=True).stdout) == report
    assert "other settings" in program("real.py", *options, "--steps", 5, code=1, nodes=True).stderr


class FakeProcess:
    def __init__(self, name):
        self.name, self.code = name, None

    def poll(self):
        return self.code

    def wait(self, timeout=None):
        return self.code

    def kill(self):
        self.code = -9 if self.code is None else self.code

    def terminate(self):
        self.code = 130


class FakeNodes:
    """Nodes of which the first two end once the late one has been there for a look."""

    def __init__(self, folder):
        self.folder, self.processes, self.started, self.looks = (
            folder,
            [FakeProcess("peer-0")],
            [],
            0,
        )

    def start(self, arguments, name):
        self.started.append((name, self.looks, "--resume" in arguments))
        assert (
            arguments[arguments.index("--data") + 1] == "a.txt"
        )  # a swarm names no path for its members
        self.processes.append(FakeProcess(name))
        return self.processes[-1]

    def check(self):
        assert all(process.code in (None, 0) for process in self.processes)
        return all(process.code == 0 for process in self.processes)

    def look(self, ended):
        self.looks += 1
        if self.looks == 7:
            for process in self.processes[:2]:
                process.code = 0
        steps = [{"event": "start"}, exchange(0.0, 10 * self.looks)]
        return [
            steps,
            steps if ("peer-1", 4, True) not in self.started else [*steps, {"event": "start"}],
            [],
        ]


def test_a_node_is_killed_and_one_joins_and_leaves_late(tmp_path, monkeypatch):
    """At the first look that finds the step; the killed one has its place in the list again, and
    the late one ends the run.
    """
    monkeypatch.setattr(real, "LOOK_S", 0.0)
    monkeypatch.setattr(real, "saved", lambda folder: [1] if nodes.looks else [])
    chosen = SimpleNamespace(
        nodes=3, late=25, kill=(1, 40), every=1, from_scratch="tiny", data="a.txt", node=[]
    )
    nodes = FakeNodes(tmp_path)
    real.wait(nodes, nodes, chosen, "link", SimpleNamespace(message=lambda text: None))
    assert nodes.started == [("peer-1", 0, False), ("peer-2", 3, True), ("peer-1", 4, True)]
    assert [process.name for process in nodes.processes] == ["peer-0", "peer-1"]
    assert nodes.looks == 7


def test_data_parallel_batch_is_all_nodes_batches(fresh):
    """A batch of data parallel training is those of all nodes."""
    each = [next(iter(fresh().batches(Shard(index, 3, 5)))) for index in range(3)]
    assert not torch.equal(each[0], each[1])
    parallel = next(iter(fresh(parts=3).batches(Shard(0, 1, 5))))
    assert torch.equal(parallel, torch.cat(each))


def test_its_gradient_is_the_mean_of_theirs(fresh):
    torch.manual_seed(0)
    model = fresh().model().double()

    def gradient(batch):
        model.zero_grad()
        fresh().loss(model, batch).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    each = [gradient(next(iter(fresh().batches(Shard(index, 3, 5))))) for index in range(3)]
    parallel = gradient(next(iter(fresh(parts=3).batches(Shard(0, 1, 5)))))
    torch.testing.assert_close(parallel, torch.stack(each).mean(0))


def test_no_node_trains_on_held_out_text(fresh):
    """No node trains on what is held out and all have both texts."""
    task = fresh()
    held, parts = task._text(None, 1), [task._text(index, 4) for index in range(4)]
    assert len(held) + sum(map(len, parts)) == 2 * (100_000 // tasks.BLOCK)
    assert not set(held) & {block for part in parts for block in part}
    for part in parts:
        assert any("cat" in block for block in part)
        assert any("books" in block for block in part)


def test_the_model_from_random_weights_learns(fresh):
    torch.manual_seed(0)
    task = fresh(lr=1e-2, batch=8)
    model = task.model()
    optimizer, first = task.inner_optimizer(model.parameters()), task.evaluate(model)
    assert first == pytest.approx(5.7, abs=0.6)  # log 300
    for batch in islice(task.batches(Shard(0, 1, 0)), 60):
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.evaluate(model) < first - 2


def test_the_sizes_from_random_weights_are_what_they_are_called():
    found = {}
    for name in tasks.SIZES:
        task = tasks.FreshText(size=name)
        with torch.device("meta"):
            found[name] = round(
                sum(parameter.numel() for parameter in task.model().parameters()) / 1e6, 2
            )
    assert found == {"10m": 10.35, "3m": 3.34, "1m": 1.12, "tiny": 0.03}


END = {
    "progress": {"step": 40},
    "loss": {"held_out": 2.0},
    "link": {"bytes_sent": 500},
    "exchanges": {"wait_s": 4.0, "without_partner": 1, "with_partner": 3},
    "wall_s": 33.0,
    "interrupted": False,
}


def exchange(time, step, partner="b"):
    return {
        "event": "round",
        "time": time,
        "step": step,
        "partner": partner,
        "bytes_sent": 100,
        "wait_s": 1.5,
    }


def test_the_lives_of_a_node_are_added_up():
    """Of the first, which was killed, by its exchanges; what it had measured after its checkpoint
    is measured again.
    """
    events = [
        {"event": "activity", "time": 90.0},
        {"event": "start", "time": 100.0, "loss": {"held_out_first": 5.0}},
        exchange(110.0, 10),
        {"event": "evaluation", "time": 120.0, "step": 20, "held_out": 4.0},
        exchange(121.0, 20, None),
        {"event": "start", "time": 200.0, "loss": {"held_out_first": 4.4}},
        {"event": "evaluation", "time": 210.0, "step": 20, "held_out": 3.0},
        {"event": "evaluation", "time": 230.0, "step": 40, "held_out": None},
        {"event": "end", "time": 235.0, **END},
        {"event": "activity", "time": 240.0},
    ]
    found = real.history(events)
    assert found["measured"] == [[0, 0.0, 5.0], [20, 31.0, 3.0], [40, 56.0, 2.0]]
    assert (
        found["lives"],
        found["loss_first"],
        found["bytes_sent"],
        found["wait_s"],
        found["wall_s"],
    ) == (2, 5.0, 700, 7.0, 54.0)
    assert (found["pairs_none"], found["exchanges"]) == (2, 4)


def test_a_curve_is_the_mean_where_all_have_measured():
    nodes = [
        {"measured": [[0, 0.0, 5.0], [10, 3.0, 4.0]]},
        {"measured": [[0, 0.0, 5.0], [10, 5.0, 3.0], [20, 9.0, 1.0]]},
    ]
    assert real.curve(nodes, 7) == [[0, 0, 0.0, 5.0], [10, 70, 4.0, 3.5]]


def test_the_first_node_and_the_late_one_cannot_be_killed(refused):
    assert "--kill" in refused(real.main, "--from-scratch", "tiny", "--kill", "0@5")
    assert "--kill" in refused(
        real.main, "--from-scratch", "tiny", "--nodes", 3, "--late", 5, "--kill", "2@5"
    )


def test_a_picture_of_the_curves_names_each_run(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    curves = {
        name: [[0, 0, 0.0, 5.0], [10, 1280, 60.0, 4.0]]
        for name in ("together", "alone", "times", "ddp")
    }
    row = {"nodes": 4, "method": "noloco", "times": 3, "outer": [], "lora": 0, "curves": curves}
    other = {
        **row,
        "method": "diloco",
        "outer": ["--set=outer.codec=sign+ef"],
        "curves": {"together": curves["together"]},
    }
    draw([row, other, row], tmp_path / "curves.svg")
    svg = (tmp_path / "curves.svg").read_text(encoding="utf-8")
    for text in (
        "4 nodes, noloco",
        "4 nodes, diloco, one bit",
        "one alone",
        "one alone, 3 times the steps",
        "DDP of 4",
    ):
        assert svg.count(f">{text}<") == 1
