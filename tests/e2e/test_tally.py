"""Two real nodes sign for each other's work: the tally of each holds what the other took, and a
watcher adds it up.
"""

import json
import signal

import pytest

from shoal.node.watch.events import event_of
from shoal.node.watch.swarm_view import SwarmView
from tests.support.slow_nodes import create, joiner
from tests.support.watch_events import heard


@pytest.mark.slow(reason="two real nodes exchange until both have signed")
def test_each_of_two_nodes_keeps_what_the_other_signed(shoal, eventually):
    first = create(shoal, "first", "--set", "swarm.start_when=2")
    link = first.line()
    second = joiner(shoal, link, "second")
    watcher = shoal.start("watch", link, "--json")
    eventually(
        lambda: len({event["peer"] for event in heard(watcher, "receipts")}) == 2,
        120,
        "receipts of both",
    )
    eventually(lambda: heard(watcher), 60, "a status")
    shoal.interrupt(second, first)
    watcher.signal(signal.SIGINT)
    watcher.wait()
    peers = {event["status"]["name"]: event["peer"] for event in heard(watcher)}
    for name, other in (("first", "second"), ("second", "first")):
        asked = shoal.start("status", "--mine", "--folder", shoal.home / name, "--json")
        assert asked.wait() == 0
        tally, met = (
            json.loads(asked.lines[-1]),
            sum(event["members"] == 2 for event in shoal.rounds(name)),
        )
        assert [one["peer"] for one in tally["of"]] == [peers[other]]
        assert 1 <= tally["exchanges"] <= met
        assert tally["rounds"] == tally["exchanges"]
        assert tally["tokens"] > 0
        assert (tally["partners"], tally["ranges"]) == (1, 1)
    view = SwarmView()
    for line in list(watcher.lines):
        view.take(event_of(line))
    total = view.totals()["confirmed"]
    assert total["exchanges"] >= 1
    assert (total["partners"], total["elsewhere"]) == (2, 0.0)  # both are on this machine
