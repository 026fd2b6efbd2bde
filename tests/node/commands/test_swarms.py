"""Public swarms in words, and which one a name means."""

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.commands.swarms import chosen, described, report, table
from shoal.swarm.access import Link
from shoal.swarm.errors import LinkError
from shoal.swarm.manifest import Title
from shoal.swarm.membership.swarm_list import PublicSwarm

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
SEED = f"/ip4/203.0.113.9/tcp/4001/p2p/{PEER}"


def public(swarm="a" * 52, name="ours", task="text", peers=3, memory=0, device="cpu", addresses=(SEED,)):
    return report(PublicSwarm(swarm, Title(name, task, "noloco"), peers, 135_000_000, 1_084_000_000, memory, device, addresses))


def test_a_link_goes_by_way_of_the_seed_and_of_members_as_far_as_they_are_addresses():
    member = f"/ip4/203.0.113.1/tcp/7/p2p/{PEER}"
    link = Link.parse(public(addresses=(SEED, "/etc/passwd", member))["link"])
    assert (link.swarm, link.bootstrap) == ("a" * 52, (SEED, member))
    many = tuple(f"/ip4/203.0.113.{number}/tcp/7/p2p/{PEER}" for number in range(1, 60))
    assert Link.parse(public(addresses=many)["link"]).bootstrap == many[:16]


def test_a_name_or_the_beginning_of_an_id_means_one_swarm():
    ours, theirs, other = public(), public("b" * 51 + "a", "theirs"), public("b" * 51 + "q", "aaaaaaaaaa")
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
    assert "135 M parameters, a node sends 1.08 GB in a round, and that member computes on a processor, without" in said
    assert "It needs a copy of its task mine:Task (--task) and 2 GB of memory beyond training alone." in said
    assert "needs" not in described(public(task="rl"))
    assert "computes on a GPU (cuda). It needs text to train on (--data; else what this machine has)." in described(
        public(device="cuda")
    )
    assert "32 or more peers" in described(public(peers=32))


def test_the_table_shows_names_as_they_are():
    shown = table({"swarms": [public(name="[red]x[/red]"), public(name="second")], "problems": ["a seed is gone."]})
    assert "[red]x[/red]" in shown
    assert "second" in shown
    assert "a seed is gone." in shown.splitlines()
    assert "Bootstrap nodes say how many peers there are" in shown
    assert "lists no public swarm" not in shown
    assert "list no public swarm" in table({"swarms": [], "problems": []})


def test_a_name_is_joined_only_after_asking(monkeypatch):
    monkeypatch.setattr("shoal.node.commands.swarms.list_swarms", lambda seeds: {"swarms": [public()], "problems": []})
    joined = []
    monkeypatch.setattr("shoal.node.cli.up._run_node", lambda file, link, flags: joined.append(link) or 0)
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
        ("text", {**HUGE, "tokenizer": "owner/name"}, 206_163_738_624),  # at least: the vocabulary is not known
        ("text", {"tokenizer": "owner/name"}, 135_000_000),
        ("text", {"layers": "x"}, 135_000_000),
        ("task.py:Mine", HUGE, 135_000_000),
    ],
)
def test_the_size_of_a_swarm_is_computed_where_it_can_be(task, options, shown):
    found = PublicSwarm("a" * 52, Title("ours", task, "noloco"), 3, 135_000_000, 1, 0, "cpu", (SEED,), options)
    assert report(found)["params"] == shown
