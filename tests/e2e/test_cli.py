"""The commands as a person types them: bad input, joining, leaving, Ctrl-C, kill -9, and what is
left behind (nothing).
"""

import json
import os
import signal
import stat
import subprocess

import pytest

from tests.support.slow_nodes import create, hooks, joiner

ID = "12D3KooWBfyETpgiRKw6XJTa45zDN3ZkPUhEPb7ur57Rg3FqQQf7"
SWARM = "a" * 52
NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{ID}"


@pytest.fixture(scope="module")
def swarm(shared, eventually):
    """A swarm that is under way: its first node and its link.

    Its record says so too: who joins earlier begins from the seed's weights.
    """
    node = create(shared, "first")
    link = node.line()

    def is_under_way():
        status = shared.start("status", link, "--json").json()
        begun = 2 * status["fragments"]
        return any(member["progress"]["round"] >= begun for member in status["members"])

    eventually(is_under_way, 60, "training")
    return node, link


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["join", "http://example.org"], "does not start with shoal://"),
        (["join", f"shoal://tooshort?peer={NOBODY}"], "is not 52 characters"),
        (
            ["join", f"shoal://{SWARM}?peer=/ip4/1.2.3.4/tcp/99999/p2p/{ID}"],
            "its port is not a number from 1 to 65535",
        ),
        (["status", f"shoal://{SWARM}"], "names no peer"),
        (["up", "absent.toml"], "There is no settings file 'absent.toml'"),
        (["up", "typo.toml"], "There is no setting 'outer.evry': did you mean 'outer.every'?"),
        (["up", "--shard", "4/4"], "index from 0"),
    ],
)
def test_wrong_input_is_one_sentence_and_harmless(shared, arguments, sentence):
    """What is wrong with the input is said in one sentence and nothing is done."""
    (shared.home / "typo.toml").write_text("[outer]\nevry = 3\n")
    before = sorted(shared.home.iterdir())
    process = shared.start(*arguments)
    assert sentence in process.error()
    assert sorted(p for p in shared.home.iterdir() if not p.name.startswith("errors-")) == [
        p for p in before if not p.name.startswith("errors-")
    ]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--task", "nowhere/task.py:Mine"], "There is no file 'nowhere/task.py'"),
        (["--folder", "file/below"], "file/below' (Not a directory): choose another one"),
        (["--identity", "file"], "file"),
        (["--resume"], "There is no checkpoint"),
        (["--listen", "/ip4/127.0.0.1/tcp/1/garbage"], "/ip4/127.0.0.1/tcp/1/garbage"),
    ],
)
def test_a_node_that_cannot_start_says_why_and_leaves_nothing(shoal, arguments, sentence):
    (shoal.home / "broken.py").write_text("1 / 0\n")
    (shoal.home / "file").write_text("no key\n")
    (shoal.home / "file").chmod(0o600)
    node = shoal.start("up", "--name", "n", "--folder", "n", "--identity", "n.key", *arguments)
    assert sentence in node.error()
    assert shoal.left() == []
    # The log of a start that failed may be asked for in a report.
    assert {path.name for path in (shoal.home / "n").glob("*")} <= {"node.log"}
    assert (shoal.home / "file").read_text() == "no key\n"


@pytest.mark.ci
def test_an_unreachable_bootstrap_peer_is_named(shoal):
    for verb in ("join", "status"):
        said = shoal.start(verb, f"shoal://{SWARM}?peer={NOBODY}").error()
        assert NOBODY in said
        assert "refused the connection" in said
    assert shoal.left() == []


@pytest.mark.ci
def test_the_wrong_swarm_id_is_refused(shared, swarm):
    _, link = swarm
    wrong = f"shoal://{SWARM}?{link.partition('?')[2]}"
    said = [joiner(shared, wrong, "lost"), shared.start("status", wrong)]
    for process in said:
        assert "Wrong swarm id" in process.error()


