"""A node that computes or waits in silence reports it; one that hangs is told apart from one that computes."""

import itertools
import json
import threading
import time

import pytest

from shoal.node.metrics.log import Metrics
from shoal.node.runtime import display
from shoal.node.runtime.display import BEAT_S, Activity, processor_time


class Shown:
    def __init__(self):
        self.lines = []

    def activity(self, text):
        self.lines.append(text)


class Node:
    """An activity by clocks of the test."""

    def __init__(self, folder, monkeypatch):
        self.now = self.used = 0.0
        self.path, self.shown = folder / "metrics.jsonl", Shown()
        for kind in (Metrics, Activity):
            monkeypatch.setattr(kind, "_clock", lambda one: self.now)
        monkeypatch.setattr(display, "processor_time", lambda: lambda: self.used)
        self.metrics = Metrics(self.path)
        self.activity = Activity(self.metrics, self.shown)

    def pass_time(self, seconds, used=0.0):
        self.now += seconds
        self.used += used
        self.activity.beat()

    def events(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def node(tmp_path, monkeypatch):
    node = Node(tmp_path, monkeypatch)
    yield node
    node.metrics.close()


def test_a_long_evaluation_is_reported_every_few_seconds_and_is_alive_while_it_computes(node):
    with node.activity.doing("training"), node.activity.doing("evaluating"):
        node.pass_time(BEAT_S, used=1.0)
        node.pass_time(BEAT_S, used=0.0)
    found = [(e["event"], e["doing"], e["seconds"], e["busy_s"], e["alive"]) for e in node.events()]
    assert found == [("activity", "evaluating", 10.0, 1.0, True), ("activity", "evaluating", 20.0, 0.0, False)]
    assert node.shown.lines == ["evaluating, 10 s so far", "evaluating, 20 s so far (nothing moves)"]


def test_what_a_node_did_up_to_its_first_step_is_written_once(node):
    with node.activity.doing("joining the swarm"):
        pass
    for _ in range(2):
        node.activity.stepped()
        with node.activity.doing("evaluating"):
            pass
    (event,) = node.events()
    assert (event["event"], [one["doing"] for one in event["phases"]]) == (
        "begun",
        ["starting", "joining the swarm", "starting", "first step done"],
    )
    assert all(before["cpu_s"] <= after["cpu_s"] for before, after in itertools.pairwise(event["phases"]))


def test_a_node_that_writes_anyway_reports_nothing_more(node):
    for _ in range(10):
        node.pass_time(BEAT_S / 2)
        node.metrics.write("round")
    assert {event["event"] for event in node.events()} == {"round"}
    assert node.shown.lines == []


@pytest.mark.parametrize(("progress", "alive"), [((1, 0), True), ((0, 1_000_000), True), ((0, 5_000), False)])
def test_steps_and_bytes_are_progress_without_the_processor(node, progress, alive):
    node.activity.progress = lambda: progress
    node.pass_time(BEAT_S)
    assert [event["alive"] for event in node.events()] == [alive]


def test_a_wait_with_a_deadline_of_its_own_counts_as_alive_and_only_that(node):
    with node.activity.doing("saving", bounded=True):
        node.pass_time(BEAT_S)
        with node.activity.doing("evaluating"):
            node.pass_time(BEAT_S)
        node.pass_time(BEAT_S)
    node.pass_time(BEAT_S)
    assert [(e["doing"], e["alive"]) for e in node.events()] == [
        ("saving", True), ("evaluating", False), ("saving", True), ("starting", False)
    ]  # fmt: skip


def test_each_change_is_announced(node):
    told = []
    node.activity.on_change = told.append
    with node.activity.doing("training"), node.activity.doing("evaluating"):
        pass
    assert told == ["training", "evaluating", "training", "starting"]


def test_processor_time_is_that_of_the_thread_that_asked_for_the_clock():
    if not hasattr(time, "pthread_getcpuclockid"):
        pytest.skip("this system has no clock of a thread's processor time")
    clock, ended = processor_time(), threading.Event()

    def compute():
        begun = time.thread_time()
        while time.thread_time() - begun < 0.2:
            pass
        ended.set()

    before = clock()
    threading.Thread(target=compute).start()
    ended.wait()
    assert clock() - before < 0.1
