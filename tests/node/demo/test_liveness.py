"""A demo waits for nodes as long as they move, and reports in one sentence what they did last when they do not."""

import json

import pytest

from shoal.node.demo.nodes import LONG_S, QUIET_S, DemoError, Liveness


class Demo:
    def __init__(self, folder, peers=2, processors=1):
        self.now = 0.0
        self.folders = [folder / f"peer-{index}" for index in range(peers)]
        self.liveness = Liveness(self.folders, clock=lambda: self.now, processors=processors)

    def write(self, index, event, **fields):
        self.folders[index].mkdir(exist_ok=True)
        with (self.folders[index] / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    def beat(self, index, doing="evaluating", alive=True, step=0, seconds=0.0):
        self.write(index, "activity", doing=doing, alive=alive, step=step, seconds=seconds)

    def after(self, seconds):
        self.now += seconds
        return self.liveness.look()


@pytest.fixture
def demo(tmp_path):
    return Demo(tmp_path)


def test_an_evaluation_of_many_minutes_is_waited_for(demo):
    for _ in range(30):
        demo.beat(0)
        demo.after(QUIET_S - 1)
    demo.write(0, "round", step=5)
    assert demo.after(QUIET_S - 1)[0][-1]["event"] == "round"


def test_steps_that_take_minutes_are_progress_without_end(demo):
    for step in range(100):
        demo.beat(1, "training", step=step)
        demo.after(QUIET_S - 1)
    assert demo.now > LONG_S


def test_nodes_that_hang_are_found_out_and_named_with_what_they_did(demo):
    demo.write(0, "start")
    demo.after(1)
    demo.beat(0, alive=False, seconds=60.0)
    demo.beat(1, "training", alive=False, seconds=99.6)
    with pytest.raises(DemoError, match=r"for 120 s \(peer-0 was evaluating for 60 s, peer-1 was training for 100 s\): run"):
        demo.after(QUIET_S + 1)


def test_nodes_that_never_write_anything_are_given_up(demo):
    demo.after(QUIET_S - 1)
    with pytest.raises(DemoError, match="No node made progress for 120 s: run again with --verbose"):
        demo.after(2)


def test_an_endless_loop_is_found_out_although_it_computes(demo):
    while demo.now < LONG_S - QUIET_S:
        demo.beat(0)
        demo.after(QUIET_S - 1)
    demo.beat(0)
    with pytest.raises(DemoError, match=r"in 60 minutes \(peer-0 was evaluating"):
        demo.after(2 * QUIET_S)


def test_a_node_that_has_ended_is_progress(demo):
    demo.after(QUIET_S - 1)
    assert demo.liveness.look(ended=1)
    demo.after(QUIET_S - 1)


@pytest.mark.parametrize(("peers", "processors", "quiet_s"), [(16, 2, 120.0), (32, 2, 240.0), (32, 4, 120.0), (12, 1, 180.0)])
def test_more_nodes_than_eight_on_a_processor_have_longer(tmp_path, peers, processors, quiet_s):
    demo = Demo(tmp_path, peers, processors)
    demo.after(quiet_s - 1)
    with pytest.raises(DemoError, match=f"for {quiet_s:g} s"):
        demo.after(2)
