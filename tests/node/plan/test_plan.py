"""`shoal plan`: what it weighs, what it advises, and settings that a node takes as they are."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.commands import plan as command
from shoal.node.commands.plan import Measured, PlanError, measured_line, plan
from shoal.node.config.settings import load
from shoal.node.plan.advice import Situation, advise
from shoal.node.plan.rows import FIXED_BYTES, ModelTensors, Row, choices, rows, work_of
from shoal.node.plan.run_cost import (
    ESTIMATE_LATEST_S,
    StartEstimate,
    last_average_sent,
    run_cost,
)
from shoal.optim import METHODS, Alone, codec_named
from shoal.optim.codecs.floats import FloatCodec
from shoal.optim.codecs.registry import CODECS
from shoal.optim.methods import methods_of
from shoal.optim.schedule.schedules import Delayed
from shoal.swarm.access.link import Link
from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.exchange import cost
from shoal.swarm.exchange.cost import GOOD, Line
from shoal.swarm.exchange.group.reduction import fits
from shoal.swarm.figures import amount
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.reachability import DIAL_PROTOCOL, DialBackView
from shoal.swarm.p2p.throughput import MAX_BYTES, Throughput
from shoal.swarm.settings.outer import OuterSettings

MEASURED = Path(__file__).resolve().parents[3] / "bench" / "results" / "memory.jsonl"
LINE = Line(12.5e6, 0.1)
ASKED = {
    "params": 135e6,
    "step": 0.5,
    "peers": 8,
    "mbit": 100.0,
    "rtt": 0.1,
    "measure": None,
    "every": None,
    "steps": None,
}
LINK = str(Link("a" * 52, (f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral().peer_id}",)))


def found(line=LINE, params=135_000_000, **changed):
    return rows(line, ModelTensors.of_count(params), **{"peers": 8, "step_s": 0.5, **changed})


def of(method, *, line=LINE, **changed):
    return [row for row in found(line, **changed) if row.outer.method == method]


def test_table_has_every_method_and_codec():
    """Every method is there with the codecs that it may have and pairs also blocking."""
    shown = {(row.outer.method, row.outer.codec, row.blocks) for row in found()}
    assert {method for method, _, _ in shown} == set(METHODS) - {"none"}
    plain = {"float32", "bfloat16", "int8"}
    all_of_them = plain | {"e3m0+ef", "sign+ef"}
    assert {codec for method, codec, _ in shown if method == "noloco"} == plain | {"mod4"}
    assert {method for method, codec, _ in shown if codec == "mod4"} == set(methods_of("pair"))
    assert {codec for method, codec, _ in shown if method == "streaming"} == all_of_them
    assert {codec for method, codec, _ in shown if method == "sparseloco"} == {"topk2+ef:0.95"}
    assert {blocks for method, _, blocks in shown if method == "noloco"} == {True, False}


@pytest.mark.parametrize(("peers", "shown"), [(2, set()), (3, {"e3m0+ef", "sign+ef"})])
def test_averages_in_few_bits_have_rows(peers, shown):
    """Where members average a share each: from three on."""
    backs = {(row.outer.method, row.outer.codec_back) for row in found(peers=peers)}
    for method in ("diloco", "streaming"):
        assert {back for name, back in backs if name == method} == {None, *shown}
    for method in [*methods_of("pair"), *methods_of("everyone", experimental=True), "sparseloco"]:
        assert {back for name, back in backs if name == method} == {None}


def test_averages_in_few_bits_leave_a_node_once():
    """Of 8 peers: 7/8 of the payload and of the averages, in place of 7 payloads."""
    made = {row.outer.codec_name: row for row in of("streaming", params=64_000_000, every=16)}
    gathered, one, four = (
        made[name].json()["bytes_per_param_step"]
        for name in ("sign+ef", "sign+ef,back=sign+ef", "sign+ef,back=e3m0+ef")
    )
    assert gathered == pytest.approx(0.0564, rel=0.01)
    assert one == pytest.approx(0.0141, rel=0.01)
    assert four == pytest.approx(0.0344, rel=0.01)
    assert made["sign+ef,back=e3m0+ef"].forecast.exchange_s < made["sign+ef"].forecast.exchange_s


@pytest.mark.parametrize("every", [None, 1, 7, 500])
def test_the_settings_to_copy_are_those_that_were_weighed(every, tmp_path):
    for number, row in enumerate(found(every=every)):
        file = tmp_path / f"{number}.toml"
        file.write_text(row.toml())
        outer = load(file).outer
        assert outer.resolved() == row.outer
        assert work_of(outer, ModelTensors.of_count(135_000_000), peers=8, step_s=0.5) == row.work
        assert every in (None, row.work.every)


def test_good_rows_come_first_by_bytes():
    """Good rows come first by bytes and then the others by how much they compute."""
    shown = found()
    good = [row for row in shown if row.forecast.utilisation >= GOOD]
    rest = shown[len(good) :]
    assert good
    assert rest
    assert good == shown[: len(good)]
    assert [row.forecast.sent_a_day for row in good] == sorted(
        row.forecast.sent_a_day for row in good
    )
    assert [row.forecast.utilisation for row in rest] == sorted(
        (row.forecast.utilisation for row in rest), reverse=True
    )


@pytest.mark.parametrize(
    ("settings", "nbytes"),
    [
        ({}, 8 + 16 * 34),  # 4 bits, and two bytes for each of 16 blocks
        ({"codec": "float32"}, 4000),
        ({"codec": "bfloat16"}, 2000),
        (
            {"codec": "float32", "weights": "tokens"},
            8000,
        ),  # pseudo-gradients that are weighted, and weights that are not
        ({"method": "gasloc", "codec": "float32"}, 4000),
        ({"method": "sparta"}, 20),
        # all values are counted as those of matrices: 8 bits and a scale for 256
        ({"method": "diloco", "codec": "int8+hidden"}, 1000 + 4 * 4 + 4),
        ({"method": "diloco", "weights": "tokens"}, 4000),
    ],
)
def test_bytes_of_a_round(settings, nbytes):
    assert (
        work_of(OuterSettings(**settings), ModelTensors.of_count(1000), peers=2, step_s=1.0).nbytes
        == nbytes
    )


def test_late_application_follows_the_method():
    """What is applied a round late is what the methods make so."""

    def late(name):
        return isinstance(
            METHODS[name]
            .make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]), Alone())
            .schedule,
            Delayed,
        )

    for name in METHODS:
        work = work_of(OuterSettings(method=name), ModelTensors.of_count(1000), peers=2, step_s=1.0)
        assert (work.lag == work.every) == late(name) or work.every == 1


def test_groups_sum_what_the_exchange_sums():
    for outer in choices():
        work = work_of(outer, ModelTensors.of_count(1000), peers=8, step_s=1.0)
        assert work.sums == fits(outer.codec, cost.ALL_REDUCED)
    for name in (*CODECS, "mod4", "auto:2", "float32+ef", "float16+matrices"):
        is_float = isinstance(codec_named(name), FloatCodec)
        assert fits(name, cost.ALL_REDUCED) == is_float, name
    assert not work_of(
        OuterSettings(method="diloco", robust="centered-clip"),
        ModelTensors.of_count(1),
        peers=8,
        step_s=1.0,
    ).sums


def test_bytes_are_those_that_leave_a_node():
    """Three payloads of a bit a value, or one of a pair's, are told beside a ring of four."""
    made = {
        (row.outer.method, row.outer.codec_name): row.json()
        for row in found(params=64_000_000, peers=4, every=16)
    }
    bits = made["diloco", "sign+ef"]
    whole = made["diloco", "float32"]
    pair = made["noloco", "float32"]
    assert bits["bytes_per_param_step"] == pytest.approx(3 * 1.03 / 8 / 16, rel=0.01)
    assert bits["times_fewer"] == pytest.approx(248, abs=1)
    assert (whole["bytes_per_param_step"], whole["times_fewer"]) == (6 / 16, 16)
    assert (pair["bytes_per_param_step"], pair["times_fewer"]) == (4 / 16, 24)
    assert bits["bytes_a_round"] == math.ceil(
        cost.WIRE * 3 * codec_named("sign").nbytes([(64_000_000, 1)])
    )


