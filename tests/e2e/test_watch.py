"""`shoal watch` on a real swarm: it sees every node, survives garbage, a node that dies and the one
it came in through.
"""

import signal

import pytest

from shoal.swarm.access.link import Link
from shoal.swarm.gossip.envelope import topic_of
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host
from shoal.swarm.topics.status import Status
from tests.support.slow_nodes import create, joiner
from tests.support.watch_events import heard


@pytest.mark.slow(reason="real nodes are watched until one is missed")
def test_watcher_survives_dead_nodes_and_garbage(shoal, eventually):
    """A swarm is watched while nodes die and somebody gossips garbage."""
    first = create(shoal, "first", "--set", "swarm.start_when=2")
    link = first.line()
    joiner(shoal, link, "second")
    watcher = shoal.start("watch", link, "--json", "--record", "watched.jsonl")

    def rounds_of(name):
        return {
            (done["round"], tuple(done["partners"]))
            for event in heard(watcher)
            if event["status"]["name"] == name
            for done in event["status"]["rounds"]
        }

    eventually(lambda: rounds_of("first") and rounds_of("second"), 90, "a round of both")
    assert [event["method"] for event in heard(watcher, "described")] == ["noloco"]
    peers = {event["status"]["name"]: event["peer"] for event in heard(watcher)}
    pair = {peers["first"][-8:], peers["second"][-8:]}
    eventually(
        lambda: any(set(partners) < pair for _, partners in rounds_of("first")), 60, "an exchange"
    )

    stranger = Host.start(Identity.ephemeral(), bootstrap=Link.parse(link).bootstrap, timeout=30)
    try:
        topic = topic_of(Link.parse(link).swarm, Status)
        for data in (b"", b"garbage", b"\xc1" * 1000):
            stranger.call(stranger.pubsub.publish(topic, data), 60)
        # Once the mesh knows it: what is published before goes to nobody.
        eventually(
            lambda: (
                stranger.call(stranger.pubsub.publish(topic, b"more"), 60)
                or heard(watcher, "refused")
            ),
            60,
            "refusal",
        )
    finally:
        stranger.close()

    eventually(
        lambda: peers["second"] in {event["peer"] for event in heard(watcher, "connected")},
        60,
        "another connection",
    )
    first.signal(signal.SIGKILL)  # the only address of the link
    first.popen.wait(60)
    done = len(rounds_of("second"))
    eventually(lambda: len(rounds_of("second")) >= done + 2, 90, "further rounds of the other")
    eventually(
        lambda: peers["first"] in {event["peer"] for event in heard(watcher, "disconnected")},
        60,
        "the loss",
    )

    shoal.interrupt(watcher)
    assert watcher.said().strip() == ""
    kept = (shoal.home / "watched.jsonl").read_text().splitlines()
    assert kept[: len(watcher.lines)] == watcher.lines
    again = shoal.start("watch", "--replay", "watched.jsonl", "--speed", "0")
    assert again.wait() == 0
    assert again.lines == kept
