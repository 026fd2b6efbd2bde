"""Sinks get what the file gets; one that fails, or hangs, costs a sentence and nothing else."""

import importlib.util
import json
from contextlib import closing

import pytest

from shoal.node.config.settings import load
from shoal.node.metrics.log import About, Metrics, MetricsError, Sinks
from shoal.node.metrics.sinks import check_demo, flags_of_demo, open_sinks

ABOUT = About(
    swarm="s",
    swarm_id="x" * 52,
    node="anna",
    peer="12D3",
    method="noloco",
    task="text",
    device="cpu",
    version="0.1.0",
)


class Fake:
    """Keeps what it is told; fails at the events that are named."""

    name = "the fake"

    def __init__(self, *failing):
        self.failing, self.got, self.closed = failing, [], 0

    def begin(self, about):
        self.about = about
        return f"{about.node} begins"

    def event(self, name, time, fields):
        if name in self.failing:
            raise OSError(28, "No space left on device")
        self.got.append((name, fields))

    def close(self):
        self.closed += 1
        if "close" in self.failing:
            raise RuntimeError("the server\nis gone")


def test_sink_gets_every_event(tmp_path):
    """A sink gets every event plain and the live ones besides."""
    fake, said = Fake(), []
    with closing(Sinks([fake], said.append)) as sinks:
        sinks.begin(ABOUT)
        metrics = Metrics(tmp_path / "metrics.jsonl", said.append, sinks)
        metrics.write("evaluation", step=3, loss=float("nan"))
        metrics.live("progress", step=4, loss=float("inf"))
        metrics.close()
    assert fake.got == [
        ("evaluation", {"step": 3, "loss": None}),
        ("progress", {"step": 4, "loss": None}),
    ]
    assert (fake.closed, said) == (1, ["anna begins"])
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "evaluation"


def test_failing_sink_is_reported_once(tmp_path):
    """A sink that fails is told of once and the others go on."""
    bad, good, said = Fake("round"), Fake(), []
    sinks = Sinks([bad, good], said.append)
    metrics = Metrics(tmp_path / "metrics.jsonl", said.append, sinks)
    for event in ("start", "round", "round", "end"):
        metrics.write(event)
    sinks.close()
    assert [name for name, _ in bad.got] == ["start"]
    assert [name for name, _ in good.got] == ["start", "round", "round", "end"]
    assert (bad.closed, good.closed) == (1, 1)
    assert said == [
        "the fake gets no metrics any more (No space left on device); training goes on, and "
        "metrics.jsonl has them all."
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("failing", [("close",), ("round", "close")])
def test_sink_with_a_bad_end_is_one_line(failing):
    """A sink that does not end well is one line more."""
    said = []
    with closing(Sinks([Fake(*failing)], said.append)) as sinks:
        sinks.event("round", 0.0, {})
    assert "(the server is gone)" in said[-1]
    assert not any("\n" in line for line in said)


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
def test_a_missing_package_names_the_extra(extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    node = load(None, {f"node.{extra}": "x", "node.folder": str(tmp_path / "run")})
    with pytest.raises(MetricsError) as said:
        open_sinks(node.node, print)
    assert str(said.value) == (
        f"--{extra} needs the package {extra}, which is not installed: run pip install "
        f"'shoal[{extra}]'."
    )
    assert list(tmp_path.iterdir()) == []


def test_without_a_setting_there_is_no_sink_and_no_sentence():
    said = []
    with closing(open_sinks(load().node, said.append)) as sinks:
        sinks.begin(ABOUT)
        sinks.event("round", 0.0, {})
    assert said == []


def test_the_nodes_of_a_demo_have_ports_one_after_another():
    node = load(None, {"node.metrics": "0.0.0.0:9464", "node.wandb": "team/project"}).node
    assert flags_of_demo(node, 2) == ["--metrics", "0.0.0.0:9466", "--wandb", "team/project"]
    assert flags_of_demo(load(None, {"node.metrics": 0}).node, 2) == ["--metrics", "127.0.0.1:0"]
    assert flags_of_demo(load().node, 2) == []


def test_a_demo_is_checked_before_its_nodes_start():
    said = []
    check_demo(load(None, {"node.metrics": 0}).node, 3, said.append)
    assert said == []
    with pytest.raises(
        MetricsError,
        match=r"There are no 4 ports from --metrics 127\.0\.0\.1:65533 on: choose a lower one\.",
    ):
        check_demo(load(None, {"node.metrics": "65533"}).node, 4, said.append)