def test_memory_is_what_was_measured():
    runs = [json.loads(text) for text in MEASURED.read_text().splitlines()]
    of_all = [
        row
        for run in runs
        if run.get("setting") == "no newcomer"
        for row in run["rows"]
        if not row["offload"]
    ]
    for late, lag in enumerate(
        ("0", "")
    ):  # "": the lag that nodes find; rows of before there was one have lag 0
        measured = {}
        for row in sorted(
            (row for row in of_all if row.get("lag", "0") == lag), key=lambda row: row["params"]
        ):  # the largest counts
            measured[row["method"]] = row["bytes_per_parameter"] - FIXED_BYTES / row["params"]
        known = {
            name: method.memory.measured[late]
            for name, method in METHODS.items()
            if method.memory.measured[late]
        }
        assert {name: round(value, 1) for name, value in measured.items()} == known
    for method in ("noloco", "co2"):
        rows = [row for row in of(method) if not row.blocks and row.outer.codec != "mod4"]
        assert {row.memory for row in rows} == {
            FIXED_BYTES + METHODS[method].memory.measured[1] * 135_000_000
        }
    rows = [row for row in of("noloco") if row.blocks and row.outer.codec != "mod4"]
    assert {row.memory for row in rows} == {
        FIXED_BYTES + METHODS["noloco"].memory.measured[0] * 135_000_000
    }
    assert {
        row.memory
        for row in [*of("decoupled"), *(row for row in of("noloco") if row.outer.codec == "mod4")]
    } == {None}


