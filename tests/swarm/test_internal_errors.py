"""Errors of a node's own code: counted by place, logged once with their traceback, and never a
peer's to cause.
"""

import logging

import pytest
import torch

from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.exchange.base import Contribution, RoundKey
from shoal.optim.exchange.update_screen import UpdateScreen
from shoal.swarm.errors import ShoalError
from shoal.swarm.exchange.robust import DistanceScreen, LossCheck
from shoal.swarm.internal_errors import MAX_TRACEBACKS, InternalErrors
from tests.support.fake_network import SWARM, GroupPeer
from tests.support.pair_peers import Peer


def caught(errors, place="gossip", text="planted\nsecond line", kind=RuntimeError):
    try:
        raise kind(text)
    except kind as error:
        return errors.caught(place, error)


def test_errors_are_counted_by_place_and_logged_once(caplog):
    """The fault: three logs of 12,000 lines of one traceback. Mutant: each is logged."""
    errors = InternalErrors(lambda: 7.0)
    with caplog.at_level(logging.ERROR, "shoal"):
        assert {caught(errors) for _ in range(50)} == {"RuntimeError: planted"}
    (record,) = caplog.records
    assert record.exc_info[0] is RuntimeError
    caught(errors, "screen", kind=KeyError)
    assert errors.report() == {
        "gossip": {"count": 50, "first": "RuntimeError: planted", "newest_at": 7.0},
        "screen": {"count": 1, "first": "KeyError: 'planted\\nsecond line'", "newest_at": 7.0},
    }
    assert (errors.total, errors.counts()) == (51, {"gossip": 50, "screen": 1})


def test_each_kind_is_said_once_with_where_its_traceback_is():
    errors = InternalErrors()
    errors.log_file = "runs/anna/node.log"
    for _ in range(3):
        caught(errors)
    assert errors.news() == [
        "an error in this node's own code, and not in the network, was caught in gossip "
        "(RuntimeError: planted); its traceback is in runs/anna/node.log: please report it"
    ]
    assert errors.news() == []


def test_error_with_a_remedy_is_not_reported():
    """An error that says its remedy is not to be reported."""
    errors = InternalErrors()
    caught(errors, "trial", "Your task failed in loss(): mend it.", ShoalError)
    assert errors.newest() == "(Your task failed in loss(): mend it); its traceback is in the log"


def test_the_memory_is_bounded(caplog):
    errors = InternalErrors()
    with caplog.at_level(logging.ERROR, "shoal"):
        for number in range(4 * MAX_TRACEBACKS):
            caught(errors, text="x" * 10_000, kind=type(f"Kind{number}", (Exception,), {}))
    assert len(caplog.records) == MAX_TRACEBACKS
    assert max(len(one["first"]) for one in errors.report().values()) <= 200


class Failing(UpdateScreen):
    def problem(self, key, own, peer, theirs):
        raise ZeroDivisionError("planted")


def failing_trial():
    def losses(fragment, own, theirs):
        raise TypeError("planted")

    screen = DistanceScreen()
    screen.loss_check = LossCheck(losses)
    return screen


@pytest.mark.parametrize(
    ("screen", "place", "first"),
    [
        (Failing, "screen", "ZeroDivisionError: planted"),
        (failing_trial, "trial", "TypeError: planted"),
    ],
)
def test_screen_error_blames_nobody(network, screen, place, first):
    """The fault: it became "no partner".

    Mutants: the partner is blamed for it; the partner waits; it is counted twice.
    """
    faulty, whole = Peer(network, screen=screen()), Peer(network)
    handles = [faulty.start(0), whole.start(0)]
    assert [handle.result() for handle in handles] == [None, None]
    stats = faulty.exchange.stats
    key = RoundKey(SWARM, 0, 0)
    assert stats.of(key).own_error == first
    assert stats.errors is faulty.host.internal_errors
    assert stats.errors.counts() == {place: 1}
    assert stats.report()["failures"] == ()
    assert whole.host.internal_errors.counts() == {}
    ((kind, _),) = whole.exchange.stats.report()["failures"]
    assert kind in ("refused", "broken")  # the end of the stream may overtake the reason


def test_earlier_error_is_not_a_later_rounds(network):
    """An error of an earlier round is not that of a later one."""
    faulty, whole = Peer(network, screen=Failing()), Peer(network)
    for handle in (faulty.start(0), whole.start(0)):
        handle.result()
    assert faulty.exchange.stats.of(RoundKey(SWARM, 1, 0)).own_error == ""


def test_in_a_group_it_is_counted_too(network):
    """The fault: what one member's stream raised was retrieved by nobody."""
    screen = Failing()
    screen.gathers = True
    exchanges = [GroupPeer(network, screen=screen).exchange for _ in range(2)]
    handles = [
        one.start(Contribution(RoundKey(SWARM, 0, 0), [torch.ones(4)], 1.0, FLOAT32))
        for one in exchanges
    ]
    assert [handle.result() for handle in handles] == [None, None]
    assert all(one.stats.errors.counts() == {"screen": 1} for one in exchanges)
    assert all(one.stats.of(RoundKey(SWARM, 0, 0)).own_error for one in exchanges)
