"""A node whose clock is wrong is told so again and again, with what to do; peers that lie or are silent change nothing."""

import threading
import time

import pytest

from shoal.node.commands import status
from shoal.node.config.settings import load
from shoal.node.runtime.join import new_manifest
from shoal.node.runtime.network import create, join
from shoal.swarm.access.link import Link
from shoal.swarm.identity import Identity
from shoal.swarm.membership import clock_check, membership
from shoal.swarm.membership.clock_check import clock_problem
from shoal.swarm.p2p.reachability import DialBackView, ReachabilityProbe


def views(*skews, error=0.1):
    return [DialBackView("peer", "", skew, error) for skew in skews]


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ((), ""),
        ((3.0,), ""),
        ((-3.0, 3.0, 2.9), ""),
        ((0.1, 0.2, 1e300), ""),  # one of three lies
        ((3.3,), "3.3 s behind that of 1 peer: set it by NTP"),
        ((-61.0, -62.0, 0.0), "61.0 s ahead of that of 3 peers: set it by NTP (`timedatectl set-ntp true`)"),
        ((1e300, 1e300), "1000000000.0 s behind that of 2 peers"),
    ],
)
def test_the_median_decides(seen, says):
    found = clock_problem(views(*seen))
    assert (says in found) if says else not found
    assert clock_problem(views(5.0, error=2.5)) == ""  # an answer that took five seconds


@pytest.fixture
def behind(tmp_path, monkeypatch):
    """A swarm whose first node's clock is a minute ahead of the one that joins, which compares them often; and the link."""
    monkeypatch.setattr(clock_check, "FIRST_S", 0.1)
    monkeypatch.setattr(clock_check, "SOON_S", 0.2)
    monkeypatch.setattr(membership, "ReachabilityProbe", lambda: ReachabilityProbe(lambda: time.time() + 60.0))

    def settings(name):
        return load(None, {"node.folder": tmp_path / name, "node.listen": ["/ip4/127.0.0.1/tcp/0"]})

    creator = Identity.ephemeral()
    first = create(settings("anna"), creator, new_manifest(settings("anna"), creator, "0" * 64))
    try:
        link = Link(first.swarm, first.link().bootstrap)
        second = join(settings("bert"), Identity.ephemeral(), link)
        try:
            yield second, link
        finally:
            second.close()
    finally:
        first.close()


def test_a_node_hears_of_its_wrong_clock_for_as_long_as_it_is_wrong(behind):
    node, link = behind
    end, tick, found = time.monotonic() + 120, threading.Event(), []
    while len(found) < 3:
        assert time.monotonic() < end
        if line := node.news():
            found.append(line)
        tick.wait(0.02)
    wrong = "his machine's clock is 60.0 s behind that of 1 peer: set it by NTP"
    assert all(line.startswith(f"This node cannot meet the others: t{wrong}") for line in found)
    assert status.read_status(link)["findings"][0].startswith(f"T{wrong}")