def test_amounts():
    found = {
        500: "500 B",
        1500: "1.5 kB",
        999_400: "999 kB",
        999_600: "1 MB",
        2.5e6: "2.5 MB",
        1e9: "1 GB",
        3.21e12: "3.21 TB",
    }
    assert {nbytes: amount(nbytes) for nbytes in found} == found
    assert (amount(64, ""), amount(135e6, "")) == ("64", "135 M")


def invoke(*options):
    return CliRunner().invoke(cli, ["plan", *options])


def test_json_is_one_object_with_a_row_for_each_choice():
    done = invoke(
        "--params",
        "135e6",
        "--mbit",
        "100",
        "--rtt",
        "0.1",
        "--step",
        "0.5",
        "--peers",
        "8",
        "--json",
    )
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report["link"] == {"mbit": 100.0, "round_trip_s": 0.1, "measured": False}
    assert len(report["rows"]) == len(found())
    row = report["rows"][0]
    assert 0 < row["utilisation"] <= 1
    assert math.isfinite(row["bytes_a_day"])
    assert report["advised"]["settings"].startswith("[outer]\nmethod = ")
    assert report["advice"].endswith(".")


def test_people_get_a_table_and_advice(tmp_path):
    """People get a table the settings and one line of advice."""
    done = invoke(
        "--params", "10e6", "--mbit", "100", "--rtt", "0.1", "--step", "0.1", "--peers", "2"
    )
    assert done.exit_code == 0
    assert (
        done.stdout.rstrip().split("\n")[-1].startswith("For 2 peers, alike and private, choose ")
    )
    (tmp_path / "swarm.toml").write_text(
        done.stdout[done.stdout.index("[outer]") : done.stdout.index("For 2 peers")]
    )
    assert load(tmp_path / "swarm.toml").outer.method == "streaming"
    assert "auto (" in done.stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("params", 0),
        ("params", -1.0),
        ("params", math.nan),
        ("params", 1e300),
        ("mbit", 0.0),
        ("mbit", math.inf),
        ("rtt", -0.1),
        ("rtt", math.nan),
        ("step", 0.0),
        ("step", 1e9),
        ("peers", 1),
        ("peers", 10**9),
        ("every", 0),
        ("steps", 10**400),
    ],
    ids=lambda value: f"{value!s:.20}",
)
def test_a_number_that_cannot_be_used_is_named(option, value):
    with pytest.raises(
        PlanError, match=f"^--{option} [^:]*: give between [^.]*\\.?[^.]*\\.$"
    ) as refused:
        plan(**{**ASKED, option: value})
    assert getattr(refused.value, "exit_code", 2) == 2


