"""Commands in their surroundings: paths when the folder changes, output as JSON, a reader that
goes, a missing package.
"""

import ast
import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shoal.node.checkpoint.folder import steps
from shoal.node.checkpoint.store import load
from shoal.node.checkpoint.writer import CheckpointWriter
from shoal.node.cli.main import cli
from shoal.node.commands.scaffold import ScaffoldError, scaffold
from shoal.node.config.node_settings import NodeSettings
from shoal.node.config.rl_settings import RLSettings
from shoal.node.config.setting_types import spec_label
from shoal.node.config.settings import Settings
from shoal.node.console import dumps
from shoal.node.data.source import DataError
from shoal.node.data.tokenizer import BYTES, load_tokenizer
from shoal.node.demo import training_demo
from shoal.node.integrations.own_loop import Run
from shoal.node.packages import require
from shoal.node.rl.environment import EnvError
from shoal.node.rl.gym import Gym
from shoal.node.rl.hf import load_hf
from shoal.node.rl.policy import PolicyError
from shoal.node.tasks.loader import load_task
from shoal.node.tasks.text import TextTask
from shoal.node.verify.evidence_file import EvidenceFile
from shoal.node.watch.source import WatchError
from shoal.optim import Alone, NoLoCo
from shoal.swarm.errors import ShoalError
from shoal.swarm.file_lock import FileLock
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.peerstore import Peerstore
from shoal.swarm.wire.record import Loss, NodeRecord

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.fixture
def move(tmp_path, monkeypatch):
    """Begin in one folder; the call goes to another, which must stay empty."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    monkeypatch.chdir(before)
    yield lambda: monkeypatch.chdir(after)
    assert not list(after.iterdir())


def here(tmp_path):
    return {
        path.relative_to(tmp_path / "before").as_posix()
        for path in (tmp_path / "before").rglob("*")
        if path.is_file()
    }


def test_a_key_is_locked_where_it_is(tmp_path, move):
    made, loaded = Identity.create("own.key"), Identity.load("own.key")
    move()
    for identity in (made, loaded):
        with identity.lock():
            assert "own.key.lock" in here(tmp_path)


def test_a_daemon_reads_its_key_again(move):
    """The supervisor starts a new daemon from the same identity when one died."""
    identity = Identity.create("own.key")
    move()
    assert Identity.load(identity.path).peer_id == identity.peer_id


def test_locks_known_peers_and_evidence_are_written_where_they_were(tmp_path, move):
    lock, known, history = (
        FileLock(Path("a.lock"), "It", "stop it"),
        Peerstore("", Path("peers.json")),
        EvidenceFile(Path("h.db")),
    )
    move()
    with lock:
        assert here(tmp_path) == {"a.lock"}
    known.remember([f"/ip4/203.0.113.4/tcp/4001/p2p/{PEER}"])
    known.save()
    assert here(tmp_path) == {"peers.json"}
    assert history.path == tmp_path / "before" / "h.db"


def test_checkpoints_are_written_where_they_were(tmp_path, move):
    writer = CheckpointWriter(
        Path("run"), keep=2, state=lambda: {"x": torch.ones(2)}, notify=logging.warning
    )
    move()
    assert writer.last(3) is None
    assert load(tmp_path / "before" / "run")[0] == 3


def test_a_run_of_ones_own_loop_saves_where_it_was(tmp_path, move):
    model = torch.nn.Linear(2, 1)
    run = Run("runs/anna", model, torch.optim.SGD(model.parameters(), lr=0.1), tensorboard="curves")
    move()
    assert run.folder == tmp_path / "before" / "runs" / "anna"
    assert run._saver.last(1) is None
    run._sinks.close()
    assert load(run.folder)[0] == 1


def test_slow_weights_on_disk_stay_in_their_folder(tmp_path, move):
    Path("slow").mkdir()
    model = torch.nn.Linear(2, 1)
    opt = NoLoCo(
        torch.optim.SGD(model.parameters(), lr=0.1),
        Alone(),
        every=1,
        lag=0,
        slow_device=Path("slow"),
    )
    move()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
    opt.load_state_dict(opt.state_dict())
    assert opt.round == 2


def test_paths_of_settings_are_whole(tmp_path, move):
    names = ("folder", "offload", "tensorboard", "identity", "resume_from")
    given = NodeSettings.model_validate({name: f"x/{name}" for name in names})
    default = NodeSettings.model_validate({"name": "anna"})
    move()
    assert [getattr(given, name) for name in names] == [
        tmp_path / "before" / "x" / name for name in names
    ]
    assert (given.run_folder, default.run_folder) == (
        tmp_path / "before/x/folder",
        tmp_path / "before/runs/anna",
    )


def test_policy_folder_is_whole(tmp_path, move):
    """The folder of a policy is whole and a name stays one."""
    (tmp_path / "before" / "smol").mkdir(parents=True, exist_ok=True)
    given = [
        RLSettings(policy=spec).policy
        for spec in ("hf:smol", "hf:owner/name", "tiny", "tiny:habit")
    ]
    move()
    assert given == [f"hf:{tmp_path / 'before' / 'smol'}", "hf:owner/name", "tiny", "tiny:habit"]


TASK = """
import os
from shoal.node.tasks.text import TextTask
os.chdir(os.environ["ELSEWHERE"])
class Mine(TextTask):
    pass
