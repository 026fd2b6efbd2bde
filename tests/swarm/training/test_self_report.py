"""A node's report of itself in its record, and the events about missing members for its user."""

from types import SimpleNamespace

from shoal.optim import RoundKey
from shoal.swarm.exchange.contribution import RECENT, ExchangeStats
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.stream import short
from shoal.swarm.training.member import AGAIN_S, CONFIRM, SelfReport
from tests.records import member_of

ME, ANNA, BERT = (Identity.ephemeral().peer_id for _ in range(3))


def member(peer, **changes):
    name = {ME: "me", ANNA: "anna", BERT: "bert"}[peer]
    return member_of(peer, **{"name": name, "issued": 1.0, **changes})


def test_the_record_holds_what_went_wrong_and_who_is_missing():
    there, now = {peer: member(peer) for peer in (ME, ANNA, BERT)}, [0.0]
    directory = SimpleNamespace(everyone=lambda: there, departed=dict, belongs=lambda peer: True)
    stats = ExchangeStats()
    self_report = SelfReport(stats, directory, ME, lambda: (3, 0, (1.0, 2.0, 3.0, 4.0)), lambda: now[0])
    assert self_report.events() == []
    assert member(ME, **self_report.details()).wait_s == 0.0
    stats.failed(RoundKey("run", 1), ANNA, "timeout")
    for seconds in [9.0, *[0.5] * RECENT]:
        self_report.waited(seconds)
    there = {ME: member(ME)}
    now[0] = 1.5
    assert self_report.events() == []
    now[0] += CONFIRM
    (said,) = self_report.events()
    assert said.startswith("a partition is suspected: 2 of 3 members vanished within 0 s (anna, bert)")
    record = member(ME, **self_report.details())
    assert (record.wait_s, record.failures, record.blamed) == (0.5, (("timeout", 1),), ((ANNA, "timeout", 1),))
    assert (record.missing, record.missing_of, record.missing_names) == (2, 3, ("anna", "bert"))
    assert record.sketch == (3, 0, (1.0, 2.0, 3.0, 4.0))


def test_it_looks_at_most_once_a_second():
    looks, now = [], [0.0]
    directory = SimpleNamespace(everyone=lambda: looks.append(now[0]) or {}, departed=dict, belongs=lambda peer: True)
    self_report = SelfReport(ExchangeStats(), directory, ME, clock=lambda: now[0])
    for quarter in range(12):
        now[0] = quarter / 4
        self_report.events()
    assert looks == [0.0, 1.0, 2.0]


def test_differing_weights_are_said_once_by_either_side_whatever_a_peer_shows_in_each_round():
    """Mutants: said in each round that lasts; one sentence of a liar hides that this node itself takes over others' weights."""
    now = [5.0]
    self_report = SelfReport(ExchangeStats(), SimpleNamespace(), ME, clock=lambda: now[0])
    there = {peer: member(peer) for peer in (ME, ANNA)}
    self_report.apart((), there, False)
    assert self_report.news() == []
    for _ in range(20):
        self_report.apart({ANNA}, there, False)
        now[0] += (AGAIN_S - 1) / 20
    purpose = "; to load other weights on purpose, call opt.restart_from_model() on all members"
    assert self_report.news() == [
        f"the weights of 1 other member (anna) differ from this node's, and are to give way to them{purpose}"
    ]
    self_report.apart({ANNA, BERT}, there, True)
    (said,) = self_report.news()
    names = ", ".join("anna" if peer == ANNA else short(BERT) for peer in sorted((ANNA, BERT)))
    assert said == f"this node's weights differ from those of 2 other members ({names}), so it takes over theirs{purpose}"
    now[0] += AGAIN_S
    self_report.apart({ANNA}, there, False)
    assert len(self_report.news()) == 1
    assert self_report.news() == []