@pytest.mark.parametrize("missing", [{"mbit": None}, {"rtt": None}])
def test_a_link_that_is_not_known_is_asked_for(missing):
    with pytest.raises(PlanError, match="give --mbit and --rtt, or --measure LINK"):
        plan(**{**ASKED, **missing})


def test_an_unknown_link_is_refused_before_anything_is_dialled():
    with pytest.raises(ShoalError, match="pass the link that `shoal up` printed"):
        plan(**{**ASKED, "measure": "http://example.org"})


class Peer:
    """What a peer of the swarm answers, in place of the network."""

    def __init__(self, speeds, trip=0.1, seeds=False):
        self.speeds, self.trip, self.asked, self.closed = list(speeds), trip, [], 0
        self.seeds = seeds

    def daemon(self, visit, report):
        visit.close = self.close

    def bootstrap(self, visit, report):
        (visit.seeds if self.seeds else visit.reached).append("/ip4/1.2.3.4/tcp/1/p2p/somebody")
        visit.ask = self.ask
        if self.seeds:
            from shoal.node.doctor.check import FaultError

            raise FaultError("only seeds answer.")

    def close(self):
        self.closed += 1

    def ask(self, address, protocol, work, seconds):
        if protocol == DIAL_PROTOCOL:
            return DialBackView("somebody", "1.2.3.4", 0.0, self.trip / 2)
        self.asked.append(work.keywords["nbytes"])
        speed = self.speeds.pop(0)
        if isinstance(speed, Exception):
            raise speed
        return speed


def visited(monkeypatch, **peer):
    made = Peer(**peer)
    monkeypatch.setattr("shoal.node.doctor.network_checks.daemon", made.daemon)
    monkeypatch.setattr("shoal.node.doctor.network_checks.bootstrap", made.bootstrap)
    return made


def test_slower_direction_is_the_measured_link(monkeypatch):
    """A measured link has the slower direction and nothing is left running."""
    peer = visited(monkeypatch, speeds=[Throughput(2e6, 1e6, True)])
    assert measured_line(Link.parse(LINK)) == Measured(pytest.approx(0.1), 1e6)
    assert (peer.asked, peer.closed) == ([MAX_BYTES], 1)


def test_a_slow_link_is_measured_with_fewer_bytes(monkeypatch):
    peer = visited(monkeypatch, speeds=[Throughput(2e4, 2e5, False), Throughput(4e4, 3e4, True)])
    assert measured_line(Link.parse(LINK)).rate == 3e4
    assert peer.asked == [MAX_BYTES, MAX_BYTES // 16]


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (
            {"speeds": [Throughput(1e7, 9e6, True)]},
            r"at least 72 Mbit/s, but 2\.1 MB are over before the link is full",
        ),
        ({"speeds": [NetworkError("it was asked too often.")]}, "it was asked too often"),
        (
            {"speeds": [], "seeds": True},
            "no member of the swarm answers, and bootstrap nodes do not measure it",
        ),
    ],
)
def test_what_cannot_be_measured_honestly_is_asked_for(peer, why, monkeypatch):
    visited(monkeypatch, **peer)
    with pytest.raises(
        PlanError,
        match=rf"takes 100 ms, but the rate could not be measured \({why}\): give it by --mbit",
    ):
        plan(**{**ASKED, "mbit": None, "rtt": None, "measure": LINK})


def test_what_is_given_counts_more_than_what_was_measured(monkeypatch):
    visited(monkeypatch, speeds=[Throughput(1e7, 9e6, True)])
    report = plan(**{**ASKED, "mbit": 50.0, "rtt": None, "measure": LINK})
    assert report["link"] == {"mbit": 50.0, "round_trip_s": 0.1, "measured": True}
    assert report["rows"] == plan(**{**ASKED, "mbit": 50.0})["rows"]


