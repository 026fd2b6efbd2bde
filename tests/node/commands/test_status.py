"""`shoal status --mine`: what others signed for a node here, from its folder alone."""

import json

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import swarm_id
from shoal.swarm.p2p.stream import short
from shoal.swarm.topics.tally import NAME, Receipts, Tally, TallyError, Work
from shoal.swarm.wire.envelope import seal

SWARM = swarm_id(b"a swarm")
ME, ANNA = Identity.ephemeral().peer_id, Identity.ephemeral()


def run(*arguments):
    return CliRunner().invoke(cli, ["status", "--mine", *map(str, arguments)], standalone_mode=False)


@pytest.fixture
def folder(tmp_path):
    mine = Tally(ME, SWARM, tmp_path / NAME)
    mine.took([ANNA.peer_id], Work(4, 4.0, 9000.0))
    made = Receipts(swarm=SWARM, peer=ANNA.peer_id, issued=1.0, work=((ME, 3, 3.0, 8000.0, 0, 0.0, 0),))
    mine.take(made, seal(made, ANNA), "203.0.0.0/16")
    mine.save()
    return tmp_path


def test_it_names_the_partners_with_their_ranges_and_the_sums(folder):
    shown = run("--folder", folder).stdout
    (row,) = [line for line in shown.splitlines() if short(ANNA.peer_id) in line]
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells[1:] == ["203.0.0.0/16", "3", "3", "8,000", "0", "0", "0"]
    assert "1 peer" in shown
    report = json.loads(run("--folder", folder, "--json").stdout)
    assert (report["exchanges"], report["tokens"], report["partners"], report["ranges"]) == (3, 8000.0, 1, 1)


def test_without_a_folder_it_is_the_newest_node_here(folder, monkeypatch):
    place = folder / "home" / "runs" / "anna"
    place.mkdir(parents=True)
    (folder / NAME).rename(place / NAME)
    peer = f"/ip4/203.0.113.5/tcp/4001/p2p/{ANNA.peer_id}"
    (place / "link.json").write_text(
        json.dumps({"link": f"shoal://{SWARM}?peer={peer}", "name": "s", "invite_only": False, "written": 1.0})
    )
    monkeypatch.chdir(folder / "home")
    assert json.loads(run("--json").stdout)["exchanges"] == 3


def test_nothing_to_show_is_a_sentence(tmp_path):
    Tally(ME, SWARM, tmp_path / NAME).save()
    assert run("--folder", tmp_path).stdout.startswith("Nobody has confirmed work of this node yet")
    assert isinstance(run("--folder", tmp_path / "none").exception, TallyError)
    assert "leave the LINK out" in str(run("shoal://x").exception)
