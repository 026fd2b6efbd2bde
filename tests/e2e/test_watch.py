"""`shoal watch` on a real swarm: it sees every node, survives garbage, a node that dies and the one
it came in through.
"""

import signal

import pytest

from shoal.swarm.access.link import Link
from shoal.swarm.gossip.frames import GossipTopics, frame_of, greet, topic_of
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host
from shoal.swarm.topics.status import Status
from shoal.swarm.wire.messages import GOSSIP_PROTOCOL
from tests.support.slow_nodes import create, joiner
from tests.support.watch_events import heard


async def garbage(host, link):
    """Gossip what is none to the first peer of a link, as a stranger."""
    address = link.bootstrap[0]
    peer = address.rpartition("/p2p/")[2]
    stream = await host.open(peer, GOSSIP_PROTOCOL, addresses=(address,), timeout=30)
    await greet(stream, GossipTopics(swarm=link.swarm, topics=(topic_of(Status),)))
    for data in (b"", b"garbage", b"\xc1" * 1000):
        await stream.send(frame_of(0, data), 10)


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
        stranger.call(garbage(stranger, Link.parse(link)), 60)
    finally:
        stranger.close()
    done = len(rounds_of("second"))
    eventually(lambda: len(rounds_of("second")) > done, 60, "another round")
    # Both nodes may send it the newest record of one of them.
    refused = {event["reason"] for event in heard(watcher, "refused")}
    assert refused <= {"replayed"}, "no node has passed the garbage on"

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
