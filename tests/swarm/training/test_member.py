"""A member's duties: the order of announcements, the costs of each round, and its reports of itself and of the lag of its
exchanges."""

from types import SimpleNamespace

import pytest

from shoal.optim import RoundInfo, RoundKey
from shoal.swarm.exchange.contribution import RECENT, ExchangeStats
from shoal.swarm.exchange.robust import PATIENCE, Newcomers
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.stream import short
from shoal.swarm.training.factories import Rates
from shoal.swarm.training.member import AGAIN_S, CONFIRM, FULL, LEAVE_S, LagReport, SelfReport, TrainingMember
from shoal.swarm.training.shard import Shard
from tests.clocks import Clock
from tests.records import member_of

LAG = {"lag": 7, "lag_auto": True, "late": 0}


class Recorder:
    """Any object of which only the calls matter."""

    def __init__(self, name, calls):
        self._name, self._calls = name, calls

    def __getattr__(self, method):
        return lambda *args, **kwargs: self._calls.append((f"{self._name}.{method}", args, kwargs))


@pytest.fixture
def world():
    calls, traffic, waits = [], SimpleNamespace(sent=100, received=50, rate=lambda: None), []
    details = {"wait_s": 0.5}
    report = SimpleNamespace(waited=waits.append, details=lambda: details)
    rejected, met, members = [], {}, {}
    member = TrainingMember(
        SimpleNamespace(
            identity=SimpleNamespace(peer_id="anna"),
            host=SimpleNamespace(traffic=traffic, met=met),
            directory=SimpleNamespace(members=lambda: members),
        ),
        SimpleNamespace(
            round=3, steps=30, tokens=500, lag=7, lag_auto=True, schedule=SimpleNamespace(every=10),
            projection_of=lambda fragment: (1.0,),
        ),
        SimpleNamespace(waited=0.0, stats=ExchangeStats()),
        screen := SimpleNamespace(rejections=lambda: [rejected.pop() for _ in rejected[:]], newcomers=Newcomers()),
        model="digest",
        name="anna",
        shard=Shard(1, 4, 0),
        publisher=Recorder("directory", calls),
    )  # fmt: skip

    def serve():
        sync = Recorder("sync", calls)
        sync.self_report = report
        member._sync = sync

    return SimpleNamespace(
        member=member, calls=calls, traffic=traffic, waits=waits, details=details, rejected=rejected, serve=serve,
        screen=screen, met=met, members=members,
    )  # fmt: skip


def info(number):
    return RoundInfo(RoundKey("run", number, 0), ("anna", "bert"), 30, 0)


def test_before_it_serves_a_member_announces_no_details_and_without_a_reporter_sends_no_status(world):
    world.member.announce("waiting")
    ((name, args, fields),) = world.calls
    assert (name, args) == ("directory.announce", ())
    assert {key: value for key, value in fields.items() if key != "version"} == {
        "name": "anna", "round": 3, "step": 30, "loss": None, "steps_per_s": 0.0, "shard": 1, "shards": 4, "model": "digest",
        "state": "waiting", "tokens_per_s": 0.0, "mfu": None, **LAG,
    }  # fmt: skip


def test_leaving_is_announced_first_with_the_last_loss_and_speed(world):
    world.serve()
    world.member.reporter = Recorder("reporter", world.calls)
    world.member.leave(1.5, Rates(2.0, 64.0, 0.5))
    assert [name for name, _, _ in world.calls] == ["reporter.progress", "directory.announce", "directory.leave"]
    now = {"state": "leaving", "round": 3, "step": 30, "loss": 1.5, "steps_per_s": 2.0, "tokens_per_s": 64.0, "mfu": 0.5, **LAG}
    assert world.calls[0][1] == (now,)
    fields = world.calls[1][2]
    assert (fields["state"], fields["loss"], fields["steps_per_s"]) == ("leaving", 1.5, 2.0)
    assert {**world.details, "tokens_per_s": 64.0, "mfu": 0.5, **LAG}.items() <= fields.items()
    assert world.calls[2][1] == (LEAVE_S,)