@pytest.mark.ci
def test_joiner_with_other_shapes_is_told(shared, swarm, eventually):
    """A joiner with other shapes is told the difference and the swarm goes on."""
    node, link = swarm
    other = joiner(shared, link, "other", task=hooks(shared, "theirs", width=6))
    assert "'weight' has shape [1, 6] here and [1, 4] there" in other.error()
    done = len(shared.rounds("first"))
    eventually(lambda: len(shared.rounds("first")) > done, 60, "another round")
    assert node.popen.poll() is None


@pytest.mark.ci
def test_a_joiner_must_have_the_task_of_the_swarm(shared, swarm):
    _, link = swarm
    process = shared.start(
        "join",
        link,
        "--name",
        "x",
        "--folder",
        "x",
        "--identity",
        "x.key",
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
    )
    assert "The swarm trains 'slow.py:Slow', and a link carries no code" in process.error()


# -- a swarm at work -------------------------------------------------------------------------------


def test_exceeded_ram_is_said_once(shoal):
    """The estimate before training has no activations. These are 1.2 GB, in every step."""
    task, name = hooks(shoal).rsplit(":", 1)
    with open(task, encoding="utf-8") as file:
        text = file.read()
    with open(task, "w", encoding="utf-8") as file:
        file.write(
            text.replace("return (model", "return 0 * torch.ones(300_000_000).amax() + (model")
        )
    train = {"steps": 4, "seed": 1}
    file = shoal.toml(
        task={"hooks": f"{task}:{name}"}, outer={"every": 2, "wait_s": 0.5}, train=train
    )
    node = shoal.start("up", file, *shoal.own("greedy"), "--ram", "1")
    assert node.wait() == 0, node.said()
    said = [
        line for line in node.said().splitlines() if "GB of memory, where --ram allows 1:" in line
    ]
    assert len(said) == 1, said


def test_late_joiner_takes_over_and_exchanges(shared, swarm, eventually):
    """Status and a late joiner that takes over the weights and exchanges."""
    _, link = swarm
    at = len(shared.rounds("first"))
    late = joiner(shared, link, "late", "--steps", "60", "--json")
    met = eventually(
        lambda: [r for r in shared.rounds("late") if r["partner"]],
        60,
        "an exchange of the late joiner",
    )
    assert met[0]["round"] >= at
    status = shared.start("status", link, "--json").json()
    assert {"first", "late"} >= {member["name"] for member in status["members"]} >= {"first"}
    (first,) = [member for member in status["members"] if member["name"] == "first"]
    # Who came to its end is shown too, and counts no more.
    here = [member for member in status["members"] if member["end"] is None]
    assert (status["peers"], status["method"], status["task"]) == (
        len(here),
        "noloco",
        "slow.py:Slow",
    )
    assert first["progress"]["state"] == "training"
    assert first["progress"]["round"] > 0
    assert first["loss"]["training"] is not None

    result = late.json(60)
    assert "took over the swarm's weights at round" in late.said()
    assert (result["progress"]["step"], result["interrupted"], result["name"]) == (
        60,
        False,
        "late",
    )
    assert (
        result["exchanges"]["with_partner"]
        == len([r for r in shared.rounds("late") if r["partner"]])
        > 0
    )
    assert result == shared.result("late")
    # The fit was under way already: its start is not that of a fresh model, and did not wait for an
    # evaluation.
    assert result["loss"]["held_out_first"] is None
    assert shared.rounds("late")[0]["loss"] < shared.rounds("first")[0]["loss"]


def test_ids_are_made_once_and_private(shoal):
    """Ids are made once and shown and their file is private."""
    key = shoal.home / "config" / "shoal" / "identity.key"
    assert "no key" in shoal.start("id", "show").error().lower()
    made = shoal.start("id", "new", "--json").json()
    assert made["path"] == str(key)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    shown = shoal.start("id", "show")
    assert shown.wait() == 0
    assert shown.lines == [made["peer"], str(key)]
    content = key.read_bytes()
    assert str(key) in shoal.start("id", "new").error()
    assert key.read_bytes() == content


# -- ends of every kind ----------------------------------------------------------------------------


