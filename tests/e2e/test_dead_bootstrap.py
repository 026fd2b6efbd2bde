"""Every address of the link is dead: the swarm goes on, and who was in it before finds it again."""

import json
import re
import signal

import pytest

from shoal.swarm.access.link import Link

SMALL = {"layers": 1, "width": 16, "context": 16}


@pytest.mark.slow(reason="starts of real nodes, one after another")
def test_a_node_comes_back_when_the_creator_is_gone(shoal, eventually):
    settings = shoal.toml(swarm={"start_when": 3}, outer={"every": 5, "wait_s": 3.0}, options=SMALL)
    creator = shoal.node("up", settings, "anna")
    link = creator.line()
    shoal.node("join", link, "bert")
    third = shoal.node("join", link, "carl")
    known = shoal.home / "carl" / "peers.json"

    def peer(name):
        return next(e["peer"] for e in shoal.metrics(name) if e["event"] == "start")

    for name in ("anna", "bert", "carl"):
        eventually(lambda name=name: shoal.rounds(name, 2), 60, f"an exchange of {name}")
    eventually(
        lambda: known.exists() and peer("bert") in json.loads(known.read_text())["peers"],
        60,
        "bert being remembered",
    )
    shoal.interrupt(third)
    creator.signal(signal.SIGKILL)
    creator.wait()
    assert peer("bert") not in link

    before, alone = len(shoal.rounds("carl", 2)), len(shoal.rounds("bert", 2))
    again = shoal.node("join", link, "carl", "--resume")
    eventually(
        lambda: len(shoal.rounds("carl", 2)) > before and len(shoal.rounds("bert", 2)) > alone,
        90,
        "an exchange of the two that are left",
    )
    shoal.interrupt(again)


@pytest.mark.slow(reason="real nodes, of which one must be given up")
def test_newcomer_joins_without_the_creator(shoal, eventually):
    """A newcomer joins by a members link when the creator is dead."""
    settings = shoal.toml(swarm={"start_when": 2}, outer={"every": 5, "wait_s": 3.0}, options=SMALL)
    creator = shoal.node("up", settings, "anna")
    old = creator.line()
    bert = shoal.node("join", old, "bert")
    assert set(Link.parse(old).bootstrap) < set(Link.parse(bert.line()).bootstrap)

    eventually(lambda: shoal.rounds("bert", 2), 60, "an exchange")
    known = shoal.home / "anna" / "peers.json"
    me = Link.parse(bert.line()).bootstrap[0].rpartition("/p2p/")[2]
    eventually(
        lambda: known.exists() and me in json.loads(known.read_text())["peers"],
        60,
        "bert being remembered",
    )
    creator.signal(signal.SIGKILL)
    creator.wait()

    # The old link alone leads nowhere; with what a folder of this machine knows it does, and a
    # member makes a new one.
    assert "no bootstrap peer can be reached" in shoal.start("status", old).error()
    assert "bert" in [
        member["name"]
        for member in shoal.start("status", old, "--folder", shoal.home / "anna", "--json").json()[
            "members"
        ]
    ]
    made = shoal.start("link", "--folder", shoal.home / "bert")
    assert made.wait() == 0
    seen = shoal.start("status", made.line(), "--json").json()["link"]
    assert me in seen
    carl = shoal.node("join", seen, "carl")
    eventually(lambda: shoal.rounds("carl", 2), 60, "an exchange of the two that are left")
    shoal.interrupt(bert, carl)


def test_a_newcomer_is_told_that_all_are_dead(shoal):
    settings = shoal.toml(swarm={"start_when": 1}, outer={"every": 5}, options=SMALL)
    creator = shoal.node("up", settings, "anna")
    link = creator.line()
    creator.signal(signal.SIGKILL)
    creator.wait()
    said = shoal.node("join", link, "bert")
    assert said.wait() == 2
    assert (
        said.said()
        .splitlines()[-1]
        .startswith("Error: no bootstrap peer can be reached: /ip4/127.0.0.1/tcp/")
    )


@pytest.mark.slow(reason="a node waits until every known address was tried")
def test_who_comes_back_first_goes_on_alone_and_is_found(shoal, eventually):
    settings = shoal.toml(swarm={"start_when": 2}, outer={"every": 5, "wait_s": 3.0}, options=SMALL)
    saving = ("--set", "node.checkpoint_every_rounds=2")
    creator = shoal.node("up", settings, "anna", *saving)
    link = creator.line()
    other = shoal.node("join", link, "bert", *saving)

    eventually(
        lambda: (
            list((shoal.home / "anna").glob("step-*"))
            and list((shoal.home / "bert").glob("step-*"))
        ),
        60,
        "checkpoints",
    )
    eventually(lambda: shoal.rounds("bert", 2), 60, "an exchange")
    shoal.interrupt(creator, other)
    together, last = (
        len(shoal.rounds("bert", 2)),
        max(e["round"] for e in shoal.rounds("bert", 1) + shoal.rounds("bert", 2)),
    )

    again = shoal.node("join", link, "bert", "--resume", *saving)
    eventually(lambda: any(e["round"] > last for e in shoal.rounds("bert", 1)), 90, "a round alone")
    said = again.said()
    assert "nobody of this swarm answers: looking for its peers for 20 s" in said
    assert re.search(
        r"going on without a partner from the checkpoint; others find this node again, or by the "
        r"link shoal://\S+",
        said,
    )

    back = shoal.node("up", settings, "anna", "--resume", *saving)
    port = re.compile(r"/tcp/(\d+)")
    assert (
        port.findall(back.line())[0] == port.findall(link)[0]
    )  # so the link of before is good again; it has others too
    eventually(lambda: len(shoal.rounds("bert", 2)) > together, 90, "an exchange of the two")
    shoal.interrupt(again, back)