def test_beginning_takes_over_weights_before_the_exchange_gets_its_round(world):
    world.serve()
    world.member.begin("state")
    world.member.begin()
    assert [(name, args) for name, args, _ in world.calls] == [
        ("sync.begin_from", ("state",)), ("sync.begin", ()), ("sync.begin", ()),
    ]  # fmt: skip


def test_a_round_has_the_bytes_wait_and_refusals_since_the_round_before(world):
    member, traffic = world.member, world.traffic
    world.serve()
    member.start_counting()
    traffic.sent, traffic.received, member.exchange.waited = 170, 80, 2.0
    world.rejected.append("update")
    first = member.on_round(info(3))
    assert (first.sent, first.received, first.wait_s, first.rejected) == (70, 30, 2.0, ["update"])
    traffic.sent, member.exchange.waited = 175, 2.5
    member.exchange.stats.odd += 1
    second = member.on_round(info(4))
    assert (first.odd, second.odd) == (False, True)
    assert (second.sent, second.received, second.wait_s, second.rejected) == (5, 0, 0.5, [])
    third = member.on_round(info(5), 0.25)
    assert (third.wait_s, third.odd) == (0.25, False)  # a simulation measures it on its own clock
    assert world.waits == [2.0, 0.5, 0.25]
    assert [name for name, _, _ in world.calls] == ["sync.on_round"] * 3
    member._tokens = 380
    member.report_round(info(3), first, 1.0)  # nobody watches
    member.reporter = Recorder("reporter", world.calls)
    member._opt.tokens = 560
    member.report_round(info(3), first, 1.0)
    name, args, fields = world.calls[-1]
    assert (name, args) == ("reporter.round", (("anna", "bert"),))
    assert fields == {
        "round": 3, "step": 30, "loss": 1.0, "sent": 70, "received": 30, "wait_s": 2.0, "suspicious": 1, "odd": False,
        "projection": (1.0,), "tokens": 60,
    }  # fmt: skip


def test_a_round_without_a_partner_says_why(world):
    """Only --verbose did. Mutants: the failure of another fragment, or of an earlier round, is said; a partner gets a reason."""
    world.serve()
    member, stats = world.member, world.member.exchange.stats
    alone = lambda number, fragment=0: RoundInfo(RoundKey("run", number, fragment), ("anna",), 30, 0)  # noqa: E731
    assert member.on_round(info(3)).why == ""
    assert member.on_round(alone(3)).why == "nobody else is here"
    world.members["anna"] = world.members["else"] = SimpleNamespace(name="else", model="another")
    assert member.on_round(alone(3)).why == "all others train another model"
    world.members["id-of-bert"] = SimpleNamespace(name="bert", model="digest")
    assert member.on_round(alone(3)).why == "all others were taken, or in other rounds"
    stats.odd += 1
    assert member.on_round(alone(3)).why == "the number of members is odd"
    stats.failed(RoundKey("run", 4, 0), "id-of-bert", "timeout")
    stats.failed(RoundKey("run", 5, 1), "id-of-somebody-else", "broken")
    assert member.on_round(alone(4)).why == "bert did not answer in time"
    assert member.on_round(alone(5, 1)).why == f"{short('id-of-somebody-else')} broke off"
    assert member.on_round(alone(6)).why == "all others were taken, or in other rounds"


