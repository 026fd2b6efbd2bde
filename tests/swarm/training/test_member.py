"""A member's duties: the order of announcements, and the costs of each round."""

from types import SimpleNamespace

import pytest

from shoal.optim import RoundInfo, RoundKey
from shoal.swarm.exchange.contribution import ExchangeStats
from shoal.swarm.exchange.robust import PATIENCE, Newcomers
from shoal.swarm.internal_errors import InternalErrors
from shoal.swarm.p2p.stream import short
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.training.diagnosis import Diagnosis
from shoal.swarm.training.last_average import EndReport
from shoal.swarm.training.member import LEAVE_S, TrainingMember
from shoal.swarm.training.shard import Shard
from shoal.swarm.training.step_rate import Rates
from shoal.swarm.wire.messages import Member, MemberEnd
from shoal.swarm.wire.record import Faults, LinkUse, Loss, Progress, Round

BERT = "12D3KooWbert"
LINK = LinkUse(bytes_sent=100, reach="direct")
LAG = {"lag_steps": 7, "lag_auto": True, "late": 0}
SKETCH = (1, 0, (0.5,) * 4)


class Recorder:
    """Any object of which only the calls matter."""

    def __init__(self, name, calls):
        self._name, self._calls = name, calls

    def __getattr__(self, method):
        return lambda *args, **kwargs: self._calls.append((f"{self._name}.{method}", args, kwargs))


@pytest.fixture
def world():
    calls, traffic, waits = [], SimpleNamespace(sent=100, received=50, rate=lambda: None), []
    peers = Recorder("directory", calls)
    peers.members = peers.everyone = lambda: members
    peers.departed = dict
    peers.own_record = SimpleNamespace(link=lambda: LINK)
    diagnosis = Diagnosis(stats := ExchangeStats(), peers, "anna")
    faults = {}
    diagnosis.waited = waits.append
    diagnosis.seconds = lambda: {"round_wait_s": 0.5}
    diagnosis.faults = lambda: faults
    diagnosis.rejected = lambda updates: None
    rejected, met, members = [], {}, {}
    member = TrainingMember(
        SimpleNamespace(
            identity=SimpleNamespace(peer_id="anna"),
            host=SimpleNamespace(
                traffic=traffic, met=met, restarts=2, internal_errors=InternalErrors()
            ),
            directory=peers,
            manifest=SimpleNamespace(outer=OuterSettings(method="noloco")),
        ),
        SimpleNamespace(
            round=3,
            steps=30,
            tokens=500,
            lag=7,
            lag_auto=True,
            fragments=1,
            schedule=SimpleNamespace(every=10),
            projection_of=lambda fragment: (1.0,),
        ),
        SimpleNamespace(waited=0.0, stats=stats),
        screen := SimpleNamespace(
            rejections=lambda: [rejected.pop() for _ in rejected[:]], newcomers=Newcomers()
        ),
        model="digest",
        name="anna",
        shard=Shard(1, 4, 0),
    )

    def serve():
        sync = Recorder("sync", calls)
        sync.diagnosis = diagnosis
        sync.sketch = lambda: SKETCH
        member._sync = sync

    return SimpleNamespace(
        member=member,
        calls=calls,
        traffic=traffic,
        waits=waits,
        faults=faults,
        rejected=rejected,
        serve=serve,
        screen=screen,
        met=met,
        members=members,
    )


def info(number):
    return RoundInfo(RoundKey("run", number, 0), ("anna", BERT), 30, 0)


def test_unserved_member_announces_no_details(
    world,
):
    """Before it serves a member announces no details and without a reporter sends no status."""
    record = world.member.announce("waiting")
    ((name, args, fields),) = world.calls
    assert (name, args) == ("directory.announce", ())
    assert {key: value for key, value in fields.items() if key != "version"} == {
        **{"name": "anna", "shard": 1, "shards": 4, "model": "digest", "sketch": None},
        **{"state": "waiting", "round": 3, "step": 30, "finished": False},
        **{"loss": None, "steps_per_s": 0.0, "tokens_per_s": 0.0, "mfu": None},
        **{"exchange_s": 0.0, "round_wait_s": 0.0, **LAG},
        **dict(Faults(daemon_restarts=2)),
    }
    assert record == world.member.record()


def test_announced_fields_are_those_of_the_message(world):
    """Of the record, all that `Member` has under the same name but what the link adds later."""
    world.serve()
    world.faults["missing_names"] = ("carl",)
    world.member.announce("training")
    fields = world.calls[0][2]
    of_the_network = {"swarm", "peer", "addresses", "issued", "admission", "change"}
    # What it came to at its end, and what was of no use of rollouts that it learns from.
    of_some = {"end", "unused"}
    unset = {*of_the_network, *LinkUse.model_fields, *of_some}
    assert set(fields) == set(Member.model_fields) - unset
    assert (fields["sketch"], fields["missing_names"]) == (SKETCH, ("carl",))


def test_the_end_takes_the_room_of_other_details(world):
    world.faults["missing_names"] = ("carl",)
    world.serve()
    world.member.leave(end=EndReport(("anna", "bert"), loss_before=2.5, loss_after=2.25))
    fields = world.calls[0][2]
    assert fields["end"] == MemberEnd(members=2, names=("bert",), loss_before=2.5, loss_after=2.25)
    assert (fields["sketch"], fields["missing_names"], fields["round_wait_s"]) == (None, (), 0.5)


