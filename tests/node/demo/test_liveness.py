"""What a demo waits for, shows and leaves behind, and its nodes that cheat."""

import copy
import json
import os
import subprocess
import sys
import tempfile

import pytest
import torch

from shoal.node.config.settings import ConfigError, load
from shoal.node.demo import cheating, liveness
from shoal.node.demo.bans import bans
from shoal.node.demo.liveness import LONG_S, QUIET_S, DemoError, Liveness
from shoal.node.demo.nodes import interpreter
from shoal.node.demo.rl_demo import policies, run_demo
from shoal.node.demo.run_nodes import stage
from shoal.node.demo.training_demo import _all_began, _done, _ended, _loss, _sent
from shoal.node.rl import loading
from shoal.node.rl.loading import load_env
from shoal.node.rl.tiny import Tiny
from shoal.node.verify import claimer, proven_group


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


def test_hanging_nodes_are_named(demo):
    """Nodes that hang are found out and named with what they did."""
    demo.write(0, "start")
    demo.after(1)
    demo.beat(0, alive=False, seconds=60.0)
    demo.beat(1, "training", alive=False, seconds=99.6)
    with pytest.raises(
        DemoError,
        match=r"for 120 s \(peer-0 was evaluating for 60 s, peer-1 was training for 100 s\): run",
    ):
        demo.after(QUIET_S + 1)


def test_nodes_that_never_write_anything_are_given_up(demo):
    demo.after(QUIET_S - 1)
    with pytest.raises(
        DemoError, match="No node made progress for 120 s: run again with --verbose"
    ):
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


@pytest.mark.parametrize(
    ("peers", "processors", "quiet_s"),
    [(16, 2, 120.0), (32, 2, 240.0), (32, 4, 120.0), (12, 1, 180.0)],
)
def test_more_nodes_than_eight_on_a_processor_have_longer(tmp_path, peers, processors, quiet_s):
    demo = Demo(tmp_path, peers, processors)
    demo.after(quiet_s - 1)
    with pytest.raises(DemoError, match=f"for {quiet_s:g} s"):
        demo.after(2)


def exchange(sent, lag, loss=None, fragment=0, fragments=1):
    return {
        "event": "round",
        "step": sent + lag,
        "lag_steps": lag,
        "loss": loss,
        "fragment": fragment,
        "fragments": fragments,
    }


def test_a_round_shows_the_exchanges_that_were_begun_in_it():
    """Four fragments a round of 8 steps, which come late and not in order; other events are passed
    over.
    """
    events = [
        exchange(2, 1, 4.0),
        {"event": "evaluation", "step": 3},
        exchange(6, 1, 3.0),
        exchange(4, 5, 2.0),
        exchange(8, 3),
        exchange(10, 1, 1.0),
        exchange(12, 1, 1.0),
    ]
    assert [_sent(event) for event in _ended(events, 8, 8)] == [2, 6, 4, 8]
    assert _loss(_ended(events, 8, 8)) == 3.0
    assert [_sent(event) for event in _ended(events, 16, 8)] == [10, 12]


def test_round_ends_with_its_last_fragment():
    """A round is done when the last of its fragments was exchanged."""
    order = [
        (2, 0),
        (8, 3),
        (4, 1),
        (10, 0),
        (6, 2),
        (16, 3),
        (12, 1),
        (14, 2),
        (16, 4),
    ]  # and the last average
    events = [exchange(sent, 1, fragment=fragment, fragments=4) for sent, fragment in order]
    assert [_done(events[:count], 8) for count in range(len(order) + 1)] == [
        0,
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        2,
        2,
    ]
    assert [_done([exchange(sent, 0)], 8) for sent in (7, 8, 17)] == [0, 1, 2]


def test_stepless_node_shows_its_last_exchange():
    """A node whose rounds are not steps shows its last exchange."""
    events = [exchange(3, 0, 2.0), exchange(7, 0, 1.5)]
    assert [_sent(event) for event in _ended(events, 20, 5)] == [7]
    assert _ended([], 5, 5) == []
    assert _loss([]) is None


def test_all_train_after_the_last_first_step():
    """All train once the last node has done its first step."""

    def began(at):
        return {"event": "begun", "time": at, "phases": []}

    nodes = [
        [{"event": "start", "time": 9.0}, began(4.0), exchange(2, 1)],
        [began(7.0)],
        [began(1.0), began(6.0)],
    ]
    assert _all_began(nodes) == 7.0


