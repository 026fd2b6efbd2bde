"""What Shoal prints and writes as JSON is JSON, whatever numbers come out of a task."""

import ast
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.console import dumps
from shoal.node.demo import demo
from shoal.swarm.identity import Identity

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
        (["demo"], "shoal.node.demo.demo.run_demo"),
        (["demo", "--task", "rl"], "shoal.node.demo.rl.run_demo"),
        (["status", LINK], "shoal.node.commands.status.read_status"),
        (["peers", LINK], "shoal.node.verify.peers.read_peers"),
        (["pull", LINK, "--out", "x"], "shoal.node.commands.pull.pull"),
        (["merge", "x", "--out", "y"], "shoal.node.checkpoint.export.merge"),
        (["invite", LINK], "shoal.node.commands.status.invite"),
        (["verify", "odds"], "shoal.node.verify.history.odds_report"),
    ],
)
def test_every_command_that_reports_numbers_prints_json(arguments, where, monkeypatch):
    monkeypatch.setattr(where, lambda *args, **kwargs: {**REPORT, "troubles": [], "values": 1, "tensors": 1})
    shown = CliRunner().invoke(cli, [*arguments, "--json"], standalone_mode=False, catch_exceptions=False)
    assert strict(shown.stdout)["loss"] is None


def test_no_command_encodes_json_by_itself():
    for folder in PRINTING:
        for file in (NODE / folder).rglob("*.py"):
            calls = [item.func for item in ast.walk(ast.parse(file.read_text())) if isinstance(item, ast.Call)]
            own = [call for call in calls if isinstance(call, ast.Attribute) and ast.unparse(call) in ("json.dumps", "json.dump")]
            assert not own, f"{file}: write dumps of shoal.node.console"


def test_a_demo_whose_evaluations_are_not_known_still_has_a_report():
    one = dict.fromkeys(("exchanges", "pairs_none", "bytes_sent", "bytes_received", "rounds", "fragments", "steps", "params"), 1)
    one |= {"method": "noloco", "loss_first": None, "loss_last": 2.0, "loss_local": 4.0, "wait_s": 0.0, "wall_s": 1.0, "odd": 0}
    report = demo.report([one, {**one, "loss_first": 1.0}], [], 0.5, 1.0)
    assert (report["loss_first"], report["loss_last"]) == (None, 2.0)
    assert "held-out loss: not known" in demo.summary(report)
    alone_unknown = demo.report([{**one, "loss_first": 3.0, "loss_local": None}], [], 0.5, 1.0)
    assert "3.000 at first, 2.000 together; not compared" in demo.summary(alone_unknown)
    assert "50.0 % better together" in demo.summary(demo.report([{**one, "loss_first": 3.0}], [], 0.5, 1.0))
