"""Public swarms and links as a person names them, and what others signed for a node here."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.commands.status import STALE_S, current_link, folder_of, link_to_those_there
from shoal.node.commands.swarms import chosen, described, report, table
from shoal.node.config.links import KNOWN_PEERS, LINK, read_link
from shoal.swarm.access.link import Link
from shoal.swarm.errors import LinkError
from shoal.swarm.identity import ID_HEADER, Identity, b58encode
from shoal.swarm.manifest import Title, swarm_id
from shoal.swarm.membership.swarm_list import PublicSwarm
from shoal.swarm.p2p.stream import short
from shoal.swarm.topics.receipts import Receipts, Work
from shoal.swarm.topics.tally import NAME, Tally, TallyError
from shoal.swarm.wire.envelope import seal

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
SEED = f"/ip4/203.0.113.9/tcp/4001/p2p/{PEER}"


def public(
    swarm="a" * 52, name="ours", task="text", peers=3, memory=0, device="cpu", addresses=(SEED,)
):
    return report(
        PublicSwarm(
            swarm,
            Title(name, task, "noloco"),
            peers,
            135_000_000,
            1_084_000_000,
            memory,
            device,
            addresses,
        )
    )


def test_link_goes_through_seed_and_members():
    """A link goes by way of the seed and of members as far as they are addresses."""
    member = f"/ip4/203.0.113.1/tcp/7/p2p/{PEER}"
    link = Link.parse(public(addresses=(SEED, "/etc/passwd", member))["link"])
    assert (link.swarm, link.bootstrap) == ("a" * 52, (SEED, member))
    many = tuple(f"/ip4/203.0.113.{number}/tcp/7/p2p/{PEER}" for number in range(1, 60))
    assert Link.parse(public(addresses=many)["link"]).bootstrap == many[:16]


def test_name_or_id_prefix_means_one_swarm():
    """A name or the beginning of an id means one swarm."""
    ours, theirs, other = (
        public(),
        public("b" * 51 + "a", "theirs"),
        public("b" * 51 + "q", "aaaaaaaaaa"),
    )
    assert chosen("ours", [theirs, ours]) is ours
    assert chosen("a" * 10, [theirs, ours]) is ours
    assert chosen("a" * 10, [ours, other]) is other, "a name comes before an id"
    with pytest.raises(LinkError, match="No public swarm is called 'aaaaaaa'"):
        chosen("a" * 7, [ours])
    with pytest.raises(LinkError, match=r"2 public swarms .* \(bbbbbbbbbbbb, aaaaaaaaaaaa\)"):
        chosen("x", [public("b" * 51 + "a", "x"), public(name="x")])
    with pytest.raises(LinkError, match="2 public swarms"):
        chosen("b" * 20, [theirs, other])


def test_what_joining_needs_is_said():
    said = described(public(task="mine:Task", memory=2_000_000_000))
    assert "mine:Task by noloco, 3 peers as a bootstrap node says." in said
    assert (
        "135 M parameters, a node sends 1.08 GB in a round, and that member computes on a "
        "processor, without" in said
    )
    assert (
        "It needs a copy of its task mine:Task (--task) and 2 GB of memory beyond training alone."
        in said
    )
    assert "needs" not in described(public(task="rl"))
    assert (
        "computes on a GPU (cuda). It needs text to train on (--data; else what this machine has)."
        in described(public(device="cuda"))
    )
    assert "32 or more peers" in described(public(peers=32))


def test_the_table_shows_names_as_they_are():
    shown = table(
        {
            "swarms": [public(name="[red]x[/red]"), public(name="second")],
            "problems": ["a seed is gone."],
        }
    )
    assert "[red]x[/red]" in shown
    assert "second" in shown
    assert "a seed is gone." in shown.splitlines()
    assert "Bootstrap nodes say how many peers there are" in shown
    assert "lists no public swarm" not in shown
    assert "list no public swarm" in table({"swarms": [], "problems": []})


def test_a_name_is_joined_only_after_asking(monkeypatch):
    monkeypatch.setattr(
        "shoal.node.commands.swarms.list_swarms",
        lambda seeds: {"swarms": [public()], "problems": []},
    )
    joined = []
    monkeypatch.setattr(
        "shoal.node.cli.run._run_node", lambda file, link, flags: joined.append(link) or 0
    )
    runner = CliRunner()
    refused = runner.invoke(cli, ["join", "ours", "--bootstrap", SEED])
    assert isinstance(refused.exception, LinkError)
    assert "pass --yes" in str(refused.exception)
    assert joined == []
    assert runner.invoke(cli, ["join", "ours", "--bootstrap", SEED, "--yes"]).exit_code == 0
    assert joined == [public()["link"]]
    assert runner.invoke(cli, ["join", public()["link"]]).exit_code == 0
    assert joined == [public()["link"]] * 2


HUGE = {"layers": 64, "width": 16_384}


@pytest.mark.parametrize(
    ("task", "options", "shown"),
    [
        ("text", {}, 135_808),
        ("text", HUGE, 206_172_094_464),  # which a member announced as 135 million, to be joined
        (
            "text",
            {**HUGE, "tokenizer": "owner/name"},
            206_163_738_624,
        ),  # at least: the vocabulary is not known
        ("text", {"tokenizer": "owner/name"}, 135_000_000),
        ("text", {"layers": "x"}, 135_000_000),
        ("task.py:Mine", HUGE, 135_000_000),
    ],
)
def test_swarm_size_is_computed_where_possible(task, options, shown):
    """The size of a swarm is computed where it can be."""
    found = PublicSwarm(
        "a" * 52, Title("ours", task, "noloco"), 3, 135_000_000, 1, 0, "cpu", (SEED,), options
    )
    assert report(found)["params"] == shown


SWARM = swarm_id(b"a swarm")


def address(number):
    return f"/ip4/203.0.113.5/tcp/{4001 + number}/p2p/{b58encode(ID_HEADER + bytes([number]) * 32)}"


def written(folder, number=0, when=1000.0, **changes):
    folder.mkdir(parents=True)
    fields = {
        "link": str(Link(SWARM, (address(number),))),
        "name": "s",
        "invite_only": False,
        "written": when,
        **changes,
    }
    (folder / LINK).write_text(json.dumps(fields))
    os.utime(folder / LINK, (when, when))
    return fields["link"]


def test_the_newest_link_below_runs_or_the_named_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LinkError, match="No folder runs/NAME here has a link: name"):
        current_link(None)
    old, new = (
        written(tmp_path / "runs" / "a", 1, 1000.0),
        written(tmp_path / "runs" / "b", 2, 2000.0),
    )
    assert (current_link(None, 2000.0)["link"], current_link(None, 2000.0)["notes"]) == (new, [])
    assert current_link(tmp_path / "runs" / "a", 1000.0 + STALE_S)["notes"] == []
    found = current_link(tmp_path / "runs" / "a", 1001.0 + STALE_S)
    assert found["link"] == old
    assert "wrote this link 2 minutes ago and may have ended" in found["notes"][0]


def test_the_command_prints_the_link_alone_on_stdout(tmp_path):
    made = written(tmp_path / "a", invite_only=True)
    result = CliRunner().invoke(
        cli, ["link", "--folder", str(tmp_path / "a")], standalone_mode=False
    )
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


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"link": 3}', '{"link": "x", "written": 1}', "[" * 100_000]
)
def test_a_damaged_file_is_one_sentence(tmp_path, content):
    (tmp_path / LINK).write_text(content)
    with pytest.raises(LinkError, match=r"start its node again|pass the link"):
        current_link(tmp_path)
    with pytest.raises(LinkError, match="There is no link in"):
        current_link(tmp_path / "other")


def test_old_link_gets_known_addresses_of_its_swarm(tmp_path):
    """An old link is filled up with known addresses of its swarm alone."""

    def known(folder, swarm, *numbers):
        folder.mkdir(parents=True)
        peers = {address(number).rpartition("/p2p/")[2]: [address(number)] for number in numbers}
        (folder / KNOWN_PEERS).write_text(
            json.dumps({"swarm": swarm, "peers": peers, "listened": []})
        )

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


def test_a_printed_link_leaves_out_the_dead():
    """A folder below runs/ knows all who ever looked in; a link to share names who answers."""
    answers = address(2).rpartition("/p2p/")[2]
    visitor = SimpleNamespace(met={answers: "203.0.113.5"}, seeds=dict)
    known = Link(SWARM, (address(0), address(1), address(2)))
    assert link_to_those_there(known, visitor, {}).bootstrap == (address(2),)


ME, ANNA = Identity.ephemeral().peer_id, Identity.ephemeral()


def run(*arguments):
    return CliRunner().invoke(
        cli, ["status", "--mine", *map(str, arguments)], standalone_mode=False
    )


@pytest.fixture
def folder(tmp_path):
    mine = Tally(ME, SWARM, tmp_path / NAME)
    mine.took([ANNA.peer_id], Work(4, 4.0, 9000.0))
    made = Receipts(
        swarm=SWARM, peer=ANNA.peer_id, issued=1.0, work=((ME, 3, 3.0, 8000.0, 0, 0.0, 0),)
    )
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
    assert (report["exchanges"], report["tokens"], report["partners"], report["ranges"]) == (
        3,
        8000.0,
        1,
        1,
    )


def test_without_a_folder_it_is_the_newest_node_here(folder, monkeypatch):
    place = folder / "home" / "runs" / "anna"
    place.mkdir(parents=True)
    (folder / NAME).rename(place / NAME)
    peer = f"/ip4/203.0.113.5/tcp/4001/p2p/{ANNA.peer_id}"
    (place / "link.json").write_text(
        json.dumps(
            {
                "link": f"shoal://{SWARM}?peer={peer}",
                "name": "s",
                "invite_only": False,
                "written": 1.0,
            }
        )
    )
    monkeypatch.chdir(folder / "home")
    assert json.loads(run("--json").stdout)["exchanges"] == 3


def test_nothing_to_show_is_a_sentence(tmp_path):
    Tally(ME, SWARM, tmp_path / NAME).save()
    assert run("--folder", tmp_path).stdout.startswith("Nobody has confirmed work of this node yet")
    assert isinstance(run("--folder", tmp_path / "none").exception, TallyError)
    assert "leave the LINK out" in str(run("shoal://x").exception)
