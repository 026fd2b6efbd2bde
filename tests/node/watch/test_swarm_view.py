"""The picture of a swarm: whom a watcher dials, what it lets in, and peers, curves, pairs and
faults; bounded whatever comes.
"""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.watch import consensus, source, swarm_view
from shoal.node.watch.curves import MAX_POINTS, Curve, chart
from shoal.node.watch.events import (
    BootstrapNode,
    Changed,
    Connected,
    Described,
    Disconnected,
    MessageRefused,
    Signed,
    Unreachable,
    Watching,
)
from shoal.node.watch.source import AGAIN_MAX_S, AGAIN_S, QUOTA, PeerAddresses, RecordFilter
from shoal.node.watch.swarm_view import SILENT_S, SwarmView
from shoal.node.watch.tui import COLUMNS, headline, peer_rows
from shoal.node.watch.web import page_data
from shoal.swarm.changes import ChangePart
from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.envelope import Body, make_body, make_envelope
from shoal.swarm.manifest import swarm_id
from shoal.swarm.topics.receipts import Receipts, Work
from shoal.swarm.topics.status import OLD_S, PROJECTED, Status
from shoal.swarm.wire.envelope import MAX_MESSAGE, pack, seal
from tests.support.watched_peers import NOW, SWARM, Author


def view_of(*events):
    view = SwarmView()
    for event in events:
        view.take(event)
    return view


def texts(view, kind):
    return [item.text for item in view.log.lines if item.kind == kind]