def test_leaving_is_announced_first_with_the_last_loss_and_speed(world):
    world.serve()
    world.member.reporter = Recorder("reporter", world.calls)
    world.member.records.rates = Rates(2.0, 64.0, 0.5)
    world.member.records.lost(training=1.5)
    world.member.leave()
    assert [name for name, _, _ in world.calls] == [
        "reporter.progress",
        "directory.announce",
        "directory.leave",
    ]
    (record,) = world.calls[0][1]
    assert record.progress == Progress(
        state="leaving",
        round=3,
        step=30,
        tokens=500,
        steps_per_s=2.0,
        tokens_per_s=64.0,
        mfu=0.5,
        members=0,
    )
    assert record.loss == Loss(training=1.5)
    assert (record.exchanges.lag_steps, record.exchanges.lag_auto) == (7, True)
    assert (record.link, record.faults.daemon_restarts) == (LINK, 2)
    fields = world.calls[1][2]
    assert (fields["state"], fields["loss"], fields["steps_per_s"]) == ("leaving", 1.5, 2.0)
    assert {"tokens_per_s": 64.0, "mfu": 0.5, **LAG}.items() <= fields.items()
    assert world.calls[2][1] == (LEAVE_S,)


def test_beginning_takes_over_weights_before_the_exchange_gets_its_round(world):
    world.serve()
    world.member.begin("state")
    world.member.begin()
    assert [(name, args) for name, args, _ in world.calls] == [
        ("sync.begin_from", ("state",)), ("sync.begin", ()), ("sync.begin", ()),
    ]  # fmt: skip


def test_round_has_its_bytes_wait_and_refusals(world):
    """A round has the bytes wait and refusals since the round before."""
    member, traffic = world.member, world.traffic
    world.serve()
    member.start_counting()
    traffic.sent, traffic.received, member.exchange.waited = 170, 80, 2.0
    world.rejected.append("update")
    first = member.on_round(info(3))
    assert (first.sent, first.received, first.wait_s, first.rejected) == (70, 30, 2.0, ["update"])
    traffic.sent, member.exchange.waited = 175, 2.5
    alone = RoundInfo(RoundKey("run", 4, 0), ("anna",), 30, 0)
    second = member.on_round(alone)
    assert (second.sent, second.received, second.wait_s, second.rejected) == (5, 0, 0.5, [])
    third = member.on_round(info(5), 0.25)
    assert third.wait_s == 0.25  # a simulation measures it on its own clock
    assert world.waits == [2.0, 0.5, 0.25]
    assert [name for name, _, _ in world.calls] == ["sync.on_round"] * 3
    member._tokens = 380
    member.report_round(info(3), first, 1.0)  # nobody watches
    member.reporter = Recorder("reporter", world.calls)
    member._opt.tokens = 560
    member.report_round(info(3), first, 1.0)
    name, args, _ = world.calls[-1]
    done, record, partners, tokens, projection = args
    assert done == Round(
        round=3,
        step=30,
        members=2,
        partners=(BERT[-8:],),
        bytes_sent=70,
        bytes_received=30,
        wait_s=2.0,
        loss=1.0,
    )
    assert record == member.record()
    assert (name, partners, tokens, projection) == ("reporter.round", [BERT], 60, (1.0,))


def test_a_round_without_a_partner_says_why(world):
    """Only --verbose did.

    Mutants: the failure of another fragment, or of an earlier round, is said; a partner gets a
    reason.
    """
    world.serve()
    member, stats = world.member, world.member.exchange.stats

    def alone(number, fragment=0):
        return RoundInfo(RoundKey("run", number, fragment), ("anna",), 30, 0)

    assert member.on_round(info(3)).why == ""
    assert member.on_round(alone(3)).why == "nobody else is here"
    world.members["anna"] = world.members["else"] = SimpleNamespace(
        name="else", model="another", steps_per_s=1.0, finished=False
    )
    assert member.on_round(alone(3)).why == "all others train another model"
    world.members["id-of-bert"] = SimpleNamespace(
        name="bert", model="digest", steps_per_s=1.0, finished=False
    )
    assert member.on_round(alone(3)).why == "all others were taken, or in other rounds"
    stats.failed(RoundKey("run", 4, 0), "id-of-bert", "timeout")
    stats.failed(RoundKey("run", 5, 1), "id-of-somebody-else", "broken")
    assert member.on_round(alone(4)).why == "bert did not answer in time"
    assert member.on_round(alone(5, 1)).why == f"{short('id-of-somebody-else')} broke off"
    assert member.on_round(alone(6)).why == "all others were taken, or in other rounds"


def test_a_method_without_partners_misses_none(world):
    """Mutant: nodes that share rollouts and no weights are said to have no partner."""
    world.serve()
    world.member._membership.manifest.outer = OuterSettings(method="none")
    for number in range(3, 9):
        report = world.member.on_round(RoundInfo(RoundKey("run", number, 0), ("anna",), 30, 0))
        assert report.why == ""
    assert world.member.sync.diagnosis.news() == []


def test_newcomers_count_by_their_range(world):
    """Members in view are known and newcomers count by the range in which they were met."""
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
    assert [
        half // world.screen.newcomers.take(peer, half) for peer in ("one", "two", "three", "four")
    ] == [2, 4, 2, 4]
