"""What went wrong in exchanges is counted by kind, once for each peer and round, and forgotten
after a while.
"""

import typing

import pytest
import torch

from shoal.optim import FLOAT32, RoundKey
from shoal.optim.exchange.base import Contribution
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.contribution import (
    RECENT,
    WINDOW,
    ExchangeAttempt,
    ExchangeNotes,
    ExchangeStats,
    encode_contribution,
    kind_of,
)
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host
from shoal.swarm.wire.envelope import FAILURES, MAX_BLAMED, Failure
from tests.support.pair_peers import Peer

SWARM = "a" * 52


def key(round):
    return RoundKey(SWARM, round)


@pytest.mark.parametrize("kind", typing.get_args(Failure))
def test_errors_say_their_kind(kind):
    assert kind_of(NetworkError("x", kind)) == kind
    assert kind_of(MessageError("x", kind)) == kind


def test_other_errors_are_of_the_network_or_of_what_came():
    assert kind_of(NetworkError("x")) == "broken"
    assert [
        kind_of(MessageError("x", reason)) for reason in ("malformed", "forged", "oversized")
    ] == ["damaged"] * 3


def test_first_failure_of_a_round_counts():
    """Of a peer only the first failure of a round counts."""
    stats = ExchangeStats()
    stats.failed(key(0), "a", "timeout")
    stats.failed(key(0), "a", NetworkError("and then"))
    stats.failed(key(0), "b", "refused")
    stats.failed(key(1), "a", NetworkError("again", "timeout"))
    stats.done(key(2), ["c"], 4.0)
    assert stats.exchange_s() == 4.0
    assert stats.report() == {
        "recent": 4, "failures": (("timeout", 2), ("refused", 1)),
        "blamed": (("a", "timeout", 2), ("b", "refused", 1)),
    }  # fmt: skip


def test_old_failures_are_forgotten_and_bounded():
    """What is long over is forgotten and the report is bounded."""
    stats = ExchangeStats()
    for round in range(20):
        stats.failed(key(round), f"peer {round}", FAILURES[round % 6])
    assert len(stats.report()["blamed"]) == MAX_BLAMED
    for round in range(WINDOW):
        stats.done(key(100 + round), ["c"], float(round))
    report = stats.report()
    assert (report["recent"], report["failures"], report["blamed"]) == (WINDOW, (), ())
    assert stats.exchange_s() == WINDOW - 1 - (RECENT - 1) / 2


def test_two_good_exchanges_in_a_row_end_failures():
    """One of a line that breaks in every second exchange does not, nor one with somebody else."""
    stats = ExchangeStats()
    for round in (0, 10, 20):
        stats.failed(key(round), "a", "unreachable")
        stats.failed(key(round + 1), "b", "broken")
        stats.done(key(round + 2), ["a", "c"], 1.0)
    assert stats.report()["blamed"] == (("a", "unreachable", 3), ("b", "broken", 3))
    stats.done(key(30), ["a"], 1.0)
    report = stats.report()
    assert (report["recent"], report["failures"]) == (10, (("broken", 3),))
    assert report["blamed"] == (("b", "broken", 3),)
    stats.failed(key(31), "a", "timeout")
    assert ("a", "unreachable", 3) in stats.report()["blamed"]


def noted(stats, key):
    """Note one of everything for exchange ``key``."""
    stats.caught(key, "trial", RuntimeError("planted"))
    stats.failed(key, "a", "timeout")
    stats.pass_over(key, ["b"], ["b"])


def test_exchange_has_its_own_report_only():
    """The fault: of ten own errors twelve were said, for those in flight had the next one's too."""
    stats = ExchangeStats()
    for round in range(3):
        stats.begin(key(round))
    noted(stats, key(1))
    assert stats.of(key(1)) == ExchangeNotes(
        "RuntimeError: planted", [("a", "timeout")], {"b": True}
    )
    assert stats.of(key(0)) == stats.of(key(2)) == ExchangeNotes()
    assert stats.passed(key(0)) == []