def test_peers_and_totals(authors):
    anna, bert, carl = authors
    view = view_of(
        Watching(time=NOW, swarm=SWARM),
        Described(time=NOW, name="first", task="text", method="noloco"),
        Connected(time=NOW, peer=anna.peer),
        anna.heard(
            anna.round(3, [bert]),
            bytes_sent=5000,
            tokens_per_s=1500.0,
            mfu=0.25,
            reach="punched",
            bytes_per_s=1.56e6,
        ),
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
    assert [str(cells[column]) for _, cells in peer_rows(view)] == ["1,500 (25 % MFU)", "500", "-"]
    column = COLUMNS.index("reach")
    assert [str(cells[column]) for _, cells in peer_rows(view)] == [
        "punched, 1.56 MB/s",
        "unknown",
        "unknown",
    ]
    shown = page_data(view, ended=False)["peers"]
    assert [peer["progress"]["mfu"] for peer in shown] == [0.25, None, None]
    assert (totals["bytes_sent"], totals["bytes_received"]) == (7000, 2700)
    assert totals["loss"] == pytest.approx((1.0 + 1.0 + 4 / 3) / 3)
    assert totals["claims"] is totals["groups_own"] is totals["reward"] is None


def test_unused_groups_are_summed_by_reason(authors):
    """Whatever peers state: what a liar says was of no use is more than it saw."""
    anna, bert, carl = authors
    view = view_of(
        anna.heard(groups_seen=60, unused=(("no_spread", 20), ("not_drawn", 4))),
        bert.heard(groups_seen=40, unused=(("not_drawn", 26),)),
        carl.heard(),
    )
    totals = view.totals()
    assert totals["groups_seen"] == 100
    assert list(totals["groups_unused"].items()) == [("not_drawn", 30), ("no_spread", 20)]
    assert "   50 % of groups unused, most not_drawn   " in headline(view)
    view.take(anna.heard(at=NOW + 1, groups_seen=0, unused=(("no_spread", 2**40),)))
    assert "   100 % of groups unused, most no_spread   " in headline(view)


def test_bucketed_swarm_size_is_estimated(authors):
    """Of a swarm of buckets size and speed are estimated by those heard of."""
    anna, bert, carl = authors
    view = view_of(
        anna.heard(anna.round(3, [bert]), swarm_size=1100, tokens_per_s=10.0),
        bert.heard(bert.round(3, [anna]), swarm_size=1200, tokens_per_s=20.0),
        carl.heard(carl.round(3), swarm_size=10**6, tokens_per_s=30.0),  # one lies
    )
    totals = view.totals()
    assert (totals["peers"], totals["size"], totals["sampled"]) == (3, 1200, True)
    assert totals["tokens_per_s"] == pytest.approx(60.0 * 400)
    assert totals["steps_per_s"] == pytest.approx(15.0 * 400)
    assert totals["loss"] == 1.0
    assert "   about 1,200 peers (estimated from 3)   round 3   " in headline(view)
    assert "3 kB in all by those" in headline(view)
    # In so large a swarm each says something every two minutes.
    view.tick(NOW + 2 * SILENT_S)
    assert view.totals()["peers"] == 3


def test_stated_size_without_buckets_is_ignored(authors):
    """Nobody else states one: with 2^53 peers the watcher waited for years before it called one
    silent.
    """
    anna, bert, carl = authors
    view = view_of(anna.heard(anna.round(3)), carl.heard(carl.round(3), swarm_size=2**53))
    assert (view.totals()["size"], view.totals()["sampled"]) == (2, False)
    view.take(bert.heard(bert.round(3)))
    view.tick(NOW + 2 * SILENT_S)
    assert view.totals()["peers"] == 0


def test_a_clock_that_is_set_back_silences_nobody(authors):
    (anna, *_) = authors
    view = view_of(anna.heard(anna.round(3)))
    view.tick(NOW + 3600.0)
    told = len(view.log.lines)
    view.take(anna.heard(anna.round(4)))  # by a clock that is an hour behind now
    view.tick(NOW)
    assert view.totals()["peers"] == 1
    assert len(view.log.lines) <= told + 1


def test_rounds_beyond_100000_are_themselves():
    drawn = chart([[(123_450.0 + at, 5.0 - at) for at in range(8)]] * 2, 8, 2)
    assert (drawn["x"][0], drawn["x"][-1]) == (123_450.0, 123_457.0)


def test_larger_heard_count_wins(authors):
    """Who was heard of is counted where that is more than was estimated."""
    view = view_of(*(author.heard(author.round(3), swarm_size=2) for author in authors))
    assert (view.totals()["size"], view.totals()["sampled"]) == (3, False)
    assert "3 of 3 peers" in headline(view)


def test_a_round_is_over_when_each_fragment_was_exchanged(authors):
    anna, bert, _ = authors
    title = Described(time=NOW, name="first", task="text", method="noloco", fragments=4)
    view = view_of(title, anna.heard(anna.round(10, [bert])), bert.heard(bert.round(12, [anna])))
    assert {peer.status.name: peer.round for peer in view.peers.values()} == {
        "anna": 2,
        "bert": 3,
    }
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
    assert view.meetings.pairs() == {pair: 5}  # both told each of them
    assert view.meetings.pairs(rounds=2) == {pair: 2}
    assert view.name(bert.tail) == "bert"


def test_restored_node_goes_on_from_there(authors):
    """A node that goes back to a checkpoint goes on from there."""
    anna, *_ = authors
    view = view_of(
        anna.heard(*map(anna.round, range(5))), anna.heard(anna.round(2, loss=9.0), at=NOW + 1)
    )
    assert [x for x, _ in view.peers[anna.peer].loss.points] == [0, 1, 2]
    assert view.peers[anna.peer].loss.points[-1] == (2, 9.0)


def test_rates_are_of_the_author_s_clock(authors):
    anna, *_ = authors
    view = view_of(
        anna.heard(bytes_sent=0, bytes_received=0),
        anna.heard(at=NOW + 9, issued=NOW + 2.0, bytes_sent=2000, bytes_received=500),
    )
    assert view.peers[anna.peer].sent_rate == 1000.0
    assert view.peers[anna.peer].received_rate == 250.0


def test_who_is_silent_leaves_or_comes_back_is_told_once(authors):
    anna, bert, _ = authors
    view = view_of(anna.heard(anna.round(4)), bert.heard(bert.round(4)))
    view.take(bert.heard(bert.round(5), at=NOW + SILENT_S, state="leaving"))
    for moment in (0.0, 0.1, 5.0):
        view.tick(NOW + SILENT_S + moment)
    assert [peer.here for peer in view.peers.values()] == [False, False]
    assert texts(view, "peer")[2:] == [
        "bert is leaving now, in round 5",
        "anna fell silent in round 4",
    ]
    view.take(anna.heard(anna.round(6), at=NOW + 60))
    assert view.peers[anna.peer].here
    assert texts(view, "peer")[-1] == "anna is back, training in round 6"


def test_faults_and_verdicts_are_reported_when_they_grow(authors):
    anna, bert, _ = authors
    view = view_of(
        bert.heard(),
        anna.heard(
            without_partner=3, invalid=1, checked=5, claims=2
        ),  # from before anybody watched: no news
        anna.heard(at=NOW + 1, without_partner=3, invalid=1, checked=6, claims=2),
        anna.heard(
            at=NOW + 2,
            without_partner=4,
            contributions_refused=1,
            internal_errors=2,
            invalid=2,
            checked=7,
            claims=2,
            banned=(bert.peer,),
        ),
    )
    assert texts(view, "fault") == [
        "anna met an error of its own code, not of the network, twice so far",
        "anna found no partner in a round and kept its own step, 4 times so far",
        "anna refused a contribution that was too far away, once so far",
    ]
    assert texts(view, "verdict") == [
        "anna checked a claim of another peer and found it invalid: 2 of 7 checks so far",
        "bert is banned, as anna reports: too many of its claims were found invalid",
    ]
    assert (view.totals()["claims"], view.totals()["checked"], view.totals()["invalid"]) == (
        2,
        7,
        2,
    )


def test_a_fault_of_every_round_does_not_flood_the_news(authors):
    anna = authors[0]
    view = view_of(anna.heard(), *(anna.heard(at=NOW + n, without_partner=n) for n in range(1, 65)))
    assert texts(view, "fault") == [
        f"anna found no partner in a round and kept its own step, {often} so far"
        for often in ("once", "twice", "4 times", "8 times", "16 times", "32 times", "64 times")
    ]
    assert view.peers[anna.peer].faults == {"without_partner": 64}


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
    assert view.connections.peers == set()
    assert view.connections.unreachable == {bert.peer: "nobody answers"}
    assert view.refused == {"forged": 2, "malformed": 1}
    view.take(
        Unreachable(
            time=NOW,
            peer=bert.peer,
            reason="could not be connected to (* [/ip4/192.0.2.1/tcp/1] refused)",
        )
    )
    assert [item.text for item in view.log.lines] == [f"…{bert.tail} nobody answers"]  # once
    view.take(Connected(time=NOW, peer=bert.peer))
    assert view.connections.unreachable == {}
    view.take(
        Unreachable(
            time=NOW,
            peer=bert.peer,
            reason="could not be connected to (* [/ip4/192.0.2.1/tcp/1] refused)",
        )
    )
    assert (
        view.log.lines[-1].text == f"…{bert.tail} could not be connected to"
    )  # the page may be read by strangers


def test_it_is_bounded(monkeypatch):
    monkeypatch.setattr(swarm_view, "MAX_PEERS", 5)
    monkeypatch.setattr(swarm_view, "MAX_PAIRS", 7)
    authors = [Author(f"peer-{number}") for number in range(9)]
    view = SwarmView()
    for number, author in enumerate(authors):
        view.take(author.heard(*(author.round(n, authors[:3]) for n in range(6)), at=NOW + number))
        view.take(MessageRefused(time=NOW, reason=f"reason-{number}"))
    assert [peer.status.name for peer in view.peers.values()] == [
        f"peer-{number}" for number in range(4, 9)
    ]
    assert sum(view.meetings.pairs().values()) == 7
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


def test_point_replaces_one_at_the_same_place():
    """A node that resumed reports its last round again."""
    curve = Curve()
    for x, y in ((1, 5.0), (2, 4.0), (2, 3.0)):
        curve.add(x, y)
    assert curve.points == [(1, 5.0), (2, 3.0)]


def test_late_joiner_is_drawn_in_its_round(authors):
    """A late joiner is drawn beside those that are in its round."""
    anna, bert, _ = authors
    view = view_of(
        anna.heard(*(anna.round(n) for n in (40, 41))),
        bert.heard(*(bert.round(n, step=n - 39) for n in (40, 41))),
    )
    assert [[x for x, _ in peer.loss.points] for peer in view.peers.values()] == [
        [40, 41],
        [40, 41],
    ]


def test_smoothing_is_an_exponential_mean():
    """A smoothed curve is the exponential mean over a 32nd of it."""
    curve = Curve()
    for x in range(64):
        curve.add(x, float(x % 2))
    assert curve.smooth()[0] == (0, 0.0)
    assert curve.smooth()[3] == (3, ((0 + 1 * 0.5) * 0.5 + 0) * 0.5 + 0.5)
    short = Curve()
    short.points = [(0, 3.0), (1, 1.0)]
    assert short.smooth() == short.points  # nothing to smooth over


def test_long_curve_keeps_its_beginning():
    """A long curve keeps its beginning and comes up to the end."""
    curve = Curve()
    for x in range(10 * MAX_POINTS):
        curve.add(x, 0.0)
    assert curve.points[0] == (0, 0.0)
    assert curve.points[-1][0] > 10 * MAX_POINTS - 40


def test_the_snapshot_is_json(authors):
    anna, bert, carl = authors
    view = view_of(
        Watching(time=NOW, swarm=SWARM),
        anna.heard(anna.round(1, [bert]), reward=0.5),
        bert.heard(),
        carl.heard(state="done"),
    )
    shown = json.loads(json.dumps(page_data(view, ended=False), allow_nan=False))
    assert [peer["name"] for peer in shown["peers"]] == ["anna", "bert", "carl"]
    assert shown["peers"][0]["partners"] == ["bert"]
    assert shown["charts"]["reward"]["each"] == [[0.5], [None], [None]]
    assert shown["peers"][2]["here"] is False
    assert shown["pairs"] == [[*sorted((anna.tail, bert.tail)), 1, 1, NOW]]
    assert shown["meetings"] == [
        [1, 0, [sorted(["anna", "bert"], key={"anna": anna.tail, "bert": bert.tail}.get)], []]
    ]


def test_chart_has_mean_band_and_gaps():
    """A chart has the mean and band of all on one grid and gaps where a peer was away."""
    shown = chart([[(0, 2.0), (1, 2.0), (2, 4.0)], [(0, 4.0), (2, 6.0)], []], 10, 1)
    assert shown == {
        "x": [0, 1, 2],
        "mean": [3, 3.5, 5],
        "low": [2, 2, 4],
        "high": [4, 5, 6],
        "each": [[2, 2, 4]],
    }
    away = [(x, 1.0) for x in (*range(10), *range(50, 60))]
    assert chart([away, [(x, 3.0) for x in range(60)]], 100, 2)["each"][0] == [
        None if 9 < x < 50 else 1.0 for x in range(60)
    ]
    assert len(chart([[(x, 0.0) for x in range(500)]], 100, 1)["x"]) == 100
    assert chart([], 10, 1)["x"] == []


def test_loss_is_drawn_over_wall_time(authors):
    """Loss is drawn over wall time and rates once a second."""
    anna, *_ = authors
    view = view_of(
        *(anna.heard(anna.round(n), at=NOW + n / 2, bytes_sent=1000 * n) for n in range(8))
    )
    assert view.peers[anna.peer].loss_over_time.points == [(n / 2, 4.0 / (n + 1)) for n in range(8)]
    assert [x for x, _ in view.rates.curves["steps_per_s"].points] == [0.0, 1.0, 2.0, 3.0]
    assert view.rates.curves["bytes_sent_per_s"].points[-1][1] == 2000.0


def projected(*values):
    return tuple(map(float, values)) + (0.0,) * (PROJECTED - len(values))


def test_consensus_is_drawn_once_complete_or_old(authors):
    """The consensus distance is drawn when all have told of an exchange or it is old."""
    anna, bert, _ = authors
    view = view_of(anna.heard(projection=(1, 2.0, projected(1))), bert.heard())
    assert view.consensus.curve.points == []
    view.take(bert.heard(at=NOW + 1, projection=(1, 2.0, projected(0, 1))))
    assert view.consensus.curve.points == [(1, pytest.approx((2**0.5) / 2))]
    for number in range(2, 9):  # bert tells nothing more
        view.take(anna.heard(at=NOW + number, projection=(number, 2.0, projected(1))))
    assert [x for x, _ in view.consensus.curve.points] == [1]
    assert len(view.consensus._projections) <= consensus.COMPARED


def test_silence_is_noticed_in_a_recording_too(authors):
    anna, bert, _ = authors
    view = view_of(
        anna.heard(anna.round(4)), *(bert.heard(bert.round(n), at=NOW + n) for n in range(12))
    )
    assert texts(view, "peer")[-1] == "anna fell silent in round 4"


def test_groups_and_lone_peers_of_the_newest_rounds_are_told(authors):
    anna, bert, carl = authors
    dora = Author("dora")
    view = view_of(
        anna.heard(anna.round(1, [bert, carl]), anna.round(2)),
        bert.heard(bert.round(1, [anna, carl])),
        carl.heard(),
        dora.heard(dora.round(1)),
    )
    shown = page_data(view, ended=False)["meetings"]
    told = [
        (number, {frozenset(group) for group in groups}, alone)
        for number, _, groups, alone in shown
    ]
    assert told == [(2, set(), ["anna"]), (1, {frozenset({"anna", "bert", "carl"})}, ["dora"])]


def test_roles_are_those_of_the_status(authors):
    anna, bert, carl = authors
    relayed = (f"/ip4/198.51.100.7/tcp/4001/p2p/{carl.peer}/p2p-circuit/p2p/{bert.peer}",)
    view = view_of(anna.heard(checked=3), bert.heard(addresses=relayed))
    assert [
        (peer["name"], peer["roles"], peer["relayed"])
        for peer in page_data(view, ended=False)["peers"]
    ] == [("anna", ["trains", "verifies"], False), ("bert", ["trains"], True)]


def test_only_an_answering_peer_is_a_bootstrap_node(authors):
    """Fault: a node that still loaded its model was a second square."""
    _loading, seed, gone = authors
    view = view_of(*(Connected(time=NOW, peer=author.peer) for author in authors))
    for author in (seed, gone):
        view.take(BootstrapNode(time=NOW, peer=author.peer))
    view.take(Disconnected(time=NOW, peer=gone.peer))
    view.tick(NOW + 60)
    assert page_data(view, ended=False)["bootstrap"] == [seed.tail]


def test_changed_settings_are_shown_everywhere(authors):
    """A change of the settings is in the log the headline and on the page."""
    first, second = ChangePart(round=4, lr=0.0001), ChangePart(round=9, steps=4000)
    view = view_of(Changed(time=NOW, parts=(first,)), Changed(time=NOW, parts=(first, second)))
    said = ["train.lr=0.0001 from round 4 on", "train.steps=4000 from round 9 on"]
    assert [(line.kind, line.text) for line in view.log.lines] == [
        ("change", f"the creator has changed {one}") for one in said
    ]
    assert headline(view).endswith(f"   changed: {said[0]}, {said[1]}")
    assert page_data(view, ended=False)["changes"] == said


def signed(signer, peer, *numbers, at=NOW, **work):
    fields = {
        "swarm": SWARM,
        "peer": signer.peer,
        "issued": at,
        "work": ((peer.peer, *Work(*numbers, **work)),),
    }
    return Signed(time=at, peer=signer.peer, receipts=Receipts(**fields))


def here(*authors, round=9):
    return [
        author.heard(
            author.round(round), addresses=(f"/ip4/10.{number}.0.1/tcp/1/p2p/{author.peer}",)
        )
        for number, author in enumerate(authors)
    ]


def test_an_exchange_counts_once_both_sides_signed_it(authors):
    anna, bert, carl = authors
    one, both = [signed(anna, bert, 3, 3.0, 300.0)], [signed(bert, anna, 2, 2.0, 80.0)]
    assert view_of(*here(anna, bert, carl), *one).totals()["confirmed"] is None
    view = view_of(*here(anna, bert, carl), *one, *both)
    found, total = view.confirmed(), view.totals()["confirmed"]
    assert (
        found[bert.peer]["exchanges"],
        found[bert.peer]["tokens"],
        found[bert.peer]["partners"],
    ) == (2, 300.0, 1)
    assert found[carl.peer]["partners"] == 0
    assert (total["exchanges"], total["rounds"], total["tokens"], total["elsewhere"]) == (
        2,
        4.0,
        380.0,
        4.0,
    )


def test_repeated_news_adds_nothing(authors):
    """What a watcher hears twice or of an earlier moment adds nothing."""
    anna, bert, _ = authors
    now = [signed(anna, bert, 3, 3.0, 300.0), signed(bert, anna, 3, 3.0, 300.0)]
    before = [
        signed(anna, bert, 9, 9.0, 900.0, at=NOW - 1),
        signed(bert, anna, 9, 9.0, 900.0, at=NOW - 1),
    ]
    assert (
        view_of(*here(anna, bert), *now, *before, *now).totals()
        == view_of(*here(anna, bert), *now).totals()
    )


def test_invented_partners_and_invented_rounds_raise_nothing(authors):
    anna, bert, carl = authors
    ghosts = [Author("ghost") for _ in range(3)]
    said = [
        event
        for ghost in ghosts
        for event in (signed(ghost, carl, 5, 5.0, 50.0), signed(carl, ghost, 5, 5.0, 50.0))
    ]
    honest = [signed(anna, bert, 4, 4.0, 400.0), signed(bert, anna, 4, 4.0, 400.0)]
    assert view_of(*here(anna, bert, carl), *honest, *said).confirmed()[carl.peer]["partners"] == 0
    colluding = [
        signed(anna, carl, 2**40, 2.0**40, 2.0**50),
        signed(carl, anna, 2**40, 2.0**40, 2.0**50),
    ]
    carls = view_of(*here(anna, bert, carl), *honest, *colluding).confirmed()[carl.peer]
    assert (carls["exchanges"], carls["rounds"]) == (
        11,
        11.0,
    )  # as many as there were rounds, and two
    usual = [
        event
        for number in range(4)
        for event in pair_of(Author(f"a{number}"), Author(f"b{number}"))
    ]
    carls = view_of(*here(anna, bert, carl), *usual, *honest, *colluding).confirmed()[carl.peer]
    assert carls["tokens"] == 4 * 100.0 * 11


def pair_of(one, other):
    return [*here(one, other), signed(one, other, 4, 4.0, 400.0), signed(other, one, 4, 4.0, 400.0)]


def test_page_shows_what_is_confirmed(authors):
    """The page shows what is confirmed and of how many ranges."""
    anna, bert, carl = authors
    events = [signed(signer, carl, rollouts=2, reward=1.5, votes=1) for signer in (anna, bert)]
    shown = page_data(view_of(*here(anna, bert, carl), *events), ended=False)
    (of_carl,) = [peer["confirmed"] for peer in shown["peers"] if peer["id"] == carl.peer]
    assert (
        of_carl["rollouts"],
        of_carl["reward"],
        of_carl["votes"],
        of_carl["partners"],
        of_carl["ranges"],
    ) == (4, 3.0, 2, 2, 2)
    assert shown["totals"]["confirmed"]["votes"] == 2


@pytest.fixture
def gate():
    return RecordFilter(Status, SWARM, clock=lambda: NOW)


def refused(gate, data):
    with pytest.raises(MessageError) as caught:
        gate.open(data)
    return caught.value.reason


def test_a_status_is_opened(gate, authors):
    anna, bert, _ = authors
    status = anna.status(anna.round(3, [bert]), reward=0.25, banned=(bert.peer,), without_partner=2)
    assert gate.open(make_envelope(SWARM, make_body(status, anna.identity))) == status


def test_malformed_messages_are_refused_each_for_its_reason(gate, authors):
    anna, bert, _ = authors
    good = anna.bytes()
    assert refused(gate, b"") == "truncated"
    assert refused(gate, os.urandom(64) + b"\xc1") in ("malformed", "truncated", "nested")
    assert refused(gate, good[: len(good) // 2]) == "truncated"
    assert refused(gate, bytes(MAX_MESSAGE + 1)) == "oversized"
    assert refused(gate, b"\x91" * 500) == "malformed"
    sealed = seal(anna.status(), anna.identity)
    assert (
        refused(
            gate,
            make_envelope(SWARM, Body("plain", len(sealed), sealed[:-1] + bytes([sealed[-1] ^ 1]))),
        )
        == "forged"
    )
    assert refused(gate, make_envelope(SWARM, Body("zlib", len(sealed), sealed))) == "malformed"
    assert refused(gate, make_envelope(SWARM, Body("plain", 1 << 30, sealed))) == "oversized"
    assert (
        refused(gate, make_envelope(swarm_id(b"other"), make_body(anna.status(), anna.identity)))
        == "foreign-swarm"
    )
    assert (
        refused(gate, make_envelope(SWARM, make_body(anna.status(), bert.identity))) == "forged"
    )  # bert speaks for anna
    foreign = anna.status(swarm=swarm_id(b"other"))
    assert refused(gate, make_envelope(SWARM, make_body(foreign, anna.identity))) == "foreign-swarm"
    assert gate.open(good) == anna.status()


def test_a_bomb_is_not_expanded(gate, authors):
    body = make_body(authors[0].status(name="a" * 64), authors[0].identity)
    assert body.encoding == "zlib"
    assert refused(gate, make_envelope(SWARM, Body("zlib", body.size - 1, body.data))) == "bomb"


def test_only_what_is_newer_counts(gate, authors):
    anna, bert, _ = authors
    gate.open(anna.bytes())
    assert refused(gate, anna.bytes()) == "replayed"
    assert refused(gate, anna.bytes(issued=NOW - 1)) == "replayed"
    gate.open(bert.bytes(issued=NOW - 1))
    gate.open(anna.bytes(issued=NOW + 0.5))
    assert refused(gate, anna.bytes(issued=NOW + OLD_S + 1)) == "old"
    assert refused(gate, Author("dora").bytes(issued=NOW - OLD_S - 1)) == "old"


def test_an_author_has_a_quota(gate, authors):
    anna, bert, _ = authors
    for number in range(QUOTA.messages):
        gate.open(anna.bytes(issued=NOW + number / 1000))
    assert refused(gate, anna.bytes(issued=NOW + 10)) == "quota"
    gate.open(bert.bytes(issued=NOW + 10))


def test_the_largest_status_fits():
    author = Author("n" * 64)
    others = [Author("x") for _ in range(8)]
    address = "/dns4/" + "a" * 200 + "/tcp/4001"
    status = author.status(
        *(
            author.round(2**52 + n, others, bytes_sent=2**40, bytes_received=2**40, step=2**53)
            for n in range(6)
        ),
        addresses=(address,) * 4,
        banned=tuple(other.peer for other in others),
        without_partner=2**53,
        daemon_restarts=2**53,
        bytes_sent=2**40,
        bytes_received=2**40,
        reward=0.1,
        groups_own=2**53,
        groups_foreign=2**53,
        claims=2**53,
        checked=2**53,
        invalid=2**53,
    )
    assert len(pack(status)) < status.LIMIT
    gate = RecordFilter(Status, SWARM, clock=lambda: NOW)
    assert gate.open(make_envelope(SWARM, make_body(status, author.identity))) == status


def at(author, port=4001, host="/ip4/203.0.113.5", rest=""):
    return f"{host}/tcp/{port}{rest}/p2p/{author.peer}"


def test_what_a_peer_says_of_another_is_not_noted(authors):
    anna, bert, _ = authors
    found = PeerAddresses()
    relayed = at(
        anna, rest=f"/p2p/{bert.peer}/p2p-circuit"
    )  # the daemon dials through relays, and by QUIC
    found.learn(anna.peer, [at(bert), relayed, at(anna), "nonsense"])
    assert found.addresses(anna.peer) == (relayed, at(anna))
    found.learn(anna.peer, [at(bert)])  # says nothing of itself that helps: what was known stays
    assert found.addresses(anna.peer) == (relayed, at(anna))
    assert found.addresses(bert.peer) == ()


def test_who_failed_is_tried_later_and_last(authors):
    anna, bert, carl = authors
    found = PeerAddresses()
    for author in authors:
        found.learn(author.peer, [at(author)])
    assert set(found.due(0.0, [])) == {author.peer for author in authors}
    found.tried(anna.peer, 0.0, reached=False)
    assert anna.peer not in found.due(AGAIN_S - 0.1, [])
    assert found.due(AGAIN_S, [carl.peer]) == [bert.peer, anna.peer]
    for _ in range(2000):
        found.tried(anna.peer, 0.0, reached=False)
    assert anna.peer not in found.due(AGAIN_MAX_S - 0.1, [])
    assert anna.peer in found.due(AGAIN_MAX_S, [])
    found.tried(anna.peer, 0.0, reached=True)
    assert anna.peer in found.due(AGAIN_S, [])


def test_it_is_bounded_dialled(monkeypatch, authors):
    monkeypatch.setattr(source, "MAX_KNOWN", 2)
    found = PeerAddresses()
    for author in authors:
        found.learn(author.peer, [at(author)])
        found.tried(author.peer, 0.0, reached=False)
    assert set(found.due(1e9, [])) == {author.peer for author in authors[1:]}
    assert len(found._tried) == 2