def test_ctrl_c_saves_and_the_node_resumes(shoal, eventually):
    """Ctrl-C drains and saves and a resumed node goes on."""
    node = create(
        shoal, "n", "--json", program=("-m", "shoal")
    )  # no fork: Python, too, begins and ends as it does for a user
    eventually(lambda: any(event["step"] >= 10 for event in shoal.rounds("n")), 60, "two rounds")
    shoal.interrupt(node)
    (line,) = node.lines
    first = json.loads(line)
    assert first["interrupted"]
    assert first["loss"]["held_out"] is None, "the loss of the start was shown as the end's"
    assert first["loss"]["held_out_first"] is not None
    assert first["progress"]["step"] >= 10
    assert (
        first["exchanges"]["rounds"]
        == first["exchanges"]["ended"] // first["setup"]["fragments"]
        >= 2
    )  # whole ones: each fragment once
    *_, stopping, end, speed, overlapped, where = node.said().splitlines()
    assert stopping.startswith("stopping: "), (
        node.said()
    )  # what else was said last, if it ever is not
    assert end.startswith(
        f"stopped after {first['progress']['step']} steps and "
        f"{first['exchanges']['rounds']} rounds, 0 of {first['exchanges']['ended']} exchanges with "
        "others: "
    )
    assert overlapped.startswith("training went on for ")
    assert "tokens/s in inner steps" in speed
    assert where.endswith(
        f" are in {str(shoal.home / 'n')!r}; the same command with --resume goes on from there"
    )
    assert shoal.left() == []
    (saved,) = (shoal.home / "n").glob("step-*")
    assert saved.name == f"step-{first['progress']['step']:08d}"

    again = [
        "up",
        "--name",
        "n",
        "--folder",
        "n",
        "--identity",
        "n.key",
        "--threads",
        "1",
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
    ]
    assert "pass --resume" in shoal.start(*again).error()
    resumed = shoal.start(
        *again,
        "--resume",
        "--task",
        hooks(shoal),
        "--steps",
        str(first["progress"]["step"] + 7),
        "--json",
    )
    result = resumed.json()
    assert (result["progress"]["step"], result["swarm"]) == (
        first["progress"]["step"] + 7,
        first["swarm"],
    )
    assert result["began_at"] == first["progress"]["step"]
    assert (
        f"finished after 7 steps and {result['exchanges']['rounds']} rounds since step "
        f"{result['began_at']}, 0 of {result['exchanges']['ended']} exchanges with others: "
        "held-out loss "
        f"{result['loss']['held_out']:.4f}, {result['loss']['held_out_first']:.4f} at first"
        in resumed.said()
    )
    assert result["loss"]["held_out_first"] < first["loss"]["held_out_first"]
    no_steps = ["--resume", "--task", hooks(shoal), "--steps", str(result["progress"]["step"])]
    done = shoal.start(*again, *no_steps)
    assert done.wait() == 2
    assert f"All {result['progress']['step']} steps of this run are done" in done.said()
    assert shoal.result("n") == result

    newest = max((shoal.home / "n").glob("step-*")) / "tensors.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    assert "The checkpoint is damaged" in shoal.start(*again, "--resume").error()
    assert newest.read_bytes() == content


def test_a_second_ctrl_c_ends_the_node_at_once(shoal, eventually):
    # A step that takes longer than this test waits, and that the first Ctrl-C lets finish.
    node = create(shoal, "n", seconds=100)
    eventually((shoal.home / "task" / "drawing").exists, 60, "the first step")
    node.signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        node.popen.wait(1)
    shoal.interrupt(node)
    eventually(lambda: not shoal.left(), 60, "the end of daemon and guard")


def test_ctrl_c_before_anything_runs_ends_the_node_too(shoal, eventually):
    node = create(shoal, "n")
    eventually(lambda: shoal.left()[1:], 60, "the start of the daemon")
    node.signal(signal.SIGTERM)
    assert node.wait() == 130
    eventually(lambda: not shoal.left(), 60, "the end of daemon and guard")


