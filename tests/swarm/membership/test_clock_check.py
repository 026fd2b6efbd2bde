"""A node whose clock is wrong is told so again and again, with what to do; peers that lie or are
silent change nothing.
"""

import asyncio
import re
import time
from types import SimpleNamespace

import pytest

from shoal.node.commands import status
from shoal.node.config.settings import load
from shoal.node.runtime.join import new_manifest
from shoal.node.runtime.run_options import network
from shoal.swarm.access.link import Link
from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership import clock_check, membership
from shoal.swarm.membership.clock_check import ClockCheck, clock_problem
from shoal.swarm.membership.membership import create, join
from shoal.swarm.p2p.reachability import DialBackView, ReachabilityProbe
from tests.support.directory_hosts import Quiet
from tests.support.waiting import until


def views(*skews, error=0.1):
    return [DialBackView("peer", "", skew, error) for skew in skews]


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ((), ""),
        ((3.0,), ""),
        ((-3.0, 3.0, 2.9), ""),
        ((0.1, 0.2, 1e300), ""),  # one of three lies
        (
            (3.3,),
            "3.3 s behind that of the only peer that answered, so yours or theirs is wrong: set "
            "both by NTP",
        ),
        (
            (0.1, 60.0),
            "",
        ),  # a bootstrap node agrees with this machine, the only other member does not
        ((60.0, 0.1), ""),
        ((-60.0, 60.0), ""),
        ((9.0, 60.0), "9.0 s behind that of 2 peers: set it by NTP"),
        (
            (-61.0, -62.0, 0.0),
            "61.0 s ahead of that of 3 peers: set it by NTP (`timedatectl set-ntp true`)",
        ),
        ((1e300, 1e300), "1000000000.0 s behind that of 2 peers"),
    ],
)
def test_the_median_decides(seen, says):
    found = clock_problem(views(*seen))
    assert (says in found) if says else not found
    assert clock_problem(views(5.0, error=2.5)) == ""  # an answer that took five seconds


@pytest.mark.parametrize(
    ("skews", "followed", "says"),
    [
        (
            (125.0, 125.5, 126.0),
            125.5,
            "Until then it dates its records, and counts epochs, by their clock.",
        ),
        (
            (-240.0, -240.5, 0.0),
            -240.0,
            "Until then it dates its records, and counts epochs, by their clock.",
        ),
        ((0.5, 0.6, 700.0), 0.0, ""),  # one lies
        # two are no majority, and nor do they take back what one said
        ((125.0, 125.0), 7.0, "set it by NTP"),
        ((1e5, 1e5, 1e5), 7.0, "set it by NTP"),  # the DHT takes no record that is dated so far off
        ((), 7.0, ""),
    ],
)
def test_the_directory_goes_by_the_clock_of_the_majority(skews, followed, says):
    directory = SimpleNamespace(skew=7.0)
    host = Quiet()
    host.met = {}
    check = ClockCheck(host, directory)
    check._take(views(*skews))
    assert directory.skew == followed
    said = check.news()
    assert (says in said) if says else not said
    assert not check.news()


def test_an_address_range_has_one_voice():
    """Keys cost nothing: with five of one machine the node went by its clock, ten minutes off, and
    saw nobody.
    """
    directory, host = SimpleNamespace(skew=0.0), Quiet()
    host.met = {
        "seed": "198.51.100.1",
        "honest": "203.0.113.1",
        **{f"liar-{n}": "192.0.2.7" for n in range(5)},
    }
    check = ClockCheck(host, directory)
    check._take(
        [
            DialBackView(peer, "", 590.0 if peer.startswith("liar") else 0.1, 0.1)
            for peer in host.met
        ]
    )
    assert (directory.skew, check.news()) == (0.0, "")


@pytest.fixture
def behind(tmp_path, monkeypatch):
    """A swarm whose first node's clock is a minute ahead of the one that joins, which compares them
    often; and the link.
    """
    monkeypatch.setattr(clock_check, "FIRST_S", 0.1)
    monkeypatch.setattr(clock_check, "SOON_S", 0.2)
    monkeypatch.setattr(
        membership, "ReachabilityProbe", lambda: ReachabilityProbe(lambda: time.time() + 60.0)
    )

    def settings(name):
        return load(None, {"node.folder": tmp_path / name, "node.listen": ["/ip4/127.0.0.1/tcp/0"]})

    creator = Identity.ephemeral()
    first = create(
        creator, new_manifest(settings("anna"), creator, "0" * 64), network(settings("anna"))
    )
    try:
        link = Link(first.swarm, first.link().bootstrap)
        second = join(Identity.ephemeral(), link, network(settings("bert")))
        try:
            yield second, link
        finally:
            second.close()
    finally:
        first.close()


def test_wrong_clock_is_reported_while_it_lasts(behind):
    """A node hears of its wrong clock for as long as it is wrong."""
    node, link = behind
    node.directory.skew = 60.0
    assert 59.0 < node.peers._clock() - time.time() <= 60.0, (
        "or the records that others hand over are from the future"
    )
    node.directory.skew = 0.0
    found = [until(node.news) for _ in range(3)]
    # Measured to half a round trip, which a busy machine makes long.
    wrong = (
        r"his machine's clock is (59|60)\.\d s behind that of the only peer that answered, so "
        r"yours or theirs is wrong"
    )
    assert all(re.match(f"This node cannot meet the others: t{wrong}", line) for line in found), (
        found
    )
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral().peer_id}"
    report = status.read_status(Link(link.swarm, (dead, *link.bootstrap)))
    assert re.match(f"T{wrong}", report["findings"][0])
    assert (
        dead not in Link.parse(report["link"]).bootstrap
    )  # a link is handed on, and the dead with it


class Asked:
    """A host that notes who is asked, and reaches nobody."""

    def __init__(self):
        self.peers = []

    def seeds(self):
        return {"seed": ("/ip4/1.1.1.1/tcp/1/p2p/seed",), "another": ()}

    async def open(self, peer, protocol, *, addresses=(), timeout):
        self.peers.append((peer, tuple(addresses)))
        raise NetworkError("nobody is here")


def test_a_bootstrap_node_is_asked_before_all_members():
    host = Asked()
    asyncio.run(clock_check.compare_clocks(host, [f"member-{n}" for n in range(9)]))
    assert host.peers[0] == ("seed", ("/ip4/1.1.1.1/tcp/1/p2p/seed",))
    assert len(host.peers) == 2 * clock_check.MAX_ASKED


class Slow(Asked):
    """A host that reaches one peer, and waits for ever for the others."""

    async def open(self, peer, protocol, *, addresses=(), timeout):
        if peer != "seed":
            await asyncio.Event().wait()
        return SimpleNamespace(close=lambda: None)


def test_silent_peers_do_not_delay_an_answer(monkeypatch):
    """Those that say nothing are not waited for once one has answered."""

    async def answer(stream, port):
        return DialBackView("seed", "", 0.0, 0.1)

    monkeypatch.setattr(clock_check, "ask", answer)
    monkeypatch.setattr(clock_check, "PATIENCE_S", 0.01)
    monkeypatch.setattr(clock_check, "ASK_S", 1000.0)
    seen = asyncio.run(asyncio.wait_for(clock_check.compare_clocks(Slow(), ["bert", "carl"]), 30))
    assert [view.peer for view in seen] == ["seed"]