"""


def test_a_task_file_that_changes_the_folder_is_loaded_again(tmp_path, move, monkeypatch):
    """A node loads it once more to verify, or for its baseline."""
    monkeypatch.setenv("ELSEWHERE", str(tmp_path / "after"))
    (tmp_path / "before" / "task.py").write_text(TASK)
    settings = Settings.model_validate(
        {"task": {"hooks": "task.py:Mine"}, "rl": {"env": "task.py:Mine"}}
    )
    move()
    assert [type(load_task(settings.task.hooks)._task).__name__ for _ in range(2)] == [
        "Mine",
        "Mine",
    ]
    assert spec_label(settings.task.hooks) == "task.py:Mine"
    assert settings.rl.env == settings.task.hooks


@pytest.mark.parametrize("data", ["text.txt", "texts", "text.txt,texts", "records.jsonl"])
def test_text_is_read_from_where_it_was(tmp_path, move, data):
    before = tmp_path / "before"
    (before / "texts").mkdir()
    (before / "text.txt").write_text("a text " * 200)
    (before / "texts" / "b.txt").write_text("b text " * 200)
    (before / "records.jsonl").write_text('{"text": "a text"}\n' * 200)
    task = TextTask(data=data, context=8, batch=2)
    move()
    assert task.tokenizer_name == BYTES
    assert task.stream is not None or task.documents


def test_a_tokenizer_is_read_from_where_it_was(tmp_path, move):
    task = TextTask(tokenizer="./none")
    move()
    with pytest.raises(Exception, match=str(tmp_path / "before" / "none")):
        task.tokenizer  # noqa: B018


NODE = Path(__file__).parents[2] / "node"
PRINTING = ("cli", "commands", "runtime", "metrics", "watch")
NAN, REPORT = math.nan, {"loss": math.nan, "all": [{"x": -math.inf}, 1.0], "name": "n"}
LINK = f"shoal://{'a' * 52}?peer=/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral().peer_id}"


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_not_finite_is_null():
    assert strict(dumps(REPORT)) == {"loss": None, "all": [{"x": None}, 1.0], "name": "n"}
    assert strict(dumps((NAN, True, "NaN", 3))) == [None, True, "NaN", 3]


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["demo"], "shoal.node.demo.training_demo.run_demo"),
        (["demo", "--task", "rl"], "shoal.node.demo.rl_demo.run_demo"),
        (["status", LINK], "shoal.node.commands.status.read_status"),
        (["peers", LINK], "shoal.node.verify.peers.read_peers"),
        (["pull", LINK, "--out", "x"], "shoal.node.commands.pull.pull"),
        (["merge", "x", "--out", "y"], "shoal.node.checkpoint.merge.merge"),
        (["invite", LINK], "shoal.node.commands.creator.invite"),
        (["verify", "odds"], "shoal.node.verify.vote_odds.odds_report"),
    ],
)
def test_every_command_that_reports_numbers_prints_json(arguments, where, monkeypatch):
    monkeypatch.setattr(
        where,
        lambda *args, **kwargs: {
            **REPORT,
            "troubles": [],
            "values": 1,
            "tensors": 1,
            "trained_alone": False,
        },
    )
    shown = CliRunner().invoke(
        cli, [*arguments, "--json"], standalone_mode=False, catch_exceptions=False
    )
    assert strict(shown.stdout)["loss"] is None


def test_no_command_encodes_json_by_itself():
    for folder in PRINTING:
        for file in (NODE / folder).rglob("*.py"):
            calls = [
                item.func
                for item in ast.walk(ast.parse(file.read_text()))
                if isinstance(item, ast.Call)
            ]
            own = [
                call
                for call in calls
                if isinstance(call, ast.Attribute)
                and ast.unparse(call) in ("json.dumps", "json.dump")
            ]
            assert not own, f"{file}: write dumps of shoal.node.console"


def test_demo_reports_without_evaluations():
    """A demo whose evaluations are not known still has a report."""
    record = NodeRecord(loss=Loss(held_out=2.0, held_out_alone=4.0)).model_dump()
    one = {
        **record,
        "setup": {"method": "noloco", "params": 1, "fragments": 1},
        "wall_s": 1.0,
        "internal_errors": {},
        "trained_alone": False,
        "last_average": None,
        "gossip_sent": 3,
    }

    def with_losses(**losses):
        return {**one, "loss": {**record["loss"], **losses}}

    report = training_demo.report([one, with_losses(held_out_first=1.0)], [], [], 0.5, 1.0)
    assert (report["loss_first"], report["loss_last"]) == (None, 2.0)
    assert report["gossip_sent"] == 6
    assert "held-out loss: not known" in training_demo.summary(report)
    unknown = with_losses(held_out_first=3.0, held_out_alone=None)
    alone_unknown = training_demo.report([unknown], [], [], 0.5, 1.0)
    assert "3.000 at first, 2.000 together; not compared" in training_demo.summary(alone_unknown)
    assert "50.0 % better together" in training_demo.summary(
        training_demo.report([with_losses(held_out_first=3.0)], [], [], 0.5, 1.0)
    )


def test_demo_counts_both_exchanges_of_a_chain():
    """A chain of three and, a round later, a pair beside one that is alone."""
    rounds = [(2, 2), (3, 2), (2, 1)]
    nodes = [[{"event": "round", "members": count} for count in each] for each in rounds]
    assert training_demo.pairs_exchanged(nodes) == 3


WRITES = """
import logging, sys, click
from types import SimpleNamespace
from rich.console import Console
from shoal.node.logs import log_to_stderr
from shoal.node.lost_output import drop_lost_output, is_lost
from shoal.node.runtime.display import LiveDisplay, make_display
drop_lost_output()
log_to_stderr(False)
displays = [make_display(), LiveDisplay(Console(file=sys.stderr, force_terminal=True))]
for display in displays:
    display.start(3)