def test_bounds_say_what_they_bound():
    assert set(command.BOUNDS) == set(ASKED) - {"measure"}
    assert replace(found()[0].work, every=3).every == 3


def estimate(outer, now):
    tensors = ModelTensors.of_count(10_000_000)
    return StartEstimate(OuterSettings(**outer), tensors, done=(100, 7), clock=lambda: now[0])


def test_a_run_is_estimated_once_its_first_round_is_over():
    """50 steps took 100 s with all waiting, and a round of 50 steps of 4-bit values sends 5 MB."""
    now = [0.0]
    made = estimate({"method": "noloco", "codec": "int8", "every": 50}, now)
    assert made.news(100, 7, total=2100, peers=4) == ""
    now[0] = 40.0
    assert made.news(130, 7, total=2100, peers=4) == ""
    now[0] = 100.0
    said = made.news(150, 8, total=2150, peers=4)
    (row,) = [
        row
        for row in found(params=10_000_000, peers=4, step_s=2.0, every=50)
        if (row.outer.method, row.outer.codec, row.blocks) == ("noloco", "int8", False)
    ]
    sent = 40 * row.forecast.sent + last_average_sent(row)
    assert said == (
        f"2,000 steps take about 66.7 min and send about {amount(sent)}, and as "
        f"much comes back; averaging takes some {amount(row.memory)} of memory beside training"
    )
    assert made.news(160, 8, total=2150, peers=4) == ""


@pytest.mark.parametrize(("peers", "outer", "values"), [
    (2, {}, 1),
    (3, {}, 2),
    (4, {}, 1.5),  # all-reduced: a member's share goes out, and comes back
    (8, {"robust": "distance"}, 7),  # each has all contributions of its group
    (16, {"check_loss": True}, 7),
    (4, {"finish": "none"}, 0),
    (4, {"method": "streaming", "codec": "sign+ef"}, 1.5),
])  # fmt: skip
def test_bytes_of_the_last_average(peers, outer, values):
    tensors = ModelTensors.of_count(1_000_000)
    settings = OuterSettings(**outer).resolved()
    work = work_of(settings, tensors, peers=peers, step_s=1.0)
    row = Row(settings, tensors, work, cost.forecast(work, LINE))
    assert last_average_sent(row) == pytest.approx(4e6 * values, rel=0.02)


def test_a_long_round_is_not_waited_for():
    now = [ESTIMATE_LATEST_S]
    made = estimate({"method": "diloco", "codec": "int8", "every": 500}, now)
    now[0] *= 2
    assert made.news(160, 7, total=1160, peers=4).startswith("1,000 steps take about 16.7 min and")


def test_estimate_of_endless_runs_and_of_one_alone():
    now = [0.0]
    endless = estimate({"method": "noloco", "codec": "int8", "round": "seconds:10"}, now)
    alone = estimate({"method": "none"}, now)
    now[0] = 20.0
    said = endless.news(140, 9, total=0, peers=2)
    outer = OuterSettings(method="noloco", codec="int8", round="seconds:10")
    work = work_of(outer, ModelTensors.of_count(10_000_000), peers=2, step_s=0.5)
    assert said.startswith(f"a day sends about {amount(8640 * cost.sent(work))}, and")
    assert alone.news(140, 7, total=1140, peers=2) == "1,000 steps take about 8.33 min"


def test_plan_of_steps_is_the_advised_row():
    row, _ = advise(Situation(8), LINE, ModelTensors.of_count(135_000_000), step_s=0.5)
    asked = ["--params", 135e6, "--step", 0.5, "--mbit", 100, "--rtt", 0.1, "--steps", 2000]
    shown = CliRunner().invoke(cli, ["plan", *map(str, asked)])
    assert shown.output.splitlines()[-1] == f"With it {run_cost(row, steps=2000).said()}."
    with pytest.raises(PlanError, match="--steps 0 cannot be used"):
        plan(**{**ASKED, "steps": 0})
