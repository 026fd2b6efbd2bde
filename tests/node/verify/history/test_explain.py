"""``shoal verify explain``: what was decided, from which claims, with which odds."""

import json
import sqlite3
from contextlib import closing

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.verify.history import NAME, EvidenceFile
from tests.node.verify.history.test_history import World


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A node's folder in which one peer cheats and two do not."""
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path / "runs" / "node" / NAME)
    for _ in range(12):
        world.check(0.3, "peer-of-ann")
        world.check(0.13, "peer-of-bob")
    world.check(0.13, "else-of-bob")
    return world.path.parent


def run(*words):
    return CliRunner().invoke(cli, ["verify", "explain", *words])


def test_json_has_every_claim_with_its_odds(folder):
    done = run("peer-of-ann", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert (report["peer"], report["alarm_at"]) == ("peer-of-ann", 20_000)
    (node,) = report["nodes"]
    assert (node["folder"], node["alarm"], node["bans"]) == (str(folder), True, 0)
    (series,) = node["series"]
    assert (series["claims"], series["first_round"], series["last_round"]) == (12, 1, 23)
    stored = EvidenceFile(folder / NAME).claims("peer-of-ann", 1)
    assert [one["claim"] for one in series["counted"]] == [row.claim for row in stored]
    assert [one["p"] for one in series["counted"]] == [{"error": row.p[0]} for row in stored]
    assert {one["kernel"] for one in series["counted"]} == {"torch 2.13.0, cpu"}
    odds = [one["odds"] for one in series["counted"]]
    assert node["odds"] == series["odds"] == max(odds) > 20_000
    assert odds == sorted(odds)
    assert json.loads(run("else", "--json", "--folder", str(folder)).output)["nodes"][0]["alarm"] is False


def test_people_read_the_decision_and_the_newest_claims(folder):
    shown = run("…f-ann").output
    assert shown.startswith(f"peer peer-of-ann; an alarm at odds of 20,000 to 1\n{folder}: an alarm, odds of ")
    assert "1. activations of tiny, float32 checked in float32: 12 claims of rounds 1 to 23, odds up to " in shown
    newest = EvidenceFile(folder / NAME).claims("peer-of-ann", 1)[-1]
    last = shown.rstrip().splitlines()[-1]
    assert last.strip().startswith(f"{newest.claim[:12]}  round 23  odds ")
    assert last.endswith("of error  by torch 2.13.0, cpu")
    assert "no alarm, odds of " in run("peer-of-bob").output


def test_a_claim_that_an_earlier_version_stored_has_no_kernel(folder):
    with closing(sqlite3.connect(folder / NAME)) as database, database:
        rows = database.execute("SELECT rowid, row FROM claims").fetchall()
        earlier = [(json.dumps(json.loads(row)[:6]), key) for key, row in rows]
        database.executemany("UPDATE claims SET row = ? WHERE rowid = ?", earlier)
    assert run("peer-of-ann").output.rstrip().endswith("of error")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nobody"], "No claim was counted of 'nobody' in runs/node: name the peer as `shoal peers` shows it"),
        (["bob"], "No claim was counted of 'bob'"),  # too short
        (["peer-of"], "2 peers are called 'peer-of'"),
    ],
)
def test_an_unknown_or_doubtful_peer_is_one_sentence(folder, words, message):
    done = run(*words)
    assert done.exit_code != 0
    assert message in str(done.exception or done.output)