for number in range(3):
    print(number)
    print(number, file=sys.stderr)
    click.echo("result")
    click.echo("note", err=True)
    logging.getLogger("shoal.x").warning("warning")
    Console().print("table")
    for display in displays:
        display.message("a message")
        display.update(SimpleNamespace(step=number, loss=1.0, rates=SimpleNamespace(steps_per_s=2.0, tokens_per_s=0.0)))
for display in displays:
    display.close()
open(sys.argv[1], "w").write(f"{is_lost(sys.stdout)} {is_lost(sys.stderr)}")
sys.exit(5)
"""  # noqa: E501


def without_a_reader(kind):
    """Return a descriptor to write to, of a pipe or a terminal that nobody reads."""
    reader, writer = os.openpty() if kind == "terminal" else os.pipe()
    os.close(reader)
    return writer


def run(arguments, out, err, **how):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        timeout=120,
        **how,
    )


@pytest.mark.parametrize(
    ("kind", "unbuffered", "which"),
    [("pipe", "", "both"), ("terminal", "1", "both"), ("pipe", "1", "stdout")],
)
def test_every_kind_of_writing_goes_on(tmp_path, kind, unbuffered, which):
    lost = without_a_reader(kind)
    err = lost if which == "both" else subprocess.PIPE
    ended = run(
        ["-c", WRITES, tmp_path / "done"],
        lost,
        err,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(lost)
    assert ended.returncode == 5
    assert (tmp_path / "done").read_text() == ("True True" if which == "both" else "True False")
    if which == "stdout":
        assert b"Traceback" not in ended.stderr
        assert ended.stderr.count(b"WARNING shoal.x: warning") == 3


def test_full_disk_drops_messages_not_results():
    """Messages for a full disk are dropped and results are not."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    script = (
        "import sys\nfrom shoal.node.lost_output import "
        "drop_lost_output\ndrop_lost_output()\nprint('x', file=sys.{}, flush=True)"
    )
    with open("/dev/full", "w") as full:
        assert run(["-c", script.format("stderr")], subprocess.PIPE, full).returncode == 0
        result = run(["-c", script.format("stdout")], full, subprocess.PIPE)
    assert result.returncode == 1
    assert b"No space left" in result.stderr