def test_members_in_view_are_known_and_newcomers_count_by_the_range_in_which_they_were_met(world):
    half = 2**19
    world.serve()
    for _ in range(PATIENCE):
        world.screen.newcomers.take("old", half)
    world.members["waiting"] = SimpleNamespace(addresses=("/ip4/10.1.2.3/tcp/1",))
    world.member.on_round(info(3))
    for _ in range(PATIENCE):
        world.screen.newcomers.take("old", half)
    assert world.screen.newcomers.take("waiting", half) == half
    world.met.update({"one": "10.9.1.1", "two": "10.9.2.2", "three": "10.8.1.1"})
    world.members["four"] = SimpleNamespace(addresses=("/ip4/10.8.7.7/tcp/1",))
    assert [half // world.screen.newcomers.take(peer, half) for peer in ("one", "two", "three", "four")] == [2, 4, 2, 4]


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


def over(report, *, members=("a", "b"), wait_s=2.0, late=False):
    report.on_round(RoundInfo(RoundKey("run", 0, 0), members, 10, 10, late), wait_s)


def optimizer(lag=10, lag_auto=True, every=10):
    return SimpleNamespace(lag=lag, lag_auto=lag_auto, schedule=SimpleNamespace(every=every))


def test_it_reports_the_present_lag_and_counts_what_came_late():
    opt = optimizer(lag=3)
    report = LagReport(opt)
    assert report.details() == {"lag": 3, "lag_auto": True, "late": 0}
    for late in (True, False, True):
        over(report, late=late)
    opt.lag = 4
    assert report.details() == {"lag": 4, "lag_auto": True, "late": 2}


def test_a_node_whose_exchanges_take_longer_than_a_round_is_warned_once():
    report = LagReport(optimizer())
    for _ in range(FULL - 1):
        over(report)
        assert report.events() == []
    over(report, wait_s=10.0)
    (sentence,) = report.events()
    assert "longer than a round, so training waits for each (3 s recently)" in sentence
    assert "`shoal plan`" in sentence
    for _ in range(2 * FULL):
        over(report)
    assert report.events() == []


@pytest.mark.parametrize("harmless", [{"members": ()}, {"members": ("a",)}, {"wait_s": 0.0}])
def test_an_exchange_that_shows_nothing_of_the_kind_begins_the_count_anew(harmless):
    report = LagReport(optimizer())
    for _ in range(FULL - 1):
        over(report)
    over(report, **harmless)
    for _ in range(FULL - 1):
        over(report)
    assert report.events() == []


@pytest.mark.parametrize("changed", [{"lag": 9}, {"lag_auto": False}, {"lag": 0, "lag_auto": False}])
def test_only_a_lag_that_can_grow_no_more_is_worth_a_warning(changed):
    report = LagReport(optimizer(**changed))
    for _ in range(2 * FULL):
        over(report)
    assert report.events() == []


def rounds(rate, *, wait_s, sent, count=FULL + 1, computing_s=10.0, lag=0):
    """Return the sentences of a node with rounds of 40 steps that waits for each exchange."""
    clock = Clock()
    opt = SimpleNamespace(lag=lag, lag_auto=False, schedule=SimpleNamespace(every=40), shapes=[(250, 250), (500,)])
    report, found = LagReport(opt, lambda: rate, clock), []
    for number in range(count):
        report.on_round(RoundInfo(RoundKey("run", number, 0), ("a", "b"), 40 * number, lag, False), wait_s, sent)
        clock.now += computing_s + wait_s
        found += report.events()
    return found


def test_a_link_that_does_not_carry_the_settings_is_named_once_with_what_would_fit():
    (sentence,) = rounds(125_000.0, wait_s=24.0, sent=3_000_000, count=3 * FULL)
    assert "carries 1 Mbit/s, but these settings send 2.4 Mbit/s" in sentence
    assert "rounds of 120 inner steps (outer.every, now 40)" in sentence  # 24 s of bytes in 30 s of computing: 80 %
    assert "`shoal plan --params 63000 --mbit 1 --step 0.25`" in sentence


@pytest.mark.parametrize("harmless", [{"rate": None}, {"rate": 400_000.0}, {"wait_s": 0.0}, {"count": FULL}, {"sent": 1_200_000}])
def test_a_link_that_carries_them_or_is_not_known_is_not_named(harmless):
    assert rounds(**{"rate": 125_000.0, "wait_s": 24.0, "sent": 3_000_000} | harmless) == []