def test_after_kill_9_of_a_node_nothing_is_left(shoal, eventually):
    node = create(shoal, "n")
    node.line()
    assert shoal.left() != []
    node.signal(signal.SIGKILL)
    node.wait()
    eventually(lambda: not shoal.left(), 60, "the end of daemon and guard")


@pytest.mark.slow(reason="several real nodes, one after another")
def test_key_and_folder_are_one_nodes(shoal, eventually):
    """A key and a folder are one nodes until it is dead."""
    node = create(shoal, "first", "--set", "node.checkpoint_every_rounds=1")
    link = node.line()
    eventually(lambda: list((shoal.home / "first").glob("step-*")), 60, "a checkpoint")
    in_use = f"is in use by process {node.popen.pid}: "
    same_both = joiner(
        shoal, link, "first", "--resume"
    )  # what the sentence about checkpoints in the folder asks for
    same_folder = joiner(shoal, link, "first", "--resume", "--identity", shoal.home / "second.key")
    same_key = joiner(shoal, link, "second", "--identity", shoal.home / "first.key")
    same_seed = shoal.start(
        "seed", "--listen", "/ip4/127.0.0.1/tcp/0", "--identity", shoal.home / "first.key"
    )
    for other in (same_both, same_folder):
        said = other.error()
        assert said.startswith(f"The folder {str(shoal.home / 'first')!r} {in_use}")
        assert said.endswith("--name or --folder.")
    for other in (same_key, same_seed):
        said = other.error()
        assert said.startswith(f"The key {str(shoal.home / 'first.key')!r} {in_use}")
        assert said.endswith("--identity.")
    assert node.popen.poll() is None
    node.signal(signal.SIGKILL)
    node.wait()
    again = create(shoal, "first", "--resume")
    again.line()
    shoal.interrupt(again)
    assert not list(shoal.home.rglob("*.lock"))


@pytest.mark.ci
def test_killed_demo_leaves_no_process(shoal, eventually):
    """After kill -9 of a demo its nodes and their daemons are gone."""
    demo = shoal.start(
        "demo", "--peers", "2", "--rounds", "1000", "--task", hooks(shoal), "--every", "5"
    )
    eventually(
        lambda: len(list(shoal.tmp.glob("shoal-demo-*/peer-*/metrics.jsonl"))) == 2,
        90,
        "the training of two nodes",
    )
    os.kill(demo.popen.pid, signal.SIGKILL)
    demo.wait()
    eventually(lambda: not shoal.left(), 60, "the end of everything")


def test_non_finite_evaluations_reach_the_report(shoal):
    """A node whose evaluations are not finite trains to its end and reports json."""
    task = shoal.home / "blind.py"
    task.write_text(
        "import torch\nfrom shoal import Task\nclass Blind(Task):\n    def model(self): return "
        "torch.nn.Linear(4, 1)\n"
        "    def batches(self, shard):\n        while True: yield torch.ones(2, 4)\n"
        "    def loss(self, model, batch): return model(batch).square().mean()\n"
        "    def evaluate(self, model): return float('nan')\n    def extra_results(self, loss): "
        "return {'twice': 2 * loss}\n"
    )
    own = [
        "--name",
        "b",
        "--folder",
        "b",
        "--identity",
        "b.key",
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
        "--task",
        f"{task}:Blind",
    ]
    few = ["--steps", "6", "--every", "3", "--set", "train.eval_every=2", "--set", "outer.wait_s=1"]
    node = shoal.start("up", *own, *few, "--json")
    result = node.json()
    assert (
        result["progress"]["step"],
        result["loss"]["held_out_first"],
        result["loss"]["held_out"],
        result["task"],
    ) == (
        6,
        None,
        None,
        {},
    )
    assert (
        "The held-out loss is nan at step 0 and counts as unknown: check the task's evaluate()."
        in node.said()
    )
    assert [
        event["held_out"] for event in shoal.metrics("b") if event["event"] == "evaluation"
    ] == [None] * 3