def test_a_demo_leaves_no_folder_and_removes_nobody_elses(tmp_path, monkeypatch):
    """It took the folder of a node that was killed, checkpoints included, for that of a dead
    demo.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = tmp_path / "shoal-my-run"
    run.mkdir()
    (run / ".lock").write_text("4711")
    with stage(None) as (mine, _):
        (mine / "peer-0").mkdir()
        assert mine.parent == tmp_path.resolve()
    assert list(tmp_path.iterdir()) == [run]
    assert (run / ".lock").exists()


def test_each_event_is_parsed_once_and_half_a_line_waits(tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr(
        liveness.json, "loads", lambda line, loads=json.loads: parsed.append(line) or loads(line)
    )
    path = tmp_path / "metrics.jsonl"
    reader = liveness.EventReader(path)
    assert reader.read() == []
    path.write_text('{"n": 1}\n{"n": 2}\n{"n"', encoding="utf-8")
    assert [event["n"] for event in reader.read()] == [1, 2]
    with path.open("a", encoding="utf-8") as file:
        file.write(': "käse"}\n')
    assert [event["n"] for event in reader.read()] == [1, 2, "käse"]
    assert [event["n"] for event in reader.read()] == [1, 2, "käse"]
    assert len(parsed) == 3


@pytest.mark.parametrize("wanted", [False, True])
def test_local_file_hides_nothing(tmp_path, monkeypatch, wanted):
    """A file in the present folder hides nothing unless it does so here too."""
    (tmp_path / "queue.py").write_text("raise SystemError('hidden')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [os.getcwd() if wanted else "/", *sys.path])
    ended = subprocess.run(
        [*interpreter(), "-m", "concurrent.futures.thread"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ("hidden" in ended.stderr) == wanted


def test_rounded_matrices_have_fifteen_values():
    """Rounded matrices have fifteen values a row within the block and the old ones after."""
    module = torch.nn.Linear(64, 3)
    before = copy.deepcopy(module.state_dict())
    with cheating.rounded(module):
        assert all(len(set(row.tolist())) <= 15 for row in module.weight)
        assert not torch.equal(module.weight, before["weight"])
        assert torch.equal(module.bias, before["bias"])
    assert torch.equal(module.weight, before["weight"])


@pytest.mark.ci
def test_cheat_rounds_its_writing_only(monkeypatch):
    """A cheat writes with rounded weights and evaluates and checks with its own."""
    seen = []

    def generate(policy, prompts, count, *, temperature, max_tokens, seed, choose=None):
        seen.append(len(set(policy.module.head.weight[0].tolist())))

    monkeypatch.setattr(Tiny, "generate", generate)
    monkeypatch.setattr(loading, "load_policy", loading.load_policy)
    monkeypatch.setattr(claimer, "prove", None)
    monkeypatch.setattr(
        proven_group,
        "prove",
        lambda policy: seen.append(len(set(policy.module.head.weight[0].tolist()))),
    )
    cheating.cheat()
    policy = loading.load_policy("tiny:copy:1", load_env("strings", {}), 0)
    for writer, temperature in ((policy, 1.0), (policy, 0.0), (copy.deepcopy(policy), 1.0)):
        writer.generate(["?"], 1, temperature=temperature, max_tokens=4, seed=0)
    claimer.prove(policy)
    assert [values <= 15 for values in seen] == [True, False, False, True]


def test_nodes_that_are_verified_have_one_policy():
    def chosen(**more):
        return policies(
            load(None, {"swarm.start_when": 2, "swarm.shards": 2, "task.hooks": "rl", **more})
        )

    assert chosen() == ["tiny:copy", "tiny:first"]
    assert chosen(**{"verify.audit_rate": 1.0}) == ["tiny", "tiny"]


@pytest.mark.parametrize(("cheat", "rate"), [(1, 0.0), (2, 1.0)])
def test_cheats_that_nobody_would_find_are_refused(cheat, rate):
    with pytest.raises(ConfigError, match="--cheat needs"):
        run_demo(
            peers=2,
            rounds=1,
            seed=0,
            device="cpu",
            keep=None,
            verbose=False,
            cheat=cheat,
            more={"verify.audit_rate": rate},
        )


def history(peer, begins, *bans, ends=100.0):
    events = [
        {"event": "start", "peer": peer, "time": 0.0},
        {"event": "rl", "time": begins},
        {"event": "rl", "time": ends},
    ]
    return events + [{"event": "verify", "time": time, "banned": banned} for time, banned in bans]


NODES = [
    {"name": name, "final_reward": value, "cumulative_reward": 10 * value}
    for name, value in (("a", 0.5), ("b", 0.7), ("c", 0.1))
]


def test_ban_counts_until_all_honest_nodes_know():
    """A ban counts from the first completions until the last honest node knows it."""
    found = bans(
        NODES,
        [
            history("A", 1.0, (30.0, []), (50.0, ["C"])),
            history("B", 1.0, (60.0, ["C"])),
            history("C", 10.0, (20.0, ["A"])),
        ],
        cheat=1,
        round_s=5.0,
    )
    assert found["banned_after"] == {"c": 10.0}
    assert found["honest_banned"] == []  # only a cheat said so
    assert found["honest_final_reward"] == pytest.approx(0.6)
    assert found["honest_cumulative_reward"] == pytest.approx(6.0)


def test_incomplete_and_late_bans_do_not_count():
    """A cheat that one honest node did not ban and bans after the first end do not count."""
    found = bans(
        NODES,
        [
            history("A", 1.0, (50.0, ["B", "C"]), ends=70.0),
            history("B", 1.0, (80.0, ["A", "C"])),
            history("C", 10.0),
        ],
        cheat=1,
        round_s=5.0,
    )
    assert found["banned_after"] == {"c": None}
    assert found["honest_banned"] == ["b"]
