"""The picture of a swarm from what was heard: peers, curves, pairs, what went wrong; bounded whatever comes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.watch import swarm_view
from shoal.node.watch.charts import COLUMNS, headline, rows
from shoal.node.watch.events import Connected, Described, Disconnected, MessageRefused, Unreachable, Watching
from shoal.node.watch.swarm_view import BINS, MAX_POINTS, SILENT_S, Curve, SwarmView, mean_curve
from tests.node.watch.conftest import NOW, SWARM, Author


def view_of(*events):
    view = SwarmView()
    for event in events:
        view.take(event)
    return view


def texts(view, kind):
    return [item.text for item in view.log if item.kind == kind]


def test_peers_and_totals(authors):
    anna, bert, carl = authors
    view = view_of(
        Watching(time=NOW, swarm=SWARM),
        Described(time=NOW, name="first", task="text", method="noloco"),
        Connected(time=NOW, peer=anna.peer),
        anna.heard(anna.round(3, [bert]), sent=5000, tokens_per_s=1500.0, mfu=0.25),
        bert.heard(bert.round(3, [anna]), tokens_per_s=500.5),
        carl.heard(carl.round(2)),
    )
    assert [view.peers[author.peer].status.name for author in authors] == ["anna", "bert", "carl"]
    assert all(peer.here for peer in view.peers.values())
    totals = view.totals()
    assert (totals["peers"], totals["known"], totals["connected"]) == (3, 3, 1)
    assert (totals["round_min"], totals["round_max"]) == (2, 3)
    assert (totals["steps_per_s"], totals["tokens_per_s"]) == (15.0, 2000.5)
    assert "15.0 steps/s   2,000 tokens/s   " in headline(view)
    column = COLUMNS.index("tokens/s")
    assert [str(cells[column]) for _, cells in rows(view)] == ["1,500 (25 % MFU)", "500", "-"]
    assert [peer.get("mfu") for peer in view.snapshot()["peers"]] == [0.25, None, None]
    assert (totals["sent"], totals["received"]) == (7000, 2700)
    assert totals["loss"] == pytest.approx((1.0 + 1.0 + 4 / 3) / 3)
    assert totals["claims"] is totals["rollouts_own"] is totals["reward"] is None


def test_a_round_is_over_when_each_fragment_was_exchanged(authors):
    anna, bert, _ = authors
    title = Described(time=NOW, name="first", task="text", method="noloco", fragments=4)
    view = view_of(title, anna.heard(anna.round(10, [bert])), bert.heard(bert.round(12, [anna])))
    assert {peer.status.name: peer.status.round for peer in view.peers.values()} == {"anna": 2, "bert": 3}
    assert (view.totals()["round_min"], view.totals()["round_max"]) == (2, 3)
    assert [x for x, _ in view.peers[anna.peer].loss.points] == [2.5]


def test_each_round_is_taken_once_however_often_it_is_told(authors):
    anna, bert, _ = authors
    rounds = [anna.round(number, [bert]) for number in range(5)]
    view = view_of(
        anna.heard(*rounds[:3]),
        anna.heard(*rounds[1:4], at=NOW + 1),
        anna.heard(*rounds[2:], at=NOW + 2),
        bert.heard(*(bert.round(number, [anna]) for number in range(5)), at=NOW + 2),
    )
    assert view.peers[anna.peer].loss.points == [(n, 4.0 / (n + 1)) for n in range(5)]
    pair = tuple(sorted((anna.tail, bert.tail)))
    assert view.pairs() == {pair: 5}  # both told each of them
    assert view.pairs(rounds=2) == {pair: 2}
    assert view.name(bert.tail) == "bert"


def test_a_node_that_goes_back_to_a_checkpoint_goes_on_from_there(authors):
    anna, *_ = authors
    view = view_of(anna.heard(*map(anna.round, range(5))), anna.heard(anna.round(2, loss=9.0), at=NOW + 1))
    assert [x for x, _ in view.peers[anna.peer].loss.points] == [0, 1, 2]
    assert view.peers[anna.peer].loss.points[-1] == (2, 9.0)


def test_rates_are_of_the_author_s_clock(authors):
    anna, *_ = authors
    view = view_of(anna.heard(sent=0, received=0), anna.heard(at=NOW + 9, issued=NOW + 2.0, sent=2000, received=500))
    assert view.peers[anna.peer].sent_rate == 1000.0
    assert view.peers[anna.peer].received_rate == 250.0


def test_who_is_silent_leaves_or_comes_back_is_told_once(authors):
    anna, bert, _ = authors
    view = view_of(anna.heard(anna.round(4)), bert.heard(bert.round(4)))
    view.take(bert.heard(bert.round(5), at=NOW + SILENT_S, state="leaving"))
    for moment in (0.0, 0.1, 5.0):
        view.tick(NOW + SILENT_S + moment)
    assert [peer.here for peer in view.peers.values()] == [False, False]
    assert texts(view, "peer")[2:] == ["bert is leaving now, in round 5", "anna fell silent in round 4"]
    view.take(anna.heard(anna.round(6), at=NOW + 60))
    assert view.peers[anna.peer].here
    assert texts(view, "peer")[-1] == "anna is back, training in round 6"


def test_faults_and_verdicts_are_reported_when_they_grow(authors):
    anna, bert, _ = authors
    view = view_of(
        bert.heard(),
        anna.heard(faults=(("no-partner", 3),), invalid=1, checked=5, claims=2),  # from before anybody watched: no news
        anna.heard(at=NOW + 1, faults=(("no-partner", 3),), invalid=1, checked=6, claims=2),
        anna.heard(at=NOW + 2, faults=(("no-partner", 4), ("refused", 1)), invalid=2, checked=7, claims=2, banned=(bert.peer,)),
    )
    assert texts(view, "fault") == ["anna: no-partner, so far 4", "anna: refused, so far 1"]
    assert texts(view, "verdict") == ["anna found a claim invalid, 2 of 7 so far", "bert is banned, says anna"]
    assert (view.totals()["claims"], view.totals()["checked"], view.totals()["invalid"]) == (2, 7, 2)


def test_a_fault_of_every_round_does_not_flood_the_news(authors):
    anna = authors[0]
    view = view_of(anna.heard(), *(anna.heard(at=NOW + n, faults=(("no-partner", n),)) for n in range(1, 65)))
    assert texts(view, "fault") == [f"anna: no-partner, so far {n}" for n in (1, 2, 4, 8, 16, 32, 64)]
    assert view.peers[anna.peer].faults == {"no-partner": 64}


def test_connections_and_refusals_are_counted(authors):
    anna, bert, _ = authors
    view = view_of(
        Connected(time=NOW, peer=anna.peer),
        Disconnected(time=NOW, peer=anna.peer),
        Unreachable(time=NOW, peer=bert.peer, reason="nobody answers"),
        MessageRefused(time=NOW, reason="forged"),
        MessageRefused(time=NOW, reason="forged"),
        MessageRefused(time=NOW, reason="malformed"),
    )
    assert view.connected == set()
    assert view.unreachable == {bert.peer: "nobody answers"}
    assert view.refused == {"forged": 2, "malformed": 1}
    view.take(Connected(time=NOW, peer=bert.peer))
    assert view.unreachable == {}


def test_it_is_bounded(monkeypatch):
    monkeypatch.setattr(swarm_view, "MAX_PEERS", 5)
    monkeypatch.setattr(swarm_view, "MAX_PAIRS", 7)
    authors = [Author(f"peer-{number}") for number in range(9)]
    view = SwarmView()
    for number, author in enumerate(authors):
        view.take(author.heard(*(author.round(n, authors[:3]) for n in range(6)), at=NOW + number))
        view.take(MessageRefused(time=NOW, reason=f"reason-{number}"))
    assert [peer.status.name for peer in view.peers.values()] == [f"peer-{number}" for number in range(4, 9)]
    assert sum(view.pairs().values()) == 7
    for number in range(200):
        view.take(MessageRefused(time=NOW, reason=f"made-up-{number}"))
    assert len(view.refused) <= 65
    assert view.refused.total() == 209


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(-10, 10)), max_size=1500))
def test_a_curve_is_bounded_and_in_order(points):
    curve = Curve()
    for x, y in points:
        curve.add(x, y)
    assert len(curve.points) <= MAX_POINTS
    assert [x for x, _ in curve.points] == sorted(x for x, _ in curve.points)


def test_a_late_joiner_is_drawn_beside_those_that_are_in_its_round(authors):
    anna, bert, _ = authors
    view = view_of(anna.heard(*(anna.round(n) for n in (40, 41))), bert.heard(*(bert.round(n, step=n - 39) for n in (40, 41))))
    assert [[x for x, _ in peer.loss.points] for peer in view.peers.values()] == [[40, 41], [40, 41]]


def test_a_smoothed_curve_is_the_exponential_mean_over_a_32nd_of_it():
    curve = Curve()
    for x in range(64):
        curve.add(x, float(x % 2))
    assert curve.smooth()[0] == (0, 0.0)
    assert curve.smooth()[3] == (3, ((0 + 1 * 0.5) * 0.5 + 0) * 0.5 + 0.5)
    short = Curve()
    short.points = [(0, 3.0), (1, 1.0)]
    assert short.smooth() == short.points  # nothing to smooth over


def test_the_mean_of_curves_is_over_all_points_of_a_part():
    assert mean_curve([]) == []
    assert mean_curve([[(0, 1.0), (10, 2.0)], [(0, 3.0)], []]) == [(0, 2.0), (10, 2.0)]
    long = [(x, 1.0) for x in range(1000)]
    assert len(mean_curve([long])) == BINS


def test_a_long_curve_keeps_its_beginning_and_comes_up_to_the_end():
    curve = Curve()
    for x in range(10 * MAX_POINTS):
        curve.add(x, 0.0)
    assert curve.points[0] == (0, 0.0)
    assert curve.points[-1][0] > 10 * MAX_POINTS - 40


def test_the_snapshot_is_json(authors):
    anna, bert, carl = authors
    view = view_of(
        Watching(time=NOW, swarm=SWARM), anna.heard(anna.round(1, [bert]), reward=0.5), bert.heard(), carl.heard(state="done")
    )
    shown = json.loads(json.dumps(view.snapshot(), allow_nan=False))
    assert [peer["name"] for peer in shown["peers"]] == ["anna", "bert", "carl"]
    assert shown["peers"][0]["partners"] == ["bert"]
    assert shown["peers"][0]["rewards"] == [[1, 0.5]]
    assert shown["peers"][2]["here"] is False
    assert shown["pairs"] == [[*sorted((anna.tail, bert.tail)), 1]]
