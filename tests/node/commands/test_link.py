"""`shoal link`, and old links that the addresses known on this machine make good."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.commands.status import STALE_S, current_link, folder_of
from shoal.node.config.links import KNOWN_PEERS, LINK, read_link
from shoal.swarm.access import Link
from shoal.swarm.errors import LinkError
from shoal.swarm.identity import ID_HEADER, b58encode
from shoal.swarm.manifest import swarm_id

SWARM = swarm_id(b"a swarm")


def address(number):
    return f"/ip4/203.0.113.5/tcp/{4001 + number}/p2p/{b58encode(ID_HEADER + bytes([number]) * 32)}"


def written(folder, number=0, when=1000.0, **changes):
    folder.mkdir(parents=True)
    fields = {"link": str(Link(SWARM, (address(number),))), "name": "s", "invite_only": False, "written": when, **changes}
    (folder / LINK).write_text(json.dumps(fields))
    os.utime(folder / LINK, (when, when))
    return fields["link"]


def test_the_newest_link_below_runs_or_the_named_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LinkError, match="No folder runs/NAME here has a link: name"):
        current_link(None)
    old, new = written(tmp_path / "runs" / "a", 1, 1000.0), written(tmp_path / "runs" / "b", 2, 2000.0)
    assert (current_link(None, 2000.0)["link"], current_link(None, 2000.0)["notes"]) == (new, [])
    assert current_link(tmp_path / "runs" / "a", 1000.0 + STALE_S)["notes"] == []
    found = current_link(tmp_path / "runs" / "a", 1001.0 + STALE_S)
    assert found["link"] == old
    assert "wrote this link 2 minutes ago and may have ended" in found["notes"][0]


def test_the_command_prints_the_link_alone_on_stdout(tmp_path):
    made = written(tmp_path / "a", invite_only=True)
    result = CliRunner().invoke(cli, ["link", "--folder", str(tmp_path / "a")], standalone_mode=False)
    assert result.stdout == f"{made}\n"
    assert "its creator admits others (shoal invite LINK)" in result.stderr


def test_a_node_is_named_by_its_name_or_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = written(Path("runs") / "anna", 1, 1000.0)
    written(Path("runs") / "bert", 2, 2000.0)
    result = CliRunner().invoke(cli, ["link", "--name", "anna", "--json"], standalone_mode=False)
    found = json.loads(result.stdout)
    assert (found["link"], found["folder"]) == (made, "runs/anna")
    with pytest.raises(LinkError, match="There is no link in 'runs/carl'"):
        current_link(folder_of("carl", None))
    with pytest.raises(LinkError, match="either --name or --folder"):
        folder_of("anna", Path("x"))
    for wrong in ("../anna", "/etc", "", "..", "a/b"):
        with pytest.raises(LinkError, match="is no name of a node"):
            folder_of(wrong, None)


def test_status_of_a_folder_shows_its_link(tmp_path):
    made = written(tmp_path / "a", invite_only=True)
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    command = ["status", "--folder", str(tmp_path / "a")]
    shown = CliRunner().invoke(cli, command, standalone_mode=False).stdout
    assert f"Link, to look (its creator invites members: shoal invite): {made}\n" in shown
    report = json.loads(CliRunner().invoke(cli, [*command, "--json"], standalone_mode=False).stdout)
    assert (report["link"], report["invite_only"]) == (made, True)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"link": 3}', '{"link": "x", "written": 1}', "[" * 100_000])
def test_a_damaged_file_is_one_sentence(tmp_path, content):
    (tmp_path / LINK).write_text(content)
    with pytest.raises(LinkError, match=r"start its node again|pass the link"):
        current_link(tmp_path)
    with pytest.raises(LinkError, match="There is no link in"):
        current_link(tmp_path / "other")


def test_an_old_link_is_filled_up_with_known_addresses_of_its_swarm_alone(tmp_path):
    def known(folder, swarm, *numbers):
        folder.mkdir(parents=True)
        peers = {address(number).rpartition("/p2p/")[2]: [address(number)] for number in numbers}
        (folder / KNOWN_PEERS).write_text(json.dumps({"swarm": swarm, "peers": peers, "listened": []}))

    known(tmp_path / "own", SWARM, 1)
    known(tmp_path / "runs" / "a", SWARM, 2, *range(10, 30))
    known(tmp_path / "runs" / "b", swarm_id(b"another"), 3)
    (tmp_path / "runs" / "c").mkdir()
    old = Link(SWARM, (address(0),), "invited")
    made = read_link(str(old), tmp_path / "own", tmp_path / "runs")
    assert made.bootstrap[:2] == (address(0), address(1))
    assert (len(made.bootstrap), made.invite, made.swarm) == (16, "invited", SWARM)
    assert address(3) not in made.bootstrap
    assert read_link(str(old), None, tmp_path / "none") == old
