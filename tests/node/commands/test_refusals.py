"""The refusals of a node, read from its metrics."""

import json
from contextlib import closing

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.commands.status import RECENT_S, read_refusals, refusals_said
from shoal.node.metrics.log import Metrics
from shoal.swarm.errors import LinkError

NOW = 1_800_000_000.0


@pytest.fixture
def folder(tmp_path):
    """The metrics of a run that ended, and of one that goes on."""

    def line(event, at, **fields):
        return json.dumps({"event": event, "time": NOW + at, **fields}) + "\n"

    lines = [
        line("start", -9000, name="x"),
        line("refused", -8000, denied=500),
        line("end", -7000, refused={"denied": 500}),
        line("start", -6000, name="x"),
        line("refused", -5000, rate=2),
        line("round", -4000, round=1),
        line("refused", -RECENT_S - 1, rate=10, forged=1),
        line("refused", -5, rate=12, forged=1, replayed=4),
        '{"event": "refused", "time": 18000',
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_the_newest_run_is_told_of_late_and_in_all(folder):
    found = read_refusals(folder / "metrics.jsonl", NOW)
    assert found == {
        "recent_s": RECENT_S,
        "recent": {"rate": 2, "replayed": 4},
        "total": {"rate": 12, "forged": 1, "replayed": 4},
    }
    assert refusals_said(found) == (
        "This node refused, in the last 10 minutes: 4 that had come before (replayed), 2 over the "
        "rate limit (rate); since it started: 12 over the rate limit (rate), 4 that had come "
        "before (replayed), 1 with a false signature or sender (forged)."
    )
    later = read_refusals(folder / "metrics.jsonl", NOW + RECENT_S)
    assert later["recent"] == {}
    assert "minutes: nothing; since" in refusals_said(later)


def test_a_run_that_refused_nothing(tmp_path):
    with closing(Metrics(tmp_path / "metrics.jsonl")) as metrics:
        metrics.write("start", name="x")
    found = read_refusals(tmp_path / "metrics.jsonl")
    assert found["total"] == found["recent"] == {}
    assert refusals_said(found) == "This node has refused nothing of others since it started."
    with pytest.raises(LinkError, match="name the folder of a node"):
        read_refusals(tmp_path / "nowhere" / "metrics.jsonl")


def test_the_command_reads_a_folder_without_a_link(folder):
    run = CliRunner().invoke(
        cli, ["status", "--folder", str(folder), "--json"], standalone_mode=False
    )
    assert json.loads(run.output)["refused"]["total"] == {"rate": 12, "forged": 1, "replayed": 4}
    assert (
        "This node refused"
        in CliRunner()
        .invoke(cli, ["status", "--folder", str(folder)], standalone_mode=False)
        .output
    )
    assert "--folder DIR" in CliRunner().invoke(cli, ["status"]).output