def test_a_short_command_is_quiet():
    lost = without_a_reader("pipe")
    for command in (
        ["--help"],
        ["plan", "--json", "--params", "1e6", "--step", "0.5", "--mbit", "20", "--rtt", "0.1"],
    ):
        ended = run(["-m", "shoal", *command], lost, subprocess.PIPE)
        assert (ended.returncode, ended.stderr) == (0, b"")
    os.close(lost)


@pytest.mark.slow(reason="starts a node and its daemon")
def test_a_node_trains_to_its_end_and_saves(tmp_path):
    lost = without_a_reader("pipe")
    own = [
        "--name",
        "n",
        "--folder",
        tmp_path / "n",
        "--identity",
        tmp_path / "n.key",
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
    ]
    few = ["--steps", "6", "--every", "3", "--threads", "1", "--set", "outer.wait_s=1", "--json"]
    ended = run(["-m", "shoal", "up", *own, *few], lost, lost)
    os.close(lost)
    assert ended.returncode == 0
    assert steps(tmp_path / "n") == [6]
    assert (
        json.loads((tmp_path / "n" / "metrics.jsonl").read_text().splitlines()[-1])["event"]
        == "end"
    )


WATCHES = """
import queue, sys, threading
from shoal.node.lost_output import drop_lost_output
from shoal.node.watch import source
drop_lost_output()
class Endless:
    ended = threading.Event()
source.line_of = str
inbox = queue.Queue()
for number in range(3):
    inbox.put(number)
source.print_lines(inbox, Endless(), None)
sys.exit(inbox.qsize())
"""


def test_a_stream_of_events_ends_with_its_reader():
    lost = without_a_reader("pipe")
    ended = run(["-c", WATCHES], lost, subprocess.PIPE)
    os.close(lost)
    assert (ended.returncode, ended.stderr) == (2, b"")


def watch(*arguments):
    ended = CliRunner().invoke(cli, ["watch", *arguments])
    raise ended.exception


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: scaffold("x", "finetune"),
            ScaffoldError,
            "finetune needs the package transformers, .*'shoal[hf]'.",
        ),
        (
            lambda: load_tokenizer("gpt2"),
            DataError,
            "'gpt2' needs the package tokenizers, .*'shoal[data]', or set tokenizer=bytes.",
        ),
        (
            lambda: load_hf("x"),
            PolicyError,
            "'hf:x' needs the package transformers, .*'shoal[rl]', or choose tiny.",
        ),
        (
            lambda: Gym("sapo9"),
            EnvError,
            "'sapo9' needs the package reasoning_gym, .*'shoal[rl]', or choose strings.",
        ),
        (
            lambda: watch(LINK, "--web", "0"),
            WatchError,
            "watch --web needs the packages aiohttp, segno, .*'shoal[watch]', or use --json",
        ),
        (
            lambda: watch(LINK, "--tui"),
            WatchError,
            "watch --tui needs the package textual, .*'shoal[watch]', or use --json",
        ),
        (
            lambda: watch("--replay", "x", "--tui"),
            WatchError,
            "needs the package textual, .*, or use --json, which needs none.",
        ),
    ],
)
def test_what_is_missing_is_named_with_its_extra(call, error, words, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(error, match=words.replace("[", r"\[")) as caught:
        call()
    assert str(caught.value).count("pip install") == 1


def test_what_is_there_is_not_missing():
    require(ShoalError, "x", "json", extra="x")
    with pytest.raises(
        ShoalError,
        match=r"x needs the package no_such_package_at_all\.below, which is not installed",
    ):
        require(ShoalError, "x", "json", "no_such_package_at_all.below", extra="x")