def test_what_it_meets_after_it_has_moved_is_its_own():
    """Mutant: it counts under the round to which it moved, of which training knows nothing yet."""
    mine = encode_contribution(SWARM, Contribution(key(0), [torch.ones(4)]))
    attempt = ExchangeAttempt(mine).moved_to(3).moved_to(7)
    attempt.failed("a", "timeout")
    attempt.caught("exchange", RuntimeError("planted"))
    assert attempt.key == key(7)
    assert attempt.stats.of(key(0)).failures == [("a", "timeout")]
    assert attempt.stats.of(key(0)).own_error == "RuntimeError: planted"


def test_a_node_that_went_back_begins_its_rounds_anew():
    stats = ExchangeStats()
    noted(stats, key(4))
    stats.begin(key(4))
    assert stats.of(key(4)) == ExchangeNotes()


def test_what_exchanges_met_is_bounded():
    stats = ExchangeStats()
    for round in range(2 * WINDOW):
        noted(stats, key(round))
    assert stats.of(key(WINDOW - 1)) == ExchangeNotes()
    assert stats.of(key(WINDOW)).passed


def test_being_turned_down_is_over_with_the_first_exchange():
    stats = ExchangeStats()
    stats.done(key(0), ["a"], 1.0)
    for round, (peer, kind) in enumerate(
        [("a", "refused"), ("b", "suspicious"), ("c", "timeout"), ("a", "refused")], 1
    ):
        stats.failed(key(round), peer, kind)
    assert stats.turned_down() == 2
    stats.done(key(9), ["a"], 1.0)
    assert stats.turned_down() == 0


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "damaged"), (99.0, "suspicious")])
def test_damaged_and_suspicious_are_distinct(value, kind):
    """What is not finite is damaged and what is far is suspicious."""
    mine = encode_contribution(SWARM, Contribution(key(0), [torch.ones(4)], 1.0, FLOAT32))
    problem, _ = ExchangeAttempt(mine, screen=DistanceScreen()).problem(
        "peer", FLOAT32.encode([torch.full((4,), value)])
    )
    assert problem.kind == kind


def failures(peer):
    return dict(peer.exchange.stats.report()["failures"])


def test_both_sides_of_an_exchange_count_it(network):
    a, b = Peer(network), Peer(network)
    for handle in (a.start(0), b.start(0)):
        assert handle.result() is not None
    for peer in (a, b):
        report = peer.exchange.stats.report()
        assert (report["recent"], report["failures"]) == (1, ())
        assert peer.exchange.stats.exchange_s() > 0


def test_gone_and_different_peers_are_distinct(network):
    """A peer that is gone and one that differs are told apart."""
    a, b = Peer(network), Peer(network)
    handles = [a.start(0, shape=(4,)), b.start(0, shape=(5,))]
    assert [handle.result() for handle in handles] == [None, None]
    assert failures(a) or failures(b)
    assert (failures(a) | failures(b)).keys() == {"refused"}
    b.host.die()
    a.start(1).result()
    assert failures(a)["unreachable"] == 1


def test_a_suspicious_contribution_is_suspicious_here_and_refused_there(network):
    wary, far = Peer(network, screen=DistanceScreen()), Peer(network)
    handles = [wary.start(0, 1.0), far.start(0, -9.0)]
    assert [handle.result() for handle in handles] == [None, None]
    assert failures(wary) == {"suspicious": 1}
    assert wary.exchange.stats.report()["blamed"] == ((far.host.peer_id, "suspicious", 1),)
    (kind,) = failures(far)
    assert kind in ("refused", "broken")  # the end of the stream may overtake the reason


def test_a_real_peer_that_is_not_there_is_unreachable():
    nobody = Identity.ephemeral().peer_id
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{nobody}"
    with Host.start(Identity.ephemeral()) as host, pytest.raises(NetworkError) as caught:
        host.call(host.open(nobody, "/shoal/exchange/1", addresses=(address,), timeout=30), 60)
    assert kind_of(caught.value) == "unreachable"


def test_what_a_leader_repeats_is_noted_once():
    """The fault: one that repeats who is lost filled the memory."""
    stats, key = ExchangeStats(), RoundKey("run", 0)
    for _ in range(100):
        stats.failed(key, "a", "broken")
    stats.failed(key, "a", "timeout")
    assert stats.of(key).failures == [("a", "broken"), ("a", "timeout")]
